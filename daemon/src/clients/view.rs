//! What `underpass ss` shows: the rows of all family tables, each with what is known of its other end. Runs on the
//! blocking pool with handles from the core; reads tables and `/proc`, changes nothing.

use crate::clients::family::Family;
use crate::clients::ids::ClientId;
use crate::os::address::normal;
use lane::family::{flag, state, Endpoint, View};
use lane::proto::reason::Reason;
use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, SocketAddrV6};
use std::sync::Arc;
use underpass_admin::proc;
use underpass_admin::Row;

/// A process of a family, as the core knows it.
#[derive(Clone, Debug)]
pub struct Holder {
    pub client: ClientId,
    pub pid: u32,
    pub own_pid: u32,
    pub netns: u64,
    pub comm: String,
}

/// A family with its processes that are connected now, and others that were found in `/proc`, with
/// their start times.
pub struct Snapshot {
    pub family: Arc<Family>,
    pub holders: Vec<Holder>,
    pub recovered: Vec<(u64, Holder)>,
}

/// One row, and where it came from.
#[derive(Clone, Debug)]
pub struct Entry {
    pub row: Row,
    pub client: ClientId,
    pub conn: u32,
    pub gen: u32,
    /// Index of the other end's row, if that is among them.
    pub other: Option<usize>,
    /// Network namespace of the process at the other end, if that is known.
    pub peer_netns: u64,
    /// The other end is on this node, and is no other daemon's to tell of.
    pub peer_here: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    lane: Option<Side>,
}

/// `Entry::conn` of a socket that is in no table.
pub(crate) const UNTRACKED: u32 = u32::MAX;

impl Entry {
    /// Is it in a table, so that its shim can be told something about it?
    pub fn tracked(&self) -> bool {
        self.conn != UNTRACKED
    }

    /// A connection that its shim can be told something about.
    pub(crate) fn is_steerable(&self) -> bool {
        self.row.state != "LISTEN" && self.tracked()
    }

    /// A socket that is in no table.
    pub fn untracked(row: Row, local: SocketAddr, peer: Option<SocketAddr>) -> Entry {
        Entry {
            row,
            client: ClientId::NOBODY,
            conn: UNTRACKED,
            gen: 0,
            other: None,
            peer_netns: 0,
            peer_here: false,
            local: Some(local),
            peer,
            lane: None,
        }
    }

    /// Local and peer address of a connection.
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.local?, self.peer?))
    }
}

/// All rows.
pub(crate) fn entries(families: &[Snapshot]) -> Vec<Entry> {
    let mut all = Vec::new();
    for f in families {
        let lives = |r: &&(u64, Holder)| proc::start_time(r.1.pid) == Some(r.0);
        let recovered = f.recovered.iter().filter(lives).map(|r| &r.1);
        // A family without a connected process shows only sockets that its processes hold: nobody has confirmed
        // its table.
        let held = f.holders.is_empty().then(|| {
            let all = recovered.clone().flat_map(|h| proc::sockets(h.pid));
            all.collect::<HashSet<u64>>()
        });
        // The namespace may have changed since the hello; an unreadable one stays as it was.
        let holders: Vec<Holder> = f
            .holders
            .iter()
            .chain(recovered)
            .map(|h| Holder {
                netns: proc::netns(h.pid).unwrap_or(h.netns),
                comm: proc::comm(h.pid).unwrap_or_else(|| h.comm.clone()),
                ..h.clone()
            })
            .collect();
        for v in f.family.views() {
            // Without the flag, the entry is newer than the shim's first look at its socket.
            let shown = held.as_ref().is_none_or(|s| s.contains(&v.inode));
            if v.flags & flag::NAMED != 0 && shown {
                if let Some(h) = holder_of(&holders, &v) {
                    all.push(entry(&v, h));
                }
            }
        }
    }
    // (Whom this is about registers, and is believed only then.)
    link_ends(&mut all, &Given::new());
    all
}

/// The process that a row is shown under: one that holds the connection, else any of the family.
/// `None` where nobody holds it any more: a child that ended without closing leaves its entry.
pub(crate) fn holder_of<'a>(holders: &'a [Holder], v: &View) -> Option<&'a Holder> {
    let here = holders.iter().find(|h| v.holders.contains(&h.own_pid));
    here.or_else(|| {
        let any = holders.first()?;
        // Numbers in the table are those of the family's pid namespace: ours only if they agree.
        let ours = any.pid == any.own_pid && !v.holders.is_empty();
        let lives = |p: &u32| proc::start_time(*p).is_some();
        (!ours || v.holders.iter().any(lives)).then_some(any)
    })
}

