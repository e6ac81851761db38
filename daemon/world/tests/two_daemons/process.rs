//! A process with a shim, as far as the daemon can tell: it maps areas, takes lanes, and does with its connections'
//! ends what the shim does with remote ones (`shim/src/process/remote`, `promotion/remote`, `promotion/retire`). The
//! halves of its lanes are the real ones.

use super::app::{self, App};
use super::ending::note_takeover;
use super::family::{holders, Entry, Family, Life, Shared};
use super::group::Group;
use super::leaving::Leave;
use super::machine::Machine;
use super::seen::{note, tell};
use super::sock::Sock;
use lane::abi::Cursor;
use lane::half::{tx, Memory};
use lane::proto::msg::ToDaemon;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::sim::Rng;

/// After this time a connection may be registered that a second process held.
pub const SHARED_NS: u64 = 100_000_000;

/// A message to the daemon, with its descriptors.
pub type Said = (ToDaemon, Vec<OwnedFd>);

/// What a process has said to its daemon, and that one has not read yet.
#[derive(Default)]
pub struct Wire(RefCell<VecDeque<Said>>);

impl Wire {
    pub fn next(&self) -> Option<Said> {
        self.0.borrow_mut().pop_front()
    }

    /// It will never read that the process has taken a lane.
    pub fn lose_held(&self) {
        let held = |(m, _): &Said| matches!(m, ToDaemon::LaneHeld { .. });
        self.0.borrow_mut().retain(|s| !held(s));
    }

    /// Is a message among them that a lane is done?
    pub fn says_done(&self) -> bool {
        let done = |(m, _): &Said| matches!(m, ToDaemon::LaneDone { .. });
        self.0.borrow().iter().any(done)
    }
}

/// A process's descriptor of an end.
pub struct End {
    /// Index and generation in the family's table.
    pub name: (u32, u32),
    pub entry: Shared,
    pub sock: Option<Rc<TcpStream>>,
}

/// What a call on an end's lane works with.
pub struct Call<'a> {
    /// Link group and slot.
    pub at: (u64, u32),
    pub group: &'a Group,
    pub m: Memory<'a>,
    pub port: Sock<'a>,
}

pub struct Process {
    pub name: String,
    /// As the family's table and the daemon have it.
    pub pid: u32,
    pub machine: Arc<Machine>,
    pub family: Rc<Family>,
    /// Our end of the control connection, and what was said over it.
    pub control: Option<(OwnedFd, Rc<Wire>)>,
    /// Lanes that are done with, of which the daemon could not be told.
    pending_done: Vec<(u64, u32)>,
    pub groups: BTreeMap<u64, Group>,
    pub ends: Vec<End>,
    /// Does nothing until then: it computes, or sleeps outside every call.
    pub busy_until: u64,
    /// Counted as a sleeper on its link groups.
    asleep: bool,
    pub killed: bool,
    /// It has executed a program that has no shim.
    pub foreign: bool,
    /// Forked, and has not run yet: it is counted among the forks.
    pub unborn: bool,
    /// What its thread is about before it does anything else.
    pub leaving: VecDeque<Leave>,
    pub executing: bool,
    /// It can map what the daemon gives it of the other end's memory.
    pub maps: bool,
    /// How often the daemon has declined a connection, by reason.
    pub declined: BTreeMap<u32, u64>,
    /// For one who is killed within a call: the end, its head, and what it had sent before.
    within: Option<(usize, Cursor, u64)>,
    /// Its daemon knows that it is foreign.
    parted: bool,
    /// What it has closed although it was not through, because others held it.
    pub given_up: Vec<Shared>,
}

impl Process {
    pub fn new(name: String, pid: u32, family: Rc<Family>, machine: Arc<Machine>) -> Process {
        machine.begins(pid);
        Process {
            name,
            pid,
            machine,
            family,
            control: None,
            pending_done: Vec::new(),
            groups: BTreeMap::new(),
            ends: Vec::new(),
            busy_until: 0,
            asleep: false,
            killed: false,
            foreign: false,
            unborn: false,
            leaving: VecDeque::new(),
            executing: false,
            maps: true,
            declined: BTreeMap::new(),
            within: None,
            parted: false,
            given_up: Vec::new(),
        }
    }

    /// Has it just closed its control connection, to execute another program?
    pub fn parts(&mut self) -> bool {
        self.foreign && !std::mem::replace(&mut self.parted, true)
    }

    /// Are there lanes that it has finished with, and nobody tells the daemon?
    pub fn owes(&self) -> bool {
        !self.pending_done.is_empty()
    }

    /// Does it hold nothing any more, and end? Other programs always do so.
    pub fn is_over(&self, ends: bool) -> bool {
        let holds = self.ends.iter().any(|e| e.sock.is_some());
        (self.foreign || ends) && !self.killed && !holds
    }

