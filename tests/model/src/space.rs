//! Space in the ring, moves of the ring, and several sleepers on one doorbell.
//!
//! One direction that stays on its ring. At the sending end one thread sends and may move the
//! lane to another ring, another waits until the connection is writable (a poll). The reader takes
//! one or two bytes at a time and asks for wishes only when `RxState::take` does.

use super::Bug;
use stateright::{Model, Property};

/// Bytes of a ring, rings to choose from, bytes to send.
const SIZE: u8 = 4;
const RINGS: usize = 3;
const POISON: u8 = 0xee;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TxAt {
    Idle,
    Room,
    Data,
    Head,
    MovePlace,
    MoveFrom,
    MoveSeq,
}

/// A thread that waits for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    No,
    Wish,
    Look,
    Arm,
    ArmLook,
    Asleep,
    /// Woken by the doorbell, which the other sleeper may need as well.
    Forward,
    /// Wanted to know that there is space, and knows.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RxAt {
    Idle,
    Seq {
        head: u8,
        begin: u8,
        n: u8,
    },
    From {
        head: u8,
        begin: u8,
        n: u8,
        seq: u8,
    },
    Loc {
        head: u8,
        begin: u8,
        n: u8,
        seq: u8,
        new: bool,
        end: u8,
    },
    Data {
        head: u8,
        begin: u8,
        n: u8,
        end: u8,
        ring: u8,
    },
    Cursor {
        head: u8,
        begin: u8,
    },
    Wish,
    Bell,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    // Shared.
    rings: [[u8; SIZE as usize]; RINGS],
    head: u8,
    cursor: u8,
    loc: [u8; 2],
    from: [u8; 2],
    seq: u8,
    wish: bool,
    sleepers: u8,
    bell: bool,
    // The sending end.
    tx: TxAt,
    sent: u8,
    peer_cursor: u8,
    ring: u8,
    ring_from: u8,
    retired: Option<u8>,
    moves: u8,
    /// The sending thread and the polling one.
    wait: [Wait; 2],
    notified: [bool; 2],
    // The reader.
    rx: RxAt,
    read: u8,
    rx_ring: u8,
    rx_seq: u8,
    wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Send,
    Move(u8),
    Tx,
    Poll,
    Wait(usize),
    Take(u8),
    Rx,
}

pub struct Space {
    pub bytes: u8,
    pub moves: u8,
    pub poll: bool,
    pub bug: Option<Bug>,
}

impl State {
    fn full(&self) -> bool {
        self.sent - self.peer_cursor.max(self.ring_from) >= SIZE
    }

    fn refresh(&mut self) {
        self.peer_cursor = self.cursor;
    }

    fn due(&self, m: &Space, out: &mut Vec<Act>) {
        match self.tx {
            TxAt::Idle if self.wait[0] == Wait::No && self.sent < m.bytes => out.push(Act::Send),
            TxAt::Idle => {}
            _ => out.push(Act::Tx),
        }
        for t in 0..2 {
            match self.wait[t] {
                Wait::No | Wait::Done => {}
                Wait::Asleep if !(self.bell || self.notified[t]) => {}
                _ => out.push(Act::Wait(t)),
            }
        }
        match self.rx {
            RxAt::Idle if self.read == self.head => {}
            RxAt::Idle => {
                out.push(Act::Take(1));
                if self.head - self.read > 1 {
                    out.push(Act::Take(2));
                }
            }
            _ => out.push(Act::Rx),
        }
    }

    fn free(&self, m: &Space, out: &mut Vec<Act>) {
        // `can_move`: the reader has left the ring before this one.
        let left = self.cursor >= self.ring_from || m.bug == Some(Bug::MoveTooEarly);
        if self.tx == TxAt::Idle && self.wait[0] == Wait::No && self.moves > 0 && left {
            // Any ring but the present one: the one before the last is free from here on.
            out.extend((0..RINGS as u8).filter(|&r| r != self.ring).map(Act::Move));
        }
        if m.poll && self.wait[1] == Wait::No && self.tx == TxAt::Idle && self.full() {
            out.push(Act::Poll);
        }
    }

