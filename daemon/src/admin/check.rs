//! The answer to `check`: what has become of one connection, seen from both ends as far as the caller may see them.

use crate::admin::caller::Caller;
use crate::admin::rail_view;
use crate::admin::stream::{seen, Rows};
use crate::core::Shared;
use crate::os::address::normal;
use lane::proto::reason::Reason;
use std::net::SocketAddr;
use underpass_admin::{Response, Row};

/// The two ends.
#[derive(Default)]
struct Found {
    local: Option<Row>,
    peer: Option<Row>,
    /// Is the other end among the rows, shown to this caller or not?
    has_peer: bool,
}

pub(super) async fn check(
    shared: &Shared,
    caller: Caller,
    (local, peer): (SocketAddr, SocketAddr),
    all: Rows,
) -> Response {
    let (local, peer) = (normal(local), normal(peer));
    let (from, to) = (local.ip(), peer.ip());
    let sees_nodes = caller.all;
    let look = move || find(&all, &caller, &local.to_string(), &peer.to_string());
    let found = tokio::task::spawn_blocking(look).await.unwrap_or_default();
    let across = (!found.has_peer).then(|| shared.borrow().between(from, to));
    let mut across = across.flatten();
    if let Some(a) = across.as_mut().filter(|_| !sees_nodes) {
        rail_view::hide_node(a);
    }
    Response::Check {
        verdict: verdict(&found),
        local: found.local,
        peer: found.peer,
        across,
    }
}

fn find(all: &Rows, caller: &Caller, local: &str, peer: &str) -> Found {
    let is = |e: &&crate::clients::view::Entry| {
        caller.sees(e.row.netns) && e.row.local == local && e.row.peer == peer
    };
    // The caller's own namespace first: other namespaces may have the same addresses.
    let mine = all.iter().filter(is);
    let Some(mine) = mine.min_by_key(|e| e.row.netns != caller.netns) else {
        return Found::default();
    };
    let other = mine.other.and_then(|o| all.get(o));
    // (Of one in another namespace there is the reason, as `ss` has it.)
    let shown = other.filter(|o| caller.sees_peer(mine, all) && caller.sees_row(o));
    Found {
        local: Some(seen(mine, all, caller)),
        peer: shown.map(|o| seen(o, all, caller)),
        has_peer: other.is_some(),
    }
}

fn verdict(found: &Found) -> String {
    let Some(l) = &found.local else {
        return "this end is not under Underpass: start it with `underpass run`".into();
    };
    match l.mode.as_str() {
        "SMCD" => return "accelerated through shared memory".into(),
        "SMCR" => return "accelerated through RDMA".into(),
        _ => {}
    }
    let say = |code: u32| match Reason::from_code(code) {
        Some(r) => format!("{} ({})", r.info().text, r.info().name),
        None => format!("reason 0x{code:08x}, unknown to this daemon"),
    };
    let here = if l.reason == 0 {
        "about to be promoted".into()
    } else {
        say(l.reason)
    };
    match (found.has_peer, l.peer_reason) {
        (false, 0) => format!("on TCP; this end: {here}; the other end is not known"),
        (true, 0) => format!("on TCP; this end: {here}"),
        (_, code) => format!("on TCP; this end: {here}; the other end: {}", say(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::caller::tests::root;
    use crate::clients::view::{link_ends, Entry, Given};
    use std::sync::Arc;

    /// Both ends of a connection between two namespaces.
    fn rows() -> Rows {
        let at = |ip: u8| SocketAddr::from(([10, 0, 0, ip], 80));
        let end = |n: u8, other: u8| {
            let row = Row {
                pid: u32::from(n),
                comm: format!("program {n}"),
                netns: u64::from(n),
                local: at(n).to_string(),
                peer: at(other).to_string(),
                reason: Reason::Young.code(),
                up: "none".into(),
                peer_pid: u32::from(other),
                peer_comm: format!("program {other}"),
                lane_tx_bytes: 7,
                ..Row::default()
            };
            let mut e = Entry::untracked(row, at(n), Some(at(other)));
            e.peer_netns = u64::from(other);
            e
        };
        let mut all = vec![end(1, 2), end(2, 1)];
        link_ends(&mut all, &Given::new());
        Arc::new(all)
    }

    #[test]
    fn the_other_end_is_shown_to_those_who_see_it() {
        let all = rows();
        let ask = |caller: &Caller| find(&all, caller, &all[0].row.local, &all[0].row.peer);
        let f = ask(&root());
        assert_eq!(f.peer.as_ref().map(|p| p.pid), Some(2));
        let of = |netns| Caller {
            all: false,
            netns,
            ..root()
        };
        let f = ask(&of(1));
        let local = f.local.as_ref().unwrap();
        assert!(f.peer.is_none() && f.has_peer);
        assert_eq!((local.peer_pid, local.peer_comm.as_str()), (0, ""));
        assert_eq!(local.peer_reason, Reason::Young.code(), "as in `ss`");
        assert!(verdict(&f).contains("the other end: "), "{}", verdict(&f));
        assert!(ask(&of(2)).local.is_none());
    }
}
