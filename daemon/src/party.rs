//! Parties: who can be at an end of a link. A shim's process on this node, known by its control
//! connection; or this daemon itself, once per peer node, whose messages go to `rail`.

use crate::commands::PendingCommands;
use crate::control::Control;
use crate::family::Family;
use crate::ids::PartyId;
use crate::limits::{Group, Member};
use crate::process::ProcId;
use link::msg::{op, ToShim};
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A shim's process.
pub struct Party {
    pub id: PartyId,
    pub proc_id: ProcId,
    /// Its number in its own pid namespace, as it says itself: what stands in its table.
    pub own_pid: u32,
    pub uid: u32,
    pub comm: String,
    pub netns: u64,
    pub member: Member,
    pub family: Arc<Family>,
    /// `None` while the process lives without a control connection.
    pub control: Option<Rc<Control>>,
    /// Registrations it may still send.
    pub credits: u32,
    /// Those that are over and that it does not know of yet: it is told of several at once.
    pub untold: u32,
    /// Registrations that are being looked at.
    pub under_way: HashSet<(u32, u32)>,
    /// Ends of links and lanes while there was no control connection: told when there is one again.
    pub missed: Vec<ToShim>,
    /// What operators have said meanwhile.
    pub commands: PendingCommands,
    /// How often it has shown another table in the second that began then.
    pub moves: (Instant, u32),
}

/// Most such moves in a second; shims keep to five.
const MOVES_MAX: u32 = 32;

impl Party {
    pub fn group(&self) -> &Arc<Group> {
        &self.member.0
    }

    pub fn send(&mut self, msg: ToShim, fds: Vec<Arc<OwnedFd>>) {
        match &self.control {
            Some(c) => c.send(msg, fds),
            None => self.keep(msg),
        }
    }

    /// Nobody hears this now; some of it must not be lost.
    fn keep(&mut self, msg: ToShim) {
        match msg {
            ToShim::PeerGone { .. }
            | ToShim::LaneGone { .. }
            | ToShim::Command { op: op::GONE, .. } => self.missed.push(msg),
            ToShim::Command { conn, gen, op } => self.commands.add(conn, gen, op),
            _ => {}
        }
    }

    /// May another process than this one hold a connection? (A child may not have run yet.)
    pub fn others_hold(&self, conn: u32, gen: u32) -> bool {
        // Numbers in the process's own pid namespace: elsewhere we cannot tell who lives.
        let here = self.own_pid == self.proc_id.pid;
        let lives = |pid: &u32| !here || std::path::Path::new(&format!("/proc/{pid}")).exists();
        let held = || {
            let v = self.family.view(conn).filter(|v| v.gen == gen);
            v.is_some_and(|v| {
                v.forks > 0 || v.holders.iter().any(|h| *h != self.own_pid && lives(h))
            })
        };
        // A child that enters itself, and then is no fork any more, may be missed in one look.
        held() || held()
    }

    /// Another table is shown: is it time for that?
    pub fn may_move(&mut self) -> bool {
        if self.moves.0.elapsed() > Duration::from_secs(1) {
            self.moves = (Instant::now(), 0);
        }
        self.moves.1 += 1;
        self.moves.1 <= MOVES_MAX
    }

    /// The control connection is gone.
    pub fn disconnect(&mut self) {
        let Some(c) = self.control.take() else { return };
        c.cut();
        for m in c.take_unsent() {
            self.keep(m);
        }
        self.under_way.clear();
    }
}
