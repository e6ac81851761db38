//! The rows of `ss`: every TCP socket that a process under the shim holds, joined with what the family tables say
//! of it. Existence, addresses and state of a socket are the kernel's; the table only adds to them.

use super::ends::{self, Unnamed};
use super::kernel::Kernel;
use super::{Carrier, Census};
use crate::clients::family::Family;
use crate::clients::ids::ClientId;
use crate::clients::view::{self, Entry, Given, Holder, Snapshot};
use crate::os::tcp;
use lane::family::{flag, state, View, CONNS};
use lane::num;
use lane::proto::reason::Reason;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use underpass_admin::proc;
use underpass_admin::Row;

/// If a retry has been due for this long, the program has made no call since: shims act only in calls.
const DUE_MS: u64 = 1000;
/// A new socket enters the table a moment after it is made, and leaves it a moment before it is closed. So a
/// socket that is in no table is looked at again after these times before it is shown as untracked. (A thread may
/// be preempted in that moment.)
const CONFIRM_MS: [u64; 5] = [2, 4, 8, 16, 32];

/// Rows that one tenant may have: each takes a kilobyte, and a process may have a million sockets.
const ROWS_MAX: usize = 65_536;

/// The sockets that a process holds.
#[derive(Default)]
struct Sockets {
    by_fd: HashMap<u32, u64>,
    by_inode: HashMap<u64, Vec<u32>>,
}

impl Sockets {
    fn new(all: Vec<(u32, u64)>) -> Sockets {
        let mut by_inode: HashMap<u64, Vec<u32>> = HashMap::new();
        for (fd, inode) in &all {
            by_inode.entry(*inode).or_default().push(*fd);
        }
        Sockets {
            by_fd: all.into_iter().collect(),
            by_inode,
        }
    }
}

/// A process whose sockets are shown.
struct Member {
    holder: Holder,
    connected: bool,
    mapped: bool,
    /// Why the shim is inactive in this process, if it is.
    out: Option<Reason>,
    /// `None`: its descriptors could not be read.
    sockets: Option<Sockets>,
    tenant: String,
}

impl Member {
    fn new(holder: Holder, connected: bool, carrier: Option<Carrier>) -> Self {
        let out = carrier.as_ref().and_then(|c| c.out);
        let mapped = carrier.as_ref().is_some_and(|c| c.mapped);
        let (tenant, sockets) = match carrier {
            Some(c) => (c.tenant, Some(Sockets::new(c.sockets))),
            None => (super::tenant(holder.pid), None),
        };
        Member {
            // The namespace may have changed since the hello; an unreadable one stays as it was.
            holder: Holder {
                netns: proc::netns(holder.pid).unwrap_or(holder.netns),
                comm: proc::comm(holder.pid).unwrap_or(holder.comm),
                ..holder
            },
            connected,
            mapped,
            out,
            sockets,
            tenant,
        }
    }

    /// Inodes of its sockets.
    fn inodes(&self) -> impl Iterator<Item = u64> + '_ {
        let sockets = self.sockets.iter();
        sockets.flat_map(|s| s.by_inode.keys().copied())
    }

    /// The descriptors of this socket.
    fn fds(&self, inode: u64) -> &[u32] {
        let fds = self.sockets.as_ref().and_then(|s| s.by_inode.get(&inode));
        fds.map_or(&[], Vec::as_slice)
    }

    fn holds(&self, inode: u64) -> bool {
        !self.fds(inode).is_empty()
    }

    /// Does it hold this socket now? Reads `/proc` again.
    fn still_holds(&self, inode: u64) -> bool {
        let mut fds = self.fds(inode).iter();
        fds.any(|fd| proc::socket_at(self.holder.pid, *fd) == Some(inode))
    }
}

/// A family with the processes that use its table; or a process that has no table.
struct Kin {
    family: Option<Arc<Family>>,
    members: Vec<Member>,
}

