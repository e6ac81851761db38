//! Before this end shuts the last of both directions down: what is unread on its ring goes to its own kernel's queue. Later
//! nobody could put it there for who has the connection next, because a kernel that is to take nothing more answers what
//! comes with a reset.

use super::leave::await_peer;
use super::takeover::Asked;
use crate::state::{attached, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use core::sync::atomic::{AtomicU64, Ordering::*};
use lane::half::rx::Revoked;

/// Milliseconds for the other end, or the daemon in its stead, to begin; and for the bytes to come, which TCP keeps back until
/// earlier ones are acknowledged: as long as an acknowledgement may be delayed.
const BEGIN_MS: u64 = 200;
const COMING_MS: u64 = 250;
/// Milliseconds to begin when lately nobody did; and for how long that counts. (Otherwise a process that ends many
/// connections of a peer that is stopped would wait for one after the other.)
const AGAIN_MS: u64 = 5;
const IN_VAIN_MS: u64 = 2000;
/// Milliseconds without another byte after which there is no more room in TCP's queue, which cannot have all that lay unread.
const FULL_MS: u64 = 20;

/// Until then (CLOCK_MONOTONIC, ms) nobody is expected to begin.
static IN_VAIN_UNTIL_MS: AtomicU64 = AtomicU64::new(0);

/// What lay unread, as it comes into TCP's queue.
struct Coming {
    lay: u64,
    queued: u64,
    /// Since when it has been so much (CLOCK_MONOTONIC, ms).
    since_ms: u64,
}

impl Coming {
    /// Has everything come that will? `claimed`: the daemon has yet to finish.
    fn has_come(&mut self, fd: i32, now: u64, claimed: bool) -> bool {
        let queued =
            sys::ioctl_i32(fd, libc::FIONREAD).map_or(0, |n| u64::from(lane::num::bits(n)));
        if queued != self.queued {
            (self.queued, self.since_ms) = (queued, now);
        }
        let full = |window| self.lay > window && queued >= window / 2;
        (!claimed && queued >= self.lay)
            || now - self.since_ms >= FULL_MS && sys::tcp_window(fd).is_some_and(full)
    }
}

/// Brings the receiving direction to TCP if bytes are unread on its ring. If neither the other end nor a daemon does its
/// part, they stay on the ring, where this process reads them. (The caller holds the connection.)
pub fn bring_unread(i: u32) {
    let (c, l, began) = (table::conn(i), table::local(i), sys::now_ms());
    let begin_ms = match began < IN_VAIN_UNTIL_MS.load(Relaxed) {
        true => AGAIN_MS,
        false => BEGIN_MS,
    };
    let mut asked = Asked::new();
    let mut coming = None;
    loop {
        let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
            return;
        };
        let now = sys::now_ms();
        let waited = now - began;
        let fd = {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return;
            };
            let fd = l.fd.load(Relaxed);
            let port = Sock::leaving(fd, group);
            // (What a switch has left on TCP comes first, and counts, too.)
            let coming = coming.get_or_insert_with(|| Coming {
                lay: c.rx.unread(&m, &port).unwrap_or(0),
                queued: 0,
                since_ms: now,
            });
            if c.rx.is_up() && c.rx.ring_unread(&m) == 0 {
                return;
            }
            match c.rx.revoke(&m, &port) {
                Ok(Revoked::Clear) if waited > COMING_MS => return,
                Ok(Revoked::Clear) if coming.has_come(fd, now, c.rx.is_coming(&m)) => return,
                Ok(Revoked::Clear) => {}
                Ok(Revoked::Pending) if waited > begin_ms && c.rx.go_on(&m) => {
                    return IN_VAIN_UNTIL_MS.store(now + IN_VAIN_MS, Relaxed);
                }
                Ok(Revoked::Pending) if waited > BEGIN_MS + COMING_MS => return,
                Ok(Revoked::Pending) => {}
                Ok(Revoked::Impossible) | Err(_) => return,
            }
            fd
        };
        if c.rx.engaged() && asked.is_due() {
            asked.ask(i);
        }
        await_peer(i, fd, asked.wait_ms());
    }
}
