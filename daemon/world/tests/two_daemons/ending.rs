//! How lanes and connections end in a process, as in the shim: `process/remote`, `promotion/{remote,retire}`.

use super::family::{holders, remove_holder, Entry, Life};
use super::group::Group;
use super::leaving::Leave;
use super::process::{Call, Process};
use super::seen::{note, tell};
use lane::abi::TcpPos;
use lane::family::{flag, state, Conn};
use lane::half::{self, rx, tx};
use lane::proto::msg::ToDaemon;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use underpassd::os::system::System;

/// A connection whose lane was given back registers again after so long.
pub const AGAIN_NS: u64 = 200_000_000;

impl Process {
    /// The way to the other node is gone.
    pub fn group_gone(&mut self, id: u64, dead: bool) {
        tell!("{} link group {id:x} is gone, dead {dead}", self.name);
        note(match dead {
            true => "a link group whose daemon has died",
            false => "a link group given up",
        });
        if let Some(l) = self.groups.get_mut(&id) {
            l.gone = true;
            l.dead |= dead;
            l.news = true;
            self.ends_of_group(id);
        }
    }

    /// The link group is gone: its ends go back to TCP.
    pub fn ends_of_group(&mut self, id: u64) {
        let mut all = true;
        for end in self.ends.iter() {
            let Some(sock) = &end.sock else { continue };
            let Ok(mut entry) = end.entry.try_borrow_mut() else {
                all = false; // another process of the family is in the middle of a call
                continue;
            };
            let e = &mut *entry;
            if e.lane.is_none_or(|k| k.0 != id) || e.reset {
                continue;
            }
            let Some(c) = self.call(e, sock.as_fd()) else {
                continue;
            };
            let half_way = c.group.dead && takeover_has_begun(e, &c.m);
            let asked = c.group.dead && e.app.tx.mode.load(Relaxed) == tx::mode::ASK;
            let held = e.app.lock_tx();
            let done = e.app.tx.leave_group(&c.m, &c.port, c.group.dead);
            drop(held);
            if half_way {
                note("reclaimed in the middle");
            }
            assert!(done.is_ok(), "the sender's way down: {done:?}");
            if asked && e.app.tx.mode.load(Relaxed) == tx::mode::TCP {
                note("a switch that nobody answers");
            }
            let _held = e.app.lock_rx();
            let done = e.app.rx.orphan(&c.m);
            assert!(done.is_ok(), "the receiver's way down: {done:?}");
            if e.app.rx.mode.load(Relaxed) == rx::mode::UNDECIDED {
                note("a receiver finds out what became of a switch");
            }
        }
        if all {
            self.groups.get_mut(&id).expect("as above").news = false;
        }
    }

    /// A process has died that held a direction's lock.
    pub fn repair(&self, e: &mut Entry, c: &Call<'_>) {
        if e.app.tx.lock.load(Relaxed) != 0 {
            note("a sender's lock taken from the dead");
            let _held = e.app.lock_tx();
            let done = e.app.tx.holder_died(&c.m, &c.port);
            assert_eq!(done, Ok(()), "the sender of one who was killed");
        }
        if e.app.rx.lock.load(Relaxed) != 0 {
            note("a receiver's lock taken from the dead");
            let _held = e.app.lock_rx();
            let done = e.app.rx.holder_died(&c.m, &c.port);
            assert_eq!(done, Ok(()), "the receiver of one who was killed");
        }
    }

    /// A lane that is of no use any more is given back when both directions are on TCP.
    pub fn retire(&mut self, e: &mut Entry, fd: BorrowedFd<'_>, now: u64) {
        let Some(c) = self.call(e, fd) else { return };
        let ours = e.owner == self.pid || !self.machine.lives(e.owner);
        if !(e.given_back || c.group.gone) || !ours {
            return;
        }
        if e.given_back {
            let _held = (e.app.lock_tx(), e.app.lock_rx());
            if !half::is_clear(&e.app.tx, &e.app.rx, &c.m, &c.port) {
                return;
            }
        }
        let engaged = e.app.tx.mode.load(Relaxed) != tx::mode::TCP || e.app.rx.engaged();
        if engaged || e.life == Life::Shutting {
            return;
        }
        tell!("{}[{}] gives back {:x?}", self.name, e.index, c.at);
        note("a lane given back");
        if e.owner != self.pid {
            note("a lane given back by one who inherited it");
        }
        self.give_back(e);
        e.not_before = now + AGAIN_NS;
    }

    /// Takes the lane from an end that is on TCP in both directions.
    pub fn give_back(&mut self, e: &mut Entry) {
        let Some(at) = e.lane.take() else { return };
        let lane = flag::LANE | flag::REMOTE;
        let c = self.family.conn(e.index);
        c.flags.fetch_and(!lane, Relaxed);
        e.given_back = false;
        e.revoking = None;
        self.done(at);
    }

