//! What other code asks of a receiver: whether there is anything to read, and to tell the sender something. Nothing
//! here may take a byte.

use super::{mode, How, Received, RxState};
use crate::abi::{marks, rx, tx, Landed, RxFlags, TcpPos};
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// Would a receive find something right now? Asks the ring first, then TCP. Errors found on the way are kept for
    /// the receive. `None`: this direction is on TCP, ask the kernel.
    pub fn probe(&self, m: &Memory, port: &impl Port) -> Option<bool> {
        if self.error.is_set() {
            return Some(true);
        }
        let mut b = 0u8;
        let v = [libc::iovec {
            iov_base: (&raw mut b).cast(),
            iov_len: 1,
        }];
        let how = How {
            peek: true,
            look: true,
            ..How::default()
        };
        match self.recv(m, port, &mut Iov::new(&v), how) {
            Received::Empty => Some(false),
            Received::Tcp => None,
            Received::Error(e) => {
                self.error.put(e);
                Some(true)
            }
            _ => Some(true),
        }
    }

    /// Are there bytes on the ring? Cheap: one load of the peer's memory. Also true if the peer's word is wrong, so
    /// that the receive reports that.
    #[inline(always)]
    pub fn has_ring_bytes(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::RING | mode::LAST => m.peer_head().load(Acquire) != self.cursor.load(Relaxed),
            mode::FIN => self.frame_cursor.load(Relaxed) != self.cursor.load(Relaxed),
            _ => false,
        }
    }

    /// Has something happened in the peer's memory that a waiting receive must look at?
    #[inline(always)]
    pub fn has_news(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::RING => self.has_ring_bytes(m) || self.resumed(m),
            mode::LAST | mode::FIN => self.has_ring_bytes(m),
            mode::READY => {
                let s = m.peer_tx().state.load(Acquire);
                s.epoch() == self.epoch.load(Relaxed) && s.phase() != tx::NONE
            }
            mode::REVOKING => self.phase(m) > tx::DOWNING,
            mode::PREFIX => self.can_pass(m),
            _ => false,
        }
    }

    /// Number of bytes on the ring: for close, and [`RxState::unread`].
    pub fn ring_unread(&self, m: &Memory) -> u64 {
        if self.is_up() {
            self.head(m).map_or(0, |h| h - self.cursor.load(Relaxed))
        } else {
            0
        }
    }

    /// Would a receive find something right now? Does not ask the kernel. For epoll: `None` means "only the kernel
    /// knows" (TCP bytes come first), unless [`RxState::has_news`]. Changes nothing, so it needs no lock.
    pub fn ready(&self, m: &Memory) -> Option<bool> {
        match self.mode.load(Relaxed) {
            mode::RING => Some(self.has_ring_bytes(m) || self.error.is_set()),
            mode::FIN => Some(true), // bytes, or the end of file
            mode::LAST if self.has_ring_bytes(m) => Some(true),
            _ => None,
        }
    }

    /// Asks the sender to go down when it next looks.
    pub fn want_down(&self, m: &Memory, port: &impl Port) {
        if self.engaged() {
            self.flag(m, rx::WANT_DOWN);
            m.publish(port);
        }
    }

    /// Withdraws [`RxState::want_down`] if the sender has not acted on it.
    pub fn unwant_down(&self, m: &Memory, port: &impl Port) {
        let w = &m.own_rx().word;
        if self.engaged() {
            w.store(w.load(Relaxed).without(rx::WANT_DOWN), SeqCst);
            if m.is_remote() {
                m.publish(port); // a daemon has to forward it
            }
        }
    }

    pub(super) fn flag(&self, m: &Memory, flag: RxFlags) {
        let w = &m.own_rx().word;
        w.store(w.load(Relaxed).with(flag), SeqCst);
    }

    /// The application shuts its sending direction down, or closes: a FIN that follows is then no sign of death, and
    /// one that does not arrive is missed. `sent`: what this end has put on TCP (`UNKNOWN`: a daemon still brings
    /// something there, and nobody decides in the FIN's place).
    pub fn announce_end(&self, m: &Memory, port: &impl Port, sent: TcpPos) {
        self.announce(m, port, sent, marks::ENDED);
    }

    /// The process is about to end without a close, within the node, and goes to TCP first: whoever sees that sees that an end
    /// follows. (How much is on TCP then is said by [`RxState::announce_exit`].)
    pub fn will_exit(&self, m: &Memory) {
        let landed = Landed::at_tcp_pos(TcpPos::UNKNOWN);
        m.own_rx().landed.store(landed, Relaxed);
        // SeqCst: before the words that say that this direction is on TCP.
        m.own_rx().marks.fetch_or(marks::EXITED, SeqCst);
    }

    /// The process ends without a close, within the node: says what it has put on TCP, for a FIN that does not arrive.
    pub fn announce_exit(&self, m: &Memory, port: &impl Port, sent: TcpPos) {
        self.announce(m, port, sent, marks::EXITED);
    }

    fn announce(&self, m: &Memory, port: &impl Port, sent: TcpPos, mark: u32) {
        if !m.is_remote() {
            m.own_rx().landed.store(Landed::at_tcp_pos(sent), Relaxed);
        }
        // SeqCst: before the system call that sends the FIN, and after the words that the other end then reads.
        m.own_rx().marks.fetch_or(mark, SeqCst);
        if !m.is_remote() {
            m.publish(port);
        }
    }

    /// Is what TCP brings next a repetition of bytes that were read from the ring? (They have not all arrived yet.)
    pub fn awaits_repeated(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::LAST => !self.has_ring_bytes(m),
            mode::SKIP => true,
            _ => false,
        }
    }

    /// This end is about to reset the connection (across nodes: its daemon is).
    pub fn announce_reset(&self, m: &Memory, port: &impl Port) {
        m.own_rx().marks.fetch_or(marks::RESET, SeqCst); // as above
        if !m.is_remote() {
            m.publish(port);
        }
    }

    /// The application shuts its receiving direction down.
    pub fn announce_deaf(&self, m: &Memory) {
        m.own_rx().marks.fetch_or(marks::DEAF, SeqCst); // as above
    }

    /// This end called `connect`. A daemon needs to know that, because it reads the kernel's counters for this end.
    pub fn mark_client(&self, m: &Memory) {
        m.own_rx().marks.fetch_or(marks::SYN, Relaxed);
    }

    /// Has this end shut its sending direction down?
    pub fn has_ended(&self, m: &Memory) -> bool {
        m.own_rx().marks.load(Relaxed) & marks::ENDED != 0
    }

    /// Has this end shut both directions down?
    pub fn is_deaf(&self, m: &Memory) -> bool {
        let both = marks::ENDED | marks::DEAF;
        m.own_rx().marks.load(Relaxed) & both == both
    }

    /// After a shutdown that the kernel has done. If both directions are shut, the kernel answers with a reset
    /// whatever comes from now on, so the sender has to send to the kernel.
    pub fn shut(&self, m: &Memory, port: &impl Port) {
        if self.engaged() && self.is_deaf(m) {
            self.flag(m, rx::CLOSED);
            m.publish(port);
        }
    }

    /// This end closes: tells the sender that nobody will read. `sent` as in [`RxState::announce_end`].
    pub fn close(&self, m: &Memory, port: &impl Port, sent: TcpPos) {
        if self.engaged() {
            self.flag(m, rx::CLOSED);
        }
        self.announce_end(m, port, sent);
        if self.engaged() && m.is_remote() {
            m.publish(port);
        }
    }
}
