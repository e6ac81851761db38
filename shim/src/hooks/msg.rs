//! sendmsg, recvmsg and their multiple forms.

use super::rw::{on_lane, recv_on_lane, SEND_OK};
use crate::fdtab::{conn, get, Fd};
use crate::{fdops, io, real, table};
use core::sync::atomic::Ordering::Relaxed;
use libc::{iovec, mmsghdr, msghdr, timespec};
use link::family::flag;
use link::reason::Reason;

/// # Safety
/// `m` is null or the application's message header.
unsafe fn iovs<'a>(m: *const msghdr) -> Option<&'a [iovec]> {
    // SAFETY: by contract.
    let h = unsafe { m.as_ref() }?;
    if h.msg_iov.is_null() || h.msg_iovlen > 1024 {
        return None;
    }
    // SAFETY: the application promises that many entries.
    let s = unsafe { core::slice::from_raw_parts(h.msg_iov, h.msg_iovlen) };
    s.iter()
        .try_fold(0usize, |t, v| t.checked_add(v.iov_len))
        .map(|_| s)
}

/// Descriptors that travel to somebody else leave their lanes first.
///
/// # Safety
/// `m` is the application's message header.
unsafe fn descriptors_leave(m: *const msghdr) {
    // SAFETY: by contract; the CMSG macros walk inside msg_controllen.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(m);
        while !c.is_null() {
            if (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
                let n = ((*c).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                let p = libc::CMSG_DATA(c).cast::<i32>();
                for k in 0..n {
                    let fd = p.add(k).read_unaligned();
                    match get(fd) {
                        Fd::Conn(_) => fdops::give_up(fd, Reason::Left),
                        Fd::Set(s) => crate::epoll::nest(s),
                        _ => {}
                    }
                }
            }
            c = libc::CMSG_NXTHDR(m, c);
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn sendmsg(fd: i32, m: *const msghdr, flags: i32) -> isize {
    // SAFETY: see the module above.
    unsafe {
        let native = || real::sendmsg(fd, m, flags);
        let control = m
            .as_ref()
            .is_some_and(|h| h.msg_controllen > 0 && !h.msg_control.is_null());
        let Some(i) = conn(fd) else {
            if control && table::table().is_some() {
                descriptors_leave(m);
            }
            return native();
        };
        if control {
            fdops::give_up(fd, Reason::Option);
            return counted_out(i, native());
        }
        match iovs(m) {
            Some(v) if on_lane(i, flags, SEND_OK, fd) => io::send(fd, i, v, flags, native),
            _ => counted_out(i, native()),
        }
    }
}

fn counted_out(i: u32, r: isize) -> isize {
    if r > 0 {
        table::conn(i).tx.kpos.fetch_add(r as u64, Relaxed);
    }
    r
}

#[no_mangle]
pub unsafe extern "C" fn recvmsg(fd: i32, m: *mut msghdr, flags: i32) -> isize {
    // SAFETY: see the module above.
    unsafe {
        let native = || real::recvmsg(fd, m, flags);
        let Some(i) = conn(fd) else { return native() };
        match iovs(m) {
            Some(v) if recv_on_lane(flags, fd) => {
                let mut was_native = false;
                let r = {
                    let seen = core::cell::Cell::new(false);
                    let r = io::recv(fd, i, v, flags, || {
                        seen.set(true);
                        native()
                    });
                    was_native |= seen.get();
                    r
                };
                if r >= 0 && !was_native {
                    (*m).msg_namelen = 0;
                    (*m).msg_controllen = 0;
                    (*m).msg_flags = 0;
                }
                r
            }
            _ => {
                let r = native();
                if r > 0 && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE | libc::MSG_OOB) == 0 {
                    table::conn(i).rx.kpos.fetch_add(r as u64, Relaxed);
                }
                r
            }
        }
    }
}

/// Does the connection need our own loop instead of the kernel's?
fn has_lane(i: u32) -> bool {
    table::conn(i).flags.load(Relaxed) & flag::LANE != 0
}

#[no_mangle]
pub unsafe extern "C" fn sendmmsg(fd: i32, v: *mut mmsghdr, n: u32, flags: i32) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        match conn(fd) {
            Some(_) => each(v, n, |h| sendmsg(fd, h, flags)),
            None => real::sendmmsg(fd, v, n, flags),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn recvmmsg(
    fd: i32,
    v: *mut mmsghdr,
    n: u32,
    flags: i32,
    t: *mut timespec,
) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        match conn(fd) {
            Some(i) if has_lane(i) || t.is_null() => {
                let mut f = flags & !libc::MSG_WAITFORONE;
                each(v, n, |h| {
                    let r = recvmsg(fd, h, f);
                    if flags & libc::MSG_WAITFORONE != 0 {
                        f |= libc::MSG_DONTWAIT;
                    }
                    r
                })
            }
            Some(_) => {
                fdops::give_up(fd, Reason::Option);
                real::recvmmsg(fd, v, n, flags, t)
            }
            None => real::recvmmsg(fd, v, n, flags, t),
        }
    }
}

/// One message after the other, as the kernel does: an error counts only if it is the first.
///
/// # Safety
/// `v` is the application's array of `n` entries.
unsafe fn each(v: *mut mmsghdr, n: u32, mut f: impl FnMut(*mut msghdr) -> isize) -> i32 {
    let mut done = 0;
    for k in 0..n as usize {
        // SAFETY: inside the array.
        let e = unsafe { &mut *v.add(k) };
        let r = f(&mut e.msg_hdr);
        if r < 0 {
            return if done > 0 { done } else { -1 };
        }
        e.msg_len = r as u32;
        done += 1;
        if r == 0 {
            break;
        }
    }
    done
}
