//! `poll`, `select` and their `p` forms over promoted connections.

use crate::epoll::{self, IN, OUT};
use crate::fdtab::{self, Fd};
use crate::links::Link;
use crate::table;
use crate::wait::{self, Place};
use crate::{control, promote, sys};
use core::sync::atomic::Ordering::*;
use libc::{pollfd, POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP};
use link::family::flag;
use link::lane::tx;

const RDNORM: i16 = libc::POLLRDNORM;
const WRNORM: i16 = libc::POLLWRNORM;
/// Entries kept on the stack; more take a mapping.
const STACK: usize = 64;
/// Links one wait can sleep on; with more it naps.
const LINKS: usize = 64;

/// Does any entry concern a lane, or (in small sets) a connection that the daemon may ask for? Also
/// the place where watched epoll sets are noticed.
fn concerned(fds: &[pollfd]) -> bool {
    let mut any = false;
    let heard = control::fd() >= 0;
    for p in fds {
        match fdtab::get(p.fd) {
            Fd::Conn(i) => {
                let c = table::conn(i);
                if c.flags.load(Relaxed) & flag::WATCHED == 0 {
                    c.flags.fetch_or(flag::WATCHED, Relaxed);
                    promote::watched(i, c);
                }
                if c.flags.load(Relaxed) & flag::LANE != 0 {
                    promote::try_ready(i, c, table::local(i));
                    any |= promote::engaged(c);
                }
                any |= heard && fds.len() <= STACK / 2 && promote::on_call(c);
            }
            Fd::Set(s) => epoll::nest(s),
            _ => {}
        }
    }
    any
}

/// `poll` with a time-out in milliseconds (-1: for ever). `native(fds, n, ms)` is the application's
/// own call; it blocks and is a cancellation point.
///
/// # Safety
/// `fds` is the application's array.
pub unsafe fn poll(
    fds: &mut [pollfd],
    timeout_ms: i64,
    native: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    if control::pending() {
        control::pump();
    }
    if !concerned(fds) {
        let watch = POLLIN | RDNORM | POLLRDHUP;
        if let Some(r) = natively(fds, watch, |fds| {
            native(fds.as_mut_ptr(), fds.len(), timeout_ms)
        }) {
            return r;
        }
    }
    // SAFETY: passed on.
    unsafe { poll_lanes(fds, timeout_ms, native) }
}

/// Runs a native wait during which none of the connections watched for `watch` may switch. `None`:
/// one of them is switching already.
fn natively(
    fds: &mut [pollfd],
    watch: i16,
    native: impl FnOnce(&mut [pollfd]) -> i32,
) -> Option<i32> {
    let p = fds.as_mut_ptr();
    let n = fds.len();
    entered(
        fds,
        |f| f.events & watch != 0,
        |_| true,
        || {
            // SAFETY: the same array; `entered` looks at it only before and after.
            native(unsafe { core::slice::from_raw_parts_mut(p, n) })
        },
    )
}

/// The same for the connections of `which` that are watched for data.
fn natively_if(
    fds: &[pollfd],
    which: impl Fn(u32) -> bool,
    native: impl FnOnce() -> i32,
) -> Option<i32> {
    let watch = POLLIN | RDNORM | POLLRDHUP;
    entered(fds, |f| f.events & watch != 0, which, native)
}

fn entered(
    fds: &[pollfd],
    watched: impl Fn(&pollfd) -> bool,
    which: impl Fn(u32) -> bool,
    native: impl FnOnce() -> i32,
) -> Option<i32> {
    // Which connections were entered is remembered: descriptors may change hands meanwhile.
    let mut stack = [u32::MAX; 4 * STACK];
    let mut mapped: Option<(*mut u8, usize)> = None;
    let entered: &mut [u32] = if fds.len() <= stack.len() {
        &mut stack
    } else {
        let bytes = fds.len() * 4;
        let p = sys::map_private(bytes).ok()?;
        mapped = Some((p, bytes));
        // SAFETY: a fresh zeroed mapping of that many words, unmapped at the end.
        unsafe { core::slice::from_raw_parts_mut(p.cast(), fds.len()) }
    };
    let mut n = 0;
    let mut all = true;
    for p in fds.iter() {
        if let Some(i) = fdtab::conn(p.fd).filter(|i| watched(p) && which(*i)) {
            if !table::conn(i).rx.enter_native() {
                all = false;
                break;
            }
            entered[n] = i;
            n += 1;
        }
    }
    let r = all.then(native);
    for i in &entered[..n] {
        table::conn(*i).rx.leave_native(0);
    }
    if let Some((p, bytes)) = mapped {
        sys::unmap(p, bytes);
    }
    r
}

