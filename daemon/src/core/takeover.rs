//! Lanes within the node whose ends are brought to TCP by this daemon.

use super::Core;
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::Cgroup;
use crate::lanes::groups::{Out, Violation};
use crate::lanes::takeover::Takeover;
use lane::num;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use std::os::fd::AsFd;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// A takeover to be carried out, and what it was about.
pub(crate) struct Ordered {
    pub takeover: Takeover,
    /// Who asked for it pays for the helper.
    pub payer: Arc<Cgroup>,
    pub at: (u64, u32),
    pub uses: u32,
    pub side: usize,
    pub who: ConnRef,
}

impl<V: Provider> Core<V> {
    /// A shim leaves a lane, and asks for what the other end does not do.
    pub(super) fn take_over(
        &mut self,
        from: ClientId,
        (group, lane): (u64, u32),
        side: u8,
    ) -> Result<(), Violation> {
        let Some(found) = self.groups.take_over(from, group, side, lane)? else {
            return Ok(());
        };
        let (at, uses, side, who) = (found.at, found.uses, found.side, found.who);
        let payer = self.clients.get(&from).map(|p| p.cgroup().clone());
        let sender = self.clients.get(&who.client).and_then(|p| {
            // (A process without a control connection could not see that this daemon has died.)
            let control = p.control.as_ref()?;
            let copy = rustix::io::fcntl_dupfd_cloexec(control.sock.get_ref().as_fd(), 0);
            Some((p.proc_id, p.family.clone(), copy.ok()?))
        });
        let (Some(payer), Some((process, family, control))) = (payer, sender) else {
            self.taken_over(at, uses, side, who);
            return Ok(());
        };
        let system = self.system.clone();
        self.takeovers.push(Ordered {
            takeover: Takeover::new(found, (process, family), control, system),
            payer,
            at,
            uses,
            side,
            who,
        });
        Ok(())
    }

    /// A takeover is over, or came to nothing: its end may sleep until it is told.
    pub(crate) fn taken_over(&mut self, at: (u64, u32), uses: u32, side: usize, who: ConnRef) {
        if let Some(p) = self.clients.get_mut(&who.client) {
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
        self.groups.taken_over(at, uses, side, &mut out);
        self.act(out, Reason::PeerGone, 0);
    }
}
