//! The steps of a daemon that brings a direction to TCP on one node: what it waits for, and for how long, and whom the
//! direction belongs to afterwards.

use super::end::*;
use lane::abi::{rx, takeover, tx, Cursor, Epoch, Loc, TakeoverPhase, TcpPos, TxWord};
use lane::half::tx::bring::{Around, Bringing, End, Step, ORPHAN_MS};
use lane::half::tx::{mode, Adopted, BeforeFin, TxState};
use lane::half::{Port, Progress};
use lane::proto::frame::LEN;
use lane::proto::reason::Reason;
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::Relaxed;

/// What is around the end, and what the daemon did to its socket.
struct Beside<'a> {
    e: &'a Alone,
    busy: Cell<bool>,
    /// Is the socket there?
    there: Cell<bool>,
    cut: Cell<bool>,
    orphan: Cell<bool>,
    shut: Cell<bool>,
    now: Cell<u64>,
    /// What the kernel has counted beside what was sent here.
    other: Cell<i64>,
    /// Done when the socket is copied.
    then: RefCell<Option<Box<dyn FnOnce()>>>,
    did: RefCell<Vec<&'static str>>,
}

struct Socket<'a>(&'a Beside<'a>);

impl Port for Socket<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.0.e.tcp.tcp_send(data, len)
    }
    fn tcp_recv(&self, _: *mut u8, _: usize, _: bool) -> Result<usize, i32> {
        Err(libc::EAGAIN)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(0)
    }
    fn tcp_sent(&self) -> Option<u64> {
        let sent = self.0.e.tcp.tcp_sent()?;
        Some(sent.wrapping_add_signed(self.0.other.get()))
    }
    fn ring(&self) {}
}

impl Around for Beside<'_> {
    type Sock = ();

    fn at_work(&self) -> bool {
        self.busy.get()
    }
    fn copy(&self) -> Option<()> {
        if let Some(f) = self.then.take() {
            f();
        }
        self.there.get().then(|| self.note("copies"))
    }
    fn port<'a>(&'a self, (): &'a ()) -> impl Port + 'a {
        Socket(self)
    }
    fn close(&self, (): ()) {
        self.note("closes");
    }
    fn reset(&self, (): &()) {
        self.note("resets");
    }
    fn shut_down(&self, (): &()) {
        self.note("shuts");
    }
    fn is_shut(&self) -> bool {
        self.shut.get()
    }
    fn is_cut(&self) -> bool {
        self.cut.get()
    }
    fn is_orphan(&self) -> bool {
        self.orphan.get()
    }
    fn now_ms(&self) -> u64 {
        self.now.get()
    }
}

impl<'a> Beside<'a> {
    /// Of an end whose receiver has revoked, with 100 bytes unread. It is [`BEGAN`].
    fn new(e: &'a Alone) -> Beside<'a> {
        e.send(100);
        e.says(FIRST, rx::READY | rx::REVOKED);
        Beside {
            e,
            busy: Cell::new(false),
            there: Cell::new(true),
            cut: Cell::new(false),
            orphan: Cell::new(false),
            shut: Cell::new(false),
            now: Cell::new(BEGAN),
            other: Cell::new(0),
            then: RefCell::default(),
            did: RefCell::default(),
        }
    }

    fn note(&self, what: &'static str) {
        self.did.borrow_mut().push(what);
    }

    fn did(&self) -> Vec<&'static str> {
        self.did.take()
    }

    fn begin(&self) -> Bringing<()> {
        Bringing::new(TAG, false, BEGAN)
    }

    fn step(&self, b: &mut Bringing<()>) -> Step {
        b.step(&self.e.taken(), self)
    }

    fn phase(&self) -> TakeoverPhase {
        self.e.daemon().takeover.load(Relaxed).phase()
    }
}

const BEGAN: u64 = 1_000_000;

const BROUGHT: Step = Step::Over(End {
    claimed: true,
    brought: true,
    failed: None,
});
const CLAIMED: Step = Step::Over(End {
    claimed: true,
    brought: false,
    failed: None,
});

