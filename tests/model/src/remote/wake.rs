//! The chain of sleepers: A waits for space, B for bytes, and each daemon for its application's
//! words and for its completion queue.
//!
//! Between a shim and its daemon it is the protocol of `lane::notify` in one memory; the daemons
//! wake each other by messages. What is new is that the two ends of the ring are apart: the reader's
//! cursor is not the sender's, and neither daemon may poll for ever. There are no timers here.

use super::explore::Due;
use super::steps::{Step, Steps};
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
    /// Counts the steps.
    pub steps: Steps,
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
    /// B has stored its cursor, which may be news; next the look whether its daemon wants to hear of it.
    Told,
    /// Has stored its head or cursor and moved its counter; next the look at its daemon's sleepers.
    Bell,
    Arm,
    ArmLook,
    Asleep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Daemon {
    Run,
    /// Has stored what the peer said; next a look at the application.
    Look,
    Arm,
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
    a_sleeps: bool,
    a_bell: bool,
    /// B's cursor where A sees it.
    cursor1: u8,
    d1: Proxy,
    /// A head on its way, and whether D1 wants to hear of space (`WANT_SPACE`); a cursor on its way back. One message
    /// each: the next waits for the completion of the last.
    forth: Option<(u8, bool)>,
    back: Option<u8>,
    d2: Proxy,
    /// The cursor that D2 has told last.
    told2: u8,
    /// A's head where B sees it, and D1's wish.
    head2: u8,
    want2: bool,
    b: App,
    cursor: u8,
    /// The cursor of which B has told D2 last.
    told: u8,
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
            Daemon::Arm => {
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
    /// Counts from where A knows B to be.
    fn rebase(&mut self, m: &Wake) {
        // What is further behind than a step is as far behind as it needs to be.
        self.told = self.told.max(self.cursor.saturating_sub(m.step()));
        let base = self.cursor1.min(self.told);
        let at = [
            &mut self.head,
            &mut self.cursor1,
            &mut self.head2,
            &mut self.cursor,
            &mut self.told,
            &mut self.told2,
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
            // (It says that it wants space, too, which no daemon needs to know: D1 rings whoever sleeps.)
            App::Idle => App::Arm,
            App::Bell => {
                self.d1.bell |= self.d1.sleeps;
                App::Idle
            }
            App::Arm => {
                self.a_sleeps = true;
                App::ArmLook
            }
            App::ArmLook if !self.room(m) => App::Asleep,
            App::ArmLook | App::Asleep => {
                (self.a_sleeps, self.a_bell) = (false, false);
                App::Idle
            }
            App::Told => unreachable!("A reads nothing"),
        };
    }

    /// `RxState::take`, and B's sleep.
    fn b(&mut self, m: &Wake, most: u8) {
        self.b = match self.b {
            App::Idle if self.head2 != self.cursor => {
                self.cursor = self.head2.min(self.cursor.saturating_add(most));
                let empty = self.cursor == self.head2;
                let due = empty || self.cursor - self.told >= m.step();
                match due && m.bug != Some(Bug::SilentReader) {
                    true => App::Told,
                    false => App::Idle,
                }
            }
            App::Told if self.want2 => {
                self.told = self.cursor;
                self.d2.news = true;
                App::Bell
            }
            App::Told => App::Idle,
            App::Bell => {
                self.d2.bell |= self.d2.sleeps;
                App::Idle
            }
            App::ArmLook if self.head2 == self.cursor => App::Asleep,
            App::ArmLook | App::Asleep => {
                (self.b_sleeps, self.b_bell) = (false, false);
                App::Idle
            }
            App::Arm => unreachable!("it counts itself asleep at once"),
            App::Idle => {
                self.b_sleeps = true;
                App::ArmLook
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
                    let unread = self.head - self.cursor1;
                    let want = unread > m.size / 2 && m.bug != Some(Bug::SilentWish);
                    self.forth = Some((self.head, want));
                    self.d2.completion();
                } else {
                    self.d1.at = Daemon::Arm;
                }
            }
            // The cursor is stored, then the look at the sleepers.
            Daemon::Look => {
                if m.bug != Some(Bug::NoLookForSleeper) {
                    self.a_bell |= self.a_sleeps;
                }
                self.d1.at = Daemon::Run;
            }
            _ => self.d1.rest(m, self.back.is_some() || self.d1.todo && free),
        }
    }

    /// Is B's cursor to be told? (`look_cursor`.)
    fn look_cursor(&mut self, m: &Wake) {
        let moved = self.cursor - self.told2;
        let due = self.want2 || self.cursor == self.head2 || moved >= m.step();
        self.d2.todo |= moved > 0 && due;
    }

    fn d2(&mut self, m: &Wake) {
        let free = self.back.is_none();
        match self.d2.at {
            Daemon::Run => {
                if let Some((head, want)) = self.forth.take() {
                    self.d1.completion();
                    (self.want2, self.head2) = (want, head);
                    self.d2.at = Daemon::Look;
                } else if self.d2.news {
                    self.d2.news = false;
                    self.look_cursor(m);
                } else if self.d2.todo && free {
                    self.d2.todo = false;
                    self.told2 = self.cursor;
                    self.back = Some(self.cursor);
                    self.d1.completion();
                } else {
                    self.d2.todo &= m.bug != Some(Bug::LostCursor);
                    self.d2.at = Daemon::Arm;
                }
            }
            // The head is stored, then the look at the sleepers; and, as in each turn, at the cursor. (A wish never comes
            // without new bytes, and B looks for it when it has read them.)
            Daemon::Look => {
                self.b_bell |= self.b_sleeps;
                self.look_cursor(m);
                self.d2.at = Daemon::Run;
            }
            _ => self
                .d2
                .rest(m, self.forth.is_some() || self.d2.todo && free),
        }
    }
}

