//! Link groups: what two clients share, from the first memory file to the last lane.
//!
//! A state machine without I/O: every call appends the messages to be sent to [`Out`]. It knows clients by number only.
//! That the other client of a *remote* link group is this daemon matters in three ways: for sizes, for who pays, and
//! because a lane there is offered only when the remote node has one, too.
//!
//! What it must never do: give a chunk to the other client before it is sealed, or use a lane slot
//! twice with the same epochs.

mod area;
mod captured;
mod growth;
mod lanes;
mod takeover;

pub use self::area::Size;
use self::area::{make_areas, Chunk, Stage};
pub(crate) use self::captured::LaneFiles;
use self::growth::{ready, share};
use self::lanes::offer;
pub(crate) use self::takeover::{Direction, Found};
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::Cgroup;
use crate::os::memfd;
use crate::os::system::Clock;
use lane::abi::{EPOCHS, LANES};
use lane::num;
use lane::proto::msg::ToShim;
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use underpass_rdma::verbs::Mapping;

/// A message for a client, with its descriptors.
pub struct Send {
    pub to: ClientId,
    pub msg: ToShim,
    pub fds: Vec<Arc<OwnedFd>>,
}

/// Shortest time from the failure of a link group to the next link group between the same clients.
const FAILED: Duration = Duration::from_secs(10);

/// Most link groups whose control words the daemon maps: a process may have 65,530 mappings (vm.max_map_count).
const WORDS_MAX: usize = 16_384;

/// What a call wants done.
#[derive(Default)]
pub struct Out {
    pub sends: Vec<Send>,
    /// Lanes that will not be made: their two ends.
    pub failed: Vec<[ConnRef; 2]>,
    /// The end that gave up one of these itself, and need not be told.
    pub gave_up: Option<ConnRef>,
    /// Ends whose lane to another node could be offered now.
    pub ready: Vec<ConnRef>,
}

impl Out {
    fn send(&mut self, to: ClientId, msg: ToShim, fds: Vec<Arc<OwnedFd>>) {
        self.sends.push(Send { to, msg, fds });
    }
}

/// A message that a correct shim would not have sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation(pub &'static str);

/// Why no lane was made.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The limit of the cgroup of this end (0 or 1 of the two given) is reached.
    Limit(usize),
    Memory,
}

struct Side {
    client: ClientId,
    /// The cgroup that the lanes count against.
    cgroup: Arc<Cgroup>,
    /// The cgroup that the memory counts against: on a remote link group, that of the process for both sides.
    payer: Arc<Cgroup>,
    size: Size,
    /// It was refused a chunk since it got one: there may be no memory for another ring.
    starved: bool,
    /// Chunks 0 and 1, in one file.
    first: Chunk,
    /// The further ones, from chunk 2 on.
    more: Vec<Chunk>,
    /// Within the node: the control words, writable, mapped before the file was sealed. `None`: no memory for it.
    words: Option<Arc<Mapping>>,
}

impl Side {
    fn chunk(&mut self, n: u32) -> Option<&mut Chunk> {
        match n {
            0 => Some(&mut self.first),
            n => self.more.get_mut((n as usize).checked_sub(FURTHER)?),
        }
    }

    fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        std::iter::once(&self.first).chain(&self.more)
    }
}

/// Number of the first chunk that is a file of its own.
const FURTHER: usize = 2;

/// One use of a slot. Ends are indexed by side.
struct Use {
    ends: [ConnRef; 2],
    done: [bool; 2],
    tag: u64,
    offered: bool,
    /// Not to be offered before [`LinkGroups::release`].
    held: bool,
    /// Was this end asked to give it back?
    told: [bool; 2],
    /// Is what this end sends being taken over? Then the slot is not free yet.
    taken: [bool; 2],
    /// When that was asked for last, by each end.
    asked: [[Option<Duration>; 2]; 2],
    /// Within the node, the cookies of the sockets that were paired; 0: not known.
    cookies: [u64; 2],
    /// Within the node, the sequence number of the first byte that each end sends, if there is a record of it.
    firsts: [Option<u32>; 2],
}

#[derive(Default)]
struct Slot {
    /// How often it has been used before.
    uses: u32,
    now: Option<Use>,
}

struct LinkGroup {
    sides: [Side; 2],
    slots: Vec<Slot>,
    /// Both clients have mapped the first file of their own areas, and have been sent the other's.
    ready: bool,
    /// A client could not map what it was sent: the link group takes no more lanes.
    failed: bool,
}

impl LinkGroup {
    /// Is the other client this daemon?
    fn is_remote(&self) -> bool {
        self.sides[1].client.is_remote()
    }

