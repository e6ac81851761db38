//! What operators want of programs (`down`, `up`), and to whom it is told.

use super::Core;
use crate::ids::PartyId;
use underpass_rdma::verbs::Provider;

/// A process that orders can be given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// [`PartyId::NOBODY`]: it has not said hello to this daemon.
    pub party: PartyId,
    pub pid: u32,
    pub uid: u32,
    pub netns: u64,
}

impl<V: Provider> Core<V> {
    pub fn subjects(&self) -> Vec<Subject> {
        let parties = self.parties.values().map(|p| Subject {
            party: p.id,
            pid: p.proc_id.pid,
            uid: p.uid,
            netns: p.netns,
        });
        let recovered = self.recovered.iter().map(|r| Subject {
            party: PartyId::NOBODY,
            pid: r.id.pid,
            uid: r.uid,
            netns: r.netns,
        });
        parties.chain(recovered).collect()
    }

    /// Gives an order. `false`: the process will hear it when it says hello.
    pub fn order(&mut self, to: Subject, conn: u32, gen: u32, what: u32) -> bool {
        if to.party != PartyId::NOBODY {
            return self.command(to.party, conn, gen, what);
        }
        if let Some(r) = self.recovered.iter_mut().find(|r| r.id.pid == to.pid) {
            r.orders.add(conn, gen, what);
        }
        false
    }
}