    /// It was killed within a call: what that has put on a ring counts as sent.
    pub fn was_within(&mut self) {
        let Some((i, head, sent)) = self.within.take() else {
            return;
        };
        let e = &mut *self.ends[i].entry.borrow_mut();
        let lane = e.lane.and_then(|k| Some((k.1, self.groups.get(&k.0)?)));
        if let Some((slot, l)) = lane.filter(|_| e.app.sent == sent) {
            e.app.sent += l.memory(slot).own_head().load(Relaxed) - head;
        }
    }

    /// Is an end not on TCP yet that no daemon would bring there, if its process were killed now?
    pub fn has_nobody(&self, i: usize) -> bool {
        let e = self.ends[i].entry.borrow();
        let dead = e
            .lane
            .is_some_and(|k| self.groups[&k.0].dead || self.groups[&k.0].hung_up());
        dead && e.app.tx.mode.load(Relaxed) != tx::mode::TCP
    }

    /// For a call on the lane of an end. `None`: it has none.
    pub fn call<'a>(&'a self, e: &mut Entry, fd: BorrowedFd<'a>) -> Option<Call<'a>> {
        let at = e.lane?;
        let group = &self.groups[&at.0];
        e.app.tid = self.pid;
        let c = Call {
            at,
            group,
            m: group.memory(at.1),
            port: Sock::new(&e.app, fd, group.bell()),
        };
        self.repair(e, &c);
        Some(c)
    }

    /// Opens a connection.
    pub fn add(&mut self, sock: TcpStream, client: bool, app: App) -> Shared {
        sock.set_nonblocking(true).unwrap();
        let inode = rustix::fs::fstat(&sock).unwrap().st_ino;
        self.machine.opens(self.pid, inode);
        let entry = self.family.add(app, self.pid, client, inode);
        let e = entry.borrow();
        self.ends.push(End {
            name: (e.index as u32, e.gen),
            entry: entry.clone(),
            sock: Some(Rc::new(sock)),
        });
        drop(e);
        entry
    }

    pub fn connected(&mut self, control: OwnedFd, wire: Rc<Wire>) {
        self.control = Some((control, wire));
        for (group, lane) in std::mem::take(&mut self.pending_done) {
            self.done((group, lane));
        }
    }

    pub fn say(&self, msg: ToDaemon, fds: Vec<OwnedFd>) {
        tell!("{} says {msg:x?}", self.name);
        if let Some((_, wire)) = &self.control {
            wire.0.borrow_mut().push_back((msg, fds));
        }
    }

    /// A lane is done with. The daemon must hear of that, now or later.
    pub fn done(&mut self, (group, lane): (u64, u32)) {
        if self.control.is_none() {
            return self.pending_done.push((group, lane));
        }
        let side = 0;
        self.say(ToDaemon::LaneDone { group, side, lane }, vec![]);
    }

    /// The daemon has ended.
    pub fn daemon_lost(&mut self) {
        self.control = None;
        for e in &self.ends {
            let e = &mut *e.entry.borrow_mut();
            e.registered &= e.owner != self.pid;
        }
        let all: Vec<u64> = self.groups.keys().copied().collect();
        all.into_iter().for_each(|l| self.group_gone(l, true));
    }

    /// Does something, as a program might. Whether anything moved.
    pub fn step(&mut self, now: u64, rng: &mut Rng, quiet: bool) -> bool {
        if self.unborn {
            self.enter();
        }
        if self.asleep && !self.wakes() {
            return false;
        }
        self.wake_up();
        if self.foreign {
            let mut moved = false;
            for i in 0..self.ends.len() {
                moved |= self.step_end(i, now, rng, false);
            }
            return moved;
        }
        // (Otherwise another process of the family is in the middle of a call.)
        let free = |e: &End| e.entry.try_borrow_mut().is_ok();
        if self.ends.iter().all(free) {
            if !self.listen(now, rng) {
                self.daemon_lost();
            }
            self.see_groups();
        }
        let mut moved = false;
        for i in 0..self.ends.len() {
            if quiet || !rng.one_in(3) {
                moved |= self.step_end(i, now, rng, false);
            }
        }
        if !moved && rng.one_in(4) {
            self.fall_asleep(now, rng);
        }
        moved
    }