    fn tx(&mut self, m: &Space) {
        // The bug announces the move first and writes where it went afterwards.
        let early = m.bug == Some(Bug::MoveBeforePlace);
        let slot = ((self.seq + u8::from(!early)) % 2) as usize;
        self.tx = match self.tx {
            TxAt::Idle => TxAt::Idle,
            TxAt::Room => {
                if self.full() {
                    self.refresh();
                }
                if self.full() {
                    self.wait[0] = Wait::Wish;
                    TxAt::Idle
                } else {
                    TxAt::Data
                }
            }
            TxAt::Data => {
                self.rings[self.ring as usize][(self.sent % SIZE) as usize] = self.sent;
                TxAt::Head
            }
            TxAt::Head => {
                self.sent += 1;
                self.head = self.sent;
                if m.bug == Some(Bug::WishTakenBack) {
                    self.wish = false;
                }
                TxAt::Idle // the reader of this model needs no bell
            }
            TxAt::MovePlace => {
                self.loc[slot] = self.ring;
                TxAt::MoveFrom
            }
            TxAt::MoveFrom => {
                self.from[slot] = self.ring_from;
                if early {
                    TxAt::Idle
                } else {
                    TxAt::MoveSeq
                }
            }
            TxAt::MoveSeq => {
                self.seq += 1;
                if early {
                    TxAt::MovePlace
                } else {
                    TxAt::Idle
                }
            }
        };
    }

    fn wait(&mut self, t: usize, m: &Space) {
        self.wait[t] = match self.wait[t] {
            Wait::Wish => {
                self.wish = true;
                if m.bug == Some(Bug::WishWithoutLook) {
                    Wait::Arm
                } else {
                    Wait::Look
                }
            }
            Wait::Look => {
                self.refresh();
                match (self.full(), t) {
                    (true, _) => Wait::Arm,
                    (false, 0) => Wait::No,
                    (false, _) => Wait::Done,
                }
            }
            Wait::Arm => {
                self.sleepers += 1;
                match m.bug {
                    Some(Bug::WishWithoutLook | Bug::SleepWithoutLook) => Wait::Asleep,
                    _ => Wait::ArmLook,
                }
            }
            Wait::ArmLook => {
                self.refresh();
                if self.full() {
                    Wait::Asleep
                } else {
                    self.sleepers -= 1;
                    if t == 0 {
                        Wait::No
                    } else {
                        Wait::Done
                    }
                }
            }
            Wait::Asleep => {
                self.sleepers -= 1;
                let rung = !self.notified[t];
                self.notified[t] = false;
                if rung {
                    // One of the sleepers takes the bell.
                    self.bell = false;
                    Wait::Forward
                } else if t == 0 {
                    Wait::No
                } else {
                    Wait::Wish
                }
            }
            Wait::Forward => {
                if self.wait[1 - t] == Wait::Asleep && m.bug != Some(Bug::NoForward) {
                    self.notified[1 - t] = true;
                }
                if t == 0 {
                    Wait::No
                } else {
                    Wait::Wish
                }
            }
            at => at,
        };
    }

    fn rx(&mut self, m: &Space) {
        self.rx = match self.rx {
            RxAt::Idle => RxAt::Idle,
            at @ (RxAt::Seq { .. } | RxAt::From { .. } | RxAt::Loc { .. }) => self.source(at),
            at @ RxAt::Data { .. } => self.take(at),
            RxAt::Cursor { head, begin } => {
                self.cursor = self.read;
                let (unread, n) = (head - self.read, self.read - begin);
                let ask = (head - begin > SIZE / 2 || n > SIZE / 4) && unread <= SIZE / 2;
                if ask && m.bug != Some(Bug::NoLookForWish) {
                    RxAt::Wish
                } else {
                    RxAt::Idle
                }
            }
            RxAt::Wish if self.wish => RxAt::Bell,
            RxAt::Wish => RxAt::Idle,
            RxAt::Bell => {
                self.bell |= self.sleepers > 0;
                RxAt::Idle
            }
        };
    }

