//! The channel between data plane and capture, and where bytes belong. (That what is told is what the application gets is
//! tested with two whole daemons: `daemon/world/tests/two_daemons/along.rs`.)

use super::*;
use lane::abi::{Control, TxWord};
use lane::half::Area;
use std::cell::RefCell;
use std::collections::VecDeque;

const USES: u32 = 3;
const EPOCH: Epoch = Epoch::base(USES).next();
const SLOT: usize = 7;

/// Says these one after the other, and the last one for ever.
struct Says(RefCell<VecDeque<Received>>);

impl Says {
    fn all(all: &[(u64, u64, u64)]) -> Says {
        let one = |&(tcp, again, lane)| Received {
            tcp,
            again,
            lane,
            before: Counted::default(),
        };
        Says(RefCell::new(all.iter().map(one).collect()))
    }
}

impl Table for Says {
    fn received(&self) -> Option<Received> {
        let mut all = self.0.borrow_mut();
        match all.len() {
            0 | 1 => all.front().copied(),
            _ => all.pop_front(),
        }
    }
}

/// The words of both areas: the daemon's, which shows the sender, and the process's.
struct Words([Box<Control>; 2], [Area; 2]);

impl Words {
    fn new() -> Words {
        // SAFETY: atomic integers only, for which zeros are a value.
        let new = || unsafe { Box::<Control>::new_zeroed().assume_init() };
        let mut words = [new(), new()];
        let areas = [Area::new(), Area::new()];
        for (a, w) in areas.iter().zip(&mut words) {
            // SAFETY: of that type; the boxes stay where they are, beside the areas.
            unsafe { a.set_control(std::ptr::from_mut(&mut **w)) };
        }
        let w = Words(words, areas);
        w.state(Epoch::base(USES).next());
        w
    }

    fn state(&self, epoch: Epoch) {
        self.0[0].tx[SLOT]
            .state
            .store(TxWord::new(epoch, tx::UP), SeqCst);
    }

    fn head(&self, at: u64) {
        self.0[0].heads[SLOT].store(Cursor::new(at), SeqCst);
    }

    fn cursor(&self, at: u64) {
        self.0[1].cursors[SLOT].store(Cursor::new(at), SeqCst);
    }

    fn memory(&self) -> Memory<'_> {
        let m = Memory::new(&self.1[0], &self.1[1], SLOT as u32);
        m.unwrap().across(true)
    }
}

/// Place, what was lost before, and the bytes.
type Shown = (u64, u64, Vec<u8>);

fn shown(a: &mut Arrivals, w: &Words, table: &impl Table) -> (Look, Vec<Shown>) {
    let mut all = Vec::new();
    let look = a.look(&w.memory(), table, &mut |p| {
        all.push((p.at, p.lost, p.bytes));
    });
    (look, all)
}

fn pos(n: u64) -> TcpPos {
    TcpPos::new(n)
}

fn at(n: u64) -> Cursor {
    Cursor::new(n)
}

/// A byte's place counts what came on TCP before, without frames and repetitions, and what came on the ring.
#[test]
fn bytes_are_shown_where_they_belong() {
    let w = Words::new();
    let says = || Says::all(&[(1000, 40, 300)]);
    let (mut t, mut a) = tap(says(), USES);
    t.up(pos(1000), at(5000));
    t.arrived(at(5000), b"abc".to_vec(), 0);
    t.arrived(at(5003), b"d".to_vec(), 2);
    t.arrived(at(5006), b"g".to_vec(), 0);
    w.head(5007);
    w.cursor(5004);
    let (look, all) = shown(&mut a, &w, &says());
    let first = 1000 - 40 + 300;
    let wanted = vec![
        (first, 0, b"abc".to_vec()),
        (first + 3, 0, b"d".to_vec()),
        (first + 6, 2, b"g".to_vec()),
    ];
    assert_eq!((look, all), (Look::Moved(true), wanted));
    assert!(a.is_up(&w.memory()));
    assert_eq!(shown(&mut a, &w, &says()), (Look::Moved(false), Vec::new()));
    // The slot is another connection's.
    w.state(Epoch::base(USES + 1).next());
    w.cursor(5007);
    assert_eq!(shown(&mut a, &w, &says()).0, Look::Over);
}

