use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Tcp,
    /// Says `UP`, and nothing goes anywhere until the answer is here.
    Ask,
    Ring,
    /// A `Down` frame and the rest of the ring, or after a revocation the rest alone.
    Drain,
    /// A `Fin` frame.
    Fin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    A,
    D1,
}

/// What the lock's holder is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// After a byte was published.
    Look,
    GoRing,
    Downing,
    DowningLook,
    Cursor,
    /// Whether B can be told, as far as was known at the look.
    Resume(bool),
    Send,
    Record,
    /// The last word of an epoch.
    Say(Phase),
    Settle,
    FinBegin,
    Shut,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    // A's area: words that D1 reads, and the ring.
    pub w: TxWords,
    pub head: u8,
    pub ring: [u8; RING as usize],
    // The private state.
    pub mode: Mode,
    pub epoch: u8,
    pub tcp_pos: u8,
    /// Kernel position at which the drain or the `Fin` began.
    pub tcp_pos0: u8,
    pub peer_cursor: u8,
    /// The cursor in the `Down` frame; none after a revocation.
    pub frame: Option<u8>,
    pub from: u8,
    /// There was a way to tell B when the revocation was answered.
    pub told: bool,
    /// Units of the drain that are on TCP, as far as recorded.
    pub done: u8,
    /// The application has shut this direction or closed.
    pub shut: bool,
    /// The last holder of the lock died with it.
    pub stale: bool,
    /// Who holds the lock, and where. Both only if there is no lock.
    pub hands: [Option<At>; 2],
    pub dead: bool,
    pub closed: bool,
    /// Outside of every hook.
    pub away: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Takes the lock for whatever there is to do, or makes a step under it.
    Locked,
    Native,
    Send,
    Up,
    Down,
    End,
    Away,
    Back,
}

impl Sender {
    pub fn new() -> Self {
        Sender {
            w: TxWords::NONE,
            head: 0,
            ring: [0; RING as usize],
            mode: Mode::Tcp,
            epoch: 0,
            tcp_pos: 0,
            tcp_pos0: 0,
            peer_cursor: 0,
            frame: None,
            from: 0,
            told: false,
            done: 0,
            shut: false,
            stale: false,
            hands: [None; 2],
            dead: false,
            closed: false,
            away: false,
        }
    }

    /// Has a `Down` frame of this epoch gone to TCP, or is it about to?
    pub fn framed(&self) -> bool {
        self.frame.is_some()
    }

    /// Has a revocation been answered without one, in good faith?
    pub fn plain(&self) -> bool {
        self.told && !self.framed() && (self.w.phase == Phase::Resumed || self.mode == Mode::Drain)
    }

    /// Unit number `i` of the drain or the `Fin`.
    pub fn unit(&self, i: u8, c: &Config) -> Option<Unit> {
        let rest = self.head - self.from;
        let byte =
            |i: u8| (i < rest).then(|| Unit::Byte(self.ring[((self.from + i) % RING) as usize]));
        match (self.mode, self.frame, i) {
            (Mode::Fin, _, 0) | (Mode::Drain, Some(_), 0) => Some(Unit::Half),
            (Mode::Fin, _, 1) => Some(Unit::Fin(self.epoch, self.head)),
            (Mode::Drain, Some(cursor), 1) => {
                let rest = if c.bug == Some(Bug::DownWithoutLength) {
                    0
                } else {
                    rest
                };
                Some(Unit::Down(self.epoch, cursor, rest))
            }
            (Mode::Drain, Some(_), i) => byte(i - 2),
            (Mode::Drain, None, i) => byte(i),
            _ => None,
        }
    }
}
