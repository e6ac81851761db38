//! Processes of families that are older than this daemon.

use super::Core;
use crate::clients::adopt::{Found, Recovered};
use crate::clients::commands::PendingCommands;
use crate::clients::families::Account;
use crate::clients::family::Totals;
use crate::clients::tenant;
use crate::os::memfd::Ident;
use crate::os::process::ProcId;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// `found`: what its table says.
    pub fn adopt(&mut self, f: Found, found: Option<Totals>) {
        if self.clients.values().any(|p| p.proc_id == f.id) {
            return; // it has said hello meanwhile
        }
        let Some(member) = self.cgroups.get(&tenant::of(&f.cgroups, f.uid)).enter() else {
            return;
        };
        self.join_family((f.ident, f.table), found, f.id, &f.cgroups);
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
                families.leave(r.ident, None);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::os::fds::Foreign;
    use crate::os::system::Machine;
    use crate::pairing::proof::NoProof;
    use std::sync::Arc;
    use underpass_ibv::Ibv;

    #[test]
    fn what_was_found_counts_for_its_pod() {
        let proof = Arc::new(NoProof);
        let mut c = Core::<Ibv>::new(Config::default(), None, proof, Arc::new(Machine), None);
        let table = crate::os::memfd::make("t", lane::family::TABLE_BYTES).unwrap();
        let found = Found {
            ident: Ident { dev: 1, ino: 1 },
            table: Foreign::new(table),
            id: ProcId { pid: 1, start: 1 },
            own_pid: 1,
            uid: 0,
            netns: 0,
            comm: String::new(),
            cgroups: "0::/pod-a/b\n".into(),
        };
        c.adopt(found, None);
        c.families.place(|cgroups| {
            Some(Account {
                namespace: "shop".into(),
                pod: cgroups.trim().to_owned(),
            })
        });
        let all = c.families.by_pod();
        let mut pods = all.iter().filter(|p| p.2).map(|p| p.0.pod.as_str());
        assert_eq!((pods.next(), pods.next()), (Some("0::/pod-a/b"), None));
    }
}
