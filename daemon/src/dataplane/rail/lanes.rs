//! One lane to another node, from the pairing of its ends to its last trace.
//!
//! Both daemons reserve a slot in a link group of theirs. The initiator of the pair names its end (`Lane`); the
//! responder connects, and names its own; the initiator connects, offers the lane to its process, and sends
//! `LaneGo`, on which the responder offers it, too. So nothing is sent on a lane that the other engine does not
//! know yet.

use super::locality::Holder;
use super::{Effect, Key, Rails};
use crate::clients::family::Family;
use crate::clients::ids::{ClientId, ConnRef};
use crate::lanes::inherited::{Counted, Inherited, Left};
use crate::lanes::sock::disconnect;
use crate::lanes::unseen::Idle;
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::msg::Msg;
use crate::nodes::peers::pairing::{Paired, Part};
use crate::os::fds::Foreign;
use crate::os::locality::Locality;
use crate::os::memfd::Ident;
use crate::os::sockopt;
use lane::abi::{Cursor, Epoch, TcpPos, EPOCHS};
use lane::family::flag;
use lane::half::TxState;
use lane::proto::reason::Reason;
use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::engine::LaneId;
use underpass_rdma::verbs::Provider;

/// A lane is made within this time, or not at all.
const MAKING_NS: u64 = 5_000_000_000;
/// Most uses of a slot, because epochs have 32 bits.
const USES: u32 = u32::MAX / EPOCHS;
/// Retry time after a lane that was not made.
pub(super) const RETRY_MS: u32 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Making,
    /// Offered to the process.
    Offered,
    /// The engine is closing it.
    Leaving,
}

/// How far the process has finished with the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ending {
    /// It sends no more bytes.
    Shut,
    /// It is gone, or has no use for the lane.
    Over,
}

/// A sending direction that the daemon has taken over.
pub(super) struct Takeover {
    pub tx: Box<TxState>,
    /// Kernel position at the last progress, and the time of that.
    pub moved: (TcpPos, u64),
    /// When the next attempt is made. Later if the last one came to nothing: TCP was full, or not everything had arrived.
    pub next: u64,
    /// Cursor of the reader at its last progress after everything had landed, and the time of that.
    pub read: (Cursor, u64),
}

pub(super) struct Lane {
    pub node: Name,
    pub who: ConnRef,
    /// The local address of the connection, and where that is on this node once that was looked up.
    pub address: IpAddr,
    pub locality: Option<Locality>,
    /// The table in which the connection stands; also after its process has ended.
    pub family: Arc<Family>,
    /// Number of the pairing, and our part in it.
    pair: u64,
    part: Part,
    cookie: u64,
    pub tag: u64,
    uses: u32,
    pub stage: Stage,
    since: u64,
    /// The link group is set up.
    ready: bool,
    pub engine: Option<LaneId>,
    /// What the peer has told: its token, uses, tag.
    theirs: Option<(u32, u32, u64)>,
    /// Our copy of the connection's socket.
    pub sock: Option<Arc<Foreign>>,
    /// The inode of that socket; 0: there is no copy, or it has no known inode.
    pub inode: u64,
    pub ending: Option<Ending>,
    /// The process is gone, but others of its family may hold the connection.
    pub orphaned: Option<Counted>,
    pub ending_since: u64,
    /// When everything has arrived, the socket is to be shut down for sending.
    pub fin: bool,
    /// The process has ended, or closed, with bytes unread: the end is a reset.
    pub reset: bool,
    /// The daemon has shut the socket down for sending.
    pub shut: bool,
    /// When to look again whether what was sent has arrived.
    pub look_at: u64,
    pub takeover: Option<Box<Takeover>>,
    /// A helper is working on the socket.
    pub working: bool,
    /// Since when the process should have gone down by itself.
    pub late_since: Option<u64>,
    /// For closes that no hook sees: head and cursor at the last look, and whether nobody held the socket at that
    /// look and at the one before.
    idle: ([Cursor; 2], [bool; 2]),
}

