//! State, actions and properties of the lane model; the ends' steps are in `sender` and
//! `receiver`.

use super::explore::Due;
use super::state::sender::{At, Wait};
use super::state::*;
use super::tcp::Tcp;
use super::{receiver, sender, state};
use stateright::{Model, Property};

impl State {
    fn sender_over(&self) -> bool {
        self.s.dead || self.s.closed || self.s.failed
    }

    fn receiver_over(&self) -> bool {
        self.r.dead || self.r.eof || self.r.failed
    }

    /// Is everything as it should be when nothing happens any more?
    fn complete(&self, c: &Config) -> bool {
        // After a death or a failed hand-over the other end must come to an end, too.
        if self.r.dead || self.r.failed {
            let asleep = self.s.at == At::Wait(Wait::Asleep);
            return self.sender_over() || asleep && !self.tcp.reset;
        }
        if self.s.dead || c.end != End::Stays {
            return self.r.eof && (self.s.dead || self.got == c.bytes);
        }
        self.got == c.bytes && self.sent == c.bytes && !self.r.revoking()
    }

    /// Steps that happen sooner or later.
    fn due(&self, c: &Config, out: &mut Vec<Act>) {
        if self.tcp.clone().deliver() {
            out.push(Act::Deliver);
        }
        if !self.sender_over() {
            sender::due(self, c, out);
        }
        if !self.receiver_over() {
            receiver::due(self, c, out);
        }
        // A hand-over that waits for a sender that is gone, or for room that nobody makes, fails at
        // its deadline: the connection is reset.
        if out.is_empty() && self.r.revoking() && !self.receiver_over() {
            out.push(Act::Deadline);
        }
    }

    /// Steps that may happen or not.
    fn free(&self, c: &Config, out: &mut Vec<Act>) {
        if self.daemon {
            out.push(Act::DaemonDies);
            if !self.s.attached {
                out.push(Act::OfferSender);
            }
            if !self.r.attached {
                out.push(Act::OfferReceiver);
            }
        }
        if !self.sender_over() {
            sender::free(self, c, out);
            if c.sender_dies && !self.r.dead {
                out.push(Act::SenderDies);
            }
        }
        if !self.receiver_over() {
            receiver::free(self, c, out);
            if c.receiver_dies && !self.s.dead {
                out.push(Act::ReceiverDies);
            }
        }
    }
}

/// The model: the state above under a configuration.
pub struct Lane(pub Config);

impl Due for Lane {
    fn due(&self, s: &State, out: &mut Vec<Act>) {
        if s.fault.is_none() {
            s.due(&self.0, out);
        }
    }
}

impl Model for Lane {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        let c = &self.0;
        vec![State {
            w: Words {
                state: (0, Phase::None),
                up_tcp_pos: 0,
                up_start: 0,
                head: 0,
                ring: [0; RING as usize],
                want_space: false,
                sender_sleeps: false,
                word: Word::default(),
                revoked: 0,
                cursor: 0,
                receiver_sleeps: false,
                sender_bell: false,
                receiver_bell: false,
            },
            tcp: Tcp::new(c.room),
            s: state::sender::Sender::new(!c.daemon),
            r: state::receiver::Receiver::new(!c.daemon),
            sent: 0,
            got: 0,
            downs: c.downs,
            revocations: c.revocations,
            wants: c.wants,
            daemon: c.daemon,
            fault: None,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        if s.fault.is_none() {
            s.due(&self.0, out);
            s.free(&self.0, out);
        }
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let c = &self.0;
        let mut n = last.clone();
        match act {
            Act::Sender(a) => sender::step(&mut n, c, a),
            Act::Receiver(a) => receiver::step(&mut n, c, a),
            Act::Deliver => {
                n.tcp.deliver();
            }
            Act::OfferSender => n.s.attached = true,
            Act::OfferReceiver => n.r.attached = true,
            Act::DaemonDies => n.daemon = false,
            Act::Deadline => {
                n.r.failed = true;
                n.tcp.reset = true;
                if c.ample() && !n.s.dead {
                    n.fault(Fault::Late);
                }
            }
            // The kernel closes its socket: what was sent still arrives, then the end.
            Act::SenderDies => {
                n.s.dead = true;
                n.tcp.shut();
            }
            Act::ReceiverDies => {
                n.r.dead = true;
                n.tcp.reset = true;
            }
        }
        sender::tidy(&mut n);
        receiver::tidy(&mut n);
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
            Property::always("honest ends do not reset each other", |_, s: &State| {
                s.fault != Some(Fault::Impossible)
            }),
            Property::always("hand-overs succeed", |_, s: &State| {
                s.fault != Some(Fault::Late)
            }),
            Property::always("nobody waits for ever", |m: &Lane, s: &State| {
                let mut due = Vec::new();
                s.due(&m.0, &mut due);
                s.fault.is_some() || !due.is_empty() || s.complete(&m.0)
            }),
            // Guards against a model in which nothing happens.
            Property::sometimes("everything arrives", |m: &Lane, s: &State| {
                s.got == m.0.bytes
            }),
            Property::sometimes("bytes go over the ring", |_, s: &State| s.w.cursor > 0),
        ]
    }
}
