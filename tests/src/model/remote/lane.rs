//! State, actions and properties of one direction of a lane across nodes; the steps of the parties
//! are in `sender` (A, and D1 when it acts for A), `daemons`, `network` and `receiver`.

use super::daemons::{self, Mirror, D1, D2};
use super::network::{self, Net};
use super::receiver::{self, Receiver};
use super::sender::{self, Mode, Sender, Who};
use super::tcp::Tcp;
use super::{Bug, Due};
use stateright::{Model, Property};

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

/// In the order in which they can follow each other within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    None,
    Up,
    Downing,
    Down,
    Resumed,
}

/// `TxWords`: A's own, and D2's mirror of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TxWords {
    pub epoch: u8,
    pub phase: Phase,
    pub kpos: u8,
    pub start: u8,
}

impl TxWords {
    pub const NONE: TxWords = TxWords {
        epoch: 0,
        phase: Phase::None,
        kpos: 0,
        start: 0,
    };
}

/// `RxWords::word`: B's own, and D1's mirror of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Word {
    pub epoch: u8,
    pub ready: bool,
    pub want: bool,
    pub revoked: bool,
    /// What TCP held before the switch has been read.
    pub past: bool,
    /// Only in the mirror: D2 has stored the switch of this epoch, and it stands.
    pub accepted: bool,
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
    /// A party found something that its honest peer cannot have written.
    Impossible,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub a: Sender,
    pub mirror: Mirror,
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
    /// The connection was reset, for one of the reasons that there may be.
    pub reset: bool,
    pub fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    A(sender::Act),
    /// D1 acts for A: takes the lock, or makes a step under it.
    Takeover,
    Daemon(daemons::Act),
    Net(network::Act),
    B(receiver::Act),
    Deliver,
    KillA,
    KillD1,
    KillD2,
    /// Five seconds in a switch, or two in a hand-over.
    Deadline,
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
        !self.d1.dead && !self.d2.dead && (self.net.rail_up() || self.net.tls.up)
    }

    /// The kernel's close: when nobody has a descriptor any more.
    pub fn kernel_close(&mut self) {
        self.tcp.fin |= self.gone() && self.d1.dead;
    }

    /// B sees an end that no `Fin` has announced. Only if both who could have written one are gone.
    pub fn bare_fin(&mut self) {
        if self.gone() && self.d1.dead {
            self.reset = true;
        } else {
            self.fault(Fault::Reset);
        }
    }

    fn over(&self) -> bool {
        self.fault.is_some() || self.reset || self.b.eof
    }

    fn deadline(&mut self, c: &Config) {
        let lost = !self.path();
        let causes = c.downs + c.wants + c.fails > 0 || self.d1.dead || self.d2.dead;
        let fair = match () {
            // A switch in doubt.
            _ if self.a.mode == Mode::Ask && lost => true,
            _ if !self.b.leaving => false,
            // A frame cannot be taken out from behind bytes that nobody has read; without a path,
            // nobody tells whether there will be one.
            _ if self.b.behind_prefix() && (lost || self.a.framed() && causes) => true,
            // A revocation was answered without a frame, and nobody is left to say so.
            _ if lost && self.a.plain() => true,
            // Those who could answer are gone.
            _ if self.gone() && self.d1.dead => true,
            // TCP may have no room for everything.
            _ => c.room < c.bytes * 2 + 2,
        };
        if fair {
            self.reset = true;
        } else {
            self.fault(Fault::Reset);
        }
    }

    /// Is everything as it should be when nothing happens any more?
    fn complete(&self, c: &Config) -> bool {
        if self.over() {
            return true;
        }
        // Who stays outside of every hook when its daemon is dead keeps what it has.
        let asleep = self.a.away && self.d1.dead;
        if asleep {
            return true;
        }
        if self.gone() || self.a.shut {
            return false; // B should have seen the end
        }
        self.got == self.sent && (self.sent == c.bytes || self.a.away)
    }

    /// Steps that happen sooner or later.
    fn due(&self, c: &Config, out: &mut Vec<Act>) {
        if self.over() {
            return;
        }
        if self.tcp.under_way() {
            out.push(Act::Deliver);
        }
        sender::due(self, c, out);
        daemons::due(self, c, out);
        network::due(self, out);
        receiver::due(self, out);
        // D1 resets for an application that is gone; if D1 is dead, too, the kernel has closed.
        let asks = self.a.mode == Mode::Ask && !(self.gone() && self.d1.dead);
        if out.is_empty() && (self.b.leaving || asks) {
            out.push(Act::Deadline);
        }
    }

    /// Steps that may happen or not.
    fn free(&self, c: &Config, out: &mut Vec<Act>) {
        if self.over() {
            return;
        }
        sender::free(self, c, out);
        daemons::free(self, c, out);
        network::free(self, c, out);
        receiver::free(self, c, out);
        if c.a_dies && !self.gone() {
            out.push(Act::KillA);
        }
        if c.d1_dies && !self.d1.dead {
            out.push(Act::KillD1);
        }
        if c.d2_dies && !self.d2.dead {
            out.push(Act::KillD2);
        }
    }
}

