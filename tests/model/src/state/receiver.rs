//! The receiving end.

use super::*;
pub use lane::half::rx::mode::Mode;

/// What the receiver is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    Idle,
    /// Inside a native receive.
    Native,
    Ready(Ready),
    Prefix,
    Ring(Ring),
    Skip,
    Wait(Wait),
    Revoke(Revoke),
    /// A revocation waits: it comes again when one of these has changed.
    Pending(Phase, u8, bool),
}

/// `RxState::declare_ready`, and a receive while ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ready {
    DeclareLook,
    Declare,
    Look,
    Count,
    Again(u8),
    Take,
    Peek,
    End(bool),
    SeeUp,
}

/// A receive on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    Head,
    Data,
    Cursor,
    WishLook,
    Bell,
    Tcp,
    End(bool),
}

/// Sleep; and the wish for a way down, which the other end may sleep through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    Arm,
    ArmLook,
    Asleep,
    WantDown,
    WantDownBell,
}

/// `RxState::revoke`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Revoke {
    /// By mode.
    Begin,
    Cell,
    Word,
    Bell,
    Phase,
    SeeUp,
    Head,
    Peek,
    Tcp,
    End,
    Last,
    LastPhase,
    Skip,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    pub at: At,
    pub mode: Mode,
    /// In mode `Revoking`: the mode before.
    pub was: Mode,
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
            was: Mode::Tcp,
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
