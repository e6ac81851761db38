//! One attempt of an end to leave its lane: what its receiving half does, and what comes of the attempt. Without I/O and
//! waits, so that the tests' world takes the same steps as the shim.

use super::mem::Memory;
use super::rx::{Revoked, RxState};
use super::Port;
use crate::proto::reason::Reason;

/// Milliseconds for a daemon that has not begun to take over the direction of a peer that is gone (it may have copied the
/// socket before), and for one that has recorded it to have the bytes on TCP. Across nodes the latter is the time for bytes
/// to arrive.
const GONE_MS: u64 = 60;
const COMING_MS: u64 = 100;

/// Milliseconds that a connection's peer, or a daemon in its stead, gets to put bytes back on TCP, or to take them from
/// there; after that, a connection that leaves its lane is reset.
pub const LEAVE_MS: u64 = 2000;
/// Milliseconds without a message after which a daemon asks whether a link to another node works. After as many again
/// without an answer it is dead, and the ends that used it come down.
pub const LINK_QUIET_MS: u64 = 1000;
/// Milliseconds until the daemons know that a link has died. Until then they cannot do their part.
pub const LINK_DEAD_MS: u64 = 2 * LINK_QUIET_MS;

/// [`LEAVE_MS`] for a lane: across nodes, from when the daemons know that no link works.
pub const fn leave_ms(remote: bool) -> u64 {
    match remote {
        true => LINK_DEAD_MS + LEAVE_MS,
        false => LEAVE_MS,
    }
}

/// What comes of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Something has yet to happen at the peer, or to TCP's buffer.
    Again,
    /// Both directions are on TCP.
    Left,
    /// The sender is gone, and what is unread is only on the ring: it is read there, and then the end is reported.
    GoesOn,
    /// The connection has to be reset.
    Stuck(Reason),
}

/// What an attempt knows when it comes to the receiving half.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The sending half, which was asked before ([`super::TxState::come_down`]), waits for nothing.
    pub tx_done: bool,
    /// On one node: the other end is gone, or the connection has been reset. (Asked before, because what an end that is
    /// gone has said is final.)
    pub over: bool,
    /// The call only sets an option, and can do without.
    pub option: bool,
    /// For how many milliseconds the call has waited.
    pub waited: u64,
}

impl Attempt {
    /// The rest of the attempt, under the receiving half's lock.
    pub fn step(self, rx: &RxState, m: &Memory, port: &impl Port) -> Step {
        let (done, stuck) = match rx.revoke(m, port) {
            Ok(Revoked::Clear) => (true, None),
            Ok(Revoked::Pending) => (false, None),
            Ok(Revoked::Impossible) => (true, Some(Reason::Stalled)),
            Err(r) => (true, Some(r)),
        };
        // (Unless the bytes are, or come, on TCP.)
        if self.option && (stuck.is_some() || !done) && self.over && rx.go_on(m) {
            return Step::GoesOn;
        }
        let coming = rx.is_coming(m) || rx.is_on_its_way(m, port);
        let nobody = !done && self.over && !coming && self.waited >= GONE_MS;
        if let Some(r) = stuck.or(nobody.then_some(Reason::Stalled)) {
            return Step::Stuck(r);
        }
        match self.tx_done && done && !(coming && self.waited < COMING_MS) {
            true => Step::Left,
            false => Step::Again,
        }
    }
}
