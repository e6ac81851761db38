//! Operator commands (`down`, `up`), and the processes that they go to.

use super::Core;
use crate::clients::ids::ClientId;
use lane::proto::msg::ToShim;
use underpass_rdma::verbs::Provider;

/// A process that operators can command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommandTarget {
    /// [`ClientId::NOBODY`]: it has not said hello to this daemon.
    pub client: ClientId,
    pub pid: u32,
    pub uid: u32,
    pub netns: u64,
}

impl<V: Provider> Core<V> {
    pub fn command_targets(&self) -> Vec<CommandTarget> {
        let clients = self.clients.values().map(|p| CommandTarget {
            client: p.id,
            pid: p.proc_id.pid,
            uid: p.uid,
            netns: p.netns,
        });
        let recovered = self.recovered.iter().map(|r| CommandTarget {
            client: ClientId::NOBODY,
            pid: r.id.pid,
            uid: r.uid,
            netns: r.netns,
        });
        clients.chain(recovered).collect()
    }

    /// Tells a shim what to do with a connection. `false`: it is not connected; what operators want is kept until it is.
    pub fn command(&mut self, client: ClientId, conn: u32, gen: u32, op: u32) -> bool {
        let Some(p) = self.clients.get_mut(&client) else {
            return false;
        };
        p.send(ToShim::Command { conn, gen, op }, vec![]);
        p.control.is_some()
    }

    /// Passes on an operator's command for a connection. `false`: the process gets it when it says hello.
    pub fn command_to(&mut self, to: CommandTarget, conn: u32, gen: u32, what: u32) -> bool {
        if to.client != ClientId::NOBODY {
            return self.command(to.client, conn, gen, what);
        }
        if let Some(r) = self.recovered.iter_mut().find(|r| r.id.pid == to.pid) {
            r.commands.add(conn, gen, what);
        }
        false
    }
}
