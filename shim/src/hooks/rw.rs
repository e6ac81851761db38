//! read, write, send, recv and their vectored and fortified forms.

use super::sock::ring_comes_first;
use crate::state::fdtab::settled as conn;
use crate::state::table::conn as conn_of;
use crate::sys::{self, pages, real};
use crate::{conn, process, tcp};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;
use lane::half::rx::mode;
use lane::num;
use lane::proto::reason::Reason;
use libc::{iovec, off_t, sockaddr, socklen_t};

fn vec(p: *const c_void, n: usize) -> [iovec; 1] {
    [iovec {
        iov_base: p.cast_mut(),
        iov_len: n,
    }]
}

/// The application's iovec array as a slice; `None` if it has to be left to the kernel, which may refuse it.
///
/// # Safety
/// `v` and `n` as in `readv`.
unsafe fn vecs<'a>(v: *const iovec, n: i32) -> Option<&'a [iovec]> {
    let ok = (0..=1024).contains(&n) && pages::readable(v, num::word(n) * size_of::<iovec>());
    // (`n` may be 0, and `v` null.)
    let ok = ok && !v.is_null();
    // SAFETY: the application promises `n` entries.
    let s = ok.then(|| unsafe { core::slice::from_raw_parts(v, num::word(n)) })?;
    let total = s.iter().try_fold(0usize, |t, v| t.checked_add(v.iov_len))?;
    (total <= isize::MAX as usize).then_some(s)
}

#[no_mangle]
pub unsafe extern "C" fn send(fd: i32, p: *const c_void, n: usize, flags: i32) -> isize {
    // SAFETY: see the module (all calls in this file).
    unsafe {
        let native = || real::send(fd, p, n, flags);
        match conn(fd) {
            Some(i) if on_lane(flags, fd) => conn::send(fd, i, &vec(p, n), flags & SEND_OK, native),
            Some(i) => tcp::send_or_told(conn_of(i), native),
            None => native(),
        }
    }
}

/// Would the kernel accept this address? It checks only the length, and that the memory can be read.
pub fn is_address(a: *const sockaddr, l: socklen_t) -> bool {
    a.is_null()
        || l as usize <= size_of::<libc::sockaddr_storage>() && pages::readable(a, l as usize)
}