    /// Which ring holds the next byte, as `RxState::source` finds it.
    fn source(&mut self, at: RxAt) -> RxAt {
        match at {
            RxAt::Seq { head, begin, n } if self.seq == self.rx_seq => RxAt::Data {
                head,
                begin,
                n,
                end: head,
                ring: self.rx_ring,
            },
            RxAt::Seq { head, begin, n } => RxAt::From {
                head,
                begin,
                n,
                seq: self.seq,
            },
            RxAt::From {
                head,
                begin,
                n,
                seq,
            } => {
                let from = self.from[(seq % 2) as usize];
                let new = from <= self.read;
                RxAt::Loc {
                    head,
                    begin,
                    n,
                    seq,
                    new,
                    end: if new { head } else { from.min(head) },
                }
            }
            RxAt::Loc {
                head,
                begin,
                n,
                seq,
                new,
                end,
            } => {
                let ring = self.loc[((seq + u8::from(!new)) % 2) as usize];
                if new {
                    self.rx_seq = seq;
                    self.rx_ring = ring;
                }
                RxAt::Data {
                    head,
                    begin,
                    n,
                    end,
                    ring,
                }
            }
            at => at,
        }
    }

    fn take(&mut self, at: RxAt) -> RxAt {
        let RxAt::Data {
            head,
            begin,
            n,
            end,
            ring,
        } = at
        else {
            return at;
        };
        self.wrong |= self.rings[ring as usize][(self.read % SIZE) as usize] != self.read;
        self.read += 1;
        match n - 1 {
            0 => RxAt::Cursor { head, begin },
            n if self.read == end => RxAt::Seq { head, begin, n },
            n => RxAt::Data {
                head,
                begin,
                n,
                end,
                ring,
            },
        }
    }
}

impl Model for Space {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            rings: [[POISON; SIZE as usize]; RINGS],
            head: 0,
            cursor: 0,
            loc: [0; 2],
            from: [0; 2],
            seq: 0,
            wish: false,
            sleepers: 0,
            bell: false,
            tx: TxAt::Idle,
            sent: 0,
            peer_cursor: 0,
            ring: 0,
            ring_from: 0,
            retired: None,
            moves: self.moves,
            wait: [Wait::No; 2],
            notified: [false; 2],
            rx: RxAt::Idle,
            read: 0,
            rx_ring: 0,
            rx_seq: 0,
            wrong: false,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        if !s.wrong {
            s.due(self, out);
            s.free(self, out);
        }
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let mut n = last.clone();
        match act {
            Act::Send => n.tx = TxAt::Room,
            Act::Tx => n.tx(self),
            Act::Move(to) => {
                n.moves -= 1;
                // Whoever still reads a ring that may be freed now is found out.
                if let Some(freed) = n.retired.replace(n.ring) {
                    n.rings[freed as usize] = [POISON; SIZE as usize];
                }
                n.ring = to;
                n.ring_from = n.sent;
                n.tx = TxAt::MovePlace;
                if self.bug == Some(Bug::MoveBeforePlace) {
                    n.tx = TxAt::MoveSeq;
                }
            }
            Act::Poll => n.wait[1] = Wait::Wish,
            Act::Wait(t) => n.wait(t, self),
            Act::Take(k) => {
                n.rx = RxAt::Seq {
                    head: n.head,
                    begin: n.read,
                    n: k,
                }
            }
            Act::Rx => n.rx(self),
        }
        (n != *last).then_some(n)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("every byte once and in order", |_, s: &State| !s.wrong),
            Property::always("nobody waits for ever", |m: &Space, s: &State| {
                let mut due = Vec::new();
                s.due(m, &mut due);
                s.wrong
                    || !due.is_empty()
                    || (s.read == m.bytes && s.wait[0] == Wait::No && s.wait[1] != Wait::Asleep)
            }),
            Property::sometimes("everything arrives", |m: &Space, s: &State| {
                s.read == m.bytes
            }),
            Property::sometimes("the sender sleeps", |_, s: &State| {
                s.wait[0] == Wait::Asleep
            }),
        ]
    }
}
