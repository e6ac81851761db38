//! Steps of the receiving end.

use super::*;
pub use lane::half::rx::mode::Mode;

/// What the receiver is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    Idle,
    /// A receive while ready that has counted what TCP holds.
    ReadyAgain(u8),
    ReadyTake(u8),
    /// The ring was empty: what does TCP say?
    RingTcp,
    /// A hand-over.
    Leave,
    /// Its cursor is frozen: the word.
    Mark(u8),
    /// It waits until one of these has changed.
    Pending(Phase, u8, bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    pub at: At,
    pub mode: Mode,
    /// In mode `Revoking`: the mode before.
    pub was: Mode,
    pub epoch: u8,
    pub tcp_pos: u8,
    pub limit: u8,
    /// The cursor in a frame, or bytes to skip.
    pub skip: u8,
    /// Bytes from that cursor on, or from the last to skip on, that come on TCP.
    pub rest: u8,
    pub half: bool,
    pub leaving: bool,
    pub eof: bool,
    pub from_ring: bool,
    // B's area.
    pub word: Word,
    pub revoked: u8,
    pub cursor: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Step,
    /// Finds the ring empty, and is about to look at TCP.
    Look,
    Ready,
    Want,
    Leave,
    /// The way to the other node is gone: `RxState::orphan`.
    Orphan,
}

impl Receiver {
    pub fn new() -> Self {
        Receiver {
            at: At::Idle,
            mode: Mode::Tcp,
            was: Mode::Tcp,
            epoch: 0,
            tcp_pos: 0,
            limit: 0,
            skip: 0,
            rest: 0,
            half: false,
            leaving: false,
            eof: false,
            from_ring: false,
            word: Word::default(),
            revoked: 0,
            cursor: 0,
        }
    }

    /// Waits for what may lie behind bytes of TCP which nobody reads.
    pub fn behind_prefix(&self) -> bool {
        self.mode == Mode::Revoking && self.was == Mode::Prefix
    }
}
