//! The receiving end.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Tcp,
    Ready,
    Prefix,
    Ring,
    Last,
    Skip,
}

/// What the receiver is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    Idle,
    /// Inside a native receive.
    Native,
    DeclareLook,
    Declare,
    /// A receive while ready.
    ReadyLook,
    ReadyCount,
    ReadyAgain(u8),
    ReadyTake,
    ReadyPeek,
    ReadyEnd(bool),
    SeeUp,
    Prefix,
    RingHead,
    Data,
    Cursor,
    WishLook,
    Bell,
    RingTcp,
    RingEnd(bool),
    Skip,
    Doze,
    DozeLook,
    Asleep,
    WantDown,
    WantDownBell,
    /// A revocation.
    RevokeLook,
    RevokeCell,
    RevokeWord,
    RevokeBell,
    RevokePhase,
    RevokeSeeUp,
    RevokeHead,
    RevokePeek,
    RevokeTcp,
    RevokeEnd,
    RevokeLast,
    RevokeLastPhase,
    RevokeSkip,
    /// Pending: comes again when one of these has changed.
    Pending(Phase, u8, bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    pub at: At,
    pub mode: Mode,
    pub attached: bool,
    pub epoch: u8,
    pub tcp_pos: u8,
    pub cursor: u8,
    pub limit: u8,
    /// Cursor named by a frame, or bytes to skip.
    pub skip: u8,
    pub half: bool,
    /// The byte between its load and the store of the cursor.
    pub byte: u8,
    pub early: bool,
    /// The phase that a revocation has seen last.
    pub seen: Phase,
    pub dead: bool,
    pub eof: bool,
    /// An error of TCP, or a hand-over whose deadline has passed.
    pub failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Step(At),
    Recv,
    Ready,
    Revoke,
    WantDown,
    Signal,
}

impl Receiver {
    pub fn new(attached: bool) -> Self {
        Receiver {
            at: At::Idle,
            mode: Mode::Tcp,
            attached,
            epoch: 0,
            tcp_pos: 0,
            cursor: 0,
            limit: 0,
            skip: 0,
            half: false,
            byte: 0,
            early: false,
            seen: Phase::None,
            dead: false,
            eof: false,
            failed: false,
        }
    }

    pub fn revoking(&self) -> bool {
        matches!(self.at, At::Pending(..))
    }
}