impl Lane {
    /// Is it with a living process that has not announced an end?
    fn is_worked(&self) -> bool {
        self.stage == Stage::Offered && self.ending.is_none() && self.orphaned.is_none()
    }

    /// Has its process not taken it yet?
    fn is_untaken(&self) -> bool {
        match self.stage {
            Stage::Making => true,
            Stage::Offered => self.sock.is_none() && self.ending.is_none(),
            Stage::Leaving => false,
        }
    }

    /// The process has finished with the lane so far.
    pub(super) fn end(&mut self, now: u64, how: Ending, fin: bool) {
        self.ending = self.ending.max(Some(how));
        self.fin |= fin;
        self.ending_since = now;
    }
}

impl<V: Provider> Rails<V> {
    /// The ends of a connection are paired, and this one has a slot; `uses`: how often it was used before.
    pub fn begin(&mut self, p: &Paired, at: Key, uses: u32, family: Arc<Family>) {
        self.notify();
        let Some(n) = self.nodes.get_mut(&p.node) else {
            return;
        };
        n.making.insert(p.pair, at);
        let lane = Lane {
            node: p.node.clone(),
            who: p.who,
            address: p.local,
            locality: None,
            family,
            pair: p.pair,
            part: p.part,
            cookie: p.cookie,
            tag: self.system.random(),
            uses,
            stage: Stage::Making,
            since: self.system.now(),
            ready: false,
            engine: None,
            theirs: None,
            sock: None,
            inode: 0,
            ending: None,
            orphaned: None,
            ending_since: 0,
            fin: false,
            reset: false,
            shut: false,
            look_at: 0,
            takeover: None,
            working: false,
            late_since: None,
            idle: Default::default(),
        };
        self.lanes.insert(at, lane);
    }

    /// There is no slot for this pair of ends.
    pub fn no_slot(&mut self, p: &Paired, reason: Reason) {
        self.say_no(&p.node.clone(), p.pair, reason);
    }

    fn say_no(&mut self, node: &Name, pair: u64, reason: Reason) {
        if let Some(n) = self.nodes.get(node) {
            let msg = Msg::NoLane {
                incarnation: n.incarnation,
                pair,
                reason: reason.code(),
            };
            self.out.push(Effect::Say(node.clone(), msg));
        }
    }

    /// The link group of this lane is set up.
    pub fn ready(&mut self, at: Key) {
        self.notify();
        if let Some(l) = self.lanes.get_mut(&at) {
            l.ready = true;
            self.go_on(at);
        }
    }

    /// The lane in the making for this pairing.
    fn making(&self, name: &Name, pair: u64) -> Option<Key> {
        self.nodes.get(name)?.making.get(&pair).copied()
    }

    pub(super) fn peer_lane(&mut self, name: &Name, pair: u64, theirs: (u32, u32, u64)) {
        let at = self.making(name, pair);
        let possible = theirs.1 < USES;
        let found = at.and_then(|k| Some((k, self.lanes.get_mut(&k)?)));
        let Some((at, l)) = found.filter(|_| possible) else {
            return self.say_no(name, pair, Reason::NotEstablished);
        };
        l.theirs.get_or_insert(theirs);
        self.go_on(at);
    }

