//! sendmsg, recvmsg and their multiple forms.

use super::rw::{is_address, on_lane, recv_on_lane, RECV_OK, SEND_OK};
use crate::process::{self, arrivals};
use crate::state::fdtab::settled as conn;
use crate::state::table;
use crate::sys::{self, pages, real};
use crate::{conn, tcp};
use core::sync::atomic::Ordering::Relaxed;
use lane::half::Iov;
use lane::num;
use lane::proto::reason::Reason;
use libc::{iovec, mmsghdr, msghdr, timespec};

/// # Safety
/// `m` is null or the application's message header.
unsafe fn iovs<'a>(m: *const msghdr) -> Option<&'a [iovec]> {
    if !pages::readable(m, size_of::<msghdr>()) {
        return None;
    }
    // SAFETY: by contract.
    let h = unsafe { m.as_ref() }?;
    let (v, n) = (h.msg_iov, h.msg_iovlen);
    if v.is_null() || n > 1024 || !pages::readable(v, n * size_of::<iovec>()) {
        return None;
    }
    // SAFETY: the application promises that many entries.
    let s = unsafe { core::slice::from_raw_parts(h.msg_iov, h.msg_iovlen) };
    s.iter()
        .try_fold(0usize, |t, v| t.checked_add(v.iov_len))
        .map(|_| s)
}

/// Does the message have control data that can be read?
///
/// # Safety
/// `m` is null or the application's message header.
unsafe fn has_control(m: *const msghdr) -> bool {
    // SAFETY: by contract. What cannot be read, the kernel refuses.
    pages::readable(m, size_of::<msghdr>())
        && unsafe { m.as_ref() }.is_some_and(|h| {
            let n = h.msg_controllen;
            n > 0 && !h.msg_control.is_null() && pages::readable(h.msg_control, n)
        })
}

/// Will the kernel refuse the message, for its address or for control data that cannot be read?
///
/// # Safety
/// `m` is null or the application's message header.
unsafe fn is_refused(m: *const msghdr) -> bool {
    // SAFETY: by contract.
    let Some(h) = (unsafe { m.as_ref() }).filter(|_| pages::readable(m, size_of::<msghdr>()))
    else {
        return true;
    };
    let most = num::small(size_of::<libc::sockaddr_storage>());
    let negative = h.msg_namelen > i32::MAX as u32;
    // SAFETY: by contract.
    let unreadable = h.msg_controllen > 0 && !unsafe { has_control(m) };
    unreadable
        || !h.msg_name.is_null()
            && (negative || !is_address(h.msg_name.cast(), h.msg_namelen.min(most)))
}

/// Connections whose descriptors are sent to another process, by any of the messages of a call, leave their lanes first.
///
/// # Safety
/// Each message is null or the application's message header.
pub(super) unsafe fn descriptors_leave(messages: impl Iterator<Item = *const msghdr> + Clone) {
    // SAFETY: by contract.
    let with_control = messages.filter(|m| unsafe { has_control(*m) });
    if table::table().is_some() && with_control.clone().next().is_some() {
        process::force_all(|f| {
            for m in with_control.clone() {
                // SAFETY: by contract; it can be read.
                unsafe { each_descriptor(m, |fd| f(fd, Reason::Left)) };
            }
        });
    }
}

/// Descriptors have arrived on `channel`. (Those of a vfork child are not in our table.)
///
/// # Safety
/// `m` is the application's message header, which the kernel has filled in.
unsafe fn descriptors_came(channel: i32, m: *const msghdr) {
    // SAFETY: by contract.
    unsafe {
        if (*m).msg_controllen == 0 {
            return;
        }
        each_descriptor(m, |fd| {
            if !process::not_ours() {
                arrivals::came(fd, channel);
            }
        });
    }
}

