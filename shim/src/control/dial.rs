//! Where the daemon is, and whether it may be believed.

use crate::{sys, table};
use core::sync::atomic::Ordering::*;

/// Says in the table where the daemon was found, so that it finds the table after a restart.
pub fn settle_in(dir: &[u8]) {
    let mut path = [0u8; 128];
    let Some(t) = table::table() else { return };
    if dir.len() >= path.len() {
        return;
    }
    path[..dir.len()].copy_from_slice(dir);
    if let Ok((dev, ino)) = sys::identity(&path[..=dir.len()]) {
        t.header.home[0].store(dev, Relaxed);
        t.header.home[1].store(ino, Relaxed);
    }
}

/// A connection to the daemon of this directory.
pub fn dial(dir: &[u8]) -> Option<i32> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut a: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    a.sun_family = libc::AF_UNIX as u16;
    let path = b"/control.sock";
    if dir.is_empty() || dir.len() + path.len() >= a.sun_path.len() {
        return None;
    }
    for (d, s) in a.sun_path.iter_mut().zip(dir.iter().chain(path)) {
        *d = *s as core::ffi::c_char;
    }
    let fd = sys::socket(
        libc::AF_UNIX,
        libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        0,
    )
    .ok()?;
    match sys::connect(
        fd,
        (&a as *const libc::sockaddr_un).cast(),
        core::mem::size_of_val(&a),
    ) {
        Ok(()) if trusted(fd) => Some(fd),
        _ => {
            sys::close(fd);
            None
        }
    }
}

/// Sockets in well-known places may be anybody's: only root's or our own daemon is believed.
fn trusted(fd: i32) -> bool {
    if crate::env::dir_is_explicit() {
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