    /// Can the daemon be asked to finish this connection?
    fn served(&self, e: &Entry, l: &Group) -> bool {
        e.owner == self.pid && !l.gone && self.control.is_some()
    }

    /// As `shutdown(SHUT_WR)`; `close`: and then `close`, of which that is the first half.
    pub fn shutdown(&mut self, i: usize) {
        self.wake_up();
        let Some(sock) = &self.ends[i].sock else {
            return;
        };
        let fd = sock.as_fd();
        let Ok(mut entry) = self.ends[i].entry.try_borrow_mut() else {
            return;
        };
        let e = &mut *entry;
        if e.life != Life::Open {
            return;
        }
        let mode = e.app.tx.mode.load(Relaxed);
        let cookie = super::tcp::cookie(fd);
        tell!("{}[{i}] shuts down, {cookie}, sender {mode}", self.name);
        e.app.shut = true;
        e.life = Life::Shutting;
        let c = self.call(e, fd).filter(|c| self.served(e, c.group));
        if let Some(c) = c {
            let _held = e.app.lock_tx();
            let _ = e.app.tx.look(&c.m, &c.port);
            if e.app.tx.mode.load(Relaxed) != tx::mode::TCP {
                e.app.tx.shut.store(1, Relaxed);
                e.life = Life::Shut; // by the daemon
                note("a shutdown left to the daemon");
                tell!("... by the daemon");
                let (group, lane) = c.at;
                let side = 0;
                self.say(ToDaemon::LaneShut { group, side, lane }, vec![]);
            }
        }
    }

    /// What has to be on TCP before a shutdown of ours.
    pub fn go_on_shutting(&mut self, e: &mut Entry, fd: BorrowedFd<'_>) {
        let late = e.life == Life::Shut && e.app.tx.shut.load(Relaxed) != 0;
        if e.life != Life::Shutting && !late {
            return;
        }
        let c = self.call(e, fd);
        if late && c.as_ref().is_some_and(|c| !c.group.gone) {
            return; // the daemon's
        }
        if let Some(c) = c {
            let _held = e.app.lock_tx();
            let step = match e.life {
                Life::Shutting if !c.group.gone => e.app.tx.down(&c.m, &c.port),
                _ => e.app.tx.look(&c.m, &c.port),
            };
            assert!(step.is_ok(), "no way down: {step:?}");
            if e.app.tx.mode.load(Relaxed) != tx::mode::TCP {
                return;
            }
        }
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
        e.app.tx.shut.store(0, Relaxed);
        e.life = Life::Shut;
    }

    /// As `close`, of an end that has read everything and has shut down, or that others hold.
    pub fn close(&mut self, i: usize, now: u64) {
        self.wake_up();
        let shared = self.ends[i].entry.clone();
        let Ok(mut entry) = shared.try_borrow_mut() else {
            return;
        };
        let e = &mut *entry;
        let family = self.family.clone();
        let c = family.conn(e.index);
        if self.ends[i].sock.is_none() {
            return;
        }
        self.forget_dead_holders(c);
        if holders(c) > 1 {
            if e.registered && e.owner == self.pid {
                e.registered = false;
                let (conn, gen) = (e.index as u32, e.gen);
                self.say(ToDaemon::Forget { conn, gen }, vec![]);
            }
            if e.owner == self.pid && e.lane.is_some() {
                note("a lane yielded to those who hold the connection, too");
                let leave = Leave::yields(i, now);
                self.leaving.push_back(leave);
                return;
            }
            note("a close that is not the last");
            self.given_up.push(shared.clone());
            return self.release(i, c);
        }
        if e.life != Life::Shut || !self.last_close(e, i) {
            return;
        }
        e.life = Life::Closed;
        tell!("{}[{i}] closes", self.name);
        c.state.store(state::BUSY, Relaxed);
        self.release(i, c);
        c.state.store(state::FREE, Release); // pairs with the daemon's copy of the entry
    }

