//! The functions that our hooks replace, looked up at their first use.
//!
//! Calls that may block go through these pointers with no lock held: they are cancellation points, and a cancelled
//! thread runs no Rust destructors.

use super::next;
use core::ffi::{c_char, c_void, CStr};
use core::sync::atomic::{AtomicPtr, Ordering::*};
use lane::num;

/// One looked-up symbol.
pub struct Sym {
    name: &'static CStr,
    ptr: AtomicPtr<c_void>,
}

const MISSING: *mut c_void = core::ptr::without_provenance_mut(1);

impl Sym {
    pub const fn new(name: &'static CStr) -> Self {
        Sym {
            name,
            ptr: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Address of the next definition after ours; null if there is none.
    #[inline(always)]
    pub fn get(&self) -> *mut c_void {
        let p = self.ptr.load(Relaxed);
        if p as usize > 1 {
            return p;
        }
        self.look_up()
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        if self.ptr.load(Relaxed) == MISSING {
            return core::ptr::null_mut();
        }
        let p = next::definition(self.name);
        self.ptr
            .store(if p.is_null() { MISSING } else { p }, Relaxed);
        p
    }
}

/// Declares `real::NAME(args) -> ret`, which calls the next definition of NAME, and fails with ENOSYS if the libc has
/// none.
macro_rules! real {
    ($($(#[$only:meta])* $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        #[allow(non_upper_case_globals)]
        mod sym {
            use $crate::sys::real::Sym;
            use core::ffi::CStr;
            $($(#[$only])* pub static $name: Sym = {
                const NAME: &str = concat!(stringify!($name), "\0");
                match CStr::from_bytes_with_nul(NAME.as_bytes()) {
                    Ok(n) => Sym::new(n),
                    Err(_) => panic!("name"),
                }
            };)*
        }
        $(
        $(#[$only])*
        #[allow(clippy::too_many_arguments, non_snake_case)]
        #[inline(always)]
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            let p = sym::$name.get();
            if p.is_null() {
                crate::set_errno(libc::ENOSYS);
                // SAFETY: every return type used here is an integer or a pointer, for which all
                // ones (-1) is a value; pointer-returning callers check `has`.
                return unsafe { core::mem::transmute_copy(&-1isize) };
            }
            // SAFETY: the symbol has this C signature by POSIX or the libc's documentation.
            let f: unsafe extern "C" fn($($ty),*) -> $ret = unsafe { core::mem::transmute(p) };
            // SAFETY: the caller passes on what the application passed.
            unsafe { f($($arg),*) }
        }
        )*
    };
}
pub(crate) use real;

/// Looks up, when the library is loaded, what waits call deep in their stack frames: a lookup takes a kilobyte of
/// stack, and `select` used to call `ppoll` for the first time there.
pub fn find_early() {
    for s in [&sym::poll, &sym::ppoll] {
        s.get();
    }
}

/// `syscall` for a call that returns an `int`.
///
/// # Safety
/// As the system call.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the kernel has returned an int, or the C library -1"
)]
#[inline(always)]
pub unsafe fn call(n: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> i32 {
    // SAFETY: passed on.
    unsafe { syscall(n, a, b, c, d, e, f) as i32 }
}

/// Calls that programs make by number, because older C libraries, and musl, have no function for them.
///
/// # Safety
/// As the system call.
pub unsafe fn close_range(first: u32, last: u32, flags: i32) -> i32 {
    let w = [first as usize, last as usize, num::word(flags)];
    // SAFETY: as the caller's own call.
    unsafe { call(libc::SYS_close_range, w[0], w[1], w[2], 0, 0, 0) }
}

/// # Safety
/// As the system call.
pub unsafe fn execveat(
    dir: i32,
    path: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    flags: i32,
) -> i32 {
    let (path, argv, envp) = (path as usize, argv as usize, envp as usize);
    let n = libc::SYS_execveat;
    // SAFETY: as the caller's own call.
    unsafe { call(n, num::word(dir), path, argv, envp, num::word(flags), 0) }
}

/// Acts on a pending cancellation, as every call that may block does at its entry. No lock may be held.
#[inline(always)]
pub fn test_cancel() {
    static SYM: Sym = Sym::new(c"pthread_testcancel");
    let p = SYM.get();
    if !p.is_null() {
        // SAFETY: POSIX's signature. (Where it is not loaded there are no threads to cancel.)
        let f: unsafe extern "C" fn() = unsafe { core::mem::transmute(p) };
        // SAFETY: it has no preconditions; frames of ours that it unwinds have no destructors.
        unsafe { f() }
    }
}

/// `pthread_cleanup_push` as a function: `f(what)` is called when the thread is cancelled, or (glibc) leaves
/// by `longjmp`. Without threads, or where the C library has no such function, nothing is done.
///
/// # Safety
/// `buf` has room for the library's buffer and stays where it is until [`cleanup_pop`].
pub unsafe fn cleanup_push(buf: *mut c_void, f: extern "C" fn(usize), what: usize) {
    let p = PUSH.get();
    if !p.is_null() && !POP.get().is_null() {
        // SAFETY: the signature in glibc's and musl's pthread.h; a pointer is passed like a usize.
        let push: unsafe extern "C" fn(*mut c_void, extern "C" fn(usize), usize) =
            unsafe { core::mem::transmute(p) };
        // SAFETY: by this function's contract.
        unsafe { push(buf, f, what) }
    }
}

/// Removes the buffer without calling its function.
///
/// # Safety
/// `buf` was given to [`cleanup_push`], and all pushed after it has been popped.
pub unsafe fn cleanup_pop(buf: *mut c_void) {
    let p = POP.get();
    if !p.is_null() && !PUSH.get().is_null() {
        // SAFETY: as above.
        let pop: unsafe extern "C" fn(*mut c_void, i32) = unsafe { core::mem::transmute(p) };
        // SAFETY: by this function's contract.
        unsafe { pop(buf, 0) }
    }
}

static PUSH: Sym = Sym::new(c"_pthread_cleanup_push");
static POP: Sym = Sym::new(c"_pthread_cleanup_pop");

use libc::{
    epoll_event, fd_set, iovec, mmsghdr, msghdr, off_t, pollfd, sigset_t, sockaddr, socklen_t,
    timespec, timeval,
};

real! {
    socket(d: i32, t: i32, p: i32) -> i32;
    connect(fd: i32, a: *const sockaddr, l: socklen_t) -> i32;
    listen(fd: i32, n: i32) -> i32;
    accept(fd: i32, a: *mut sockaddr, l: *mut socklen_t) -> i32;
    accept4(fd: i32, a: *mut sockaddr, l: *mut socklen_t, f: i32) -> i32;
    shutdown(fd: i32, how: i32) -> i32;
    close(fd: i32) -> i32;
    unshare(flags: i32) -> i32;
    chroot(path: *const c_char) -> i32;
    prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32;
    dup(fd: i32) -> i32;
    dup2(a: i32, b: i32) -> i32;
    dup3(a: i32, b: i32, f: i32) -> i32;
    fcntl(fd: i32, cmd: i32, arg: usize) -> i32;
    fcntl64(fd: i32, cmd: i32, arg: usize) -> i32;
    ioctl(fd: i32, req: u64, arg: usize) -> i32;
    getsockopt(fd: i32, l: i32, n: i32, v: *mut c_void, len: *mut socklen_t) -> i32;
    setsockopt(fd: i32, l: i32, n: i32, v: *const c_void, len: socklen_t) -> i32;
    send(fd: i32, p: *const c_void, n: usize, f: i32) -> isize;
    sendto(fd: i32, p: *const c_void, n: usize, f: i32, a: *const sockaddr, l: socklen_t) -> isize;
    sendmsg(fd: i32, m: *const msghdr, f: i32) -> isize;
    sendmmsg(fd: i32, m: *mut mmsghdr, n: u32, f: i32) -> i32;
    recv(fd: i32, p: *mut c_void, n: usize, f: i32) -> isize;
    recvfrom(fd: i32, p: *mut c_void, n: usize, f: i32, a: *mut sockaddr, l: *mut socklen_t) -> isize;
    recvmsg(fd: i32, m: *mut msghdr, f: i32) -> isize;
    recvmmsg(fd: i32, m: *mut mmsghdr, n: u32, f: i32, t: *mut timespec) -> i32;
    read(fd: i32, p: *mut c_void, n: usize) -> isize;
    write(fd: i32, p: *const c_void, n: usize) -> isize;
    readv(fd: i32, v: *const iovec, n: i32) -> isize;
    writev(fd: i32, v: *const iovec, n: i32) -> isize;
    preadv2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize;
    pwritev2(fd: i32, v: *const iovec, n: i32, o: off_t, f: i32) -> isize;
    sendfile(o: i32, i: i32, off: *mut off_t, n: usize) -> isize;
    splice(i: i32, io: *mut i64, o: i32, oo: *mut i64, n: usize, f: u32) -> isize;
    tee(i: i32, o: i32, n: usize, f: u32) -> isize;
    vmsplice(fd: i32, v: *const iovec, n: usize, f: u32) -> isize;
    poll(p: *mut pollfd, n: u64, t: i32) -> i32;
    ppoll(p: *mut pollfd, n: u64, t: *const timespec, s: *const sigset_t) -> i32;
    select(n: i32, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, t: *mut timeval) -> i32;
    pselect(n: i32, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, t: *const timespec, s: *const sigset_t) -> i32;
    epoll_create(n: i32) -> i32;
    epoll_create1(f: i32) -> i32;
    epoll_ctl(ep: i32, op: i32, fd: i32, e: *mut epoll_event) -> i32;
    epoll_wait(ep: i32, e: *mut epoll_event, n: i32, t: i32) -> i32;
    epoll_pwait(ep: i32, e: *mut epoll_event, n: i32, t: i32, s: *const sigset_t) -> i32;
    epoll_pwait2(ep: i32, e: *mut epoll_event, n: i32, t: *const timespec, s: *const sigset_t) -> i32;
    sigaction(sig: i32, new: *const libc::sigaction, old: *mut libc::sigaction) -> i32;
    quick_exit(code: i32) -> i32;
    fork() -> i32;
    _Fork() -> i32;
    __fork() -> i32;
    forkpty(m: *mut i32, name: *mut c_char, term: *const c_void, size: *const c_void) -> i32;
    clone(f: Option<unsafe extern "C" fn(*mut c_void) -> i32>, stack: *mut c_void, flags: i32, arg: *mut c_void, parent: *mut c_void, tls: *mut c_void, child: *mut c_void) -> i32;
    __clone(f: Option<unsafe extern "C" fn(*mut c_void) -> i32>, stack: *mut c_void, flags: i32, arg: *mut c_void, parent: *mut c_void, tls: *mut c_void, child: *mut c_void) -> i32;
    daemon(a: i32, b: i32) -> i32;
    execve(p: *const c_char, a: *const *const c_char, e: *const *const c_char) -> i32;
    execv(p: *const c_char, a: *const *const c_char) -> i32;
    execvp(p: *const c_char, a: *const *const c_char) -> i32;
    execvpe(p: *const c_char, a: *const *const c_char, e: *const *const c_char) -> i32;
    fexecve(fd: i32, a: *const *const c_char, e: *const *const c_char) -> i32;
    posix_spawn(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    posix_spawnp(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    pidfd_spawn(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    pidfd_spawnp(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    pidfd_getpid(pidfd: i32) -> i32;
    system(c: *const c_char) -> i32;
    popen(c: *const c_char, t: *const c_char) -> *mut c_void;
    pclose(f: *mut c_void) -> i32;
    posix_spawn_file_actions_adddup2(fa: *mut c_void, fd: i32, to: i32) -> i32;
    posix_spawn_file_actions_init(fa: *mut c_void) -> i32;
    posix_spawn_file_actions_destroy(fa: *mut c_void) -> i32;
    #[cfg(target_arch = "x86_64")] __vdprintf_chk(fd: i32, flag: i32, f: *const c_char, a: *mut c_void) -> i32;
    #[cfg(target_arch = "x86_64")] vdprintf(fd: i32, f: *const c_char, a: *mut c_void) -> i32;
    fdopen(fd: i32, m: *const c_char) -> *mut c_void;
    setuid(u: u32) -> i32;
    seteuid(u: u32) -> i32;
    setgid(g: u32) -> i32;
    setegid(g: u32) -> i32;
    setreuid(r: u32, e: u32) -> i32;
    setregid(r: u32, e: u32) -> i32;
    setresuid(r: u32, e: u32, s: u32) -> i32;
    setresgid(r: u32, e: u32, s: u32) -> i32;
    setgroups(n: usize, list: *const u32) -> i32;
    initgroups(user: *const c_char, g: u32) -> i32;
    setfsuid(u: u32) -> i32;
    setfsgid(g: u32) -> i32;
    capset(header: *mut c_void, data: *const c_void) -> i32;
    syscall(n: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> i64;
    open(p: *const c_char, f: i32, m: u32) -> i32;
    open64(p: *const c_char, f: i32, m: u32) -> i32;
    openat(d: i32, p: *const c_char, f: i32, m: u32) -> i32;
    openat64(d: i32, p: *const c_char, f: i32, m: u32) -> i32;
    creat(p: *const c_char, m: u32) -> i32;
    creat64(p: *const c_char, m: u32) -> i32;
    pipe(f: *mut i32) -> i32;
    pipe2(f: *mut i32, flags: i32) -> i32;
    socketpair(d: i32, t: i32, p: i32, f: *mut i32) -> i32;
    eventfd(v: u32, f: i32) -> i32;
    timerfd_create(c: i32, f: i32) -> i32;
    inotify_init() -> i32;
    inotify_init1(f: i32) -> i32;
    aio_read(cb: *mut c_void) -> i32;
    aio_write(cb: *mut c_void) -> i32;
    aio_read64(cb: *mut c_void) -> i32;
    aio_write64(cb: *mut c_void) -> i32;
    lio_listio(mode: i32, list: *const *mut c_void, n: i32, sev: *mut c_void) -> i32;
}