#[no_mangle]
pub unsafe extern "C" fn sendto(
    fd: i32,
    p: *const c_void,
    n: usize,
    flags: i32,
    a: *const sockaddr,
    l: socklen_t,
) -> isize {
    // SAFETY: see the module.
    unsafe {
        let native = || real::sendto(fd, p, n, flags, a, l);
        match conn(fd) {
            Some(_) if !is_address(a, l) => native(), // which refuses it
            // On a connected stream socket the address is ignored, except with MSG_FASTOPEN.
            Some(i) if on_lane(flags, fd) => conn::send(fd, i, &vec(p, n), flags & SEND_OK, native),
            Some(i) => tcp::send_or_told(conn_of(i), native),
            None => native(),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn write(fd: i32, p: *const c_void, n: usize) -> isize {
    // SAFETY: see the module.
    unsafe {
        match conn(fd) {
            Some(i) => conn::send(fd, i, &vec(p, n), 0, || real::write(fd, p, n)),
            None => real::write(fd, p, n),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn writev(fd: i32, v: *const iovec, n: i32) -> isize {
    // SAFETY: see the module.
    unsafe {
        match (conn(fd), vecs(v, n)) {
            // With a total length of 0, `writev` returns 0 at once in every state of the connection. (`write` does
            // not.)
            (Some(i), Some(s)) if s.iter().any(|v| v.iov_len > 0) => {
                conn::send(fd, i, s, 0, || real::writev(fd, v, n))
            }
            _ => real::writev(fd, v, n),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn recv(fd: i32, p: *mut c_void, n: usize, flags: i32) -> isize {
    // SAFETY: see the module.
    unsafe {
        let native = || real::recv(fd, p, n, flags);
        match conn(fd) {
            Some(i) if recv_on_lane(flags, fd) => {
                conn::recv(fd, i, &vec(p, n), flags & RECV_OK, native)
            }
            Some(i) if flags & libc::MSG_ERRQUEUE != 0 => {
                conn::zerocopy::receive(i, fd, flags, null_mut(), native)
            }
            Some(i) => tcp::recv_or_told(conn_of(i), fd, flags, native),
            None => native(),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn recvfrom(
    fd: i32,
    p: *mut c_void,
    n: usize,
    flags: i32,
    a: *mut sockaddr,
    l: *mut socklen_t,
) -> isize {
    // SAFETY: see the module.
    unsafe {
        let native = || real::recvfrom(fd, p, n, flags, a, l);
        match conn(fd) {
            Some(i) if recv_on_lane(flags, fd) => {
                let r = conn::recv(fd, i, &vec(p, n), flags & RECV_OK, native);
                if r < 0 || a.is_null() {
                    return r;
                }
                let refused = match pages::writable(l, 4) && !l.is_null() {
                    false => libc::EFAULT,
                    true if *l > i32::MAX as u32 => libc::EINVAL,
                    true => {
                        *l = 0; // as the kernel does for streams
                        return r;
                    }
                };
                crate::set_errno(refused);
                -1
            }
            Some(i) if flags & libc::MSG_ERRQUEUE != 0 => {
                conn::zerocopy::receive(i, fd, flags, null_mut(), native)
            }
            Some(i) => tcp::recv_or_told(conn_of(i), fd, flags, native),
            None => native(),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn read(fd: i32, p: *mut c_void, n: usize) -> isize {
    // SAFETY: see the module.
    unsafe {
        match conn(fd) {
            Some(_) if n == 0 => 0,
            Some(i) => conn::recv(fd, i, &vec(p, n), 0, || real::read(fd, p, n)),
            None => real::read(fd, p, n),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn readv(fd: i32, v: *const iovec, n: i32) -> isize {
    // SAFETY: see the module.
    unsafe {
        match (conn(fd), vecs(v, n)) {
            // With a total length of 0, `readv` returns 0 at once, as `read` does.
            (Some(i), Some(s)) if s.iter().any(|v| v.iov_len > 0) => {
                conn::recv(fd, i, s, 0, || real::readv(fd, v, n))
            }
            _ => real::readv(fd, v, n),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn preadv2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize {
    // SAFETY: see the module.
    unsafe {
        match (o, f) {
            (-1, 0) => return readv(fd, v, n),
            (-1, _) => {
                process::force_tcp(fd, Reason::Option);
                if keeps_ring(fd) {
                    return readv(fd, v, n); // (it would not wait, whatever the flags say)
                }
            }
            _ => {} // the kernel refuses it: a socket has no offsets
        }
        counted(fd, false, || real::preadv2(fd, v, n, o, f))
    }
}

#[no_mangle]
pub unsafe extern "C" fn preadv64v2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize {
    // SAFETY: see the module; off_t has 64 bits here.
    unsafe { preadv2(fd, v, n, o, f) }
}

#[no_mangle]
pub unsafe extern "C" fn pwritev2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize {
    // SAFETY: see the module.
    unsafe {
        match (o, f) {
            (-1, 0) => return writev(fd, v, n),
            (-1, _) => process::force_tcp(fd, Reason::Option),
            _ => {} // as above
        }
        counted(fd, true, || real::pwritev2(fd, v, n, o, f))
    }
}

#[no_mangle]
pub unsafe extern "C" fn pwritev64v2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize {
    // SAFETY: see the module.
    unsafe { pwritev2(fd, v, n, o, f) }
}

#[no_mangle]
pub unsafe extern "C" fn sendfile(out: i32, input: i32, off: *mut off_t, n: usize) -> isize {
    // SAFETY: see the module.
    unsafe {
        process::force_tcp(input, Reason::Option);
        match conn(out) {
            Some(i) => {
                let native = |out, input, n| real::sendfile(out, input, off, n);
                conn::sendfile(out, i, input, off, n, native)
            }
            None => real::sendfile(out, input, off, n),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn sendfile64(out: i32, input: i32, off: *mut off_t, n: usize) -> isize {
    // SAFETY: see the module.
    unsafe { sendfile(out, input, off, n) }
}

#[no_mangle]
pub unsafe extern "C" fn splice(
    i: i32,
    io_: *mut i64,
    o: i32,
    oo: *mut i64,
    n: usize,
    f: u32,
) -> isize {
    // SAFETY: see the module.
    unsafe {
        process::force_tcp(i, Reason::Option);
        process::force_tcp(o, Reason::Option);
        let into_pipe = io_.is_null() && oo.is_null() && f & !SPLICE_FLAGS == 0 && sys::is_fifo(o);
        match into_pipe && keeps_ring(i) {
            true => spliced(i, o, n, f),
            false => real::splice(i, io_, o, oo, n, f),
        }
    }
}

/// The flags that splice(2) has.
const SPLICE_FLAGS: u32 =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// After a connection was given up: are bytes left on its ring, or on TCP before it? The other end is gone then, and nobody
/// could put them on TCP.
fn keeps_ring(fd: i32) -> bool {
    let before = |i| conn_of(i).rx.mode.load(Relaxed) == mode::PREFIX;
    conn(fd).is_some_and(|i| ring_comes_first(i, fd) || before(i))
}

/// Such bytes go to the pipe. (Threads that splice one connection at once are not kept apart.)
fn spliced(from: i32, pipe: i32, n: usize, flags: u32) -> isize {
    let mut buf = [0u8; 1024];
    let mut all = 0;
    let room = || sys::poll1(pipe, libc::POLLOUT) & (libc::POLLOUT | libc::POLLERR) != 0;
    while all < n && keeps_ring(from) {
        if (all > 0 || flags & libc::SPLICE_F_NONBLOCK != 0) && !room() {
            break;
        }
        let (p, len) = (buf.as_mut_ptr().cast(), buf.len().min(n - all));
        // SAFETY: `p` is writable, then readable, for `len`.
        let moved = unsafe {
            let there = recv(from, p, len, libc::MSG_PEEK | libc::MSG_DONTWAIT);
            match usize::try_from(there) {
                Ok(there) if there > 0 => match write(pipe, p, there) {
                    w if w > 0 => recv(from, p, w.unsigned_abs(), 0),
                    w => w,
                },
                _ => there,
            }
        };
        match moved {
            w if w > 0 => all += w.unsigned_abs(),
            w if all == 0 => return w,
            _ => break,
        }
    }
    if all == 0 && n > 0 {
        crate::set_errno(libc::EAGAIN);
        return -1;
    }
    isize::try_from(all).unwrap_or(isize::MAX)
}

#[no_mangle]
pub unsafe extern "C" fn tee(i: i32, o: i32, n: usize, f: u32) -> isize {
    // SAFETY: see the module; tee works on pipes only, so no lane is concerned.
    unsafe { real::tee(i, o, n, f) }
}

#[no_mangle]
pub unsafe extern "C" fn vmsplice(fd: i32, v: *const iovec, n: usize, f: u32) -> isize {
    // SAFETY: see the module; pipes only.
    unsafe { real::vmsplice(fd, v, n, f) }
}

/// Makes a native call and counts its bytes in `tcp_pos`, although the connection never gets a lane again.
fn counted(fd: i32, out: bool, native: impl Fn() -> isize) -> isize {
    let r = native();
    if let Some(i) = conn(fd).filter(|_| r > 0) {
        let c = crate::state::table::conn(i);
        let k = if out { &c.tx.tcp_pos } else { &c.rx.tcp_pos };
        k.add(num::count(r) as u64, Relaxed);
    }
    r
}

// Fortified forms (glibc's _FORTIFY_SOURCE): the size of the buffer is an additional argument. A call that would
// overflow the buffer goes to libc's own function, which reports it.
macro_rules! fortified {
    ($($name:ident => $plain:ident($($a:ident: $t:ty),*) checks $n:ident <= $len:ident, args($($all:ident: $ta:ty),*);)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($all: $ta),*) -> isize {
            crate::sys::real::real! { $name($($all: $ta),*) -> isize; }
            // SAFETY: see the module.
            unsafe { if $n > $len { $name($($all),*) } else { $plain($($a),*) } }
        }
    )*};
}

mod fortify {
    use super::{read, recv, recvfrom};
    use core::ffi::c_void;
    use libc::{sockaddr, socklen_t};
    fortified! {
        __read_chk => read(fd: i32, p: *mut c_void, n: usize) checks n <= buflen,
            args(fd: i32, p: *mut c_void, n: usize, buflen: usize);
        __recv_chk => recv(fd: i32, p: *mut c_void, n: usize, flags: i32) checks n <= buflen,
            args(fd: i32, p: *mut c_void, n: usize, buflen: usize, flags: i32);
        __recvfrom_chk => recvfrom(fd: i32, p: *mut c_void, n: usize, flags: i32, a: *mut sockaddr, l: *mut socklen_t) checks n <= buflen,
            args(fd: i32, p: *mut c_void, n: usize, buflen: usize, flags: i32, a: *mut sockaddr, l: *mut socklen_t);
    }
}

/// Flags of a send that a lane can serve. (MSG_MORE is only a hint about packet sizes.)
pub const SEND_OK: i32 = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_ZEROCOPY;
/// Flags of a receive that a lane can serve.
pub const RECV_OK: i32 = libc::MSG_PEEK
    | libc::MSG_WAITALL
    | libc::MSG_DONTWAIT
    | libc::MSG_TRUNC
    | libc::MSG_NOSIGNAL
    | libc::MSG_CMSG_CLOEXEC;

/// Flags that have no name in the `libc` crate.
const MSG_PROXY: i32 = 0x10;
const MSG_BATCH: i32 = 0x4_0000;
/// Flags that TCP ignores, in sends and in receives.
const IGNORED: i32 = libc::MSG_DONTROUTE
    | libc::MSG_CTRUNC
    | libc::MSG_FIN
    | libc::MSG_SYN
    | libc::MSG_RST
    | libc::MSG_WAITFORONE;
/// Ignored flags of a send, and of a receive. Callers of `conn` mask them out (`SEND_OK`, `RECV_OK`).
const SEND_IGNORED: i32 =
    IGNORED | libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_WAITALL | libc::MSG_ERRQUEUE;
const RECV_IGNORED: i32 = IGNORED
    | MSG_PROXY
    | MSG_BATCH
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_MORE
    | libc::MSG_ZEROCOPY
    | libc::MSG_FASTOPEN;

/// May this receive use the lane? Urgent data and the error queue are left to the kernel; any other unknown flag
/// brings the connection back to TCP first.
pub fn recv_on_lane(flags: i32, fd: i32) -> bool {
    if flags & !(RECV_OK | RECV_IGNORED) == 0 {
        return true;
    }
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return false;
    }
    process::force_tcp(fd, Reason::Option);
    keeps_ring(fd)
}

/// May this send use the lane? Flags that a lane cannot carry (urgent data, fast open) first bring the connection
/// back to TCP for good.
pub fn on_lane(flags: i32, fd: i32) -> bool {
    if flags & !(SEND_OK | SEND_IGNORED) == 0 {
        return true;
    }
    process::force_tcp(fd, Reason::Option);
    false
}
