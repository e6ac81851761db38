//! poll, select and epoll.

use crate::readiness::engine::Until;
use crate::readiness::{epoll, poll as polls};
use crate::state::fdtab::{self, get, Fd};
use crate::state::{attached, table};
use crate::sys::{self, pages, real, thread};
use crate::{sets, tcp};
use core::ptr::{null, null_mut};
use lane::num;
use libc::{epoll_event, fd_set, pollfd, sigset_t, timespec, timeval};

/// Milliseconds of a time-out; -1 means for ever. `None`: the kernel refuses it at once (EINVAL).
fn ms_of(t: *const timespec) -> Option<i64> {
    if !pages::readable_or_null(t) {
        return None;
    }
    // SAFETY: null, or proven.
    match unsafe { t.as_ref() } {
        None => Some(-1),
        Some(t) if t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec) => None,
        Some(t) if t.tv_sec > i64::MAX / 2000 => Some(-1),
        Some(t) => Some(t.tv_sec.saturating_mul(1000) + (t.tv_nsec + 999_999) / 1_000_000),
    }
}

/// The same for `select`, which accepts a tv_usec of a million and more.
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

/// Who handles a wait.
enum Whose<T> {
    /// No connection or set of ours is concerned: only the kernel is asked.
    Kernel,
    Ours(T),
    /// Ours, but the arrays are read-only: the kernel reports EFAULT only after the wait, when it has a result to
    /// write.
    Constant,
}

/// Runs `f`, a wait, with copies of arrays that are read-only. Any result becomes EFAULT, as in the kernel, except
/// the error `keeps` (an interrupted select writes no result).
unsafe fn with_copies<const N: usize>(
    arrays: [*const u8; N],
    bytes: usize,
    keeps: Option<i32>,
    f: impl FnOnce([*mut u8; N]) -> i32,
) -> i32 {
    let Ok(at) = sys::map_private(N * bytes) else {
        crate::set_errno(libc::ENOMEM);
        return -1;
    };
    let mut copies = [null_mut(); N];
    for (k, (from, to)) in arrays.iter().zip(&mut copies).enumerate() {
        if !from.is_null() {
            *to = at.wrapping_add(k * bytes);
            // SAFETY: proven readable by the caller; the mapping has room for all.
            unsafe { core::ptr::copy_nonoverlapping(*from, *to, bytes) };
        }
    }
    let undo = || sys::unmap(at, N * bytes);
    let r = thread::or_undo(&undo, || f(copies));
    crate::preserving_errno(undo);
    if r >= 0 || keeps != Some(crate::errno()) {
        crate::set_errno(libc::EFAULT);
    }
    -1
}

/// A `poll` whose entries are read-only.
unsafe fn poll_constant(p: *mut pollfd, n: u64, f: impl FnOnce(*mut pollfd) -> i32) -> i32 {
    let bytes = num::size(n) * size_of::<pollfd>();
    // SAFETY: `entries` has proven them.
    unsafe { with_copies([p.cast_const().cast()], bytes, None, |[p]| f(p.cast())) }
}

/// A `select` whose sets are read-only.
unsafe fn select_constant(
    n: i32,
    sets: [*mut fd_set; 3],
    f: impl FnOnce([*mut fd_set; 3]) -> i32,
) -> i32 {
    let bytes = num::word(n).div_ceil(64) * 8;
    let from = sets.map(|s| s.cast_const().cast());
    // SAFETY: `watches` has proven them.
    unsafe { with_copies(from, bytes, Some(libc::EINTR), |s| f(s.map(|s| s.cast()))) }
}

/// Are any of these descriptors connections or sets of ours?
unsafe fn entries<'a>(p: *mut pollfd, n: u64) -> Whose<&'a mut [pollfd]> {
    let bytes = num::size(n).wrapping_mul(size_of::<pollfd>());
    if n == 0 || n > 1 << 20 || !pages::readable(p, bytes) {
        return Whose::Kernel;
    }
    // SAFETY: the application's `n` entries, proven.
    let s = unsafe { core::slice::from_raw_parts_mut(p, num::size(n)) };
    let mut all = s.iter();
    match all.any(|e| matches!(get(e.fd), Fd::Conn(_) | Fd::Set(_))) {
        false => Whose::Kernel,
        true if pages::writable(p, bytes) => Whose::Ours(s),
        true => Whose::Constant,
    }
}

