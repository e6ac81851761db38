//! `io_uring_setup`, `io_uring_enter` and `io_uring_register`, by number: libc has no functions of these names. What
//! the kernel would do to a connection or an epoll set unseen by the shim is done by the shim instead, or the
//! connection goes back to TCP first.

use super::{msg, ready};
use crate::process;
use crate::readiness::epoll;
use crate::state::fdtab::{self, get, Fd};
use crate::state::uring::{self, Params, Sqe};
use crate::sys::{env, pages, real, thread};
use core::ffi::c_void;
use lane::num;
use lane::proto::reason::Reason;

const OP_NOP: u8 = 0;
const OP_POLL_ADD: u8 = 6;
const OP_POLL_REMOVE: u8 = 7;
const OP_SENDMSG: u8 = 9;
const OP_TIMEOUT: u8 = 11;
const OP_TIMEOUT_REMOVE: u8 = 12;
const OP_ACCEPT: u8 = 13;
const OP_ASYNC_CANCEL: u8 = 14;
const OP_LINK_TIMEOUT: u8 = 15;
const OP_CLOSE: u8 = 19;
const OP_FILES_UPDATE: u8 = 20;
const OP_EPOLL_CTL: u8 = 29;
const OP_SPLICE: u8 = 30;
const OP_TEE: u8 = 33;
const OP_SENDMSG_ZC: u8 = 48;
/// `splice_fd_in` is an index of a registered file.
const SPLICE_FD_IN_FIXED: u32 = 1 << 31;

const FIXED_FILE: u8 = 1;
const IO_DRAIN: u8 = 2;
const IO_LINK: u8 = 4;
const IO_HARDLINK: u8 = 8;
const BUFFER_SELECT: u8 = 32;

const REGISTER_FILES: u32 = 2;
const REGISTER_FILES_UPDATE: u32 = 6;
const REGISTER_FILES2: u32 = 13;
const REGISTER_FILES_UPDATE2: u32 = 14;
const REGISTER_RING_FDS: u32 = 20;
const REGISTER_RESIZE_RINGS: u32 = 33;
/// The ring itself is registered: `fd` is its index.
const REGISTER_USE_REGISTERED_RING: u32 = 1 << 31;
const ENTER_REGISTERED_RING: u32 = 1 << 4;

/// # Safety
/// As the system call.
pub unsafe extern "C" fn setup(entries: u32, params: *mut c_void) -> i32 {
    let _inside = thread::enter();
    let (n, p) = (libc::SYS_io_uring_setup, params as usize);
    // SAFETY: passed on.
    let fd = unsafe { real::call(n, entries as usize, p, 0, 0, 0, 0) };
    if fd >= 0 && !env::off() && fdtab::init() {
        crate::preserving_errno(|| {
            // SAFETY: the kernel has just filled them in; any bytes are a value.
            let p = unsafe { params.cast::<Params>().read_unaligned() };
            if let Some(r) = uring::made(fd, &p) {
                if !fdtab::set(fd, Fd::Ring(r)) {
                    uring::closed(r);
                }
            }
        });
    }
    fd
}

/// # Safety
/// As the system call.
pub unsafe extern "C" fn enter(
    fd: i32,
    to_submit: u32,
    least: u32,
    flags: u32,
    arg: *const c_void,
    size: usize,
) -> i32 {
    if to_submit > 0 && flags & ENTER_REGISTERED_RING == 0 {
        if let Fd::Ring(r) = get(fd) {
            let _inside = thread::enter();
            crate::preserving_errno(|| submitting(r, to_submit));
        }
    }
    let (n, ring, count) = (libc::SYS_io_uring_enter, num::word(fd), to_submit as usize);
    let (least, flags, arg) = (least as usize, flags as usize, arg as usize);
    // SAFETY: passed on.
    unsafe { real::call(n, ring, count, least, flags, arg, size) }
}

