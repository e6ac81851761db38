//! `underpass capture`: who may see the bytes of which connection, and the thread that reads along.
//!
//! Each capture has a thread of its own, which also writes to the tool. Neither the core nor the data plane waits for
//! it; the core is asked now and then which lane the connection has. A tool that does not read loses bytes, and after a
//! while its capture.

mod reader;

use self::reader::{Answer, Reader};
use crate::admin::caller::Caller;
use crate::clients::client::Client;
use crate::clients::view::Entry;
use crate::core::captured::{Seat, Watched};
use crate::core::Shared;
use crate::os::address::normal;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use underpass_admin::{proc, Response, Target};

/// Lanes within the node go on without a daemon, and the next one is not given their memory.
const INHERITED: &str =
    "that lane is older than this daemon, which has no part in it; new connections can be captured";

/// A capture that may begin.
pub(super) struct Begun {
    caller: Caller,
    /// The end that was named, and the other one if it is on this node.
    ends: [Option<Watched>; 2],
    /// Did the end that was named call `connect`?
    client: bool,
    answer: Response,
    seat: Seat,
}

/// Looks the connection up, and whether the caller may see its bytes: root on the node may; others if all ends that are
/// on this node are theirs. (Of a connection to another node, that is the one whose process has these bytes anyway.)
pub(super) async fn begin(
    shared: &Shared,
    caller: Caller,
    target: &Target,
    all: &[Entry],
) -> Result<Begun, String> {
    let end = named(&caller, target, all)?;
    let mut here = vec![end];
    if !is_remote(shared, end) {
        let other = end.other.and_then(|o| all.get(o)).filter(|o| o.tracked());
        let missing = "the other end of that connection is not under Underpass on this node";
        here.push(other.ok_or(missing)?);
    }
    let refused = match here.len() {
        1 => "that connection must be yours if you want to see its bytes",
        _ => "both ends of a connection must be yours if you want to see its bytes",
    };
    let mut ends = [None, None];
    for (of, e) in ends.iter_mut().zip(&here) {
        let core = shared.borrow();
        let uid = core.clients.get(&e.client).map(|c| c.uid);
        let watched = core.watched((e.client, e.conn, e.gen));
        let (Some(uid), Some(watched)) = (uid, watched) else {
            return Err("a program of that connection has no connection to this daemon".into());
        };
        if !caller.may_act(uid, e.row.netns) {
            return Err(refused.into());
        }
        *of = Some(watched);
    }
    if let [Some(first), second @ Some(_)] = &ends {
        let core = shared.borrow();
        let known = core.captured(first, second.as_ref(), &mut None, |_| true);
        if end.row.up != "none" && known.is_none() {
            return Err(INHERITED.into());
        }
    }
    let pids: HashSet<u32> = here.iter().flat_map(|e| e.row.pids.clone()).collect();
    let uid = caller.uid;
    let asked = move || pids.into_iter().all(|p| may_trace(uid, p));
    let root = caller.all || caller.root;
    if !root && !tokio::task::spawn_blocking(asked).await.unwrap_or(false) {
        return Err(refused.into());
    }
    let seat = shared.borrow().captures.take(caller.uid);
    Ok(Begun {
        ends,
        client: end.row.role == "client",
        answer: Response::Capture {
            local: end.row.local.clone(),
            peer: end.row.peer.clone(),
        },
        seat: seat.ok_or("there are too many captures already")?,
        caller,
    })
}

/// Is its other end on another node?
fn is_remote(shared: &Shared, end: &Entry) -> bool {
    let across = |(a, b): (SocketAddr, SocketAddr)| shared.borrow().between(a.ip(), b.ip());
    end.row.remote || end.other.is_none() && end.addresses().and_then(across).is_some()
}