    /// Looks after link groups that are gone, of which not all ends know.
    pub fn see_groups(&mut self) {
        let hung_up = |l: &Group| !l.dead && l.hung_up();
        let dead = self.groups.iter().filter(|(_, l)| hung_up(l));
        for id in dead.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.group_gone(id, true);
        }
        let news = self.groups.iter().filter(|(_, l)| l.news);
        for id in news.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.ends_of_group(id);
        }
    }

    /// Counts itself asleep, and looks once more at everything.
    fn fall_asleep(&mut self, now: u64, rng: &mut Rng) {
        self.groups
            .values()
            .filter(|l| !l.gone)
            .for_each(Group::fall_asleep);
        self.asleep = true;
        let mut moved = false;
        for i in 0..self.ends.len() {
            moved |= self.step_end(i, now, rng, true);
        }
        let waits = |e: &End| match e.entry.try_borrow() {
            Ok(e) => e.life == Life::Shutting || e.lane.is_none() && e.life == Life::Open,
            Err(_) => true,
        };
        let news = self.groups.values().any(|l| l.news);
        if moved || news || self.ends.iter().any(waits) {
            self.wake_up();
        }
    }

    pub fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.groups
                .values()
                .filter(|l| !l.gone)
                .for_each(Group::wake_up);
        }
    }

    /// Is there anything that ends a sleep: a doorbell, the daemon, TCP?
    fn wakes(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let bells = self.groups.values().filter(|l| !l.gone);
        // (Of an ancestor's doorbell only the end is for us.)
        let bells = bells.map(|l| match l.inherited {
            true => PollFd::new(&l.bell, PollFlags::empty()),
            false => PollFd::new(&l.bell, PollFlags::IN),
        });
        let control = self.control.iter();
        let control = control.map(|c| PollFd::new(&c.0, PollFlags::IN));
        let mut all: Vec<PollFd> = bells.chain(control).collect();
        for e in &self.ends {
            let (Some(s), Ok(e)) = (&e.sock, e.entry.try_borrow()) else {
                continue;
            };
            let up = e.app.tx.is_up() && e.lane.is_some();
            let out = e.life == Life::Open && e.app.sent < e.app.total && !up;
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !e.app.ended);
            flags.set(PollFlags::OUT, out);
            all.push(PollFd::from_borrowed_fd(s.as_fd(), flags));
        }
        matches!(rustix::event::poll(&mut all, Some(&Timespec::default())), Ok(n) if n > 0)
    }

    fn step_end(&mut self, i: usize, now: u64, rng: &mut Rng, all: bool) -> bool {
        let end = &self.ends[i];
        // (No copy of the descriptor for each step: half of a seed's time is system calls.)
        let Some(sock) = end.sock.clone() else {
            return false;
        };
        let shared = end.entry.clone();
        let Ok(mut entry) = shared.try_borrow_mut() else {
            return false; // another process of the family is in the middle of a call
        };
        let (e, fd) = (&mut *entry, sock.as_fd());
        if let Some(c) = self.call(e, fd) {
            self.within = Some((i, c.m.own_head().load(Relaxed), e.app.sent));
        }
        let moved = match self.call(e, fd) {
            Some(c) => self.step_lane(e, &c, (now, all), rng),
            None => {
                let port = Sock::new(&e.app, fd, None);
                e.app.step_native(&port, rng)
            }
        };
        self.within = None;
        self.retire(e, fd, now);
        self.go_on_shutting(e, fd);
        self.register(e, fd, now, rng);
        moved
    }

    /// One step of an end that has a lane.
    fn step_lane(
        &self,
        e: &mut Entry,
        c: &Call<'_>,
        (now, all): (u64, bool),
        rng: &mut Rng,
    ) -> bool {
        note_takeover(e, c);
        let open = !c.group.gone && !e.given_back && e.owner == self.pid;
        e.app.may_up = open;
        e.app.may_ready = open && holders(self.family.conn(e.index)) == 1 && e.revoking.is_none();
        if e.owner != self.pid {
            self.visit(e, c);
        }
        let w = app::World {
            app: &c.group.own,
            proxy: &c.group.peer,
            port: &c.port,
        };
        let moved = e.app.step(&w, rng, all);
        if !all && !e.whim(c, now, rng) {
            e.excused = true;
            e.reset = true;
        }
        let up = e.app.tx.is_up();
        if up != e.was_up {
            tell!("{}[{}] up: {up}", self.name, e.index);
        }
        if up && !e.was_up {
            e.ups += 1;
            note("a sender goes up");
        }
        e.was_up = up;
        moved
    }

    pub fn register(&mut self, e: &mut Entry, fd: BorrowedFd<'_>, now: u64, rng: &mut Rng) {
        let wanted = e.life == Life::Open && e.lane.is_none() && !e.registered && !e.left;
        if !wanted || self.control.is_none() || now < e.not_before || !rng.one_in(4) {
            return;
        }
        let c = self.family.conn(e.index);
        self.forget_dead_holders(c);
        if holders(c) != 1 {
            e.not_before = now + SHARED_NS;
            return;
        }
        let port = Sock::new(&e.app, fd, None);
        match e.app.is_counted(&port, e.client) {
            None => return,
            counted => assert_eq!(counted, Some(true), "a byte was counted wrongly"),
        }
        let copy = fd.try_clone_to_owned().unwrap();
        let client = match e.client {
            true => lane::proto::msg::register::CLIENT,
            false => 0,
        };
        let msg = ToDaemon::Register {
            conn: e.index as u32,
            gen: e.gen,
            tx_tcp_pos: e.app.tx.tcp_pos.load(Relaxed),
            rx_tcp_pos: e.app.rx.tcp_pos.load(Relaxed),
            flags: lane::proto::msg::register::CERTAIN | client,
        };
        e.registered = true;
        e.owner = self.pid;
        note("registered");
        self.say(msg, vec![copy]);
    }
}
