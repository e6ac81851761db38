//! Link groups of three clients that send any messages, in any order.
//!
//! What their cgroups are charged with is what there is, at each step; and nothing is left when all are dead.

use crate::input::Input;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use underpassd::clients::ids::{ClientId, ConnRef};
use underpassd::clients::limits::{Cgroup, Cgroups, Limits};
use underpassd::lanes::groups::{LinkGroups, Out, Size, Violation};
use underpassd::os::memfd;
use underpassd::os::system::{Clock, System};

const CLIENTS: usize = 3;
/// Connections that each client has.
const CONNS: u8 = 6;
/// Most steps of one input.
const MOST: usize = 80;

/// Time passes when the input says so. (Its counter orders nothing: all of this runs on one thread.)
#[derive(Default)]
struct Time(AtomicU64);

impl System for Time {
    fn now(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn help(&self, job: Box<dyn FnOnce() + Send>) {
        job();
    }

    fn random(&self) -> u64 {
        0
    }

    fn lives(&self, _: u32) -> bool {
        true
    }

    fn tcp_send(&self, _: BorrowedFd<'_>, _: &[u8]) -> Result<usize, i32> {
        Err(libc::EPIPE)
    }

    fn tcp_sent(&self, _: BorrowedFd<'_>) -> Option<u64> {
        None
    }
}

struct World {
    groups: LinkGroups,
    time: Arc<Time>,
    cgroups: Vec<Arc<Cgroup>>,
    /// Who they are now: a number is never given twice.
    clients: [ClientId; CLIENTS],
    next: u64,
    /// Numbers of link groups that there were.
    ids: Vec<u64>,
    /// Link groups of the dead that are kept.
    kept: Vec<(u64, ClientId)>,
    out: Out,
}

impl World {
    fn new(i: &mut Input<'_>) -> World {
        let time = Arc::new(Time::default());
        let system: Arc<dyn System> = time.clone();
        let memory = u64::from(i.u8() % 16) << 24;
        let all = Cgroups::new(Limits {
            lanes: u32::from(i.u8() % 16),
            memory,
            pinned: memory,
            clients: 10,
            waiting: 10,
            jobs: 10,
        });
        World {
            groups: LinkGroups::new(7, Clock::of(&system)),
            time,
            cgroups: (0..CLIENTS).map(|n| all.get(&n.to_string())).collect(),
            clients: [1, 2, 3].map(ClientId),
            next: 4,
            ids: Vec::new(),
            kept: Vec::new(),
            out: Out::default(),
        }
    }

    fn end(&self, i: &mut Input<'_>) -> (usize, ConnRef) {
        let n = usize::from(i.u8()) % CLIENTS;
        let conn = u32::from(i.u8() % CONNS);
        let (client, gen) = (self.clients[n], 1);
        (n, ConnRef { client, conn, gen })
    }

    fn connect(&mut self, i: &mut Input<'_>) {
        let [(a, one), (b, other)] = [self.end(i), self.end(i)];
        // (The core offers again what an end has already.)
        let has = |e| self.groups.lane_of(e).is_some();
        if one == other || has(one) || has(other) {
            return;
        }
        // (The memory of the first is limited.)
        let size = |n| if n == 0 { Size::Small(16) } else { Size::Whole };
        let of = [a, b].map(|n| (&self.cgroups[n], size(n)));
        let made = self.groups.connect([one, other], of, 5, &mut self.out);
        if let Ok((id, ..)) = made {
            if !self.ids.contains(&id) {
                self.ids.push(id);
            }
        }
    }

    /// Who says it, and of which side of which link group, perhaps one of others.
    fn about(&self, i: &mut Input<'_>) -> (ClientId, u64, u8) {
        let (from, side) = (usize::from(i.u8()), i.u8());
        let known = self.ids.get(usize::from(i.u8()) % (self.ids.len() + 1));
        (
            self.clients[from % CLIENTS],
            known.copied().unwrap_or(1 << 40),
            side % 3,
        )
    }

