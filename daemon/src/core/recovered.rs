//! Processes of families that are older than this daemon.

use super::Core;
use crate::clients::adopt::{Found, Recovered};
use crate::clients::commands::PendingCommands;
use crate::clients::families::Account;
use crate::os::memfd::Ident;
use crate::os::process::ProcId;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    pub fn adopt(&mut self, f: Found) {
        if self.clients.values().any(|p| p.proc_id == f.id) {
            return; // it has said hello meanwhile
        }
        let Some(member) = self.cgroups.get(&f.cgroup).enter() else {
            return;
        };
        self.families.join(f.ident, f.table);
        self.recovered.push(Recovered {
            ident: f.ident,
            id: f.id,
            own_pid: f.own_pid,
            uid: f.uid,
            netns: f.netns,
            comm: f.comm,
            commands: PendingCommands::default(),
            member,
        });
    }

    /// Operator commands that were given before the process said hello.
    pub fn missed_by(&mut self, id: ProcId, ident: Ident) -> PendingCommands {
        let mut recovered = self.recovered.iter_mut();
        let recovered = recovered.find(|r| r.id == id && r.ident == ident);
        recovered
            .map(|r| std::mem::take(&mut r.commands))
            .unwrap_or_default()
    }

    /// Finds the pods of families that have come since the last time; to be called before tables are read.
    pub fn find_pods(&mut self) {
        let known = &self.pods;
        self.families.place(|cgroups| {
            let at = known.of_cgroup(cgroups)?;
            Some(Account {
                namespace: at.namespace,
                pod: at.pod,
            })
        });
    }

    /// Forgets processes that have ended, or that have said hello by now.
    pub fn forget_recovered(&mut self, gone: impl Fn(&Recovered) -> bool) {
        let families = &mut self.families;
        self.recovered.retain(|r| {
            let stays = !gone(r);
            if !stays {
                families.leave(r.ident);
            }
            stays
        });
    }
}
