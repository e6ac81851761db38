//! Raw system calls, for everything that never blocks.
//!
//! The shim exports `read`, `close`, even `syscall`: calling libc for its own needs would call its own hooks. Raw
//! calls are also no cancellation points, so they may be made under a lock. What may block goes through
//! [`crate::sys::real`] instead, with no lock held. Results are `Result<_, errno>`.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "every argument is a register, with the sign of the C type, and every result is one: its C type is smaller"
)]

use core::arch::asm;
use lane::os::{position, TcpCounts, TcpInfo};

/// One system call; negative errno on failure.
///
/// # Safety
/// As dangerous as the call it makes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn syscall6(
    n: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let r: isize;
    // SAFETY: the x86-64 syscall ABI: number in rax, arguments in rdi rsi rdx r10 r8 r9, result in
    // rax, rcx and r11 clobbered.
    unsafe {
        asm!("syscall", inlateout("rax") n as isize => r, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _,
             options(nostack));
    }
    r
}

/// One system call; negative errno on failure.
///
/// # Safety
/// As dangerous as the call it makes.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub unsafe fn syscall6(
    n: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let r: isize;
    // SAFETY: the arm64 syscall ABI: number in x8, arguments in x0-x5, result in x0.
    unsafe {
        asm!("svc 0", in("x8") n, inlateout("x0") a => r, in("x1") b, in("x2") c, in("x3") d,
             in("x4") e, in("x5") f, options(nostack));
    }
    r
}

/// One system call, whatever it returns.
macro_rules! sc_once {
    ($n:expr $(, $a:expr)*) => {{
        let args = [$($a as usize),*];
        let at = |i: usize| args.get(i).copied().unwrap_or(0);
        // SAFETY: every caller in this module passes pointers that are valid for the call, and the
        // calls used here neither block nor touch memory that Rust owns otherwise.
        let r = unsafe { syscall6($n, at(0), at(1), at(2), at(3), at(4), at(5)) };
        if r < 0 { Err(-r as i32) } else { Ok(r as usize) }
    }};
}

/// One system call, repeated while a signal interrupts it (or a supervisor that answers for the kernel,
/// seccomp_unotify(2)). Nothing here waits, so no caller has a use for EINTR; and bytes that a look missed would also
/// be missed by a thread that waits for an edge.
macro_rules! sc {
    ($($a:expr),*) => {
        loop {
            match sc_once!($($a),*) {
                Err(libc::EINTR) => {}
                r => break r,
            }
        }
    };
}

pub type R<T> = Result<T, i32>;

mod poll;
mod process;
pub mod sets;
mod signal;
pub use poll::*;
pub use process::*;
pub use signal::*;

pub fn gettid() -> u32 {
    sc!(libc::SYS_gettid).unwrap_or(0) as u32
}

pub fn getpid() -> u32 {
    sc!(libc::SYS_getpid).unwrap_or(0) as u32
}

pub fn close(fd: i32) {
    let _ = sc_once!(libc::SYS_close, fd); // the descriptor is closed, whatever the result
}

pub fn memfd(name: &core::ffi::CStr) -> R<i32> {
    sc!(
        libc::SYS_memfd_create,
        name.as_ptr(),
        libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING
    )
    .map(|f| f as i32)
}

pub fn ftruncate(fd: i32, n: usize) -> R<()> {
    sc!(libc::SYS_ftruncate, fd, n).map(drop)
}

pub fn fcntl(fd: i32, cmd: i32, arg: usize) -> R<i32> {
    sc!(libc::SYS_fcntl, fd, cmd, arg).map(|v| v as i32)
}

/// Maps `len` bytes of `fd` (or anonymous memory for -1) shared.
pub fn map(fd: i32, len: usize, write: bool) -> R<*mut u8> {
    let prot = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
    let anon = if fd < 0 { libc::MAP_ANONYMOUS } else { 0 };
    sc!(
        libc::SYS_mmap,
        0,
        len,
        prot,
        libc::MAP_SHARED | libc::MAP_NORESERVE | anon,
        fd,
        0
    )
    .map(|p| p as *mut u8)
}

/// Maps what a descriptor has at `offset`, shared, for reading and writing.
pub fn map_at(fd: i32, len: usize, offset: usize) -> R<*mut u8> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    sc!(libc::SYS_mmap, 0, len, prot, libc::MAP_SHARED, fd, offset).map(|p| p as *mut u8)
}

/// Private zeroed memory; its pages cost nothing until they are touched.
pub fn map_private(len: usize) -> R<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS;
    sc!(
        libc::SYS_mmap,
        0,
        len,
        libc::PROT_READ | libc::PROT_WRITE,
        flags,
        usize::MAX,
        0
    )
    .map(|p| p as *mut u8)
}