#[test]
fn all_at_once() {
    for shut in [false, true] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        w.shut.set(shut);
        assert_eq!(w.step(&mut w.begin()), BROUGHT);
        assert_eq!(*e.tcp.out.borrow(), bytes(0, 100));
        let did: &[&str] = match shut {
            true => &["copies", "shuts", "closes"],
            false => &["copies", "closes"],
        };
        assert_eq!((w.did(), w.phase()), (did.to_vec(), takeover::DONE));
        // The end has not looked yet: it is not done once more.
        assert_eq!(w.step(&mut w.begin()), Step::NONE);
        assert_eq!((w.did(), w.phase()), (vec![], takeover::DONE));
        // When it looks, it counts what it had not put on TCP itself: all of it was on the ring before.
        e.tx.look(&e.memory(), &e.tcp).unwrap();
        assert_eq!(e.mode(), mode::TCP);
        assert_eq!(e.tx.tcp_pos.load(Relaxed).get(), 100);
        assert_eq!(e.tx.again.load(Relaxed), 100);
    }
}

/// An end at work is asked again for a while; so is one that is met between the two looks at its lock.
#[test]
fn an_end_at_work() {
    for (passed, again) in [(0, true), (49, true), (50, false), (51, false)] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        w.now.set(BEGAN + passed);
        let want = match again {
            true => Step::Again(1),
            false => Step::NONE,
        };
        w.busy.set(true);
        let mut b = w.begin();
        assert_eq!(w.step(&mut b), want, "{passed}");
        assert_eq!((w.did(), w.phase()), (vec![], takeover::NONE));
        w.busy.set(false);
        let busy = std::ptr::from_ref(&w.busy) as usize;
        *w.then.borrow_mut() = Some(Box::new(move || {
            // SAFETY: it is called before `w` is gone, and by this thread.
            unsafe { &*(busy as *const Cell<bool>) }.set(true);
        }));
        assert_eq!(w.step(&mut b), want, "{passed}");
        assert_eq!(w.did(), ["copies", "closes"]);
        assert_eq!((w.phase(), b.holds()), (takeover::NONE, false));
    }
}

/// There is no socket, or the receiver has withdrawn what it asked for, or the kernel cannot tell its counts: the direction
/// stays the end's.
#[test]
fn nothing_to_bring() {
    let e = Alone::up(false);
    let w = Beside::new(&e);
    w.there.set(false);
    assert_eq!(w.step(&mut w.begin()), Step::NONE);
    assert_eq!((w.did(), w.phase()), (vec![], takeover::NONE));
    w.there.set(true);
    e.tcp.knows.set(false);
    let failed = Step::Over(End {
        claimed: true,
        brought: false,
        failed: Some(Reason::NotEstablished),
    });
    assert_eq!(w.step(&mut w.begin()), failed);
    assert_eq!(w.did(), ["copies", "closes"]);
    assert_eq!(w.phase(), takeover::NONE);
    e.tcp.knows.set(true);
    let at = std::ptr::from_ref(&e) as usize;
    *w.then.borrow_mut() = Some(Box::new(move || {
        // SAFETY: it is called before `e` is gone, and by this thread.
        unsafe { &*(at as *const Alone) }.says(FIRST, rx::READY);
    }));
    assert_eq!(w.step(&mut w.begin()), CLAIMED);
    assert_eq!(w.did(), ["copies", "closes"]);
    assert_eq!((w.phase(), e.on_tcp()), (takeover::NONE, 0));
}

/// The process has lost its connection to the daemon: it goes on itself, unless it has ended.
#[test]
fn a_process_that_is_cut() {
    for orphan in [false, true] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        e.tcp.room.set(30);
        let mut b = w.begin();
        assert_eq!(w.step(&mut b), Step::Again(1));
        assert!(b.holds() && !b.is_alone());
        w.cut.set(true);
        w.orphan.set(orphan);
        e.tcp.room.set(30);
        let step = w.step(&mut b);
        assert_eq!((b.is_alone(), b.holds()), (orphan, orphan));
        if !orphan {
            assert_eq!((step, w.did()), (CLAIMED, vec!["copies", "closes"]));
            assert_eq!((w.phase(), e.on_tcp()), (takeover::PLAIN, 30));
            continue;
        }
        assert_eq!((step, e.on_tcp()), (Step::Again(1), 60));
        e.tcp.room.set(40);
        assert_eq!(w.step(&mut b), BROUGHT);
        assert_eq!(w.did(), ["copies", "closes"]);
        assert_eq!(*e.tcp.out.borrow(), bytes(0, 100));
    }
    let e = Alone::up(false);
    let w = Beside::new(&e);
    w.cut.set(true);
    assert_eq!(w.step(&mut w.begin()), Step::NONE);
    assert_eq!((w.did(), w.phase()), (vec![], takeover::NONE));
}