/// All kinds of steps.
pub const STEPS: &[(&str, &[&str])] = &[
    (
        "A",
        &[
            "works",
            "looks for a sleeper",
            "counts itself asleep",
            "looks again",
            "wakes",
        ],
    ),
    (
        "B",
        &[
            "works",
            "looks for a wish",
            "looks for a sleeper",
            "looks again",
            "wakes",
        ],
    ),
    (
        "D1",
        &[
            "works",
            "looks for a sleeper",
            "arms",
            "looks at words",
            "looks at its queue",
            "wakes",
        ],
    ),
    (
        "D2",
        &[
            "works",
            "looks for a sleeper",
            "arms",
            "looks at words",
            "looks at its queue",
            "wakes",
        ],
    ),
];

impl App {
    fn kind(self) -> &'static str {
        match self {
            App::Idle => "works",
            App::Told => "looks for a wish",
            App::Bell => "looks for a sleeper",
            App::Arm => "counts itself asleep",
            App::ArmLook => "looks again",
            App::Asleep => "wakes",
        }
    }
}

impl Daemon {
    fn kind(self) -> &'static str {
        match self {
            Daemon::Run => "works",
            Daemon::Look => "looks for a sleeper",
            Daemon::Arm => "arms",
            Daemon::Words => "looks at words",
            Daemon::Queue => "looks at its queue",
            Daemon::Asleep => "wakes",
        }
    }
}

impl State {
    /// The kind of a step from here.
    fn kind(&self, act: Act) -> Step {
        match act {
            Act::A => ("A", self.a.kind()),
            Act::B | Act::BAll => ("B", self.b.kind()),
            Act::D1 => ("D1", self.d1.at.kind()),
            Act::D2 => ("D2", self.d2.at.kind()),
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
            a_sleeps: false,
            a_bell: false,
            cursor1: 0,
            d1: Proxy::NEW,
            forth: None,
            back: None,
            d2: Proxy::NEW,
            told2: 0,
            head2: 0,
            want2: false,
            b: App::Idle,
            cursor: 0,
            told: 0,
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
        if n == *last {
            return None;
        }
        self.steps.made(last.kind(act));
        Some(n)
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
