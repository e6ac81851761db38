//! Before this end shuts the last of both directions down: what is unread on its ring goes to its own kernel's queue, and
//! across nodes the receiving direction to TCP whatever is unread: see `lane::half::rx::BeforeDeaf`.

use super::leave::await_peer;
use super::takeover::Asked;
use crate::daemon;
use crate::state::groups::LinkGroup;
use crate::state::{attached, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use core::sync::atomic::{AtomicU64, Ordering::*};
use lane::half::leave::LINK_DEAD_MS;
use lane::half::rx::BeforeDeaf;

/// Milliseconds for the other end, or the daemon in its stead, to begin; and for the bytes to come, which TCP keeps back until
/// earlier ones are acknowledged: as long as an acknowledgement may be delayed. A daemon that is there begins within a
/// millisecond, but on a machine that has much to do it may not run for a quarter of a second.
const BEGIN_MS: u64 = 1000;
const ALONE_MS: u64 = 200;
const COMING_MS: u64 = 250;
/// Milliseconds to begin across nodes: the daemons notice first that a link is dead, and then have their ends come down, if
/// there is no other one.
const BEGIN_ACROSS_MS: u64 = LINK_DEAD_MS + 500;
/// Milliseconds to begin when lately nobody did; and for how long that counts. (Otherwise a process that ends many
/// connections of a peer that is stopped would wait for one after the other.)
const AGAIN_MS: u64 = 5;
const IN_VAIN_MS: u64 = 2000;
/// Milliseconds without another byte after which there is no more room in TCP's queue, which cannot have all that lay unread.
const FULL_MS: u64 = 20;

/// Until then (CLOCK_MONOTONIC, ms) nobody is expected to begin: on this node, and across nodes.
static IN_VAIN_UNTIL_MS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

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

/// How long a call waits, in milliseconds.
struct Patience {
    begin: u64,
    /// From then on (CLOCK_MONOTONIC) what is on TCP, or on its way there, has so long to come.
    coming_ms: u64,
    in_vain_until: &'static AtomicU64,
}

impl Patience {
    fn of(group: &LinkGroup, now: u64) -> Self {
        let across = group.is_remote();
        let begin = match () {
            () if across => BEGIN_ACROSS_MS,
            () if daemon::has_ended() => ALONE_MS,
            () => BEGIN_MS,
        };
        let in_vain_until = &IN_VAIN_UNTIL_MS[usize::from(across)];
        Patience {
            begin: match now < in_vain_until.load(Relaxed) {
                true => AGAIN_MS,
                false => begin,
            },
            coming_ms: if across { now + begin } else { 0 },
            in_vain_until,
        }
    }

    /// Is nobody expected to begin any more? (Time in which this process has not run, because it was stopped or throttled, does
    /// not count.)
    fn is_over(&self, waited: u64, asked: &Asked) -> bool {
        waited > self.begin && (self.begin == AGAIN_MS || asked.has_waited_enough())
    }
}

/// Brings the receiving direction to TCP, if it is to be there when nothing can come any more. If neither the other end nor
/// a daemon does its part, the shutdown goes on. (The caller holds the connection.)
pub fn bring_unread(i: u32) {
    let (c, l, began) = (table::conn(i), table::local(i), sys::now_ms());
    let mut asked = Asked::new();
    let (mut coming, mut patience) = (None, None);
    let mut on_tcp_ms = None;
    loop {
        // (A daemon that is gone asks no one for anything; the other node's has its end come down by itself.)
        let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !(g.is_remote() && g.is_dead()))
        else {
            return;
        };
        let now = sys::now_ms();
        let waited = now - began;
        let most = patience.get_or_insert_with(|| Patience::of(group, began));
        let fd = {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return;
            };
            if !attached::is_still(c, group, &m) {
                return; // given back meanwhile: it is on TCP
            }
            let fd = l.fd.load(Relaxed);
            let port = Sock::leaving(fd, group);
            // (What a switch has left on TCP comes first, and counts, too.)
            let coming = coming.get_or_insert_with(|| Coming {
                lay: c.rx.unread(&m, &port).unwrap_or(0),
                queued: 0,
                since_ms: now,
            });
            match c.rx.before_deaf(&m, &port) {
                Ok(BeforeDeaf::Stays | BeforeDeaf::Impossible) | Err(_) => return,
                Ok(BeforeDeaf::OnTcp) => {
                    // (Counted from here, not from the call: the daemon may have begun late, and may be late in the middle.)
                    let since = most.coming_ms.max(*on_tcp_ms.get_or_insert(now));
                    let claimed = c.rx.is_coming(&m);
                    let late = since + if claimed { BEGIN_MS } else { COMING_MS };
                    if now > late || coming.has_come(fd, now, claimed) {
                        return;
                    }
                }
                Ok(BeforeDeaf::Sender)
                    if most.is_over(waited, &asked) && c.rx.deaf_all_the_same(&m) =>
                {
                    return most.in_vain_until.store(now + IN_VAIN_MS, Relaxed);
                }
                Ok(BeforeDeaf::Sender) if waited > BEGIN_ACROSS_MS + COMING_MS => return,
                Ok(BeforeDeaf::Sender) => {}
            }
            fd
        };
        if c.rx.engaged() && asked.is_due() {
            asked.ask(i);
        }
        await_peer(i, fd, asked.wait_ms());
    }
}
