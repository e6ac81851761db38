//! Whose pages a ring has: read as a file until it was read all round and its pages were found there.

use super::end::*;
use lane::abi::{Cursor, Loc};
use lane::half::rx::How;
use lane::half::{Iov, Port, Received, Ring};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The end's port, which has the other one's files, too.
struct Paged<'a> {
    e: &'a Alone,
    /// What was read from them, as chunk and bytes.
    reads: RefCell<Vec<(u32, Range<usize>)>>,
    /// How often it was asked for a ring's pages, and the answer.
    asked: Cell<u32>,
    backed: Cell<bool>,
}

impl Port for Paged<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.e.tcp.tcp_send(data, len)
    }
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        self.e.tcp.tcp_recv(buf, len, peek)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        self.e.tcp.tcp_unread()
    }
    fn tcp_sent(&self) -> Option<u64> {
        self.e.tcp.tcp_sent()
    }
    fn read_ring(&self, chunk: u32, bytes: Range<usize>, dst: *mut u8) -> bool {
        for (k, at) in bytes.clone().enumerate() {
            // (Each page of a chunk is a ring, too.)
            let page = u32::try_from(at / 4096).unwrap();
            let log2 = 12;
            let ring = self.e.memory().peer.ring(Loc { chunk, page, log2 });
            let (p, _) = ring.unwrap().run(Cursor::new(at as u64 % 4096), 1);
            // SAFETY: mapped; `dst` has room for all of them.
            unsafe { dst.add(k).write(p.read()) };
        }
        self.reads.borrow_mut().push((chunk, bytes));
        true
    }
    fn is_backed(&self, _: u32, ring: Ring) -> bool {
        (0..ring.size() / 4096).for_each(|n| ring.touch(n));
        self.asked.set(self.asked.get() + 1);
        self.backed.get()
    }
    fn ring(&self) {
        self.e.tcp.ring();
    }
}

impl<'a> Paged<'a> {
    fn of(e: &'a Alone, backed: bool) -> Paged<'a> {
        Paged {
            e,
            reads: RefCell::default(),
            asked: Cell::default(),
            backed: Cell::new(backed),
        }
    }

    /// Receives `n` bytes, which are there from `at` on. How many reads of the file that took, and how many questions.
    fn takes(&self, at: u64, n: usize, how: How) -> (usize, u32) {
        self.reads.borrow_mut().clear();
        self.asked.set(0);
        let mut b = vec![0; n];
        let v = [iov_of(&mut b)];
        let r = self
            .e
            .rx
            .recv(&self.e.memory(), self, &mut Iov::new(&v), how);
        assert_eq!(r, Received::Bytes(n));
        assert!(how.discard || b == bytes(at, at + n as u64), "at {at}");
        (self.reads.borrow().len(), self.asked.get())
    }

    /// The other end puts so many bytes there, and this one takes them.
    fn moves(&self, ring: Loc, at: u64, n: usize) -> (usize, u32) {
        self.e.puts_on(ring, at, &bytes(at, at + n as u64));
        self.takes(at, n, look())
    }
}

/// The other end moves to this ring.
fn moved_to(e: &Alone, ring: Loc, from: u64) {
    let t = e.their_tx();
    let seq = t.loc_seq.load(Relaxed) + 1;
    let new = lane::abi::loc_index(seq);
    t.loc[new].store(ring.word(), Relaxed);
    t.loc_from[new].store(Cursor::new(from), Relaxed);
    t.loc_seq.store(seq, SeqCst);
}

/// One round is read from the file, and then none.
#[test]
fn one_round_of_a_ring() {
    let e = Alone::receiving(false, 0);
    let p = Paged::of(&e, true);
    assert_eq!(p.moves(RING, 0, 100), (1, 0));
    let peek = How {
        peek: true,
        ..look()
    };
    e.puts(100, &bytes(100, 200));
    assert_eq!(p.takes(100, 100, peek), (1, 0));
    assert_eq!(p.takes(100, 100, look()), (1, 0));
    assert_eq!(p.moves(RING, 200, SIZE - 201), (1, 0));
    // (Round the ring's end.)
    assert_eq!(p.moves(RING, SIZE as u64 - 1, 2), (2, 1));
    let at = SIZE as u64 + 1;
    assert_eq!(p.moves(RING, at, 3000), (0, 0));
    assert_eq!(p.moves(RING, at + 3000, SIZE), (0, 0));
    // Another ring is another file's.
    let at = at + 3000 + SIZE as u64;
    moved_to(&e, LARGE, at);
    assert_eq!(p.moves(LARGE, at, 5000), (1, 0));
    assert_eq!(p.reads.borrow()[0].0, LARGE.chunk);
    let at = at + 5000;
    let all = LARGE.bytes() as u64;
    let n = p.moves(LARGE, at, LARGE.bytes()).0;
    assert!(n >= LARGE.bytes() / (16 << 10), "{n}");
    assert_eq!(p.moves(LARGE, at + all, LARGE.bytes()), (0, 0));
}

/// Bytes that are thrown away count as well; those of another node are in a file of the daemon's.
#[test]
fn what_is_not_copied() {
    let e = Alone::receiving(false, 0);
    let p = Paged::of(&e, true);
    e.puts(0, &bytes(0, SIZE as u64));
    let discard = How {
        discard: true,
        ..look()
    };
    assert_eq!(p.takes(0, SIZE, discard), (0, 1));
    assert_eq!(p.moves(RING, SIZE as u64, 10), (0, 0));
    let e = Alone::receiving(true, 0);
    assert_eq!(Paged::of(&e, true).moves(RING, 0, SIZE), (0, 0));
}

/// The pages are not there: the file is read on, and they are asked for after 1, 3, 7, ... rounds.
#[test]
fn a_ring_without_pages() {
    let e = Alone::receiving(false, 0);
    let p = Paged::of(&e, false);
    let rounds = (0..32).filter(|n| {
        let (reads, asked) = p.moves(RING, n * SIZE as u64, SIZE);
        assert_eq!(reads, 1, "round {n}");
        asked > 0
    });
    assert_eq!(rounds.collect::<Vec<_>>(), [0, 2, 6, 14, 30]);
    // (They were made meanwhile: by whoever writes there now.)
    p.backed.set(true);
    let asked = (32..).map(|n| p.moves(RING, n * SIZE as u64, SIZE).1);
    assert_eq!(asked.take_while(|n| *n == 0).count(), 62 - 32);
    assert_eq!(p.moves(RING, 63 * SIZE as u64, SIZE), (0, 0));
}

/// Behind a proven ring the sender names another one as its former: that one is none of those that were proven.
#[test]
fn another_former_ring() {
    let e = Alone::receiving(false, 0);
    let p = Paged::of(&e, true);
    let all = SIZE as u64;
    assert_eq!(p.moves(RING, 0, SIZE), (1, 1));
    moved_to(&e, LARGE, 3 * all);
    assert_eq!(p.moves(RING, all, SIZE / 2), (0, 0), "the one it was");
    let other = Loc { page: 8, ..RING };
    e.their_tx().loc[0].store(other.word(), Relaxed);
    assert_eq!(p.moves(other, all * 3 / 2, SIZE / 2).0, 1);
}
