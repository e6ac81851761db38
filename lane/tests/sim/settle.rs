//! The end of every run: both ends act as event loops do, and everything has to arrive.

use super::{Act, Wire, World, LANE};
use lane::half::rx::How;
use lane::half::tx::bring::ORPHAN_MS;
use lane::half::Progress;

impl World {
    /// Lets both ends act as event loops do, each only when something wakes it, until nothing
    /// moves; each sends `todo` more bytes. Then everything must have arrived.
    pub fn settle(&mut self, mut todo: [usize; 2], promote: bool) {
        for p in &mut self.net.borrow_mut().pipe {
            (p.snd_cap, p.rcv_cap, p.piece) = (1 << 18, 1 << 18, usize::MAX);
        }
        let mut seen = [None; 2];
        let mut out = [false; 2];
        let mut still = 0;
        for round in 0.. {
            assert!(round < 100_000, "it never settles");
            let moved = {
                let mut n = self.net.borrow_mut();
                n.deliver(0, usize::MAX) | n.deliver(1, usize::MAX)
            };
            let mut ran = false;
            for e in 0..2 {
                self.calls.set(0);
                // Who leaves asks the daemon.
                let (own, peer) = (&self.host[e].leaving, &self.host[1 - e]);
                let asked = own.get() || peer.leaving.get() || peer.revoking.get();
                if asked || self.taken[e].is_under_way() {
                    ran |= self.take_over(e, own.get(), false) && self.live(1 - e);
                }
                if self.is_orphaned(e) && self.live(e) {
                    self.act(e, &Act::Reclaim);
                }
                let h = &self.host[e];
                if !self.live(e) {
                    continue;
                }
                if (h.revoking.get() || h.leaving.get()) && !self.live(1 - e) && !moved {
                    self.reset(e); // the deadline of the hand-over has passed
                    self.note("hand-over failed");
                    continue;
                }
                if let Some(close) = h.wants.get() {
                    self.act(e, if close { &Act::Close } else { &Act::ShutWr });
                    if h.wants.get().is_some() && !self.live(1 - e) && !moved && still > 2 {
                        self.reset(e); // the deadline of the shutdown has passed
                        self.note("a FIN came too late");
                    }
                    ran |= h.wants.get().is_none();
                    continue;
                }
                if h.leaving.get() || h.execs.get() {
                    self.leave(e);
                    ran |= !h.attached.get();
                }
                if promote && h.last_use.get() > 0 && !h.attached.get() {
                    self.act(e, &Act::Attach { log2: 12 });
                    ran |= h.attached.get();
                }
                let seq = lane::notify::counter(
                    &self.peer[e].control().unwrap().seq
                        [LANE as usize / lane::abi::LANES_PER_COUNTER]
                        .0,
                );
                let awake = seen[e] != Some(seq)
                    || (self.net.borrow().readable(e) && !h.eof.get())
                    || (out[e] && self.net.borrow().writable(e));
                if awake {
                    seen[e] = Some(seq);
                    ran = true;
                    out[e] = self.turn(e, &mut todo[e], promote);
                }
            }
            (0..2).for_each(|e| self.act(e, &Act::Retire));
            self.execute();
            self.see_moves();
            still = if moved { 0 } else { still + 1 };
            if !moved && !ran && still > 4 {
                // What nobody takes is an orphan's some day.
                let waits = |e: usize| self.taken[e].is_under_way() && self.host[e].is_gone();
                if still > 10 || !(waits(0) || waits(1)) {
                    break;
                }
                self.now_ms.set(self.now_ms.get() + ORPHAN_MS);
            }
        }
        (0..2).for_each(|e| self.all_there(e, todo[e]));
    }

    /// Nothing moves any more: end `e` has everything, and nothing to send but `todo`.
    fn all_there(&self, e: usize, todo: usize) {
        let (h, from) = (&self.host[e], &self.host[1 - e]);
        if !self.live(e) {
            return;
        }
        assert!(!h.revoking.get(), "end {e}: the hand-over hangs");
        assert!(!h.leaving.get(), "end {e}: it never leaves its lane");
        assert_eq!(h.wants.get(), None, "end {e}: its FIN never comes");
        assert!(!h.execs.get(), "end {e}: its next program never runs");
        assert!(
            !h.tx.awaits(&self.memory(e)),
            "end {e}: a daemon has its direction for ever"
        );
        assert!(
            !h.tx.must_flush(&self.memory(e)),
            "end {e}: bytes left on the way down"
        );
        if self.live(1 - e) && !self.net.borrow().reset {
            assert_eq!(todo, 0, "end {e} is stuck sending");
        }
        let wants_eof = from.dead.get() || from.closed.get() || from.wr_shut.get();
        if !from.failed.get() && !self.net.borrow().reset {
            assert!(
                h.got.get() >= from.sent.get(),
                "end {e} has {} of {}",
                h.got.get(),
                from.sent.get()
            );
            assert!(
                !wants_eof || h.eof.get(),
                "end {e} waits for an end of file"
            );
        }
    }

    /// One turn of an event loop. `true`: wants to know when TCP is writable.
    fn turn(&self, e: usize, todo: &mut usize, promote: bool) -> bool {
        let h = &self.host[e];
        let mut out = false;
        self.calls.set(0);
        if h.attached.get() {
            match h.tx.look(&self.memory(e), &Wire { w: self, e }) {
                Ok(p) => out |= p == Progress::Blocked,
                Err(r) => self.poisoned(e, r),
            }
            if h.revoking.get() {
                self.act(e, &Act::Revoke);
            }
            if promote {
                self.act(e, &Act::Ready);
            }
        }
        if h.wr_shut.get() {
            *todo = 0;
        }
        while *todo > 0 && self.live(e) {
            let before = h.sent.get();
            self.calls.set(0);
            if !self.send(e, (*todo).min(9000), promote) {
                if h.attached.get()
                    && h.tx.is_up()
                    && h.tx.want_space(&self.memory(e), &Wire { w: self, e })
                {
                    continue;
                }
                out |= !h.tx.is_up();
                break;
            }
            *todo -= (h.sent.get() - before) as usize;
        }
        while self.live(e) && !h.eof.get() {
            self.calls.set(0);
            let m = self.memory(e);
            // Trusts `ready` where it answers, as an event loop does.
            let ring = if h.attached.get() {
                h.rx.ready(&m)
            } else {
                None
            };
            if ring != Some(true) && !h.rx.has_news(&m) && !self.net.borrow().readable(e) {
                break;
            }
            if !self.recv(
                e,
                3000,
                How {
                    look: true,
                    ..How::default()
                },
            ) {
                break;
            }
        }
        out
    }
}
