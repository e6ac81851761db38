//! What arrives from another node on one direction of a lane.
//!
//! A ring that a device writes cannot be read along on as [`super::Follower`] does: its places are written again as soon
//! as they were read, before any word says so. The data plane copies the bytes when it shows them to the application
//! ([`Tap`]), as far as there is room for them here, and this end is told by a channel that never waits. What has
//! arrived is certain: across nodes, nothing that was published is taken back (`TxState::take_back`).

use super::{Look, Piece, ATTEMPTS, READINGS};
use crate::clients::family::Family;
use crate::clients::ids::ConnRef;
use crossbeam::channel::{unbounded, Receiver, Sender};
use lane::abi::{tx, Cursor, Epoch, TcpPos, EPOCHS};
use lane::half::{Counted, Memory};
use std::sync::atomic::{
    fence, AtomicUsize,
    Ordering::{Acquire, Relaxed, SeqCst},
};
use std::sync::Arc;
use underpass_rdma::engine::Tap;

/// Most bytes that wait between the data plane and a capture; a message counts for so many more.
const WAITING_MAX: usize = 4 << 20;
const MESSAGE: usize = 128;

/// What the receiver's table says of its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Received {
    /// Taken from TCP, and of those what is not the application's, or came on a ring as well.
    pub tcp: u64,
    pub again: u64,
    /// Taken from rings.
    pub lane: u64,
    /// What had been counted at the last readiness.
    pub before: Counted,
}

/// Reads them.
pub(crate) trait Table {
    fn received(&self) -> Option<Received>;
}

/// An end, and the table in which it stands.
#[derive(Clone)]
pub(crate) struct End {
    pub family: Arc<Family>,
    pub who: ConnRef,
}

impl Table for End {
    fn received(&self) -> Option<Received> {
        let view = self.family.view(self.who.conn);
        let v = view.filter(|v| v.gen == self.who.gen)?;
        Some(Received {
            tcp: v.tcp_rx,
            again: v.rx_again,
            lane: v.lane_rx,
            before: v.rx_before,
        })
    }
}

/// Where an epoch's bytes belong.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: Cursor,
    /// Where the byte at `start` is in the stream.
    at: u64,
}

impl Place {
    fn new(tcp_pos: TcpPos, start: Cursor, again: u64, lane: u64) -> Place {
        let tcp = tcp_pos.get().saturating_sub(again);
        Place {
            start,
            at: tcp.wrapping_add(lane),
        }
    }
}

/// A switch by which a direction was on its ring when a capture of it began.
#[derive(Clone, Copy, Debug)]
struct Switch {
    epoch: Epoch,
    tcp_pos: TcpPos,
    start: Cursor,
}

enum Arrived {
    Up(Option<Place>),
    Join(Switch),
    Bytes(Cursor, Vec<u8>),
}

/// With the number of bytes that were left out before it.
struct Message(Arrived, u64);

impl Message {
    fn size(&self) -> usize {
        let bytes = match &self.0 {
            Arrived::Bytes(_, b) => b.len(),
            _ => 0,
        };
        MESSAGE + bytes
    }
}

/// The data plane's end.
pub(crate) struct Tapped<T> {
    table: T,
    to: Sender<Message>,
    waiting: Arc<AtomicUsize>,
    /// There was no room for a switch: what belongs to it is left out.
    blind: bool,
    lost: u64,
    over: bool,
}

impl<T: Table> Tapped<T> {
    /// (Relaxed: the channel orders the messages, and this only bounds them.)
    fn left(&self) -> usize {
        let used = self.waiting.load(Relaxed) + 2 * MESSAGE;
        WAITING_MAX.saturating_sub(used)
    }

    fn send(&mut self, a: Arrived) {
        let m = Message(a, std::mem::take(&mut self.lost));
        self.waiting.fetch_add(m.size(), Relaxed);
        self.over |= self.to.send(m).is_err();
    }

    fn switch(&mut self, a: Arrived) {
        self.blind = self.left() == 0;
        if !self.blind {
            self.send(a);
        }
    }
}

impl<T: Table + Send> Tap for Tapped<T> {
    fn up(&mut self, tcp_pos: TcpPos, start: Cursor) {
        // The receiver was on TCP when it declared itself ready, and no byte of the ring is shown yet: its counts stand
        // still, but for the plain bytes before the switch. (One read of a table, in memory.)
        let place = self.table.received();
        let place = place.map(|r| Place::new(tcp_pos, start, r.again, r.lane));
        self.switch(Arrived::Up(place));
    }

    fn join(&mut self, epoch: Epoch, tcp_pos: TcpPos, start: Cursor) {
        self.switch(Arrived::Join(Switch {
            epoch,
            tcp_pos,
            start,
        }));
    }

    fn room(&self) -> Option<usize> {
        let room = if self.blind { 0 } else { self.left() };
        (!self.over).then_some(room)
    }

    fn arrived(&mut self, at: Cursor, bytes: Vec<u8>, more: u64) {
        if !bytes.is_empty() {
            self.send(Arrived::Bytes(at, bytes));
        }
        self.lost = self.lost.saturating_add(more);
    }
}

