//! Rules change while connections are there: what is denied now goes down to TCP, what was and is not any more may go up.

use crate::admin::stream::Rows;
use crate::clients::view::Entry;
use crate::core::Shared;
use crate::rules::{Rules, Subject};
use lane::proto::msg::op;
use lane::proto::reason::Reason;
use std::collections::HashMap;
use underpass_admin::Response;

fn subject(e: &Entry) -> Option<Subject<'_>> {
    let (local, peer) = e.addresses()?;
    Some(Subject {
        program: &e.row.comm,
        uid: e.row.uid,
        addresses: [local, peer],
        namespace: e.row.at.as_ref().map(|w| w.namespace.as_str()),
    })
}

/// Tells the shims of all these connections what the rules say now, and did not say before.
pub(super) fn apply(shared: &Shared, all: &Rows, before: &Rules) -> Response {
    let mut core = shared.borrow_mut();
    let targets = core.command_targets();
    let targets: HashMap<_, _> = targets.iter().map(|t| ((t.client, t.pid), *t)).collect();
    let (mut ends, mut later) = (0, 0);
    for e in all.iter().filter(|e| e.is_steerable()) {
        let (Some(s), Some(to)) = (subject(e), targets.get(&(e.client, e.row.pid))) else {
            continue;
        };
        let declined = e.row.reason == Reason::Config.code();
        let told = match (before.deny(&s), core.rules.deny(&s)) {
            (_, true) if declined => continue,
            // (Whoever is down already is told again: `underpass up` may have come between.)
            (_, true) => core.command_to(*to, e.conn, e.gen, op::DOWN),
            (true, false) => {
                // (The daemon has declined those that had no lane. Eager: now, and not after half a minute.)
                if declined {
                    core.command_to(*to, e.conn, e.gen, op::EAGER);
                }
                core.command_to(*to, e.conn, e.gen, op::UP)
            }
            (false, false) => continue,
        };
        *(if told { &mut ends } else { &mut later }) += 1;
    }
    Response::Told { ends, later }
}