    fn go_on(&mut self, at: Key) {
        let Some(l) = self.lanes.get_mut(&at).filter(|l| l.stage == Stage::Making) else {
            return;
        };
        let remote_group = self.groups.get(&at.0);
        let node = self.nodes.get_mut(&l.node);
        let (Some(b), Some(n), true) = (remote_group, node, l.ready) else {
            return;
        };
        if l.part == Part::Responder && l.theirs.is_none() {
            return;
        }
        let mut named = false;
        if l.engine.is_none() {
            let client = b.client.filter(|_| b.era == n.era);
            let Some(id) = client.and_then(|p| n.pair.open(p, at.1)) else {
                n.making.remove(&l.pair);
                let (node, pair) = (l.node.clone(), l.pair);
                self.say_no(&node, pair, Reason::Memory);
                return self.unmake(at, Reason::Memory, Reason::None);
            };
            n.pair.gate(id, true); // until we have the socket
            n.lanes.insert(id, at);
            l.engine = Some(id);
            named = true;
        }
        let Some(id) = l.engine else { return };
        let (incarnation, pair) = (n.incarnation, l.pair);
        if let Some((token, uses, tag)) = l.theirs {
            if l.part == Part::Responder {
                l.tag = tag;
            }
            l.uses = l.uses.max(uses);
            n.pair.connect(id, token, Epoch::base(l.uses));
        }
        let name = l.node.clone();
        if named {
            let msg = Msg::Lane {
                incarnation,
                pair,
                token: id,
                uses: l.uses,
                tag: l.tag,
            };
            self.out.push(Effect::Say(name.clone(), msg));
        }
        if l.part == Part::Initiator && l.theirs.is_some() {
            self.offer(at);
            self.out
                .push(Effect::Say(name, Msg::LaneGo { incarnation, pair }));
        }
    }

    pub(super) fn peer_go(&mut self, name: &Name, pair: u64) {
        let at = self.making(name, pair);
        let connected = |k: &Key| {
            let l = self.lanes.get(k);
            l.is_some_and(|l| l.part == Part::Responder && l.theirs.is_some() && l.engine.is_some())
        };
        if let Some(k) = at.filter(connected) {
            self.offer(k);
        }
    }

    fn offer(&mut self, at: Key) {
        let Some(l) = self.lanes.get_mut(&at) else {
            return;
        };
        if let Some(n) = self.nodes.get_mut(&l.node) {
            n.making.remove(&l.pair);
        }
        l.stage = Stage::Offered;
        self.out.push(Effect::Release {
            at,
            who: l.who,
            uses: l.uses,
            tag: l.tag,
        });
    }

    /// The core has given up a lane that it had not offered yet. (Our [`Effect::Release`] may have crossed this
    /// call.)
    pub fn undone(&mut self, who: ConnRef) {
        let mine = |(_, l): &(&Key, &Lane)| l.who == who && l.is_untaken();
        if let Some(at) = self.lanes.iter().find(mine).map(|(k, _)| *k) {
            self.undo(at, Reason::PeerGone);
        }
    }

    fn undo(&mut self, at: Key, reason: Reason) {
        self.notify();
        if let Some(l) = self.lanes.get(&at) {
            let (node, pair) = (l.node.clone(), l.pair);
            self.say_no(&node, pair, reason);
            self.forget_lane(at);
        }
    }

    /// Removes the record of a lane; the engine removes its part by itself.
    pub(super) fn forget_lane(&mut self, at: Key) {
        let Some(l) = self.lanes.remove(&at) else {
            return;
        };
        if let Some(n) = self.nodes.get_mut(&l.node) {
            n.making.retain(|_, k| *k != at);
            if let Some(id) = l.engine {
                n.lanes.remove(&id);
                n.pair.remove(id);
            }
        }
        self.leave_group(at.0);
    }

    /// Gives up lanes that take too long to make.
    pub(super) fn sweep_making(&mut self, now: u64) {
        let late = |l: &Lane| l.stage == Stage::Making && now >= l.since + MAKING_NS;
        let late: Vec<(Key, Name, u64)> = self
            .lanes
            .iter()
            .filter(|(_, l)| late(l))
            .map(|(k, l)| (*k, l.node.clone(), l.pair))
            .collect();
        for (k, node, pair) in late {
            self.say_no(&node, pair, Reason::TimeoutDaemon);
            self.unmake(k, Reason::TimeoutDaemon, Reason::None);
        }
    }

    fn offered(&mut self, from: ClientId, at: Key) -> Option<&mut Lane> {
        let l = self.lanes.get_mut(&at)?;
        (l.who.client == from && l.stage == Stage::Offered).then_some(l)
    }

    /// The ended process that had this orphaned lane, for a process of its family.
    pub fn inherited(&self, at: Key, family: Ident) -> Option<ClientId> {
        let l = self.lanes.get(&at).filter(|l| l.orphaned.is_some())?;
        (l.family.ident == family).then_some(l.who.client)
    }