/// The one end that is meant. Where both ends of a connection fit, the first of the two addresses says which.
fn named<'a>(caller: &Caller, target: &Target, all: &'a [Entry]) -> Result<&'a Entry, String> {
    let wanted: Vec<&Entry> = match target {
        Target::Inode(i) => all.iter().filter(|e| e.row.inode == *i).collect(),
        Target::Pair { local, peer } => {
            let (Some(a), Some(b)) = (address(local), address(peer)) else {
                return Err("an address is not `ip:port`".into());
            };
            let is = |e: &&Entry, a: SocketAddr, b: SocketAddr| e.addresses() == Some((a, b));
            let (this, mirrored) = all
                .iter()
                .filter(|e| is(e, a, b) || is(e, b, a))
                .partition::<Vec<_>, _>(|e| is(e, a, b));
            if this.is_empty() {
                mirrored
            } else {
                this
            }
        }
        Target::All | Target::Pid(_) => return Err("name one connection".into()),
    };
    let seen = |e: &&Entry| e.tracked() && e.row.state == "ACTIVE" && caller.sees_row(e);
    let mut wanted: Vec<&Entry> = wanted.into_iter().filter(seen).collect();
    // Other namespaces may have the same addresses.
    if wanted.iter().any(|e| e.row.netns == caller.netns) {
        wanted.retain(|e| e.row.netns == caller.netns);
    }
    match wanted[..] {
        [] => Err("no connection matches (see `underpass ss`)".into()),
        [one] => Ok(one),
        _ => Err("several connections match: name one by its inode (see `underpass ss -W`)".into()),
    }
}

fn address(s: &str) -> Option<SocketAddr> {
    s.parse().ok().map(normal)
}

/// Does the kernel let this user see the memory of a process of his? Not of one that has changed its rights, or wants none
/// to see it: then this is root's. (`/proc/PID` itself stays the user's.)
fn may_trace(uid: u32, pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}/mem")).is_ok_and(|m| m.uid() == uid)
}

/// The same, of processes that may have ended meanwhile: those hold nothing any more.
fn may_still_trace(uid: u32, pids: &[u32]) -> bool {
    let lives = |pid: u32| proc::start_time(pid).is_some();
    pids.iter().all(|p| may_trace(uid, *p) || !lives(*p))
}

/// May the caller see the bytes of this connection now? Another process may hold it than when the capture began, or one of
/// those may have other rights.
async fn may_still(shared: &Shared, caller: &Caller, ends: &[Option<Watched>; 2]) -> bool {
    let mut pids = Vec::new();
    for end in ends.iter().flatten() {
        let core = shared.borrow();
        let holders = core.holders_of(end);
        if !holders.iter().all(|c| caller.may_act(c.uid, c.netns)) {
            return false;
        }
        pids.extend(holders.iter().map(|c| c.proc_id.pid));
    }
    let (uid, root) = (caller.uid, caller.all || caller.root);
    let asked = move || may_still_trace(uid, &pids);
    root || tokio::task::spawn_blocking(asked).await.unwrap_or(false)
}

impl Begun {
    /// Hands the connection to the thread, and answers its questions until it ends.
    pub(super) async fn serve(self, shared: Shared, stream: UnixStream) -> std::io::Result<()> {
        let _seat = self.seat;
        let (ask, mut asked) = mpsc::channel::<()>(1);
        let (answer, answers) = std::sync::mpsc::channel();
        let stream = stream.into_std()?;
        let mut first = serde_json::to_vec(&self.answer)?;
        first.push(b'\n');
        let reader = Reader::new(
            self.ends.clone(),
            self.client,
            (stream, first),
            (ask, answers),
        );
        std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || reader.run())?;
        let caller = self.caller;
        let may = |c: &Client| caller.may_act(c.uid, c.netns);
        let [Some(first), second] = &self.ends else {
            return Ok(());
        };
        let mut told = None;
        while asked.recv().await.is_some() {
            if !may_still(&shared, &caller, &self.ends).await {
                // (The thread sees that nobody answers it any more.)
                break;
            }
            let core = shared.borrow();
            let lane = core.captured(first, second.as_ref(), &mut told, may);
            let has_process = |e: &Option<Watched>| e.as_ref().is_none_or(|e| core.has_family(e));
            let alive = self.ends.each_ref().map(has_process);
            if answer.send(Answer { lane, alive }).is_err() {
                break;
            }
        }
        Ok(())
    }
}