/// Makes all rows. `waiting`: registrations that wait for their other end. `given`: the lanes that this daemon has given.
pub(crate) fn rows(
    families: Vec<Snapshot>,
    census: Census,
    (waiting, given): (&HashSet<(ClientId, u32, u32)>, &Given),
    alone: bool,
) -> Unnamed {
    let Census {
        carriers,
        unmanaged,
    } = census;
    let kins = kins(families, carriers);
    let members = || kins.iter().flat_map(|k| &k.members);
    let namespaces = members().map(|m| (m.holder.netns, m.holder.pid)).collect();
    let kernel = Kernel::read(&namespaces);
    let mut held: BTreeMap<u64, Vec<&Member>> = BTreeMap::new();
    for m in members() {
        for i in m.inodes() {
            held.entry(i).or_default().push(m);
        }
    }
    let mut found = Found::new(ROWS_MAX);
    let mut full = HashSet::new();
    for k in &kins {
        let room = k.tracked(&kernel, waiting, &mut found);
        if !room {
            full.extend(k.members.iter().map(|m| m.holder.pid));
        }
    }
    for wait in CONFIRM_MS {
        let late: Vec<&Kin> = kins.iter().filter(|k| k.misses(&kernel, &found)).collect();
        if late.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(wait));
        for k in late {
            k.tracked(&kernel, waiting, &mut found);
        }
    }
    for (inode, members) in &held {
        if found.shown.contains_key(inode) {
            continue;
        }
        let member = members.iter().find(|m| m.mapped && m.still_holds(*inode));
        if let (Some(s), Some(m)) = (kernel.socket(*inode), member) {
            found.add(&m.tenant, *inode, || {
                untracked(s, m, full.contains(&m.holder.pid))
            });
        }
    }
    let mut all = found.all;
    for e in &mut all {
        let pids = held.get(&e.row.inode).into_iter().flatten();
        e.row.pids = pids.map(|m| m.holder.pid).collect();
        if !e.row.pids.contains(&e.row.pid) {
            e.row.pids.insert(0, e.row.pid);
        }
    }
    view::link_ends(&mut all, given);
    let ours = members().map(|m| m.holder.pid).collect();
    let lost = ends::lost(&all, &kernel);
    Unnamed {
        all,
        kernel,
        ours,
        unmanaged,
        alone,
        lost,
    }
}

/// The rows so far.
struct Found {
    all: Vec<Entry>,
    /// Where each socket's row is. `None`: its tenant has as many as it may have.
    shown: HashMap<u64, Option<usize>>,
    /// How many rows each tenant has, and where the last one is.
    tenants: HashMap<String, (usize, usize)>,
    most: usize,
}

impl Found {
    fn new(most: usize) -> Found {
        Found {
            all: Vec::new(),
            shown: HashMap::new(),
            tenants: HashMap::new(),
            most,
        }
    }

    /// Adds the row of a socket that has none, or counts it in the last row of its tenant.
    fn add(&mut self, tenant: &str, inode: u64, row: impl FnOnce() -> Entry) {
        if !self.tenants.contains_key(tenant) {
            self.tenants.insert(tenant.to_owned(), (0, 0));
        }
        let Some((rows, last)) = self.tenants.get_mut(tenant) else {
            return;
        };
        if *rows >= self.most {
            self.all[*last].row.left_out += 1;
            self.shown.insert(inode, None);
            return;
        }
        (*rows, *last) = (*rows + 1, self.all.len());
        self.shown.insert(inode, Some(self.all.len()));
        self.all.push(row());
    }
}

