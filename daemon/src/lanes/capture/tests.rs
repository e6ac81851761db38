//! A sender and a reader that keep the rules of a lane, in steps that a seed chooses; between any two steps, and in the
//! middle of a copy, the follower looks. What it shows must be what the application has sent.

use super::*;
use lane::abi::{Control, Loc, TxWord};
use lane::half::Area;
use std::cell::{Cell, RefCell};

/// A sender that takes back and sends again what nobody can show: what is held has few pieces, and no more memory than bytes.
#[test]
fn pieces_are_bounded() {
    let mut f = Follower::new(USES);
    for k in 0..5_000u64 {
        let bytes = vec![0; lane::num::size(COPIED_MAX)];
        f.hold(Run {
            at: Cursor::new(k * 2 * COPIED_MAX),
            bytes,
        });
        f.copied = Cursor::new((k * 2 + 1) * COPIED_MAX);
        f.take_back(Cursor::new(k * 2 * COPIED_MAX + 1));
    }
    assert_eq!(f.runs.len(), RUNS_MAX);
    let memory: usize = f.runs.iter().map(|r| r.bytes.capacity()).sum();
    assert!(memory < 64 * RUNS_MAX, "{memory}");
}

/// Random numbers of a seed (xorshift).
struct Seed(u64);

impl Seed {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

const CHUNK: usize = 2 << 20;
const USES: u32 = 3;
/// Bytes on TCP before the lane, and on one before it.
const ON_TCP: u64 = 500;
const EARLIER: u64 = 300;

struct World {
    seed: Seed,
    words: [Box<Control>; 2],
    chunk: Vec<u8>,
    /// What the application has sent.
    stream: Vec<u8>,
    /// Bytes in the ring, published ones, those of them that the sender has counted, and those that the reader has.
    head: u64,
    published: u64,
    counted: u64,
    cursor: u64,
    /// Head when the present send began.
    begin: u64,
    origin: u64,
    ring: Loc,
    ring_from: u64,
    retired: Option<Loc>,
    seq: u32,
    up: bool,
    epoch: Epoch,
    tcp: u64,
    again: u64,
    ups: u32,
    /// What was counted at the last switch up, if this sender notes that: then it may die in the middle of a send, and
    /// count that later.
    before: Counted,
    notes: bool,
    /// On its way down, which it has not said.
    drains: bool,
    /// Places of the chunk that are free: two for each size.
    free: Vec<Loc>,
}

fn control() -> Box<Control> {
    // SAFETY: atomic integers only, for which zeros are a value.
    unsafe { Box::<Control>::new_zeroed().assume_init() }
}

/// The words as areas, for as long as they stay where they are.
fn areas(words: &mut [Box<Control>; 2]) -> [Area; 2] {
    let areas = [Area::new(), Area::new()];
    for (a, w) in areas.iter().zip(words) {
        // SAFETY: of that type, and every caller keeps the boxes.
        unsafe { a.set_control(std::ptr::from_mut(&mut **w)) };
    }
    areas
}

impl World {
    fn new(seed: u64) -> World {
        let loc = |page: u32, log2| Loc {
            chunk: 1,
            page,
            log2,
        };
        let free = vec![
            loc(0, 17),
            loc(32, 17),
            loc(64, 18),
            loc(128, 18),
            loc(192, 16),
        ];
        let mut w = World {
            seed: Seed(seed * 2_654_435_761 + 1),
            words: [control(), control()],
            chunk: vec![0xEE; CHUNK],
            stream: vec![0; (ON_TCP + EARLIER) as usize],
            head: 70_000,
            published: 70_000,
            counted: EARLIER,
            cursor: 12_345,
            begin: 70_000,
            origin: 70_000,
            ring: loc(208, 16),
            ring_from: 70_000,
            retired: None,
            seq: 6,
            up: false,
            epoch: Epoch::base(USES),
            tcp: ON_TCP,
            again: 0,
            ups: 1,
            before: Counted::default(),
            notes: seed.is_multiple_of(2),
            drains: false,
            free,
        };
        w.words[1].cursors[7].store(Cursor::new(w.cursor), Relaxed);
        w.words[0].heads[7].store(Cursor::new(w.head), Relaxed);
        w.say(tx::NONE);
        w.store_ring();
        w
    }

