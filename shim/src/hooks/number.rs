//! `syscall(2)` of the C library: a call by number does what the call by name does. `calls.rs` lists all numbers;
//! this file converts words to arguments, and has the calls whose raw form differs from the C function.

use super::{fd, make, memory, msg, number, proc, ready, rw, sock, uring, user};
use crate::process;
use crate::sys::{self, pages, real};
use core::ffi::c_void;
use lane::num;
use lane::proto::reason::Reason;
use libc::{epoll_event, fd_set, iovec, pollfd, sigset_t, timespec};

include!("calls.rs");

/// Converts a word of a system call to an argument.
trait Word {
    fn of(w: usize) -> Self;
}

macro_rules! words {
    ($($t:ty),*) => {$(
        impl Word for $t {
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_possible_wrap,
                reason = "the kernel, too, takes the low part of a word for an argument that is smaller"
            )]
            fn of(w: usize) -> Self { w as $t }
        }
    )*};
}
words!(i32, u32, i64, u64, usize);

impl<T> Word for *const T {
    fn of(w: usize) -> Self {
        w as *const T
    }
}

impl<T> Word for *mut T {
    fn of(w: usize) -> Self {
        w as *mut T
    }
}

/// Converts the result of a hook to what `syscall` returns: the result, or -1 with errno set.
trait Answer {
    fn raw(self) -> i64;
}

impl Answer for i32 {
    fn raw(self) -> i64 {
        self.into()
    }
}

impl<T> Answer for *mut T {
    fn raw(self) -> i64 {
        self as i64
    }
}

impl Answer for isize {
    fn raw(self) -> i64 {
        self as i64
    }
}

type Words = [usize; 6];

