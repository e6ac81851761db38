//! What a hostile peer does to everything it may write, and what must not become of it: the other end puts nothing on
//! TCP that its application has not sent, and hands out no byte that nobody has written.

use super::memory::{self, raw};
use super::{content, op, Act, World, LANE, TAG};
use lane::abi::{Control, Cursor, Epoch, CONTROL_BYTES};
use lane::proto::frame::{Frame, Kind, LEN};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The one that scribbles; the other is checked.
pub const BAD: usize = 1;

/// What buffers of applications hold before a receive. The hostile peer does not write it.
pub const UNWRITTEN: u8 = 0xaa;

#[derive(Clone, Debug)]
pub enum Scribble {
    /// One of the words of the lane.
    Word(usize, u64),
    /// The word plus a little.
    Nudge(usize, i64),
    Bytes(usize, Vec<u8>),
    Tcp(Vec<u8>),
    Frame(u32, u64),
    Fin,
}

/// Words that [`word`] knows.
pub const WORDS: usize = 13;

pub fn word(c: &Control, n: usize) -> &AtomicU64 {
    let lane = LANE as usize;
    let (tx, rx) = (&c.tx[lane], &c.rx[lane]);
    [
        raw(&tx.state),
        raw(&tx.up_tcp_pos),
        raw(&tx.up_start),
        raw(&tx.loc[0]),
        raw(&tx.loc[1]),
        raw(&tx.loc_from[0]),
        raw(&tx.loc_from[1]),
        raw(&rx.word),
        raw(&rx.revoked),
        raw(&c.heads[lane]),
        raw(&c.cursors[lane]),
        // Twice: it matters most.
        raw(&c.heads[lane]),
        raw(&tx.state),
    ][n]
}

pub fn apply(w: &World, s: &Scribble) {
    let c = w.control(BAD);
    let written = |b: &[u8]| -> Vec<u8> {
        let other = |b: &u8| if *b == UNWRITTEN { !UNWRITTEN } else { *b };
        b.iter().map(other).collect()
    };
    match s {
        Scribble::Word(n, v) => word(c, *n).store(*v, SeqCst),
        Scribble::Nudge(n, v) => {
            word(c, *n).fetch_add(*v as u64, SeqCst);
            if v % 7 == 0 {
                c.tx[LANE as usize].loc_seq.fetch_add(*v as u32 % 4, SeqCst);
            }
        }
        Scribble::Bytes(at, b) => w.scribble(
            BAD,
            at % (CONTROL_BYTES + memory::CHUNKS * memory::CHUNK),
            &written(b),
        ),
        Scribble::Tcp(b) => w.inject(BAD, &written(b)),
        Scribble::Frame(epoch, cursor) => {
            let f = Frame {
                kind: Kind::Down,
                epoch: Epoch::new(*epoch),
                rest: 0,
                cursor: Cursor::new(*cursor),
                tag: TAG ^ BAD as u64,
            };
            w.inject(BAD, &f.encode());
        }
        Scribble::Fin => _ = w.net.borrow_mut().fin(BAD),
    }
}

/// Both directions are on the lane, and the checks are those of an honest end beside a hostile one.
pub fn begin() -> World {
    let mut w = World::new();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    for end in 0..2 {
        op(&mut w, end, Act::Ready);
        op(&mut w, 1 - end, Act::TryUp);
    }
    w.hostile.set(true);
    w.trace.set(std::env::var_os("LANE_TRACE").is_some());
    w
}

/// Each scribble is done so many hooks after the one before.
pub fn plan(w: &World, scribbles: Vec<(usize, Scribble)>) {
    let mut plan = scribbles.into_iter();
    let mut next = plan.next();
    *w.meddle.borrow_mut() = Some(Box::new(move |w: &World| match &mut next {
        Some((wait @ 1.., _)) => *wait -= 1,
        Some((_, s)) => {
            apply(w, s);
            next = plan.next();
        }
        None => {}
    }));
}

impl World {
    /// The honest end puts these bytes on TCP: a frame of its own, or the end of one, or what its application sends.
    pub(super) fn is_own(&self, e: usize, bytes: &[u8]) {
        if !self.hostile.get() || e == BAD || bytes.is_empty() {
            return;
        }
        let tag = (TAG ^ e as u64).to_le_bytes();
        let n = bytes.len().min(tag.len());
        if bytes.len() <= LEN && bytes[bytes.len() - n..] == tag[tag.len() - n..] {
            return;
        }
        let h = &self.host[e];
        let (mut all, most) = (
            self.sent_bytes.borrow_mut(),
            h.sent.get() + h.in_flight.get(),
        );
        let known = all.len();
        if (known as u64) < most {
            all.resize(most as usize, 0);
            content(self.use_no.get(), e, known as u64, &mut all[known..]);
        }
        // SAFETY: both runs of bytes are borrowed.
        let at = unsafe {
            libc::memmem(
                all.as_ptr().cast(),
                most as usize,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
        assert!(!at.is_null(), "end {e} puts foreign bytes on TCP");
    }

    /// Bytes for the honest end's application, which began as [`UNWRITTEN`].
    pub(super) fn is_written(&self, e: usize, bytes: &[u8]) {
        let mut runs = bytes.split(|b| *b != UNWRITTEN);
        let invented = self.hostile.get() && e != BAD && runs.any(|r| r.len() >= 16);
        assert!(!invented, "end {e} was given bytes that nobody has written");
    }
}