    /// The process has taken the lane and gives us a copy of its socket. `false`: the socket is another
    /// connection's, or there is a copy already.
    pub fn held(&mut self, from: ClientId, holder: Holder, at: Key, sock: Foreign) -> bool {
        let Some(l) = self.offered(from, at) else {
            return true; // the message crossed the end of the lane
        };
        let cookie = sockopt::get::<u64>(sock.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE);
        if cookie.map(|c| c.0) != Ok(l.cookie) || l.sock.is_some() {
            return false;
        }
        l.inode = rustix::fs::fstat(&sock).map_or(0, |s| s.st_ino);
        l.sock = Some(Arc::new(sock));
        let (engine, node) = (l.engine, l.node.clone());
        self.look_up_locality(at, holder);
        if let (Some(id), Some(n)) = (engine, self.nodes.get_mut(&node)) {
            n.pair.gate(id, false);
        }
        self.notify();
        true
    }

    /// Does the daemon have a copy of any socket?
    pub fn has_held(&self) -> bool {
        self.lanes.values().any(|l| l.sock.is_some())
    }

    /// Ends whose process has moved nothing on the lane since the last call.
    pub fn idle_ends(&mut self) -> Vec<Idle> {
        let mut all = Vec::new();
        for (at, l) in self.lanes.iter_mut().filter(|(_, l)| l.is_worked()) {
            let areas = self.groups.get(&at.0).map(|b| b.area.areas());
            let m = areas.as_ref().and_then(|a| a.for_takeover(at.1));
            let Some(m) = m.filter(|_| l.inode != 0) else {
                continue;
            };
            let now = [m.own_head(), m.own_cursor()].map(|w| w.load(Relaxed));
            if l.idle.0 != now {
                l.idle = (now, [false; 2]);
            } else {
                l.idle.1 = [false, l.idle.1[0]];
                let (who, at, inode) = (l.who, *at, l.inode);
                all.push(Idle { who, at, inode });
            }
        }
        all
    }

    /// No process holds this end's socket. If that was so the last time, too, the daemon closes its copy, so that
    /// the kernel ends the connection.
    pub fn not_held(&mut self, i: &Idle) {
        let l = self.lanes.get_mut(&i.at);
        if let Some(l) = l.filter(|l| l.who == i.who && l.is_worked()) {
            l.idle.1[0] = true;
            if l.idle.1[1] {
                self.over(i.at);
            }
        }
    }

    /// The process has shut the connection down for sending.
    pub fn shut(&mut self, from: ClientId, at: Key) {
        self.end(from, at, Ending::Shut, true);
    }

    /// The process is done with the lane: closed (and shut before), or given back.
    pub fn done(&mut self, from: ClientId, at: Key) {
        self.end(from, at, Ending::Over, false);
    }

    /// The process cannot map our area: it will not take the lanes of this link group that it has not taken yet.
    pub fn group_failed(&mut self, from: ClientId, group: u64) {
        let here = self.lanes.range((group, 0)..=(group, u32::MAX));
        let untaken = here.filter(|(_, l)| l.sock.is_none());
        for at in untaken.map(|(k, _)| *k).collect::<Vec<_>>() {
            self.done(from, at);
        }
    }

    fn end(&mut self, from: ClientId, at: Key, how: Ending, fin: bool) {
        let now = self.system.now();
        if let Some(l) = self.offered(from, at) {
            l.end(now, how, fin);
            self.notify();
        }
    }

    /// A process has moved to another family table.
    pub fn moved(&mut self, client: ClientId, family: &Arc<Family>) {
        let of = self.lanes.values_mut().filter(|l| l.who.client == client);
        of.for_each(|l| l.family = family.clone());
    }

    /// Ends of this process that have been offered their lanes.
    pub fn lanes_of(&self, client: ClientId) -> Vec<ConnRef> {
        let of = |l: &&Lane| l.who.client == client && l.stage == Stage::Offered;
        self.lanes.values().filter(of).map(|l| l.who).collect()
    }

