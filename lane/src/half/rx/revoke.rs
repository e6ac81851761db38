//! How a receiver gives its direction back to TCP by its own decision, before the socket leaves the process. The
//! socket must not leave while bytes are only on the ring, and no byte beyond the cursor that was announced may be
//! taken.

use super::{mode, How, Received, Revoked, RxState};
use crate::abi::{rx, takeover, tx, Cursor, RxWord, TakeoverPhase, TakeoverWord, TcpPos};
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use crate::prim::fence;
use crate::proto::frame::LEN;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

/// A receiver that leaves a lane across nodes waits for no more than so many of the bytes that were unread on the ring.
const SOON: u64 = 4096;

/// Are so many bytes of TCP there to be read?
pub(super) fn has_arrived(port: &impl Port, bytes: u64) -> bool {
    port.tcp_unread().is_ok_and(|n| n as u64 >= bytes)
}

impl RxState {
    /// Gives the direction back to TCP before the socket leaves this process. Freezes the cursor. Call again while
    /// `Pending` (the caller has a deadline); the connection may leave only after `Clear`. After `Impossible` the
    /// direction continues as before.
    pub fn revoke(&self, m: &Memory, port: &impl Port) -> Result<Revoked, Reason> {
        loop {
            match self.mode.load(Relaxed) {
                // An error that came where nobody could be told yet (`RxState::take_repeat`): the next owner would see a
                // clean end.
                mode::TCP if m.is_remote() && self.error.is_set() => {
                    return Ok(Revoked::Impossible)
                }
                mode::TCP => return Ok(Revoked::Clear),
                mode::LAST => {
                    if let Some(r) = self.in_last(m, port)? {
                        return Ok(r);
                    }
                    self.begin_skip(self.cursor.load(Relaxed))?;
                }
                mode::PREFIX if m.is_remote() && self.prefix_left() == 0 => {
                    self.past(m, port)?;
                }
                // All announced bytes must be on TCP: the next owner of the socket could not tell that some are
                // missing.
                mode::REST => {
                    let there = || has_arrived(port, self.prefix_left());
                    if self.phase(m) != tx::DOWN && !there() {
                        return Ok(Revoked::Pending);
                    }
                    self.mode.store(mode::TCP, Relaxed);
                }
                mode::SKIP => {
                    return Ok(
                        match self.advance(m, port, &mut Iov::new(&[]), How::default())? {
                            _ if self.mode.load(Relaxed) == mode::REST => continue,
                            Received::Error(e) if m.is_remote() => {
                                // A later receive reports it, and the stream must not look ended then.
                                self.error.put(e);
                                self.mode.store(mode::SKIP, Relaxed);
                                Revoked::Impossible
                            }
                            Received::Empty => Revoked::Pending,
                            Received::Error(e) => {
                                // (If the error is one that was kept, the mode is unchanged.)
                                self.error.put(e);
                                self.mode.store(mode::TCP, Relaxed);
                                Revoked::Clear
                            }
                            _ => Revoked::Clear,
                        },
                    );
                }
                mode::UNDECIDED if self.prefix_left() > 0 || self.decide(port).is_some() => {
                    return Ok(Revoked::Pending);
                }
                mode::UNDECIDED => {}
                // The `Fin` frame is here, and nothing follows it on TCP: all that remains is on the ring.
                mode::FIN if self.head(m)? == self.cursor.load(Relaxed) => {
                    self.mode.store(mode::TCP, Relaxed);
                }
                mode::FIN => return Ok(Revoked::Impossible),
                mode::RING if m.is_remote() && self.has_consumed(m) => {
                    if let Some(r) = self.recall(m, port)? {
                        return Ok(r);
                    }
                }
                mode::REVOKING => {
                    if let Some(r) = self.revoking(m, port)? {
                        return Ok(r);
                    }
                }
                now => {
                    if now == mode::READY && self.see_up(m)? {
                        continue;
                    }
                    self.begin_revoking(m, port, now);
                }
            }
        }
    }

