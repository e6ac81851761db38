//! Does a seccomp filter that the application is about to install allow the calls that lanes need?
//!
//! A filter may kill the process for a call that it does not know, and then nothing can be undone. So the filter is
//! evaluated beforehand, as the kernel would run it.

use crate::sys::pages;
use core::ffi::c_void;
use lane::num;

/// `struct sock_filter`
#[derive(Clone, Copy)]
#[repr(C)]
struct Op {
    code: u16,
    yes: u8,
    no: u8,
    k: u32,
}

/// `struct sock_fprog`
#[derive(Clone, Copy)]
#[repr(C)]
struct Program {
    len: u16,
    ops: *const Op,
}

/// Maximum number of instructions that the kernel accepts (BPF_MAXINSNS).
const MAX_OPS: usize = 4096;
#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;
/// Results that let a call pass: SECCOMP_RET_ALLOW, SECCOMP_RET_LOG.
const PASSES: [u32; 2] = [0x7fff_0000, 0x7ffc_0000];
const ACTION: u32 = 0xffff_0000;

/// Words of `struct seccomp_data`.
type Call = [u32; 16];

fn call(number: i64, args: [u64; 6]) -> Call {
    let mut c = [0; 16];
    c[0] = num::low32(num::natural(number));
    c[1] = ARCH;
    for (k, a) in args.into_iter().enumerate() {
        c[4 + 2 * k] = num::low32(a);
        c[5 + 2 * k] = (a >> 32) as u32;
    }
    c
}

/// System calls that the shim makes, with the arguments that filters usually check.
const CALLS: &[(i64, [u64; 6])] = {
    const fn plain(n: i64) -> (i64, [u64; 6]) {
        (n, [0; 6])
    }
    const fn fcntl(cmd: i32) -> (i64, [u64; 6]) {
        (libc::SYS_fcntl, [3, num::word(cmd) as u64, 0, 0, 0, 0])
    }
    const fn socket(n: i64) -> (i64, [u64; 6]) {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        (
            n,
            [libc::AF_UNIX as u64, num::word(kind) as u64, 0, 0, 0, 0],
        )
    }
    const fn mmap(prot: i32) -> (i64, [u64; 6]) {
        let words = [
            0,
            4096,
            num::word(prot) as u64,
            libc::MAP_SHARED as u64,
            3,
            0,
        ];
        (libc::SYS_mmap, words)
    }
    &[
        fcntl(libc::F_GETFD),
        fcntl(libc::F_SETFD),
        fcntl(libc::F_GETFL),
        fcntl(libc::F_DUPFD_CLOEXEC),
        socket(libc::SYS_socket),
        socket(libc::SYS_socketpair),
        mmap(libc::PROT_READ),
        mmap(libc::PROT_READ | libc::PROT_WRITE),
        (libc::SYS_ioctl, [3, libc::FIONREAD, 0, 0, 0, 0]),
        (libc::SYS_ioctl, [3, libc::TIOCOUTQ, 0, 0, 0, 0]),
        plain(libc::SYS_close),
        plain(libc::SYS_connect),
        plain(libc::SYS_epoll_create1),
        plain(libc::SYS_epoll_ctl),
        plain(libc::SYS_epoll_pwait),
        plain(libc::SYS_eventfd2),
        plain(libc::SYS_fstat),
        plain(libc::SYS_ftruncate),
        plain(libc::SYS_futex),
        plain(libc::SYS_getpeername),
        plain(libc::SYS_getpid),
        plain(libc::SYS_getsockname),
        plain(libc::SYS_getsockopt),
        plain(libc::SYS_gettid),
        plain(libc::SYS_kill),
        plain(libc::SYS_madvise),
        plain(libc::SYS_memfd_create),
        plain(libc::SYS_munmap),
        plain(libc::SYS_newfstatat),
        plain(libc::SYS_ppoll),
        plain(libc::SYS_pselect6),
        plain(libc::SYS_prlimit64),
        plain(libc::SYS_recvfrom),
        plain(libc::SYS_recvmsg),
        plain(libc::SYS_rt_sigaction),
        plain(libc::SYS_rt_sigprocmask),
        plain(libc::SYS_rt_tgsigqueueinfo),
        plain(libc::SYS_sched_yield),
        plain(libc::SYS_sendmsg),
        plain(libc::SYS_sendto),
        plain(libc::SYS_setsockopt),
        plain(libc::SYS_shutdown),
        plain(libc::SYS_tgkill),
        plain(libc::SYS_write),
    ]
};

/// Would this filter refuse a call of ours, or answer for it? A filter that the kernel does not accept refuses
/// nothing.
///
/// # Safety
/// `program` is the application's pointer to a `struct sock_fprog`.
pub unsafe fn refuses(program: *const c_void) -> bool {
    if !pages::readable(program, size_of::<Program>()) {
        return false;
    }
    // SAFETY: by contract, and readable.
    let p = unsafe { program.cast::<Program>().read_unaligned() };
    let len = p.len as usize;
    if len == 0 || len > MAX_OPS || !pages::readable(p.ops, len * size_of::<Op>()) {
        return false;
    }
    let op = |at: usize| {
        // SAFETY: readable, as just found; the application does not write it while the kernel is to read it.
        (at < len).then(|| unsafe { p.ops.add(at).read_unaligned() })
    };
    CALLS
        .iter()
        .any(|(n, args)| !run(op, &call(*n, *args)).is_some_and(|r| PASSES.contains(&(r & ACTION))))
}

/// The filter's result for a call; `None`: the kernel would not accept the filter.
fn run(op: impl Fn(usize) -> Option<Op>, call: &Call) -> Option<u32> {
    let (mut a, mut x, mut memory, mut at) = (0u32, 0u32, [0u32; 16], 0);
    loop {
        let Op { code, yes, no, k } = op(at)?;
        at += 1;
        let cell = memory.get_mut(k as usize);
        // The operand: the constant, or the index register (BPF_X).
        let v = if code & 8 != 0 { x } else { k };
        let to = |cond: bool| usize::from(if cond { yes } else { no });
        match code {
            0x20 if k % 4 == 0 => a = *call.get(k as usize / 4)?,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = *cell?,
            0x61 => x = *cell?,
            0x80 => a = num::small(size_of::<Call>()),
            0x81 => x = num::small(size_of::<Call>()),
            0x02 => *cell? = a,
            0x03 => *cell? = x,
            0x04 | 0x0c => a = a.wrapping_add(v),
            0x14 | 0x1c => a = a.wrapping_sub(v),
            0x24 | 0x2c => a = a.wrapping_mul(v),
            0x34 | 0x3c => a = a.checked_div(v)?,
            0x44 | 0x4c => a |= v,
            0x54 | 0x5c => a &= v,
            0x64 | 0x6c => a = a.wrapping_shl(v),
            0x74 | 0x7c => a = a.wrapping_shr(v),
            0x84 => a = a.wrapping_neg(),
            0xa4 | 0xac => a ^= v,
            0x05 => at = at.checked_add(k as usize)?,
            0x15 | 0x1d => at += to(a == v),
            0x25 | 0x2d => at += to(a > v),
            0x35 | 0x3d => at += to(a >= v),
            0x45 | 0x4d => at += to(a & v != 0),
            0x06 => return Some(k),
            0x16 => return Some(a),
            0x07 => x = a,
            0x87 => a = x,
            _ => return None,
        }
    }
}