/// Populates all pages of a mapping now, charged to this process; fails if the memory is not available.
pub fn populate(p: *mut u8, bytes: usize) -> R<()> {
    const MADV_POPULATE_WRITE: i32 = 23; // Linux 5.14
    sc!(libc::SYS_madvise, p, bytes, MADV_POPULATE_WRITE).map(drop)
}

/// Populates pages of the application's memory that are about to be read, or written. False: some are not available,
/// or the kernel does not know the call.
pub fn populate_for(p: *mut u8, bytes: usize, write: bool) -> bool {
    const MADV_POPULATE_READ: i32 = 22; // Linux 5.14
    sc!(
        libc::SYS_madvise,
        p,
        bytes,
        MADV_POPULATE_READ + i32::from(write)
    )
    .is_ok()
}

/// Can the eight bytes around `at` be read? Makes a call that fails after the kernel has read its argument.
pub fn is_readable(at: usize) -> bool {
    const NO_HOW: usize = 77;
    let set = (at & !7).max(8); // (a null pointer means "no argument" here)
    sc!(libc::SYS_rt_sigprocmask, NO_HOW, set, 0, 8) != Err(libc::EFAULT)
}

/// Can the four bytes around `at` be written? Makes a futex operation that leaves them unchanged (`|= 0`) and wakes
/// nobody.
pub fn is_writable(at: usize) -> bool {
    const OR: usize = 2 << 28;
    const LESS_THAN_LEAST: usize = 2 << 24 | 0x800;
    static NOBODY: core::sync::atomic::AtomicU32 = core::sync::atomic::AtomicU32::new(0);
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let how = OR | LESS_THAN_LEAST;
    sc!(libc::SYS_futex, NOBODY.as_ptr(), op, 0, 0, at & !3, how) != Err(libc::EFAULT)
}

/// A call that the application makes on its own memory.
pub fn memory(n: i64, a: [usize; 5]) -> R<usize> {
    sc_once!(n, a[0], a[1], a[2], a[3], a[4])
}

/// Makes the mapping zero in forked children; a child that shares our memory sees it unchanged. False: the kernel is
/// too old.
pub fn wipe_on_fork(p: *mut u8, len: usize) -> bool {
    const MADV_WIPEONFORK: i32 = 18; // Linux 4.14
    sc!(libc::SYS_madvise, p, len, MADV_WIPEONFORK).is_ok()
}

pub fn unmap(p: *mut u8, len: usize) {
    let _ = sc!(libc::SYS_munmap, p, len);
}

/// Replaces a mapping by private zero pages.
pub fn blank(p: *mut u8, len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let _ = sc!(
        libc::SYS_mmap,
        p,
        len,
        libc::PROT_READ | libc::PROT_WRITE,
        flags,
        usize::MAX,
        0
    );
}

/// Replaces a mapping by zero pages that children share.
pub fn map_shared_over(p: *mut u8, len: usize) -> R<()> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    sc!(libc::SYS_mmap, p, len, prot, flags, usize::MAX, 0).map(drop)
}

/// Maps `len` bytes of `fd`, shared and writable, in place of what is mapped at `p`.
pub fn map_over(p: *mut u8, len: usize, fd: i32) -> R<()> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    sc!(libc::SYS_mmap, p, len, prot, flags, fd, 0).map(drop)
}

pub fn futex_wait(word: &core::sync::atomic::AtomicU32, value: u32, ms: u32) {
    let ts = libc::timespec {
        tv_sec: (ms / 1000).into(),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    };
    let _ = sc_once!(
        libc::SYS_futex,
        word.as_ptr(),
        libc::FUTEX_WAIT,
        value,
        &raw const ts,
        0,
        0
    );
}

pub fn futex_wake(word: &core::sync::atomic::AtomicU32) {
    let _ = sc!(
        libc::SYS_futex,
        word.as_ptr(),
        libc::FUTEX_WAKE,
        i32::MAX,
        0,
        0,
        0
    );
}

pub fn sched_yield() {
    let _ = sc!(libc::SYS_sched_yield);
}

pub fn kill0(pid: u32) -> R<()> {
    sc!(libc::SYS_kill, pid, 0).map(drop)
}

/// Is this process (not thread) a zombie: ended, and not waited for yet? False also if that cannot be found out.
pub fn is_zombie(pid: u32) -> bool {
    let Ok(fd) = sc!(libc::SYS_pidfd_open, pid, 0) else {
        return false;
    };
    let ended = poll1(fd as i32, libc::POLLIN) & libc::POLLIN != 0;
    close(fd as i32);
    ended
}

