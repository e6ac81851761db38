//! Steps of the sending end.

use super::*;
pub use lane::abi::takeover::Phase as Taken;
pub use lane::half::tx::mode::Mode;
use lane::proto::frame::Kind;

/// Who makes a step of a sending direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    A,
    D1,
}

/// What a thread of A takes the lock for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    Send,
    /// `TxState::look`.
    Look,
    Down,
    /// The daemon is gone: `TxState::reclaim`.
    Reclaim,
    /// `shutdown`, or `close`.
    End,
}

/// What the holder of a direction is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// A has the lock: is the direction taken over?
    Taken(Call),
    Publish,
    /// The look at the receiver's word after that, and without that: `TxState::answer`.
    Published,
    Word,
    /// Whether the switch is granted: `TxState::answered`.
    Answer(Call),
    /// `TxState::down`.
    Downing,
    DowningLook,
    Cursor,
    /// `TxState::resume`.
    Resume,
    /// `TxState::finish`.
    Fin,
    /// `TxState::drain`: a unit to TCP, and the count of it.
    Send,
    Count,
    /// The last word about an epoch, and the mode after it: `TxState::settle`.
    Say(Phase),
    Settle,
}

/// The private state of a sending direction: A's, in its family table, or that of D1, which has taken it over.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Half {
    pub at: Option<At>,
    pub mode: Mode,
    pub epoch: u8,
    pub tcp_pos: u8,
    pub peer_cursor: u8,
    /// In mode `Drain`: the frame and the cursor in it (none after a revocation); the first byte that follows; and
    /// how many units of both are on TCP.
    pub frame: Option<(Kind, u8)>,
    pub from: u8,
    pub done: u8,
}

/// `RxWords::takeover` and what belongs to it: what an end puts on TCP, in its own area, or what the daemon does with
/// an end's direction, in the daemon's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Takeover {
    pub epoch: u8,
    pub phase: Taken,
    pub at: u8,
    pub tcp_pos: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    // A's area: words that D1 reads, and the ring.
    pub w: TxWords,
    pub head: u8,
    pub ring: [u8; RING as usize],
    pub record: Takeover,
    pub half: Half,
    /// The epoch whose takeover ended because the daemon died.
    pub reclaimed: u8,
    /// It has noticed that the daemon is gone.
    pub orphan: bool,
    /// The application has shut this direction, or closed.
    pub shut: bool,
    pub dead: bool,
    pub closed: bool,
    /// Outside of every hook.
    pub away: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Native,
    /// Takes the lock.
    Call(Call),
    /// Makes a step under it.
    Step,
    Up,
    Away,
    Back,
}

impl Takeover {
    pub const NONE: Takeover = Takeover {
        epoch: 0,
        phase: Taken::None,
        at: 0,
        tcp_pos: 0,
    };
}

impl Half {
    pub const TCP: Half = Half {
        at: None,
        mode: Mode::Tcp,
        epoch: 0,
        tcp_pos: 0,
        peer_cursor: 0,
        frame: None,
        from: 0,
        done: 0,
    };
}

impl Sender {
    pub fn new() -> Self {
        Sender {
            w: TxWords::NONE,
            head: 0,
            ring: [0; RING as usize],
            record: Takeover::NONE,
            half: Half::TCP,
            reclaimed: 0,
            orphan: false,
            shut: false,
            dead: false,
            closed: false,
            away: false,
        }
    }
}
