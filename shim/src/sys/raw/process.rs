//! What the kernel knows about this process and its threads.

use super::{syscall6, R};

/// Which pid namespace this process is in; 0 if /proc does not tell.
pub fn pid_namespace() -> u64 {
    identity(b"/proc/self/ns/pid\0").map_or(0, |(_, inode)| inode)
}

/// (device, inode) of a path, which ends with a NUL.
pub fn identity(path: &[u8]) -> R<(u64, u64)> {
    stat(path).map(|st| (st.st_dev, st.st_ino))
}

pub fn is_directory(path: &core::ffi::CStr) -> bool {
    stat(path.to_bytes_with_nul()).is_ok_and(|st| st.st_mode & libc::S_IFMT == libc::S_IFDIR)
}

/// Is this process single-threaded, with memory that no other process shares?
pub fn is_single_threaded() -> bool {
    match stat(b"/proc/self/task\0") {
        Ok(st) => st.st_nlink == 3, // /proc/self/task has one directory per thread
        // Without /proc: the kernel refuses this call unless the thread is the only one; otherwise it does nothing.
        Err(_) => sc!(libc::SYS_unshare, libc::CLONE_VM).is_ok(),
    }
}

/// Ends the process.
pub fn exit_group(code: i32) {
    let _ = sc!(libc::SYS_exit_group, code);
}

fn stat(path: &[u8]) -> R<libc::stat> {
    if path.last() != Some(&0) {
        return Err(libc::EINVAL);
    }
    // SAFETY: all-zero is a valid stat buffer.
    let mut st: libc::stat = unsafe { core::mem::zeroed() };
    sc!(
        libc::SYS_newfstatat,
        libc::AT_FDCWD,
        path.as_ptr(),
        &raw mut st,
        0
    )?;
    Ok(st)
}

/// Is a memory limit so low that the program would miss what our tables and link groups take?
pub fn is_cramped() -> bool {
    lane::os::ROOM.into_iter().any(is_below)
}

/// Is one of these limits too low?
pub fn is_below((what, _, least): (u32, &str, u64)) -> bool {
    super::rlimit(what as i32, libc::RLIM_INFINITY) < least
}

/// This thread's mask of blocked signals.
pub fn set_signal_mask(mask: u64) {
    let how = libc::SIG_SETMASK;
    let _ = sc!(libc::SYS_rt_sigprocmask, how, &raw const mask, 0, 8);
}

/// Blocks all signals, and returns the mask before.
pub fn block_signals() -> u64 {
    let (how, all, mut old) = (libc::SIG_SETMASK, u64::MAX, 0u64);
    let _ = sc!(
        libc::SYS_rt_sigprocmask,
        how,
        &raw const all,
        &raw mut old,
        8
    );
    old
}

pub fn getppid() -> u32 {
    sc!(libc::SYS_getppid).unwrap_or(0) as u32
}

/// The process that created the other end of this Unix socket; 0: unknown.
pub fn peer_pid(fd: i32) -> u32 {
    let mut cred = [0u8; 12]; // `struct ucred`
    let n = super::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred);
    let first = [cred[0], cred[1], cred[2], cred[3]];
    n.map_or(0, |_| u32::from_ne_bytes(first))
}
