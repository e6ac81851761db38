//! State, actions and properties of one direction of a lane across nodes; the steps
//! are in `sender` (A, and D1 when it acts for A), `daemons`, `network` and `receiver`.

use super::daemons;
use super::explore::Due;
use super::network;
use super::receiver;
use super::sender;
use super::state::daemons::{Proxy, D1, D2};
use super::state::network::Net;
use super::state::receiver::Receiver;
use super::state::sender::{Mode, Sender, Who};
use super::state::*;
use super::tcp::Tcp;
use stateright::{Model, Property};

impl State {
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
            proxy: Proxy::default(),
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
            Property::always("the honest believe each other", |_, s: &State| {
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