    fn say(&mut self, phase: TxPhase) {
        let word = TxWord::new(self.epoch, phase);
        self.words[0].tx[7].state.store(word, SeqCst);
    }

    fn store_ring(&mut self) {
        let t = &self.words[0].tx[7];
        t.loc[loc_index(self.seq)].store(self.ring.word(), Relaxed);
        t.loc_from[loc_index(self.seq)].store(Cursor::new(self.ring_from), Relaxed);
        t.loc_seq.store(self.seq, SeqCst);
    }

    fn store_head(&mut self, head: u64) {
        self.published = head;
        self.words[0].heads[7].store(Cursor::new(head), SeqCst);
    }

    /// One step of the sender or of the reader.
    fn step(&mut self) {
        match self.seed.below(100) {
            0..=19 if self.drains => self.is_down(),
            _ if self.drains => self.read(),
            0..=44 if self.up => self.put(),
            45..=54 if self.up => self.publish(),
            55..=84 => self.read(),
            85..=87 if self.up => self.move_on(),
            88 if self.up => self.revoked(),
            89 if self.up => self.down(),
            90..=99 if !self.up => match self.seed.below(3) {
                0 => self.go_up(),
                _ => self.send_on_tcp(),
            },
            _ => {}
        }
    }

    fn send_on_tcp(&mut self) {
        let n = 1 + self.seed.below(3000);
        for _ in 0..n {
            let b = self.seed.next() as u8;
            self.stream.push(b);
        }
        self.tcp += n;
    }

    fn go_up(&mut self) {
        // A receiver may have withdrawn a readiness.
        let more = 1 + u32::from(self.seed.below(4) == 0);
        self.epoch = Epoch::new(self.epoch.get() + more);
        let t = &self.words[0].tx[7];
        t.up_tcp_pos
            .store(lane::abi::TcpPos::new(self.tcp), Relaxed);
        t.up_start.store(Cursor::new(self.head), Relaxed);
        self.ups += 1;
        self.up = true;
        self.begin = self.head;
        self.counted = EARLIER + self.head - self.origin;
        if self.notes {
            self.before = Counted {
                epoch: self.epoch,
                again: self.again,
                ring: self.counted,
            };
        }
        self.say(tx::UP);
    }

    /// Copies a piece into the ring, as far as the reader's cursor allows.
    fn put(&mut self) {
        let size = self.ring.bytes() as u64;
        let start = self.cursor.max(self.ring_from).min(self.head);
        let free = size - (self.head - start);
        let lead = UNPUBLISHED_MAX - (self.head - self.published);
        let most = 1 << self.seed.below(15);
        let n = (1 + self.seed.below(most)).min(free).min(lead);
        let mut left = n;
        while left > 0 {
            let new = self.seed.next().to_ne_bytes();
            let offset = self.head % size;
            let k = left.min(8).min(size - offset);
            let place = self.ring.page as usize * 4096 + offset as usize;
            self.chunk[place..place + k as usize].copy_from_slice(&new[..k as usize]);
            self.stream.extend_from_slice(&new[..k as usize]);
            (self.head, left) = (self.head + k, left - k);
        }
        if self.head - self.published >= UNPUBLISHED_MAX / 2 {
            self.store_head(self.head);
        }
    }

    /// The end of a send.
    fn publish(&mut self) {
        self.store_head(self.head);
        if !self.notes || self.seed.below(2) == 0 {
            self.counted = EARLIER + self.head - self.origin;
        }
        self.begin = self.head;
    }