/// The model: the state above under a configuration.
pub struct Lane(pub Config);

impl Due for Lane {
    fn due(&self, s: &State, out: &mut Vec<Act>) {
        s.due(&self.0, out);
    }
}

impl Model for Lane {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        let c = &self.0;
        vec![State {
            a: Sender::new(),
            mirror: Mirror::default(),
            d1: D1::new(),
            net: Net::new(),
            d2: D2::new(),
            sink: [0; RING as usize],
            b: Receiver::new(),
            tcp: Tcp::new(c.room),
            sent: 0,
            got: 0,
            downs: c.downs,
            wants: c.wants,
            leaves: c.leaves,
            fails: c.fails,
            repairs: c.repairs,
            moves: c.moves,
            reset: false,
            fault: None,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        s.due(&self.0, out);
        s.free(&self.0, out);
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let c = &self.0;
        let mut n = last.clone();
        match act {
            Act::A(a) => sender::step(&mut n, c, a),
            Act::Takeover => sender::locked(&mut n, c, Who::D1),
            Act::Daemon(a) => daemons::step(&mut n, c, a),
            Act::Net(a) => network::step(&mut n, a),
            Act::B(a) => receiver::step(&mut n, c, a),
            Act::Deliver => n.tcp.deliver(),
            Act::KillA => {
                n.a.dead = true;
                n.a.away = false;
                sender::died(&mut n, c, Who::A);
            }
            Act::KillD1 => {
                n.d1.dead = true;
                network::d1_died(&mut n);
                sender::died(&mut n, c, Who::D1);
            }
            Act::KillD2 => {
                n.d2.dead = true;
                network::d2_died(&mut n);
            }
            Act::Deadline => n.deadline(c),
        }
        n.kernel_close();
        if !n.d1.dead {
            daemons::show(&mut n, c);
        }
        (n != *last).then_some(n)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("every byte once and in order", |_, s: &State| {
                !matches!(s.fault, Some(Fault::Stream | Fault::Skipped))
            }),
            Property::always("frames are frames and bytes are bytes", |_, s: &State| {
                s.fault != Some(Fault::Parsed)
            }),
            Property::always("end of file after the last byte", |_, s: &State| {
                s.fault != Some(Fault::Early)
            }),
            Property::always("no reset without need", |_, s: &State| {
                s.fault != Some(Fault::Reset)
            }),
            Property::always("honest parties believe each other", |_, s: &State| {
                s.fault != Some(Fault::Impossible)
            }),
            Property::always("nobody waits for ever", |m: &Lane, s: &State| {
                let mut due = Vec::new();
                s.due(&m.0, &mut due);
                !due.is_empty() || s.complete(&m.0)
            }),
            // Guards against a model in which nothing happens.
            Property::sometimes("everything arrives", |m: &Lane, s: &State| {
                s.got == m.0.bytes
            }),
            Property::sometimes("bytes go over the ring", |m: &Lane, s: &State| {
                m.0.ups == 0 || s.b.from_ring
            }),
        ]
    }
}
