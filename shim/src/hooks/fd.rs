//! Descriptors: closing, duplicating, flags.

use super::sock::nonblock;
use crate::process::{self, not_ours};
use crate::state::fdtab::{self, get, Fd};
use crate::state::table;
use crate::sys::{self, real, thread};
use crate::tcp;
use core::ffi::{c_char, c_void};
use lane::num;
use lane::proto::reason::Reason;

/// Connections whose close has to linger (SO_LINGER); the waiting is done after the descriptors are closed.
#[derive(Default)]
struct Linger {
    all: [usize; 16],
    n: usize,
}

impl Linger {
    /// If there are more than fit here, the waiting for the others is done before their descriptors are closed.
    fn add(&mut self, what: usize) {
        match self.all.get_mut(self.n) {
            Some(place) => (*place, self.n) = (what, self.n + 1),
            None => process::closed(what),
        }
    }
}

impl Drop for Linger {
    #[inline(always)]
    fn drop(&mut self) {
        self.all
            .iter()
            .take(self.n)
            .for_each(|w| process::closed(*w));
    }
}

/// Work to be done before `fd` is closed. False if it is one of the shim's own descriptors, which stays open.
fn closing(fd: i32, later: &mut Linger) -> bool {
    if get(fd) == Fd::Other {
        return true;
    }
    if is_hidden(fd) {
        crate::set_errno(libc::EBADF);
        return false;
    }
    // (A vfork child has a descriptor table of its own: what it closes does not concern its parent.)
    if !not_ours() {
        if let Some(what) = crate::preserving_errno(|| process::before_close(fd)) {
            later.add(what);
        }
    }
    true
}

/// Is it one of the shim's own descriptors, which the application must not see?
fn is_hidden(fd: i32) -> bool {
    if get(fd) != Fd::Ours {
        return false;
    }
    match not_ours() {
        // A vfork child needs the doorbells of its lanes to take them down before its exec, so ours stay hidden in
        // it. (A descriptor that the child itself put at one of our numbers is not close-on-exec.)
        true => sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC != 0),
        false => crate::preserving_errno(|| fdtab::is_ours(fd)),
    }
}

#[no_mangle]
pub unsafe extern "C" fn close(fd: i32) -> i32 {
    let _inside = thread::enter();
    let mut later = Linger::default();
    if !closing(fd, &mut later) {
        return -1;
    }
    // SAFETY: see the module above.
    let r = unsafe { real::close(fd) };
    fdtab::changed(fd);
    r
}