    /// Freezes the cursor. `now`: the mode in which that happens.
    fn begin_revoking(&self, m: &Memory, port: &impl Port, now: u32) {
        let at = match now {
            mode::READY => Cursor::UNSEEN,
            _ => self.cursor.load(Relaxed),
        };
        m.own_rx().revoked.store(at, Relaxed);
        let word = self.unrevoked(m).with(rx::REVOKED);
        m.own_rx().word.store(word, SeqCst); // releases `revoked`
        self.revoked_mode.store(now, Relaxed);
        self.mode.store(mode::REVOKING, Relaxed);
        m.publish(port);
    }

    /// We have taken the frame. The bytes that we have not taken from the ring come again on TCP, but only `DOWN` promises
    /// that all of them do; across nodes, where that word may never arrive, all that the frame announced is enough.
    /// `None`: they come.
    fn in_last(&self, m: &Memory, port: &impl Port) -> Result<Option<Revoked>, Reason> {
        if self.head(m)? == self.cursor.load(Relaxed) {
            return Ok(None);
        }
        let there = || has_arrived(port, self.rest.load(Relaxed));
        Ok(match self.phase(m) {
            tx::DOWN | tx::ENDED => None,
            tx::RESUMED if !m.is_remote() => None, // (no frame: see `RxState::past`)
            _ if self.is_assured(m, takeover::DOWN) || self.is_assured(m, takeover::PLAIN) => None,
            _ if m.is_remote() && there() => None,
            tx::BROKEN => Some(Revoked::Impossible),
            _ => {
                self.ask_for_the_rest(m, port);
                Some(Revoked::Pending)
            }
        })
    }

    /// On one node: has a daemon begun to bring the direction to TCP in this way? It will not leave it undone, whatever
    /// becomes of the sender, so the receiver need not wait for the rest. (A sender that forges the word loses its own
    /// bytes.)
    pub(super) fn is_assured(&self, m: &Memory, what: TakeoverPhase) -> bool {
        // Acquire: pairs with the Release in `TxState::record`.
        let word = m.peer_daemon().takeover.load(Acquire);
        !m.is_remote() && word == TakeoverWord::new(self.epoch.load(Relaxed), what)
    }

    /// On one node: has the sender recorded that it brings the direction to TCP in this way?
    pub(super) fn has_recorded(&self, m: &Memory, what: TakeoverPhase) -> bool {
        // Acquire: pairs with the Release in `TxState::record`.
        let word = m.peer_rx().takeover.load(Acquire);
        word == TakeoverWord::new(self.epoch.load(Relaxed), what)
    }

    /// On one node: has a daemon claimed the direction, which it brings to TCP, and not finished? (If it has recorded that,
    /// the receiver may be on TCP already, before the bytes are.)
    pub fn is_coming(&self, m: &Memory) -> bool {
        let word = m.peer_daemon().takeover.load(Acquire); // as above
        let ours = !m.is_remote() && word.epoch() == self.epoch.load(Relaxed);
        ours && (takeover::TAKEN..takeover::DONE).contains(&word.phase())
    }

    /// Do bytes that lay unread on the ring come by TCP, or are they about to? Until they do, there is nothing to be read, and
    /// yet that is not the end.
    pub fn is_withheld(&self) -> bool {
        match self.mode.load(Relaxed) {
            mode::REVOKING => true,
            mode::SKIP => self.rest.load(Relaxed) > 0,
            _ => false,
        }
    }

    /// On TCP: the position up to which the bytes go that lay unread on the ring when it was left.
    pub fn pending_until(&self) -> Option<TcpPos> {
        (self.mode.load(Relaxed) == mode::TCP).then(|| self.limit.load(Relaxed))
    }

    /// The direction goes on on TCP, where so many bytes come that lay unread.
    pub(super) fn go_to_tcp(&self, bytes: u64) {
        self.limit
            .store(self.tcp_pos.load(Relaxed) + bytes, Relaxed);
        self.mode.store(mode::TCP, Relaxed);
    }

    /// Across nodes: has the direction been given back, and are bytes that lay unread on the ring still on their way by TCP?
    /// (Without a lane they were there, and who has been told that there is something to read finds it.)
    pub fn is_on_its_way(&self, m: &Memory, port: &impl Port) -> bool {
        let word = m.own_rx().word.load(Relaxed);
        let revoked = word.epoch() == self.epoch.load(Relaxed) && word.has(rx::REVOKED);
        let given = m.is_remote() && revoked && self.mode.load(Relaxed) == mode::TCP;
        let lay = || self.head(m).map_or(0, |h| h - self.cursor.load(Relaxed));
        given && !has_arrived(port, lay().min(SOON))
    }