    /// The last descriptor in this family is about to be closed. `false`: not yet.
    fn last_close(&mut self, e: &mut Entry, i: usize) -> bool {
        let late = e.app.tx.shut.load(Relaxed) != 0;
        let Some(sock) = &self.ends[i].sock else {
            return false;
        };
        let Some(c) = self.call(e, sock.as_fd()) else {
            let (conn, gen) = (e.index as u32, e.gen);
            if std::mem::take(&mut e.registered) {
                self.say(ToDaemon::Forget { conn, gen }, vec![]);
            }
            return true;
        };
        if late && c.group.gone {
            return false; // `go_on_shutting` first
        }
        let held = e.app.lock_tx();
        // One who inherited the lane brings it down, before it says the end itself.
        let step = match late && e.owner != self.pid {
            true => e.app.tx.down(&c.m, &c.port),
            false => e.app.tx.look(&c.m, &c.port),
        };
        assert!(step.is_ok(), "no way down: {step:?}");
        drop(held);
        if late && e.owner != self.pid {
            if e.app.tx.mode.load(Relaxed) != tx::mode::TCP {
                return false;
            }
            let _ = rustix::net::shutdown(sock, rustix::net::Shutdown::Write);
        }
        let _held = e.app.lock_rx();
        if e.app.rx.engaged() {
            let _ = e.app.rx.probe(&c.m, &c.port);
        }
        e.app.rx.close(&c.m, &c.port, TcpPos::default());
        let at = c.at;
        e.lane = None;
        let flags = &self.family.conn(e.index).flags;
        flags.fetch_and(!(flag::LANE | flag::REMOTE), Relaxed);
        if e.owner == self.pid {
            self.done(at);
        } else {
            note("one who inherited a lane closes it");
        }
        true
    }

    /// This process holds the end no more.
    pub fn release(&mut self, i: usize, c: &Conn) {
        self.machine.closes(self.pid, c.inode.load(Relaxed));
        remove_holder(c, self.pid);
        self.ends[i].sock = None;
    }

    /// The connection is reset, or was by the other end.
    pub fn abort(&mut self, i: usize) {
        let shared = self.ends[i].entry.clone();
        let e = &mut *shared.borrow_mut();
        let Some(sock) = &self.ends[i].sock else {
            return;
        };
        let _ = socket2::SockRef::from(sock).set_linger(Some(std::time::Duration::ZERO));
        disconnect(sock.as_fd());
        let (conn, gen) = (e.index as u32, e.gen);
        let family = self.family.clone();
        let c = family.conn(e.index);
        self.forget_dead_holders(c);
        let last = holders(c) <= 1;
        if e.owner == self.pid || !self.machine.lives(e.owner) {
            if e.lane.is_some() {
                self.give_back(e);
            } else if std::mem::take(&mut e.registered) {
                self.say(ToDaemon::Forget { conn, gen }, vec![]);
            }
        }
        e.excused = true;
        // Whoever else holds it finds that out.
        e.app.error.get_or_insert(libc::ECONNRESET);
        self.release(i, c);
        if last {
            e.life = Life::Closed;
            c.state.store(state::FREE, Release); // as in `close`
        }
    }

    /// Entries of processes that have died count no more.
    pub fn forget_dead_holders(&self, c: &Conn) {
        for h in &c.holders {
            let pid = h.load(Relaxed);
            if pid != 0 && !self.machine.lives(pid) {
                remove_holder(c, pid);
            }
        }
    }

    /// As SIGKILL.
    pub fn kill(&mut self) {
        tell!("{} is killed", self.name);
        self.killed = true;
        self.leaving.clear();
        self.control = None;
        // (A child that has not run yet stays counted among the forks.)
        self.ends.iter_mut().for_each(|e| e.sock = None);
        self.groups.clear();
    }
}

/// Counts in whose hands the sender is when its process comes to it.
pub fn note_takeover(e: &Entry, c: &Call<'_>) {
    use lane::abi::takeover;
    let word = c.m.daemon().takeover.load(Relaxed);
    let ours = word.epoch() == c.m.own_tx().state.load(Relaxed).epoch();
    if ours && !c.group.gone && e.app.tx.mode.load(Relaxed) != tx::mode::TCP {
        match word.phase() {
            takeover::NONE => {}
            takeover::DONE => note("a direction that a daemon gives back"),
            _ => note("a call on a direction that a daemon has"),
        }
    }
}

/// Has a daemon put anything on TCP in this end's stead that is not all of it?
fn takeover_has_begun(e: &Entry, m: &lane::half::Memory<'_>) -> bool {
    use lane::abi::takeover;
    let word = m.daemon().takeover.load(Relaxed);
    let ours = word.epoch() == m.own_tx().state.load(Relaxed).epoch();
    let begun = (takeover::DOWN..takeover::DONE).contains(&word.phase());
    ours && begun && e.app.tx.mode.load(Relaxed) != tx::mode::TCP
}

/// As the shim resets a connection that others may hold.
fn disconnect(sock: BorrowedFd<'_>) {
    use std::os::fd::AsRawFd;
    let unspec = [0u8; 16];
    // SAFETY: 16 readable bytes, a sockaddr of family 0; the call changes only the socket.
    let _ = unsafe { libc::connect(sock.as_raw_fd(), unspec.as_ptr().cast(), 16) };
}
