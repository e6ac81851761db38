//! What is claimed about an end to another node, and how another node's claim is checked.

use super::table::Table;
use super::{Out, Shown, APART_NS};
use crate::nodes::peers::digest::Key;
use crate::nodes::peers::directory::{Directory, Name, Owner};
use crate::nodes::peers::msg::{Claim, Msg};
use crate::pairing::proof::{Record, Role};
use crate::pairing::socket::{consistent, Counts, End};
use lane::proto::reason::Reason;
use std::net::SocketAddr;

/// The claim of node `own` about an end.
pub(super) fn claim(own: &Name, key: &Key, end: &End, now_ns: u64) -> Claim {
    let r = end.record.as_ref();
    Claim {
        proof: r.map(|r| key.digest(own, r.snd, r.rcv)),
        local: end.local,
        peer: end.peer,
        age_ms: r.map_or(0, |r| now_ns.saturating_sub(r.at_ns) / 1_000_000),
        active: r.is_some_and(|r| r.role == Role::Active),
        sent: end.counts.sent,
        acked: end.counts.acked,
        received: end.counts.received,
    }
}

/// Checks a claim whose digest fits: may `node` make it, and is it consistent with our end?
pub(super) fn judge(
    directory: &dyn Directory,
    node: &Name,
    (claim, at_ns): (&Claim, u64),
    (end, record): (&End, &Record),
    now_ns: u64,
) -> Result<(), Reason> {
    let theirs = |a: SocketAddr| directory.owner(a.ip()) == Owner::Peer(node.clone());
    let speaks = match directory.owner(claim.local.ip()) {
        Owner::Nobody => theirs(end.peer),
        _ => theirs(claim.local),
    };
    if !speaks {
        return Err(Reason::WrongNode);
    }
    // The clocks of two nodes cannot be compared, but the connection's age can.
    let waited = now_ns.saturating_sub(at_ns);
    let age = claim
        .age_ms
        .saturating_mul(1_000_000)
        .saturating_add(waited);
    if now_ns.saturating_sub(record.at_ns).abs_diff(age) >= APART_NS {
        return Err(Reason::Unproven);
    }
    if claim.active && record.role == Role::Active {
        return Err(Reason::Unproven); // numbers that were set by hand, see `Record::proves`
    }
    // It is not known which of the two was read first: either order is accepted.
    let counts = |from, until| Counts {
        from,
        until,
        sent: claim.sent,
        acked: claim.acked,
        received: claim.received,
    };
    let (from, until) = (end.counts.from, end.counts.until);
    if consistent(&counts(from, from), &end.counts)
        || consistent(&end.counts, &counts(until, until))
    {
        directory.met(claim.local.ip());
        directory.met(end.peer.ip());
        Ok(())
    } else {
        Err(Reason::Unproven)
    }
}

/// The addresses of our end and of a Lookup mirror each other, but their proofs do not. If both have a proof, they
/// are two connections (or one is forged), and nobody is told. Otherwise nothing can be proven, and both are told
/// so. Neither stops waiting, because then a forgery could keep the real end away.
pub(super) fn hint(t: &Table, lookup: u64, end: &End, out: &mut Vec<Out>) -> Shown {
    let theirs = t
        .lookups
        .get(&lookup)
        .is_some_and(|s| s.claim.proof.is_some());
    let code = Reason::Unproven.code();
    let mut note = Shown::default();
    if end.record.is_none() {
        note.local = code;
        t.send(
            Msg::Hint {
                lookup,
                reason: code,
            },
            out,
        );
    }
    if !theirs {
        note.peer = code;
    }
    note
}
