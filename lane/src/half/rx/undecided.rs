//! Across nodes, a switch is the word of two daemons, and if one of them dies, or they cannot reach each other any more, the
//! sender may never learn whether the other daemon has shown its switch. It has put nothing on the ring then, nor on TCP
//! since it asked, and goes on on TCP without a frame (`TxState::reclaim`). So a receiver on whose ring nothing has come
//! decides by what follows the switch's position on TCP, once its link group is gone: a frame, if the sender was told that the
//! switch stands, or the next bytes of the stream. (Bytes that begin like a frame end the connection, as they do on a lane.)

use super::{mode, How, Received, RxState};
use crate::abi::rx;
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use crate::num;
use crate::proto::frame::{Frame, LEN};
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// Across nodes: the link group is gone, so no switch up can come any more. But a switch that its daemon has already
    /// shown stands, if the sender was told so: it comes down by a frame then, and the bytes before that on TCP have to be
    /// read. (A revocation would wait for words that nobody stores.)
    pub fn orphan(&self, m: &Memory) -> Result<(), Reason> {
        if self.mode.load(Relaxed) == mode::READY && !self.see_up(m)? {
            self.mode.store(mode::TCP, SeqCst);
            return Ok(());
        }
        // (Nobody answers a revocation any more.)
        let now = match self.mode.load(Relaxed) {
            mode::REVOKING => self.revoked_mode.load(Relaxed),
            now => now,
        };
        if matches!(now, mode::PREFIX | mode::RING) && self.is_untouched(m)? {
            self.mode.store(mode::UNDECIDED, Relaxed);
        }
        Ok(())
    }

    /// Has nothing come yet since the switch, neither on the ring nor as a part of a frame?
    fn is_untouched(&self, m: &Memory) -> Result<bool, Reason> {
        Ok(m.is_remote()
            && self.got_len.load(Relaxed) == 0
            && !self.has_consumed(m)
            && self.head(m)? == self.cursor.load(Relaxed))
    }

    /// UNDECIDED: bytes of TCP up to the switch, then what follows them.
    pub(super) fn read_undecided(
        &self,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
    ) -> Option<Received> {
        match self.prefix_left() {
            0 => self.decide(port),
            left => Some(self.take_tcp(port, iov, how, num::size(left))),
        }
    }

    /// UNDECIDED, at the switch: has something come that tells? `None`: yes, and the mode has changed.
    pub(super) fn decide(&self, port: &impl Port) -> Option<Received> {
        let mut b = [0u8; LEN];
        let next = match port.tcp_recv(b.as_mut_ptr(), LEN, true) {
            Err(libc::EAGAIN) => return Some(Received::Empty),
            Ok(n) if n > 0 => match Frame::starts(&b[..n]) {
                None => return Some(Received::Empty),
                Some(false) => mode::TCP,
                Some(true) => mode::RING,
            },
            // As on the ring: an end without a frame, or an error, may have lost bytes. (A sender that had no answer ends so,
            // and loses none. But one that had it, and was killed with its daemon before its bytes landed, leaves exactly the
            // same: TCP at the switch, and nothing on the ring.)
            _ => mode::RING,
        };
        self.mode.store(next, SeqCst);
        None
    }

    /// On the ring, which is empty, TCP has these bytes: may they be the stream's, because nobody could tell the sender that
    /// its switch stands? Then they stay where they are until the link group is gone. A sender that has had the answer
    /// leaves by a frame if it is asked, and they are somebody else's if it does.
    pub(super) fn may_be_plain(
        &self,
        m: &Memory,
        port: &impl Port,
        b: &[u8],
    ) -> Result<bool, Reason> {
        if !self.is_untouched(m)? || self.is_left(m) {
            return Ok(false);
        }
        let starts = Frame::starts(b);
        if starts == Some(false) && !m.own_rx().word.load(Relaxed).has(rx::WANT_DOWN) {
            self.want_down(m, port);
        }
        Ok(starts != Some(true))
    }
}