pub fn now_ns() -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: valid out pointer; the libc function uses the vDSO and is not one we export.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

pub fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

pub fn eventfd() -> R<i32> {
    sc!(
        libc::SYS_eventfd2,
        0,
        libc::EFD_NONBLOCK | libc::EFD_CLOEXEC
    )
    .map(|f| f as i32)
}

pub fn epoll_create() -> R<i32> {
    sc!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC).map(|f| f as i32)
}

pub fn epoll_ctl(ep: i32, op: i32, fd: i32, events: u32, data: u64) -> R<()> {
    let mut ev = libc::epoll_event { events, u64: data };
    sc!(libc::SYS_epoll_ctl, ep, op, fd, &raw mut ev).map(drop)
}

/// Does not block (time-out 0).
pub fn epoll_poll(ep: i32, evs: *mut libc::epoll_event, max: i32) -> R<usize> {
    sc!(libc::SYS_epoll_pwait, ep, evs, max, 0, 0, 8)
}

/// `select` with a time-out of `ms` milliseconds.
pub fn select(n: i32, sets: [*mut libc::fd_set; 3], ms: u32) -> R<usize> {
    let ts = libc::timespec {
        tv_sec: (ms / 1000).into(),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    };
    let [r, w, e] = sets;
    let ts = &raw const ts;
    sc_once!(libc::SYS_pselect6, n, r, w, e, ts, 0)
}

pub fn write1(fd: i32, p: *const u8, n: usize) -> R<usize> {
    sc!(libc::SYS_write, fd, p, n)
}

pub fn read(fd: i32, p: *mut u8, n: usize) -> R<usize> {
    sc!(libc::SYS_read, fd, p, n)
}

pub fn pread(fd: i32, p: *mut u8, n: usize, off: i64) -> R<usize> {
    sc!(libc::SYS_pread64, fd, p, n, off)
}

pub fn lseek(fd: i32, off: i64, whence: i32) -> R<i64> {
    sc!(libc::SYS_lseek, fd, off, whence).map(|v| v as i64)
}

/// Never blocks (MSG_DONTWAIT), never raises SIGPIPE.
pub fn send(fd: i32, p: *const u8, n: usize) -> R<usize> {
    sc!(
        libc::SYS_sendto,
        fd,
        p,
        n,
        libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        0,
        0
    )
}

/// Never blocks (MSG_DONTWAIT).
pub fn recv(fd: i32, p: *mut u8, n: usize, flags: i32) -> R<usize> {
    sc!(
        libc::SYS_recvfrom,
        fd,
        p,
        n,
        libc::MSG_DONTWAIT | flags,
        0,
        0
    )
}

pub fn sendmsg(fd: i32, m: &libc::msghdr, flags: i32) -> R<usize> {
    sc!(libc::SYS_sendmsg, fd, core::ptr::from_ref(m), flags)
}

pub fn recvmsg(fd: i32, m: &mut libc::msghdr, flags: i32) -> R<usize> {
    sc!(libc::SYS_recvmsg, fd, core::ptr::from_mut(m), flags)
}

pub fn socket(domain: i32, ty: i32, proto: i32) -> R<i32> {
    sc!(libc::SYS_socket, domain, ty, proto).map(|f| f as i32)
}

pub fn socketpair(domain: i32, ty: i32) -> R<(i32, i32)> {
    let mut p = [0i32; 2];
    sc!(libc::SYS_socketpair, domain, ty, 0, p.as_mut_ptr()).map(|_| (p[0], p[1]))
}

pub fn connect(fd: i32, addr: *const u8, len: usize) -> R<()> {
    sc!(libc::SYS_connect, fd, addr, len).map(drop)
}

pub fn shutdown(fd: i32, how: i32) -> R<()> {
    sc!(libc::SYS_shutdown, fd, how).map(drop)
}

pub fn getsockopt(fd: i32, level: i32, name: i32, buf: &mut [u8]) -> R<usize> {
    let mut len = buf.len() as u32;
    sc!(
        libc::SYS_getsockopt,
        fd,
        level,
        name,
        buf.as_mut_ptr(),
        &raw mut len
    )?;
    Ok(len as usize)
}

pub fn getsockopt_u32(fd: i32, level: i32, name: i32) -> R<u32> {
    let mut b = [0u8; 4];
    getsockopt(fd, level, name, &mut b).map(|_| u32::from_ne_bytes(b))
}

pub fn setsockopt(fd: i32, level: i32, name: i32, val: &[u8]) -> R<()> {
    sc!(
        libc::SYS_setsockopt,
        fd,
        level,
        name,
        val.as_ptr(),
        val.len()
    )
    .map(drop)
}

