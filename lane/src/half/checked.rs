//! The real sending and receiving halves under loom: every interleaving, and every value that a weak memory model
//! lets a load see, for the words that both ends use. What an end keeps to itself under its lock is ordinary memory
//! here.
//!
//! One thing loom cannot show: a load that is delayed past a later store. The cursor's Release and its Acquire in
//! `refresh` forbid that (it would be a copy out of the ring after the space was given away), and must stay although
//! no test here fails without them.

mod past;

use super::rx::{How, Revoked};
use super::tx::{claim, release, Adopted};
use super::{Area, Iov, Memory, Port, Received, RxState, Sent, TxState};
use crate::abi::{rx, takeover, tx, Control, Epoch, Loc, RxWord, TcpPos};
use crate::prim::{AtomicU32, Ordering::*};
use loom::sync::atomic::AtomicU8;
use loom::sync::{Arc, Mutex};
use std::collections::VecDeque;

const RING: usize = 4;
const RINGS: usize = 2;
const TAG: u64 = 7;

/// TCP from the sender to the receiver, and the two doorbells.
#[derive(Default)]
struct Wire {
    stream: VecDeque<u8>,
    sent: u64,
    rung: [bool; 2],
}

/// Client 0 sends, client 1 receives.
struct World {
    control: [Control; 2],
    rings: [[AtomicU8; RING]; RINGS],
    area: [Area; 2],
    tx: TxState,
    rx: RxState,
    wire: Mutex<Wire>,
}

struct End<'w>(&'w World, usize);

impl Port for End<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // SAFETY: the lane passes bytes of a frame, or one byte of a ring, copied.
        let b = unsafe { std::slice::from_raw_parts(data, len) }.to_vec();
        let mut w = self.0.wire.lock().unwrap();
        w.sent += len as u64;
        w.stream.extend(b);
        Ok(len)
    }
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        let mut w = self.0.wire.lock().unwrap();
        let n = len.min(w.stream.len());
        if n == 0 {
            return Err(libc::EAGAIN);
        }
        for (i, b) in w.stream.iter().take(n).enumerate() {
            if !buf.is_null() {
                // SAFETY: the caller's buffer has `len` bytes.
                unsafe { *buf.add(i) = *b };
            }
        }
        if !peek {
            w.stream.drain(..n);
        }
        Ok(n)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(self.0.wire.lock().unwrap().stream.len())
    }
    fn tcp_sent(&self) -> Option<u64> {
        Some(self.0.wire.lock().unwrap().sent)
    }
    fn ring(&self) {
        self.0.wire.lock().unwrap().rung[1 - self.1] = true;
    }
}

fn iov(b: &mut [u8]) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: b.as_mut_ptr().cast(),
        iov_len: b.len(),
    }]
}

impl World {
    /// A world with both ends attached and the receiver ready.
    fn new() -> Arc<World> {
        let w = Arc::new(World {
            control: Default::default(),
            rings: Default::default(),
            area: [Area::new(), Area::new()],
            tx: TxState::default(),
            rx: RxState::default(),
            wire: Mutex::default(),
        });
        for (area, control) in w.area.iter().zip(&w.control) {
            // SAFETY: the world outlives every use of the area; `Control` is all atomics.
            unsafe { area.set_control(std::ptr::from_ref(control).cast_mut()) };
        }
        for (i, ring) in w.rings.iter().enumerate() {
            let p = std::ptr::from_ref(ring).cast_mut().cast();
            // SAFETY: under loom a ring is an array of its atomics, of this many "bytes".
            unsafe { w.area[0].set_chunk(i + 1, p, RING) };
        }
        (w.control.iter()).for_each(|c| c.header.version.store(u32::from(crate::VERSION), Relaxed));
        w.tx.attach(&w.sender(), Epoch::NONE, loc(0));
        w.tx.set_tag(TAG);
        w.rx.attach(&w.receiver(), Epoch::NONE, TAG);
        assert!(w.rx.declare_ready(&w.receiver(), &End(&w, 1)));
        w
    }

    /// The same, switched up.
    fn up() -> Arc<World> {
        let w = World::new();
        assert_eq!(w.tx.try_up(&w.sender(), &End(&w, 0)), Ok(true));
        w
    }

