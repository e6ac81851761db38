//! Connections that a shim had to reset, for the log.

use super::Core;
use crate::clients::client::Known;
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::view;
use lane::proto::reason::Reason;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// The shim says that it has reset this connection.
    pub(super) fn was_reset(&mut self, who: ConnRef, code: u32) {
        self.count_reset(code);
        let reason = Reason::from_code(code);
        let why = reason.map_or("unknown", |r| r.info().name);
        let which = self.named(who);
        // (These blow the fuse: `count_reset` in the shim's `tcp/errors.rs`.)
        let fault = matches!(
            reason,
            Some(Reason::Stalled | Reason::InDoubt | Reason::Internal)
        );
        if let Some(c) = self.clients.get_mut(&who.client).filter(|_| fault) {
            c.blown_by.get_or_insert_with(|| which.clone());
        }
        if !self.may_log(who.client) {
            return;
        }
        self.event(who.client, &format!("reset {which}: {why}"));
    }

    /// New connections of this process stay on TCP.
    pub(super) fn fuse_blown(&mut self, id: ClientId) {
        self.counters.fuses += 1;
        // (Another process of its family may have said which it was.)
        let by = self.clients.get_mut(&id).and_then(|c| c.blown_by.take());
        let of = by.map_or(String::new(), |which| format!(" of {which}"));
        if self.may_log(id) {
            let says = format!(
                "new connections stay on TCP after a reset{of} (fuse) until `underpass up`"
            );
            self.event(id, &says);
        }
    }

    /// What is known of a connection of this process. (A forked child may have its parent's.)
    pub(super) fn known(&self, who: ConnRef) -> impl Iterator<Item = &Known> {
        let family = self.clients.get(&who.client).map(|p| p.family.ident);
        let kin = family.into_iter().flat_map(|f| self.of_family(f));
        kin.filter_map(move |p| p.known.get(&who.conn))
            .filter(move |k| k.gen == who.gen)
    }

    /// A connection's addresses, also if it is closed by now; its number if another daemon has registered it and it is closed.
    pub(super) fn named(&self, who: ConnRef) -> String {
        let known = self.known(who).next().map(|k| (k.local, k.peer));
        let ends = known.or_else(|| {
            let row = self.clients.get(&who.client)?.family.view(who.conn);
            let row = row.filter(|v| v.gen == who.gen)?;
            Some((view::address(&row.local)?, view::address(&row.peer)?))
        });
        match ends {
            Some((local, peer)) => format!("{local} -> {peer}"),
            None => format!("connection {}", who.conn),
        }
    }

    fn may_log(&mut self, id: ClientId) -> bool {
        let now = self.now();
        let client = self.clients.get_mut(&id);
        client.is_some_and(|c| c.may_log_reset(now))
    }
}