/// Every process with its family.
fn kins(families: Vec<Snapshot>, carriers: Vec<Carrier>) -> Vec<Kin> {
    let mut carriers: HashMap<u32, Carrier> = carriers.into_iter().map(|c| (c.id.pid, c)).collect();
    let mut kins = Vec::new();
    let mut by_ident = HashMap::new();
    for f in families {
        let mut members = Vec::new();
        for h in f.holders {
            let c = carriers.remove(&h.pid);
            members.push(Member::new(h, true, c));
        }
        for (start, h) in f.recovered {
            if proc::start_time(h.pid) == Some(start) {
                let c = carriers.remove(&h.pid);
                members.push(Member::new(h, false, c));
            }
        }
        by_ident.insert(f.family.ident, kins.len());
        kins.push(Kin {
            family: Some(f.family),
            members,
        });
    }
    let mut rest: Vec<Carrier> = carriers.into_values().collect();
    rest.sort_by_key(|c| c.id.pid);
    for mut c in rest {
        let holder = Holder {
            client: ClientId::NOBODY,
            pid: c.id.pid,
            own_pid: c.own_pid,
            netns: c.netns,
            comm: c.comm.clone(),
        };
        let table = c.table.take();
        let known = table.as_ref().and_then(|t| by_ident.get(&t.0)).copied();
        let m = Member::new(holder, false, Some(c));
        match (known, table) {
            (Some(k), _) => kins[k].members.push(m),
            (None, table) => {
                let family = table.map(|(ident, fd)| Arc::new(Family::new(ident, fd)));
                by_ident.extend(family.iter().map(|f| (f.ident, kins.len())));
                kins.push(Kin {
                    family,
                    members: vec![m],
                });
            }
        }
    }
    kins
}

impl Kin {
    /// Does the family have a table, and a member hold a TCP socket that is not shown?
    fn misses(&self, kernel: &Kernel, found: &Found) -> bool {
        let missed = |m: &Member, i| {
            !found.shown.contains_key(&i) && kernel.socket(i).is_some() && m.still_holds(i)
        };
        let mut mapped = self.members.iter().filter(|m| m.mapped);
        self.family.is_some() && mapped.any(|m| m.inodes().any(|i| missed(m, i)))
    }

    /// Adds the rows of the table's entries. False: the table is full.
    fn tracked(
        &self,
        kernel: &Kernel,
        waiting: &HashSet<(ClientId, u32, u32)>,
        found: &mut Found,
    ) -> bool {
        let Some(family) = &self.family else {
            return true;
        };
        let mut views = family.views();
        let room = views.len() < CONNS;
        // Entries whose inode the shim has noted come before those found by their descriptor's number.
        views.sort_by_key(|v| v.flags & flag::NAMED == 0);
        let now_ms = now_ms();
        for v in &mut views {
            let Some(m) = self.name(v, kernel) else {
                continue;
            };
            let tcp = kernel.socket(v.inode);
            // Of two entries for one socket, that of a process that passed it on and kept a copy (`Left`) gives
            // way to that of the process that received it.
            let left = Reason::Left.code();
            let at = found.shown.get(&v.inode).copied();
            let gives_way = |at: Option<usize>| {
                at.is_some_and(|at| found.all[at].row.reason == left && v.reason != left)
            };
            if at.is_none_or(gives_way) {
                let waits = waiting.contains(&(m.holder.client, v.index, v.gen));
                v.reason = reason(v, m.connected, waits, tcp, now_ms);
                let mut e = view::entry(v, &m.holder);
                place(&mut e, tcp, m.sockets.is_some(), kernel);
                match at.flatten() {
                    Some(at) => {
                        e.row.left_out = found.all[at].row.left_out;
                        found.all[at] = e;
                    }
                    None => found.add(&m.tenant, v.inode, || e),
                }
            }
        }
        room
    }

    /// Finds the socket that an entry is about, and the process to show it under. `None`: nobody holds it.
    fn name(&self, v: &mut View, kernel: &Kernel) -> Option<&Member> {
        let own = |m: &&Member| v.holders.contains(&m.holder.own_pid);
        if v.flags & flag::NAMED == 0 {
            let fd = v.fd.checked_sub(1)?;
            let at = |m: &Member| m.sockets.as_ref()?.by_fd.get(&fd).copied();
            let mut found = self.members.iter().filter(own).filter_map(at);
            v.inode = found.find(|i| kernel.socket(*i).is_some())?;
        }
        let holds = |m: &&Member| m.holds(v.inode);
        let best = |m: &&Member| (own(m), m.connected);
        let holder = self.members.iter().filter(holds).max_by_key(best);
        if holder.is_some() || self.members.iter().all(|m| m.sockets.is_some()) {
            return holder;
        }
        // For members whose descriptors cannot be read only the table tells what they hold. It is trusted only if
        // a connected process uses it, and of sockets that are there: a process can see to it that the time is too short
        // for its descriptors, and write what it likes into the table.
        let vouched = self.members.iter().any(|m| m.connected);
        let hidden =
            |m: &&Member| vouched && m.sockets.is_none() && kernel.has(m.holder.netns, v.inode);
        let mut hidden = self.members.iter().filter(hidden);
        hidden.clone().find(own).or_else(|| {
            let known: Vec<Holder> = hidden.clone().map(|m| m.holder.clone()).collect();
            let pid = view::holder_of(&known, v)?.pid;
            hidden.find(|m| m.holder.pid == pid)
        })
    }
}