    fn free_slot(&self) -> Option<usize> {
        if self.failed {
            return None;
        }
        let free = self
            .slots
            .iter()
            .position(|s| s.now.is_none() && s.uses < u32::MAX / EPOCHS);
        free.or((self.slots.len() < LANES).then_some(self.slots.len()))
    }
}

/// All link groups.
pub struct LinkGroups {
    groups: HashMap<u64, LinkGroup>,
    by_pair: HashMap<(ClientId, ClientId), Vec<u64>>,
    by_client: HashMap<ClientId, HashSet<u64>>,
    /// Lane of each connection end, by client and connection.
    by_conn: HashMap<(ClientId, u32, u32), (u64, u32, u8)>,
    /// When a link group of these two failed: they get no other one for a while.
    failures: HashMap<(ClientId, ClientId), Duration>,
    clock: Clock,
    /// Upper half of link group numbers, random for each run of the daemon: link groups that outlive their daemon are
    /// not mistaken for its successor's.
    incarnation: u32,
    next: u32,
    lanes: u64,
}

impl LinkGroups {
    pub fn new(incarnation: u32, clock: Clock) -> Self {
        LinkGroups {
            groups: HashMap::new(),
            by_pair: HashMap::new(),
            by_client: HashMap::new(),
            by_conn: HashMap::new(),
            failures: HashMap::new(),
            clock,
            incarnation,
            next: 1,
            lanes: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.groups.len()
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The client that stands for another node in a remote link group.
    pub fn remote_client(&self, id: u64) -> Option<ClientId> {
        let client = self.groups.get(&id)?.sides[1].client;
        client.is_remote().then_some(client)
    }

    /// Acts as that client. Does nothing if the link group is gone.
    pub fn as_remote(
        &mut self,
        id: u64,
        step: impl FnOnce(&mut LinkGroups, ClientId) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        match self.remote_client(id) {
            Some(p) => step(self, p),
            None => Ok(()),
        }
    }

    /// Lanes in use.
    pub fn lanes(&self) -> u64 {
        self.lanes
    }

    /// Which lane each end has: link group, slot and side.
    pub fn ends(&self) -> HashMap<(ClientId, u32, u32), (u64, u32, u8)> {
        self.by_conn.clone()
    }

    /// All memory of all link groups.
    pub fn memory(&self) -> Vec<Arc<OwnedFd>> {
        self.groups
            .values()
            .flat_map(|l| &l.sides)
            .flat_map(Side::chunks)
            .map(|c| c.fd.clone())
            .collect()
    }

    fn create(
        &mut self,
        pair: (ClientId, ClientId),
        (cgroups, sizes): ([&Arc<Cgroup>; 2], [Size; 2]),
        out: &mut Out,
    ) -> Result<u64, Refused> {
        let id = u64::from(self.incarnation) << 32 | u64::from(self.next);
        let remote = pair.1.is_remote();
        let payers = [cgroups[0], cgroups[usize::from(!remote)]];
        let bytes = sizes.map(|s| s.first_bytes() as u64);
        for side in 0..2 {
            if !payers[side].take_memory(bytes[side], remote) {
                if side == 1 {
                    payers[0].give_memory(bytes[0], remote);
                }
                return Err(Refused::Limit(if remote { 0 } else { side }));
            }
        }
        match make_areas(id, sizes, self.clock.now()) {
            Err(e) => {
                tracing::warn!(group = %format_args!("{id:#x}"), "no memory for a link group: {e}");
                let all = payers.iter().zip(bytes);
                all.for_each(|(g, n)| g.give_memory(n, remote));
                Err(Refused::Memory)
            }
            Ok((bells, areas)) => {
                self.next = self.next.wrapping_add(1);
                let clients = [pair.0, pair.1];
                let mut side = 0;
                let sides = areas.map(|first| {
                    let few = self.groups.len() < WORDS_MAX;
                    let words = (!remote && few).then(|| area::words(&first));
                    let s = Side {
                        words: words.flatten(),
                        client: clients[side],
                        cgroup: cgroups[side].clone(),
                        payer: payers[side].clone(),
                        size: sizes[side],
                        starved: false,
                        first,
                        more: Vec::new(),
                    };
                    side += 1;
                    s
                });
                for ((side, s), bell) in sides.iter().enumerate().zip(bells) {
                    let fds = vec![Arc::new(bell), s.first.fd.clone()];
                    let msg = ToShim::GroupNew {
                        group: id,
                        side: num::tiny(side),
                        bytes: s.first.bytes,
                        remote: u8::from(remote),
                    };
                    out.send(s.client, msg, fds);
                }
                for p in clients {
                    self.by_client.entry(p).or_default().insert(id);
                }
                self.by_pair.entry(pair).or_default().push(id);
                self.groups.insert(
                    id,
                    LinkGroup {
                        sides,
                        slots: Vec::new(),
                        ready: false,
                        failed: false,
                    },
                );
                Ok(id)
            }
        }
    }

    /// Looks up a link group for a message of `from` about `side`. `Ok(None)`: the link group is gone already, or was
    /// made by another daemon; such messages cross ours and are ignored.
    fn find(
        groups: &mut HashMap<u64, LinkGroup>,
        from: ClientId,
        id: u64,
        side: u8,
    ) -> Result<Option<&mut LinkGroup>, Violation> {
        let Some(l) = groups.get_mut(&id) else {
            return Ok(None);
        };
        match l.sides.get(usize::from(side)) {
            Some(s) if s.client == from => Ok(Some(l)),
            _ => Err(Violation("a link group or side of somebody else")),
        }
    }

    /// The client at one side of a link group to another node.
    pub fn remote_owner(&self, id: u64, side: u8) -> Option<ClientId> {
        let l = self.groups.get(&id).filter(|l| l.is_remote())?;
        l.sides.get(usize::from(side)).map(|s| s.client)
    }

    /// The file of a chunk that its writer has mapped and not sealed, and that nobody seals yet: the caller does, by a helper.
    /// (Shims seal what they have mapped; those of before December 2026 leave that to the daemon.)
    pub fn unsealed(
        &mut self,
        from: ClientId,
        (id, side): (u64, u8),
        n: u32,
    ) -> Option<Arc<OwnedFd>> {
        let group = Self::find(&mut self.groups, from, id, side).ok()??;
        let c = group.sides[usize::from(side)].chunk(n)?;
        let to_do = c.stage == Stage::Given && !c.sealing && !memfd::is_sealed(&c.fd);
        c.sealing |= to_do;
        to_do.then(|| c.fd.clone())
    }

    /// The writer has mapped a chunk, which is sealed: gives it to the other client. When the first files of both areas
    /// are sealed, lanes are offered behind them: a client that cannot map what it was sent refuses them, and until
    /// an end has taken its lane the other end puts nothing on it (`rx::READY`).
    pub fn mapped(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        n: u32,
        out: &mut Out,
    ) -> Result<(), Violation> {
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(());
        };
        let peer = group.sides[1 - usize::from(side)].client;
        let Some(c) = group.sides[usize::from(side)].chunk(n) else {
            return Err(Violation("mapped a chunk that does not exist"));
        };
        if c.stage != Stage::Given {
            return match n {
                0 => Err(Violation("mapped a chunk twice")),
                _ => Ok(()), // it was given twice; see `want_chunk`
            };
        }
        // (What this daemon has mapped as a client, nobody else has.)
        let sealed = match from.is_remote() {
            true => memfd::seal(&c.fd).is_ok(),
            false => memfd::is_sealed(&c.fd),
        };
        if !sealed {
            return Err(Violation(
                "a chunk is not sealed: its writer sealed it otherwise",
            ));
        }
        c.stage = Stage::Sealed;
        c.sent = self.clock.now();
        share(id, 1 - side, peer, n, c, out);
        let given = |s: &Side| s.first.stage != Stage::Given;
        if !group.ready && group.sides.iter().all(given) {
            group.ready = true;
            for slot in 0..group.slots.len() {
                offer(id, group, slot, out);
            }
        }
        Ok(())
    }

    /// A shim could not map something: the link group is removed when the other end has given back the lanes that were
    /// offered on it (a remote link group: at once).
    pub fn group_failed(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        out: &mut Out,
    ) -> Result<(), Violation> {
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(());
        };
        if group.is_remote() {
            self.tear_down(id, None, out);
            return Ok(());
        }
        let pair = (group.sides[0].client, group.sides[1].client);
        group.failed = true;
        self.failures.insert(pair, self.clock.now());
        for slot in 0..num::small(group.slots.len()) {
            self.abandon(id, slot, out);
            self.lane_refused(from, id, side, slot, out)?;
        }
        self.reap(id, out);
        Ok(())
    }

