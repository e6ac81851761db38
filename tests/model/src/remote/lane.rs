//! State, actions and properties of one direction of a lane across nodes; the steps
//! are in `sender` (A, and D1 when it acts for A), `daemons`, `network` and `receiver`.

use super::explore::Due;
use super::state::daemons::{Act as Daemon, Out, Proxy, Step, D1, D2};
use super::state::network::Net;
use super::state::receiver::{Mode as Receives, Receiver};
use super::state::sender::{Mode, Sender};
use super::state::*;
use super::steps::{self, Steps};
use super::tcp::Tcp;
use super::{daemons, network, receiver, resets, sender, takeover};
use stateright::{Model, Property};

impl State {
    fn over(&self) -> bool {
        self.fault.is_some() || self.reset || self.b.eof
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
        if !out.is_empty() {
            return;
        }
        let asks = matches!(self.d1.out, Out::Asking { .. }) && !self.d1.dead;
        if takeover::waits(self, c) {
            out.push(Act::Daemon(Daemon::Takeover(Step::Late)));
        } else if asks && !self.path() {
            out.push(Act::Abandon);
        } else if self.b.leaving {
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

    /// Forgets what will not be used again, so that states that differ in nothing else are one.
    fn tidy(&mut self) {
        let b = &mut self.b;
        let of = |m: Receives| b.mode == m || b.mode == Receives::Revoking && b.was == m;
        if !of(Receives::Prefix) && b.mode != Receives::Undecided {
            b.limit = 0;
        }
        if !matches!(
            b.mode,
            Receives::Last | Receives::Skip | Receives::Rest | Receives::Fin
        ) {
            (b.skip, b.rest) = (0, 0);
        }
        if b.mode != Receives::Revoking {
            b.was = Receives::Tcp;
        }
        let h = &mut self.a.half;
        if h.mode != Mode::Drain {
            (h.frame, h.from, h.done) = (None, 0, 0);
        }
        self.renumber();
    }

    /// Only the order of messages counts.
    fn renumber(&mut self) {
        let rails = self.net.rails.iter_mut();
        let under_way = rails.flat_map(|r| r.flight.iter_mut().chain(&mut r.arrived));
        let mut all: Vec<&mut u8> = under_way.map(|m| &mut m.seq).collect();
        all.extend([&mut self.d1.seq, &mut self.d2.seq]);
        all.sort();
        let (mut last, mut number) = (None, 0);
        for seq in all {
            number += u8::from(last.is_some_and(|l| l != *seq));
            last = Some(*seq);
            *seq = number;
        }
    }
}

/// The model: the state above under a configuration. It counts its steps.
pub struct Lane(pub Config, pub Steps);

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
            proxy: Proxy::new(),
            d1: D1::new(),
            net: Net::new(),
            d2: D2::new(c.slow),
            sink: [u8::MAX; RING as usize],
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
            asks: c.ups + c.repairs + 1,
            came: Came::No,
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
            Act::Daemon(a) => daemons::step(&mut n, c, a),
            Act::Net(a) => network::step(&mut n, c, a),
            Act::B(a) => receiver::step(&mut n, c, a),
            Act::Deliver => n.tcp.deliver(),
            Act::KillA => sender::died(&mut n),
            Act::KillD1 | Act::Abandon => {
                takeover::d1_died(&mut n);
                network::d1_died(&mut n);
            }
            Act::KillD2 => network::d2_died(&mut n),
            Act::Deadline => resets::reset_or_fault(&mut n, c),
        }
        n.kernel_close();
        n.tidy();
        if n == *last {
            return None;
        }
        self.1.made(steps::of(last, c, act, &n));
        Some(n)
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