    fn read(&mut self) {
        if self.cursor < self.published {
            let start = self.words[0].tx[7].up_start.load(Relaxed).get();
            self.cursor = self.cursor.max(start);
            let left = self.published - self.cursor;
            let most = 1 << self.seed.below(18);
            self.cursor += (1 + self.seed.below(most)).min(left);
            self.words[1].cursors[7].store(Cursor::new(self.cursor), SeqCst);
        }
    }

    /// To another ring. The one before the last is given to another connection, which writes there at once.
    fn move_on(&mut self) {
        if self.cursor < self.ring_from {
            return;
        }
        self.publish();
        let at = self.seed.below(self.free.len() as u64) as usize;
        let old = std::mem::replace(&mut self.ring, self.free.swap_remove(at));
        self.ring_from = self.head;
        self.seq += 1;
        self.store_ring();
        if let Some(r) = self.retired.replace(old) {
            let begin = r.page as usize * 4096;
            self.chunk[begin..begin + r.bytes()].fill(0xEE);
            self.free.push(r);
        }
    }

    /// The receiver has revoked in the middle of a send: what it has not read of that send is taken back.
    fn revoked(&mut self) {
        let kept = self.cursor.max(self.begin).min(self.published);
        let gone = self.head - kept;
        self.stream.truncate(self.stream.len() - gone as usize);
        self.head = kept;
        self.store_head(kept);
        self.publish();
        self.tcp += self.head.saturating_sub(self.cursor);
        self.again += self.head.saturating_sub(self.cursor);
        self.say(tx::RESUMED);
        self.up = false;
    }

    /// A frame, and the unread bytes once more. The reader goes on with the ring.
    fn down(&mut self) {
        self.publish();
        // (It has the daemon's word, or none, that it is on its way.)
        self.drains = self.seed.below(2) == 0;
        if !self.drains {
            self.say(tx::DOWNING);
        }
        let repeated = 32 + self.head.saturating_sub(self.cursor.max(self.origin));
        self.tcp += repeated;
        self.again += repeated;
        self.up = false;
        if !self.drains {
            self.is_down();
        }
    }

    fn is_down(&mut self) {
        self.drains = false;
        self.say(tx::DOWN);
    }
}

struct Around<'a> {
    world: &'a RefCell<World>,
    /// Steps in the middle of each copy.
    busy: u64,
    copies: Cell<u64>,
}

impl Around<'_> {
    fn steps(&self) {
        let mut w = self.world.borrow_mut();
        let n = match self.busy {
            0 => 0,
            n => w.seed.below(n),
        };
        (0..n).for_each(|_| w.step());
    }
}

impl Surroundings for Around<'_> {
    fn read(&self, ring: Loc, at: Cursor, to: &mut [u8]) -> bool {
        self.copies.set(self.copies.get() + 1);
        let mut done = 0;
        for piece in ring.pieces(at, to.len()).unwrap() {
            for begin in piece.clone().step_by(3000) {
                self.steps();
                let part = begin..piece.end.min(begin + 3000);
                let end = done + part.len();
                to[done..end].copy_from_slice(&self.world.borrow().chunk[part]);
                done = end;
            }
        }
        self.steps();
        true
    }

    fn ledger(&self) -> Option<Ledger> {
        let w = self.world.borrow();
        Some(Ledger {
            lane: w.counted,
            tcp: w.tcp,
            again: w.again,
            ups: w.ups,
            before: w.before,
        })
    }
}