/// # Safety
/// As [`poll`].
unsafe fn poll_lanes(
    fds: &mut [pollfd],
    timeout_ms: i64,
    native: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let n = fds.len();
    let extra = LINKS + 2;
    let none = pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    };
    let mut stack = [none; STACK + LINKS + 2];
    let mut mapped: Option<(*mut u8, usize)> = None;
    let tmp: &mut [pollfd] = if n <= STACK {
        &mut stack[..n + extra]
    } else {
        let bytes = (n + extra) * core::mem::size_of::<pollfd>();
        match sys::map_private(bytes) {
            Ok(p) => {
                mapped = Some((p, bytes));
                // SAFETY: a fresh zeroed mapping of that many entries, unmapped at the end.
                unsafe { core::slice::from_raw_parts_mut(p.cast(), n + extra) }
            }
            Err(e) => {
                crate::set_errno(e);
                return -1;
            }
        }
    };
    let r = run(fds, tmp, timeout_ms, native);
    if let Some((p, bytes)) = mapped {
        sys::unmap(p, bytes);
    }
    r
}

fn run(
    fds: &mut [pollfd],
    tmp: &mut [pollfd],
    timeout_ms: i64,
    native: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let n = fds.len();
    let start = sys::now_ns();
    let mut last = false;
    loop {
        let mut links: [Option<&Link>; LINKS] = [None; LINKS];
        let mut nlinks = 0;
        let mut blocked = false;
        let mut many = false;
        // What the kernel has to say about everything.
        for (p, t) in fds.iter().zip(tmp.iter_mut()) {
            *t = pollfd {
                fd: p.fd,
                events: p.events,
                revents: 0,
            };
            if let Some(i) = fdtab::conn(p.fd) {
                let c = table::conn(i);
                if promote::engaged(c) {
                    let tcp_out = if c.tx.on_lane() {
                        0
                    } else {
                        p.events & (POLLOUT | WRNORM)
                    };
                    let data = if p.events & (POLLIN | RDNORM | POLLRDHUP) != 0 {
                        POLLIN | POLLRDHUP
                    } else {
                        0
                    };
                    t.events = data | tcp_out | (p.events & libc::POLLPRI);
                    if let Some((l, _)) = promote::lane(c, table::local(i)) {
                        if !links[..nlinks]
                            .iter()
                            .flatten()
                            .any(|k| core::ptr::eq(*k, l))
                        {
                            if nlinks < LINKS {
                                links[nlinks] = Some(l);
                                nlinks += 1;
                            } else {
                                many = true;
                            }
                        }
                    }
                }
            }
        }
        sys::poll_now(&mut tmp[..n]);
        let mut count = 0;
        let mut busy = false;
        for (p, t) in fds.iter_mut().zip(tmp.iter()) {
            p.revents = t.revents;
            if let Some(i) = fdtab::conn(p.fd) {
                let c = table::conn(i);
                if promote::engaged(c) {
                    let want = if p.events & (POLLIN | RDNORM) != 0 {
                        IN
                    } else {
                        0
                    } | if p.events & (POLLOUT | WRNORM) != 0 {
                        OUT
                    } else {
                        0
                    };
                    let urgent = t.revents & libc::POLLPRI;
                    let mut tcp = u32::from(t.revents as u16) & !OUT;
                    match epoll::state(c, table::local(i), p.fd, want, &mut tcp) {
                        Some(ev) => {
                            let mut r = ev as i16 & (p.events | POLLERR | POLLHUP);
                            if ev & IN != 0 {
                                r |= p.events & RDNORM;
                            }
                            if ev & OUT != 0 {
                                r |= p.events & WRNORM;
                            }
                            p.revents = r | urgent;
                            blocked |= want & OUT != 0 && ev & OUT == 0 && c.tx.on_lane();
                        }
                        None => {
                            p.revents = 0;
                            busy = true;
                        }
                    }
                }
            }
            if p.revents != 0 {
                count += 1;
            }
        }
        let left = match timeout_ms {
            t if t < 0 => -1,
            t => (t - (sys::now_ns().saturating_sub(start) / 1_000_000) as i64).max(0),
        };
        if count > 0 || left == 0 || last {
            return count;
        }
        if busy {
            sys::sched_yield();
            continue;
        }
        if control::pending() {
            control::pump();
            continue;
        }
        let lanes = |fds: &[pollfd]| {
            fds.iter().any(|p| {
                fdtab::conn(p.fd).is_some_and(|i| {
                    let c = table::conn(i);
                    match promote::lane(c, table::local(i)) {
                        Some((_, m)) => {
                            (p.events & (POLLIN | RDNORM | POLLRDHUP) != 0 && c.rx.stirs(&m))
                                || c.tx.on_lane() && c.tx.has_work(&m)
                                || (p.events & POLLOUT != 0
                                    && c.tx.mode.load(Relaxed) == tx::mode::RING
                                    && c.tx.writable(&m))
                        }
                        None => false,
                    }
                })
            })
        };
        if !blocked && nlinks > 0 {
            let score = fds
                .iter()
                .find_map(|p| fdtab::conn(p.fd).filter(|i| promote::engaged(table::conn(*i))));
            if let Some(i) = score.filter(|i| wait::may_spin(&table::local(*i).spin)) {
                let mut turns = 0u32;
                let mut kernel = false;
                let cpu = || match promote::lane(table::conn(i), table::local(i)) {
                    Some((_, m)) if nlinks == 1 => m.peer_rx().cpu.load(Relaxed),
                    _ => u32::MAX,
                };
                let found = wait::spin(cpu, || {
                    turns += 1;
                    if n > 1 && turns % 512 == 0 && sys::poll_now(&mut tmp[..n]) > 0 {
                        kernel = true;
                    }
                    kernel || lanes(fds)
                });
                wait::spun(&table::local(i).spin, found);
                if found {
                    continue;
                }
            }
        }
        // A forked child shares the parent's doorbells, which it must not drain: it naps.
        let foreign = fds.iter().any(|p| {
            fdtab::conn(p.fd).is_some_and(|i| {
                let c = table::conn(i);
                promote::engaged(c) && c.owner_pid.load(Relaxed) != table::pid()
            })
        });
        // Without a lane there is nobody but the kernel to be woken by.
        let alone = !fds
            .iter()
            .any(|p| fdtab::conn(p.fd).is_some_and(|i| promote::engaged(table::conn(i))));
        let place = if foreign || alone {
            Place::none()
        } else {
            Place::take()
        };
        let mut nap = wait::nap(left, alone || (place.index().is_some() && !many));
        if blocked {
            let full = crate::io::FULL_MS as i64 + 1;
            nap = if nap < 0 { full } else { nap.min(full) };
        }
        let mut leads = [false; LINKS];
        if let Some(w) = place.index() {
            for (k, l) in links.iter().flatten().enumerate() {
                leads[k] = wait::join(l, w);
                if !leads[k] && !(0..1000).contains(&nap) {
                    nap = 1000; // a follower sees to it now and then that there is a leader
                }
            }
        }
        let mut at = n;
        for fd in [place.efd(), control::fd()] {
            tmp[at] = pollfd {
                fd,
                events: POLLIN,
                revents: 0,
            };
            at += 1;
        }
        for (k, l) in links.iter().flatten().enumerate() {
            let fd = if leads[k] { l.bell() } else { -1 };
            tmp[at] = pollfd {
                fd,
                events: POLLIN,
                revents: 0,
            };
            at += 1;
        }
        let mut ready = lanes(fds) || control::pending();
        // Connections still on TCP must not switch while we sleep on them uncounted.
        let mut r = 1;
        if !ready {
            let (mine, rest) = tmp.split_at_mut(at);
            let _ = rest;
            match natively_if(
                fds,
                |i| !promote::engaged(table::conn(i)),
                || match native(mine.as_mut_ptr(), at, nap) {
                    // More entries than descriptors are allowed: without ours, then.
                    -1 if alone && crate::errno() == libc::EINVAL => {
                        native(mine.as_mut_ptr(), n, nap)
                    }
                    r => r,
                },
            ) {
                Some(n) => r = n,
                None => ready = true,
            }
        }
        let e = crate::errno();
        for (k, l) in links.iter().flatten().enumerate() {
            if !ready && r > 0 && tmp[n + 2 + k].revents != 0 {
                if l.drain_bell() == link::doorbell::Drained::Gone {
                    l.gone();
                }
                wait::forward(l, place.index(), None);
            }
            if let Some(w) = place.index() {
                wait::leave(l, w, leads[k]);
            }
        }
        place.give(!ready && r > 0 && tmp[n].revents != 0);
        if !ready && r > 0 && tmp[n + 1].revents != 0 {
            control::pump();
        }
        if r < 0 {
            crate::set_errno(e);
            return -1;
        }
        if r == 0 {
            if control::fd() < 0 {
                control::ensure();
            }
            last = left >= 0 && nap >= left;
        }
    }
}

