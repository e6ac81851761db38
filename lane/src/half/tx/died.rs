//! A process died while it held the lock of a sending direction, perhaps in a system call whose effect it could not
//! record any more. The next holder of the lock first repairs the state, from what was published and what the kernel
//! has counted.

use super::{mode, TxState};
use crate::abi::{rx, takeover, tx};
use crate::half::mem::Memory;
use crate::half::Port;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl TxState {
    /// Called once, by the thread that takes over the lock. After an error the connection has to be reset.
    pub fn holder_died(&self, m: &Memory, port: &impl Port) -> Result<(), Reason> {
        // It may have put bytes on the ring, and published them, that it had not counted yet. (Off the ring its head
        // stands still.)
        let (start, head) = (m.own_tx().up_start.load(Relaxed), self.head.load(Relaxed));
        let epoch = self.epoch.load(Relaxed);
        self.baseline.recount(&self.ring_bytes, epoch, start, head);
        if self.is_taken_over(m) {
            return Ok(()); // the daemon continues with it
        }
        let state = m.own_tx().state.load(Relaxed);
        let now = self.mode.load(Relaxed);
        let ours = now == mode::ASK || state.epoch() == self.epoch.load(Relaxed);
        match now {
            mode::SWITCH => self.finish_switch(m, port),
            // It had already announced that it is on TCP: see `settle`.
            mode::RING | mode::DRAIN | mode::ASK if ours && state.phase() > tx::DOWNING => {
                self.mode.store(mode::TCP, Release);
            }
            mode::RING | mode::DRAIN => {
                self.find_drain(m, port)?;
                if ours && state.phase() == tx::DOWNING {
                    self.down(m, port)?; // it was about to go down, or going down
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// It was about to switch up: what counts is whether it has announced that. See `try_up`.
    fn finish_switch(&self, m: &Memory, port: &impl Port) {
        let state = m.own_tx().state.load(Relaxed);
        let epoch = state.epoch();
        let own = self.epoch.load(Relaxed);
        let said = state.phase() == tx::UP;
        if said && m.is_remote() && epoch != own {
            self.mode.store(mode::ASK, Relaxed);
        } else if said && !m.is_remote() && epoch == own {
            // SYNC retreat: it may have looked at the word, or not.
            let word = m.peer_rx().word.load(SeqCst);
            match word.epoch() == epoch && !word.has(rx::REVOKED) {
                true => self.mode.store(mode::RING, Relaxed),
                false => {
                    self.settle(m, port, epoch, tx::RESUMED);
                }
            }
        } else {
            self.mode.store(mode::TCP, SeqCst);
        }
    }

    /// How much of a way down is on TCP? Since the switch up, nothing else was put there.
    fn find_drain(&self, m: &Memory, port: &impl Port) -> Result<(), Reason> {
        let said = m.own_rx().takeover.load(Relaxed);
        let what = said.phase();
        let begun = matches!(what, takeover::DOWN | takeover::PLAIN | takeover::FIN);
        if said.epoch() != self.epoch.load(Relaxed) || !begun {
            return Ok(());
        }
        let Some(kernel) = Self::kernel_position(m, port) else {
            return Ok(()); // TCP has ended, and reports that itself
        };
        let up = m.own_tx().up_tcp_pos.load(Relaxed);
        let sent = kernel.checked_since(up).ok_or(Reason::Sync)?;
        let known = self.tcp_pos.load(Relaxed).since(up);
        self.tcp_pos.store(up, Relaxed);
        self.resume_as(what, sent, m.own_rx().takeover_at.load(Relaxed))?;
        self.recount_again(m, sent.saturating_sub(known));
        Ok(())
    }
}
