//! Proof that two sockets are the two ends of one TCP connection.
//!
//! Addresses prove nothing across network namespaces: anyone can build a namespace with any
//! addresses. What both ends of a connection share, and survives every NAT, is the pair of initial
//! sequence numbers. A BPF program records them per socket when the handshake ends; see `bpf`.

use std::os::fd::BorrowedFd;

/// Which side of the handshake a socket was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Active,
    Passive,
}

/// What was recorded when a connection was established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// First sequence number of our own bytes, and of the other end's.
    pub snd: u32,
    pub rcv: u32,
    pub role: Role,
    /// When, by the node's monotonic clock.
    pub at_ns: u64,
}

/// Both ends see the end of the handshake within this time. Initial sequence numbers come from one
/// clock that wraps after 274 s (64 ns steps, the same secret in every namespace), so somebody who
/// repeats a handshake with the same addresses in a namespace of his own could hit the same
/// numbers, but only whole wraps away.
const APART_NS: u64 = 60_000_000_000;

impl Record {
    /// Key under which the other end's record is looked up.
    pub fn mirror(&self) -> (u32, u32) {
        (self.rcv, self.snd)
    }

    pub fn key(&self) -> (u32, u32) {
        (self.snd, self.rcv)
    }

    /// Is `other` the other end of this connection?
    pub fn proves(&self, other: &Record) -> bool {
        // Two active ends never meet (a crossed open ends passively on both sides), but a socket
        // whose numbers were set by hand is always active.
        self.key() == other.mirror()
            && !(self.role == Role::Active && other.role == Role::Active)
            && self.at_ns.abs_diff(other.at_ns) < APART_NS
    }
}

/// Where records come from. `Sync`: read on the blocking pool.
pub trait Proof: Send + Sync {
    /// The record of a socket's present connection, if there is one.
    fn record(&self, socket: BorrowedFd<'_>) -> Option<Record>;
    /// Are new connections being recorded?
    fn active(&self) -> bool;
}

/// Without privileges there are no records; ends are paired inside one network namespace only.
pub struct NoProof;

impl Proof for NoProof {
    fn record(&self, _: BorrowedFd<'_>) -> Option<Record> {
        None
    }
    fn active(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_proves_and_what_does_not() {
        let c = Record {
            snd: 7,
            rcv: 9,
            role: Role::Active,
            at_ns: 1_000,
        };
        let s = Record {
            snd: 9,
            rcv: 7,
            role: Role::Passive,
            at_ns: 2_000,
        };
        assert!(c.proves(&s) && s.proves(&c));
        assert!(!c.proves(&Record { rcv: 8, ..s }));
        assert!(!c.proves(&Record { snd: 8, ..s }));
        assert!(!c.proves(&c), "not with itself");
        assert!(
            !c.proves(&Record {
                role: Role::Active,
                ..s
            }),
            "numbers set by hand"
        );
        assert!(
            !c.proves(&Record {
                at_ns: 274_877_906_944,
                ..s
            }),
            "one wrap of the clock later"
        );
        assert!(
            Record {
                role: Role::Passive,
                ..c
            }
            .proves(&s),
            "crossed open"
        );
    }
}
