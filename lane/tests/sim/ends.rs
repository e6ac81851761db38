//! How an end's use of a lane, or of the connection, ends: the steps are those of `lane::half::leave` and of the halves
//! (`come_to_fin`, `leave_fin`), as in life; what is around them is as in the shim's `promotion::leave`,
//! `promotion::retire`, `process::shutdown` and `process::close`, without the waits.

use super::{Act, Host, Wire, World, RX, TX};
use lane::abi::{Epoch, EPOCHS};
use lane::half::leave::{Attempt, Step};
use lane::half::rx::Revoked;
use lane::half::tx::{mode, BeforeFin};
use lane::half::{Progress, RxState, TxState};
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// Milliseconds between two attempts to leave.
const REST_MS: u64 = 25;

impl Host {
    /// Has its process no socket any more?
    pub fn is_gone(&self) -> bool {
        self.dead.get() || self.closed.get()
    }
}

impl World {
    /// An end leaves its lane, or goes on with that: each attempt after the first one some time later. No lock is held.
    pub(super) fn leave(&self, e: usize) {
        self.attempt(e, false);
    }

    /// `option`: for a call that only sets one.
    fn attempt(&self, e: usize, option: bool) {
        let (h, peer) = (&self.host[e], &self.host[1 - e]);
        if !h.attached.get() || h.wants.get().is_some() {
            return;
        }
        let (m, port) = (self.memory(e), Wire { w: self, e });
        if !self.lock(e, TX) {
            return;
        }
        if h.leaving.replace(true) {
            self.now_ms.set(self.now_ms.get() + REST_MS);
        } else {
            h.leaves_ms.set(self.now_ms.get());
            if peer.leaving.get() {
                self.note("both ends leave at once");
            }
        }
        if self.is_orphaned(e) && h.tx.awaits(&m) {
            self.locked(e, &Act::Reclaim); // (the shim's `reclaim`, which its calls make first)
        }
        let tx_done = match h.tx.come_down(&m, &port) {
            Ok(step) => step != Progress::Blocked,
            Err(r) => return self.poisoned(e, r),
        };
        let attempt = Attempt {
            tx_done,
            over: peer.dead.get() || self.net.borrow().reset,
            option,
            waited: self.now_ms.get() - h.leaves_ms.get(),
        };
        self.unlock(e, TX);
        if !self.lock(e, RX) {
            return;
        }
        let step = attempt.step(&h.rx, &m, &port);
        self.unlock(e, RX);
        match step {
            Step::Left => self.left(e),
            Step::Again => {}
            Step::GoesOn => {
                self.note("a receiver goes on without its sender");
                h.leaving.set(false);
                h.revoking.set(false);
            }
            Step::Stuck(Reason::Stalled) => {
                self.note("a leave that stalls");
                let ended = peer.is_gone() || peer.wr_shut.get() || peer.failed.get();
                assert!(
                    attempt.over || ended,
                    "end {e} cannot leave, and the other one is there"
                );
                self.reset(e);
            }
            Step::Stuck(r) => self.poisoned(e, r),
        }
    }

    fn left(&self, e: usize) {
        let h = &self.host[e];
        if !self.is_idle(e) {
            return; // (another thread is inside; again at the next look)
        }
        assert!(h.tx.mode.load(Relaxed) == mode::TCP && !h.rx.engaged());
        if self.taken[1 - e].is_under_way() {
            self.note("a receiver is gone during a takeover");
        }
        self.note("left");
        h.leaving.set(false);
        h.revoking.set(false);
        h.attached.set(false);
        h.left.set(true);
    }

    /// For a call that only sets an option: the lane stays, because the sender is gone and the ring is all there is.
    pub(super) fn withdraw(&self, e: usize) {
        let h = &self.host[e];
        let leaves = (h.leaving.get() || h.revoking.get()) && !h.execs.get();
        if leaves && self.host[1 - e].is_gone() {
            self.attempt(e, true);
        }
    }

    /// The other end has given the lane back: so does this one, when it is on TCP.
    pub(super) fn retire(&self, e: usize) {
        let h = &self.host[e];
        if !self.host[1 - e].left.get() || !h.attached.get() || !self.live(e) || !self.is_idle(e) {
            return;
        }
        if h.leaving.get() || h.wants.get().is_some() {
            return;
        }
        let (m, port) = (self.memory(e), Wire { w: self, e });
        self.lock(e, TX);
        self.lock(e, RX);
        let down = h.tx.look(&m, &port);
        let on_tcp = h.tx.mode.load(Relaxed) == mode::TCP;
        let clear = on_tcp && h.rx.revoke(&m, &port) == Ok(Revoked::Clear);
        self.shut_late(e);
        self.unlock(e, TX);
        self.unlock(e, RX);
        assert!(down.is_ok(), "end {e}: {down:?}");
        if clear {
            self.note("the other end gives its lane back, too");
            h.revoking.set(false);
            h.attached.set(false);
        }
    }

    /// Programs that have left their lanes go on as others: what the process knew is gone, and bytes are counted anew.
    pub(super) fn execute(&mut self) {
        for e in 0..2 {
            let h = &mut self.host[e];
            if !h.execs.get() || h.attached.get() || h.busy.iter().any(|b| b.get()) {
                continue;
            }
            h.execs.set(false);
            let epochs = [&h.tx.epoch, &h.rx.epoch].map(|e| e.load(Relaxed).get());
            h.used.set(epochs.into_iter().fold(h.used.get(), u32::max));
            (h.tx, h.rx) = (TxState::default(), RxState::default());
            h.tx.begin_uncounted();
            h.rx.begin_uncounted();
            self.note("executed");
            self.forget_modes(e);
        }
    }