#[no_mangle]
pub unsafe extern "C" fn poll(p: *mut pollfd, n: u64, t: i32) -> i32 {
    // SAFETY: see the module above (all calls in this file).
    unsafe {
        match entries(p, n) {
            Whose::Ours(s) => polls::poll(s, limited(t.into(), null()), |p, n, ms| {
                real::poll(p, n as u64, num::millis(ms))
            }),
            Whose::Kernel => real::poll(p, n, t),
            Whose::Constant => poll_constant(p, n, |p| poll(p, n, t)),
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
        let native = || real::ppoll(p, n, t, s);
        let fds = match entries(p, n) {
            Whose::Ours(fds) => fds,
            Whose::Kernel => return native(),
            Whose::Constant => return poll_constant(p, n, |p| ppoll(p, n, t, s)),
        };
        let Some(whole) = ms_of(t).filter(|_| pages::readable_or_null(s.cast::<u64>())) else {
            return native();
        };
        polls::poll(fds, limited(whole, s), |p, n, ms| {
            if ms == whole {
                real::ppoll(p, n as u64, t, s)
            } else {
                let ts = ts_of(ms);
                real::ppoll(p, n as u64, if ms < 0 { null() } else { &ts }, s)
            }
        })
    }
}

/// The time-out and signal mask of a poll.
fn limited(ms: i64, mask: *const sigset_t) -> polls::Call {
    polls::Call {
        until: until(ms, mask),
        limited: true,
    }
}

#[no_mangle]
pub unsafe extern "C" fn __poll_chk(p: *mut pollfd, n: u64, t: i32, len: usize) -> i32 {
    // SAFETY: see above; libc reports an overflow itself.
    unsafe {
        if num::size(n).saturating_mul(8) > len {
            crate::sys::real::real! { __poll_chk(p: *mut pollfd, n: u64, t: i32, len: usize) -> i32; }
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
        if num::size(n).saturating_mul(8) > len {
            crate::sys::real::real! { __ppoll_chk(p: *mut pollfd, n: u64, t: *const timespec, s: *const sigset_t, len: usize) -> i32; }
            return __ppoll_chk(p, n, t, s, len);
        }
        ppoll(p, n, t, s)
    }
}

/// Are any of the descriptors that this select watches connections or sets of ours?
unsafe fn watches(n: i32, sets: [*mut fd_set; 3]) -> Whose<()> {
    let good = |n: i32, may: fn(*const u64, usize) -> bool| {
        let bytes = num::word(n).div_ceil(64) * 8; // whole words
        sets.iter()
            .all(|s| s.is_null() || may(s.cast_const().cast(), bytes))
    };
    let known = n.min(fdtab::high() + 1);
    if known <= 0 || !good(known, pages::readable) {
        return Whose::Kernel;
    }
    let ours = (0..known).any(|fd| {
        matches!(get(fd), Fd::Conn(_) | Fd::Set(_))
            // SAFETY: the application's sets; these bits are proven.
            && sets.iter().any(|s| unsafe { polls::is_set(*s, fd) })
    });
    if !ours {
        return Whose::Kernel;
    }
    match good(n, pages::readable) {
        false => Whose::Kernel,
        true if good(n, pages::writable) => Whose::Ours(()),
        true => Whose::Constant,
    }
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
        let n = polls::reach(n, [r, w, e]);
        match watches(n, [r, w, e]) {
            Whose::Ours(()) => {}
            Whose::Kernel => return real::select(n, r, w, e, t),
            Whose::Constant => {
                return select_constant(n, [r, w, e], |[r, w, e]| select(n, r, w, e, t))
            }
        };
        let Some(ms) = ms_of_select(t) else {
            return real::select(n, r, w, e, t);
        };
        let start = crate::sys::now_ns();
        let was_native = core::cell::Cell::new(false);
        let native = || {
            was_native.set(true);
            real::select(n, r, w, e, t)
        };
        let call = polls::Call {
            limited: false,
            ..limited(ms, null())
        };
        // (Fractions of a millisecond are kept.)
        let whole = t.as_ref().filter(|t| t.tv_sec < i64::MAX / 2);
        let whole = whole.map(|t| timespec {
            tv_sec: t.tv_sec + t.tv_usec / 1_000_000,
            tv_nsec: t.tv_usec % 1_000_000 * 1000,
        });
        let got = polls::select(n, [r, w, e], call, native, |p, n, left| match &whole {
            Some(whole) if left == ms => real::ppoll(p, n as u64, whole, null()),
            _ => real::poll(p, n as u64, num::millis(left)),
        });
        if !was_native.get() && !t.is_null() && pages::writable(t, size_of::<timeval>()) {
            // Linux stores the time that is left.
            let spent = num::long(crate::sys::now_ns() - start) / 1000;
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
        let n = polls::reach(n, [r, w, e]);
        let native = || real::pselect(n, r, w, e, t, s);
        match watches(n, [r, w, e]) {
            Whose::Ours(()) => {}
            Whose::Kernel => return native(),
            Whose::Constant => {
                return select_constant(n, [r, w, e], |[r, w, e]| pselect(n, r, w, e, t, s))
            }
        };
        let Some(whole) = ms_of(t).filter(|_| pages::readable_or_null(s.cast::<u64>())) else {
            return native();
        };
        let call = polls::Call {
            limited: false,
            ..limited(whole, s)
        };
        polls::select(n, [r, w, e], call, native, |p, n, ms| {
            if ms == whole {
                return real::ppoll(p, n as u64, t, s);
            }
            let ts = ts_of(ms);
            real::ppoll(p, n as u64, if ms < 0 { null() } else { &ts }, s)
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
    if fd >= 0 && !crate::sys::env::off() && fdtab::init() {
        let _inside = thread::enter();
        crate::preserving_errno(|| sets::created(fd));
    }
    fd
}

#[no_mangle]
pub unsafe extern "C" fn epoll_ctl(ep: i32, op: i32, fd: i32, ev: *mut epoll_event) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see above.
    unsafe {
        let native = || real::epoll_ctl(ep, op, fd, ev);
        // (For EPOLL_CTL_DEL the kernel reads no event.)
        let has_event = op != libc::EPOLL_CTL_DEL && !ev.is_null();
        if has_event && !pages::readable(ev, size_of::<epoll_event>()) {
            return native(); // the kernel returns EFAULT
        }
        match (get(ep), get(fd)) {
            (Fd::Set(s), Fd::Conn(i)) => {
                let (c, l) = (table::conn(i), table::local(i));
                let same = match attached::engaged(c) {
                    true => tcp::still(fd, i, c, l, tcp::Way::Receive),
                    false => op != libc::EPOLL_CTL_ADD || tcp::proven(fd) == Some(i),
                };
                if !same {
                    return native();
                }
                let e = has_event.then(|| ev.read_unaligned());
                epoll::ctl(s, op, fd, i, e, native)
            }
            (_, Fd::Set(inner)) => {
                crate::preserving_errno(|| epoll::nest(inner));
                native()
            }
            // An epoll set that the shim does not know watches a connection: the connection stays on TCP.
            (Fd::Other, Fd::Conn(_)) => {
                crate::process::force_tcp(fd, lane::proto::reason::Reason::EpollShared);
                native()
            }
            _ => native(),
        }
    }
}

/// The time-out and signal mask of a wait.
fn until(ms: i64, mask: *const sigset_t) -> Until {
    Until {
        ms: ms.max(-1),
        mask,
    }
}

#[no_mangle]
pub unsafe extern "C" fn epoll_wait(ep: i32, ev: *mut epoll_event, n: i32, t: i32) -> i32 {
    // SAFETY: see above.
    unsafe {
        match get(ep) {
            Fd::Set(s) => epoll::wait((s, ep), ev, n, until(t.into(), null()), |ep, ev, n, ms| {
                real::epoll_wait(ep, ev, n, num::millis(ms))
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
            Fd::Set(i) if pages::readable_or_null(s.cast::<u64>()) => {
                epoll::wait((i, ep), ev, n, until(t.into(), s), |ep, ev, n, ms| {
                    real::epoll_pwait(ep, ev, n, num::millis(ms), s)
                })
            }
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
            Fd::Set(i) if pages::readable_or_null(s.cast::<u64>()) => {
                let Some(whole) = ms_of(t) else {
                    return real::epoll_pwait2(ep, ev, n, t, s);
                };
                epoll::wait((i, ep), ev, n, until(whole, s), |ep, ev, n, ms| {
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