    /// On one node, a frame was taken and its sender does not finish what it announces: shows a daemon that this end
    /// leaves. (The sender only goes on with what it has begun.)
    fn ask_for_the_rest(&self, m: &Memory, port: &impl Port) {
        let word = m.own_rx().word.load(Relaxed);
        if !m.is_remote() && !word.has(rx::REVOKED) {
            m.own_rx().revoked.store(self.cursor.load(Relaxed), Relaxed);
            m.own_rx().word.store(word.with(rx::REVOKED), SeqCst); // releases `revoked`
            m.publish(port);
        }
    }

    /// On one node, if the sender is gone and will not answer: withdraws the revocation, because what is unread is
    /// only on the ring. False: the sender had answered, or begun to, or a daemon has taken the direction over: bytes of
    /// the ring are on TCP, or will be.
    pub fn go_on(&self, m: &Memory) -> bool {
        let now = self.mode.load(Relaxed);
        if !matches!(now, mode::REVOKING | mode::LAST) {
            return true;
        }
        let word = self.unrevoked(m);
        m.own_rx().word.store(word, SeqCst);
        // SYNC withdraw: we have withdrawn, now we look; the daemon claims, and the sender records, then they look at our
        // word (`TxState::adopt`, `TxState::resume`).
        fence(SeqCst);
        // (The daemon first: one that is through meanwhile has told before that how it came there.)
        let coming = self.is_coming(m);
        // (In the prefix nothing was taken from the ring, and what a sender has recorded that goes down by itself stands for a
        // frame: see `RxState::past`. Such a one says DOWNING first; one that answers stays UP until it is through.)
        let (was, phase) = (self.revoked_mode.load(Relaxed), self.phase(m));
        let answers = was == mode::RING || phase == tx::UP;
        let plain = || answers && self.has_recorded(m, takeover::PLAIN);
        let answered = now == mode::REVOKING && (phase == tx::RESUMED || plain());
        if coming || answered {
            m.own_rx().word.store(word.with(rx::REVOKED), SeqCst);
            return false;
        }
        if now == mode::REVOKING {
            self.mode.store(was, Relaxed);
        }
        true
    }

    /// Our word, without a revocation.
    fn unrevoked(&self, m: &Memory) -> RxWord {
        let past = m.own_rx().word.load(Relaxed).flags().only(rx::PAST);
        RxWord::new(self.epoch.load(Relaxed), rx::READY | past)
    }

    /// The connection is reset: TCP reports everything that remains to be reported.
    pub fn abandon(&self) {
        self.mode.store(mode::TCP, SeqCst);
    }

    /// Were any bytes of this epoch taken from the ring?
    pub(super) fn has_consumed(&self, m: &Memory) -> bool {
        self.cursor.load(Relaxed) != m.peer_tx().up_start.load(Relaxed)
    }

    /// Across nodes, if bytes of this epoch were taken from the ring: asks the sender to go down and waits for its
    /// frame, which says where TCP continues whatever becomes of the link group. (If none were taken, the stream
    /// continues where the epoch began, without a frame: a frame could end up after prefix bytes that only a receive
    /// may take.) Both ends tell the two cases apart by the cursor of the revocation.
    fn recall(&self, m: &Memory, port: &impl Port) -> Result<Option<Revoked>, Reason> {
        let word = m.own_rx().word.load(Relaxed);
        if !word.has(rx::REVOKED) {
            let cursor = self.cursor.load(Relaxed);
            m.own_rx().revoked.store(cursor, Relaxed);
            m.own_rx().word.store(word.with(rx::REVOKED), SeqCst); // releases `revoked`
            m.publish(port);
        }
        match self.look(m, port)? {
            None if self.mode.load(Relaxed) == mode::RING => Ok(Some(Revoked::Pending)),
            None => Ok(None),
            Some(Received::Empty) => Ok(Some(Revoked::Pending)),
            Some(Received::Error(e)) => {
                self.error.put(e);
                Ok(Some(Revoked::Impossible))
            }
            Some(_) => Ok(Some(Revoked::Impossible)),
        }
    }

