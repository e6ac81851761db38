//! The sender's way up, from TCP to the ring. No byte may be put on the ring if the receiver does not know that it
//! has to look for it there.

use super::{mode, TxState};
use crate::abi::{rx, tx, Epoch};
use crate::half::mem::Memory;
use crate::half::{Counted, Port};
use crate::prim::fence_after_rmw;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl TxState {
    /// Switches up. `false`: not now. `Err`: bytes were sent without a hook; never promote this connection.
    pub fn try_up(&self, m: &Memory, port: &impl Port) -> Result<bool, Reason> {
        if self.mode.load(Relaxed) != mode::TCP {
            return Ok(false);
        }
        let Some(epoch) = self.ready_epoch(m) else {
            return Ok(false);
        };
        // SYNC native-calls: we change the mode, then look whether native calls are running; `enter_native` counts
        // itself in, then looks at the mode.
        self.mode.swap(mode::SWITCH, SeqCst);
        fence_after_rmw();
        let up = self.up_checks(m, port);
        if !matches!(up, Ok(true)) {
            self.mode.store(mode::TCP, SeqCst);
            return up;
        }
        let tcp_pos = self.tcp_pos.load(Relaxed);
        let head = self.head.load(Relaxed);
        if !m.is_remote() {
            self.epoch.store(epoch, Relaxed);
        }
        self.peer_cursor.store(head, Relaxed);
        self.full_since_ms.store(0, Relaxed);
        let counted = Counted {
            epoch,
            again: self.again.load(Relaxed),
            ring: self.ring_bytes.load(Relaxed),
        };
        self.baseline.store(counted, || {
            let w = m.own_tx();
            w.up_tcp_pos.store(tcp_pos, Relaxed);
            w.up_start.store(head, Relaxed);
        });
        self.say(m, port, epoch, tx::UP);
        if m.is_remote() {
            // The remote daemon does on its node what the rest of this function does: see `answered`.
            self.mode.store(mode::ASK, Relaxed);
            return Ok(self.answered(m, port));
        }
        // SYNC retreat: we have switched (a full fence is in `say`), now we look; the receiver revokes, then looks
        // for our switch. If it did not see the switch, it may already be reading TCP without limit, or be ready for
        // a later epoch: then nothing may go to the ring.
        let word = m.peer_rx().word.load(SeqCst);
        if word.epoch() != epoch || word.has(rx::REVOKED) {
            self.settle(m, port, epoch, tx::RESUMED);
            return Ok(false);
        }
        self.mode.store(mode::RING, Relaxed);
        self.ups.fetch_add(1, Relaxed);
        Ok(true)
    }

    /// Across nodes: was the switch that we asked for granted? Any word other than a readiness of this epoch means
    /// no: the remote daemon looks at its receiver after it has stored the switch (SYNC retreat), and reports what it
    /// found.
    pub(super) fn answered(&self, m: &Memory, port: &impl Port) -> bool {
        let epoch = self.asked_epoch(m);
        // Acquire: pairs with the daemon's Release, which follows the remote node's acceptance (`ACCEPTED`).
        let word = m.peer_rx().word.load(Acquire);
        let ours = word.epoch() == epoch;
        if !ours || word.has(rx::REVOKED) && !word.has(rx::ACCEPTED) {
            // The epoch is not used up: the receiver may offer it again.
            self.settle(m, port, epoch, tx::RESUMED);
            return false;
        }
        if !word.has(rx::ACCEPTED) {
            return false;
        }
        self.epoch.store(epoch, Relaxed);
        self.mode.store(mode::RING, Relaxed);
        self.ups.fetch_add(1, Relaxed);
        true
    }

    /// The epoch of the switch that we have asked for; it becomes ours when it is granted.
    pub(super) fn asked_epoch(&self, m: &Memory) -> Epoch {
        m.own_tx().state.load(Relaxed).epoch()
    }

    /// Has the answer arrived that [`mode::ASK`] waits for?
    pub(super) fn has_answer(&self, m: &Memory) -> bool {
        let word = m.peer_rx().word.load(Acquire);
        word.epoch() != self.asked_epoch(m) || word.has(rx::ACCEPTED | rx::REVOKED)
    }

    fn up_checks(&self, m: &Memory, port: &impl Port) -> Result<bool, Reason> {
        if self.native_calls.load(SeqCst) != 0 {
            return Ok(false);
        }
        let Some(kernel) = Self::kernel_position(m, port) else {
            return Ok(false);
        };
        if kernel != self.tcp_pos.load(Relaxed) {
            return Err(Reason::Bypassed);
        }
        let loc = self.loc.load(Relaxed).loc();
        Ok(loc.is_some_and(|l| m.own.ring(l).is_some()))
    }
}
