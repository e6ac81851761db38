//! Sockets: making, connecting, accepting, options.

use crate::process::{self, Left};
use crate::state::fdtab::{self, conn, get, Fd};
use crate::state::{attached, table};
use crate::sys::{self, env, lock, pages, real, thread, SIOCATMARK};
use crate::tcp::call::Call;
use crate::tcp::port::Sock;
use crate::tcp::{self, probes};
use crate::{conn, daemon, sets};
use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;
use lane::family::flag;
use lane::proto::reason::Reason;
use libc::{sockaddr, socklen_t};

#[no_mangle]
pub unsafe extern "C" fn socket(domain: i32, ty: i32, proto: i32) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see the module above.
    let fd = unsafe { real::socket(domain, ty, proto) };
    if fd >= 0 {
        crate::preserving_errno(|| match process::is_tcp(domain, ty, proto) {
            true => process::socket_made(fd, ty & libc::SOCK_NONBLOCK != 0, false, false),
            false => process::replaced(fd),
        });
    }
    fd
}

#[no_mangle]
pub unsafe extern "C" fn connect(fd: i32, a: *const sockaddr, l: socklen_t) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        let Some(i) = tcp::proven(fd) else {
            return real::connect(fd, a, l);
        };
        let unspec =
            l >= 2 && pages::readable(a, 2) && i32::from((*a).sa_family) == libc::AF_UNSPEC;
        if unspec {
            process::disconnects(fd, i);
        }
        let gen = table::conn(i).gen.load(Relaxed);
        let r = real::connect(fd, a, l);
        if table::conn(i).gen.load(Relaxed) != gen {
            return r; // closed by another thread while it slept
        }
        if r == 0 || crate::errno() == libc::EINPROGRESS || crate::errno() == libc::EINTR {
            let _inside = thread::enter();
            if conn(fd) == Some(i) {
                process::connected(fd, i, unspec);
            }
        }
        r
    }
}

#[no_mangle]
pub unsafe extern "C" fn listen(fd: i32, n: i32) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see the module above.
    let r = unsafe { real::listen(fd, n) };
    if r == 0 {
        if let Some(i) = tcp::proven(fd) {
            process::listening(fd, i);
        }
    }
    r
}

fn accepted(listener: i32, fd: i32, nonblock: bool) {
    if fd < 0 || env::off() {
        return;
    }
    crate::preserving_errno(|| {
        let tcp = match get(listener) {
            Fd::Conn(_) => true,
            // An inherited listener has no entry in the table: ask the kernel whether it accepted a TCP connection.
            _ => sys::is_tcp(fd),
        };
        if !tcp {
            process::replaced(fd);
        } else {
            process::socket_made(fd, nonblock, true, false);
            if let (Some(from), Some(to)) = (conn(listener), conn(fd)) {
                let inherited = flag::RCV_AT_ONCE | flag::SND_AT_ONCE;
                let bits = table::conn(from).flags.load(Relaxed) & inherited;
                table::conn(to).flags.fetch_or(bits, Relaxed);
            }
            // A forked child that inherited its listener has no connection to the daemon yet.
            daemon::ensure();
        }
    });
}

#[no_mangle]
pub unsafe extern "C" fn accept(fd: i32, a: *mut sockaddr, l: *mut socklen_t) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see the module above.
    let r = thread::outside(|| unsafe { real::accept(fd, a, l) });
    accepted(fd, r, false);
    r
}

#[no_mangle]
pub unsafe extern "C" fn accept4(fd: i32, a: *mut sockaddr, l: *mut socklen_t, f: i32) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see the module above.
    let r = thread::outside(|| unsafe { real::accept4(fd, a, l, f) });
    accepted(fd, r, f & libc::SOCK_NONBLOCK != 0);
    r
}

#[no_mangle]
pub unsafe extern "C" fn shutdown(fd: i32, how: i32) -> i32 {
    let _inside = thread::enter();
    fdtab::settled(fd);
    let i = crate::preserving_errno(|| tcp::proven(fd));
    let Some((mut call, i)) = i.and_then(|i| Call::of(fd, i)) else {
        // SAFETY: see the module above.
        return unsafe { real::shutdown(fd, how) };
    };
    let left = crate::preserving_errno(|| process::before_shutdown(&mut call, fd, i, how));
    let r = match left {
        // SAFETY: see the module above.
        Left::Kernel => unsafe { real::shutdown(fd, how) },
        Left::Done(Ok(())) => 0,
        Left::Done(Err(e)) => {
            crate::set_errno(e);
            -1
        }
    };
    crate::preserving_errno(|| {
        process::after_shutdown(i);
        sets::notify(i);
    });
    r
}

