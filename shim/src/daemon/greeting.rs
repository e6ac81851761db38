//! The daemon's answer to our hello, and the credits it gives.

use super::datagram::Fds;
use super::{
    drop_connection, CREDITS, LISTENER, NEXT_TRY_MS, NOTICE, PROBE_S, READY, REFUSED, RING_LOG2,
    RING_MAX_LOG2,
};
use crate::state::table;
use crate::sys;
use core::sync::atomic::Ordering::*;
use lane::num;
use lane::proto::msg::ToShim;

/// Processes what the daemon says about itself.
pub(super) fn met(m: &ToShim, fds: &mut Fds) {
    match *m {
        ToShim::HelloAck {
            version: _,
            client: _,
            home,
            credits,
            ring_log2,
            ring_max_log2,
            probe_s,
        } => {
            PROBE_S.store(probe_s.into(), Relaxed);
            greeted(home, credits, (ring_log2.into(), ring_max_log2.into()), fds)
        }
        ToShim::Refused { reason } => {
            REFUSED.store(reason, Relaxed);
            drop_connection();
            NEXT_TRY_MS.store(sys::now_ms() + 60_000, Relaxed);
        }
        ToShim::Credit { n } => {
            CREDITS.fetch_add(num::signed(n.min(1024)), Relaxed);
        }
        _ => {}
    }
}

fn greeted(home: u64, credits: u32, (first, max): (u32, u32), fds: &mut Fds) {
    let Some(fd) = fds.take(0) else {
        drop_connection(); // there was no free number for the descriptor
        return NEXT_TRY_MS.store(sys::now_ms() + 1000, Relaxed);
    };
    if let Ok(p) = sys::map(fd, 4096, false) {
        NOTICE.store(p.cast(), Release);
    }
    sys::close(fd);
    let (least, most) = (lane::abi::RING_LOG2_MIN, lane::abi::RING_LOG2_MAX);
    let max = max.clamp(least, most);
    RING_MAX_LOG2.store(max, Relaxed);
    RING_LOG2.store(first.clamp(least, max), Relaxed);
    CREDITS.store(num::signed(credits.min(1024)), Relaxed);
    REFUSED.store(0, Relaxed);
    if let Some(t) = table::table() {
        t.header.home_number.store(num::low32(home), Relaxed);
    }
    READY.store(1, Release);
    if let Some(l) = LISTENER.get() {
        (l.greeted)();
    }
}
