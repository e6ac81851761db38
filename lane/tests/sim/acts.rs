//! What an end does under its locks.

use super::{Act, Wire, World, RECV, TAG};
use lane::half::rx::Revoked;
use lane::half::Progress;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

impl World {
    pub(super) fn locked(&self, e: usize, act: &Act) {
        self.locked_unseen(e, act);
        self.see_moves();
    }

    fn locked_unseen(&self, e: usize, act: &Act) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        match act {
            // (A shim bars the connection when it shuts it, and while it leaves.)
            Act::Attach { .. } if h.wr_shut.get() || h.execs.get() => {}
            Act::Ready | Act::TryUp if h.leaving.get() || h.wants.get().is_some() => {}
            Act::Attach { log2 } => self.attach(e, *log2),
            Act::Ready => {
                if h.rx.declare_ready(&m, &port) {
                    self.note("ready");
                    assert!(
                        !h.busy[RECV].get()
                            || !self.nested.get()
                            || h.rx.native_calls.load(Relaxed) == 0
                    );
                }
            }
            Act::TryUp => self.try_up(e),
            Act::Reclaim if self.is_orphaned(e) => {
                if h.tx.awaits(&m) {
                    self.note("reclaimed");
                }
                self.done(e, h.tx.reclaim(&m, &port));
                self.shut_late(e);
            }
            Act::Reclaim => {}
            Act::Down => {
                self.done(e, h.tx.down(&m, &port));
                self.shut_late(e);
            }
            Act::Look => {
                self.done(e, h.tx.look(&m, &port));
                self.shut_late(e);
            }
            Act::Sizes { sndbuf, room } => {
                h.tx.set_sndbuf(&m, *sndbuf);
                h.rx.set_room(&m, *room);
            }
            Act::WantDown => h.rx.want_down(&m, &port),
            Act::UnwantDown => h.rx.unwant_down(&m, &port),
            Act::Probe => {
                let _ = h.rx.probe(&m, &port);
            }
            Act::Unread => {
                let unread = h.rx.unread(&m, &port);
                let unread = unread.unwrap_or_else(|| self.net.borrow().unread(e) as u64);
                let peer = &self.host[1 - e];
                let sent = peer.sent.get() + peer.in_flight.get();
                assert!(
                    self.hostile.get() || unread <= sent - h.got.get(),
                    "{unread} unread"
                );
                h.unread.set(unread);
            }
            Act::Revoke => self.revoke(e),
            Act::Move { log2 } => self.move_ring(e, *log2),
            Act::ShutWr | Act::Close => self.shut(e, *act == Act::Close),
            other => unreachable!("{other:?}"),
        }
    }

    fn done(&self, e: usize, r: Result<Progress, Reason>) {
        r.map(|_| ()).unwrap_or_else(|r| self.poisoned(e, r));
    }

    fn attach(&self, e: usize, log2: u32) {
        let (h, m) = (&self.host[e], self.memory(e));
        if !self.recount(e) || !self.next_use(e) {
            return;
        }
        let (loc, base) = (self.clients[e].alloc(log2), self.base.get());
        let before = h.locs.replace(vec![loc]);
        // (Another program of the process does not know them.)
        let given_up = h.tx.attach(&m, base, loc);
        assert!(given_up.iter().flatten().all(|l| before.contains(l)));
        before.into_iter().for_each(|l| self.clients[e].release(l));
        h.tx.set_tag(TAG ^ e as u64);
        h.rx.attach(&m, base, TAG ^ (1 - e) as u64);
        if e == 0 {
            h.rx.mark_client(&m);
        }
        h.attached.set(true);
    }

    pub(super) fn try_up(&self, e: usize) {
        let h = &self.host[e];
        self.see_moves(); // (a send may just have come down)
        match h.tx.try_up(&self.memory(e), &Wire { w: self, e }) {
            Ok(true) => self.note("up"),
            Ok(false) => {}
            Err(r) => panic!("end {e}: {r:?}: a byte was counted wrongly"),
        }
    }

    fn revoke(&self, e: usize) {
        let h = &self.host[e];
        if h.leaving.get() {
            return; // (it does that by itself)
        }
        if self.host[1 - e].revoking.get() && !h.revoking.get() {
            self.note("both ends revoke at once");
        }
        match h.rx.revoke(&self.memory(e), &Wire { w: self, e }) {
            Ok(Revoked::Clear) => {
                assert!(!h.rx.engaged());
                if h.revoking.replace(false) {
                    self.note("revoked after waiting");
                }
            }
            Ok(Revoked::Pending) => h.revoking.set(true),
            Ok(Revoked::Impossible) => {
                self.note("revocation impossible");
                h.revoking.set(false);
            }
            Err(r) => self.poisoned(e, r),
        }
    }

    fn move_ring(&self, e: usize, log2: u32) {
        let (h, m) = (&self.host[e], self.memory(e));
        if h.tx.can_move(&m) {
            self.note("moved");
            let loc = self.clients[e].alloc(log2);
            h.locs.borrow_mut().push(loc);
            if let Some(freed) = h.tx.move_to(&m, loc) {
                h.locs.borrow_mut().retain(|l| *l != freed);
                self.clients[e].release(freed);
            }
        }
    }
}
