//! Installing signal handlers: see [`crate::state::signals`]. The C library's other functions for that call its
//! internal `sigaction`, which has no hook, so each of them has a hook here that calls ours.

use crate::process;
use crate::state::{signals, table};
use crate::sys::{self, pids, real, thread};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use libc::{sighandler_t, sigset_t};

#[no_mangle]
pub unsafe extern "C" fn sigaction(
    sig: i32,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> i32 {
    // SAFETY: see the module above (all calls in this file).
    unsafe { change(sig, new, old, |n, o| real::sigaction(sig, n, o)) }
}

/// # Safety
/// As `sigaction`.
pub(super) unsafe fn change(
    sig: i32,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
    install: impl Fn(*const libc::sigaction, *mut libc::sigaction) -> i32,
) -> i32 {
    let _inside = thread::enter();
    if pids::is_new_process() {
        crate::preserving_errno(process::after_fork_child);
    }
    let tabled = table::table().is_some() && sys::getpid() == pids::pid();
    // SAFETY: see above.
    unsafe { signals::change(tabled, sig, new, old, install) }
}

/// Another name that glibc exports for it.
#[no_mangle]
pub unsafe extern "C" fn __sigaction(
    sig: i32,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> i32 {
    // SAFETY: see above.
    unsafe { sigaction(sig, new, old) }
}

/// Signals for which the application called `siginterrupt`: for them, `signal` does not set SA_RESTART.
static INTERRUPT: AtomicU64 = AtomicU64::new(0);

fn bit(sig: i32) -> u64 {
    match sig {
        1..=64 => 1 << (sig - 1),
        _ => 0,
    }
}

/// # Safety
/// As `signal`.
unsafe fn install(sig: i32, handler: sighandler_t, flags: i32, masked: bool) -> sighandler_t {
    if handler == libc::SIG_ERR || bit(sig) == 0 {
        crate::set_errno(libc::EINVAL);
        return libc::SIG_ERR;
    }
    // SAFETY: see above; all-zero is a valid action.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = core::mem::zeroed();
        new.sa_sigaction = handler;
        new.sa_flags = flags;
        if masked {
            libc::sigaddset(&mut new.sa_mask, sig);
        }
        match sigaction(sig, &new, &mut old) {
            0 => old.sa_sigaction,
            _ => libc::SIG_ERR,
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn signal(sig: i32, handler: sighandler_t) -> sighandler_t {
    let flags = match INTERRUPT.load(Relaxed) & bit(sig) {
        0 => libc::SA_RESTART,
        _ => 0,
    };
    // SAFETY: see above.
    unsafe { install(sig, handler, flags, true) }
}

#[no_mangle]
pub unsafe extern "C" fn bsd_signal(sig: i32, handler: sighandler_t) -> sighandler_t {
    // SAFETY: see above.
    unsafe { signal(sig, handler) }
}

#[no_mangle]
pub unsafe extern "C" fn ssignal(sig: i32, handler: sighandler_t) -> sighandler_t {
    // SAFETY: see above.
    unsafe { signal(sig, handler) }
}

#[no_mangle]
pub unsafe extern "C" fn __sysv_signal(sig: i32, handler: sighandler_t) -> sighandler_t {
    const SA_INTERRUPT: i32 = 0x2000_0000;
    let flags = libc::SA_RESETHAND | libc::SA_NODEFER | SA_INTERRUPT;
    // SAFETY: see above.
    unsafe { install(sig, handler, flags, false) }
}

#[no_mangle]
pub unsafe extern "C" fn sysv_signal(sig: i32, handler: sighandler_t) -> sighandler_t {
    // SAFETY: see above.
    unsafe { __sysv_signal(sig, handler) }
}

#[no_mangle]
pub unsafe extern "C" fn siginterrupt(sig: i32, interrupt: i32) -> i32 {
    // SAFETY: see above; all-zero is a valid action.
    unsafe {
        let mut a: libc::sigaction = core::mem::zeroed();
        if sigaction(sig, core::ptr::null(), &mut a) != 0 {
            return -1;
        }
        if interrupt != 0 {
            INTERRUPT.fetch_or(bit(sig), Relaxed);
            a.sa_flags &= !libc::SA_RESTART;
        } else {
            INTERRUPT.fetch_and(!bit(sig), Relaxed);
            a.sa_flags |= libc::SA_RESTART;
        }
        sigaction(sig, &a, core::ptr::null_mut())
    }
}

#[no_mangle]
pub unsafe extern "C" fn sigset(sig: i32, handler: sighandler_t) -> sighandler_t {
    const SIG_HOLD: sighandler_t = 2;
    if bit(sig) == 0 || handler == libc::SIG_ERR {
        crate::set_errno(libc::EINVAL);
        return libc::SIG_ERR;
    }
    // SAFETY: see above; all-zero is a valid set.
    unsafe {
        let (mut set, mut was): (sigset_t, sigset_t) = core::mem::zeroed();
        libc::sigaddset(&mut set, sig);
        let (how, old) = if handler == SIG_HOLD {
            let mut a: libc::sigaction = core::mem::zeroed();
            match sigaction(sig, core::ptr::null(), &mut a) {
                0 => (libc::SIG_BLOCK, a.sa_sigaction),
                _ => return libc::SIG_ERR,
            }
        } else {
            match install(sig, handler, 0, false) {
                libc::SIG_ERR => return libc::SIG_ERR,
                old => (libc::SIG_UNBLOCK, old),
            }
        };
        if libc::sigprocmask(how, &set, &mut was) != 0 {
            return libc::SIG_ERR;
        }
        match libc::sigismember(&was, sig) {
            1 => SIG_HOLD,
            _ => old,
        }
    }
}
