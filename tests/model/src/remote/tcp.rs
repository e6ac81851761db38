//! One direction of the TCP connection between the two applications, with the kernel's count of
//! what it has accepted. Bytes are single numbers; a frame is two units, so that it can be cut.

use lane::proto::frame::Kind;

/// Most units that a configuration can allow on the way.
pub const ROOM: usize = 12;

/// One unit of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Byte number so-and-so of the application's stream.
    Byte(u8),
    /// The first half of any frame.
    Half,
    /// The second half, with what is in it: `rest` bytes from `cursor` on follow.
    Frame {
        kind: Kind,
        epoch: u8,
        cursor: u8,
        rest: u8,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tcp {
    queue: [Option<Unit>; ROOM],
    room: u8,
    arrived: u8,
    /// Units ever accepted: what `TCP_INFO` tells whoever holds a copy of the descriptor.
    pub total: u8,
    pub fin: bool,
    pub fin_arrived: bool,
}

impl Tcp {
    pub fn new(room: u8) -> Self {
        assert!(room as usize <= ROOM);
        Tcp {
            queue: [None; ROOM],
            room,
            arrived: 0,
            total: 0,
            fin: false,
            fin_arrived: false,
        }
    }

    fn len(&self) -> usize {
        self.queue.iter().flatten().count()
    }

    pub fn writable(&self) -> bool {
        !self.fin && self.len() < self.room as usize
    }

    pub fn send(&mut self, u: Unit) {
        debug_assert!(self.writable());
        let n = self.len();
        self.queue[n] = Some(u);
        self.total += 1;
    }

    /// The unit number `i` of those that have arrived.
    pub fn at(&self, i: usize) -> Option<Unit> {
        self.queue[i].filter(|_| i < self.arrived as usize)
    }

    pub fn recv(&mut self) -> Option<Unit> {
        let u = self.at(0)?;
        self.queue.rotate_left(1);
        self.queue[ROOM - 1] = None;
        self.arrived -= 1;
        Some(u)
    }

    pub fn unread(&self) -> u8 {
        self.arrived
    }

    /// The end has arrived, and nothing is before it.
    pub fn ended(&self) -> bool {
        self.fin_arrived && self.arrived == 0
    }

    pub fn readable(&self) -> bool {
        self.arrived > 0 || self.fin_arrived
    }

    pub fn under_way(&self) -> bool {
        (self.arrived as usize) < self.len() || self.fin && !self.fin_arrived
    }

    /// The network: one unit, or the end, arrives.
    pub fn deliver(&mut self) {
        if (self.arrived as usize) < self.len() {
            self.arrived += 1;
        } else {
            self.fin_arrived |= self.fin;
        }
    }
}