    /// Before a lane: bytes that nobody here has counted.
    pub(super) fn recount(&self, e: usize) -> bool {
        let h = &self.host[e];
        if !h.tx.uncounted() && !h.rx.uncounted() {
            return true;
        }
        let port = Wire { w: self, e };
        h.tx.recount(|| port.counts().map(|k| k.tx_pos(e == 0)));
        h.rx.recount(|| port.counts().map(|k| k.rx_pos()));
        let counted = !h.tx.uncounted() && !h.rx.uncounted();
        if counted {
            self.note("counted anew after exec");
        }
        counted
    }

    /// The lane's next use, if the one before is over at both ends.
    pub(super) fn next_use(&self, e: usize) -> bool {
        let h = &self.host[e];
        if h.last_use.get() == self.lane_use.get() {
            let over = |e: usize| !self.host[e].attached.get() && !self.taken[e].is_under_way();
            if !over(0) || !over(1) {
                return false;
            }
            let used = |h: &Host| {
                let epochs = [&h.tx.epoch, &h.rx.epoch].map(|e| e.load(Relaxed).get());
                epochs.into_iter().fold(h.used.get(), u32::max)
            };
            let last = self
                .host
                .iter()
                .map(used)
                .fold(self.base.get().get(), u32::max);
            self.base.set(Epoch::base(last / EPOCHS + 1));
            self.host.iter().for_each(|h| h.left.set(false));
            self.lane_use.set(self.lane_use.get() + 1);
            self.note("a lane again");
        }
        h.last_use.set(self.lane_use.get());
        true
    }

    /// A shutdown that could not be made is made.
    pub(super) fn shut_late(&self, e: usize) {
        if !self.host[e].is_gone() {
            self.host[e].tx.end_late(&Wire { w: self, e });
        }
    }

    /// The application shuts its sending direction down, or closes; or goes on with that.
    pub(super) fn shut(&self, e: usize, close: bool) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let close = close || h.wants.get() == Some(true);
        if h.wr_shut.get() && !close || h.leaving.get() {
            return;
        }
        if !h.attached.get() {
            return self.end(e, close);
        }
        h.finishing.set(true); // until it is said below
        let step = h.tx.come_to_fin(&m, &port, || self.is_orphaned(e));
        let step = step.unwrap_or_else(|r| panic!("end {e}: {r:?} before its FIN"));
        match step {
            BeforeFin::OnTcp(_) => {}
            BeforeFin::ByDaemon => self.note("a FIN is left to the daemon"),
            BeforeFin::Claimed | BeforeFin::Room => {
                self.note(match step {
                    BeforeFin::Room => "a FIN waits for room on TCP",
                    _ => "a FIN waits for a claim",
                });
                h.wants.set(Some(close));
                return;
            }
        }
        h.wants.set(None);
        match close {
            true => self.close(e, step),
            false => self.shut_down(e, step),
        }
    }

    fn shut_down(&self, e: usize, step: BeforeFin) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        h.wr_shut.set(true);
        let BeforeFin::OnTcp(repeated) = step else {
            h.tx.leave_fin(&h.rx, &m, &port);
            return self.shut_late(e);
        };
        h.rx.announce_end(&m, &port, h.tx.sent_at_fin(false));
        self.net.borrow_mut().fin(e);
        h.tx.shut(&m, &port, repeated);
    }

    fn close(&self, e: usize, step: BeforeFin) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let sent = h.tx.sent_at_fin(step == BeforeFin::ByDaemon);
        h.rx.close(&m, &port, sent);
        // What is on its way may still come. (The shim waits for a frame.)
        for _ in 0..3 {
            if h.rx.awaits_frame(&m) {
                self.hook();
            }
            if h.rx.engaged() {
                let _ = h.rx.probe(&m, &port);
            }
        }
        let unread = h.rx.ring_unread(&m) > 0 || self.net.borrow().unread(e) > 0;
        if unread {
            h.rx.announce_reset(&m, &port);
        }
        match step {
            BeforeFin::OnTcp(repeated) => h.tx.shut(&m, &port, repeated),
            _ if unread => self.net.borrow_mut().rst(),
            _ => {}
        }
        if self.taken[1 - e].is_under_way() {
            self.note("a receiver closes during a takeover");
        }
        h.closed.set(true);
        self.close_socket(e);
        if unread {
            self.net.borrow_mut().rst();
        }
    }

    /// An end that may tell its application the end in TCP's place: has it everything?
    pub(super) fn check_all(&self) {
        for e in 0..2 {
            let (h, from) = (&self.host[e], &self.host[1 - e]);
            let ends = from.wr_shut.get() || from.closed.get();
            let sure = ends && !from.failed.get() && !self.net.borrow().reset;
            if !sure || !h.attached.get() || !self.live(e) || self.net.borrow().unread(e) > 0 {
                continue;
            }
            if h.rx.has_all(&self.memory(e)) {
                self.note("all is there before its end");
                assert_eq!(h.got.get(), from.sent.get(), "end {e} believes in an end");
            }
        }
    }

    /// Without a lane.
    fn end(&self, e: usize, close: bool) {
        let h = &self.host[e];
        h.wants.set(None);
        match close {
            true => {
                h.closed.set(true);
                self.close_socket(e);
            }
            false => {
                h.wr_shut.set(true);
                self.net.borrow_mut().fin(e);
            }
        }
    }

    /// This end gives the connection up.
    pub(super) fn reset(&self, e: usize) {
        self.host[e].failed.set(true);
        self.host[e].leaving.set(false);
        self.host[e].wants.set(None);
        self.net.borrow_mut().rst();
    }
}