    fn sender(&self) -> Memory<'_> {
        Memory::new(&self.area[0], &self.area[1], 0).unwrap()
    }

    fn receiver(&self) -> Memory<'_> {
        Memory::new(&self.area[1], &self.area[0], 0).unwrap()
    }

    /// Sends bytes `from..to` on the ring or TCP; returns how many were sent.
    fn send(&self, from: u8, to: u8) -> u8 {
        let (m, port) = (self.sender(), End(self, 0));
        let mut b: Vec<u8> = (from..to).collect();
        let v = iov(&mut b);
        match self.tx.send(&m, &port, &mut Iov::new(&v)) {
            Sent::Bytes(n) => n as u8,
            Sent::Full => 0,
            Sent::Tcp => {
                assert!(self.tx.enter_native());
                let n = port.tcp_send(b.as_ptr(), b.len()).unwrap();
                self.tx.leave_native(n as u64);
                n as u8
            }
            other => panic!("{other:?}"),
        }
    }

    /// One receive, from the ring or TCP.
    fn recv(&self, into: &mut Vec<u8>) {
        let (m, port) = (self.receiver(), End(self, 1));
        let mut b = [0xee; 8];
        let v = iov(&mut b);
        let how = How {
            look: true,
            ..How::default()
        };
        match self.rx.recv(&m, &port, &mut Iov::new(&v), how) {
            Received::Bytes(n) => into.extend(&b[..n]),
            Received::Empty => {}
            Received::Tcp => {
                if let Ok(n) = port.tcp_recv(b.as_mut_ptr(), b.len(), false) {
                    into.extend(&b[..n]);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// Lets both ends run alone until all bytes have arrived.
    fn settle(&self, mut got: Vec<u8>, sent: u8) {
        for _ in 0..6 {
            self.tx.look(&self.sender(), &End(self, 0)).unwrap();
            self.recv(&mut got);
        }
        let want: Vec<u8> = (0..sent).collect();
        assert_eq!(got, want);
    }
}

/// Every interleaving in which a thread loses its processor at most three times where it could go on. (All of them take
/// minutes.)
fn few(f: impl Fn() + Sync + Send + 'static) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(3);
    b.check(f);
}

fn loc(ring: u32) -> Loc {
    Loc {
        chunk: ring + 1,
        page: 0,
        log2: RING.ilog2(),
    }
}

/// Head after data, cursor after the copy: no byte is read too early or overwritten too early.
#[test]
fn head_and_cursor() {
    loom::model(|| {
        let w = World::up();
        assert_eq!(w.send(0, 3), 3);
        let mut got = Vec::new();
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            let n = s.send(3, 6);
            3 + n + s.send(3 + n, 6)
        });
        w.recv(&mut got);
        w.recv(&mut got);
        let sent = t.join().unwrap();
        w.settle(got, sent);
    });
}

/// A sender that sleeps on a full ring is woken, or saw the space itself.
#[test]
fn a_wish_for_space() {
    loom::model(|| {
        let w = World::up();
        assert_eq!(w.send(0, 4), 4);
        assert_eq!(w.send(4, 5), 0);
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            crate::notify::fall_asleep(&s.control[0].sleepers.0);
            !s.tx.want_space(&s.sender(), &End(&s, 0))
        });
        let mut got = Vec::new();
        w.recv(&mut got);
        let asleep = t.join().unwrap();
        assert!(
            !asleep || w.wire.lock().unwrap().rung[0],
            "asleep and nobody rang"
        );
        assert_eq!(got.len(), 4);
    });
}

/// A switch up against the withdrawal of the readiness.
#[test]
fn up_and_revocation() {
    loom::model(|| {
        let w = World::new();
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            let up = s.tx.try_up(&s.sender(), &End(&s, 0)).unwrap();
            (up, s.send(0, 1))
        });
        let r = w.rx.revoke(&w.receiver(), &End(&w, 1)).unwrap();
        assert_ne!(r, Revoked::Impossible);
        // Ready again at once, if the sender cannot be in the epoch that was revoked.
        let again = r == Revoked::Clear && w.rx.declare_ready(&w.receiver(), &End(&w, 1));
        let (_, sent) = t.join().unwrap();
        let mut got = Vec::new();
        for _ in 0..3 {
            w.tx.look(&w.sender(), &End(&w, 0)).unwrap();
            if again || w.rx.revoke(&w.receiver(), &End(&w, 1)).unwrap() == Revoked::Clear {
                break;
            }
        }
        assert!(again || !w.rx.engaged(), "the hand-over hangs");
        w.recv(&mut got);
        w.settle(got, sent);
    });
}

