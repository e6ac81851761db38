//! The wait of one call on one connection: a sleep in the kernel that the doorbell and TCP can end.
//!
//! Of the threads asleep on one link group, only the leader polls the doorbell (`waiters`). Epoll sets have the
//! doorbell in their inner set, and a thread that drains it there forwards the news to all other sleepers of the link
//! group as well.

use crate::readiness::engine::{nap, Patience};
use crate::readiness::few;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::state::waiters::{join, leave, slot, wake_waiter, Place};
use crate::state::{attached, signals};
use crate::sys::{pids, real, thread};
use crate::tcp::ends;
use crate::tcp::port::Sock;
use crate::{daemon, sets};
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::half::Memory;
use lane::{notify, num};

/// What woke a waiter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woke {
    /// Something may have changed: look again. `kernel`: ask TCP, too.
    Look {
        kernel: bool,
    },
    Timeout,
    /// A signal has come, and the call must end with EINTR.
    Interrupted,
}

/// What a call waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    Data,
    /// The rest of the bytes that a receive has begun to take; an urgent byte ends the wait.
    Rest,
    Space,
}

/// The doorbell of `group` was drained: wakes all others in this process for whom it may have been.
pub fn forward(group: &LinkGroup, me: Option<usize>, set: Option<usize>) {
    for (w, word) in group.waiters.iter().enumerate() {
        let mut v = word.load(SeqCst);
        while v != 0 {
            let i = w * 64 + v.trailing_zeros() as usize;
            v &= v - 1;
            if Some(i) == me {
                continue;
            }
            let news = match slot(i).map_or(0, |s| s.conn.load(Relaxed)) {
                0 => true,
                c => has_news(c - 1),
            };
            if news {
                wake_waiter(i);
            }
        }
    }
    for (w, word) in group.sets.iter().enumerate() {
        let mut v = word.load(SeqCst);
        while v != 0 {
            let i = w * 64 + v.trailing_zeros() as usize;
            v &= v - 1;
            if Some(i) != set {
                sets::notify_if_waiting(i);
            }
        }
    }
}

fn has_news(i: u32) -> bool {
    let c = table::conn(i);
    match attached::of(c, table::local(i)) {
        Some((group, m)) => {
            c.rx.has_news(&m)
                || ends::is_pending(c, table::local(i), group, &m)
                || c.tx.has_work(&m)
                || (c.tx.is_up() && c.tx.writable(&m))
                || !c.rx.engaged()
        }
        None => true,
    }
}

/// Waits until connection `i` may have data or space. Blocks in libc's `poll`, a cancellation point, with no lock
/// held.
///
/// The caller holds the connection. `timeout_ms`: -1 for ever. `any`: a handler with SA_RESTART ends the call,
/// too, as it does if the application has set a time-out (SO_RCVTIMEO, SO_SNDTIMEO; signal(7)) or a part is done.
/// Spurious returns are fine: callers look and come again.
pub fn wait(i: u32, c: &Conn, l: &Local, what: For, timeout_ms: i64, any: bool) -> Woke {
    let Some((group, m)) = attached::of(c, l) else {
        return Woke::Look { kernel: true };
    };
    if daemon::pending() {
        daemon::pump();
        return Woke::Look { kernel: false };
    }
    let end = ends::left_ms(c, l, group, &m);
    if end == 0 {
        return Woke::Look { kernel: true };
    }
    // A call that continues after an interruption must not change errno.
    crate::preserving_errno(
        || match sleep(i, c, group, &m, what, (timeout_ms, end), any) {
            _ if thread::interrupted(any) => Woke::Interrupted,
            Woke::Interrupted if !foreign(any) => Woke::Look { kernel: true },
            woke => woke,
        },
    )
}

/// A sleeper of a link group: its place, if there was one for it, and whether it is the link group's leader.
struct Seat<'a> {
    group: &'a LinkGroup,
    place: Place,
    leader: bool,
}

impl<'a> Seat<'a> {
    /// A forked child shares the parent's doorbell, which it must not drain: it gets no place, and naps.
    fn take(i: u32, c: &Conn, group: &'a LinkGroup) -> Self {
        let mine = c.owner_pid.load(Relaxed) == pids::me();
        let place = if mine { Place::of(i) } else { Place::none() };
        let leader = place.index().is_some_and(|w| join(group, w));
        Seat {
            group,
            place,
            leader,
        }
    }

    /// `notified`: its eventfd was readable.
    fn give(&self, notified: bool) {
        if let Some(w) = self.place.index() {
            leave(self.group, w, self.leader);
        }
        self.place.give(notified);
    }
}

