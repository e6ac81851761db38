//! Signals, by raw system calls.

use super::{getpid, gettid, syscall6};

/// Sends a signal to the calling thread.
pub fn raise(sig: i32) {
    let _ = sc!(libc::SYS_tgkill, getpid(), gettid(), sig);
}

/// Reads the kernel's entry of a signal (handler, flags, restorer, mask), and replaces it by `new` if given. `None`:
/// there is no such signal.
pub fn kernel_action(sig: i32, new: Option<&[u64; 4]>) -> Option<[u64; 4]> {
    let mut sa = [0u64; 4];
    let new = new.map_or(core::ptr::null(), |n| n.as_ptr());
    sc!(libc::SYS_rt_sigaction, sig, new, sa.as_mut_ptr(), 8).ok()?;
    Some(sa)
}

/// Back to the default action, if the handler is `handler`.
pub fn reset_handler(sig: i32, handler: usize) {
    if let Some(mut k) = kernel_action(sig, None).filter(|k| k[0] as usize == handler) {
        k[0] = libc::SIG_DFL as u64;
        kernel_action(sig, Some(&k));
    }
}

/// Queues a signal for the calling thread with the siginfo with which it came.
///
/// # Safety
/// `info` is the kernel's record of it.
pub unsafe fn queue_signal(sig: i32, info: *mut libc::siginfo_t) -> bool {
    let (pid, tid) = (getpid(), gettid());
    sc!(libc::SYS_rt_tgsigqueueinfo, pid, tid, sig, info).is_ok()
}

/// Does the process have such a thread?
pub fn has_thread(pid: u32, tid: u32) -> bool {
    sc!(libc::SYS_tgkill, pid, tid, 0) != Err(libc::ESRCH)
}