pub fn ioctl_i32(fd: i32, req: u64) -> R<i32> {
    let mut v = 0i32;
    sc!(libc::SYS_ioctl, fd, req, &raw mut v)?;
    Ok(v)
}

/// `getsockname` (peer = false) or `getpeername`.
pub fn sockaddr(fd: i32, peer: bool) -> R<libc::sockaddr_storage> {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut ss: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    let mut len = core::mem::size_of_val(&ss) as u32;
    let n = if peer {
        libc::SYS_getpeername
    } else {
        libc::SYS_getsockname
    };
    sc!(n, fd, &raw mut ss, &raw mut len)?;
    Ok(ss)
}

/// Is the descriptor a TCP socket, over IPv4 or IPv6?
pub fn is_tcp(fd: i32) -> bool {
    let protocol = getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL);
    protocol == Ok(libc::IPPROTO_TCP as u32)
}

/// (inode, uid) of a descriptor.
pub fn inode(fd: i32) -> R<(u64, u32)> {
    fstat(fd).map(|st| (st.st_ino, st.st_uid))
}

/// Is it a pipe?
pub fn is_fifo(fd: i32) -> bool {
    fstat(fd).is_ok_and(|st| st.st_mode & libc::S_IFMT == libc::S_IFIFO)
}

fn fstat(fd: i32) -> R<libc::stat> {
    // SAFETY: all-zero is a valid stat buffer.
    let mut st: libc::stat = unsafe { core::mem::zeroed() };
    let mut ask = || sc!(libc::SYS_fstat, fd, &raw mut st);
    // (A temporary lack of memory does not mean that the descriptor has changed.)
    let answer = (0..8).map(|_| ask()).find(|r| *r != Err(libc::ENOMEM));
    answer.unwrap_or(Err(libc::ENOMEM)).map(|_| st)
}

pub fn rlimit_nofile() -> u64 {
    rlimit(libc::RLIMIT_NOFILE as i32, 1024)
}

/// Soft and hard limit of descriptor numbers.
pub fn nofile() -> Option<(u64, u64)> {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let what = libc::RLIMIT_NOFILE as i32;
    sc!(libc::SYS_prlimit64, 0, what, 0, &raw mut r).ok()?;
    Some((r.rlim_cur, r.rlim_max))
}

pub fn set_nofile(soft: u64, hard: u64) -> bool {
    let r = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    let what = libc::RLIMIT_NOFILE as i32;
    sc!(libc::SYS_prlimit64, 0, what, &raw const r, 0).is_ok()
}

/// The soft limit; `unknown` if the kernel does not return it.
fn rlimit(what: i32, unknown: u64) -> u64 {
    let mut r = libc::rlimit {
        rlim_cur: unknown,
        rlim_max: unknown,
    };
    let _ = sc!(libc::SYS_prlimit64, 0, what, 0, &raw mut r);
    r.rlim_cur
}

/// The state of a TCP socket, as the kernel numbers them.
pub fn tcp_state(fd: i32) -> Option<u8> {
    let mut b = [0u8; 1];
    getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut b).ok()?;
    Some(b[0])
}

/// Most bytes that a TCP socket's receive queue takes while nobody reads: what the kernel offers for now (`rcv_ssthresh`), and
/// never more than the buffer.
pub fn tcp_window(fd: i32) -> Option<u64> {
    let mut b = [0u8; 68];
    let n = getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut b).ok()?;
    let offered = b.get(..n)?.last_chunk().filter(|_| n == b.len())?;
    let buffer = getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_RCVBUF).ok()?;
    Some(u32::from_ne_bytes(*offered).min(buffer).into())
}

/// The byte positions of a TCP socket's streams.
pub fn tcp_position(fd: i32) -> Option<TcpCounts> {
    let queued = |what| ioctl_i32(fd, what).ok().map(|n| n.max(0) as u64);
    position(
        || tcp_info(fd),
        || queued(libc::TIOCOUTQ),
        || queued(libc::FIONREAD),
    )
}

pub fn tcp_info(fd: i32) -> Option<TcpInfo> {
    let mut b = [0u8; TcpInfo::BYTES];
    let n = getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut b).ok()?;
    TcpInfo::parse(b.get(..n)?)
}

/// TCP state of a socket whose peer has sent its FIN.
pub const CLOSE_WAIT: u8 = TcpInfo::CLOSE_WAIT;

/// TCP state of a socket whose connection is over.
pub const CLOSE: u8 = TcpInfo::CLOSE;

pub const SIOCATMARK: u64 = 0x8905;

/// Is the next byte in a TCP socket's receive queue an urgent one?
pub fn at_mark(fd: i32) -> bool {
    ioctl_i32(fd, SIOCATMARK) == Ok(1)
}
