//! Messages between the daemons, as small as the model allows. They are read in the form that `underpass_rdma` gives
//! them, so that a new kind, or another field, does not compile before the model says what it does with it.

use super::*;
use lane::abi::{Cursor, Epoch, RxFlags, TcpPos, TxPhase};
use underpass_rdma::engine::Control;
use underpass_rdma::wire::flag::{self, Flag};
use underpass_rdma::wire::{Body, Cdc};

/// A switch that D1 has asked for: epoch and attempt.
pub type Which = (u8, u8);

/// From D1 to D2, over a rail. The bytes from `from` to the head travel with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forth {
    /// Counts the messages; as small as the order of those under way allows.
    pub seq: u8,
    pub said: Said,
    pub from: u8,
    pub data: [u8; RING as usize],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Said {
    Switch {
        which: Which,
        tcp_pos: u8,
        start: u8,
    },
    /// A snapshot of A's words.
    Snapshot {
        epoch: u8,
        phase: Phase,
        head: u8,
        validate: bool,
        want_landed: bool,
    },
}

/// From D2 to D1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Back {
    Answer(Which, bool),
    Landed {
        epoch: u8,
        head: u8,
    },
    /// A snapshot of B's words.
    Snapshot {
        word: Word,
        cursor: u8,
    },
}

/// Over the control channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tls {
    Query(Which),
    Answer(Which, bool),
}

fn epoch(e: u8) -> Epoch {
    Epoch::new(e.into())
}

fn cursor(at: u8) -> Cursor {
    Cursor::new(at.into())
}

/// The small number that this is in the model.
pub fn small(n: impl Into<u64>) -> u8 {
    n.into() as u8
}

/// A snapshot of both directions, this one being idle. (Rings do not move here: `space` has that on one node.)
const IDLE: Cdc = Cdc {
    head: Cursor::new(0),
    cursor: Cursor::new(0),
    tx_epoch: Epoch::NONE,
    tx_phase: TxPhase::from_raw(0),
    rx_epoch: Epoch::NONE,
    rx_flags: RxFlags::from_raw(0),
    flags: 0,
    moves: 1,
    acked_moves: 1,
};

impl Said {
    /// The cursor before which everything is said to be in D2's ring.
    pub fn head(&self) -> Option<u8> {
        match self {
            Said::Switch { .. } => None,
            Said::Snapshot { head, .. } => Some(*head),
        }
    }

    pub fn body(self) -> Body {
        match self {
            Said::Switch {
                which,
                tcp_pos,
                start,
            } => Body::Switch {
                epoch: epoch(which.0),
                attempt: which.1.into(),
                tcp_pos: TcpPos::new(tcp_pos.into()),
                start: cursor(start),
            },
            Said::Snapshot {
                epoch: e,
                phase,
                head,
                validate,
                want_landed,
            } => {
                let set = |f: &&Flag| match f {
                    Flag::Validate => validate,
                    Flag::WantLanded => want_landed,
                    Flag::WantSpace => false, // `wake` has that
                    Flag::Abort => false,     // nobody here breaks a rule
                };
                Body::Cdc(Cdc {
                    head: cursor(head),
                    tx_epoch: epoch(e),
                    tx_phase: phase.value(),
                    flags: Flag::ALL.iter().filter(set).map(|f| f.value()).sum(),
                    ..IDLE
                })
            }
        }
    }
}

impl Back {
    pub fn body(self) -> Body {
        match self {
            Back::Answer(which, ok) => Body::SwitchReply {
                epoch: epoch(which.0),
                attempt: which.1.into(),
                ok,
            },
            Back::Landed { epoch: e, head } => Body::Landed {
                epoch: epoch(e),
                head: cursor(head),
            },
            Back::Snapshot { word, cursor } => Body::Cdc(Cdc {
                cursor: self::cursor(cursor),
                rx_epoch: epoch(word.epoch),
                rx_flags: word.flags,
                ..IDLE
            }),
        }
    }
}

impl Tls {
    pub fn control(self) -> Control {
        let token = 1; // there is one lane
        match self {
            Tls::Query(which) => Control::SwitchQuery {
                token,
                from: token,
                epoch: which.0.into(),
                attempt: which.1.into(),
            },
            Tls::Answer(which, stands) => Control::SwitchAnswer {
                token,
                epoch: which.0.into(),
                attempt: which.1.into(),
                stands,
            },
        }
    }
}

/// Is this flag of a snapshot set?
pub fn is_set(c: &Cdc, f: u8) -> bool {
    c.flags & f != 0
}

pub const VALIDATE: u8 = flag::VALIDATE;
pub const WANT_LANDED: u8 = flag::WANT_LANDED;