macro_rules! arities {
    ($($(#[$only:meta])* $name:ident($($t:ident $k:literal),*);)*) => {$(
        $(#[$only])*
        /// Calls a hook with this number of arguments.
        ///
        /// # Safety
        /// As the hook; the words are what its call by number takes.
        #[inline(always)]
        unsafe fn $name<$($t: Word,)* R: Answer>(f: unsafe extern "C" fn($($t),*) -> R, _w: Words) -> i64 {
            // SAFETY: by contract.
            unsafe { f($($t::of(_w[$k])),*) }.raw()
        }
    )*};
}
arities! {
    #[cfg(target_arch = "x86_64")]
    c0();
    c1(A 0);
    c2(A 0, B 1);
    c3(A 0, B 1, C 2);
    c4(A 0, B 1, C 2, D 3);
    c5(A 0, B 1, C 2, D 3, E 4);
    c6(A 0, B 1, C 2, D 3, E 4, F 5);
}

macro_rules! by_number {
    (hooks { $($(#[$only:meta])* $n:ident $arity:ident $hook:path [$($symbol:ident)*];)* } $($rest:tt)*) => {
        /// `syscall(2)`: calls that have a hook go through it, with the same result convention.
        #[no_mangle]
        pub unsafe extern "C" fn syscall(
            n: i64,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> i64 {
            // SAFETY: see the module above; each hook has the contract of the call of its number.
            unsafe {
                match n {
                    $($(#[$only])* libc::$n => $arity($hook, [a, b, c, d, e, f]),)*
                    _ => real::syscall(n, a, b, c, d, e, f),
                }
            }
        }
    };
}
calls!(by_number);

/// Size in bytes of the kernel's signal set. The kernel returns EINVAL for any other size.
const SET: usize = 8;

/// The raw call passes the offset in two words; a 64-bit kernel uses only the first.
pub unsafe extern "C" fn preadv2(
    fd: i32,
    v: *const iovec,
    n: i32,
    low: i64,
    _high: usize,
    f: i32,
) -> isize {
    // SAFETY: as the call by name.
    unsafe { rw::preadv2(fd, v, n, low, f) }
}

pub unsafe extern "C" fn pwritev2(
    fd: i32,
    v: *const iovec,
    n: i32,
    low: i64,
    _high: usize,
    f: i32,
) -> isize {
    // SAFETY: as the call by name.
    unsafe { rw::pwritev2(fd, v, n, low, f) }
}

/// Returns EFAULT where the C library's function would access memory that in a raw call only the kernel accesses.
fn fault() -> i32 {
    crate::set_errno(libc::EFAULT);
    -1
}

/// The C library's `select` itself reads and writes the time-out, so it gets a copy that is certainly accessible.
#[cfg(target_arch = "x86_64")]
pub unsafe extern "C" fn select(
    n: i32,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    t: *mut libc::timeval,
) -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        if t.is_null() {
            return ready::select(n, r, w, x, t);
        }
        if !pages::readable_or_null(t) {
            return fault();
        }
        let mut left = t.read_unaligned();
        let got = ready::select(n, r, w, x, &raw mut left);
        if pages::writable(t, size_of::<libc::timeval>()) {
            t.write_unaligned(left);
        }
        got
    }
}

/// Runs `f` with a copy of a time-out and stores the time that is left in the original. The raw system calls do that;
/// the C library's functions do not.
///
/// # Safety
/// `t` is null or the application's time-out.
unsafe fn what_is_left(t: *mut timespec, f: impl FnOnce(*const timespec) -> i32) -> i32 {
    if !pages::readable_or_null(t) {
        return fault();
    }
    // SAFETY: by contract; proven.
    let Some(whole) = (unsafe { t.as_ref() }).copied() else {
        return f(t);
    };
    let start = sys::now_ns();
    let r = f(&raw const whole);
    let sane = whole.tv_sec >= 0 && (0..1_000_000_000).contains(&whole.tv_nsec);
    if sane && pages::writable(t, size_of::<timespec>()) {
        let waited = i128::from(sys::now_ns().saturating_sub(start));
        let all = i128::from(whole.tv_sec) * 1_000_000_000 + i128::from(whole.tv_nsec);
        let left = (all - waited).max(0);
        // SAFETY: by contract.
        unsafe {
            (*t).tv_sec = i64::try_from(left / 1_000_000_000).unwrap_or(i64::MAX);
            (*t).tv_nsec = (left % 1_000_000_000) as i64;
        }
    }
    r
}

pub unsafe extern "C" fn ppoll(
    p: *mut pollfd,
    n: u64,
    t: *mut timespec,
    s: *const sigset_t,
    size: usize,
) -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        if !s.is_null() && size != SET {
            let w = [p as usize, num::size(n), t as usize, s as usize, size];
            return real::call(libc::SYS_ppoll, w[0], w[1], w[2], w[3], w[4], 0);
        }
        what_is_left(t, |t| ready::ppoll(p, n, t, s))
    }
}

pub unsafe extern "C" fn pselect6(
    n: i32,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    t: *mut timespec,
    mask: *const [usize; 2],
) -> i32 {
    // SAFETY: as the call by name; the last argument points to the mask's address and length
    // (select(2)).
    unsafe {
        if !pages::readable_or_null(mask) {
            return fault();
        }
        let mask = mask.as_ref().copied().unwrap_or([0; 2]);
        if mask[0] != 0 && mask[1] != SET {
            crate::set_errno(libc::EINVAL);
            return -1;
        }
        let s = mask[0] as *const sigset_t;
        what_is_left(t, |t| ready::pselect(n, r, w, x, t, s))
    }
}

pub unsafe extern "C" fn epoll_pwait(
    ep: i32,
    ev: *mut epoll_event,
    n: i32,
    t: i32,
    s: *const sigset_t,
    size: usize,
) -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        if s.is_null() {
            return ready::epoll_wait(ep, ev, n, t);
        }
        if size != SET {
            crate::set_errno(libc::EINVAL);
            return -1;
        }
        ready::epoll_pwait(ep, ev, n, t, s)
    }
}

pub unsafe extern "C" fn epoll_pwait2(
    ep: i32,
    ev: *mut epoll_event,
    n: i32,
    t: *const timespec,
    s: *const sigset_t,
    size: usize,
) -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        if !s.is_null() && size != SET {
            crate::set_errno(libc::EINVAL);
            return -1;
        }
        ready::epoll_pwait2(ep, ev, n, t, s)
    }
}

/// The kernel's `struct sigaction`: handler, flags, restorer, mask.
type Action = [u64; 4];

