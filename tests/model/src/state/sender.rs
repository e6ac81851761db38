//! The sending end.

use super::*;
pub use lane::half::tx::mode::Mode;

/// What the sender is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Outside of every call.
    Idle,
    /// Inside a native send.
    Native,
    Up(Up),
    Ring(Ring),
    Down(Down),
    Wait(Wait),
    Close(Close),
}

/// On the way up, to this epoch: `TxState::try_up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Up {
    Words(u8),
    State(u8),
    Bell(u8),
    Look(u8),
}

/// `TxState::send` on the ring, and `TxState::look`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    Room,
    Data,
    Head,
    Bell,
    Look,
    /// A look without a send.
    LookOnly,
    /// The head goes back over a byte that was not sent after all.
    TakeBack,
}

/// On the way down: `TxState::{down, resume, drain, settle}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Down {
    Revoked,
    Say,
    Bell,
    Look,
    Cursor,
    Drain,
    /// A state word, its bell, and that was it: the direction is on TCP.
    Settle(Phase),
    SettleBell,
}

/// Waiting for space, or for anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    Wish,
    WishLook,
    Arm,
    ArmLook,
    Asleep,
}

/// `close` and `shutdown`: `TxState::{repeat_unread, shut}`, and the kernel's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Close {
    Look,
    Repeat,
    /// The last word about the epoch, if there is something to say.
    Say,
    Bell,
    /// The kernel's.
    Fin,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    pub at: At,
    pub mode: Mode,
    pub attached: bool,
    pub epoch: u8,
    pub tcp_pos: u8,
    pub head: u8,
    pub peer_cursor: u8,
    pub drain_at: u8,
    /// Halves of the frame on TCP; 2: nothing left to write.
    pub frame_done: u8,
    /// The cursor in the frame; none after a revocation.
    pub framed: Option<u8>,
    /// A byte of the call under way is on the ring.
    pub in_call: bool,
    /// The way down is that of a close.
    pub closing: bool,
    /// The bug that looks for sleepers too early remembers what it saw.
    pub early: bool,
    pub dead: bool,
    pub closed: bool,
    pub failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Step(At),
    Send,
    GoOn,
    Up,
    Down,
    Look,
    Rest,
    Close,
    Signal,
}

impl Sender {
    pub fn new(attached: bool) -> Self {
        Sender {
            at: At::Idle,
            mode: Mode::Tcp,
            attached,
            epoch: 0,
            tcp_pos: 0,
            head: 0,
            peer_cursor: 0,
            drain_at: 0,
            frame_done: 2,
            framed: None,
            in_call: false,
            closing: false,
            early: false,
            dead: false,
            closed: false,
            failed: false,
        }
    }

    /// Bytes of a revoked ring that only we can still put on TCP.
    pub fn must_flush(&self) -> bool {
        self.mode == Mode::Drain && self.framed.is_none()
    }
}