/// `ms`: the time-out, and the time until an end is to be reported (see `ends`).
fn sleep(
    i: u32,
    c: &Conn,
    group: &LinkGroup,
    m: &Memory,
    what: For,
    ms: (i64, i64),
    any: bool,
) -> Woke {
    let enter = || {
        let seat = Seat::take(i, c, group);
        (seat, table::local(i).fd.load(SeqCst)) // SYNC moved
    };
    let work = || c.tx.on_lane() && c.tx.has_work(m);
    let news = |fd: i32| {
        // Another lane may have been attached since the caller looked.
        let now = attached::of(c, table::local(i));
        let same = now.is_some_and(|(now, _)| core::ptr::eq(now, group));
        // An end that was announced since then, while nobody was counted asleep, is no news that rings.
        let ended = || ms.1 < 0 && ends::is_pending(c, table::local(i), group, m);
        match what {
            _ if !same || ended() => true,
            // A drain is no work for this wait, which only listens to TCP's buffer: see `events`.
            For::Data | For::Rest => c.rx.has_news(m) || work() && !attached::is_attended(c),
            For::Space if c.tx.awaits(m) => c.tx.has_work(m),
            For::Space => c.tx.is_up() && c.tx.want_space(m, &Sock::new(fd, group)),
        }
    };
    let ((seat, _), slept) = notify::rest(
        enter,
        |(_, fd)| news(*fd),
        |(seat, fd)| listen(seat, (*fd, events(c, m, what)), work(), ms, any),
    );
    let (woke, notified) = slept.unwrap_or((Woke::Look { kernel: false }, false));
    seat.give(notified);
    woke
}

/// What the wait listens to on TCP.
fn events(c: &Conn, m: &Memory, what: For) -> i16 {
    let tx_native = what == For::Space && !c.tx.is_up() && !c.tx.awaits(m);
    match what {
        For::Data | For::Rest
            if c.tx.mode.load(Relaxed) == lane::half::tx::mode::DRAIN && !c.tx.awaits(m) =>
        {
            libc::POLLIN | libc::POLLRDHUP | libc::POLLOUT
        }
        For::Data => libc::POLLIN | libc::POLLRDHUP,
        For::Rest => libc::POLLIN | libc::POLLRDHUP | libc::POLLPRI,
        For::Space if tx_native => libc::POLLOUT,
        For::Space => 0,
    }
}

/// Milliseconds of one sleep. `wary`: it has to be short, for another thread's work or because the doorbell is muted.
fn sleep_ms(seat: &Seat, wary: bool, (timeout_ms, end): (i64, i64)) -> i64 {
    let mut t = ends::sooner(nap(timeout_ms, seat.place.index().is_some()), end);
    if !seat.leader && !(0..1000).contains(&t) {
        t = 1000; // a follower checks now and then that there is a leader
    }
    if wary && !(0..Patience::NAP_MS).contains(&t) {
        t = Patience::NAP_MS;
    }
    t
}

/// Sleeps until TCP has one of `events` on `fd`, or the doorbell, another thread, the daemon or the time ends it. Also
/// returns whether another thread did.
fn listen(
    seat: &Seat,
    (fd, events): (i32, i16),
    work: bool,
    ms: (i64, i64),
    any: bool,
) -> (Woke, bool) {
    let Seat {
        group,
        place,
        leader,
    } = seat;
    let entry = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    // Asked once: with two answers, the sleep could be a long one without the doorbell.
    let muted = *leader && group.is_muted();
    let bell = match *leader && !muted {
        true => group.audible(),
        false => -1,
    };
    let mut t = sleep_ms(seat, work || muted, ms);
    let mut p = [
        entry(fd, events),
        entry(place.efd(), libc::POLLIN),
        entry(bell, libc::POLLIN),
        entry(daemon::fd(), libc::POLLIN),
    ];
    if let Some(tab) = table::table() {
        tab.header.stats.sleeps.fetch_add(1, Relaxed);
    }
    let undo = || seat.give(true);
    let efd = p[1].fd;
    let poll = |p: &mut [libc::pollfd], t: i64| {
        thread::asleep(efd, any, place.in_sleep(), || {
            // SAFETY: a valid array for the call. Nothing is held but the place among the waiters.
            unsafe { real::poll(p.as_mut_ptr(), p.len() as u64, num::millis(t)) }
        })
    };
    let n = thread::or_undo(&undo, || match poll(&mut p, t) {
        // There are more entries than descriptors are allowed.
        -1 if crate::errno() == libc::EINVAL => {
            let asleep = |f: &dyn Fn() -> i32| thread::asleep(efd, any, place.in_sleep(), f);
            few::poll(&mut p, &mut t, core::ptr::null(), asleep)
        }
        n => n,
    });
    let woke = match n {
        0 if ms.0 >= 0 && t >= ms.0 => Woke::Timeout,
        0 => Woke::Look { kernel: true },
        n if n < 0 => Woke::Interrupted, // perhaps: the caller decides by errno
        _ => Woke::Look {
            kernel: p[0].revents != 0,
        },
    };
    if n > 0 && p[2].revents != 0 {
        if group.drain_bell() == notify::doorbell::Drained::Gone {
            group.gone();
        }
        forward(group, place.index(), None);
    }
    if n > 0 && p[3].revents != 0 {
        daemon::pump();
    }
    if n == 0 && daemon::fd() < 0 {
        daemon::ensure();
    }
    (woke, n > 0 && p[1].revents != 0)
}

/// A sleep was interrupted, and no handler that we know of has run: does the call end with EINTR? We cannot see
/// which handler it was, so the call continues only if all of them have SA_RESTART.
fn foreign(any: bool) -> bool {
    crate::errno() == libc::EINTR && (any || signals::foreign_cut())
}
