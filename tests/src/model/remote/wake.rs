//! The chain of sleepers: A waits for space, B for bytes, and each daemon for its application's
//! words and for its completion queue.
//!
//! Between a shim and its daemon it is the protocol of `lane::notify` in one memory; the daemons
//! wake each other by messages. What is new is that the two ends of the ring are apart: the reader's
//! cursor is not the sender's, and neither daemon may poll for ever. There are no timers here.

use super::explore::Due;
use super::Bug;
use stateright::{Model, Property};

/// Bounds. The stream has no end, and positions count from where A knows B to be.
#[derive(Clone, Debug)]
pub struct Wake {
    /// Size of the ring, at least 2.
    pub size: u8,
    /// A waits for a step of space, as a poll does, not for one byte.
    pub poll: bool,
    pub bug: Option<Bug>,
}

impl Wake {
    /// What a poll for space asks for, and what the reader may keep to itself: in life a quarter.
    fn step(&self) -> u8 {
        self.size / 2
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum App {
    Idle,
    /// Has stored its head or cursor and moved its counter; next the look at its daemon's sleepers.
    Bell,
    Wish,
    WishLook,
    Doze,
    DozeLook,
    Asleep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Daemon {
    Run,
    /// Has stored what the peer said; next a look at the application.
    Look,
    Doze,
    Words,
    Queue,
    Asleep,
}

/// A daemon and its waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Proxy {
    at: Daemon,
    sleeps: bool,
    armed: bool,
    bell: bool,
    event: bool,
    /// The application's counter has moved.
    news: bool,
    /// There may be something that was not sent yet.
    todo: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    a: App,
    head: u8,
    want: bool,
    a_sleeps: bool,
    a_bell: bool,
    /// B's cursor where A sees it.
    cursor1: u8,
    d1: Proxy,
    /// A head on its way, and (with a bug) A's wish; a cursor on its way back. One message each:
    /// the next waits for the completion of the last.
    forth: Option<(u8, bool)>,
    back: Option<u8>,
    d2: Proxy,
    /// A's head where B sees it, and (with a bug) A's wish.
    head2: u8,
    want2: bool,
    b: App,
    cursor: u8,
    b_sleeps: bool,
    b_bell: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    A,
    D1,
    D2,
    /// B takes one byte, or all that it sees.
    B,
    BAll,
}

impl Proxy {
    const NEW: Proxy = Proxy {
        at: Daemon::Run,
        sleeps: false,
        armed: false,
        bell: false,
        event: false,
        news: false,
        todo: false,
    };

    /// A message or a completion.
    fn completion(&mut self) {
        self.event |= self.armed;
    }

    fn up(&mut self) -> Daemon {
        (self.sleeps, self.armed, self.bell, self.event) = (false, false, false, false);
        Daemon::Run
    }

    /// On the way to sleep. `queue`: what a poll of the completion queue would find.
    fn rest(&mut self, m: &Wake, queue: bool) {
        self.at = match self.at {
            Daemon::Doze => {
                (self.sleeps, self.armed) = (true, true);
                Daemon::Words
            }
            Daemon::Words if self.news && m.bug != Some(Bug::SleepWithoutLook) => self.up(),
            Daemon::Words => Daemon::Queue,
            Daemon::Queue if queue && m.bug != Some(Bug::ArmWithoutPoll) => self.up(),
            Daemon::Queue => Daemon::Asleep,
            _ => self.up(),
        };
    }
}

impl State {
    /// Counts from where A knows B to be. Whole steps, so that B's steps stay where they are.
    fn rebase(&mut self, m: &Wake) {
        let base = self.cursor1 - self.cursor1 % m.step();
        let at = [
            &mut self.head,
            &mut self.cursor1,
            &mut self.head2,
            &mut self.cursor,
        ];
        for c in at.into_iter().chain(self.back.as_mut()) {
            *c -= base;
        }
        if let Some((head, _)) = &mut self.forth {
            *head -= base;
        }
    }

    fn room(&self, m: &Wake) -> bool {
        let want = if m.poll { m.step() } else { 1 };
        m.size - (self.head - self.cursor1) >= want
    }

    fn a(&mut self, m: &Wake) {
        self.a = match self.a {
            App::Idle if self.head - self.cursor1 < m.size => {
                self.head += 1;
                self.d1.news = true;
                App::Bell
            }
            App::Idle => App::Wish,
            App::Bell => {
                self.d1.bell |= self.d1.sleeps;
                App::Idle
            }
            App::Wish => {
                self.want = true;
                App::WishLook
            }
            App::WishLook if self.room(m) => App::Idle,
            App::WishLook => App::Doze,
            App::Doze => {
                self.a_sleeps = true;
                App::DozeLook
            }
            App::DozeLook if !self.room(m) => App::Asleep,
            App::DozeLook | App::Asleep => {
                (self.a_sleeps, self.a_bell) = (false, false);
                App::Idle
            }
        };
    }

    fn b(&mut self, m: &Wake, most: u8) {
        self.b = match self.b {
            App::Idle if self.head2 != self.cursor => {
                let (begin, head) = (self.cursor, self.head2);
                self.cursor = head.min(begin.saturating_add(most));
                let (n, unread) = (self.cursor - begin, head - self.cursor);
                let remote = unread == 0 || begin / m.step() != self.cursor / m.step();
                let tell = match m.bug {
                    Some(Bug::LocalThreshold) => {
                        (head - begin > m.size / 2 || n > m.size / 4) && unread <= m.size / 2
                    }
                    Some(Bug::SilentWish) => remote && self.want2,
                    _ => remote,
                };
                if tell {
                    self.d2.news = true;
                    App::Bell
                } else {
                    App::Idle
                }
            }
            App::Bell => {
                self.d2.bell |= self.d2.sleeps;
                App::Idle
            }
            App::DozeLook if self.head2 == self.cursor => App::Asleep,
            App::DozeLook | App::Asleep => {
                (self.b_sleeps, self.b_bell) = (false, false);
                App::Idle
            }
            _ => {
                self.b_sleeps = true;
                App::DozeLook
            }
        };
    }

    fn d1(&mut self, m: &Wake) {
        let free = self.forth.is_none();
        match self.d1.at {
            Daemon::Run => {
                if let Some(c) = self.back.take() {
                    self.d2.completion();
                    self.cursor1 = c;
                    self.d1.at = Daemon::Look;
                } else if self.d1.news {
                    (self.d1.news, self.d1.todo) = (false, true);
                } else if self.d1.todo && free {
                    self.d1.todo = false;
                    self.forth = Some((self.head, self.want));
                    self.d2.completion();
                } else {
                    self.d1.at = Daemon::Doze;
                }
            }
            // SYNC space: the cursor, then the look at the wish.
            Daemon::Look => {
                if self.want && m.bug != Some(Bug::NoLookForWish) {
                    self.a_bell |= self.a_sleeps;
                }
                self.d1.at = Daemon::Run;
            }
            _ => self.d1.rest(m, self.back.is_some() || self.d1.todo && free),
        }
    }

    fn d2(&mut self, m: &Wake) {
        let free = self.back.is_none();
        match self.d2.at {
            Daemon::Run => {
                if let Some((head, want)) = self.forth.take() {
                    self.d1.completion();
                    self.head2 = head;
                    self.want2 |= want;
                    self.d2.todo |= want && m.bug == Some(Bug::SilentWish);
                    self.d2.at = Daemon::Look;
                } else if self.d2.news {
                    (self.d2.news, self.d2.todo) = (false, true);
                } else if self.d2.todo && free {
                    self.d2.todo = false;
                    self.back = Some(self.cursor);
                    self.d1.completion();
                } else {
                    self.d2.todo &= m.bug != Some(Bug::LostCursor);
                    self.d2.at = Daemon::Doze;
                }
            }
            Daemon::Look => {
                self.b_bell |= self.b_sleeps;
                self.d2.at = Daemon::Run;
            }
            _ => self
                .d2
                .rest(m, self.forth.is_some() || self.d2.todo && free),
        }
    }
}

impl Due for Wake {
    fn due(&self, s: &State, out: &mut Vec<Act>) {
        let up = |p: &Proxy| p.at != Daemon::Asleep || p.bell || p.event;
        if s.a != App::Asleep || s.a_bell {
            out.push(Act::A);
        }
        if up(&s.d1) {
            out.push(Act::D1);
        }
        if up(&s.d2) {
            out.push(Act::D2);
        }
        if s.b != App::Asleep || s.b_bell {
            out.push(Act::B);
        }
    }
}

impl Model for Wake {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            a: App::Idle,
            head: 0,
            want: false,
            a_sleeps: false,
            a_bell: false,
            cursor1: 0,
            d1: Proxy::NEW,
            forth: None,
            back: None,
            d2: Proxy::NEW,
            head2: 0,
            want2: false,
            b: App::Idle,
            cursor: 0,
            b_sleeps: false,
            b_bell: false,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        self.due(s, out);
        if s.b == App::Idle && s.head2 > s.cursor + 1 {
            out.push(Act::BAll);
        }
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let mut n = last.clone();
        match act {
            Act::A => n.a(self),
            Act::D1 => n.d1(self),
            Act::D2 => n.d2(self),
            Act::B => n.b(self, 1),
            Act::BAll => n.b(self, self.size),
        }
        n.rebase(self);
        (n != *last).then_some(n)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nobody waits for ever", |m: &Wake, s: &State| {
                let mut due = Vec::new();
                m.due(s, &mut due);
                !due.is_empty()
            }),
            Property::sometimes("the sender sleeps", |_, s: &State| s.a == App::Asleep),
            Property::sometimes("both daemons sleep", |_, s: &State| {
                s.d1.at == Daemon::Asleep && s.d2.at == Daemon::Asleep
            }),
        ]
    }
}
