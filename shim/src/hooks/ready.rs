//! poll, select and epoll.

use crate::fdtab::{get, Fd};
use crate::{epoll, fdtab, io, poll as polls, promote, real, signals, table};
use core::ptr::null_mut;
use libc::{epoll_event, fd_set, pollfd, sigset_t, timespec, timeval};

/// Milliseconds of a time-out, -1: for ever. `None`: the kernel refuses it (EINVAL), at once.
fn ms_of(t: *const timespec) -> Option<i64> {
    // SAFETY: null, or the application's valid pointer.
    match unsafe { t.as_ref() } {
        None => Some(-1),
        Some(t) if t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec) => None,
        Some(t) if t.tv_sec > i64::MAX / 2000 => Some(-1),
        Some(t) => Some(t.tv_sec.saturating_mul(1000) + (t.tv_nsec + 999_999) / 1_000_000),
    }
}

/// The same of a `select`, which takes a million microseconds and more.
fn ms_of_select(t: *const timeval) -> Option<i64> {
    // SAFETY: null, or the application's valid pointer.
    match unsafe { t.as_ref() } {
        None => Some(-1),
        Some(t) if t.tv_sec < 0 || t.tv_usec < 0 => None,
        Some(t) => {
            let part = t.tv_usec.saturating_add(999) / 1000;
            Some(t.tv_sec.saturating_mul(1000).saturating_add(part))
        }
    }
}

fn ts_of(ms: i64) -> timespec {
    timespec {
        tv_sec: ms / 1000,
        tv_nsec: (ms % 1000) * 1_000_000,
    }
}

/// Do any of these descriptors concern us? If not, nothing but the kernel is asked.
unsafe fn entries<'a>(p: *mut pollfd, n: u64) -> Option<&'a mut [pollfd]> {
    if p.is_null() || n == 0 || n > 1 << 20 {
        return None;
    }
    // SAFETY: the application promises `n` entries.
    let s = unsafe { core::slice::from_raw_parts_mut(p, n as usize) };
    s.iter()
        .any(|e| matches!(get(e.fd), Fd::Conn(_) | Fd::Set(_)))
        .then_some(s)
}

#[no_mangle]
pub unsafe extern "C" fn poll(p: *mut pollfd, n: u64, t: i32) -> i32 {
    // SAFETY: see the module above (all calls in this file).
    unsafe {
        match entries(p, n) {
            Some(s) => polls::poll(s, i64::from(t).max(-1), |p, n, ms| {
                real::poll(p, n as u64, ms as i32)
            }),
            None => real::poll(p, n, t),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn ppoll(
    p: *mut pollfd,
    n: u64,
    t: *const timespec,
    s: *const sigset_t,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        let Some(fds) = entries(p, n) else {
            return real::ppoll(p, n, t, s);
        };
        let Some(whole) = ms_of(t) else {
            return real::ppoll(p, n, t, s);
        };
        polls::poll(fds, whole, |p, n, ms| {
            if ms == whole {
                real::ppoll(p, n as u64, t, s)
            } else {
                let ts = ts_of(ms);
                real::ppoll(p, n as u64, if ms < 0 { core::ptr::null() } else { &ts }, s)
            }
        })
    }
}

#[no_mangle]
pub unsafe extern "C" fn __poll_chk(p: *mut pollfd, n: u64, t: i32, len: usize) -> i32 {
    // SAFETY: see above; libc reports an overflow itself.
    unsafe {
        if (n as usize).saturating_mul(8) > len {
            crate::real::real! { __poll_chk(p: *mut pollfd, n: u64, t: i32, len: usize) -> i32; }
            use crate::real::Sym;
            use core::ffi::CStr;
            return __poll_chk(p, n, t, len);
        }
        poll(p, n, t)
    }
}

#[no_mangle]
pub unsafe extern "C" fn __ppoll_chk(
    p: *mut pollfd,
    n: u64,
    t: *const timespec,
    s: *const sigset_t,
    len: usize,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        if (n as usize).saturating_mul(8) > len {
            crate::real::real! { __ppoll_chk(p: *mut pollfd, n: u64, t: *const timespec, s: *const sigset_t, len: usize) -> i32; }
            use crate::real::Sym;
            use core::ffi::CStr;
            return __ppoll_chk(p, n, t, s, len);
        }
        ppoll(p, n, t, s)
    }
}

/// Does a select concern us at all?
unsafe fn watches(n: i32, sets: [*mut fd_set; 3]) -> bool {
    (0..n.min(fdtab::high() + 1)).any(|fd| {
        matches!(get(fd), Fd::Conn(_) | Fd::Set(_))
            // SAFETY: the application's sets, with at least `n` bits.
            && sets.iter().any(|s| unsafe { polls::is_set(*s, fd) })
    })
}

#[no_mangle]
pub unsafe extern "C" fn select(
    n: i32,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    t: *mut timeval,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        if !watches(n, [r, w, e]) {
            return real::select(n, r, w, e, t);
        }
        let Some(ms) = ms_of_select(t) else {
            return real::select(n, r, w, e, t);
        };
        let start = crate::sys::now_ns();
        let was_native = core::cell::Cell::new(false);
        let native = || {
            was_native.set(true);
            real::select(n, r, w, e, t)
        };
        let got = polls::select(n, [r, w, e], ms, native, |p, n, ms| {
            real::poll(p, n as u64, ms as i32)
        });
        if !was_native.get() && !t.is_null() {
            // Linux leaves the time that was not slept.
            let spent = (crate::sys::now_ns() - start) as i64 / 1000;
            let left = (ms.saturating_mul(1000) - spent).max(0);
            (*t).tv_sec = left / 1_000_000;
            (*t).tv_usec = left % 1_000_000;
        }
        got
    }
}