/// The capture's end.
pub(crate) struct Arrivals {
    base: Epoch,
    from: Receiver<Message>,
    waiting: Arc<AtomicUsize>,
    place: Option<Place>,
    /// The switch by which it was on the ring when this began, until its place is known.
    joined: Option<Switch>,
    /// Bytes that arrived since the last ones were shown, and could not be.
    lost: u64,
}

/// Both ends of it. `uses`: how often the slot was used before.
pub(crate) fn tap<T: Table>(table: T, uses: u32) -> (Tapped<T>, Arrivals) {
    let (to, from) = unbounded();
    let waiting = Arc::new(AtomicUsize::new(0));
    let tapped = Tapped {
        table,
        to,
        waiting: waiting.clone(),
        blind: true,
        lost: 0,
        over: false,
    };
    let arrivals = Arrivals {
        base: Epoch::base(uses),
        from,
        waiting,
        place: None,
        joined: None,
        lost: 0,
    };
    (tapped, arrivals)
}

impl Arrivals {
    /// Is it on the ring?
    pub(crate) fn is_up(&self, m: &Memory<'_>) -> bool {
        let state = m.own_tx().state.load(Acquire);
        state.phase() == tx::UP && state.epoch().since(self.base) < EPOCHS
    }

    /// Shows what has arrived. `m`: the words of the direction, of which the sender's are those that this node's daemon
    /// shows.
    pub(crate) fn look(
        &mut self,
        m: &Memory<'_>,
        table: &impl Table,
        show: &mut dyn FnMut(Piece),
    ) -> Look {
        let mut any = false;
        while let Ok(message) = self.from.try_recv() {
            any = true;
            self.waiting.fetch_sub(message.size(), Relaxed);
            let Message(what, lost) = message;
            self.lost = self.lost.saturating_add(lost);
            match what {
                Arrived::Up(place) => (self.place, self.joined) = (place, None),
                Arrived::Join(s) => (self.place, self.joined) = (None, Some(s)),
                Arrived::Bytes(at, bytes) => {
                    if let Some(by) = self.joined {
                        self.place = place(m, table, by);
                        self.joined = self.joined.filter(|_| self.place.is_none());
                    }
                    self.take(at, bytes, show);
                }
            }
        }
        // Acquire: pairs with the Release of the data plane's stores.
        let state = m.own_tx().state.load(Acquire);
        if state.epoch().since(self.base) >= EPOCHS {
            return Look::Over;
        }
        Look::Moved(any)
    }

    fn take(&mut self, at: Cursor, bytes: Vec<u8>, show: &mut dyn FnMut(Piece)) {
        match self.place {
            None => self.lost = self.lost.saturating_add(bytes.len() as u64),
            Some(p) => {
                let at = p.at.wrapping_add(at.saturating_since(p.start));
                show(Piece {
                    at,
                    lost: std::mem::take(&mut self.lost),
                    bytes,
                });
            }
        }
    }
}

/// Up to where the application has taken the ring's bytes in the epoch that begins at `start`.
fn taken(m: &Memory<'_>, start: Cursor) -> Cursor {
    let read = m.peer_cursor().load(Acquire);
    // Until it has noticed the switch, its word is one of before. The head stays below that (`In::ceiling`).
    let possible = |c: &Cursor| *c >= start && *c <= m.own_head().load(Acquire);
    let before = Some(read).filter(possible);
    // (Within an epoch it never decreases.)
    let now = m.peer_cursor().load(Acquire);
    before.filter(|b| *b <= now).unwrap_or(start)
}

/// Where the bytes of a switch belong that the application may have taken some of. The receiver has noted what it had
/// counted before that switch. `None`: it is ready for a later one.
fn place(m: &Memory<'_>, table: &impl Table, by: Switch) -> Option<Place> {
    let first = table.received()?.before;
    fence(SeqCst);
    let second = table.received()?.before;
    if first.epoch == Epoch::NONE && second.epoch == Epoch::NONE {
        return estimated(m, table, (by.tcp_pos, by.start));
    }
    let both = first.epoch == by.epoch && second.epoch == by.epoch;
    both.then(|| Place::new(by.tcp_pos, by.start, first.again, first.ring))
}

/// The same for a shim of before December 2026, which notes nothing. Its count follows its cursor, so one reading may be
/// too small, and none is too large. `None`: it has taken the frame of the way down already, and counted that.
fn estimated(
    m: &Memory<'_>,
    table: &impl Table,
    (tcp_pos, start): (TcpPos, Cursor),
) -> Option<Place> {
    let (mut most, mut n): (Option<Place>, u32) = (None, 0);
    for _ in 0..ATTEMPTS {
        let before = taken(m, start);
        let r = table.received()?;
        fence(SeqCst);
        if taken(m, start) != before {
            continue;
        }
        // What is not the application's is counted behind the position on TCP.
        if table.received()?.tcp > tcp_pos.get() {
            return None;
        }
        let lane = r.lane.saturating_sub(before.since(start));
        let new = Place::new(tcp_pos, start, r.again, lane);
        most = most.filter(|p| p.at >= new.at).or(Some(new));
        n += 1;
        if n == READINGS {
            break;
        }
    }
    most
}

#[cfg(test)]
mod tests;