    /// Did a link group of these two fail a moment ago?
    fn has_failed(&mut self, pair: (ClientId, ClientId)) -> bool {
        let recent = self
            .failures
            .get(&pair)
            .map(|t| self.clock.since(*t) < FAILED);
        if recent == Some(false) {
            self.failures.remove(&pair);
        }
        recent == Some(true)
    }

    /// A client has a new control connection. What was sent over the previous one may be lost, so it is sent again.
    /// (It may include files that the client has mapped already.)
    pub fn resumed(&mut self, client: ClientId, out: &mut Out) {
        for id in self.by_client.get(&client).into_iter().flatten() {
            let Some(l) = self.groups.get(id).filter(|l| l.ready && !l.failed) else {
                continue;
            };
            for side in (0..2).filter(|s| l.sides[*s].client == client) {
                share(
                    *id,
                    num::tiny(side),
                    client,
                    0,
                    &l.sides[1 - side].first,
                    out,
                );
                let more = (num::small(FURTHER)..).zip(&l.sides[side].more);
                for (n, _) in more.filter(|(_, c)| c.stage == Stage::Shared) {
                    ready(*id, num::tiny(side), client, n, out);
                }
            }
        }
    }

    /// Removes a link group that has failed, once its last lane is given back.
    fn reap(&mut self, id: u64, out: &mut Out) {
        let unused = |l: &LinkGroup| l.failed && l.slots.iter().all(|s| s.now.is_none());
        if self.groups.get(&id).is_some_and(unused) {
            self.tear_down(id, None, out);
        }
    }

