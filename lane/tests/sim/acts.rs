//! What an end does under its locks.

use super::keep::Ending;
use super::{Act, Wire, World, RECV, TAG};
use lane::half::rx::Revoked;
use lane::half::tx::mode;
use lane::half::Progress;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

impl World {
    #[expect(clippy::too_many_lines)]
    pub(super) fn locked(&self, e: usize, act: &Act) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let done =
            |r: Result<Progress, Reason>| r.map(|_| ()).unwrap_or_else(|r| self.poisoned(e, r));
        match act {
            // It comes from a daemon.
            Act::Attach { .. } if self.any_forsaken() => {}
            // (A shim bars the connection when it shuts it.)
            Act::Attach { .. } if h.wr_shut.get() => {}
            Act::Ready | Act::TryUp if h.lost.get() => {}
            Act::ShutWr | Act::Close if self.keepers.is_some() => self.end(e, *act == Act::Close),
            Act::Attach { log2 } => {
                let (loc, base) = (self.clients[e].alloc(*log2), self.base.get());
                h.locs.borrow_mut().push(loc);
                assert_eq!(h.tx.attach(&m, base, loc), [None, None]);
                h.tx.set_tag(TAG ^ e as u64);
                h.rx.attach(&m, base, TAG ^ (1 - e) as u64);
                if e == 0 {
                    h.rx.mark_client(&m);
                }
                h.attached.set(true);
            }
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
            Act::TryUp if self.remote.is_some() && h.wr_shut.get() => {}
            Act::TryUp => self.try_up(e),
            Act::Down => done(h.tx.down(&m, &port)),
            Act::Look => done(h.tx.look(&m, &port)),
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
                let unread = h.rx.unread(&m, &port).unwrap_or(0);
                let peer = &self.host[1 - e];
                let sent = peer.sent.get() + peer.in_flight.get();
                assert!(
                    self.hostile.get() || unread <= sent - h.got.get(),
                    "{unread} unread"
                );
                h.unread.set(unread);
            }
            Act::Revoke => match h.rx.revoke(&m, &port) {
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
            },
            Act::Move { log2 } => {
                if h.tx.can_move(&m) {
                    self.note("moved");
                    let loc = self.clients[e].alloc(*log2);
                    h.locs.borrow_mut().push(loc);
                    if let Some(freed) = h.tx.move_to(&m, loc) {
                        h.locs.borrow_mut().retain(|l| *l != freed);
                        self.clients[e].release(freed);
                    }
                }
            }
            Act::ShutWr | Act::Close => {
                let mut repeated = None;
                // As the shim: what a revocation made plain has to be on TCP before the FIN.
                if h.attached.get() {
                    let before = h.tx.mode.load(Relaxed);
                    h.finishing.set(true); // until it is said below
                    done(h.tx.finish(&m, &port));
                    if h.tx.holds_fin(&m) {
                        h.finishing.set(false);
                        // Across nodes the end may be on its way already: nothing is sent any more,
                        // and the FIN follows when the frame is out.
                        let drain = lane::half::tx::mode::DRAIN;
                        if self.remote.is_some()
                            && before != drain
                            && h.tx.mode.load(Relaxed) == drain
                        {
                            h.fin_due.set(true);
                            h.wr_shut.set(true);
                        }
                        return;
                    }
                    if self.remote.is_none() {
                        repeated = h.tx.repeat_unread(&m, &port);
                    }
                    h.rx.announce_end(&m, &port, h.tx.tcp_pos.load(Relaxed));
                }
                if *act == Act::ShutWr {
                    h.wr_shut.set(true);
                    self.net.borrow_mut().fin(e);
                    if h.attached.get() {
                        h.tx.shut(&m, &port, repeated);
                    }
                } else {
                    if h.attached.get() {
                        h.tx.shut(&m, &port, repeated);
                        h.rx.close(&m, &port, h.tx.tcp_pos.load(Relaxed));
                    }
                    let unread = h.attached.get() && h.rx.ring_unread(&m) > 0;
                    h.closed.set(true);
                    self.net.borrow_mut().close(e);
                    if unread {
                        self.net.borrow_mut().rst();
                    }
                }
            }
            other => unreachable!("{other:?}"),
        }
    }

    pub(super) fn try_up(&self, e: usize) {
        let h = &self.host[e];
        match h.tx.try_up(&self.memory(e), &Wire { w: self, e }) {
            Ok(true) => self.note("up"),
            Ok(false) => {}
            Err(r) => panic!("end {e}: {r:?}: a byte was counted wrongly"),
        }
    }

    /// The application shuts down or closes, and there is takeover: as `shim/src/process/remote.rs`.
    fn end(&self, e: usize, close: bool) {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let mut reset = false;
        if h.attached.get() {
            if let Err(r) = h.tx.look(&m, &port) {
                return self.poisoned(e, r);
            }
            if h.tx.mode.load(Relaxed) != mode::TCP && self.given_back(e) {
                // The shim waits here until TCP has it all, or gives up with a reset.
                if !close {
                    h.fin_due.set(true);
                    h.wr_shut.set(true);
                }
                return;
            }
            if close {
                if h.rx.engaged() {
                    let _ = h.rx.probe(&m, &port);
                }
                h.rx.close(&m, &port, h.tx.tcp_pos.load(Relaxed));
                reset = h.rx.ring_unread(&m) > 0;
            }
        }
        match close {
            true => h.closed.set(true),
            false => h.wr_shut.set(true),
        }
        let how = if close { Ending::Over } else { Ending::Shut };
        let later = h.tx.mode.load(Relaxed) != mode::TCP;
        if !reset && later && self.leave_to_keeper(e, how) {
            return;
        }
        // (The daemon has died just now: the shim might yet put everything on TCP.)
        reset |= later;
        let mut net = self.net.borrow_mut();
        match close {
            true => net.close(e),
            false => net.fin(e),
        }
        if reset {
            net.rst();
        }
    }
}
