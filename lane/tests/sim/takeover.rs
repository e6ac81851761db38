//! On one node: the daemon, which brings to TCP what an end does not. Its steps are those of `lane::half::tx::bring`,
//! as in life; here is only what is around them.

use super::{Wire, World, RX, TAG, TX};
use lane::half::tx::bring::{Around, Bringing, End, Step};
use lane::half::Port;
use std::cell::{Cell, RefCell};

/// The daemon's part of an end's sending direction.
#[derive(Default)]
pub(super) struct Taken {
    bringing: RefCell<Option<Bringing<Copy>>>,
    /// It is at work on it just now.
    pub(super) working: Cell<bool>,
    /// Copies that it has of the end's socket.
    copies: Cell<u32>,
}

impl Taken {
    /// Is a helper at work, or waiting for TCP?
    pub(super) fn is_under_way(&self) -> bool {
        self.working.get() || self.bringing.borrow().is_some()
    }

    /// Has the daemon a copy of the socket?
    pub(super) fn holds(&self) -> bool {
        self.copies.get() > 0
    }
}

/// A copy of a socket.
pub(super) struct Copy;

/// What the daemon has to do with an end.
struct Beside<'w> {
    w: &'w World,
    e: usize,
    /// Was it asked in this step whether the end is at work? Was that just before the end's present call?
    asked: Cell<bool>,
    early: bool,
}

impl Around for Beside<'_> {
    type Sock = Copy;

    fn at_work(&self) -> bool {
        let h = &self.w.host[self.e];
        let busy = h.busy[TX].get();
        match (self.asked.replace(true), busy) {
            (false, true) if self.early => return false,
            (false, true) => self.w.note("a takeover meets an end at work"),
            (true, true) => self.w.note("a takeover meets an end that wakes"),
            _ => {}
        }
        busy || !h.attached.get()
    }

    fn copy(&self) -> Option<Copy> {
        self.w.hook();
        let (h, t) = (&self.w.host[self.e], &self.w.taken[self.e]);
        if h.is_gone() {
            return None;
        }
        t.copies.set(t.copies.get() + 1);
        self.w.hook();
        Some(Copy)
    }

    fn port<'a>(&'a self, _: &'a Copy) -> impl Port + 'a {
        let (w, e) = (self.w, self.e);
        Wire { w, e }
    }

    fn close(&self, _: Copy) {
        self.w.hook();
        let t = &self.w.taken[self.e];
        t.copies.set(t.copies.get() - 1);
        if self.w.host[self.e].is_gone() {
            self.w.note("the FIN of a close follows a takeover");
            self.w.net.borrow_mut().close(self.e);
        }
    }

    fn reset(&self, _: &Copy) {
        self.w.note("a takeover ends in a reset");
        assert!(
            self.w.hostile.get() || self.w.host[self.e].is_gone(),
            "end {}: its daemon resets the connection among honest ends",
            self.e
        );
        self.w.net.borrow_mut().rst();
    }

    fn shut_down(&self, _: &Copy) {
        self.w.note("the daemon shuts down for an end");
        self.w.net.borrow_mut().fin(self.e);
    }

    fn is_shut(&self) -> bool {
        let h = &self.w.host[self.e];
        h.tx.shut.load(std::sync::atomic::Ordering::Relaxed) != 0 && !h.is_gone()
    }

    fn is_cut(&self) -> bool {
        self.w.cut[self.e].get()
    }

    fn is_orphan(&self) -> bool {
        self.w.host[self.e].is_gone()
    }

    fn now_ms(&self) -> u64 {
        self.w.now_ms.get()
    }
}

impl World {
    /// One step of the daemon, for what end `e` sends. True: it did something. `own`: the end has asked for it itself.
    pub(super) fn take_over(&self, e: usize, own: bool, early: bool) -> bool {
        let t = &self.taken[e];
        if self.daemon_gone.get() || self.across.get() || t.working.replace(true) {
            return false;
        }
        let begun = t.bringing.borrow_mut().take();
        let had = begun.as_ref().is_some_and(Bringing::holds);
        let mut bringing =
            begun.unwrap_or_else(|| Bringing::new(TAG ^ e as u64, own, self.now_ms.get()));
        let around = Beside {
            w: self,
            e,
            asked: Cell::new(false),
            early,
        };
        let step = bringing.step(&self.daemon(e), &around);
        if bringing.holds() != had {
            self.beside(e);
        }
        let copies = match step {
            Step::Over(_) => 0,
            Step::Again(_) => u32::from(bringing.holds()),
        };
        assert_eq!(t.copies.get(), copies, "end {e}: copies of its socket");
        assert!(
            !bringing.is_alone() || self.host[e].is_gone(),
            "end {e}: its process is there, and has the direction, too"
        );
        let over = match step {
            Step::Over(end) => self.is_over(e, end, had),
            Step::Again(ms) => {
                self.note(match bringing.holds() {
                    true => "taken over, and TCP is full",
                    false => "a takeover waits for an end at work",
                });
                if bringing.is_alone() {
                    self.note("a takeover for an orphan without its process's connection");
                }
                self.now_ms.set(self.now_ms.get() + ms);
                *t.bringing.borrow_mut() = Some(bringing);
                false
            }
        };
        t.working.set(false);
        over || !had && t.holds()
    }

    fn is_over(&self, e: usize, end: End, had: bool) -> bool {
        if let Some(r) = end.failed {
            assert!(
                self.hostile.get(),
                "the daemon of end {e}: {r:?} among honest ends"
            );
        }
        match end {
            End { claimed: false, .. } => {}
            End { brought: true, .. } => {
                self.note("taken over");
                if had {
                    self.note("given back after TCP was full");
                }
            }
            _ if self.net.borrow().reset => {}
            _ if self.cut[e].get() => self.note("a takeover left to a process that was cut"),
            _ => self.note("a claim that came to nothing"),
        }
        end.claimed
    }

    /// The daemon has just taken a direction over. What else goes on?
    fn beside(&self, e: usize) {
        let (own, peer) = (&self.host[e], &self.host[1 - e]);
        let told = [
            (
                own.leaving.get() && peer.leaving.get(),
                "a takeover while both ends leave",
            ),
            (
                self.taken[1 - e].holds(),
                "both directions are a daemon's at once",
            ),
            (peer.execs.get(), "a takeover for an end that executes"),
            (own.execs.get(), "a takeover of an end that executes"),
            (own.wants.get().is_some(), "a takeover during an end's FIN"),
            (peer.wr_shut.get(), "a takeover behind the other end's FIN"),
        ];
        for (is, what) in told {
            if is {
                self.note(what);
            }
        }
    }

    /// Has the daemon ended, as far as end `e` can tell?
    pub(super) fn is_orphaned(&self, e: usize) -> bool {
        self.daemon_gone.get() || self.cut[e].get() && !self.taken[e].is_under_way()
    }

    pub(super) fn daemon_dies(&self) {
        self.daemon_gone.set(true);
        for (e, t) in self.taken.iter().enumerate() {
            t.working.set(false);
            *t.bringing.borrow_mut() = None;
            if t.copies.take() == 0 {
                continue;
            }
            self.note("the daemon died with a direction");
            if self.host[e].is_gone() {
                self.host[e].failed.set(true); // as in `kill`
                self.net.borrow_mut().close(e);
            }
        }
    }

    /// The lane's two locks of an end are free.
    pub(super) fn is_idle(&self, e: usize) -> bool {
        let h = &self.host[e];
        !h.busy[TX].get() && !h.busy[RX].get()
    }
}
