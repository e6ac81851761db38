//! Where the daemon is, and whether it may be trusted.
//!
//! In addition to its connection, a process makes a *dialing descriptor*: one end of a socket pair whose other end
//! the daemon has. Children inherit it, and make their own connections over it, whatever has become of their user,
//! root directory or namespaces.

use crate::state::{fdtab, table};
use crate::sys;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};
use lane::num;

/// Our end of the dialing socket pair; -1: none.
static DIALING: AtomicI32 = AtomicI32::new(-1);
/// The previous one, whose daemon is gone: see `FORMER` in `super`.
static FORMER: AtomicI32 = AtomicI32::new(-1);
/// Type and flags of control sockets.
const KIND: i32 = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
/// The inode of `DIALING`: if that was closed unseen, its number may stand for another file now.
static INODE: AtomicU64 = AtomicU64::new(0);

/// The dialing descriptor, if there is one.
pub fn dialing() -> Option<i32> {
    let fd = DIALING.load(Relaxed);
    let same = || sys::inode(fd).is_ok_and(|(i, _)| i == INODE.load(Relaxed));
    if fd < 0 || same() {
        return (fd >= 0).then_some(fd);
    }
    DIALING.store(-1, Relaxed);
    if fdtab::get(fd) == fdtab::Fd::Ours {
        fdtab::set(fd, fdtab::Fd::Other);
    }
    None
}

/// Makes a dialing descriptor if there is none. Returns the daemon's end, which the caller closes.
pub fn make() -> Option<i32> {
    if dialing().is_some() {
        return None;
    }
    let (ours, theirs) = sys::socketpair(libc::AF_UNIX, KIND).ok()?;
    // The daemon asks who sends, and may not have set this option yet when the first message comes.
    for fd in [ours, theirs] {
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, &[1, 0, 0, 0]);
    }
    let Ok((inode, _)) = sys::inode(ours) else {
        sys::close(ours);
        sys::close(theirs);
        return None;
    };
    INODE.store(inode, Relaxed);
    DIALING.store(fdtab::hide(ours), Relaxed);
    fdtab::close_ours(FORMER.swap(-1, Relaxed));
    Some(theirs)
}

/// Connects to the daemon that this process, or one before it, has talked to.
fn redial() -> Option<i32> {
    let by = dialing()?;
    let (ours, theirs) = sys::socketpair(libc::AF_UNIX, KIND).ok()?;
    let sent = super::datagram::send(by, &[0], &[theirs]);
    sys::close(theirs);
    match sent {
        Ok(()) => return Some(ours),
        Err(libc::EAGAIN) => {} // the daemon is busy, or stopped
        Err(_) => FORMER.store(DIALING.swap(-1, Relaxed), Relaxed), // the daemon is gone
    }
    sys::close(ours);
    None
}

/// A connection to a daemon.
pub fn connect() -> Option<i32> {
    redial().or_else(|| {
        let (dir, fd) = crate::sys::env::dirs().find_map(|d| Some((d, dial(d)?)))?;
        settle_in(dir);
        Some(fd)
    })
}

/// Writes into the table where the daemon was found, so that it finds the table after a restart.
fn settle_in(dir: &[u8]) {
    let mut path = [0u8; 128];
    let Some(t) = table::table() else { return };
    if dir.len() >= path.len() {
        return;
    }
    path[..dir.len()].copy_from_slice(dir);
    if let Ok((dev, ino)) = sys::identity(&path[..=dir.len()]) {
        t.header.set_home([dev, ino, 0]); // (the number comes with the greeting)
    }
}

/// Connects to the daemon of this directory.
fn dial(dir: &[u8]) -> Option<i32> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut a: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    a.sun_family = num::low16(libc::AF_UNIX as u64);
    let path = b"/control.sock";
    if dir.is_empty() || dir.len() + path.len() >= a.sun_path.len() {
        return None;
    }
    for (d, s) in a.sun_path.iter_mut().zip(dir.iter().chain(path)) {
        *d = core::ffi::c_char::from_ne_bytes([*s]);
    }
    let fd = sys::socket(libc::AF_UNIX, KIND, 0).ok()?;
    match sys::connect(fd, (&raw const a).cast(), core::mem::size_of_val(&a)) {
        Ok(()) if trusted(fd) => Some(fd),
        _ => {
            sys::close(fd);
            None
        }
    }
}

/// Anybody may have made a socket in a well-known place: only root's or our own user's daemon is trusted.
fn trusted(fd: i32) -> bool {
    if crate::sys::env::dir_is_explicit() {
        return true;
    }
    let mut cred = [0u8; 12]; // struct ucred: pid, uid, gid
    if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred).is_err() {
        return false;
    }
    let uid = u32::from_ne_bytes([cred[4], cred[5], cred[6], cred[7]]);
    // SAFETY: geteuid has no preconditions.
    uid == 0 || uid == unsafe { libc::geteuid() }
}
