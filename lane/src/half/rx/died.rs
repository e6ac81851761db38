//! A process died while it held the lock of a receiving direction, perhaps in a system call that took bytes from TCP
//! and that it could not count any more: see `TxState::holder_died`.

use super::{mode, RxState};
use crate::abi::TcpPos;
use crate::half::{Memory, Port};
use crate::num;
use crate::proto::frame::LEN;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// Called once, by the thread that takes over the lock. After an error the connection has to be reset.
    pub fn holder_died(&self, m: &Memory, port: &impl Port) -> Result<(), Reason> {
        let mode = self.mode.load(Relaxed);
        if matches!(mode, mode::RING | mode::LAST | mode::FIN) {
            // It may have taken bytes off the ring that it had not counted yet.
            let (start, cursor) = (
                m.peer_tx().up_start.load(Relaxed),
                self.cursor.load(Relaxed),
            );
            let epoch = self.epoch.load(Relaxed);
            self.baseline
                .recount(&self.ring_bytes, epoch, start, cursor);
        }
        if mode == mode::TCP {
            return Ok(()); // native calls count themselves
        }
        let tcp_pos = self.tcp_pos.load(Relaxed);
        let taken = port
            .tcp_taken()
            .map_or(0, |n| TcpPos::new(n).since(tcp_pos));
        if taken == 0 || taken > 1 << 32 {
            return Ok(());
        }
        match mode {
            mode::SKIP | mode::RING => self.took_again(taken),
            _ => self.tcp_pos.store(tcp_pos + taken, Relaxed),
        }
        match mode {
            mode::SKIP => {
                let left = self.skip.load(Relaxed);
                self.skip.store(left.saturating_sub(taken), Relaxed);
                Ok(())
            }
            // A part of a frame is recorded before it is consumed.
            mode::RING => {
                let have = u64::from(self.got_len.load(Relaxed)) + taken;
                if have > LEN as u64 {
                    return Err(Reason::Foreign);
                }
                self.got_len.store(num::low32(have % LEN as u64), Relaxed);
                match have == LEN as u64 {
                    true => self.framed(m.is_remote(), &self.got_bytes()),
                    false => Ok(()),
                }
            }
            // As on TCP: what its call has taken is gone with it.
            _ => Ok(()),
        }
    }
}