/// Room for the descriptors of a `select`.
const SELECT: usize = 1024;

/// `select` over lanes: as `poll`, then back. `None`: no lane is concerned, call the kernel; the
/// closure then runs with the connections marked as natively waited for.
///
/// # Safety
/// The sets are null or the application's, with at least `nfds` bits.
pub unsafe fn select(
    nfds: i32,
    sets: [*mut libc::fd_set; 3],
    timeout_ms: i64,
    native: impl Fn() -> i32,
    sleep: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let mut fds = [pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    }; SELECT];
    let mut n = 0;
    let bits = [POLLIN, POLLOUT, libc::POLLPRI];
    let mut fits = (0..=SELECT as i32).contains(&nfds);
    if fits {
        for fd in 0..nfds {
            let mut events = 0;
            for (s, b) in sets.iter().zip(bits) {
                // SAFETY: not null: the application's set, with at least `nfds` bits.
                if !s.is_null() && unsafe { libc::FD_ISSET(fd, *s) } {
                    events |= b;
                }
            }
            if events != 0 {
                fds[n] = pollfd {
                    fd,
                    events,
                    revents: 0,
                };
                n += 1;
            }
        }
    } else {
        fits = false;
    }
    if !fits {
        // A set larger than ours: its connections go, and stay, where the kernel sees them.
        for fd in 0..nfds.min(fdtab::high() + 1) {
            crate::fdops::give_up(fd, link::reason::Reason::EpollShared);
        }
    }
    let lanes = fits && concerned(&fds[..n]);
    if !lanes {
        if let Some(r) = natively(&mut fds[..n], POLLIN, |_| native()) {
            return r;
        }
    }
    // SAFETY: our own array.
    let r = unsafe { poll_lanes(&mut fds[..n], timeout_ms, sleep) };
    if r < 0 {
        return r;
    }
    if fds[..n].iter().any(|p| p.revents & libc::POLLNVAL != 0) {
        crate::set_errno(libc::EBADF);
        return -1;
    }
    let says = [POLLIN | POLLHUP | POLLERR, POLLOUT | POLLERR, libc::POLLPRI];
    let mut count = 0;
    for p in &fds[..n] {
        for ((s, b), y) in sets.iter().zip(bits).zip(says) {
            if p.events & b == 0 {
                continue;
            }
            // SAFETY: the bit was set in this set, so the set is there and large enough.
            unsafe {
                if p.revents & y != 0 {
                    count += 1;
                } else {
                    libc::FD_CLR(p.fd, *s);
                }
            }
        }
    }
    count
}