/// A send against a revocation: what the receiver leaves on the ring comes on TCP, once.
#[test]
fn send_and_revocation() {
    loom::model(|| {
        let w = World::up();
        let mut got = Vec::new();
        w.recv(&mut got);
        let s = w.clone();
        let t = loom::thread::spawn(move || s.send(0, 2));
        w.recv(&mut got);
        let clear = w.rx.revoke(&w.receiver(), &End(&w, 1)).unwrap() == Revoked::Clear;
        let sent = t.join().unwrap();
        if clear {
            // The socket may have left, and the sender may die now: no byte may be only on the ring.
            let on_tcp = w.wire.lock().unwrap().stream.len();
            assert_eq!(got.len() + on_tcp, usize::from(sent));
        }
        w.settle(got, sent);
    });
}

/// The way down against a revocation: by a frame, or by plain bytes, and both ends agree which.
fn down_and_revocation(unread: bool) {
    loom::model(move || {
        let w = World::up();
        assert_eq!(w.send(0, 2), 2);
        let mut got = Vec::new();
        if !unread {
            w.recv(&mut got);
        }
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            s.tx.down(&s.sender(), &End(&s, 0)).unwrap();
        });
        let r = w.rx.revoke(&w.receiver(), &End(&w, 1)).unwrap();
        assert_ne!(r, Revoked::Impossible);
        t.join().unwrap();
        w.recv(&mut got);
        w.settle(got, 2);
    });
}

#[test]
fn down_and_revocation_with_bytes_unread() {
    down_and_revocation(true);
}

#[test]
fn down_and_revocation_with_nothing_unread() {
    down_and_revocation(false);
}

/// A revocation is withdrawn while the sender answers it, or goes down by its own decision: no byte comes twice.
fn withdrawn(answer: impl Fn(&World) + Copy + Sync + Send + 'static) {
    loom::model(move || {
        let w = World::up();
        assert_eq!(w.send(0, 1), 1);
        let mut got = Vec::new();
        let r = w.rx.revoke(&w.receiver(), &End(&w, 1));
        assert_ne!(r, Ok(Revoked::Impossible));
        let s = w.clone();
        let t = loom::thread::spawn(move || answer(&s));
        let on = w.rx.go_on(&w.receiver());
        w.recv(&mut got);
        t.join().unwrap();
        if !on || !w.tx.is_up() {
            return w.settle(got, 1);
        }
        // Both are on the ring again. A second revocation that nobody answers is withdrawn as well: what the sender has
        // recorded of the first one is over.
        assert_eq!(w.send(1, 2), 1);
        let r = w.rx.revoke(&w.receiver(), &End(&w, 1));
        assert_eq!(r, Ok(Revoked::Pending));
        assert!(w.rx.go_on(&w.receiver()));
        w.settle(got, 2);
    });
}

#[test]
fn a_revocation_withdrawn_and_an_answer() {
    withdrawn(|s| _ = s.tx.look(&s.sender(), &End(s, 0)).unwrap());
}

#[test]
fn a_revocation_withdrawn_and_a_way_down() {
    withdrawn(|s| _ = s.tx.down(&s.sender(), &End(s, 0)).unwrap());
}

/// The ring moves while it is read.
#[test]
fn moves() {
    loom::model(|| {
        let w = World::up();
        assert_eq!(w.send(0, 2), 2);
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            assert!(s.tx.can_move(&s.sender()));
            s.tx.move_to(&s.sender(), loc(1));
            s.send(2, 4)
        });
        let mut got = Vec::new();
        w.recv(&mut got);
        w.recv(&mut got);
        let n = t.join().unwrap();
        w.settle(got, 2 + n);
    });
}

/// Native calls and the switch exclude each other.
#[test]
fn the_gate() {
    loom::model(|| {
        let w = World::new();
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            if s.tx.enter_native() {
                let n = End(&s, 0).tcp_send(&0, 1).unwrap();
                s.tx.leave_native(n as u64);
            }
        });
        let up = w.tx.try_up(&w.sender(), &End(&w, 0)).unwrap();
        let at = w.control[0].tx[0].up_tcp_pos.load(Relaxed).get();
        t.join().unwrap();
        let sent = w.wire.lock().unwrap().sent;
        assert!(!up || at == sent, "a native byte after the switch");
    });
}

