//! An application's end of a lane: the real halves of the lane code over shared memory.

use lane::abi::{Epoch, Loc};
use lane::half::rx::How;
use lane::half::{rx, tx, Area, Iov, Memory, Port, Received, RxState, Sent, TxState};
use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering::*};
use underpass_rdma::sim::Rng;

/// One half of a lane: memory of the test's, or of a family table.
pub struct Half<T> {
    at: NonNull<T>,
    keep: Rc<dyn Any>,
}

impl<T: Default + 'static> Default for Half<T> {
    fn default() -> Self {
        let own = Rc::new(T::default());
        Half {
            at: NonNull::from(&*own),
            keep: own,
        }
    }
}

impl<T> Half<T> {
    /// # Safety
    /// `at` is valid for as long as `keep` lives.
    #[allow(dead_code)] // the world of two daemons has tables
    pub unsafe fn within(at: &T, keep: Rc<dyn Any>) -> Self {
        Half {
            at: NonNull::from(at),
            keep,
        }
    }
}

impl<T> Clone for Half<T> {
    fn clone(&self) -> Self {
        Half {
            at: self.at,
            keep: self.keep.clone(),
        }
    }
}

impl<T> Deref for Half<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: valid as long as `keep`, which we have.
        unsafe { self.at.as_ref() }
    }
}

pub struct App {
    pub slot: u32,
    pub tx: Half<TxState>,
    pub rx: Half<RxState>,
    /// Rings not in use, in the client's chunk.
    places: Vec<Loc>,
    pub salt: u64,
    pub sent: u64,
    pub total: u64,
    pub peer_salt: u64,
    pub received: u64,
    pub expected: u64,
    pub shut: bool,
    pub may_shut: bool,
    /// Whether it goes up.
    pub may_up: bool,
    /// Whether it says that it can read a ring.
    pub may_ready: bool,
    /// What holds a direction's lock during a call of the lane's, which keeps it if its holder is killed in it. 0: nobody
    /// looks at the locks.
    pub tid: u32,
    pub moves: u64,
    /// Chance, one in so many, of each whim.
    pub whims: u64,
    /// Somebody lies about this lane: errors end it instead of the test.
    pub lied: bool,
    pub broken: bool,
    /// The stream may end.
    pub may_end: bool,
    pub ended: bool,
    /// What TCP has said of its end otherwise.
    pub error: Option<i32>,
}

/// What an end works with.
pub struct World<'a, P> {
    pub app: &'a Area,
    pub proxy: &'a Area,
    pub port: &'a P,
}

/// A direction's lock, held. A holder that unwinds was killed, and leaves it so.
pub struct Held<T>(Half<T>, fn(&T) -> &AtomicU32);

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            (self.1)(&self.0).store(0, Release); // pairs with nothing: all of this runs on one thread
        }
    }
}

pub fn byte(salt: u64, at: u64) -> u8 {
    ((at / 3)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(salt)
        >> 29) as u8
        ^ at as u8
}

/// So many bytes of a stream from there on. (Making and comparing single bytes took a fifth of a seed's time.)
fn stretch(salt: u64, at: u64, n: usize) -> Vec<u8> {
    (at..at + n as u64).map(|at| byte(salt, at)).collect()
}

pub fn iov(b: &mut [u8]) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: b.as_mut_ptr().cast(),
        iov_len: b.len(),
    }]
}

impl App {
    pub fn new(slot: u32, places: Vec<Loc>, salts: (u64, u64), totals: (u64, u64)) -> App {
        App {
            slot,
            tx: Half::default(),
            rx: Half::default(),
            places,
            salt: salts.0,
            sent: 0,
            total: totals.0,
            peer_salt: salts.1,
            received: 0,
            expected: totals.1,
            shut: false,
            may_shut: true,
            may_up: true,
            may_ready: true,
            tid: 0,
            moves: 0,
            whims: 40,
            lied: false,
            broken: false,
            may_end: false,
            ended: false,
            error: None,
        }
    }

    pub fn attach<P>(&mut self, w: &World<'_, P>, base: Epoch, tag: u64, rng: &mut Rng) {
        let m = memory(w, self.slot);
        let loc = self
            .places
            .swap_remove(rng.below(self.places.len() as u64) as usize);
        self.tx.attach(&m, base, loc);
        self.tx.set_tag(tag);
        self.rx.attach(&m, base, tag);
    }

    /// Places for its rings, from the next [`App::attach`] on.
    pub fn set_places(&mut self, places: Vec<Loc>) {
        self.places = places;
    }

    #[allow(dead_code)] // the world of two daemons asks for more
    pub fn done(&self) -> bool {
        self.broken || self.sent == self.total && self.received == self.expected
    }

