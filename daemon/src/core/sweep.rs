//! Dropping what belongs to connections and lanes that ended without a message.

use super::{alive, Core};
use crate::clients::client::Client;
use crate::clients::control::Control;
use std::rc::Rc;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// A step of this core has panicked. The tables keep what the step has entered before: an end, a lane or a group that is
    /// in one of them and not in another is found by nobody, and goes with its client, or with a sweep. What would keep later
    /// steps from their work is set right here.
    pub(crate) fn recover(&mut self) {
        self.effects.interrupted();
        self.swept_here = false;
        self.recount();
        self.effects();
        self.busy_changed();
    }

    /// The greeting of a client on this connection has panicked, which may have been let in before.
    pub(crate) fn not_greeted(&mut self, control: &Rc<Control>) {
        let is = |p: &&Client| p.control.as_ref().is_some_and(|c| Rc::ptr_eq(c, control));
        let found = self.clients.values().find(is);
        match found.map(|p| (p.id, p.watched.is_some())) {
            Some((id, true)) => self.disconnect(id, Some(control)),
            Some((id, false)) => self.dead(id), // nobody would notice its end
            None => {}
        }
    }

    /// What a test leaves behind before it panics.
    pub(crate) fn half_done(&mut self) {
        self.effects.interrupt();
        self.connected += 1;
    }

    /// A step of it. `true`: there is more to do.
    pub fn sweep(&mut self) -> bool {
        if !self.swept_here {
            let clients = &self.clients;
            let more = self.waiting.sweep(|c| alive(clients, c));
            self.swept_here = !more;
            return true;
        }
        if self.sweep_across() {
            return true;
        }
        self.swept_here = false;
        self.rails(|r| r.sweep());
        false
    }
}