/// A call whose thread never came back, another call, and the recount: the switch never sees a wrong count.
#[test]
fn a_call_that_nobody_counted() {
    loom::model(|| {
        let w = World::new();
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            if s.tx.enter_native() {
                let n = End(&s, 0).tcp_send(&0, 1).unwrap();
                s.tx.leave_native(n as u64);
            }
        });
        assert!(w.tx.enter_native());
        End(&w, 0).tcp_send(&0, 1).unwrap();
        w.tx.leave_uncounted();
        let sent = || Some(TcpPos::new(w.wire.lock().unwrap().sent));
        w.tx.recount(sent);
        let up = w.tx.try_up(&w.sender(), &End(&w, 0)).unwrap(); // (bypassed?)
        t.join().unwrap();
        w.tx.recount(sent);
        assert!(!w.tx.uncounted());
        let counted = w.tx.tcp_pos.load(Relaxed);
        assert_eq!(Some(counted), sent());
        assert!(!up || w.control[0].tx[0].up_tcp_pos.load(Relaxed) == counted);
    });
}

/// The sender, with two bytes unread, goes down beside the receiver's last call (unless that says that it was not): the
/// receiver knows that a frame is on its way, or none comes any more.
fn beside_a_way_down(last: impl Fn(&World) -> bool + Send + Sync + 'static) {
    few(move || {
        let w = World::up();
        assert_eq!(w.send(0, 2), 2);
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            s.tx.down(&s.sender(), &End(&s, 0)).unwrap();
        });
        let last = last(&w);
        let awaits = w.rx.awaits_frame(&w.receiver());
        let then = w.wire.lock().unwrap().sent;
        t.join().unwrap();
        assert!(awaits || !last || w.wire.lock().unwrap().sent == then);
    });
}

#[test]
fn down_beside_a_last_call() {
    beside_a_way_down(|w| {
        w.rx.close(&w.receiver(), &End(w, 1), TcpPos::default());
        true
    });
    // It shuts both directions, and announces that by marks alone.
    beside_a_way_down(|w| {
        w.rx.announce_end(&w.receiver(), &End(w, 1), TcpPos::default());
        w.rx.announce_deaf(&w.receiver());
        true
    });
    // It takes the last bytes and then exits, and announces nothing.
    beside_a_way_down(|w| {
        let mut got = Vec::new();
        w.recv(&mut got);
        got.len() == 2
    });
}

/// A daemon takes the sender's direction over and brings it to TCP. False: it may not, and has not touched it.
fn brings(w: &World, m: Memory, locked: impl FnOnce() -> bool) -> bool {
    let (m, port) = (m.for_takeover(), End(w, 0));
    let state = m.own_tx().state.load(Acquire);
    if !matches!(state.phase(), tx::UP | tx::DOWNING) || !claim(&m, state, locked) {
        return false;
    }
    let t = TxState::default();
    let Adopted::Ring = t.adopt(&m, &port, TAG).unwrap() else {
        release(&m, state.epoch());
        return false;
    };
    t.down(&m, &port).unwrap();
    assert_eq!(t.mode.load(Relaxed), super::tx::mode::TCP);
    if !m.is_remote() {
        t.give_back(&m, state.epoch());
    }
    true
}

/// A revocation is withdrawn while the daemon, which the receiver has asked, takes the direction over. From its claim on the
/// direction is nobody else's: a receiver that sees the claim revokes again, so a daemon that has found the word withdrawn in
/// that instant must not step back. Plain bytes come only to a receiver that knows.
#[test]
fn a_revocation_withdrawn_and_a_takeover() {
    loom::model(|| {
        let w = World::up();
        assert_eq!(w.send(0, 1), 1);
        let revoked = w.rx.revoke(&w.receiver(), &End(&w, 1));
        assert_eq!(revoked, Ok(Revoked::Pending));
        let d = w.clone();
        let t = loom::thread::spawn(move || brings(&d, d.sender(), || false));
        let on = w.rx.go_on(&w.receiver());
        let word = w.receiver().peer_daemon().takeover.load(Acquire);
        let brought = t.join().unwrap();
        let framed = w.wire.lock().unwrap().stream.len() > 1;
        assert!(
            !on || !brought || framed,
            "the bytes of a ring that is read"
        );
        assert!(!brought || word.phase() != takeover::NONE, "nobody's");
        let mut got = Vec::new();
        w.recv(&mut got);
        w.settle(got, 1);
    });
}

