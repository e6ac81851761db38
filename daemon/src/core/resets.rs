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
        // (These blow the fuse: `count_reset` in the shim's `tcp/errors.rs`.)
        let fault = matches!(
            reason,
            Some(Reason::Stalled | Reason::InDoubt | Reason::Internal)
        );
        let client = self.clients.get(&who.client);
        let blows = fault && client.is_some_and(|c| c.blown_by.is_none());
        let logs = self.may_log(who.client);
        // A client may say this as often as it likes: what is said in vain costs nothing.
        if !(blows || logs) {
            return;
        }
        let which = self.named(who);
        if logs {
            self.event(who.client, &format!("reset {which}: {why}"));
        }
        if let Some(c) = self.clients.get_mut(&who.client).filter(|_| blows) {
            c.blown_by = Some(which);
        }
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

    /// A connection's addresses, also if it is closed by now. (If it was registered long ago, or with another daemon, and is
    /// closed: its number.)
    fn named(&self, who: ConnRef) -> String {
        let client = self.clients.get(&who.client);
        let ends = client.and_then(|p| {
            let its = |k: &&Known| k.who == (who.conn, who.gen);
            let known = p.known.iter().rev().find(its);
            known.map(|k| (k.local, k.peer)).or_else(|| {
                let row = p.family.view(who.conn).filter(|v| v.gen == who.gen)?;
                Some((view::address(&row.local)?, view::address(&row.peer)?))
            })
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