/// What was shown, and lost, of how many bytes on the lane.
fn follow(seed: u64, busy: u64, between: u64) -> (u64, u64, u64) {
    let world = RefCell::new(World::new(seed));
    let areas = areas(&mut world.borrow_mut().words);
    let m = Memory::new(&areas[0], &areas[1], 7).unwrap();
    let around = Around {
        world: &world,
        busy,
        copies: Cell::new(0),
    };
    let mut f = Follower::new(USES);
    let mut shown: Vec<Piece> = Vec::new();
    for _ in 0..1000 {
        let n = 1 + world.borrow_mut().seed.below(between);
        (0..n).for_each(|_| world.borrow_mut().step());
        let over = f.look(&m, &around, &mut |p| shown.push(p));
        assert_ne!(over, Look::Over);
    }
    // The reader takes the rest.
    world.borrow_mut().publish();
    while world.borrow().cursor < world.borrow().published {
        world.borrow_mut().read();
    }
    f.look(&m, &Around { busy: 0, ..around }, &mut |p| shown.push(p));
    let w = world.borrow();
    let (mut next, mut lost) = (None, 0);
    for p in &shown {
        let end = p.at + p.bytes.len() as u64;
        let range = p.at as usize..end as usize;
        let sent = w.stream.get(range.clone());
        assert!(
            sent == Some(&p.bytes[..]),
            "seed {seed}: at {range:?} of {} it shows other bytes than were sent",
            w.stream.len()
        );
        // (Before the first one there may be unread ones that it came too late for.)
        let jump = |n: u64| p.at.checked_sub(n).expect("in order");
        let jump = next.map_or(u64::MAX, jump);
        assert!(p.lost <= jump, "seed {seed}: {} of {jump}", p.lost);
        (next, lost) = (Some(end), lost + p.lost);
    }
    let all: u64 = shown.iter().map(|p| p.bytes.len() as u64).sum();
    (all, lost, w.head - w.origin)
}

#[test]
fn who_looks_in_time_misses_nothing() {
    for seed in 1..=10 {
        let (shown, lost, sent) = follow(seed, 0, 1);
        assert!(sent > 100_000, "{sent}");
        assert_eq!((shown, lost), (sent, 0), "seed {seed}");
    }
}

#[test]
fn who_is_late_shows_nothing_wrong() {
    let (mut late, mut some) = (0, 0);
    for seed in 1..=60 {
        let (shown, lost, sent) = follow(seed, seed % 9, 1 + seed % 40);
        assert!(shown + lost <= sent, "seed {seed}: {shown} {lost} {sent}");
        late += u64::from(lost > 0);
        some += u64::from(shown > sent / 100);
    }
    assert!(late > 30 && some > 30, "{late} {some}");
}

/// The sender may have written more than it says.
#[test]
fn what_may_be_written_again_is_not_believed() {
    let world = RefCell::new(World::new(5));
    let areas = areas(&mut world.borrow_mut().words);
    let m = Memory::new(&areas[0], &areas[1], 7).unwrap();
    let around = Around {
        world: &world,
        busy: 0,
        copies: Cell::new(0),
    };
    let mut f = Follower::new(USES);
    let mut shown: Vec<Piece> = Vec::new();
    world.borrow_mut().go_up();
    f.look(&m, &around, &mut |p| shown.push(p));
    let mut w = world.borrow_mut();
    let size = w.ring.bytes() as u64;
    while w.head < w.origin + size {
        w.put();
        w.publish();
    }
    while w.cursor < w.published {
        w.read();
    }
    while w.head - w.published < 8000 {
        w.put();
    }
    drop(w);
    f.look(&m, &around, &mut |p| shown.push(p));
    let w = world.borrow();
    let whole = w.published + UNPUBLISHED_MAX - size;
    let lost = whole - w.origin;
    assert_eq!(
        (shown[0].at, shown[0].lost),
        (ON_TCP + EARLIER + lost, lost)
    );
    for p in &shown {
        let at = p.at as usize;
        assert!(w.stream[at..at + p.bytes.len()] == p.bytes, "at {at}");
    }
}

