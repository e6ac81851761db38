//! Steps of the two daemons.

use super::messages::{Back, Which};
use super::sender::{Half, Takeover};
use super::*;

/// What A sees of B, and of D1 itself: words in D1's area. They outlive D1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Proxy {
    pub word: Word,
    /// The last word with `REVOKED` was shown while there was a link.
    pub told: bool,
    pub cursor: u8,
    pub landed: u8,
    pub takeover: Takeover,
}

/// The phase of the engine's outgoing direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Out {
    Idle,
    Asking {
        which: Which,
        /// Sent over the rail to which the lane is bound; over any.
        said: bool,
        doubt: bool,
    },
    Refused(u8),
    Up,
    /// A has left the ring.
    Left,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct D1 {
    pub dead: bool,
    // The engine.
    pub out: Out,
    /// The last epoch that D2 has accepted, and how far A says it is in it.
    pub epoch: u8,
    pub phase: Phase,
    /// B's word, as last told.
    pub told: Word,
    pub attempt: u8,
    /// Cursors: consumed by B; posted, and announced; certainly in B's ring; the highest ever announced.
    pub cursor: u8,
    pub posted: u8,
    pub acked: u8,
    pub high: u8,
    /// A snapshot is due; the first after a move to another rail.
    pub snapshot: bool,
    pub validate: bool,
    pub want_down: bool,
    /// A will send no more: it is to be told when everything has landed.
    pub finish: bool,
    /// The rail that carries the lane, and the one that did before.
    pub rail: Option<usize>,
    pub left: usize,
    pub seq: u8,
    // Takeover.
    pub engine_left: bool,
    /// `TAKEN` is stored, for a direction in this state; the look at the lock comes next.
    pub claim: Option<(u8, Phase)>,
    /// The claim was good; the direction as the daemon has found it comes next.
    pub adopts: bool,
    pub half: Option<Half>,
    /// What is on the ring has not arrived for two seconds.
    pub late: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct D2 {
    pub dead: bool,
    /// What B sees of A: words in D2's area. They outlive D2.
    pub tx: TxWords,
    pub head: u8,
    // The engine.
    /// A is on the ring, in the epoch of `tx`.
    pub up: bool,
    /// A switch is stored (or with a bug: will be), and the look at B's word is due.
    pub look: Option<(Which, TxWords)>,
    /// The last switch that was answered.
    pub answered: Option<(Which, bool)>,
    pub answer_due: bool,
    pub wants_landed: Option<u8>,
    pub landed: Option<(u8, u8)>,
    pub landed_due: bool,
    /// The last snapshot of B's words that D1 was sent.
    pub told: Option<(Word, u8)>,
    pub rail: usize,
    pub seq: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// D1 binds the lane to a rail.
    Bind(usize),
    Move(usize),
    /// D1 looks at A's words, and posts what is due.
    Turn,
    /// D1 asks over the control channel.
    Query,
    /// D2.
    Take(usize),
    Look,
    Tell,
    /// D1 takes what D2 has sent.
    Receive(usize),
    /// The control channel.
    Control,
    Takeover(Step),
}

/// What D1 does for an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Claim,
    LookAtLock,
    Adopt,
    /// A step of a helper on the direction.
    Work,
    /// It is on TCP.
    Done,
    /// Two seconds have passed.
    Late,
}

impl Proxy {
    pub fn new() -> Self {
        Proxy {
            word: Word::default(),
            told: false,
            cursor: 0,
            landed: 0,
            takeover: Takeover::NONE,
        }
    }
}

impl D1 {
    pub fn new() -> Self {
        D1 {
            dead: false,
            out: Out::Idle,
            epoch: 0,
            phase: Phase::None,
            told: Word::default(),
            attempt: 0,
            cursor: 0,
            posted: 0,
            acked: 0,
            high: 0,
            snapshot: false,
            validate: false,
            want_down: false,
            finish: false,
            rail: Some(0),
            left: 0,
            seq: 0,
            engine_left: false,
            claim: None,
            adopts: false,
            half: None,
            late: false,
        }
    }

    /// May bytes be sent on the ring?
    pub fn sends(&self) -> bool {
        self.out == Out::Up
    }
}

impl D2 {
    /// `slow`: its messages take their time, and go over another rail than those to it.
    pub fn new(slow: bool) -> Self {
        D2 {
            dead: false,
            tx: TxWords::NONE,
            head: 0,
            up: false,
            look: None,
            answered: None,
            answer_due: false,
            wants_landed: None,
            landed: None,
            landed_due: false,
            told: None,
            rail: usize::from(slow),
            seq: 0,
        }
    }

    /// The next answer that is due, before any snapshot.
    pub fn due(&self) -> Option<Back> {
        let landed = self.landed.filter(|_| self.landed_due);
        if let Some((epoch, head)) = landed {
            return Some(Back::Landed { epoch, head });
        }
        let answered = self.answered.filter(|_| self.answer_due);
        answered.map(|(which, ok)| Back::Answer(which, ok))
    }
}