/// # Safety
/// As the system call.
pub unsafe extern "C" fn register(fd: i32, op: u32, arg: *mut c_void, n: u32) -> i32 {
    let _inside = thread::enter();
    // A ring that is entered by its registered index could not be recognized, nor one whose memory was replaced by a
    // resize. EINVAL is what kernels before 5.18 and 6.13 return; programs then go on with the descriptor, and with
    // the old size.
    let what = op & !REGISTER_USE_REGISTERED_RING;
    let is_lost = matches!(what, REGISTER_RING_FDS | REGISTER_RESIZE_RINGS);
    if is_lost && matches!(get(fd), Fd::Ring(_)) {
        crate::set_errno(libc::EINVAL);
        return -1;
    }
    crate::preserving_errno(|| {
        if let Some((files, n)) = listed(op, arg, n) {
            unseen_files(files, n);
        }
    });
    let (call, fd, op, n) = (
        libc::SYS_io_uring_register,
        num::word(fd),
        op as usize,
        n as usize,
    );
    // SAFETY: passed on.
    unsafe { real::call(call, fd, op, arg as usize, n, 0, 0) }
}

/// The list of descriptors that an operation registers. `None` also if it cannot be read: the kernel will refuse it.
fn listed(op: u32, arg: *const c_void, n: u32) -> Option<(*const i32, u32)> {
    // struct io_uring_rsrc_register: nr u32, flags u32, resv2 u64, data u64; struct io_uring_files_update:
    // offset u32, resv u32, data u64; struct io_uring_rsrc_update2: the same, then tags u64, nr u32.
    let (list, count, words) = match op & !REGISTER_USE_REGISTERED_RING {
        REGISTER_FILES => return Some((arg.cast(), n)),
        REGISTER_FILES2 => (2, Some(0), 6),
        REGISTER_FILES_UPDATE => (1, None, 4),
        REGISTER_FILES_UPDATE2 => (1, Some(6), 7),
        _ => return None,
    };
    if !pages::readable(arg, words * size_of::<u32>()) {
        return None;
    }
    // SAFETY: just proven.
    unsafe {
        let count = count.map_or(n, |k| arg.cast::<u32>().add(k).read_unaligned());
        let list = arg.cast::<u64>().add(list).read_unaligned();
        Some((list as *const i32, count))
    }
}

/// Descriptors that later requests will name only by an index.
fn unseen_files(list: *const i32, n: u32) {
    process::force_all(|f| {
        for k in 0..n.min(num::small(fdtab::MAX_FD)) as usize {
            let at = list.wrapping_add(k);
            if !pages::readable(at, size_of::<i32>()) {
                return;
            }
            // SAFETY: just proven.
            f(unsafe { at.read_unaligned() }, Reason::Bypassed);
        }
    });
}

/// The kernel is about to use this descriptor in a way that the hooks do not see.
fn unseen(fd: i32) {
    match get(fd) {
        Fd::Conn(_) => process::force_tcp(fd, Reason::Bypassed),
        Fd::Set(s) => epoll::nest(s),
        _ => {}
    }
}

fn submitting(ring: u32, to_submit: u32) {
    let mut chained = false;
    uring::each_new(ring, to_submit, |sqe| {
        request(sqe, chained);
        chained = sqe.flags & (IO_LINK | IO_HARDLINK) != 0;
    });
}

fn request(sqe: &mut Sqe, chained: bool) {
    let (fd, fixed) = (sqe.fd, sqe.flags & FIXED_FILE != 0);
    match sqe.opcode {
        OP_NOP | OP_POLL_REMOVE | OP_TIMEOUT | OP_TIMEOUT_REMOVE | OP_ACCEPT | OP_ASYNC_CANCEL
        | OP_LINK_TIMEOUT => {}
        OP_EPOLL_CTL => epoll_ctl(sqe, chained),
        OP_FILES_UPDATE => unseen_files(sqe.addr as *const i32, sqe.len),
        OP_SENDMSG | OP_SENDMSG_ZC => {
            // SAFETY: the request's message, as the application promises the kernel.
            unsafe { msg::descriptors_leave(core::iter::once(sqe.addr as *const libc::msghdr)) };
            if !fixed {
                unseen(fd);
            }
        }
        OP_SPLICE | OP_TEE => {
            if sqe.op_flags & SPLICE_FD_IN_FIXED == 0 {
                unseen(sqe.splice_fd_in);
            }
            if !fixed {
                unseen(fd);
            }
        }
        _ if fixed => {}
        // Whatever the result of the close, the shim no longer watches the descriptor.
        OP_CLOSE => process::disown(fd),
        OP_POLL_ADD => match get(fd) {
            Fd::Conn(_) => process::force_tcp(fd, Reason::EpollShared),
            _ => unseen(fd),
        },
        _ => unseen(fd),
    }
}