pub unsafe extern "C" fn rt_sigaction(
    sig: i32,
    new: *const Action,
    old: *mut Action,
    size: usize,
) -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        if size != SET {
            let (new, old) = (new as usize, old as usize);
            return real::call(libc::SYS_rt_sigaction, num::word(sig), new, old, size, 0, 0);
        }
        if !pages::readable_or_null(new) {
            return fault();
        }
        let new = new.as_ref().copied();
        let was = core::cell::Cell::new([0; 4]);
        let install = |n: *const libc::sigaction, o: *mut libc::sigaction| {
            let n = new.zip(n.as_ref()).map(|(k, n)| {
                let flags = u64::from(num::bits(n.sa_flags));
                [n.sa_sigaction as u64, flags, k[2], k[3]]
            });
            let Some(k) = sys::kernel_action(sig, n.as_ref()) else {
                crate::set_errno(libc::EINVAL);
                return -1;
            };
            was.set(k);
            (*o).sa_sigaction = num::size(k[0]);
            (*o).sa_flags = num::signed(num::low32(k[1]));
            0
        };
        let (mut n, mut o): (libc::sigaction, libc::sigaction) = core::mem::zeroed();
        if let Some(k) = new {
            n.sa_sigaction = num::size(k[0]);
            n.sa_flags = num::signed(num::low32(k[1]));
        }
        let n = if new.is_some() {
            &raw const n
        } else {
            core::ptr::null()
        };
        let r = super::signal::change(sig, n, &mut o, install);
        if r == 0 && !old.is_null() {
            if !pages::writable(old, size_of::<Action>()) {
                return fault(); // (the action has been changed nevertheless)
            }
            let k = was.get();
            let flags = u64::from(num::bits(o.sa_flags));
            old.write([o.sa_sigaction as u64, flags, k[2], k[3]]);
        }
        r
    }
}

/// By number only: the C library has no such function.
pub unsafe extern "C" fn seccomp(operation: usize, flags: usize, args: usize) -> i32 {
    const STRICT: usize = 0;
    const FILTER: usize = 1;
    // SAFETY: the application's own pointer, and call.
    unsafe {
        if matches!(operation, STRICT | FILTER) {
            proc::before_filter(operation == STRICT, args as *const c_void);
        }
        real::call(libc::SYS_seccomp, operation, flags, args, 0, 0, 0)
    }
}

/// By number only, too.
pub unsafe extern "C" fn pivot_root(new: usize, old: usize) -> i32 {
    let _inside = crate::sys::thread::enter();
    proc::before_moving();
    // SAFETY: as the caller's own call.
    unsafe { real::call(libc::SYS_pivot_root, new, old, 0, 0, 0, 0) }
}

/// A fork by number runs none of libc's atfork handlers, which is what the caller asked for.
#[cfg(target_arch = "x86_64")]
pub unsafe extern "C" fn fork() -> i32 {
    // SAFETY: as the call by name.
    unsafe { clone(libc::SIGCHLD as usize, 0, 0, 0, 0) }
}

/// The parent sleeps until the child has executed a program or ended, but the child gets a copy of the memory: it
/// returns through these stack frames, and in shared memory would overwrite those of its parent.
#[cfg(target_arch = "x86_64")]
pub unsafe extern "C" fn vfork() -> i32 {
    // SAFETY: as the call by name.
    unsafe {
        clone(
            libc::CLONE_VFORK as usize | libc::SIGCHLD as usize,
            0,
            0,
            0,
            0,
        )
    }
}

/// `clone` and `clone3` by number. See [`made`].
pub unsafe extern "C" fn clone(
    flags: usize,
    stack: usize,
    parent: usize,
    child: usize,
    tls: usize,
) -> i32 {
    let flags = private(flags, stack == 0);
    // SAFETY: as the caller's own call.
    let native = || unsafe { real::call(libc::SYS_clone, flags, stack, parent, child, tls, 0) };
    made(flags, native)
}

/// Words of `struct clone_args`: flags, stack (linux/sched.h).
const FLAGS: usize = 0;
const STACK: usize = 5;
/// Words of the first version of the struct, and of the longest known version.
const CLONE_ARGS: [usize; 2] = [8, 11];

