//! Dialing descriptors: how processes reach the daemon that cannot reach its socket by name, or not any more
//! (after a change of user or root directory, in a sandbox, in another mount namespace).
//!
//! A shim that has connected makes a socket pair, keeps one end, which its forked children inherit, and gives us
//! the other. A child that needs a connection of its own makes another socket pair, and sends one end of it over
//! the first. We treat that end like an accepted connection. The kernel tells which process made the pair, as it
//! tells who connected. Only that process may have sent it: otherwise a process could use a pair that another one
//! has made, and be taken for that one.

use crate::clients::limits::Seat;
use crate::core::Shared;
use crate::os::fds::{self, Foreign};
use crate::os::sockopt;
use crate::os::wire;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use tokio::io::Interest;
use underpass_admin::proc;

/// Is this a Unix socket of the kind that control connections are? (Nothing else is used: a call on a file that
/// its owner implements might block.)
fn is_seqpacket(fd: BorrowedFd<'_>) -> bool {
    let option = |name| sockopt::get::<i32>(fd, libc::SOL_SOCKET, name).map(|v| v.0);
    option(libc::SO_DOMAIN) == Ok(libc::AF_UNIX)
        && option(libc::SO_TYPE) == Ok(libc::SOCK_SEQPACKET)
}

/// Serves a dialing descriptor for as long as any process has its other end. `seat` counts it.
pub(super) fn serve(shared: &Shared, fd: Foreign, seat: Seat) {
    if !is_seqpacket(fd.as_fd()) || sockopt::pass_credentials(fd.as_fd()).is_err() {
        return;
    }
    let shared = shared.clone();
    tokio::task::spawn_local(async move {
        let _seat = seat;
        let Ok(sock) = fds::watch(fd, Interest::READABLE) else {
            return;
        };
        loop {
            let Ok(mut ready) = sock.readable().await else {
                return;
            };
            if !sock.get_ref().has_room() {
                tokio::time::sleep(super::NO_ROOM).await;
                continue;
            }
            match wire::recv_from(sock.get_ref()) {
                Ok(Some((sender, fds))) => {
                    if !dialed(&shared, sender, fds) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
            drop(ready);
            tokio::task::yield_now().await;
        }
    });
}

/// Process `sender` has sent one end of a socket pair. False: the message breaks the rules, and this dialing
/// descriptor is not served any more.
fn dialed(shared: &Shared, sender: i32, mut fds: Vec<Foreign>) -> bool {
    let accepted = proc::now_ticks();
    if fds.len() != 1 {
        fds::close_all(fds);
        return false;
    }
    let Some(fd) = fds.pop() else { return false };
    let made_by = sockopt::peer_cred(fd.as_fd()).map_or(0, |c| c.pid);
    if !is_seqpacket(fd.as_fd()) || made_by != sender {
        return false;
    }
    super::meet(shared, fd, accepted);
    true
}