    /// A client seals what it was given, as shims do.
    fn seal(&mut self, i: &mut Input<'_>) {
        let (from, id, side) = self.about(i);
        let n = u32::from(i.u8() % 4);
        if side < 2 {
            let file: Option<Arc<OwnedFd>> = self.groups.unsealed(from, (id, side), n);
            if let Some(f) = file {
                memfd::seal(&f).expect("it is ours");
            }
        }
    }

    fn dies(&mut self, n: usize, keeps: bool) {
        let client = self.clients[n];
        let lanes = self.groups.local_lanes(client);
        let mut keep: Vec<u64> = lanes.iter().map(|l| l.0 .0).collect();
        keep.retain(|_| keeps);
        self.groups.client_dead(client, &keep, &mut self.out);
        self.kept.extend(keep.into_iter().map(|id| (id, client)));
        self.clients[n] = ClientId(self.next);
        self.next += 1;
    }

    /// One event. A client that breaks the rules is cut off.
    fn step(&mut self, i: &mut Input<'_>) {
        let kind = i.u8() % 16;
        let said = |w: &mut World, i: &mut Input<'_>| -> Result<(), Violation> {
            let (from, id, side) = w.about(i);
            let (n, g, out) = (u32::from(i.u8() % 8), &mut w.groups, &mut w.out);
            let done = match kind {
                4 | 5 => g.mapped(from, id, side, n, out),
                6 => g.peer_mapped(from, id, side, n, out),
                7 => g.want_chunk(from, id, side, out),
                8 => g.lane_done(from, id, side, n, out),
                9 => g.lane_refused(from, id, side, n, out),
                _ => g.group_failed(from, id, side, out),
            };
            done.inspect_err(|_| g.client_silent(from, out))
        };
        match kind {
            0 | 1 => self.connect(i),
            2 | 3 => self.seal(i),
            4..=10 => drop(said(self, i)),
            11 => {
                let who = self.end(i).1;
                match i.u8() % 2 {
                    0 => self.groups.forget(who, &mut self.out),
                    _ => drop(self.groups.offer_again(who, &mut self.out)),
                }
            }
            12 => {
                let how = i.u8();
                self.dies(usize::from(how >> 1) % CLIENTS, how % 2 == 1);
            }
            13 => {
                let who = self.end(i).1.client;
                self.groups.resumed(who, &mut self.out);
            }
            14 => {
                let ms = u64::from(i.u8()) * 100;
                self.time.0.fetch_add(ms * 1_000_000, Relaxed);
            }
            _ => {
                if let Some((id, dead)) = self.kept.pop() {
                    self.groups.over(id, dead, &mut self.out);
                }
            }
        }
        self.out = Out::default();
        self.check();
    }

    fn check(&self) {
        let lanes = self.cgroups.iter().map(|g| g.lanes_taken());
        assert_eq!(u64::from(lanes.sum::<u32>()), 2 * self.groups.lanes());
        let memory = self.cgroups.iter().map(|g| g.memory_taken());
        let files = self.groups.memory();
        let sizes = files.iter().map(|f| rustix::fs::fstat(f).unwrap().st_size);
        assert_eq!(memory.sum::<u64>(), sizes.sum::<i64>().unsigned_abs());
    }
}

/// Limits, then events.
pub(crate) fn groups(data: &[u8]) {
    let mut i = Input(data);
    let mut w = World::new(&mut i);
    for _ in 0..MOST {
        if i.0.is_empty() {
            break;
        }
        w.step(&mut i);
    }
    (0..CLIENTS).for_each(|n| w.dies(n, false));
    for (id, dead) in std::mem::take(&mut w.kept) {
        w.groups.over(id, dead, &mut w.out);
    }
    w.check();
    assert!(w.groups.is_empty() && w.groups.ends().is_empty());
    assert_eq!(w.groups.lanes(), 0);
    for g in &w.cgroups {
        assert_eq!((g.lanes_taken(), g.memory_taken()), (0, 0));
    }
}
