//! What the model across nodes consists of: the ends, their daemons, what is between them; and what may happen.

#[path = "state/daemons.rs"]
pub mod daemons;
#[path = "state/messages.rs"]
pub mod messages;
#[path = "state/network.rs"]
pub mod network;
#[path = "state/receiver.rs"]
pub mod receiver;
#[path = "state/sender.rs"]
pub mod sender;

use super::tcp::Tcp;
pub use super::word::Word;
use super::Bug;
use daemons::{Proxy, D1, D2};
pub use lane::abi::tx::Phase;
use network::Net;
use receiver::Receiver;
use sender::Sender;

/// Size of the ring in bytes.
pub const RING: u8 = 2;
/// `RxWords::revoked` of a receiver that had not seen the switch.
pub const UNSEEN: u8 = u8::MAX;

/// How the sending application ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It does not: it stays, in its event loop or outside of every hook.
    Stays,
    /// `shutdown(SHUT_WR)`, then it stays.
    Shuts,
    /// It closes and exits: no more hooks.
    Exits,
}

/// Bounds of an exploration.
#[derive(Clone, Debug)]
pub struct Config {
    pub bytes: u8,
    /// Most switches up, switches down by the sender, wishes for one, and hand-overs of the
    /// receiving socket to somebody without a shim.
    pub ups: u8,
    pub downs: u8,
    pub wants: u8,
    pub leaves: u8,
    pub end: End,
    /// May they be killed, at any step?
    pub a_dies: bool,
    pub d1_dies: bool,
    pub d2_dies: bool,
    /// May A stay outside of every hook, for as long as it likes?
    pub away: bool,
    /// Most failures of a rail, new queue pairs on one that has failed, and moves of the lane from
    /// one good rail to another.
    pub fails: u8,
    pub repairs: u8,
    pub moves: u8,
    /// May the control channel between the daemons be cut?
    pub cut: bool,
    /// Do bytes travel behind their message, to be put into the ring by D2, and not in writes before it?
    pub inline: bool,
    /// Do D2's messages take their time, so that they can be overtaken by events, and lost?
    pub slow: bool,
    pub room: u8,
    pub bug: Option<Bug>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            bytes: 2,
            ups: 1,
            downs: 0,
            wants: 0,
            leaves: 0,
            end: End::Exits,
            a_dies: false,
            d1_dies: false,
            d2_dies: false,
            away: false,
            fails: 0,
            repairs: 0,
            moves: 0,
            cut: false,
            inline: false,
            slow: false,
            room: 8,
            bug: None,
        }
    }
}

impl Config {
    /// Can anybody find the lock taken, or its holder dead?
    pub fn fine(&self) -> bool {
        self.a_dies || self.d1_dies || self.away || self.end == End::Shuts
    }
}

/// `TxWords`: A's own, and D2's proxy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TxWords {
    pub epoch: u8,
    pub phase: Phase,
    pub tcp_pos: u8,
    pub start: u8,
}

impl TxWords {
    pub const NONE: TxWords = TxWords {
        epoch: 0,
        phase: Phase::None,
        tcp_pos: 0,
        start: 0,
    };
}

/// How a direction has come down from its last epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Came {
    No,
    /// By a frame.
    Framed,
    /// Without one, after a revocation; `told`: as far as could be known, somebody was there to tell B.
    Plain {
        told: bool,
    },
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
    /// A clean end of file before the last byte.
    Early,
    /// The connection was reset for no good reason.
    Reset,
    /// An end or a daemon found something that its honest peer cannot have written.
    Impossible,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub a: Sender,
    pub proxy: Proxy,
    pub d1: D1,
    pub net: Net,
    pub d2: D2,
    /// The incoming ring, which the network writes.
    pub sink: [u8; RING as usize],
    pub b: Receiver,
    pub tcp: Tcp,
    pub sent: u8,
    pub got: u8,
    pub downs: u8,
    pub wants: u8,
    pub leaves: u8,
    pub fails: u8,
    pub repairs: u8,
    pub moves: u8,
    /// Most switches that may still be asked for.
    pub asks: u8,
    pub came: Came,
    /// The connection was reset, for one of the reasons that there may be.
    pub reset: bool,
    pub fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    A(sender::Act),
    Daemon(daemons::Act),
    Net(network::Act),
    B(receiver::Act),
    Deliver,
    KillA,
    KillD1,
    KillD2,
    /// Two seconds in a hand-over.
    Deadline,
    /// D1 has not reached D2 for long. Nobody answers A any more, as if it were dead.
    Abandon,
}

impl State {
    pub fn fault(&mut self, f: Fault) {
        self.fault.get_or_insert(f);
    }

    /// A has no descriptor any more.
    pub fn gone(&self) -> bool {
        self.a.dead || self.a.closed
    }

    /// Can the daemons still talk?
    pub fn path(&self) -> bool {
        !self.d1.dead && !self.d2.dead && (self.net.rail_up() || self.net.tls)
    }

    /// Can the daemons tell each other what A and B say?
    pub fn rails(&self) -> bool {
        !self.d1.dead && !self.d2.dead && self.net.rail_up()
    }

    /// The kernel's close: when nobody has a descriptor any more.
    pub fn kernel_close(&mut self) {
        self.tcp.fin |= self.gone() && self.d1.dead;
    }
}
