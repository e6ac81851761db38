//! The thread of a capture.

use crate::core::captured::Watched;
use crate::lanes::capture::along::{Along, Lane, Seen};
use crate::lanes::capture::Piece;
use lane::family::{state, View};
use lane::num;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;
use underpass_admin::capture::{Captured, BYTES_MAX};

/// How long it rests when bytes move, and at most when none do; and without a lane.
const REST_MIN: Duration = Duration::from_micros(100);
const REST_MAX: Duration = Duration::from_millis(1);
const REST_WITHOUT: Duration = Duration::from_millis(10);
/// How often the core is asked, and the ends are looked at.
const ASK: Duration = Duration::from_millis(100);
/// Most bytes that wait for the tool, and for how long it may take none of them.
const WAITING_MAX: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// Why a capture ends of which the core says no more.
const FORBIDDEN: &str =
    "you may not see its bytes any more: another process holds it, or one has other rights";

/// What the core says of the connection.
pub(super) struct Answer {
    pub lane: Option<Lane>,
    /// Has each end a process?
    pub alive: [bool; 2],
}

/// What goes to the tool.
struct Out {
    stream: UnixStream,
    waiting: Vec<u8>,
    /// Up to where that is written.
    done: usize,
    /// When the tool took something last, or had nothing to take.
    taken: Instant,
}

impl Out {
    fn has_room(&self, bytes: usize) -> bool {
        self.waiting.len() - self.done + bytes + 1024 <= WAITING_MAX
    }

    /// Writes what the tool takes. An error: it is gone, or takes nothing.
    fn flush(&mut self) -> io::Result<()> {
        while self.done < self.waiting.len() {
            match self.stream.write(&self.waiting[self.done..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.done += n;
                    self.taken = Instant::now();
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if self.done > WAITING_MAX / 2 {
                        self.waiting.drain(..self.done);
                        self.done = 0;
                    }
                    return match self.taken.elapsed() < PATIENCE {
                        true => Ok(()),
                        false => Err(io::ErrorKind::TimedOut.into()),
                    };
                }
                Err(e) => return Err(e),
            }
        }
        self.waiting.clear();
        self.done = 0;
        self.taken = Instant::now();
        // It says nothing more, but closes.
        match self.stream.read(&mut [0; 16]) {
            Ok(0) => Err(io::ErrorKind::ConnectionAborted.into()),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
            _ => Ok(()),
        }
    }
}

pub(super) struct Reader {
    /// The second one is on another node if it is not there.
    ends: [Option<Watched>; 2],
    /// The end whose bytes are shown before the other's where both have come: who has made the connection asks, and the
    /// other one answers.
    asker: usize,
    out: Out,
    ask: mpsc::Sender<()>,
    answers: Receiver<Answer>,
    asked: Option<Instant>,
    alive: [bool; 2],
    followed: Option<Along>,
    /// Where what each end has sent, as far as it was shown, ends.
    shown: [u64; 2],
    /// Bytes that the tool had no room for since its last ones.
    dropped: [u64; 2],
    told: Option<Captured>,
    firsts: [Option<u32>; 2],
}

impl Reader {
    pub(super) fn new(
        ends: [Option<Watched>; 2],
        client: bool,
        (stream, first): (UnixStream, Vec<u8>),
        (ask, answers): (mpsc::Sender<()>, Receiver<Answer>),
    ) -> Reader {
        Reader {
            ends,
            asker: usize::from(!client),
            out: Out {
                stream,
                waiting: first,
                done: 0,
                taken: Instant::now(),
            },
            ask,
            answers,
            asked: None,
            alive: [true; 2],
            followed: None,
            shown: [0; 2],
            dropped: [0; 2],
            told: None,
            firsts: [None; 2],
        }
    }

    pub(super) fn run(mut self) {
        for end in 0..2 {
            self.shown[end] = self.sent(end);
        }
        let why = match self.follow() {
            Ok(why) => why,
            Err(e) => return tracing::debug!("a capture ends: {e}"),
        };
        let end = Captured::End {
            why: why.into(),
            unread: self.followed.as_ref().map_or(0, Along::unread),
        };
        end.encode(b"", &mut self.out.waiting);
        while self.out.flush().is_ok() && !self.out.waiting.is_empty() {
            std::thread::sleep(REST_WITHOUT);
        }
    }