/// Memory is bounded: what there is no room for is counted; a switch that there was no room for takes its bytes with it.
#[test]
fn what_has_no_room_is_missing() {
    let w = Words::new();
    let says = || Says::all(&[(0, 0, 0)]);
    let (mut t, mut a) = tap(says(), USES);
    assert_eq!(t.room(), Some(0), "before a switch");
    t.up(pos(0), at(0));
    let mut next = 0;
    loop {
        let n = t.room().unwrap().min(100_000) as u64;
        t.arrived(at(next), vec![1; n as usize], 100_000 - n);
        next += 100_000;
        if n == 0 {
            break;
        }
    }
    assert!(next <= WAITING_MAX as u64 + 200_000, "{next}");
    t.up(pos(50), at(next));
    t.arrived(at(next), Vec::new(), 10);
    w.head(next + 10);
    let (_, all) = shown(&mut a, &w, &says());
    let got: u64 = all.iter().map(|p| p.2.len() as u64).sum();
    assert!(all.iter().all(|p| p.1 == 0) && got < next);
    assert_eq!(t.room(), Some(0), "of that switch nothing is shown");
    t.up(pos(60), at(next + 10));
    t.arrived(at(next + 10), b"x".to_vec(), 0);
    let (_, all) = shown(&mut a, &w, &says());
    assert_eq!(all, [(60, next - got + 10, b"x".to_vec())]);
    // Nobody is there any more.
    drop(a);
    t.arrived(at(next + 11), b"y".to_vec(), 0);
    assert_eq!(t.room(), None);
}

/// Who begins in the middle finds the place by what the receiver has noted when it declared itself ready, whatever it has
/// counted or not counted since.
#[test]
fn who_joins_finds_the_place() {
    let w = Words::new();
    w.cursor(5200);
    let says = |all: &[Epoch]| {
        let (mut t, mut a) = tap(Says::all(&[]), USES);
        t.join(EPOCH, pos(1000), at(5000));
        t.arrived(at(5600), b"abc".to_vec(), 0);
        w.head(5603);
        let one = |&epoch| Received {
            tcp: 1032,
            again: 72,
            lane: 321,
            before: Counted {
                epoch,
                again: 40,
                ring: 300,
            },
        };
        let table = Says(RefCell::new(all.iter().map(one).collect()));
        shown(&mut a, &w, &table).1
    };
    let there = [(1000 - 40 + 300 + 600, 0, b"abc".to_vec())];
    assert_eq!(says(&[EPOCH]), there);
    // It is ready for a later one already, or becomes so just now: perhaps the counts are that one's.
    assert_eq!(says(&[EPOCH.next()]), []);
    assert_eq!(says(&[EPOCH, EPOCH.next()]), []);
    assert_eq!(says(&[Epoch::NONE, EPOCH]), []);
}

/// The same with a shim that notes nothing: what it has counted follows its cursor.
#[test]
fn who_joins_finds_the_place_of_an_older_shim() {
    let says = |w: &Words, all: &[(u64, u64, u64)]| {
        let (mut t, mut a) = tap(Says::all(&[]), USES);
        t.join(EPOCH, pos(1000), at(5000));
        t.arrived(at(5600), b"abc".to_vec(), 0);
        w.head(5603);
        shown(&mut a, w, &Says::all(all)).1
    };
    let w = Words::new();
    // Its cursor is that of a former epoch, or of another use of the slot: it has taken nothing.
    for cursor in [4000, 5000, 9000] {
        w.cursor(cursor);
        let all = says(&w, &[(900, 40, 300)]);
        assert_eq!(all, [(1000 - 40 + 300 + 600, 0, b"abc".to_vec())]);
    }
    // It has taken 200, and counts them late.
    w.cursor(5200);
    let mut late = vec![(1000, 40, 400); 5];
    late.push((1000, 40, 500));
    assert_eq!(
        says(&w, &late),
        [(1000 - 40 + 300 + 600, 0, b"abc".to_vec())]
    );
    // It has taken a part of the frame of the way down already.
    assert_eq!(says(&w, &[(1001, 41, 500)]), []);
    assert_eq!(says(&w, &[(1000, 41, 500), (1001, 41, 500)]), []);
}

/// What could not be placed is counted as lost before what comes next.
#[test]
fn what_has_no_place_is_lost() {
    let w = Words::new();
    let (mut t, mut a) = tap(Says::all(&[(0, 0, 2)]), USES);
    t.join(EPOCH, pos(1000), at(0));
    t.arrived(at(0), b"ab".to_vec(), 0);
    w.head(2);
    let gone = Says::all(&[(1032, 32, 2)]);
    assert_eq!(shown(&mut a, &w, &gone).1, []);
    t.up(pos(1032), at(2));
    t.arrived(at(2), b"c".to_vec(), 0);
    assert_eq!(shown(&mut a, &w, &gone).1, [(1034, 2, b"c".to_vec())]);
}
