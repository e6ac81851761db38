//! Operator commands (`down`, `up`), and the processes that they go to.

use super::Core;
use crate::clients::ids::PartyId;
use underpass_rdma::verbs::Provider;

/// A process that operators can command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommandTarget {
    /// [`PartyId::NOBODY`]: it has not said hello to this daemon.
    pub party: PartyId,
    pub pid: u32,
    pub uid: u32,
    pub netns: u64,
}

impl<V: Provider> Core<V> {
    pub fn command_targets(&self) -> Vec<CommandTarget> {
        let parties = self.parties.values().map(|p| CommandTarget {
            party: p.id,
            pid: p.proc_id.pid,
            uid: p.uid,
            netns: p.netns,
        });
        let recovered = self.recovered.iter().map(|r| CommandTarget {
            party: PartyId::NOBODY,
            pid: r.id.pid,
            uid: r.uid,
            netns: r.netns,
        });
        parties.chain(recovered).collect()
    }

    /// Passes on an operator's command for a connection. `false`: the process gets it when it says hello.
    pub fn command_to(&mut self, to: CommandTarget, conn: u32, gen: u32, what: u32) -> bool {
        if to.party != PartyId::NOBODY {
            return self.command(to.party, conn, gen, what);
        }
        if let Some(r) = self.recovered.iter_mut().find(|r| r.id.pid == to.pid) {
            r.commands.add(conn, gen, what);
        }
        false
    }
}
