//! Since when nobody needs the daemon.

use super::Core;
use crate::clients::limits::Member;
use crate::clients::tenant;
use crate::os::process::Process;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// A process asked the daemon to stay, until [`Core::unkeep`]. The guard counts it against its cgroup; `None`:
    /// the limit is reached.
    pub fn keep(&mut self, process: &Process) -> Option<Member> {
        let member = self
            .cgroups
            .get(&tenant::of(&process.cgroups, process.uid))
            .enter()?;
        self.kept += 1;
        self.busy_changed();
        Some(member)
    }

    pub fn unkeep(&mut self) {
        self.kept -= 1;
        self.busy_changed();
    }

    /// Programs that will need the daemon are alive, although none is connected: the idle time begins anew.
    pub fn not_idle(&mut self) {
        if self.idle_since.is_some() {
            self.idle_since = Some(self.now());
        }
    }

    pub(crate) fn busy_changed(&mut self) {
        let idle = self.connected == 0 && self.groups.lanes() == 0 && self.kept == 0;
        match (idle, self.idle_since) {
            (true, None) => self.idle_since = Some(self.now()),
            (false, Some(_)) => self.idle_since = None,
            _ => {}
        }
    }
}
