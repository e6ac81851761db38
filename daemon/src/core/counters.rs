//! What the core counts, for `underpass stats` and `/metrics`.

use super::Core;
use crate::clients::client::PerSecond;
use crate::clients::ids::ConnRef;
use crate::histogram::Histogram;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use std::collections::BTreeMap;
use underpass_rdma::verbs::Provider;

#[derive(Clone, Default)]
pub struct Counters {
    pub registered: u64,
    pub paired: u64,
    pub declined: u64,
    /// Ends that were paired with an end on another node.
    pub paired_across: u64,
    pub taken_over: u64,
    /// `declined` by the code of the reason that the end was told.
    pub declined_for: BTreeMap<u32, u64>,
    /// Resets that shims have told of, by the code of the reason; [`UNKNOWN`]: one that is none.
    pub reset_for: BTreeMap<u32, u64>,
    pub fuses: u64,
    /// Connections of shims that were refused at their hello, by the code of the reason, or cut because they broke the
    /// rules ([`Reason::Hostile`]).
    pub refused_for: BTreeMap<u32, u64>,
    /// Of them, those that are logged.
    refused_logged: PerSecond,
    /// From the registration of an end to the offer of its lane.
    pub promotion: Histogram,
}

/// Most refused or cut connections of shims that are logged in a second. (Any process can make as many as it likes.)
const REFUSED_LOGGED_MAX: u32 = 16;

/// Stands for all codes that a shim may have made up: they must not become as many counters.
pub(crate) const UNKNOWN: u32 = u32::MAX;

impl<V: Provider> Core<V> {
    /// An end is registered: from now on the time runs until its lane is offered.
    pub(super) fn timing_begins(&mut self, who: ConnRef) {
        let now = self.now();
        if let Some(p) = self.clients.get_mut(&who.client) {
            p.registered.insert(who.conn, (who.gen, now));
        }
    }

    /// It gets no lane for now.
    pub(super) fn timing_ends(&mut self, who: ConnRef) {
        if let Some(p) = self.clients.get_mut(&who.client) {
            p.registered.remove(&who.conn);
        }
    }

    /// A message goes to this client: is it the offer of a lane?
    pub(super) fn note_offer(&mut self, to: crate::clients::ids::ClientId, msg: &ToShim) {
        let ToShim::Offer { conn, gen, .. } = *msg else {
            return;
        };
        let now = self.now();
        let began = self.clients.get_mut(&to);
        let began = began.and_then(|p| p.registered.remove(&conn));
        if let Some((_, at)) = began.filter(|b| b.0 == gen) {
            self.counters.promotion.add(now.saturating_sub(at));
        }
    }

    pub(super) fn count_declined(&mut self, why: Reason) {
        self.counters.declined += 1;
        *self.counters.declined_for.entry(why.code()).or_default() += 1;
    }

    /// A shim was refused, or cut. Is that to be logged?
    pub(crate) fn count_refused(&mut self, why: Reason) -> bool {
        let now = self.now();
        *self.counters.refused_for.entry(why.code()).or_default() += 1;
        let logged = &mut self.counters.refused_logged;
        logged.once_more(now, REFUSED_LOGGED_MAX)
    }

    pub(super) fn count_reset(&mut self, code: u32) {
        let code = Reason::from_code(code).map_or(UNKNOWN, Reason::code);
        *self.counters.reset_for.entry(code).or_default() += 1;
    }
}
