//! Lanes within the node whose ends are brought to TCP by this daemon.

use super::Core;
use crate::clients::client::Client;
use crate::clients::ids::ClientId;
use crate::clients::limits::{Cgroup, TakeoverSeat};
use crate::lanes::groups::{Direction, Out, Violation};
use crate::lanes::takeover::Takeover;
use crate::os::fds::Foreign;
use lane::num;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use std::os::fd::AsFd;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// A takeover to be carried out, and what it was about.
pub(crate) struct Ordered {
    pub takeover: Takeover,
    /// The cgroup of the end pays for the helpers, because what it has may make them wait; who asked takes the seat.
    pub payer: Arc<Cgroup>,
    pub seat: TakeoverSeat,
    pub direction: Direction,
}

impl<V: Provider> Core<V> {
    /// A shim leaves a lane, and asks for what one of the ends, `sender`, does not do, or cannot.
    pub(super) fn take_over(
        &mut self,
        from: ClientId,
        (group, lane): (u64, u32),
        (side, sender): (u8, u8),
    ) -> Result<(), Violation> {
        // A forked child may do it for its parent's lane.
        let owner = self.groups.owner(group, side).unwrap_or(from);
        let family = |id| self.clients.get(&id).map(|p: &Client| p.family.ident);
        if family(owner) != family(from) {
            return Ok(()); // (its parent may have ended meanwhile, or it has moved to a table of its own)
        }
        let seat = self.clients.get(&from).and_then(|p| p.cgroup().takeover());
        let Some(seat) = seat else {
            return Ok(());
        };
        let Some(found) = self
            .groups
            .take_over(owner, (group, lane), (side, sender))?
        else {
            return Ok(());
        };
        let direction = found.direction;
        let sender = self.clients.get(&direction.who.client).and_then(|p| {
            // (A process without a control connection could not see that this daemon has died.)
            let control = p.control.as_ref()?;
            let copy = rustix::io::fcntl_dupfd_cloexec(control.sock.get_ref().as_fd(), 0);
            let copy = Foreign::received(copy.ok()?, Some(p.cgroup().descriptors.clone()));
            Some((p, (copy, control.lives.clone())))
        });
        let Some((p, control)) = sender else {
            self.taken_over(direction, false);
            return Ok(());
        };
        let (payer, system) = (p.cgroup().clone(), self.system.clone());
        let end = (p.proc_id, p.family.clone());
        self.takeovers.push(Ordered {
            takeover: Takeover::new(found, end, control, system),
            payer,
            seat,
            direction,
        });
        Ok(())
    }

    /// A takeover is over, or came to nothing. `claimed`: its end may have seen it, and sleeps until it is told.
    pub(crate) fn taken_over(&mut self, direction: Direction, claimed: bool) {
        let Direction { at, who, side, .. } = direction;
        let told = self.clients.get_mut(&who.client).filter(|_| claimed);
        if let Some(p) = told {
            let msg = ToShim::TakenOver {
                group: at.0,
                side: num::tiny(side),
                lane: at.1,
                conn: who.conn,
                gen: who.gen,
            };
            p.send(msg, vec![]);
        }
        let mut out = Out::default();
        self.groups.taken_over(direction, &mut out);
        self.act(out, Reason::PeerGone, 0);
    }
}
