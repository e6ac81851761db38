//! A connection leaves its lane for good, as the shim's `promotion::leave` makes it (exec, SCM_RIGHTS, `system`): its
//! thread does nothing else meanwhile, and resets it if it takes too long.

use super::process::{tell, Life, Process};
use super::sock::Sock;
use lane::half::{rx, Memory, Progress};
use lane::proto::msg::ToDaemon;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

/// `promotion::LEAVE_MS`.
const LEAVE_NS: u64 = 2_000_000_000;

/// How leaving goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Waits,
    Done,
    /// It had to be reset: what the connection would need is on the ring alone, or a frame lies behind what nobody has
    /// read on TCP.
    Stalled,
    /// It had to be reset because it took too long.
    Late,
}

impl Process {
    /// May this end begin to leave?
    pub fn may_leave(&self, i: usize) -> bool {
        let e = &self.ends[i];
        let usable = e.life == Life::Open && e.lane.is_some() && !e.given_back && !e.doubt;
        usable && self.leaving.is_none() && !e.app.lied
    }

    /// Begins to leave: its sender goes down.
    pub fn leave(&mut self, i: usize, now: u64) {
        tell!("{}[{i}] leaves", self.name);
        self.wake_up();
        self.leaving = Some((i, now + LEAVE_NS));
        let e = &self.ends[i];
        let (Some(at), Some(sock)) = (e.lane, &e.sock) else {
            return;
        };
        let l = &self.links[&at.0];
        let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
        let port = Sock {
            fd: sock.as_fd(),
            bell: Some(l.bell.as_fd()),
        };
        let _ = e.app.tx.come_down(&m, &port);
    }

    /// Goes on with it.
    pub fn go_on_leaving(&mut self, now: u64) -> Left {
        let Some((i, until)) = self.leaving else {
            return Left::Done;
        };
        let e = &mut self.ends[i];
        let (Some(at), Some(sock)) = (e.lane, &e.sock) else {
            self.leaving = None;
            return Left::Done;
        };
        let l = &self.links[&at.0];
        let m = Memory::new(&l.own, &l.peer, at.1).unwrap().across(true);
        let port = Sock {
            fd: sock.as_fd(),
            bell: Some(l.bell.as_fd()),
        };
        let sent = !matches!(e.app.tx.come_down(&m, &port), Ok(Progress::Blocked));
        let stuck = match e.app.rx.revoke(&m, &port) {
            Ok(rx::Revoked::Clear) if sent => {
                tell!("{}[{i}] has left {at:x?}", self.name);
                e.lane = None;
                e.left = true;
                self.leaving = None;
                let (group, lane) = at;
                let done = ToDaemon::LaneDone {
                    group,
                    side: 0,
                    lane,
                };
                self.say(done, vec![]);
                return Left::Done;
            }
            Ok(rx::Revoked::Clear | rx::Revoked::Pending) => now > until,
            Ok(rx::Revoked::Impossible) | Err(_) => true,
        };
        if !stuck {
            return Left::Waits;
        }
        let rx_mode = e.app.rx.mode.load(Relaxed);
        let late = now > until;
        tell!(
            "{}[{i}] cannot leave {at:x?}, receiver {rx_mode}, late {late}",
            self.name
        );
        self.leaving = None;
        self.abort(i);
        match late || !matches!(rx_mode, rx::mode::PREFIX | rx::mode::FIN) {
            true => Left::Late,
            false => Left::Stalled,
        }
    }
}