    /// A process has ended. Returns the ends whose lanes other processes may go on with. `left`: what the process
    /// leaves to others, of [`Rails::lanes_of`].
    pub fn client_dead(
        &mut self,
        client: ClientId,
        left: &HashMap<ConnRef, Left<'_>>,
    ) -> Vec<Inherited> {
        let of = |(k, l): (&Key, &Lane)| (l.who.client == client).then_some((*k, l.who, l.stage));
        let all: Vec<(Key, ConnRef, Stage)> = self.lanes.iter().filter_map(of).collect();
        let (mut inherited, mut groups) = (Vec::new(), self.inherited_groups());
        for (k, who, stage) in all {
            match stage {
                Stage::Making => self.undo(k, Reason::PeerGone),
                Stage::Offered => {
                    let left = left.get(&who);
                    match left.and_then(|l| self.inherit(k, l, &mut groups)) {
                        Some(i) => inherited.push(i),
                        None => {
                            let ends = left.is_none() && self.gone(k);
                            self.end(client, k, Ending::Over, ends);
                        }
                    }
                }
                Stage::Leaving => {}
            }
        }
        inherited
    }

    /// Nobody of the family has this end any more: its peer is told so, and bytes that it has left unread make the end a
    /// reset. False: its lane was given back before, or is about to be, because another program has the connection.
    fn gone(&mut self, at: Key) -> bool {
        let Some(l) = self.lanes.get_mut(&at) else {
            return false;
        };
        let view = l.family.view(l.who.conn).filter(|v| v.gen == l.who.gen);
        if l.ending == Some(Ending::Over) || view.is_some_and(|v| v.flags & flag::LEFT != 0) {
            return false;
        }
        if let (Some(id), Some(n)) = (l.engine, self.nodes.get_mut(&l.node)) {
            l.reset |= n.pair.reader_gone(id);
        }
        true
    }

    /// Nothing is left to do for the connection: gives up the copy of its socket, and the lane.
    pub(super) fn leave(&mut self, at: Key) {
        let Some(l) = self.lanes.get_mut(&at) else {
            return;
        };
        l.sock = None; // closed on the blocking pool
        l.takeover = None;
        l.stage = Stage::Leaving;
        let engine = l.engine;
        match (engine, self.nodes.get_mut(&l.node)) {
            (Some(id), Some(n)) => n.pair.remove(id),
            _ => self.removed(at),
        }
    }

    /// Nothing of the lane is left in the engine.
    pub(super) fn removed(&mut self, at: Key) {
        let leaving = |l: &Lane| l.stage == Stage::Leaving;
        if self.lanes.get(&at).is_some_and(leaving) {
            self.lanes.remove(&at);
            self.out.push(Effect::Done { at });
            self.leave_group(at.0);
        }
    }

    /// The peer has removed its end.
    pub(super) fn peer_closed(&mut self, at: Key, used: bool) {
        let Some(l) = self.lanes.get(&at) else { return };
        match l.stage {
            Stage::Making => self.unmake(at, Reason::PeerDeclined, Reason::None),
            Stage::Offered if !used => self.out.push(Effect::Unused { at, who: l.who }),
            _ => {}
        }
    }

    /// The lane cannot go on: its connection is reset.
    pub(super) fn fail(&mut self, at: Key, reason: Reason) {
        let Some(l) = self.lanes.get_mut(&at) else {
            return;
        };
        match l.stage {
            Stage::Making => self.unmake(at, reason, Reason::None),
            Stage::Offered => {
                if let Some(s) = l.sock.clone() {
                    // On a helper thread, since it may wait for the socket's lock.
                    let payer = s.payer().cloned();
                    let job = move || disconnect(s.as_fd());
                    self.system.help_for(payer, Box::new(job));
                }
                self.out.push(Effect::Reset { who: l.who, reason });
                self.leave(at);
            }
            Stage::Leaving => {}
        }
    }
}