/// # Safety
/// `m` is the application's message header: it and its control data can be read.
unsafe fn each_descriptor(m: *const msghdr, mut f: impl FnMut(i32)) {
    // SAFETY: by contract; the CMSG macros walk inside msg_controllen.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(m);
        while !c.is_null() {
            if (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
                // (The kernel refuses a length that goes beyond the control data.)
                let end = (*m).msg_control as usize + (*m).msg_controllen;
                let len = ((*c).cmsg_len as usize).min(end - c as usize);
                let n = len.saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                let p = libc::CMSG_DATA(c).cast::<i32>();
                for k in 0..n {
                    f(p.add(k).read_unaligned());
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
        let Some(i) = conn(fd) else {
            descriptors_leave(core::iter::once(m));
            return native();
        };
        if is_refused(m) {
            return native();
        }
        if has_control(m) {
            process::force_tcp(fd, Reason::Option);
            return counted_out(i, tcp::send_or_told(table::conn(i), native));
        }
        match iovs(m) {
            Some(v) if on_lane(flags, fd) => conn::send(fd, i, v, flags & SEND_OK, native),
            None => native(), // the kernel refuses it
            _ => counted_out(i, tcp::send_or_told(table::conn(i), native)),
        }
    }
}

fn counted_out(i: u32, r: isize) -> isize {
    if r > 0 {
        table::conn(i).tx.tcp_pos.add(num::count(r) as u64, Relaxed);
    }
    r
}

#[no_mangle]
pub unsafe extern "C" fn recvmsg(fd: i32, m: *mut msghdr, flags: i32) -> isize {
    // SAFETY: see the module above.
    unsafe {
        let native = || real::recvmsg(fd, m, flags);
        let Some(i) = conn(fd) else {
            let r = native();
            if r >= 0 {
                descriptors_came(fd, m);
            }
            return r;
        };
        if !pages::writable(m, size_of::<msghdr>()) {
            crate::set_errno(libc::EFAULT);
            return -1;
        }
        if !(*m).msg_name.is_null() && (*m).msg_namelen > i32::MAX as u32 {
            return native(); // EINVAL
        }
        match iovs(m) {
            Some(v) if recv_on_lane(flags, fd) => {
                let was_native = core::cell::Cell::new(false);
                let r = conn::recv(fd, i, v, flags & RECV_OK, || {
                    was_native.set(true);
                    native()
                });
                if r >= 0 && !was_native.get() {
                    if !(*m).msg_name.is_null() {
                        (*m).msg_namelen = 0;
                    }
                    (*m).msg_flags = flags & libc::MSG_CMSG_CLOEXEC; // the kernel leaves this flag set
                    tcp::put_inq(i, fd, &mut *m);
                }
                r
            }
            _ if flags & libc::MSG_ERRQUEUE != 0 => {
                conn::zerocopy::receive(i, fd, flags, m, native)
            }
            None => native(), // the kernel refuses it
            _ => {
                let r = tcp::recv_or_told(table::conn(i), fd, flags, native);
                if r > 0 && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE | libc::MSG_OOB) == 0 {
                    table::conn(i).rx.tcp_pos.add(num::count(r) as u64, Relaxed);
                }
                r
            }
        }
    }
}

/// Maximum number of messages of one `sendmmsg`; the kernel leaves the rest to the next call.
const MOST: u32 = 1024;

#[no_mangle]
pub unsafe extern "C" fn sendmmsg(fd: i32, v: *mut mmsghdr, n: u32, flags: i32) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        match conn(fd) {
            Some(i) => each(fd, i, v, n.min(MOST), |h| {
                let r = sendmsg(fd, h, flags);
                // If a message was sent only in part, sending the next one would leave a gap in the stream.
                (r, whole(h, r))
            }),
            None => {
                let here = if v.is_null() { 0 } else { n.min(MOST) };
                let messages = (0..here as usize).map(|k| &raw const (*v.add(k)).msg_hdr);
                descriptors_leave(messages);
                real::sendmmsg(fd, v, n, flags)
            }
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
        let Some(i) = conn(fd) else {
            let done = real::recvmmsg(fd, v, n, flags, t);
            for k in 0..num::word(done.max(0)) {
                descriptors_came(fd, &raw const (*v.add(k)).msg_hdr);
            }
            return done;
        };
        if !t.is_null() && !pages::writable(t, size_of::<timespec>()) {
            crate::set_errno(libc::EFAULT);
            return -1;
        }
        let end = match t.as_ref().map(ns_of) {
            None => None,
            Some(Some(ns)) => Some(sys::now_ns().saturating_add(ns)),
            Some(None) => return real::recvmmsg(fd, v, n, flags, t), // EINVAL
        };
        let mut f = flags & !libc::MSG_WAITFORONE;
        // The kernel's recvmmsg checks for a pending error before it takes bytes, and keeps an error that comes after
        // them.
        let mut error = tcp::error_now(i, fd);
        if error != 0 {
            crate::set_errno(error);
            return -1;
        }
        let done = each(fd, i, v, n, |h| {
            let r = recvmsg(fd, h, f);
            if r < 0 {
                error = crate::errno();
            }
            if flags & libc::MSG_WAITFORONE != 0 {
                f |= libc::MSG_DONTWAIT;
            }
            // As in the kernel, the clock is checked only here, so waiting for one message may take longer than the
            // time-out.
            let left = end.map(|e| e.saturating_sub(sys::now_ns()));
            if let Some(left) = left.filter(|_| r >= 0) {
                t.write(timespec {
                    tv_sec: num::long(left / SECOND),
                    tv_nsec: num::long(left % SECOND),
                });
            }
            (r, left != Some(0))
        });
        if done > 0 {
            table::conn(i).rx.error.put(error);
        }
        done
    }
}

