//! Several holders of one end: threads, and forked processes with the family table in common.
//!
//! A native call runs without the lane's lock and may sleep in the kernel for long, so a switch
//! must not happen while one is under way, and none may begin afterwards: each counts itself in
//! and then looks at the gate; the switch closes the gate and then looks who is inside (and asks
//! the kernel what it has counted, for a holder may have died between its call and its count, or
//! someone may have gone past the hooks). The two ends have the same gate; this is the sender's.

use super::Bug;
use stateright::{Model, Property};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Native {
    Out,
    /// Counted in, or (with the bug) let in before being counted.
    Gate,
    Count,
    Inside,
    /// The kernel has taken the byte; it is not in our count yet.
    Sent,
    Leave,
    /// The gate was closed: goes by the lane.
    Turned,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Switch {
    Idle,
    /// The gate is closed.
    Closed,
    Ask,
    Compare(u8),
    /// Switched at this position.
    Up(u8),
    /// The kernel's count is not ours: never.
    Disqualified,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    open: bool,
    native_calls: u8,
    /// Our count and the kernel's.
    tcp_pos: u8,
    kernel: u8,
    who: [Native; 2],
    switch: Switch,
    calls: u8,
    bypasses: u8,
    wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Call(usize),
    Native(usize),
    Die(usize),
    Bypass,
    Switch,
}

pub struct Holders {
    pub calls: u8,
    pub bypasses: u8,
    pub deaths: bool,
    pub bug: Option<Bug>,
}

impl Model for Holders {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            open: true,
            native_calls: 0,
            tcp_pos: 0,
            kernel: 0,
            who: [Native::Out; 2],
            switch: Switch::Idle,
            calls: self.calls,
            bypasses: self.bypasses,
            wrong: false,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        for (i, at) in s.who.iter().enumerate() {
            match at {
                Native::Out if s.calls > 0 => out.push(Act::Call(i)),
                Native::Out | Native::Dead | Native::Turned => {}
                _ => {
                    out.push(Act::Native(i));
                    if self.deaths {
                        out.push(Act::Die(i));
                    }
                }
            }
        }
        if !matches!(s.switch, Switch::Up(_) | Switch::Disqualified) {
            out.push(Act::Switch);
            // Later ones are told from frames by the receiver, and end the connection.
            if s.bypasses > 0 && s.switch == Switch::Idle {
                out.push(Act::Bypass);
            }
        }
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let mut n = last.clone();
        let late = self.bug == Some(Bug::CountAfterLook);
        match act {
            Act::Call(i) => {
                n.calls -= 1;
                if !late {
                    n.native_calls += 1;
                }
                n.who[i] = Native::Gate;
            }
            Act::Die(i) => n.who[i] = Native::Dead,
            Act::Bypass => {
                n.bypasses -= 1;
                n.kernel += 1;
            }
            Act::Native(i) => {
                n.who[i] = match n.who[i] {
                    Native::Gate if !n.open => {
                        if !late {
                            n.native_calls -= 1;
                        }
                        Native::Turned
                    }
                    Native::Gate if late => Native::Count,
                    Native::Gate => Native::Inside,
                    Native::Count => {
                        n.native_calls += 1;
                        Native::Inside
                    }
                    Native::Inside => {
                        n.kernel += 1;
                        Native::Sent
                    }
                    Native::Sent => {
                        n.tcp_pos += 1;
                        Native::Leave
                    }
                    Native::Leave => {
                        n.native_calls -= 1;
                        Native::Out
                    }
                    at => at,
                };
            }
            Act::Switch => {
                n.switch = match n.switch {
                    Switch::Idle => {
                        n.open = false;
                        Switch::Closed
                    }
                    Switch::Closed if n.native_calls > 0 && self.bug != Some(Bug::NoGate) => {
                        n.open = true;
                        Switch::Idle
                    }
                    Switch::Closed => Switch::Ask,
                    Switch::Ask if self.bug == Some(Bug::TrustCount) => Switch::Up(n.tcp_pos),
                    Switch::Ask => Switch::Compare(n.kernel),
                    Switch::Compare(k) if k == n.tcp_pos => Switch::Up(k),
                    Switch::Compare(_) => Switch::Disqualified,
                    at => at,
                };
            }
        }
        // What is sent natively after the switch would be taken for a frame.
        n.wrong |= matches!(n.switch, Switch::Up(k) if k != n.kernel);
        (n != *last).then_some(n)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the switch is where the kernel is", |_, s: &State| !s.wrong),
            Property::always("nobody is inside after the switch", |_, s: &State| {
                let inside =
                    |n: &Native| matches!(n, Native::Count | Native::Inside | Native::Sent);
                !(matches!(s.switch, Switch::Up(_)) && s.who.iter().any(inside))
            }),
            Property::sometimes("it is promoted", |_, s: &State| {
                matches!(s.switch, Switch::Up(_))
            }),
        ]
    }
}
