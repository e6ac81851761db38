use super::*;

/// What D1 sends: a snapshot of A's words, after the bytes up to its head. One that says `UP` in an
/// epoch that D2 does not know is a SWITCH, every other one a CDC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snap {
    pub tx: TxWords,
    pub head: u8,
    /// The bytes that travel with it: `data`, from one cursor to the other.
    pub from: u8,
    pub to: u8,
    pub data: [u8; RING as usize],
}

/// What D2 sends: B's words, what D2 made of the switch (SWITCH_REPLY), and the head that D2 has
/// stored (in life: the credit for the CDC that carried it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Rev {
    pub word: Word,
    pub revoked: u8,
    pub cursor: u8,
    pub tx: (u8, u8),
    pub head: u8,
}

/// A phase in `Rev::tx`, which must have an order and a default.
pub const RESUMED: u8 = Phase::Resumed as u8;

/// What A sees of B: words in D1's area. They outlive D1.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Proxy {
    pub word: Word,
    pub revoked: u8,
    pub cursor: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct D1 {
    pub dead: bool,
    /// All that D2 has ever told, joined.
    pub rev: Rev,
    /// The rail that carries the lane, and the one that did before.
    pub rail: Option<usize>,
    pub left: usize,
    pub epoch: u8,
    /// The next byte to transfer.
    pub next: u8,
    /// The last snapshot, and where it was posted; `RAILS` is the control channel.
    pub posted: Option<(usize, TxWords, u8)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct D2 {
    pub dead: bool,
    /// What B sees of A: words in D2's area. They outlive D2.
    pub tx: TxWords,
    pub head: u8,
    /// A switch is stored (or with a bug: will be), and the look at B's word is due.
    pub look: Option<TxWords>,
    pub refuse: bool,
    /// Bug: B's word as it was before the switch was stored.
    pub before: Option<Word>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// D1 binds the lane to a rail.
    Bind(usize),
    Move(usize),
    Send(usize),
    /// D2.
    Take(usize),
    Look,
    /// D2 sends, D1 takes it. Only the newest snapshot counts, so one that is slow is like one that is
    /// sent late.
    Tell,
}

impl D1 {
    pub fn new() -> Self {
        D1 {
            dead: false,
            rev: Rev::default(),
            rail: Some(0),
            left: 0,
            epoch: 0,
            next: 0,
            posted: None,
        }
    }
}

impl D2 {
    pub fn new() -> Self {
        D2 {
            dead: false,
            tx: TxWords::NONE,
            head: 0,
            look: None,
            refuse: false,
            before: None,
        }
    }
}
