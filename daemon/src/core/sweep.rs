//! Dropping what belongs to connections and lanes that ended without a message.

use super::{alive, Core};
use crate::clients::ids::ConnRef;
use underpass_rdma::verbs::Provider;

/// Most waiting ends that one sweep looks at: each costs two reads of a table. If there are more, the others' turn comes with
/// the next ones.
const LOOKED_AT: usize = 16_384;
/// So many, and then others are served.
pub(crate) const AT_ONCE: usize = 256;

impl<V: Provider> Core<V> {
    /// All of it at once.
    pub fn sweep(&mut self) {
        let all = self.waiting_in_turn();
        self.sweep_waiting(&all);
        self.sweep_rest();
    }

    /// The waiting ends whose turn it is.
    pub(crate) fn waiting_in_turn(&mut self) -> Vec<ConnRef> {
        self.waiting.in_turn(LOOKED_AT)
    }

    pub(crate) fn sweep_waiting(&mut self, some: &[ConnRef]) {
        let clients = &self.clients;
        self.waiting.sweep(some, |c| alive(clients, c));
    }

    pub(crate) fn sweep_rest(&mut self) {
        self.sweep_across();
        self.rails(|r| r.sweep());
    }
}
