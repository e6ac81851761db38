//! `MSG_ZEROCOPY` on a lane. The bytes are copied before the call returns, so its notification is due at once. It
//! says that they were copied (SO_EE_CODE_ZEROCOPY_COPIED, as the kernel's notifications do over loopback).
//!
//! On each socket, the calls that send something are numbered from 0. The kernel numbers the calls that it
//! carries. From the first call on a lane on, we number them, and the kernel is not asked for zero copy on this
//! connection again. So the numbers are contiguous, and the kernel's outstanding notifications come before ours.

use crate::state::table::{self, Local, ZEROCOPY_OURS};
use crate::state::{fdtab, waiters};
use crate::sys::{self, real, thread};
use crate::tcp::put_control;
use crate::{errno, set_errno, sets};
use core::cell::Cell;
use core::sync::atomic::Ordering::*;
use lane::num;
use libc::{iovec, msghdr, sock_extended_err};

const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;
/// The first number not notified yet, and the next number to give. They are equal while the kernel counts.
fn numbers(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, num::low32(word))
}

fn pack(first: u32, next: u32) -> u64 {
    u64::from(first) << 32 | u64::from(next)
}

/// A send with MSG_ZEROCOPY. `go_on` is the send itself; its parameters are the flags to use and how to call the
/// kernel.
///
/// # Safety
/// The buffers are the application's: readable.
#[cold]
pub unsafe fn send(
    fd: i32,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: impl Fn() -> isize,
    go_on: impl Fn(i32, &dyn Fn() -> isize) -> isize,
) -> isize {
    let l = table::local(i);
    let plain = flags & !libc::MSG_ZEROCOPY;
    let empty = vecs.iter().all(|v| v.iov_len == 0);
    if empty || sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY).unwrap_or(0) == 0 {
        return go_on(plain, &native); // the kernel does not look at the flag
    }
    let gen = table::conn(i).gen.load(Relaxed);
    let counted = Cell::new(false);
    let by_kernel = || {
        if l.notifies() {
            let h = header(vecs);
            // SAFETY: the application's buffers, by this function's contract.
            return unsafe { real::sendmsg(fd, &h, plain) };
        }
        let r = native();
        if r > 0 {
            counted.set(true);
            // While this thread is still counted as native: whoever switches afterwards continues with the right
            // number.
            let one_more = |w| {
                let (first, next) = numbers(w);
                Some(pack(first.wrapping_add(1), next.wrapping_add(1)))
            };
            let _ = l.zerocopy.fetch_update(Relaxed, Relaxed, one_more);
        }
        r
    };
    let r = go_on(flags, &by_kernel);
    if r > 0
        && !counted.get()
        && fdtab::conn(fd) == Some(i)
        && table::conn(i).gen.load(Relaxed) == gen
    {
        crate::preserving_errno(|| notify(i, l));
    }
    r
}

fn header(vecs: &[iovec]) -> msghdr {
    // SAFETY: all-zero is a valid msghdr.
    let mut h: msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = vecs.as_ptr().cast_mut();
    h.msg_iovlen = vecs.len() as _;
    h
}

/// Counts one more finished call, and wakes those who wait for its notification.
fn notify(i: u32, l: &Local) {
    let _inside = thread::enter();
    l.zerocopy_ours.fetch_or(ZEROCOPY_OURS, Relaxed);
    let one_more = |w| {
        let (first, next) = numbers(w);
        Some(pack(first, next.wrapping_add(1)))
    };
    let _ = l.zerocopy.fetch_update(SeqCst, Relaxed, one_more);
    sets::error_came(i);
    waiters::look(i);
}

/// A receive from the error queue, after the kernel had nothing there: returns our notification, with all finished
/// calls in one range, as the kernel merges them. `m`: where the call takes control data.
///
/// # Safety
/// `m` is null or the application's message header.
#[cold]
pub unsafe fn told(i: u32, fd: i32, flags: i32, m: *mut msghdr) -> isize {
    let _inside = thread::enter();
    let l = table::local(i);
    let mut word = l.zerocopy.load(Relaxed);
    loop {
        let (first, next) = numbers(word);
        if first == next {
            set_errno(libc::EAGAIN);
            return -1;
        }
        match l
            .zerocopy
            .compare_exchange(word, pack(next, next), Relaxed, Relaxed)
        {
            Ok(_) => break,
            Err(now) => word = now,
        }
    }
    // SAFETY: by contract.
    let Some(h) = (unsafe { m.as_mut() }) else {
        return 0;
    };
    let (first, next) = numbers(word);
    h.msg_namelen = 0;
    h.msg_flags = libc::MSG_ERRQUEUE | flags & libc::MSG_CMSG_CLOEXEC;
    let error = sock_extended_err {
        ee_errno: 0,
        ee_origin: SO_EE_ORIGIN_ZEROCOPY,
        ee_type: 0,
        ee_code: SO_EE_CODE_ZEROCOPY_COPIED,
        ee_pad: 0,
        ee_info: first,
        ee_data: next.wrapping_sub(1),
    };
    // The kernel's message has room for an address after the error; it stays empty.
    const ERROR: usize = core::mem::size_of::<sock_extended_err>();
    let mut data = [0u8; ERROR + core::mem::size_of::<libc::sockaddr_in6>()];
    // SAFETY: plain words, and room for them.
    unsafe {
        data.as_mut_ptr()
            .cast::<sock_extended_err>()
            .write_unaligned(error)
    };
    let domain = sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_DOMAIN);
    let (level, kind, address) = match domain == Ok(libc::AF_INET6 as u32) {
        true => (
            libc::SOL_IPV6,
            libc::IPV6_RECVERR,
            core::mem::size_of::<libc::sockaddr_in6>(),
        ),
        false => (
            libc::SOL_IP,
            libc::IP_RECVERR,
            core::mem::size_of::<libc::sockaddr_in>(),
        ),
    };
    // SAFETY: passed on.
    unsafe { put_control(h, level, kind, &data[..ERROR + address]) };
    0
}

/// A receive from the error queue.
///
/// # Safety
/// As [`told`].
pub unsafe fn receive(
    i: u32,
    fd: i32,
    flags: i32,
    m: *mut msghdr,
    native: impl Fn() -> isize,
) -> isize {
    let r = native();
    if r < 0 && errno() == libc::EAGAIN && table::local(i).owes_notifications() {
        // SAFETY: passed on.
        return unsafe { told(i, fd, flags, m) };
    }
    r
}