#[no_mangle]
pub unsafe extern "C" fn pselect(
    n: i32,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    t: *const timespec,
    s: *const sigset_t,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        if !watches(n, [r, w, e]) {
            return real::pselect(n, r, w, e, t, s);
        }
        let native = || real::pselect(n, r, w, e, t, s);
        let Some(whole) = ms_of(t) else {
            return native();
        };
        polls::select(n, [r, w, e], whole, native, |p, n, ms| {
            let ts = ts_of(ms);
            real::ppoll(p, n as u64, if ms < 0 { core::ptr::null() } else { &ts }, s)
        })
    }
}

#[no_mangle]
pub unsafe extern "C" fn epoll_create(n: i32) -> i32 {
    // SAFETY: see above.
    let fd = unsafe { real::epoll_create(n) };
    new_set(fd)
}

#[no_mangle]
pub unsafe extern "C" fn epoll_create1(f: i32) -> i32 {
    // SAFETY: see above.
    let fd = unsafe { real::epoll_create1(f) };
    new_set(fd)
}

fn new_set(fd: i32) -> i32 {
    if fd >= 0 && !crate::env::off() && fdtab::init() {
        let _inside = signals::enter();
        io::quietly(|| epoll::created(fd));
    }
    fd
}

#[no_mangle]
pub unsafe extern "C" fn epoll_ctl(ep: i32, op: i32, fd: i32, ev: *mut epoll_event) -> i32 {
    let _inside = signals::enter();
    // SAFETY: see above.
    unsafe {
        let native = || real::epoll_ctl(ep, op, fd, ev);
        match (get(ep), get(fd)) {
            (Fd::Set(s), Fd::Conn(i)) => {
                let (c, l) = (table::conn(i), table::local(i));
                if promote::engaged(c) && !io::still(fd, i, c, l) {
                    return native();
                }
                let e = (!ev.is_null()).then(|| ev.read_unaligned());
                epoll::ctl(s, op, fd, i, e, native)
            }
            (_, Fd::Set(inner)) => {
                io::quietly(|| epoll::nest(inner));
                native()
            }
            // A set that we do not know watches a connection: it stays on TCP.
            (Fd::Other, Fd::Conn(_)) => {
                crate::fdops::give_up(fd, link::reason::Reason::EpollShared);
                native()
            }
            _ => native(),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn epoll_wait(ep: i32, ev: *mut epoll_event, n: i32, t: i32) -> i32 {
    // SAFETY: see above.
    unsafe {
        match get(ep) {
            Fd::Set(s) => epoll::wait(s, ev, n, i64::from(t).max(-1), |ev, n, ms| {
                real::epoll_wait(ep, ev, n, ms as i32)
            }),
            _ => real::epoll_wait(ep, ev, n, t),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn epoll_pwait(
    ep: i32,
    ev: *mut epoll_event,
    n: i32,
    t: i32,
    s: *const sigset_t,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        match get(ep) {
            Fd::Set(i) => epoll::wait(i, ev, n, i64::from(t).max(-1), |ev, n, ms| {
                real::epoll_pwait(ep, ev, n, ms as i32, s)
            }),
            _ => real::epoll_pwait(ep, ev, n, t, s),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn epoll_pwait2(
    ep: i32,
    ev: *mut epoll_event,
    n: i32,
    t: *const timespec,
    s: *const sigset_t,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        match get(ep) {
            Fd::Set(i) => {
                let Some(whole) = ms_of(t) else {
                    return real::epoll_pwait2(ep, ev, n, t, s);
                };
                epoll::wait(i, ev, n, whole, |ev, n, ms| {
                    if ms == whole {
                        real::epoll_pwait2(ep, ev, n, t, s)
                    } else {
                        let ts = ts_of(ms);
                        real::epoll_pwait2(ep, ev, n, if ms < 0 { null_mut() } else { &ts }, s)
                    }
                })
            }
            _ => real::epoll_pwait2(ep, ev, n, t, s),
        }
    }
}