const SECOND: u64 = 1_000_000_000;

/// Nanoseconds of a time-out; `None`: the kernel refuses it.
fn ns_of(t: &timespec) -> Option<u64> {
    let sec = u64::try_from(t.tv_sec).ok()?;
    let ns = u64::try_from(t.tv_nsec).ok().filter(|n| *n < SECOND)?;
    Some(sec.saturating_mul(SECOND).saturating_add(ns))
}

/// Was the message sent completely?
///
/// # Safety
/// `m` is the application's message header.
unsafe fn whole(m: *const msghdr, sent: isize) -> bool {
    // SAFETY: by contract.
    let all = unsafe { iovs(m) }.map_or(0, |s| Iov::new(s).left());
    sent >= 0 && num::count(sent) >= all
}

/// Processes one message after the other, as the kernel does: an error is returned only if it is the first result.
/// `f` also says whether to go on.
///
/// # Safety
/// `v` is the application's array of `n` entries.
unsafe fn each(
    fd: i32,
    i: u32,
    v: *mut mmsghdr,
    n: u32,
    mut f: impl FnMut(*mut msghdr) -> (isize, bool),
) -> i32 {
    let gen = table::conn(i).gen.load(Relaxed);
    let mut done = 0;
    for k in 0..n as usize {
        // The descriptor may stand for another connection by now; the remaining messages are not for that one.
        if done > 0 && (conn(fd) != Some(i) || table::conn(i).gen.load(Relaxed) != gen) {
            break;
        }
        // SAFETY: inside the array.
        let at = unsafe { v.add(k) };
        if !pages::writable(at, size_of::<mmsghdr>()) {
            crate::set_errno(libc::EFAULT);
            return if done > 0 { done } else { -1 };
        }
        // SAFETY: the application's, and just proven.
        let e = unsafe { &mut *at };
        let (r, more) = f(&mut e.msg_hdr);
        if r < 0 {
            return if done > 0 { done } else { -1 };
        }
        e.msg_len = num::small(num::count(r));
        done += 1;
        if !more {
            break;
        }
    }
    done
}