#[no_mangle]
pub unsafe extern "C" fn getsockopt(
    fd: i32,
    level: i32,
    name: i32,
    v: *mut c_void,
    len: *mut socklen_t,
) -> i32 {
    let _inside = thread::enter();
    if level == libc::IPPROTO_TCP && name == libc::TCP_ZEROCOPY_RECEIVE {
        process::force_tcp(fd, Reason::Option); // it is a receive: it takes bytes from the kernel's queue
    }
    if let Some(i) = crate::preserving_errno(|| tcp::proven(fd)) {
        crate::preserving_errno(|| probes::before_option(i, level, name));
    }
    let _push = not_pushing(fd, level, name);
    // SAFETY: see the module above.
    unsafe {
        let r = real::getsockopt(fd, level, name, v, len);
        if r == 0
            && level == libc::SOL_SOCKET
            && name == libc::SO_ERROR
            && !len.is_null()
            && *len >= 4
        {
            if let Some(i) = conn(fd) {
                crate::preserving_errno(|| tcp::check(i, fd));
                let p = v.cast::<i32>();
                if p.read_unaligned() == 0 {
                    // The kernel returns an error once, and one of the shim's own calls has already received this
                    // one; or the look has just found an end, which the kernel tells now.
                    p.write_unaligned(tcp::error_now(i, fd));
                } else {
                    table::conn(i).take_error(); // it reports the same failure
                }
                table::local(i).checked.store(0, Relaxed);
            }
        }
        r
    }
}

/// While bytes of a way down, or the native sends after them, go to TCP, TCP_NODELAY and the size of the send buffer
/// may not have the values that the application set (`Port::tcp_push`, `Port::tcp_send_more`). Holding the lock of the
/// sending direction excludes that, unless a daemon has it, which is done in milliseconds.
fn not_pushing(fd: i32, level: i32, name: i32) -> Option<lock::Guard<'static>> {
    let pushes = level == libc::IPPROTO_TCP && name == libc::TCP_NODELAY;
    let of = (pushes || tcp::bufs::is_size(level, name)).then(|| conn(fd))?;
    let c = of.map(table::conn)?;
    (c.flags.load(Relaxed) & flag::LANE != 0).then_some(())?;
    tcp::bufs::await_daemon(c);
    lock::lock(&c.tx.lock)
}

/// Options that a lane cannot honour: the connection stays on TCP, or goes back to it. The daemon also knows the ones
/// that an accepted socket inherits from its listener (`socket::INHERITED`).
fn disqualifies(level: i32, name: i32) -> bool {
    const SO_TIMESTAMP_NEW: i32 = 63;
    const SO_TIMESTAMPING_NEW: i32 = 65;
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
                | libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | libc::SO_TIMESTAMPING
                | libc::SO_RCVLOWAT
                | libc::SO_PEEK_OFF
                | SO_TIMESTAMP_NEW..=SO_TIMESTAMPING_NEW
        ),
        libc::IPPROTO_TCP => matches!(
            name,
            libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_ZEROCOPY_RECEIVE
        ),
        _ => false,
    }
}

#[no_mangle]
pub unsafe extern "C" fn setsockopt(
    fd: i32,
    level: i32,
    name: i32,
    v: *const c_void,
    len: socklen_t,
) -> i32 {
    let _inside = thread::enter();
    if disqualifies(level, name) && conn(fd).is_some() {
        // SO_RCVLOWAT of 1 is the default, which lanes implement; 0 means the same, and a negative value means "the
        // maximum".
        // SAFETY: the application promises `len` readable bytes.
        let harmless = level == libc::SOL_SOCKET
            && name == libc::SO_RCVLOWAT
            && len >= 4
            && pages::readable(v, 4)
            && matches!(unsafe { v.cast::<i32>().read_unaligned() }, 0 | 1);
        if !harmless {
            process::force_tcp(fd, Reason::Option);
        }
    }
    if let Some(i) = crate::preserving_errno(|| tcp::proven(fd)) {
        crate::preserving_errno(|| probes::before_option(i, level, name));
    }
    let push = not_pushing(fd, level, name);
    // SAFETY: see the module above.
    let r = unsafe { real::setsockopt(fd, level, name, v, len) };
    drop(push);
    if r == 0 && level == libc::IPPROTO_TCP && name == libc::TCP_INQ {
        if let Some(i) = conn(fd) {
            tcp::sync_inq(table::conn(i), fd);
        }
    }
    if r == 0 && tcp::bufs::is_size(level, name) {
        if let Some(i) = conn(fd) {
            crate::preserving_errno(|| conn::resized(i));
        }
    }
    if r == 0 && level == libc::SOL_SOCKET {
        if let Some(i) = conn(fd) {
            // SAFETY: the kernel has read `len` bytes there.
            unsafe { limit_set(i, name, v, len) };
        }
    }
    r
}