    /// Until the connection ends: why it does. An error: the tool is gone.
    fn follow(&mut self) -> io::Result<&'static str> {
        let (mut rest, mut looked, mut last) = (REST_MIN, Instant::now(), false);
        loop {
            self.out.flush()?;
            if !self.talk_to_core() {
                return Ok(FORBIDDEN);
            }
            let moved = self.look();
            if last && !moved {
                return Ok("the connection has ended");
            }
            if looked.elapsed() > ASK {
                looked = Instant::now();
                // (One that has closed may have been faster than the reader at the other end.)
                let gone = [0, 1].map(|e| !self.alive[e] || self.view(self.known(e)).is_none());
                let read = self.followed.as_ref().is_none_or(|f| f.unread() == 0);
                last = gone == [true; 2] || gone != [false; 2] && read && !moved;
            }
            rest = match (&self.followed, moved) {
                (None, _) => REST_WITHOUT,
                (_, true) => REST_MIN,
                (_, false) => (2 * rest).clamp(REST_MIN, REST_MAX),
            };
            std::thread::sleep(rest);
        }
    }

    /// This end, or the other one if this one is on another node.
    fn known(&self, end: usize) -> usize {
        match self.ends[end] {
            Some(_) => end,
            None => 1 - end,
        }
    }

    /// The entry of an end, as long as it is that connection's.
    fn view(&self, end: usize) -> Option<View> {
        let e = self.ends[end].as_ref()?;
        let view = e.family.view(e.conn);
        view.filter(|v| v.gen == e.gen && v.state == state::OPEN)
    }

    /// What the application at this end has sent, by its table; or what the other end has received, by that one's.
    fn sent(&self, end: usize) -> u64 {
        let known = self.known(end);
        let of = |v: View| match known == end {
            true => v.tcp_tx.wrapping_add(v.lane_tx).wrapping_sub(v.again),
            false => v.tcp_rx.wrapping_add(v.lane_rx).wrapping_sub(v.rx_again),
        };
        self.view(known).map_or(0, of)
    }

    /// Asks it now and then which lane there is, and does not wait for the answer. `false`: it answers no more, since who
    /// asked may not see these bytes any more.
    fn talk_to_core(&mut self) -> bool {
        loop {
            let a = match self.answers.try_recv() {
                Ok(a) => a,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return false,
            };
            self.alive = a.alive;
            if let Some(lane) = a.lane {
                self.enter(lane);
            }
        }
        let grown = self.followed.as_ref().is_some_and(|f| f.has_grown());
        let due = self.asked.is_none_or(|t| t.elapsed() > ASK || grown);
        if due && self.ask.try_send(()).is_ok() {
            self.asked = Some(Instant::now());
        }
        true
    }

    fn enter(&mut self, lane: Lane) {
        let (files, side) = (&lane.files, lane.side);
        self.firsts = [files.firsts[side], files.firsts[1 - side]];
        if !self.followed.as_mut().is_some_and(|f| f.grow(files)) {
            self.look(); // what came last on the former one
            self.followed = Along::new(lane);
        }
    }

    /// Looks at both directions. Returns whether anything has moved.
    fn look(&mut self) -> bool {
        let mut found: [Vec<Piece>; 2] = Default::default();
        let mut seen = Seen::default();
        if let Some(f) = &mut self.followed {
            let tables = self.ends.each_ref().map(|e| e.as_ref().map(|e| &e.family));
            // The answers first, which are shown last: what they answer has been there before.
            seen = f.look(tables, 1 - self.asker, &mut |end, p| found[end].push(p));
        }
        if seen.over {
            self.followed = None;
        }
        self.tell(seen.up);
        for end in [self.asker, 1 - self.asker] {
            for p in std::mem::take(&mut found[end]) {
                self.show(end, &p);
            }
        }
        seen.moved
    }

    /// Tells the tool how the connection is carried, if that has changed.
    fn tell(&mut self, up: [bool; 2]) {
        let now = Captured::State {
            lane: self.followed.is_some(),
            remote: self.ends[1].is_none(),
            up,
            firsts: self.firsts,
        };
        if self.told.as_ref() != Some(&now) && self.out.has_room(0) {
            now.encode(b"", &mut self.out.waiting);
            self.told = Some(now);
        }
    }

    fn show(&mut self, end: usize, piece: &Piece) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let ns = now.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
        let mut at = piece.at;
        self.dropped[end] = self.dropped[end].saturating_add(piece.lost);
        for bytes in piece.bytes.chunks(BYTES_MAX) {
            let next = at.wrapping_add(bytes.len() as u64);
            if self.out.has_room(bytes.len()) {
                let c = Captured::Bytes {
                    from: num::tiny(end),
                    ns,
                    at,
                    acked: self.shown[1 - end],
                    lost: std::mem::take(&mut self.dropped[end]),
                    len: num::small(bytes.len()),
                };
                c.encode(bytes, &mut self.out.waiting);
                self.shown[end] = next;
            } else {
                self.dropped[end] += bytes.len() as u64;
            }
            at = next;
        }
    }
}