/// A registration that libc's `epoll_ctl` would have made is made by the shim's hook, and the request is changed into
/// one that the kernel completes with the same result.
fn epoll_ctl(sqe: &mut Sqe, chained: bool) {
    let (ep, op, fd) = (
        sqe.fd,
        num::signed(sqe.len),
        num::signed(num::low32(sqe.off)),
    );
    // A request in a chain takes effect only later; a malformed one is left for the kernel to refuse.
    let late = chained || sqe.flags & (IO_LINK | IO_HARDLINK | IO_DRAIN) != 0;
    let odd = sqe.flags & (FIXED_FILE | BUFFER_SELECT) != 0
        || (sqe.ioprio, sqe.buf_index, sqe.splice_fd_in) != (0, 0, 0);
    match (get(ep), get(fd)) {
        (Fd::Set(_), Fd::Conn(_)) if !late && !odd => {
            // SAFETY: the request's event, as the application promises the kernel.
            let r = unsafe { ready::epoll_ctl(ep, op, fd, sqe.addr as *mut libc::epoll_event) };
            let error = if r == 0 { 0 } else { crate::errno() };
            if r == 0 {
                (sqe.opcode, sqe.fd, sqe.off) = (OP_NOP, -1, 0);
                (sqe.addr, sqe.len, sqe.op_flags) = (0, 0, 0);
            } else if let (libc::EEXIST | libc::ENOENT, Some((set, member))) =
                (error, uring::example())
            {
                // Only the shim may know which registrations exist, and later requests may have changed that when the
                // kernel comes to this one. So the request is replaced by one that certainly gets this error. The
                // kernel finds other errors by itself.
                let known = error == libc::EEXIST;
                (sqe.fd, sqe.off) = (set, num::word(if known { member } else { ep }) as u64);
            }
        }
        (_, Fd::Conn(_)) => process::force_tcp(fd, Reason::EpollShared),
        (_, Fd::Set(inner)) => epoll::nest(inner),
        _ => {}
    }
}

/// `struct iocb` of the kernel's older interface, which libaio uses.
#[repr(C)]
pub struct Iocb {
    _head: [u64; 2],
    opcode: u16,
    _priority: i16,
    fd: u32,
    _rest: [u64; 5],
}

const IOCB_CMD_POLL: u16 = 5;

/// `io_submit`: the kernel itself receives, sends or polls, unseen by the shim, so connections go back to TCP.
///
/// # Safety
/// As the system call.
pub unsafe extern "C" fn submit(context: usize, n: i64, list: *const *const Iocb) -> i32 {
    let _inside = thread::enter();
    process::force_all(|f| {
        for k in 0..usize::try_from(n).unwrap_or(0) {
            let at = list.wrapping_add(k);
            if !pages::readable(at, size_of::<*const Iocb>()) {
                break; // the kernel will refuse it
            }
            // SAFETY: just proven.
            let b = unsafe { at.read_unaligned() };
            if !pages::readable(b, size_of::<Iocb>()) {
                break;
            }
            // SAFETY: as above.
            let b = unsafe { b.read_unaligned() };
            let why = match b.opcode {
                IOCB_CMD_POLL => Reason::EpollShared,
                _ => Reason::Bypassed,
            };
            f(num::signed(b.fd), why);
        }
    });
    let (call, n, list) = (
        libc::SYS_io_submit,
        usize::from_ne_bytes(n.to_ne_bytes()),
        list as usize,
    );
    // SAFETY: passed on.
    unsafe { real::call(call, context, n, list, 0, 0, 0) }
}
