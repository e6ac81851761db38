//! Signals: to handlers, hooks behave like system calls.
//!
//! A handler of the application runs before a hook, after it, or while it sleeps, and never in its middle: there it
//! would meet locks that its own thread holds, and half-changed lists. So handlers are installed behind
//! [`trampoline`]. If the trampoline finds the thread inside a hook ([`thread::enter`]), it queues the signal for
//! this thread once more, blocks signals until the hook is left or sleeps ([`thread::outside`]), and returns; then
//! the kernel delivers the signal anew. Blocking signals around each hook instead would cost two system calls, which
//! is more than a send on a lane.
//!
//! The application sees its own handlers: `sigaction` returns them, and the kernel has their flags and masks. A
//! process without TCP sockets keeps its handlers as they are. Handlers installed by inlined system calls may run
//! anywhere: for them, locks of their own thread count as taken (`lock`), and they get EAGAIN.

use crate::state::fdtab;
use crate::sys::{self, thread};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};
use lane::num;
use libc::{c_void, siginfo_t};

const fn bit(sig: i32) -> u64 {
    1 << (sig - 1)
}

/// Signals by which the kernel reports a fault of the thread itself.
const FAULTS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);
/// Blocked while a signal is deferred. 32 and 33 are the C library's own signals, whose handlers call no hook.
const BLOCKED: u64 = !(FAULTS | bit(32) | bit(33));

/// A handler of the application and its flags, while the kernel's entry has the trampoline.
struct Action {
    handler: AtomicUsize,
    flags: AtomicU32,
}

static ACTIONS: [Action; 65] = [const {
    Action {
        handler: AtomicUsize::new(0),
        flags: AtomicU32::new(0),
    }
}; 65];

/// Flags that the trampoline's entry in the kernel has differently: it always needs siginfo, and resets the handler
/// itself.
const CHANGED: u32 = num::bits(libc::SA_SIGINFO | libc::SA_RESETHAND);

type Handler = unsafe extern "C" fn(i32, *mut siginfo_t, *mut c_void);

fn ours() -> usize {
    let f: Handler = trampoline;
    f as usize
}

/// The kernel's entry for every handler of the application.
unsafe extern "C" fn trampoline(sig: i32, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments, passed on.
    let handler = unsafe { prepare(sig, info, context) };
    if handler > 1 {
        // SAFETY: the application's handler; one that takes fewer arguments ignores the others.
        let f: Handler = unsafe { core::mem::transmute(handler) };
        // SAFETY: as above.
        thread::handling(|| unsafe { f(sig, info, context) });
    }
}

/// The handler to run now; 0: none.
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn prepare(sig: i32, info: *mut siginfo_t, context: *mut c_void) -> usize {
    // SAFETY: by contract.
    let fault = FAULTS & bit(sig) != 0 && unsafe { (*info).si_code } > 0;
    // SAFETY: by contract.
    if thread::is_inside() && !fault && unsafe { defer(sig, info, context.cast()) } {
        return 0;
    }
    let a = &ACTIONS[num::word(sig) & 63 | num::word(sig) & 64];
    let (handler, flags) = (a.handler.load(Acquire), num::signed(a.flags.load(Relaxed)));
    if flags & libc::SA_RESETHAND != 0 {
        sys::reset_handler(sig, ours());
    }
    let cut = flags & libc::SA_RESTART == 0;
    if let Some(efd) = thread::handler_runs(cut) {
        fdtab::signal(efd);
    }
    handler
}

/// Defers the signal until the hook is left. False: it cannot be queued (a limit, a seccomp filter).
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn defer(sig: i32, info: *mut siginfo_t, context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the kernel's frame; its signal set has 64 bits.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    let all = BLOCKED | bit(sig) | *mask;
    // Before the signal is queued: if its handler was installed with SA_NODEFER, it would interrupt the trampoline at
    // once.
    sys::set_signal_mask(all);
    // SAFETY: the kernel's record.
    if !unsafe { sys::queue_signal(sig, info) } {
        sys::set_signal_mask(*mask | bit(sig));
        return false;
    }
    thread::defer(*mask);
    *mask = all;
    true
}

/// Replaces the old action by a new one of the application. `install(new, old)` is the C library's function.
/// `tabled`: the process has a TCP socket and is no vfork child (which has signal actions of its own, but shares our
/// memory).
///
/// # Safety
/// As `sigaction`.
pub unsafe fn change(
    tabled: bool,
    sig: i32,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
    install: impl Fn(*const libc::sigaction, *mut libc::sigaction) -> i32,
) -> i32 {
    let Some(a) = usize::try_from(sig)
        .ok()
        .filter(|s| *s > 0)
        .and_then(|s| ACTIONS.get(s))
    else {
        return install(new, old);
    };
    let before = (a.handler.load(Relaxed), a.flags.load(Relaxed));
    // SAFETY: null, or the application's.
    let mut mine = unsafe { new.as_ref() }.copied();
    let wrapped = mine.as_mut().filter(|n| tabled && n.sa_sigaction > 1);
    let entered = wrapped.is_some();
    if let Some(n) = wrapped {
        // Stored first: a signal may come as soon as the kernel has the entry.
        a.flags.store(num::bits(n.sa_flags), Relaxed);
        a.handler.store(n.sa_sigaction, Release);
        n.sa_sigaction = ours();
        n.sa_flags = (n.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND;
    }
    // SAFETY: all-zero is a valid action.
    let mut was: libc::sigaction = unsafe { core::mem::zeroed() };
    let r = install(mine.as_ref().map_or(core::ptr::null(), |m| m), &mut was);
    if r != 0 && entered {
        a.handler.store(before.0, Relaxed);
        a.flags.store(before.1, Relaxed);
    }
    if r == 0 && !old.is_null() {
        if was.sa_sigaction == ours() {
            was.sa_sigaction = before.0;
            was.sa_flags = num::signed(num::bits(was.sa_flags) & !CHANGED | before.1 & CHANGED);
        }
        // SAFETY: the application's.
        unsafe { old.write(was) };
    }
    r
}

/// The process gets its first TCP socket: handlers that it has installed so far are put behind the trampoline.
pub fn take_over() {
    for sig in (1..=31).chain(34..=64) {
        let Some(mut k) = sys::kernel_action(sig, None).filter(|k| num::size(k[0]) > 1) else {
            continue;
        };
        if num::size(k[0]) == ours() {
            continue;
        }
        let a = &ACTIONS[num::word(sig)];
        a.flags.store(num::low32(k[1]), Relaxed);
        a.handler.store(num::size(k[0]), Release);
        k[0] = ours() as u64;
        k[1] = (k[1] | libc::SA_SIGINFO as u64) & !u64::from(num::bits(libc::SA_RESETHAND));
        sys::kernel_action(sig, Some(&k));
    }
}

/// Is there a handler without SA_RESTART that is not behind the trampoline?
pub fn foreign_cut() -> bool {
    // 32 and 33 are the C library's own (cancellation, setxid).
    (1..=31).chain(34..=64).any(|sig| {
        sys::kernel_action(sig, None).is_some_and(|k| {
            k[0] > 1 && num::size(k[0]) != ours() && k[1] & libc::SA_RESTART as u64 == 0
        })
    })
}
