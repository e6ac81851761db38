use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Tcp,
    Ready,
    Prefix,
    Ring,
    /// A `Down` frame was seen.
    Last,
    /// Bytes that come twice.
    Skip,
    /// Bytes that the frame has promised: TCP may not end before the last of them.
    Rest,
    /// A `Fin` frame was seen.
    Final,
    Revoking,
}

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
    Mark(u8),
    /// It waits until one of these has changed.
    Pending(Phase, u8, bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    pub at: At,
    pub mode: Mode,
    pub epoch: u8,
    pub tcp_pos: u8,
    pub limit: u8,
    /// Cursor named by a frame, or bytes to skip.
    pub skip: u8,
    /// Bytes from that cursor on, or from the last to skip on, that come on TCP.
    pub rest: u8,
    pub half: bool,
    pub was: Mode,
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
}

impl Receiver {
    pub fn new() -> Self {
        Receiver {
            at: At::Idle,
            mode: Mode::Tcp,
            epoch: 0,
            tcp_pos: 0,
            limit: 0,
            skip: 0,
            rest: 0,
            half: false,
            was: Mode::Tcp,
            leaving: false,
            eof: false,
            from_ring: false,
            word: Word::default(),
            revoked: 0,
            cursor: 0,
        }
    }

    /// Waits for a frame that may lie behind bytes which nobody reads.
    pub fn behind_prefix(&self) -> bool {
        self.mode == Mode::Revoking && self.was == Mode::Prefix
    }
}