/// Across nodes: an end goes down by its own decision while the daemon on its node takes the direction over. One of
/// the two steps back, and the frame and bytes of the other are on TCP once.
///
/// (The Acquire fence in `claim` must stay although this test passes without it: the kernel's count tells the daemon
/// what it then misses of the end's last actions, but nothing else does.)
#[test]
fn takeover() {
    loom::model(|| {
        let w = World::new();
        let word = &w.control[1].rx[0].word;
        let (m, port) = (w.sender().across(true), End(&w, 0));
        assert_eq!(w.tx.try_up(&m, &port), Ok(false));
        // The daemon's part in the switch: it is granted.
        word.store(
            RxWord::new(Epoch::new(1), rx::READY | rx::ACCEPTED),
            Release,
        );
        w.tx.look(&m, &port).unwrap();
        let mut b = [0, 1];
        let v = iov(&mut b);
        let s = w.tx.send(&m, &port, &mut Iov::new(&v));
        assert_eq!(s, Sent::Bytes(2));
        let lock = Arc::new(AtomicU32::new(0));

        let (d, theirs) = (w.clone(), lock.clone());
        let t = loom::thread::spawn(move || {
            // Relaxed: a daemon reads the lock in a file.
            brings(&d, d.sender().across(true), || theirs.load(Relaxed) != 0)
        });
        let mut ours = 0;
        // The end's lock, as in the shim: Acquire to take it, Release to let go.
        if lock.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            w.tx.down(&m, &port).unwrap();
            ours = u32::from(w.tx.mode.load(Relaxed) == super::tx::mode::TCP);
            lock.store(0, Release);
        }
        let taken = t.join().unwrap();
        // Whichever of them it was: when the end has looked, it is on TCP and knows the position.
        w.tx.down(&m, &port).unwrap();
        assert_eq!(w.tx.mode.load(Relaxed), super::tx::mode::TCP);
        let wire = w.wire.lock().unwrap();
        assert_eq!(
            wire.sent,
            crate::proto::frame::LEN as u64 + 2,
            "{ours} {taken}"
        );
        assert_eq!(w.tx.tcp_pos.load(Relaxed).get(), wire.sent);
    });
}

/// On one node: an end sends while the daemon, which its receiver has asked, takes the direction over. The receiver
/// gets every byte once, as plain bytes of TCP.
#[test]
fn takeover_on_one_node() {
    loom::model(|| {
        let w = World::up();
        assert_eq!(w.send(0, 1), 1);
        let revoked = w.rx.revoke(&w.receiver(), &End(&w, 1));
        assert_eq!(revoked, Ok(Revoked::Pending));
        let lock = Arc::new(AtomicU32::new(0));
        let (d, theirs) = (w.clone(), lock.clone());
        let t = loom::thread::spawn(move || {
            brings(&d, d.sender(), || theirs.load(Relaxed) != 0); // (as above)
        });
        let mut sent = 1;
        // The end's lock, as in the shim: Acquire to take it, Release to let go.
        if lock.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            let mut b = [1];
            let v = iov(&mut b);
            match w.tx.send(&w.sender(), &End(&w, 0), &mut Iov::new(&v)) {
                Sent::Bytes(n) => sent += n as u8,
                Sent::Blocked => {}
                Sent::Tcp => sent += w.send(sent, sent + 1),
                other => panic!("{other:?}"),
            }
            lock.store(0, Release);
        }
        t.join().unwrap();
        w.tx.look(&w.sender(), &End(&w, 0)).unwrap();
        assert_eq!(w.tx.mode.load(Relaxed), super::tx::mode::TCP);
        let wire = w.wire.lock().unwrap();
        assert_eq!(w.tx.tcp_pos.load(Relaxed).get(), wire.sent);
        assert_eq!(wire.stream, (0..sent).collect::<Vec<u8>>());
    });
}
