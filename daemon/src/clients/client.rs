//! Clients: who can be at an end of a link group. A shim's process on this node, known by its control
//! connection; or this daemon itself, once per peer node, whose messages go to `dataplane::rail`.

use crate::clients::commands::PendingCommands;
use crate::clients::control::Control;
use crate::clients::family::Family;
use crate::clients::ids::ClientId;
use crate::clients::limits::{Cgroup, Member};
use crate::os::memory_room::Room;
use crate::os::process::ProcId;
use crate::os::system::System;
use lane::proto::msg::{op, ToShim};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A shim's process.
pub struct Client {
    pub id: ClientId,
    pub proc_id: ProcId,
    /// Its pid in its own pid namespace, as the process says; the number that its table uses.
    pub own_pid: u32,
    pub uid: u32,
    pub comm: String,
    pub netns: u64,
    pub member: Member,
    /// Its memory cgroup, and those above.
    pub(crate) room: Rc<Room>,
    pub family: Arc<Family>,
    /// `None` while the process lives without a control connection.
    pub control: Option<Rc<Control>>,
    /// Registrations it may still send.
    pub credits: u32,
    /// Credits that are free again, but not returned to the shim yet: several are returned at once.
    pub untold: u32,
    /// Registrations that are being looked at.
    pub under_way: HashSet<(u32, u32)>,
    /// When connections were registered that have neither been offered a lane nor declined, with their generations.
    pub registered: HashMap<u32, (u32, Duration)>,
    /// Its last registrations, the newest last.
    pub known: VecDeque<Known>,
    /// Messages about link groups and lanes that ended while there was no control connection; sent when there is one
    /// again.
    pub missed: Vec<ToShim>,
    /// Operator commands of that time.
    pub commands: PendingCommands,
    /// Moves to another table.
    pub moves: PerSecond,
    /// Resets that were logged.
    pub resets: PerSecond,
    /// The first connection whose reset blows the fuse, until that is logged.
    pub blown_by: Option<String>,
    /// Dropped with the client: then nobody waits any more for its process to end.
    pub watched: Option<tokio::sync::oneshot::Sender<()>>,
}

/// The addresses of a connection, for the log: its table has them no more when it is closed.
pub struct Known {
    /// Its place in the table, and its generation.
    pub who: (u32, u32),
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

/// Most registrations that are remembered of a process.
pub(crate) const KNOWN_MAX: usize = 256;

/// Counts something within seconds.
#[derive(Clone, Debug, Default)]
pub struct PerSecond {
    began: Duration,
    n: u32,
}

impl PerSecond {
    /// It happens once more: is that within the limit?
    pub fn once_more(&mut self, now: Duration, most: u32) -> bool {
        if now.saturating_sub(self.began) > Duration::from_secs(1) {
            *self = PerSecond { began: now, n: 0 };
        }
        self.n = self.n.saturating_add(1);
        self.n <= most
    }
}

/// Most moves to another table in a second; shims make at most five.
const MOVES_MAX: u32 = 32;

/// Most resets of one process that are logged in a second: the log is everybody's.
const RESETS_MAX: u32 = 8;

impl Client {
    pub fn cgroup(&self) -> &Arc<Cgroup> {
        &self.member.0
    }

    pub fn send(&mut self, msg: ToShim, fds: Vec<Arc<OwnedFd>>) {
        match &self.control {
            Some(c) => c.send(msg, fds),
            None => self.keep(msg),
        }
    }

    /// There is no control connection: keeps the messages that must not be lost.
    fn keep(&mut self, msg: ToShim) {
        match msg {
            ToShim::PeerGone { .. }
            | ToShim::LaneGone { .. }
            | ToShim::TakenOver { .. }
            | ToShim::Command { op: op::GONE, .. } => self.missed.push(msg),
            ToShim::Command { conn, gen, op } => self.commands.add(conn, gen, op),
            _ => {}
        }
    }

    /// May another process than this one hold a connection? (A child that has not run yet is counted in `forks`.)
    pub fn others_hold(&self, conn: u32, gen: u32, system: &dyn System) -> bool {
        // The holders are pids of the process's own namespace: in another one we cannot tell who lives.
        let here = self.own_pid == self.proc_id.pid;
        let lives = |pid: &u32| !here || system.lives(*pid);
        let held = || {
            let v = self.family.view(conn).filter(|v| v.gen == gen);
            v.is_some_and(|v| {
                v.forks > 0 || v.holders.iter().any(|h| *h != self.own_pid && lives(h))
            })
        };
        // A child that changes from a fork to a holder during one look may be missed by it, so look twice.
        held() || held()
    }

    /// A process moves to another table: is that within the limit?
    pub fn may_move(&mut self, now: Duration) -> bool {
        self.moves.once_more(now, MOVES_MAX)
    }

    /// A shim says that it has reset a connection: is that within the limit?
    pub fn may_log_reset(&mut self, now: Duration) -> bool {
        self.resets.once_more(now, RESETS_MAX)
    }

    /// The control connection is gone. `ended`: and the process.
    pub fn disconnect(&mut self, ended: bool) {
        let Some(c) = self.control.take() else { return };
        match ended {
            true => c.cut(), // (helpers go on for it)
            false => c.over(),
        }
        for m in c.take_unsent() {
            self.keep(m);
        }
        self.under_way.clear();
        self.registered.clear();
    }
}