pub(crate) fn entry(v: &View, h: &Holder) -> Entry {
    let attached = v.flags & flag::LANE != 0;
    let up = match (attached && v.tx_up, attached && v.rx_up) {
        (true, true) => "both",
        (true, false) => "tx",
        (false, true) => "rx",
        (false, false) => "none",
    };
    let (local, peer) = (address(&v.local), address(&v.peer));
    let listening = v.state == state::LISTEN;
    let row = Row {
        state: match v.state {
            state::LISTEN => "LISTEN",
            state::OPEN => "ACTIVE",
            _ => "INIT",
        }
        .into(),
        uid: v.uid,
        inode: v.inode,
        local: local.map(|a| a.to_string()).unwrap_or_default(),
        peer: peer
            .filter(|_| !listening)
            .map(|a| a.to_string())
            .unwrap_or_default(),
        intf: "0000".into(),
        mode: String::new(),
        reason: v.reason,
        peer_reason: v.peer_reason,
        up: up.into(),
        remote: attached && v.flags & flag::REMOTE != 0,
        rail: None,
        pid: h.pid,
        comm: h.comm.clone(),
        pids: vec![h.pid],
        peer_pid: 0,
        peer_comm: String::new(),
        netns: h.netns,
        at: None,
        role: if v.flags & flag::CLIENT != 0 {
            "client"
        } else {
            "server"
        }
        .into(),
        link: if attached { v.group } else { 0 },
        lane: if attached { v.lane } else { 0 },
        tx_epoch: v.tx_epoch.get(),
        rx_epoch: v.rx_epoch.get(),
        tx_ring_bytes: if attached { ring_bytes(v.ring_log2) } else { 0 },
        lane_tx_bytes: v.lane_tx,
        lane_rx_bytes: v.lane_rx,
        tcp_tx_bytes: v.tcp_tx,
        tcp_rx_bytes: v.tcp_rx,
        left_out: 0,
    };
    Entry {
        row,
        client: h.client,
        conn: v.index,
        gen: v.gen,
        other: None,
        peer_netns: 0,
        peer_here: false,
        local,
        peer: peer.filter(|_| !listening),
        // The other end of a remote lane is not on the same link group.
        lane: (attached && v.flags & flag::REMOTE == 0)
            .then(|| Some((v.group, v.lane, u8::try_from(v.side).ok()?)))
            .flatten(),
    }
}

/// The table may say anything: only sizes that a ring can have are shown.
fn ring_bytes(log2: u32) -> u64 {
    use lane::abi::{RING_LOG2_MAX, RING_LOG2_MIN};
    match log2 {
        RING_LOG2_MIN..=RING_LOG2_MAX => 1 << log2,
        _ => 0,
    }
}

pub(crate) fn address(e: &Endpoint) -> Option<SocketAddr> {
    (e.family != 0).then(|| normal(SocketAddr::V6(SocketAddrV6::new(e.ip, e.port, 0, 0))))
}

/// A lane's slot and side.
type Side = (u64, u32, u8);

/// What the daemon has given to whom: by client, connection and generation.
pub(crate) type Given = HashMap<(ClientId, u32, u32), Side>;

/// The rows that are at each side of each lane. A table may name any lane. So a side is that of whom the daemon gave it to;
/// only if it is no connected client's own row (it may be shown under another process of its family, or be older than this
/// daemon), it is that of who says so, if nobody else does.
fn by_lane(all: &[Entry], given: &Given) -> HashMap<Side, usize> {
    let mut own = HashMap::new();
    let mut said: HashMap<Side, Option<usize>> = HashMap::new();
    for (i, e) in all.iter().enumerate() {
        let Some(l) = e.lane else { continue };
        match given.get(&(e.client, e.conn, e.gen)) {
            Some(g) if *g == l => drop(own.insert(l, i)),
            Some(_) => {}
            None => {
                let others = |v: &mut Option<usize>| *v = None;
                said.entry(l).and_modify(others).or_insert(Some(i));
            }
        }
    }
    for (l, i) in said {
        if let Some(i) = i {
            own.entry(l).or_insert(i);
        }
    }
    own
}

/// Finds each row's other end, and from it the peer's reason and the mode.
pub(crate) fn link_ends(all: &mut [Entry], given: &Given) {
    let lanes = by_lane(all, given);
    let mut by_addresses = HashMap::new();
    let mut remote: HashMap<_, Option<usize>> = HashMap::new();
    for (i, e) in all.iter().enumerate() {
        if let (Some(a), Some(b)) = (e.local, e.peer) {
            by_addresses.insert((e.row.netns, a, b), i);
            // The end in another namespace, if there is only one.
            remote
                .entry((a, b))
                .and_modify(|v| *v = None)
                .or_insert(Some(i));
        }
    }
    let find = |(i, e): (usize, &Entry)| {
        let at = e.lane.filter(|l| lanes.get(l) == Some(&i));
        let lane = at.and_then(|(group, lane, side)| lanes.get(&(group, lane, 1 ^ side)).copied());
        let (a, b) = (e.local?, e.peer?);
        lane.or_else(|| by_addresses.get(&(e.row.netns, b, a)).copied())
            .or_else(|| remote.get(&(b, a)).copied().flatten())
    };
    let found: Vec<Option<usize>> = all.iter().enumerate().map(find).collect();
    for (i, other) in found.into_iter().enumerate() {
        all[i].other = other.filter(|o| *o != i);
    }
    for i in 0..all.len() {
        // The other end has left the lane, and this one does not know it yet, because its program makes no call.
        let left = |o: usize| all[o].lane.is_none() && !all[o].row.remote;
        if all[i].lane.is_some() && all[i].other.is_some_and(left) {
            let e = &mut all[i];
            e.lane = None;
            e.row.up = "none".into();
            if e.row.reason == 0 {
                e.row.reason = Reason::Idle.code();
            }
        }
    }
    for i in 0..all.len() {
        let row = &all[i].row;
        all[i].row.peer_reason = match all[i].other {
            Some(o) => all[o].row.reason,
            // A lane to another node is attached here only when that node has agreed to it.
            None if row.remote && row.up == "none" && row.reason == Reason::Ready.code() => {
                row.reason
            }
            None => row.peer_reason,
        };
    }
    for e in all {
        set_mode(&mut e.row);
    }
}