pub unsafe extern "C" fn clone3(args: *mut u64, size: usize) -> i32 {
    // SAFETY: the application's own pointer and size.
    let native =
        |p: *mut u64| unsafe { real::call(libc::SYS_clone3, p as usize, size, 0, 0, 0, 0) };
    let words = size / 8;
    let known = (CLONE_ARGS[0]..=CLONE_ARGS[1]).contains(&words);
    if !known || !pages::readable(args, size) {
        return native(args);
    }
    let mut copy = [0u64; CLONE_ARGS[1]];
    // SAFETY: just proven.
    unsafe { core::ptr::copy_nonoverlapping(args, copy.as_mut_ptr(), words) };
    let flags = private(num::size(copy[FLAGS]), copy[STACK] == 0);
    copy[FLAGS] = flags as u64;
    made(flags, || native(copy.as_mut_ptr()))
}

/// Removes CLONE_VM if the child would return on its parent's stack: see [`vfork`].
fn private(flags: usize, same_stack: bool) -> usize {
    let vfork = (libc::CLONE_VM | libc::CLONE_VFORK) as usize;
    match same_stack && flags & vfork == vfork {
        true => flags & !(libc::CLONE_VM as usize),
        false => flags,
    }
}

/// A child that shares neither memory nor descriptors is like a child of `fork`; one that shares both is a thread; a
/// child of `vfork` waits for its exec and leaves alone what it shares. With any other combination, parent and child
/// would not learn of each other's changes to descriptors, and the shim could no longer trust any number: it steps
/// out.
fn made(flags: usize, native: impl FnOnce() -> i32) -> i32 {
    let has = |all: i32| flags & num::word(all) == num::word(all);
    let (memory, files) = (has(libc::CLONE_VM), has(libc::CLONE_FILES));
    let thread = memory && files && has(libc::CLONE_THREAD);
    let vfork = memory && !files && has(libc::CLONE_VFORK);
    if (memory || files) && !thread && !vfork {
        let _inside = crate::sys::thread::enter();
        process::step_out(Reason::Shared);
    }
    match memory {
        true => native(),
        false => proc::forked(native),
    }
}

/// Start function of the child of a `clone`, and its argument.
#[repr(C)]
struct Start {
    f: unsafe extern "C" fn(*mut c_void) -> i32,
    arg: *mut c_void,
}

unsafe extern "C" fn begin(start: *mut c_void) -> i32 {
    // SAFETY: `named` passes its own variable, of which the child has a copy at the same place.
    let s = unsafe { start.cast::<Start>().read() };
    crate::preserving_errno(process::after_fork_child);
    // (The child never returns through the hook that its parent is in.)
    // SAFETY: what the application has passed for the child.
    crate::sys::thread::outside(|| unsafe { (s.f)(s.arg) })
}

type Clone = unsafe fn(
    Option<unsafe extern "C" fn(*mut c_void) -> i32>,
    *mut c_void,
    i32,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> i32;

macro_rules! clones {
    ($($name:ident)*) => {$(
        /// The C function of this name. Its variable arguments are passed in registers and on the stack like fixed
        /// ones.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            f: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
            stack: *mut c_void,
            flags: i32,
            arg: *mut c_void,
            parent: *mut c_void,
            tls: *mut c_void,
            child: *mut c_void,
        ) -> i32 {
            // SAFETY: see the module above.
            unsafe { named(real::$name, f, (stack, flags, arg), [parent, tls, child]) }
        }
    )*};
}

/// The functions themselves, apart from the calls by number.
pub mod by_name {
    use super::{c_void, named, real};
    clones!(clone __clone);
}

/// # Safety
/// As `clone(2)`.
unsafe fn named(
    native: Clone,
    f: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
    (stack, flags, arg): (*mut c_void, i32, *mut c_void),
    [parent, tls, child]: [*mut c_void; 3],
) -> i32 {
    match f {
        Some(f) if flags & libc::CLONE_VM == 0 => {
            let start = Start { f, arg };
            let p = (&raw const start).cast_mut().cast();
            made(num::word(flags), || {
                // SAFETY: as the caller's own call. `start` outlives the call here, and the child has
                // a copy of this frame.
                unsafe { native(Some(begin), stack, flags, p, parent, tls, child) }
            })
        }
        _ => made(num::word(flags), || {
            // SAFETY: as the caller's own call.
            unsafe { native(f, stack, flags, arg, parent, tls, child) }
        }),
    }
}
