//! What the lane model consists of: both ends, shared memory, TCP; and what may happen.

pub mod receiver;
pub mod sender;

use super::tcp::Tcp;
pub use super::word::Word;
use super::Bug;
pub use lane::abi::tx::Phase;

/// Size of the ring in bytes.
pub const RING: u8 = 2;
/// `RxWords::revoked` of a receiver that had not seen the switch.
pub const UNSEEN: u8 = u8::MAX;

/// How the sending application ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It does not: it stays in its event loop.
    Stays,
    /// It closes.
    Closes,
    /// `shutdown(SHUT_WR)`.
    Shuts,
}

/// Bounds of an exploration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes that the sender has to send.
    pub bytes: u8,
    /// Most switches up, switches down by the sender, revocations and wishes for a switch down.
    pub ups: u8,
    pub downs: u8,
    pub revocations: u8,
    pub wants: u8,
    /// What the sender does when it has sent everything.
    pub end: End,
    /// May an end die, at any of its steps?
    pub sender_dies: bool,
    pub receiver_dies: bool,
    /// Does the daemon still have to offer the lane to each end, and may it die before?
    pub daemon: bool,
    /// May a sleeper wake for no reason (a signal, a timeout) and its program do something else?
    pub spurious: bool,
    /// Room in TCP, in units. With enough, a hand-over may not fail for want of time.
    pub room: u8,
    pub bug: Option<Bug>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            bytes: 3,
            ups: 2,
            downs: 0,
            revocations: 0,
            wants: 0,
            end: End::Closes,
            sender_dies: false,
            receiver_dies: false,
            daemon: false,
            spurious: false,
            room: 3,
            bug: None,
        }
    }
}

impl Config {
    /// Is there room in TCP for everything that can be between the ends: the bytes, and two halves of a frame for
    /// each switch?
    pub fn ample(&self) -> bool {
        self.room >= self.bytes * 2 + 2
    }
}

/// What lies in shared memory. Each field has one writer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Words {
    // Written by the sender.
    pub state: (u8, Phase),
    pub up_tcp_pos: u8,
    pub up_start: u8,
    pub head: u8,
    pub ring: [u8; RING as usize],
    pub want_space: bool,
    pub sender_sleeps: bool,
    // Written by the receiver.
    pub word: Word,
    pub revoked: u8,
    pub cursor: u8,
    pub receiver_sleeps: bool,
    // The doorbells: rung and not yet answered.
    pub sender_bell: bool,
    pub receiver_bell: bool,
}

/// What went wrong; the first that did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The application got another byte than the next one.
    Stream,
    /// A frame reached the application, or a byte was parsed as a frame.
    Parsed,
    /// A byte was skipped that the application had not got.
    Skipped,
    /// End of file before the last byte.
    Early,
    /// A hand-over took too long for no good reason.
    Late,
    /// An end found something that its honest peer cannot have written.
    Impossible,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub w: Words,
    pub tcp: Tcp,
    pub s: sender::Sender,
    pub r: receiver::Receiver,
    /// Bytes that the sending application was told are sent; bytes that the receiving one got.
    pub sent: u8,
    pub got: u8,
    pub downs: u8,
    pub revocations: u8,
    pub wants: u8,
    pub daemon: bool,
    pub fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Sender(sender::Act),
    Receiver(receiver::Act),
    Deliver,
    OfferSender,
    OfferReceiver,
    SenderDies,
    ReceiverDies,
    DaemonDies,
    Deadline,
}

impl State {
    pub fn fault(&mut self, f: Fault) {
        self.fault.get_or_insert(f);
    }

    /// The phase of the sender in the receiver's epoch.
    pub fn phase(&self) -> Phase {
        if self.w.state.0 == self.r.epoch {
            self.w.state.1
        } else {
            Phase::None
        }
    }

    /// Has the sender gone back to TCP without a frame?
    pub fn resumed(&self) -> bool {
        self.phase() == Phase::Resumed && self.w.head == self.r.cursor
    }
}
