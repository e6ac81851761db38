//! Dropping what belongs to connections and lanes that ended without a message.

use super::{alive, Core};
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// A step of it. `true`: there is more to do.
    pub fn sweep(&mut self) -> bool {
        let clients = &self.clients;
        if self.waiting.sweep(|c| alive(clients, c)) {
            return true;
        }
        self.sweep_across();
        self.rails(|r| r.sweep());
        false
    }
}
