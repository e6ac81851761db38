//! Before this end shuts the last of both directions down: what is unread on its ring goes to its own kernel's queue, and
//! across nodes the receiving direction to TCP whatever is unread: see `lane::half::rx::BeforeDeaf`.

use super::leave::await_peer;
use super::takeover::Asked;
use crate::daemon;
use crate::state::groups::LinkGroup;
use crate::state::unanswered::Unanswered;
use crate::state::{attached, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::half::leave::LINK_DEAD_MS;
use lane::half::rx::BeforeDeaf;
use lane::half::Memory;

/// Milliseconds for the other end, or the daemon in its stead, to begin; and for the bytes to come, which TCP keeps back until
/// earlier ones are acknowledged: as long as an acknowledgement may be delayed. A daemon that is there begins within a
/// millisecond, but on a machine that has much to do it may not run for a quarter of a second.
const BEGIN_MS: u64 = 1000;
const ALONE_MS: u64 = 200;
const COMING_MS: u64 = 250;
/// Milliseconds to begin across nodes: the daemons notice first that a link is dead, and then have their ends come down, if
/// there is no other one.
const BEGIN_ACROSS_MS: u64 = LINK_DEAD_MS + 500;
/// The least of these, when lately nobody began: enough for a daemon that is not late (across nodes, the other one gives its
/// end 20 ms to do it).
const LEAST_MS: u64 = 5;
const LEAST_ACROSS_MS: u64 = 50;
/// Who waits for less than this many milliseconds does so because nobody began lately.
const SHORT_MS: u64 = 100;
/// Milliseconds without another byte after which there is no more room in TCP's queue, which cannot have all that lay unread.
const FULL_MS: u64 = 20;

/// What was asked of the daemon, and not even read by it.
static UNREAD: Unanswered = Unanswered::none();

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
    /// The same, if the daemon does not read what it is asked.
    begin_unread: u64,
    /// From then on (CLOCK_MONOTONIC) what is on TCP, or on its way there, has so long to come.
    coming_ms: u64,
}

impl Patience {
    fn of(group: &LinkGroup, now: u64) -> Self {
        let across = group.is_remote();
        let (most, least) = match () {
            () if across => (BEGIN_ACROSS_MS, LEAST_ACROSS_MS),
            () if daemon::has_ended() => (ALONE_MS, LEAST_MS),
            () => (BEGIN_MS, LEAST_MS),
        };
        let begin = group.unanswered.patience(most, least, now);
        Patience {
            begin,
            begin_unread: match across {
                true => begin,
                false => UNREAD.patience(begin, least, now),
            },
            coming_ms: if across { now + most } else { 0 },
        }
    }

    /// Is nobody expected to begin any more? (Time in which this process has not run, because it was stopped or throttled, does
    /// not count.)
    fn is_over(&self, group: &LinkGroup, waited: u64, asked: &Asked) -> bool {
        let over = |most: u64| waited > most && (most < SHORT_MS || asked.has_waited_enough());
        // (A daemon that has read what it is asked will act, however late it was before.)
        over(self.begin) || over(self.begin_unread) && is_unread(group)
    }
}

/// Has the daemon that could act yet to read that it is asked?
fn is_unread(group: &LinkGroup) -> bool {
    !group.is_remote() && !daemon::has_read_all()
}

/// Nobody has begun.
fn in_vain(group: &LinkGroup) -> &Unanswered {
    match is_unread(group) {
        true => &UNREAD,
        false => &group.unanswered,
    }
}

/// The sender, or a daemon in its stead, has begun.
fn has_begun(c: &Conn, group: &LinkGroup, m: &Memory) {
    group.unanswered.clear();
    if c.rx.is_coming(m) {
        UNREAD.clear();
    }
}

/// Brings the receiving direction to TCP, if it is to be there when nothing can come any more. If neither the other end nor
/// a daemon does its part, the shutdown goes on. (The caller holds the connection.)
pub fn bring_unread(i: u32) {
    let (c, l, began) = (table::conn(i), table::local(i), sys::now_ms());
    let mut asked = Asked::new();
    let (mut coming, mut patience) = (None, None);
    let (mut on_tcp_ms, mut awaited) = (None, false);
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
                    if awaited {
                        has_begun(c, group, &m);
                    }
                    // (Counted from here, not from the call: the daemon may have begun late, and may be late in the middle.)
                    let since = most.coming_ms.max(*on_tcp_ms.get_or_insert(now));
                    let claimed = c.rx.is_coming(&m);
                    let late = since + if claimed { BEGIN_MS } else { COMING_MS };
                    if now > late || coming.has_come(fd, now, claimed) {
                        return;
                    }
                }
                Ok(BeforeDeaf::Sender)
                    if most.is_over(group, waited, &asked) && c.rx.deaf_all_the_same(&m) =>
                {
                    return in_vain(group).add(now);
                }
                Ok(BeforeDeaf::Sender) if waited > BEGIN_ACROSS_MS + COMING_MS => return,
                Ok(BeforeDeaf::Sender) => awaited = true,
            }
            fd
        };
        if c.rx.engaged() && asked.is_due() {
            asked.ask(i);
        }
        await_peer(i, fd, asked.wait_ms());
    }
}