/// Sets state and addresses as the kernel has them. `looked`: the holder's descriptors were read.
fn place(e: &mut Entry, tcp: Option<&tcp::Socket>, looked: bool, kernel: &Kernel) {
    let Some(s) = tcp else {
        // The addresses are those of the table only, and link it to no other row.
        if kernel.has_rows(e.row.netns) {
            (e.local, e.peer) = (None, None);
        }
        // Held, but in no table of the kernel: reset, or not connected. (With a lane it must be connected; then it
        // is in a namespace that was not read.)
        if looked && e.row.state != "INIT" && e.row.up == "none" {
            let listener = e.row.state == "LISTEN";
            e.row.state = if listener { "INIT" } else { "CLOSED" }.into();
        }
        return;
    };
    let listens = s.state == tcp::state::LISTEN;
    e.row.state = if listens { "LISTEN" } else { "ACTIVE" }.into();
    e.row.uid = s.uid;
    e.local = Some(s.local);
    e.peer = (!listens).then_some(s.peer);
    e.row.local = s.local.to_string();
    e.row.peer = e.peer.map(|a| a.to_string()).unwrap_or_default();
}

/// The row of a socket that is in no family table.
fn untracked(s: &tcp::Socket, m: &Member, full: bool) -> Entry {
    let listens = s.state == tcp::state::LISTEN;
    let why = match (m.out, full) {
        (Some(why), _) => why,
        (None, true) => Reason::Table,
        (None, false) => Reason::Untracked,
    };
    let peer = (!listens).then_some(s.peer);
    let row = Row {
        state: if listens { "LISTEN" } else { "ACTIVE" }.into(),
        uid: s.uid,
        inode: s.inode,
        local: s.local.to_string(),
        peer: peer.map(|a| a.to_string()).unwrap_or_default(),
        intf: "0000".into(),
        reason: if listens { 0 } else { why.code() },
        up: "none".into(),
        pid: m.holder.pid,
        comm: m.holder.comm.clone(),
        netns: m.holder.netns,
        ..Row::default()
    };
    Entry::untracked(row, s.local, peer)
}

/// Why an entry is on TCP now. What its shim wrote last may be outdated, because a shim looks only when the
/// program makes a call.
fn reason(v: &View, connected: bool, waits: bool, tcp: Option<&tcp::Socket>, now_ms: u64) -> u32 {
    let Some(r) = Reason::from_code(v.reason).filter(|_| v.state == state::OPEN) else {
        return v.reason;
    };
    if v.flags & (flag::DISQUALIFIED | flag::HELD) != 0 {
        return v.reason;
    }
    let due = v.not_before_ms.saturating_add(DUE_MS) < now_ms;
    // A connection that two processes hold is not promoted, and neither shim writes that into the table.
    let shared = v.holders.len() as u64 + u64::from(v.forks) > 1;
    let established = tcp.is_none_or(|s| s.state == tcp::state::ESTABLISHED);
    if v.flags & flag::LANE != 0 {
        let up = v.tx_up || v.rx_up;
        return match r {
            _ if v.tx_up && v.rx_up => Reason::None,
            Reason::None if shared => Reason::Shared,
            Reason::None if !established => Reason::NotEstablished,
            Reason::None => Reason::Ready,
            Reason::RingFull if due && !up => Reason::Ready,
            r => r,
        }
        .code();
    }
    let registered = v.flags & flag::REGISTERED != 0;
    let passing = match r {
        Reason::None | Reason::Young => !established,
        // If it does not wait here any more, the answer is on its way to a program that makes no call.
        Reason::Waiting => !(registered && waits),
        Reason::NoDaemon | Reason::VersionMismatch => connected,
        Reason::Shared => due && !shared,
        // If the peer is really gone, the kernel's state says so.
        Reason::PeerGone => true,
        // If it is connected now, its next call asks again.
        Reason::TimeoutDaemon => due || connected,
        Reason::NotEstablished
        | Reason::PeerDeclined
        | Reason::RingFull
        | Reason::HeldElsewhere
        | Reason::Unseen
        | Reason::DaemonLost => due,
        _ => false,
    };
    match (passing, established) {
        (true, false) => Reason::NotEstablished.code(),
        (true, true) if shared => Reason::Shared.code(),
        (true, true) => Reason::Idle.code(),
        (false, true) if r == Reason::None && shared => Reason::Shared.code(),
        (false, _) if r == Reason::None => Reason::Idle.code(),
        (false, _) => v.reason,
    }
}