#[no_mangle]
pub unsafe extern "C" fn close_range(first: u32, last: u32, flags: i32) -> i32 {
    const UNSHARE: i32 = 2;
    const CLOEXEC: i32 = 4;
    let _inside = thread::enter();
    if flags & UNSHARE != 0 {
        process::before_split();
    }
    if flags & CLOEXEC != 0 || table::table().is_none() || first > last {
        // SAFETY: see the module above.
        return unsafe { real::close_range(first, last, flags) };
    }
    // Before anything is given up, ask whether the kernel accepts the call. (No descriptor has this number.)
    // SAFETY: as above.
    let r = unsafe { real::close_range(u32::MAX, u32::MAX, flags) };
    if r != 0 {
        return r;
    }
    // Close the ranges between our own descriptors, which stay open.
    let high = num::bits(fdtab::high_with_ours().max(0));
    let mut later = Linger::default();
    let mut at = first;
    while at <= last {
        let mut end = at;
        if at > high {
            end = last;
        } else {
            while end < last.min(high)
                && get(num::signed(at)) == Fd::Other
                && get(num::signed(end) + 1) == Fd::Other
            {
                end += 1;
            }
        }
        if at <= high && is_hidden(num::signed(at)) {
            at += 1;
            continue;
        }
        let known = || (at..=end.min(high)).map(num::signed);
        known().for_each(|fd| _ = closing(fd, &mut later));
        // SAFETY: as above; a part of the application's range.
        let r = unsafe { real::close_range(at, end, flags) };
        known().for_each(fdtab::changed);
        if r != 0 {
            return r;
        }
        if end == u32::MAX {
            break;
        }
        at = end + 1;
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn closefrom(first: i32) {
    let first = first.max(0);
    // SAFETY: see the module above.
    if unsafe { close_range(num::bits(first), u32::MAX, 0) } == 0 {
        return;
    }
    // A seccomp filter refuses close_range, or the kernel lacks it: close one by one, as the C library does.
    let limit = num::int(sys::rlimit_nofile().min(fdtab::MAX_FD as u64));
    for fd in first..limit.max(fdtab::high() + 1) {
        // SAFETY: as above.
        unsafe { close(fd) };
    }
}

#[no_mangle]
pub unsafe extern "C" fn dup(fd: i32) -> i32 {
    let _inside = thread::enter();
    fdtab::settled(fd);
    // SAFETY: see the module above.
    let new = unsafe { real::dup(fd) };
    copied(fd, new);
    new
}

fn copied(old: i32, new: i32) {
    if new < 0 {
        return;
    }
    fdtab::is_new(new);
    if get(old) == Fd::Other && get(new) == Fd::Other {
        return;
    }
    match not_ours() {
        false => crate::preserving_errno(|| process::duplicated(old, new)),
        true => crate::preserving_errno(|| process::copied_for_another(old, new)),
    }
}

#[no_mangle]
pub unsafe extern "C" fn dup2(a: i32, b: i32) -> i32 {
    // SAFETY: see the module above.
    unsafe { onto(a, b, 0, || real::dup2(a, b)) }
}

#[no_mangle]
pub unsafe extern "C" fn dup3(a: i32, b: i32, f: i32) -> i32 {
    // SAFETY: see the module above.
    unsafe { onto(a, b, f, || real::dup3(a, b, f)) }
}

/// dup2 and dup3, which also close `b` unless the kernel refuses the call.
fn onto(a: i32, b: i32, flags: i32, native: impl Fn() -> i32) -> i32 {
    let _inside = thread::enter();
    fdtab::settled(a);
    if get(a) == Fd::Other && get(b) == Fd::Other {
        return native();
    }
    if not_ours() {
        let new = native();
        copied(a, new);
        return new;
    }
    let refused = || {
        flags & !libc::O_CLOEXEC != 0
            || num::word(b) as u64 >= sys::rlimit_nofile() // (it may have been lowered below a number in use)
            || sys::fcntl(a, libc::F_GETFD, 0).is_err()
    };
    if a == b || refused() {
        return native();
    }
    let mut later = Linger::default();
    if !closing(b, &mut later) {
        return -1; // `b` is one of ours: fail as if the descriptor table were full
    }
    fdtab::changes(b); // (whatever kind of descriptor it was)
    let new = native();
    copied(a, new);
    fdtab::changed(b);
    new
}

#[no_mangle]
pub unsafe extern "C" fn fcntl(fd: i32, cmd: i32, arg: usize) -> i32 {
    // SAFETY: see the module above; a fixed third argument serves C's variadic callers on the
    // ABIs supported here (it is passed in a register either way).
    unsafe { control(fd, cmd, arg, real::fcntl) }
}

#[no_mangle]
pub unsafe extern "C" fn fcntl64(fd: i32, cmd: i32, arg: usize) -> i32 {
    // SAFETY: as above.
    unsafe { control(fd, cmd, arg, real::fcntl64) }
}

/// # Safety
/// As `fcntl`.
unsafe fn control(fd: i32, cmd: i32, arg: usize, native: unsafe fn(i32, i32, usize) -> i32) -> i32 {
    // (Other commands on other descriptors may block on a file lock, so they run outside.)
    let duplicates = matches!(cmd, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    let _inside = (duplicates || get(fd) != Fd::Other).then(thread::enter);
    if is_hidden(fd) {
        crate::set_errno(libc::EBADF); // as `close` does: programs that probe for open descriptors close those they find
        return -1;
    }
    if duplicates {
        fdtab::settled(fd);
    }
    // SAFETY: passed on.
    let mut r = unsafe { native(fd, cmd, arg) };
    if r < 0 && crate::errno() == libc::ENOSYS {
        // fcntl64 came with glibc 2.28.
        // SAFETY: as above.
        r = unsafe { real::fcntl(fd, cmd, arg) };
    }
    let what = get(fd);
    match (cmd, what) {
        _ if r < 0 => {}
        _ if duplicates => copied(fd, r),
        (libc::F_SETFL, Fd::Conn(_)) => {
            if let Some(i) = tcp::proven(fd) {
                let flags = num::signed(num::low32(arg as u64));
                nonblock(i, flags & libc::O_NONBLOCK != 0);
                if flags & libc::O_ASYNC != 0 {
                    process::force_tcp(fd, Reason::Option); // SIGIO comes from the kernel's socket only
                }
            }
        }
        _ => {}
    }
    r
}

#[no_mangle]
pub unsafe extern "C" fn fdopen(fd: i32, mode: *const c_char) -> *mut c_void {
    // stdio reads, writes and closes inside libc, where there are no hooks.
    process::disown(fd);
    // SAFETY: see the module above.
    unsafe { real::fdopen(fd, mode) }
}

macro_rules! aio {
    ($($name:ident),*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name(cb: *mut c_void) -> i32 {
            // SAFETY: see the module above; aio_fildes is the first member of struct aiocb.
            unsafe {
                if let Some(fd) = cb.cast::<i32>().as_ref() {
                    process::force_tcp(*fd, Reason::Bypassed);
                }
                real::$name(cb)
            }
        }
    )*};
}
aio!(aio_read, aio_write, aio_read64, aio_write64);

#[no_mangle]
pub unsafe extern "C" fn lio_listio(
    mode: i32,
    list: *const *mut c_void,
    n: i32,
    sev: *mut c_void,
) -> i32 {
    // SAFETY: see the module above.
    unsafe {
        if !list.is_null() {
            process::force_all(|f| {
                for k in 0..num::word(n.max(0)) {
                    if let Some(fd) = (*list.add(k)).cast::<i32>().as_ref() {
                        f(*fd, Reason::Bypassed);
                    }
                }
            });
        }
        real::lio_listio(mode, list, n, sev)
    }
}
