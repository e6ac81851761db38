//! How lanes and connections end in a process, as in the shim: `process/remote`, `promotion/{remote,retire}`.

use super::process::{tell, Life, Process};
use super::sock::Sock;
use lane::half::{rx, tx, Memory};
use lane::proto::msg::ToDaemon;
use lane::proto::reason::Reason;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// A connection whose lane was given back registers again after so long.
const AGAIN_NS: u64 = 200_000_000;

impl Process {
    /// The way to the other node is gone.
    pub fn group_gone(&mut self, id: u64, dead: bool) {
        tell!("{} link group {id:x} is gone, dead {dead}", self.name);
        let Some(l) = self.links.get_mut(&id) else {
            return;
        };
        l.gone = true;
        l.dead |= dead;
        for e in self
            .ends
            .iter_mut()
            .filter(|e| e.lane.is_some_and(|k| k.0 == id))
        {
            let Some(sock) = &e.sock else { continue };
            let m = Memory::new(&l.own, &l.peer, e.app.slot)
                .unwrap()
                .across(true);
            let port = Sock {
                fd: sock.as_fd(),
                bell: Some(l.bell.as_fd()),
            };
            let done = match dead {
                true => e.app.tx.reclaim(&m, &port),
                false => e.app.tx.down(&m, &port),
            };
            match done {
                Err(Reason::InDoubt) => e.doubt = true,
                done => assert!(done.is_ok(), "the sender's way down: {done:?}"),
            }
            let done = e.app.rx.orphan(&m);
            assert!(done.is_ok(), "the receiver's way down: {done:?}");
        }
    }

    /// A lane that is of no use any more is given back when both directions are on TCP.
    pub fn retire(&mut self, i: usize, fd: BorrowedFd<'_>, now: u64) {
        let e = &mut self.ends[i];
        let Some(at) = e.lane else { return };
        let l = &self.links[&at.0];
        if !e.given_back && !l.gone {
            return;
        }
        let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
        let bell = (!l.gone).then(|| l.bell.as_fd());
        let port = Sock { fd, bell };
        if e.given_back {
            let _ = e.app.tx.look(&m, &port);
            let clear = e.app.tx.mode.load(Relaxed) == tx::mode::TCP
                && matches!(e.app.rx.revoke(&m, &port), Ok(rx::Revoked::Clear));
            if !clear {
                return;
            }
        }
        if e.app.tx.mode.load(Relaxed) != tx::mode::TCP
            || e.app.rx.engaged()
            || e.life == Life::Shutting
        {
            return;
        }
        tell!("{}[{i}] gives back {at:x?}", self.name);
        e.lane = None;
        e.given_back = false;
        e.not_before = now + AGAIN_NS;
        self.say(
            ToDaemon::LaneDone {
                group: at.0,
                side: 0,
                lane: at.1,
            },
            vec![],
        );
    }

    /// As `shutdown(SHUT_WR)`; `close`: and then `close`, of which that is the first half.
    pub fn shutdown(&mut self, i: usize) {
        self.wake_up();
        let e = &mut self.ends[i];
        if e.life != Life::Open {
            return;
        }
        let Some(sock) = &e.sock else { return };
        tell!("{}[{i}] shuts down", self.name);
        e.app.shut = true;
        e.life = Life::Shutting;
        let lane = e.lane.and_then(|k| Some((k, self.links.get(&k.0)?)));
        if let Some((at, l)) = lane.filter(|(_, l)| !l.gone && self.control.is_some()) {
            let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
            let port = Sock {
                fd: sock.as_fd(),
                bell: Some(l.bell.as_fd()),
            };
            let _ = e.app.tx.look(&m, &port);
            if e.app.tx.mode.load(Relaxed) != tx::mode::TCP {
                e.app.tx.shut.store(1, Relaxed);
                e.life = Life::Shut; // by the daemon
                self.say(
                    ToDaemon::LaneShut {
                        group: at.0,
                        side: 0,
                        lane: at.1,
                    },
                    vec![],
                );
            }
        }
    }

    /// What has to be on TCP before a shutdown of ours.
    pub fn go_on_shutting(&mut self, i: usize, fd: BorrowedFd<'_>) {
        let e = &mut self.ends[i];
        let late = e.life == Life::Shut && e.app.tx.shut.load(Relaxed) != 0;
        if e.life != Life::Shutting && !late {
            return;
        }
        let lane = e.lane.and_then(|k| Some((k, self.links.get(&k.0)?)));
        if late && lane.as_ref().is_some_and(|(_, l)| !l.gone) {
            return; // the daemon's
        }
        if let Some((at, l)) = lane {
            let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
            let bell = (!l.gone).then(|| l.bell.as_fd());
            let port = Sock { fd, bell };
            let step = match e.life {
                Life::Shutting if !l.gone => e.app.tx.down(&m, &port),
                _ => e.app.tx.look(&m, &port),
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

    /// As `close`, of an end that has read everything and has shut down.
    pub fn close(&mut self, i: usize) {
        self.wake_up();
        let e = &mut self.ends[i];
        if e.life != Life::Shut {
            return;
        }
        let late = e.app.tx.shut.load(Relaxed) != 0;
        let Some(sock) = &e.sock else { return };
        if let Some((at, l)) = e.lane.and_then(|k| Some((k, self.links.get(&k.0)?))) {
            if late && l.gone {
                return; // `go_on_shutting` first
            }
            let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
            let bell = (!l.gone).then(|| l.bell.as_fd());
            let port = Sock {
                fd: sock.as_fd(),
                bell,
            };
            let _ = e.app.tx.look(&m, &port);
            if e.app.rx.engaged() {
                let _ = e.app.rx.probe(&m, &port);
            }
            e.app.rx.close(&m, &port, lane::abi::TcpPos::default());
            e.lane = None;
            e.sock = None;
            e.life = Life::Closed;
            self.say(
                ToDaemon::LaneDone {
                    group: at.0,
                    side: 0,
                    lane: at.1,
                },
                vec![],
            );
        } else {
            let registered = std::mem::take(&mut e.registered);
            e.sock = None;
            e.life = Life::Closed;
            let (conn, gen) = (i as u32, e.gen);
            if registered {
                self.say(ToDaemon::Forget { conn, gen }, vec![]);
            }
        }
        self.conn(i).state.store(0, Release); // pairs with the daemon's copy of the entry
    }

    /// The connection is reset, or was by the other end.
    pub fn abort(&mut self, i: usize) {
        let e = &mut self.ends[i];
        let Some(sock) = e.sock.take() else { return };
        let _ = socket2::SockRef::from(&sock).set_linger(Some(std::time::Duration::ZERO));
        e.app.lied = true;
        e.life = Life::Closed;
        e.registered = false;
        let msg = match e.lane.take() {
            Some(at) => ToDaemon::LaneDone {
                group: at.0,
                side: 0,
                lane: at.1,
            },
            None => ToDaemon::Forget {
                conn: i as u32,
                gen: e.gen,
            },
        };
        self.say(msg, vec![]);
        self.conn(i).state.store(0, Release); // pairs with the daemon's copy of the entry
    }

    /// As SIGKILL.
    pub fn kill(&mut self) {
        tell!("{} is killed", self.name);
        self.killed = true;
        self.leaving = None;
        self.control = None;
        self.said.clear();
        for e in &mut self.ends {
            e.sock = None;
            e.life = Life::Closed;
        }
    }
}
