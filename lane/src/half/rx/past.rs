//! From the prefix to the ring. The receiver says `PAST` before it takes anything off the ring: a sender that goes down
//! without having seen that knows that nothing was taken, and puts all of the ring on TCP as plain bytes. (A frame would lie
//! behind bytes that only a receive may take, in the way of whoever has the connection next.)

use super::{mode, RxState};
use crate::abi::{rx, takeover, tx, TakeoverPhase};
use crate::half::{Memory, Port};
use crate::prim::fence;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// The prefix is read: says so, and goes on with the ring, or with what the sender has put on TCP instead. Across nodes
    /// the sender may send a `Fin` frame from now on. False: on one node the sender is about to go down, and has not recorded
    /// how yet. (It does that in the same call, unless it is stopped or killed there.)
    pub(super) fn past(&self, m: &Memory, port: &impl Port) -> Result<bool, Reason> {
        if !m.own_rx().word.load(Relaxed).has(rx::PAST) {
            self.flag(m, rx::PAST);
        }
        if m.is_remote() {
            self.mode.store(mode::RING, Relaxed);
            m.publish(port);
            return Ok(true);
        }
        if self.follow(m)? {
            return Ok(true);
        }
        // If the sender was killed there, TCP ends.
        let mut b = 0u8;
        match port.tcp_recv(&mut b, 1, true) {
            Err(libc::EAGAIN) => return Ok(false),
            // (After our own SHUT_RD, an empty queue looks the same.)
            Ok(0) if self.shut.load(Relaxed) != 0 => return Ok(false),
            Ok(0) => {}
            // It recorded how before it put anything on TCP.
            Ok(_) if self.follow(m)? => return Ok(true),
            Ok(_) => {}
            Err(e) => self.error.put(e),
        }
        self.mode.store(mode::RING, Relaxed);
        Ok(true)
    }

    /// Does what the sender's words say. False: they do not say it yet.
    fn follow(&self, m: &Memory) -> Result<bool, Reason> {
        // SYNC past: we have said PAST, now we look; the sender says DOWNING, then looks at our word (`TxState::go_down`).
        fence(SeqCst);
        // (The records first: who is through, and has a daemon's record replaced, has said before that how it came there.)
        let (plain, framed) = (
            self.brings(m, takeover::PLAIN),
            self.brings(m, takeover::DOWN),
        );
        match self.phase(m) {
            tx::UP | tx::DOWN | tx::ENDED => self.mode.store(mode::RING, Relaxed),
            tx::RESUMED => self.mode.store(mode::TCP, Relaxed),
            // (A daemon of an earlier version goes on with a frame, whatever the end has recorded.)
            _ if self.is_assured(m, takeover::DOWN) => self.mode.store(mode::RING, Relaxed),
            // What a frame would say: it begins where we are.
            _ if plain => {
                let cursor = self.cursor.load(Relaxed);
                self.frame_cursor.store(cursor, Relaxed);
                self.rest.store(self.head(m)? - cursor, Relaxed);
                self.mode.store(mode::LAST, Relaxed);
            }
            tx::DOWNING if !framed => return Ok(false),
            _ => self.mode.store(mode::RING, Relaxed),
        }
        Ok(true)
    }

    /// On one node: has the sender, or a daemon in its stead, recorded that it brings the direction to TCP in this way?
    pub(super) fn brings(&self, m: &Memory, what: TakeoverPhase) -> bool {
        self.has_recorded(m, what) || self.is_assured(m, what)
    }

    /// In the prefix: is it known whether the ring comes next? (On one node it is not while its sender is about to go down and
    /// has not recorded how.)
    pub(super) fn knows_next(&self, m: &Memory) -> bool {
        m.is_remote()
            || self.phase(m) != tx::DOWNING
            || self.brings(m, takeover::PLAIN)
            || self.brings(m, takeover::DOWN)
    }

    /// On one node: is the prefix read, and is it known how the sender goes on?
    pub(super) fn can_pass(&self, m: &Memory) -> bool {
        !m.is_remote() && self.prefix_left() == 0 && self.knows_next(m)
    }
}