    pub fn lock_tx(&self) -> Held<TxState> {
        self.tx.lock.store(self.tid, Relaxed);
        Held(self.tx.clone(), |t| &t.lock)
    }

    pub fn lock_rx(&self) -> Held<RxState> {
        self.rx.lock.store(self.tid, Relaxed);
        Held(self.rx.clone(), |r| &r.lock)
    }

    /// What may not happen on a lane that nobody lies about.
    pub fn check(&mut self, ok: bool, what: impl FnOnce() -> String) -> bool {
        if !ok {
            assert!(self.lied, "{}", what());
            self.broken = true;
        }
        ok
    }

    /// Something random, as a program might do; says whether anything moved.
    /// With `all`, everything that can be done now is: for the look before going to sleep.
    pub fn step<P: Port>(&mut self, w: &World<'_, P>, rng: &mut Rng, all: bool) -> bool {
        let m = memory(w, self.slot);
        let port = w.port;
        if self.broken {
            return false;
        }
        let mut moved = self.receive(&m, port, rng);
        moved |= !self.broken && self.send(&m, port, rng, all);
        let held = self.lock_tx();
        let ok = self.tx.look(&m, port).is_ok();
        drop(held);
        if !self.check(ok, || "the sender was told nonsense".into()) {
            return true;
        }
        if !all && rng.one_in(self.whims) {
            self.whim(&m, port, rng);
        }
        if self.may_ready && (all || rng.one_in(3)) {
            let _held = self.lock_rx();
            moved |= self.rx.declare_ready(&m, port);
        }
        moved
    }

    /// Its link group is gone. Returns whether the receiver has to find out what became of a switch.
    #[allow(dead_code)] // in the world of two daemons, the process does it
    pub fn leave_group<P: Port>(&mut self, w: &World<'_, P>) -> bool {
        let m = memory(w, self.slot);
        (self.may_up, self.may_ready) = (false, false);
        let held = self.lock_tx();
        let done = self.tx.leave_group(&m, w.port, false);
        assert!(done.is_ok(), "the sender's way down: {done:?}");
        drop(held);
        let _held = self.lock_rx();
        let was = self.rx.mode.load(Relaxed);
        let done = self.rx.orphan(&m);
        assert!(done.is_ok(), "the receiver's way down: {done:?}");
        was != rx::mode::UNDECIDED && self.rx.mode.load(Relaxed) == rx::mode::UNDECIDED
    }

    /// The same while there is no lane.
    pub fn step_native<P: Port>(&mut self, port: &P, rng: &mut Rng) -> bool {
        let mut b = vec![0; 1 + rng.below(6000) as usize];
        let got = self.receive_native(port, &mut b);
        self.take(&b[..got]);
        if self.shut {
            return got > 0;
        }
        let mut b = self.next(rng);
        let sent = self.send_native(port, &mut b);
        self.sent += sent;
        got > 0 || sent > 0
    }

    /// Bytes to send.
    pub fn next(&self, rng: &mut Rng) -> Vec<u8> {
        let most = [200, 5000][rng.below(2) as usize];
        let n = (1 + rng.below(most)).min(self.total - self.sent);
        stretch(self.salt, self.sent, n as usize)
    }

    pub fn send_native<P: Port>(&mut self, port: &P, b: &mut [u8]) -> u64 {
        if b.is_empty() || !self.tx.enter_native() {
            return 0;
        }
        let sent = port.tcp_send(b.as_ptr(), b.len());
        if let Err(e) = sent {
            if e != libc::EAGAIN {
                self.error = Some(e);
            }
        }
        let k = sent.unwrap_or(0) as u64;
        self.tx.leave_native(k);
        k
    }

    pub fn receive_native<P: Port>(&mut self, port: &P, b: &mut [u8]) -> usize {
        if !self.rx.enter_native() {
            return 0;
        }
        let got = port.tcp_recv(b.as_mut_ptr(), b.len(), false);
        self.rx.leave_native(got.unwrap_or(0) as u64);
        match got {
            // (As the shim: an error that was kept is told where the end would be, or nothing.)
            Ok(0) | Err(libc::EAGAIN) if self.rx.error.is_set() => {
                self.error = Some(self.rx.error.take());
            }
            Ok(0) if ![0, libc::EPIPE].contains(&self.tx.error.get()) => {
                self.error = Some(self.tx.error.take());
            }
            Ok(0) => self.end(),
            Err(e) if e != libc::EAGAIN => self.error = Some(e),
            _ => {}
        }
        got.unwrap_or(0)
    }