    /// A client is gone for good: removes its link groups, except those to `keep` until [`LinkGroups::over`].
    pub fn client_dead(&mut self, client: ClientId, keep: &[u64], out: &mut Out) {
        self.failures
            .retain(|(a, b), _| *a != client && *b != client);
        let all = self.by_client.get(&client).cloned().unwrap_or_default();
        for id in all.into_iter().filter(|id| !keep.contains(id)) {
            self.tear_down(id, Some(client), out);
        }
    }

    /// Removes a link group of a dead client that was kept.
    pub fn over(&mut self, id: u64, dead: ClientId, out: &mut Out) {
        self.tear_down(id, Some(dead), out);
        self.failures.retain(|(a, b), _| *a != dead && *b != dead);
    }

    /// The lanes within the node that a client has been offered and uses: link group and slot, its own end, and the
    /// other end.
    pub fn local_lanes(&self, client: ClientId) -> Vec<((u64, u32), ConnRef, ConnRef)> {
        let mut all = Vec::new();
        for id in self.by_client.get(&client).into_iter().flatten() {
            let Some(l) = self.groups.get(id).filter(|l| !l.is_remote()) else {
                continue;
            };
            for (n, slot) in (0..).zip(&l.slots) {
                let Some(u) = slot.now.as_ref().filter(|u| u.offered) else {
                    continue;
                };
                let mine = |&side: &usize| u.ends[side].client == client && !u.done[side];
                all.extend(
                    (0..2)
                        .filter(mine)
                        .map(|s| ((*id, n), u.ends[s], u.ends[1 - s])),
                );
            }
        }
        all
    }

    /// The other end of a lane, if it still uses it.
    pub fn survivor(&self, who: ConnRef) -> Option<ConnRef> {
        let (id, slot, side) = self.by_conn.get(&(who.client, who.conn, who.gen))?;
        let u = self
            .groups
            .get(id)?
            .slots
            .get(*slot as usize)?
            .now
            .as_ref()?;
        let other = 1 - usize::from(*side);
        (!u.done[other]).then_some(u.ends[other])
    }

    /// A client's control connection is gone, but its process lives. Link groups in use stay as they are; link groups
    /// that are being made cannot be finished.
    pub fn client_silent(&mut self, client: ClientId, out: &mut Out) {
        let unready: Vec<u64> = self
            .by_client
            .get(&client)
            .into_iter()
            .flatten()
            .filter(|id| self.groups.get(id).is_some_and(|l| !l.ready))
            .copied()
            .collect();
        for id in unready {
            self.tear_down(id, None, out);
        }
    }

    /// Removes a link group and tells both sides, except a client that is `dead`.
    fn tear_down(&mut self, id: u64, dead: Option<ClientId>, out: &mut Out) {
        let slots = self.groups.get(&id).map_or(0, |l| l.slots.len());
        for slot in 0..slots {
            self.abandon(id, num::small(slot), out);
        }
        let Some(group) = self.groups.remove(&id) else {
            return;
        };
        let remote = group.is_remote();
        for u in group.slots.into_iter().filter_map(|s| s.now) {
            self.lanes -= 1;
            group.sides.iter().for_each(|s| s.cgroup.give_lane());
            for e in u.ends {
                self.by_conn.remove(&(e.client, e.conn, e.gen));
            }
        }
        let pair = (group.sides[0].client, group.sides[1].client);
        if let Some(v) = self.by_pair.get_mut(&pair) {
            v.retain(|l| *l != id);
            if v.is_empty() {
                self.by_pair.remove(&pair);
            }
        }
        for (side, s) in group.sides.iter().enumerate() {
            s.payer
                .give_memory(s.chunks().map(|c| c.bytes).sum(), remote);
            if let Some(set) = self.by_client.get_mut(&s.client) {
                set.remove(&id);
                if set.is_empty() {
                    self.by_client.remove(&s.client);
                }
            }
            if dead != Some(s.client) {
                out.send(
                    s.client,
                    ToShim::PeerGone {
                        group: id,
                        side: num::tiny(side),
                    },
                    vec![],
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