/// The clock of `Conn::not_before_ms`.
fn now_ms() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    num::natural(t.tv_sec) * 1000 + num::natural(t.tv_nsec) / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    /// A registration that is not waiting any more; its answer is not read, because the program makes no call.
    fn answered(holders: &[u32]) -> View {
        View {
            state: state::OPEN,
            flags: flag::REGISTERED,
            reason: Reason::Waiting.code(),
            holders: holders.to_vec(),
            ..View::default()
        }
    }

    fn said(v: &View) -> Option<Reason> {
        Reason::from_code(reason(v, true, false, None, 0))
    }

    #[test]
    fn what_two_processes_hold_is_not_idle() {
        assert_eq!(said(&answered(&[7])), Some(Reason::Idle));
        assert_eq!(said(&answered(&[7, 8])), Some(Reason::Shared));
        let forking = View {
            forks: 1,
            ..answered(&[7])
        };
        assert_eq!(said(&forking), Some(Reason::Shared));
        // `Young` was written by a shim that has looked at the connection, so it stays.
        let young = View {
            reason: Reason::Young.code(),
            ..answered(&[7, 8])
        };
        assert_eq!(said(&young), Some(Reason::Young));
    }

    /// Its descriptors cannot be read: of what its table says, only sockets count that its namespace has.
    #[test]
    fn a_table_makes_no_sockets() {
        let member = Member {
            holder: Holder {
                client: ClientId(1),
                pid: 7,
                own_pid: 7,
                netns: 1,
                comm: "forger".into(),
            },
            connected: true,
            mapped: true,
            out: None,
            sockets: None,
            tenant: String::new(),
        };
        let kin = Kin {
            family: None,
            members: vec![member],
        };
        let kernel = Kernel::of([(1, 10), (2, 20)]);
        let shown = |inode| {
            let mut view = View {
                flags: flag::NAMED,
                inode,
                holders: vec![7],
                ..View::default()
            };
            kin.name(&mut view, &kernel).is_some()
        };
        assert!(shown(10));
        assert!(!shown(20), "in a namespace that is not its own");
        assert!(!shown(30), "nowhere");
    }

    #[test]
    fn a_tenant_has_so_many_rows() {
        let mut found = Found::new(2);
        let none = SocketAddr::from(([0, 0, 0, 0], 0));
        let row = || Entry::untracked(Row::default(), none, None);
        for (n, tenant) in ["a", "a", "b", "a", "a", "b"].into_iter().enumerate() {
            found.add(tenant, n as u64, row);
        }
        let left_out: Vec<u64> = found.all.iter().map(|e| e.row.left_out).collect();
        assert_eq!(left_out, [0, 2, 0, 0]);
        assert_eq!(found.shown.len(), 6, "none of them is looked for again");
        let sockets = Sockets::new(vec![(3, 10), (4, 11), (5, 10)]);
        assert_eq!(sockets.by_inode[&10], [3, 5]);
    }
}