/// The `Mode` column.
pub(crate) fn set_mode(row: &mut Row) {
    row.mode = if row.up == "none" {
        format!("TCP 0x{:08x}/0x{:08x}", row.reason, row.peer_reason)
    } else if row.remote {
        "SMCR".into()
    } else {
        "SMCD".into()
    };
}

/// Those of these sockets that are held by processes without a shim only, as far as we may look.
pub(crate) fn unmanaged(inodes: &HashSet<u64>) -> HashSet<u64> {
    let mut shims: HashMap<u32, bool> = HashMap::new();
    let mut shim = |p: &u32| *shims.entry(*p).or_insert_with(|| may_have_shim(*p));
    let strange = |(i, pids): (u64, Vec<u32>)| (!pids.iter().any(&mut shim)).then_some(i);
    holders_of(inodes).into_iter().filter_map(strange).collect()
}

/// Which processes hold these sockets, as far as we may look.
pub(crate) fn holders_of(inodes: &HashSet<u64>) -> HashMap<u64, Vec<u32>> {
    let mut all: HashMap<u64, Vec<u32>> = HashMap::new();
    for pid in proc::all() {
        for socket in proc::sockets(pid) {
            if inodes.contains(&socket) {
                all.entry(socket).or_default().push(pid);
            }
        }
    }
    all
}

/// Is the shim's library mapped in this process? If we cannot tell, it may be.
pub(crate) fn may_have_shim(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_or(true, |m| m.contains("libunderpass"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attached_lane_to_another_node_has_two_ready_ends() {
        let holder = Holder {
            client: ClientId(1),
            pid: 7,
            own_pid: 7,
            netns: 1,
            comm: "a".into(),
        };
        let shown = |flags, reason: Reason| {
            let view = View {
                state: state::OPEN,
                flags,
                reason: reason.code(),
                ..View::default()
            };
            let mut all = [entry(&view, &holder)];
            link_ends(&mut all, &Given::new());
            let [e] = all;
            Reason::from_code(e.row.peer_reason)
        };
        let remote = flag::LANE | flag::REMOTE;
        assert_eq!(shown(remote, Reason::Ready), Some(Reason::Ready));
        // On this node, it says so itself; and with another reason, nothing is known of it.
        assert_eq!(shown(flag::LANE, Reason::Ready), Some(Reason::None));
        assert_eq!(shown(remote, Reason::Shared), Some(Reason::None));
        assert_eq!(shown(flag::REMOTE, Reason::Ready), Some(Reason::None));
    }

    /// Who writes the words of another's lane into his table is not taken for its end.
    #[test]
    fn a_lane_is_whose_it_was_given() {
        let end = |client: u64, side: u32, port: u16| {
            let holder = Holder {
                client: ClientId(client),
                pid: 7,
                own_pid: 7,
                netns: client,
                comm: "a".into(),
            };
            let view = View {
                state: state::OPEN,
                flags: flag::LANE,
                group: 5,
                lane: 3,
                side,
                ..View::default()
            };
            // Addresses that are translated on the way, so that only the lane links them.
            let mut e = entry(&view, &holder);
            e.local = Some(SocketAddr::from(([10, 0, 0, side as u8], port)));
            e.peer = Some(SocketAddr::from(([10, 1, 1, 1], port)));
            e
        };
        let linked = |ends: &[(u64, u32)], given: &Given| {
            let all = ends.iter().zip(1..);
            let mut all: Vec<Entry> = all.map(|(e, n)| end(e.0, e.1, n)).collect();
            link_ends(&mut all, given);
            all.iter().map(|e| e.other).collect::<Vec<_>>()
        };
        let given = Given::from([
            ((ClientId(1), 0, 0), (5, 3, 0)),
            ((ClientId(2), 0, 0), (5, 3, 1)),
        ]);
        let forged = [(1, 0), (2, 1), (3, 0), (4, 1)];
        assert_eq!(linked(&forged, &given), [Some(1), Some(0), None, None]);
        // Of lanes that are older than this daemon, what is said counts if it is not said twice.
        let none = Given::new();
        assert_eq!(linked(&forged[..2], &none), [Some(1), Some(0)]);
        assert_eq!(linked(&forged[..3], &none), [None; 3]);
    }
}