/// To another node, a switch may be refused, and asked for again in the same epoch after more bytes on TCP. What is
/// published is shown at once.
#[test]
fn a_switch_that_is_asked_for_twice() {
    let world = RefCell::new(World::new(5));
    let areas = areas(&mut world.borrow_mut().words);
    let m = Memory::new(&areas[0], &areas[1], 7).unwrap().across(true);
    let around = Around {
        world: &world,
        busy: 0,
        copies: Cell::new(0),
    };
    let mut f = Follower::new(USES);
    let mut shown: Vec<Piece> = Vec::new();
    let mut look = || f.look(&m, &around, &mut |p| shown.push(p));
    let ask = || {
        let mut w = world.borrow_mut();
        (w.up, w.ups) = (true, 1); // not granted yet
        let t = &w.words[0].tx[7];
        t.up_tcp_pos.store(lane::abi::TcpPos::new(w.tcp), Relaxed);
        t.up_start.store(Cursor::new(w.head), Relaxed);
        w.say(tx::UP);
    };
    world.borrow_mut().epoch = Epoch::base(USES).next();
    ask();
    look();
    world.borrow_mut().say(tx::RESUMED);
    look();
    world.borrow_mut().send_on_tcp();
    ask();
    look();
    let mut w = world.borrow_mut();
    w.ups = 2;
    w.put();
    w.publish();
    drop(w);
    look();
    let w = world.borrow();
    assert_eq!(shown.first().map(|p| p.at), Some(w.tcp + EARLIER));
    for p in &shown {
        let at = p.at as usize;
        assert!(w.stream[at..at + p.bytes.len()] == p.bytes, "at {at}");
    }
}

/// Whatever the words say, it goes on, and copies no more than rings hold.
#[test]
fn words_that_cannot_be_do_no_harm() {
    struct Nothing;
    impl Surroundings for Nothing {
        fn read(&self, ring: Loc, _: Cursor, to: &mut [u8]) -> bool {
            assert!(to.len() <= ring.bytes());
            true
        }
        fn ledger(&self) -> Option<Ledger> {
            Some(Ledger::default())
        }
    }
    use lane::abi::Word;
    let mut seed = Seed(99);
    for _ in 0..200 {
        let mut words = [control(), control()];
        let areas = areas(&mut words);
        let m = Memory::new(&areas[0], &areas[1], 7).unwrap();
        let mut f = Follower::new(0);
        for _ in 0..50 {
            let mut any = |mild: u64| match seed.below(4) {
                0 => u64::MAX - seed.below(100_000),
                1 => seed.next(),
                _ => seed.below(mild),
            };
            let (t, mild) = (&words[0].tx[7], 1 << 20);
            t.up_start.store(Cursor::new(any(mild)), Relaxed);
            t.up_tcp_pos
                .store(lane::abi::TcpPos::new(any(mild)), Relaxed);
            t.loc_seq.store(any(4) as u32, Relaxed);
            for i in 0..2 {
                t.loc_from[i].store(Cursor::new(any(mild)), Relaxed);
                let page = any(50) << 32 | 1 << 8 | (12 + any(11));
                t.loc[i].store(Word::from_raw(page), Relaxed);
            }
            let epoch = Epoch::new(any(6) as u32);
            let phase = TxPhase::from_raw(any(8) as u8);
            t.state.store(TxWord::new(epoch, phase), Relaxed);
            words[0].heads[7].store(Cursor::new(any(mild)), Relaxed);
            words[1].cursors[7].store(Cursor::new(any(mild)), Relaxed);
            f.look(&m, &Nothing, &mut |_| {});
            assert!(f.unread() <= HELD_MAX);
        }
    }
}

#[test]
fn a_slot_that_is_used_again_is_somebody_elses() {
    let world = World::new(1);
    let mut words = world.words;
    let areas = areas(&mut words);
    let m = Memory::new(&areas[0], &areas[1], 7).unwrap();
    let world = RefCell::new(World::new(1));
    let around = Around {
        world: &world,
        busy: 0,
        copies: Cell::new(0),
    };
    for (uses, is) in [
        (USES, Look::Moved(false)),
        (USES - 1, Look::Over),
        (USES + 1, Look::Over),
    ] {
        let found = Follower::new(uses).look(&m, &around, &mut |_| panic!("nothing"));
        assert_eq!(found, is);
    }
}
