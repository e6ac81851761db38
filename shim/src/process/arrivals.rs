//! Descriptors of connections that come from another process, with a message (SCM_RIGHTS) or by exec. For what
//! happens to them then, see `received`.

use super::made::{self, duplicated};
use super::unseen::replaced;
use crate::promotion;
use crate::promotion::received::another;
use crate::state::{fdtab, table};
use crate::sys::{self, env, thread};
use core::sync::atomic::Ordering::*;
use lane::family::flag;

/// A program that is executed looks for connections at the descriptor numbers below this.
const BY_EXEC: i32 = 16;

/// Is it a TCP socket that is, or was, connected?
fn is_connection(fd: i32) -> bool {
    let kind = || sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_TYPE);
    sys::is_tcp(fd) && kind() == Ok(libc::SOCK_STREAM as u32) && sys::sockaddr(fd, true).is_ok()
}

/// A descriptor has arrived with a message on `channel`.
pub fn came(fd: i32, channel: i32) {
    let _inside = thread::enter();
    crate::preserving_errno(|| {
        replaced(fd);
        if env::off() || !is_connection(fd) {
            return;
        }
        let Ok((inode, _)) = sys::inode(fd) else {
            return;
        };
        let from = sys::peer_pid(channel);
        if let Some((old, i)) = another(inode, |i| !has_left(i)) {
            // The connection was sent twice, or peeked at: this is one more descriptor of one that we have.
            if table::local(i).from.load(Relaxed) != from {
                table::local(i).from.store(0, Relaxed);
            }
            return duplicated(old, fd);
        }
        if let Some(i) = enter(fd, from) {
            table::conn(i).inode.store(inode, Relaxed);
            if env::eager() {
                promotion::consider(i, fd, table::conn(i));
            }
        }
    });
}

/// Has it been handed on to another process, so that it is on TCP for good?
fn has_left(i: u32) -> bool {
    table::conn(i).flags.load(Relaxed) & flag::LEFT != 0
}

/// The program begins: enters the connections that it has inherited by exec.
pub fn by_exec() {
    if env::off() {
        return;
    }
    for fd in (0..BY_EXEC).filter(|fd| is_connection(*fd)) {
        let Ok((inode, _)) = sys::inode(fd) else {
            continue;
        };
        let before = (0..fd).filter_map(fdtab::conn);
        let mut same = before.filter(|i| table::conn(*i).inode.load(Relaxed) == inode);
        let known = same.next();
        let i = match known {
            Some(i) => fdtab::set(fd, fdtab::Fd::Conn(i)).then(|| {
                table::local(i).refs.fetch_add(1, Relaxed);
                i
            }),
            None => enter(fd, sys::getppid()),
        };
        if let Some(i) = i {
            table::conn(i).inode.store(inode, Relaxed);
            if fd <= libc::STDERR_FILENO {
                table::local(i).standard.store(1, Relaxed);
            }
        }
    }
}

fn enter(fd: i32, from: u32) -> Option<u32> {
    let i = made::enter(fd, flag::RECEIVED | flag::NEW, true)?;
    table::local(i).from.store(from, Relaxed);
    table::sync_nonblock(table::conn(i), fd);
    Some(i)
}
