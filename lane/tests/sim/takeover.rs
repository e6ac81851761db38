//! On one node: the daemon, which brings to TCP what an end does not.

use super::{Wire, World, TAG, TX};
use lane::half::tx::{claim, is_asked, is_done, mode, release, Adopted};
use lane::half::TxState;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

impl World {
    /// One step of the daemon, for what end `e` sends. True: it did something.
    pub(super) fn take_over(&self, e: usize) -> bool {
        let t = &self.taken[e];
        if self.daemon_gone.get() || self.across.get() || t.working.replace(true) {
            return false;
        }
        let tx = t.tx.borrow_mut().take();
        let (tx, begun) = match tx {
            Some(tx) => (Some(tx), true),
            None => (self.claim(e), false),
        };
        let worked = tx.is_some();
        let left = tx.and_then(|tx| self.work(e, tx));
        *t.tx.borrow_mut() = left;
        t.working.set(false);
        worked && !(begun && t.holds())
    }

    /// What it claims is adopted.
    fn claim(&self, e: usize) -> Option<Box<TxState>> {
        let (m, h) = (self.daemon(e), &self.host[e]);
        if !h.attached.get() || h.dead.get() || h.closed.get() {
            return None; // (there is no socket to be had)
        }
        let state = m.own_tx().state.load(Acquire);
        if !is_asked(&m, state, true)
            || is_done(&m, state)
            || !claim(&m, state, || h.busy[TX].get())
        {
            return None;
        }
        let tx = Box::<TxState>::default();
        match tx.adopt(&m, &Wire { w: self, e }, TAG ^ e as u64) {
            Ok(Adopted::Ring) => {
                self.note("taken over");
                Some(tx)
            }
            Ok(_) => {
                release(&m, state.epoch());
                None
            }
            Err(r) => {
                release(&m, state.epoch());
                self.cannot(e, r);
                None
            }
        }
    }

    /// As far as TCP takes it. None: the direction is its end's again.
    fn work(&self, e: usize, tx: Box<TxState>) -> Option<Box<TxState>> {
        let m = self.daemon(e);
        if let Err(r) = tx.down(&m, &Wire { w: self, e }) {
            self.cannot(e, r);
        } else if tx.mode.load(Relaxed) != mode::TCP {
            self.note("taken over, and TCP is full");
            return Some(tx);
        }
        // Its copy is closed first.
        if self.taken[e].closed.take() {
            self.net.borrow_mut().close(e);
        }
        tx.give_back(&m, tx.epoch.load(Relaxed));
        None
    }

    fn cannot(&self, e: usize, r: Reason) {
        assert!(
            self.hostile.get(),
            "the daemon of end {e}: {r:?} among honest ends"
        );
    }

    pub(super) fn daemon_dies(&self) {
        self.daemon_gone.set(true);
        for (e, t) in self.taken.iter().enumerate() {
            t.working.set(false);
            let had = t.tx.take().is_some();
            if had {
                self.note("the daemon died with a direction");
            }
            if t.closed.take() {
                self.host[e].failed.set(true); // as in `kill`
                self.net.borrow_mut().close(e);
            }
        }
    }
}