/// Bytes of somebody else behind the daemon's: the stream is lost. If the kernel has counted fewer than the daemon has
/// put there, the socket has another connection by now, which is left alone.
#[test]
fn counts_that_are_others() {
    for (other, resets) in [(1, true), (-1, false)] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        e.tcp.room.set(30);
        let mut b = w.begin();
        assert_eq!(w.step(&mut b), Step::Again(1));
        w.other.set(other);
        e.tcp.room.set(1000);
        assert_eq!(w.step(&mut b), CLAIMED);
        let did: &[&str] = match resets {
            true => &["copies", "resets", "closes"],
            false => &["copies", "closes"],
        };
        assert_eq!((w.did(), w.phase()), (did.to_vec(), takeover::DONE));
        assert_eq!((e.on_tcp(), b.holds()), (30, false));
        // The end has not looked, and its state is what it was.
        assert_eq!(w.step(&mut w.begin()), Step::NONE);
        assert_eq!(w.did(), Vec::<&str>::new());
    }
}

/// TCP takes nothing: the daemon comes less and less often; sooner again after some progress.
#[test]
fn a_peer_that_takes_nothing() {
    let e = Alone::up(false);
    let w = Beside::new(&e);
    e.tcp.room.set(0);
    let mut b = w.begin();
    for rest in [1, 2, 4, 8, 16, 32, 50, 50] {
        assert_eq!(w.step(&mut b), Step::Again(rest));
    }
    w.now.set(BEGAN + 9_999);
    assert_eq!(w.step(&mut b), Step::Again(50));
    w.now.set(BEGAN + 10_000);
    assert_eq!(w.step(&mut b), Step::Again(1000));
    let moved = BEGAN + 11_000;
    w.now.set(moved);
    e.tcp.room.set(1);
    assert_eq!(w.step(&mut b), Step::Again(1));
    assert_eq!(w.step(&mut b), Step::Again(2));
    w.now.set(moved + 9_999);
    assert_eq!(w.step(&mut b), Step::Again(4));
    // Without its process it is given up at some time.
    w.now.set(moved + ORPHAN_MS);
    assert_eq!(w.step(&mut b), Step::Again(1000));
    w.orphan.set(true);
    w.now.set(moved + ORPHAN_MS - 1);
    assert_eq!(w.step(&mut b), Step::Again(1000));
    assert_eq!((w.did(), b.holds()), (vec!["copies"], true));
    w.now.set(moved + ORPHAN_MS);
    assert_eq!(w.step(&mut b), CLAIMED);
    assert_eq!(
        (w.did(), w.phase()),
        (vec!["resets", "closes"], takeover::DONE)
    );
}

/// A direction that is on TCP, by what its end says, is not taken.
#[test]
fn what_is_on_tcp_already() {
    for remote in LOCAL_AND_REMOTE {
        for (phase, taken) in [
            (tx::NONE, false),
            (tx::UP, true),
            (tx::DOWNING, true),
            (tx::DOWN, false),
            (tx::RESUMED, false),
            (tx::BROKEN, false),
            (tx::ENDED, false),
        ] {
            let e = Alone::up(remote);
            e.send(10);
            e.says(FIRST, rx::READY | rx::REVOKED | rx::ACCEPTED);
            e.ours().tx[L]
                .state
                .store(TxWord::new(FIRST, phase), Relaxed);
            let adopted = TxState::default().adopt(&e.taken(), &e.tcp, TAG).unwrap();
            let is = match taken {
                true => matches!(adopted, Adopted::Ring),
                false => matches!(adopted, Adopted::Tcp),
            };
            assert!(is, "{remote} {phase:?}");
        }
    }
}

/// Across nodes: a switch that was not answered, or was refused.
#[test]
fn a_switch_that_is_not_accepted() {
    for (epoch, flags, asks) in [
        (FIRST, rx::READY, true),
        (FIRST, rx::READY | rx::REVOKED, false),
        (SECOND, rx::READY, false),
        (SECOND, rx::READY | rx::ACCEPTED, false),
    ] {
        let e = Alone::new(true);
        e.says(FIRST, rx::READY);
        assert_eq!(e.tx.try_up(&e.memory(), &e.tcp), Ok(false));
        e.says(epoch, flags);
        let adopted = TxState::default().adopt(&e.taken(), &e.tcp, TAG).unwrap();
        let is = match asks {
            true => matches!(adopted, Adopted::Asking),
            false => matches!(adopted, Adopted::Tcp),
        };
        assert!(is, "{epoch:?} {flags:?}");
    }
}

