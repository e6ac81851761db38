//! Connections that a shim had to reset, for the log.

use super::Core;
use crate::clients::ids::ConnRef;
use crate::clients::view;
use lane::proto::reason::Reason;
use underpass_rdma::verbs::Provider;

/// What is logged of a process that knows of one.
pub(super) const FUSE: &str =
    "had to reset a connection: new ones stay on TCP (fuse) until `underpass up`";

impl<V: Provider> Core<V> {
    /// The shim says that it has reset this connection.
    pub(super) fn was_reset(&mut self, who: ConnRef, code: u32) {
        let why = Reason::from_code(code).map_or("unknown", |r| r.info().name);
        let table = self.clients.get(&who.client).map(|p| &p.family);
        let row = table.and_then(|t| t.view(who.conn));
        let ends = row
            .filter(|v| v.gen == who.gen)
            .and_then(|v| Some((view::address(&v.local)?, view::address(&v.peer)?)));
        let which = match ends {
            Some((local, peer)) => format!("{local} -> {peer}"),
            None => format!("connection {}", who.conn),
        };
        self.event(who.client, &format!("reset {which}: {why}"));
    }
}