/// SO_RCVTIMEO or SO_SNDTIMEO was set. A negative time means that calls do not wait at all; getsockopt cannot tell
/// that from "no time-out" afterwards, so it is noted in a flag here.
///
/// # Safety
/// `v` has `len` readable bytes.
unsafe fn limit_set(i: u32, name: i32, v: *const c_void, len: socklen_t) {
    const SO_RCVTIMEO_NEW: i32 = 66;
    const SO_SNDTIMEO_NEW: i32 = 67;
    let bit = match name {
        libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW => flag::RCV_AT_ONCE,
        libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW => flag::SND_AT_ONCE,
        _ => return,
    };
    // Both struct layouts (old and _NEW) begin with 64 bits of seconds on the supported processors.
    // SAFETY: by contract; the kernel refuses less than 16 bytes.
    let negative = len >= 8 && unsafe { v.cast::<i64>().read_unaligned() } < 0;
    let flags = &table::conn(i).flags;
    match negative {
        true => flags.fetch_or(bit, Relaxed),
        false => flags.fetch_and(!bit, Relaxed),
    };
}

const SIOCOUTQNSD: u64 = 0x894b;

/// Does a receive still find bytes on the ring, which come before everything that the kernel has? It looks for news
/// first, as a receive does: a frame that has not been taken in yet comes before an urgent mark.
pub fn ring_comes_first(i: u32, fd: i32) -> bool {
    let c = table::conn(i);
    if !c.rx.engaged() {
        return false;
    }
    let Some((group, m)) = attached::of(c, table::local(i)) else {
        return false;
    };
    let Some(_g) = lock::lock(&c.rx.lock) else {
        return false;
    };
    if !c.rx.has_ring_bytes(&m) {
        let _ = c.rx.probe(&m, &Sock::new(fd, group));
    }
    c.rx.has_ring_bytes(&m)
}

#[no_mangle]
pub unsafe extern "C" fn sockatmark(fd: i32) -> i32 {
    let mut at = 0i32;
    // SAFETY: as libc's own, which calls its `ioctl` unseen; the answer is written to our variable.
    match unsafe { ioctl(fd, SIOCATMARK, (&raw mut at) as usize) } {
        -1 => -1,
        _ => at,
    }
}

#[no_mangle]
pub unsafe extern "C" fn ioctl(fd: i32, req: u64, arg: usize) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        let Some(i) = conn(fd) else {
            return real::ioctl(fd, req, arg);
        };
        let _inside = thread::enter();
        if crate::preserving_errno(|| tcp::proven(fd)) != Some(i) {
            return real::ioctl(fd, req, arg);
        }
        if req == libc::FIONREAD && pages::writable(arg as *const i32, 4) {
            if let Some(n) = tcp::unread(i, fd) {
                (arg as *mut i32).write_unaligned(n);
                return 0;
            }
        }
        if req == SIOCATMARK && pages::writable(arg as *const i32, 4) && ring_comes_first(i, fd) {
            (arg as *mut i32).write_unaligned(0);
            return 0;
        }
        let r = real::ioctl(fd, req, arg);
        if r == 0 && matches!(req, libc::TIOCOUTQ | SIOCOUTQNSD) && arg != 0 {
            let n = arg as *mut i32;
            n.write_unaligned(n.read_unaligned().saturating_add(conn::outstanding(i)));
        }
        if r == 0 && matches!(req, libc::FIONBIO | libc::FIOASYNC) && arg != 0 {
            let on = (arg as *const i32).read_unaligned() != 0;
            match req {
                libc::FIONBIO => nonblock(i, on),
                _ if on => process::force_tcp(fd, Reason::Option), // as `fcntl` with O_ASYNC
                _ => {}
            }
        }
        r
    }
}

/// O_NONBLOCK was changed on the open file description.
pub fn nonblock(i: u32, on: bool) {
    let f = &table::conn(i).flags;
    if on {
        f.fetch_or(flag::NONBLOCK, Relaxed);
        crate::preserving_errno(|| crate::promotion::made_nonblocking(i));
    } else {
        f.fetch_and(!flag::NONBLOCK, Relaxed);
    }
}