    /// The sender did switch just before the revocation: from here on we have seen it. Nothing was consumed, so UNSEEN, the
    /// start and our cursor mean the same.
    fn revoked_late(&self, m: &Memory, port: &impl Port) -> Result<(), Reason> {
        if !self.see_up(m)? {
            return Err(Reason::Hostile); // a state never goes back
        }
        if self.mode.load(Relaxed) == mode::TCP {
            return Ok(());
        }
        if m.is_remote() && self.prefix_left() == 0 {
            self.past(m, port)?;
        }
        self.revoked_mode.store(self.mode.load(Relaxed), Relaxed);
        self.mode.store(mode::REVOKING, Relaxed);
        Ok(())
    }

    /// We have revoked: what has the sender stored? `None`: the mode has changed, look again.
    fn revoking(&self, m: &Memory, port: &impl Port) -> Result<Option<Revoked>, Reason> {
        // SYNC revoke, SYNC retreat: we have revoked, now we look; the sender speaks, then looks at our word
        // (`TxState::down`, `try_up`, `send`). One of the two sees the other.
        fence(SeqCst);
        let phase = self.phase(m);
        let was = self.revoked_mode.load(Relaxed);
        if was == mode::READY && !matches!(phase, tx::NONE | tx::RESUMED) {
            return self.revoked_late(m, port).map(|()| None);
        }
        let before = match was {
            mode::PREFIX => self.prefix_left(),
            _ => 0,
        };
        let prefixed = before > 0;
        let clear = || {
            let lay = self.head(m).map_or(0, |h| h - self.cursor.load(Relaxed));
            self.go_to_tcp(if was == mode::READY { 0 } else { before + lay });
            Ok(Some(Revoked::Clear))
        };
        let impossible = || {
            // The sender has left this epoch in another way, so the revocation means nothing any more.
            self.mode.store(was, Relaxed);
            m.own_rx().word.store(self.unrevoked(m), SeqCst);
            Ok(Some(Revoked::Impossible))
        };
        match phase {
            tx::NONE | tx::RESUMED => return clear(),
            _ if self.is_assured(m, takeover::PLAIN) => return clear(),
            // (Across nodes the sender's head and its answer arrive with a delay.)
            tx::UP if !m.is_remote() && self.head(m)? == self.cursor.load(Relaxed) => {
                return clear()
            }
            // Across nodes the sender's word may never arrive, and only a frame may tell: see below.
            tx::UP if !m.is_remote() || prefixed => return Ok(Some(Revoked::Pending)),
            // Across nodes a frame may lie after the prefix, where we cannot take it out.
            tx::DOWNING if prefixed => return Ok(Some(Revoked::Pending)),
            _ if prefixed => return impossible(),
            // What it had begun without a frame it has not finished.
            tx::BROKEN if was == mode::PREFIX && self.brings(m, takeover::PLAIN) => {
                return impossible();
            }
            // The sender may still see our revocation and send plain bytes: only a complete frame proves the
            // opposite.
            tx::UP | tx::DOWNING if self.got_len.load(Relaxed) == 0 => {
                let mut b = [0u8; LEN];
                match port.tcp_recv(b.as_mut_ptr(), LEN, true) {
                    // Across nodes the word that explains the end may arrive after it.
                    Ok(0) if m.is_remote() => return Ok(Some(Revoked::Pending)),
                    Ok(0) => {}
                    Ok(LEN) if self.our_frame(&b).is_some() => {}
                    Ok(_) | Err(libc::EAGAIN) => return Ok(Some(Revoked::Pending)),
                    Err(e) => self.error.put(e),
                }
            }
            _ => {}
        }
        // A frame is on TCP, or nothing more will come there.
        match self.look(m, port)? {
            None if matches!(self.mode.load(Relaxed), mode::LAST | mode::FIN) => Ok(None),
            None => impossible(), // TCP has ended, and the ring has not
            Some(Received::Empty) => Ok(Some(Revoked::Pending)),
            Some(Received::Error(e)) if m.is_remote() => {
                self.error.put(e);
                impossible()
            }
            Some(Received::Error(e)) => {
                self.error.put(e);
                clear()
            }
            Some(_) => clear(),
        }
    }
}
