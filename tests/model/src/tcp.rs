//! One direction of a TCP connection: what was sent and has not arrived, what has arrived and was
//! not read, the end. Bytes are single numbers; a frame is two units, so that it can be cut.

use lane::proto::frame::Kind;

/// Most units between the two applications that a configuration can allow.
pub const ROOM: usize = 10;

/// One unit of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Byte number so-and-so of the application's stream.
    Byte(u8),
    /// The first half of a frame, and the second, with what is in it.
    Half,
    Frame {
        kind: Kind,
        epoch: u8,
        cursor: u8,
    },
}

impl Unit {
    pub fn down(epoch: u8, cursor: u8) -> Unit {
        Unit::Frame {
            kind: Kind::Down,
            epoch,
            cursor,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tcp {
    queue: [Option<Unit>; ROOM],
    /// Most units between the two applications.
    room: u8,
    /// How many of them have arrived.
    arrived: u8,
    fin: bool,
    fin_arrived: bool,
    pub reset: bool,
}

/// Why a call did not do what it was asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum No {
    Again,
    End,
    Reset,
}

impl Tcp {
    pub fn new(room: u8) -> Self {
        assert!(room as usize <= ROOM);
        Tcp {
            queue: [None; ROOM],
            room,
            arrived: 0,
            fin: false,
            fin_arrived: false,
            reset: false,
        }
    }

    fn len(&self) -> usize {
        self.queue.iter().flatten().count()
    }

    pub fn send(&mut self, u: Unit) -> Result<(), No> {
        if self.fin {
            return Err(No::End);
        }
        if self.reset {
            return Err(No::Reset);
        }
        let n = self.len();
        if n == self.room as usize {
            return Err(No::Again);
        }
        self.queue[n] = Some(u);
        Ok(())
    }

    /// Would a send do anything but ask to come again?
    pub fn writable(&self) -> bool {
        self.fin || self.reset || self.len() < self.room as usize
    }

    pub fn peek(&self) -> Result<Unit, No> {
        match self.queue[0] {
            Some(u) if self.arrived > 0 => Ok(u),
            _ if self.reset => Err(No::Reset),
            _ if self.fin_arrived => Err(No::End),
            _ => Err(No::Again),
        }
    }

    pub fn recv(&mut self) -> Result<Unit, No> {
        let u = self.peek()?;
        self.queue.rotate_left(1);
        self.queue[ROOM - 1] = None;
        self.arrived -= 1;
        Ok(u)
    }

    pub fn unread(&self) -> u8 {
        self.arrived
    }

    pub fn readable(&self) -> bool {
        self.arrived > 0 || self.fin_arrived || self.reset
    }

    pub fn shut(&mut self) {
        self.fin = true;
    }

    /// The network: one unit, or the end, arrives.
    pub fn deliver(&mut self) -> bool {
        if (self.arrived as usize) < self.len() {
            self.arrived += 1;
            return true;
        }
        let fin = self.fin && !self.fin_arrived;
        self.fin_arrived |= fin;
        fin
    }
}