/// A reader that has not seen the switch still shows where it was in the slot's last use.
#[test]
fn a_cursor_of_the_last_use() {
    let e = Alone::new(false);
    e.ours().heads[L].store(Cursor::new(500), Relaxed);
    e.tx.attach(&e.memory(), Epoch::NONE, RING);
    e.go_up();
    e.reads(400);
    e.send(10);
    e.tcp.room.set(0);
    assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
    e.says(FIRST, rx::READY);
    let t = e.take();
    e.tcp.room.set(1000);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.frame().cursor, e.frame().rest), (Cursor::new(500), 10));
    assert_eq!(e.on_tcp(), LEN + 10);
}

/// Words that no honest end has stored.
#[test]
fn impossible_words() {
    type Spoils = fn(&Alone);
    let cases: [(Spoils, Reason); 6] = [
        (
            |e| e.ours().tx[L].up_start.store(Cursor::new(101), Relaxed),
            Reason::Hostile,
        ),
        (
            |e| e.ours().heads[L].store(Cursor::new(SIZE as u64 + 1), Relaxed),
            Reason::Hostile,
        ),
        (
            |e| e.ours().tx[L].loc[0].store(lane::abi::LocWord::NONE, Relaxed),
            Reason::Hostile,
        ),
        (
            |e| {
                let none = Loc { chunk: 9, ..RING };
                e.ours().tx[L].loc[0].store(none.word(), Relaxed);
            },
            Reason::Internal,
        ),
        (
            |e| e.ours().tx[L].up_tcp_pos.store(TcpPos::new(1), Relaxed),
            Reason::Sync,
        ),
        // Bytes on TCP that nobody has recorded.
        (|e| e.tcp.out.borrow_mut().push(0), Reason::Foreign),
    ];
    for (n, (spoils, why)) in cases.into_iter().enumerate() {
        let e = Alone::up(false);
        e.send(100);
        e.says(FIRST, rx::READY | rx::REVOKED);
        spoils(&e);
        let adopted = TxState::default().adopt(&e.taken(), &e.tcp, TAG);
        assert_eq!(adopted.err(), Some(why), "{n}");
    }
}

/// The application shuts down, and the daemon that has the direction is done just before it can hear of that: then the
/// end finds that the FIN is its own.
#[test]
fn a_shutdown_just_behind_the_daemon() {
    for late in [false, true] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        e.tcp.room.set(30);
        let mut b = w.begin();
        assert_eq!(w.step(&mut b), Step::Again(1));
        let fin = e.tx.come_to_fin(&e.memory(), &e.tcp, || false);
        assert_eq!(fin, Ok(BeforeFin::ByDaemon));
        e.tcp.room.set(1000);
        let all = |b: &mut _| assert_eq!(w.step(b), BROUGHT);
        if late {
            all(&mut b);
        }
        e.tx.leave_fin(&e.rx, &e.memory(), &e.tcp);
        assert_eq!((e.tx.owes_fin(), e.mode() == mode::TCP), (late, late));
        if !late {
            w.shut.set(true);
            all(&mut b);
            assert_eq!(w.did(), ["copies", "shuts", "closes"]);
        }
    }
}

/// The end comes to its FIN while a daemon has the direction: the daemon brings the rest, unless it is gone.
#[test]
fn a_fin_beside_a_daemon() {
    for orphaned in [false, true] {
        let e = Alone::up(false);
        let w = Beside::new(&e);
        e.tcp.room.set(30);
        assert_eq!(w.step(&mut w.begin()), Step::Again(1));
        e.tcp.room.set(1000);
        let fin = e.tx.come_to_fin(&e.memory(), &e.tcp, || orphaned);
        let (want, on_tcp) = match orphaned {
            true => (BeforeFin::OnTcp(None), 100),
            false => (BeforeFin::ByDaemon, 30),
        };
        assert_eq!((fin, e.on_tcp()), (Ok(want), on_tcp));
    }
}