    fn send<P: Port>(&mut self, m: &Memory, port: &P, rng: &mut Rng, all: bool) -> bool {
        let before = self.tx.mode.load(Relaxed);
        let up = before == tx::mode::TCP && self.may_up && !self.shut;
        if up && self.tx.can_up(m) && (all || rng.one_in(2)) {
            let held = self.lock_tx();
            let up = self.tx.try_up(m, port);
            drop(held);
            assert!(up.is_ok(), "{up:?}: a byte was counted wrongly");
            if self.tx.mode.load(Relaxed) != tx::mode::TCP {
                return true;
            }
        }
        if self.shut {
            return false;
        }
        let mut b = self.next(rng);
        let v = iov(&mut b);
        let held = self.lock_tx();
        let done = self.tx.send(m, port, &mut Iov::new(&v));
        if done == Sent::Tcp {
            drop(held); // what the kernel does needs no lock
        }
        let sent = match done {
            Sent::Bytes(k) => k as u64,
            Sent::Full => {
                let more = self.tx.want_space(m, port);
                if self.tx.can_move(m) && !self.places.is_empty() && rng.one_in(3) {
                    let i = rng.below(self.places.len() as u64) as usize;
                    let loc = self.places.swap_remove(i);
                    self.places.extend(self.tx.move_to(m, loc));
                    self.moves += 1;
                    return true;
                } else if !all && rng.one_in(60) {
                    let ok = self.tx.down(m, port).is_ok();
                    self.check(ok, || "no way down".into());
                    return true;
                }
                if more {
                    return true;
                }
                0
            }
            Sent::Tcp => self.send_native(port, &mut b),
            Sent::Blocked => 0,
            Sent::Fault => unreachable!("memory of the test's"),
            Sent::Reset(r) => {
                self.check(false, || format!("the sender resets: {r:?}"));
                0
            }
        };
        self.sent += sent;
        if self.sent == self.total && self.tx.is_up() && self.may_shut && rng.one_in(4) {
            // As `shutdown(SHUT_WR)`: what is on the ring stays there for the receiver.
            self.tx.shut(m, port, None);
            self.shut = true;
        }
        sent > 0
    }

    fn receive<P: Port>(&mut self, m: &Memory, port: &P, rng: &mut Rng) -> bool {
        let mut b = vec![0xee; 1 + rng.below(6000) as usize];
        let v = iov(&mut b);
        let how = How {
            look: true,
            ..How::default()
        };
        let held = self.lock_rx();
        let got = self.rx.recv(m, port, &mut Iov::new(&v), how);
        drop(held);
        let n = match got {
            Received::Bytes(n) => n,
            Received::Empty => 0,
            Received::Tcp => self.receive_native(port, &mut b),
            Received::Eof if self.may_end => {
                self.end();
                0
            }
            Received::Error(e) if self.may_end => {
                self.error = Some(e);
                0
            }
            other => {
                let at = self.received;
                self.check(false, || format!("the receiver got {other:?} at {at}"));
                return true;
            }
        };
        self.take(&b[..n]);
        n > 0
    }

    /// TCP has ended. (Behind an error it says so, too.)
    pub fn end(&mut self) {
        self.ended |= self.error.is_none();
    }

    /// Bytes that have come.
    pub fn take(&mut self, all: &[u8]) {
        let from = self.received;
        let right = stretch(self.peer_salt, from, all.len());
        let wrong = || all.iter().zip(&right).position(|(a, b)| a != b);
        if !self.check(all == right, || format!("byte {:?} after {from}", wrong())) {
            return;
        }
        self.received += all.len() as u64;
        let more = self.received > self.expected;
        self.check(!more, || "more bytes than were sent".into());
    }

    fn whim<P: Port>(&mut self, m: &Memory, port: &P, rng: &mut Rng) {
        match rng.below(4) {
            0 => {
                let _held = self.lock_rx();
                self.rx.want_down(m, port);
            }
            1 => {
                let _held = self.lock_rx();
                self.rx.unwant_down(m, port);
            }
            2 if !self.shut => {
                let _held = self.lock_tx();
                let ok = self.tx.down(m, port).is_ok();
                self.check(ok, || "no way down".into());
            }
            _ => self.take_back(m, port),
        }
    }

    /// Readiness that was not used is taken back.
    fn take_back<P: Port>(&mut self, m: &Memory, port: &P) {
        if self.rx.mode.load(Relaxed) == rx::mode::READY {
            let _held = self.lock_rx();
            let ok = self.rx.revoke(m, port).is_ok();
            self.check(ok, || "no way back".into());
        }
    }
}

pub fn memory<'a, P>(w: &World<'a, P>, slot: u32) -> Memory<'a> {
    let m = Memory::new(w.app, w.proxy, slot).expect("mapped");
    m.across(true)
}
