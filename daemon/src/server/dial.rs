//! Dialing descriptors: the way to the daemon of processes that cannot reach its socket by name, or
//! no more: after a change of user or root directory, in a sandbox, in another mount namespace.
//!
//! A shim that has connected makes a socket pair, keeps one end, which its forked children inherit,
//! and gives us the other. A child that needs a connection of its own makes a socket pair as well and
//! sends one end of that over the first: it is to us as if it had been accepted. Who made that pair
//! the kernel says, as it says who connected; and only he may have sent it: a pair that somebody else
//! has made, and given away, would speak in his name.

use crate::core::Shared;
use crate::fds::{self, Foreign};
use crate::limits::Seat;
use crate::{sockopt, wire};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use tokio::io::Interest;
use underpass_admin::proc;

/// Is this a Unix socket of the kind that control connections are? (A file of somebody's own making
/// might block whoever asks it for more.)
fn is_seqpacket(fd: BorrowedFd<'_>) -> bool {
    let option = |name| sockopt::get::<i32>(fd, libc::SOL_SOCKET, name).map(|v| v.0);
    option(libc::SO_DOMAIN) == Ok(libc::AF_UNIX)
        && option(libc::SO_TYPE) == Ok(libc::SOCK_SEQPACKET)
}

/// Serves a dialing descriptor for as long as anybody has its other end. `seat` counts it.
pub fn serve(shared: &Shared, fd: Foreign, seat: Seat) {
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
            match wire::recv_from(sock.get_ref().as_fd()) {
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

/// One end of a socket pair has come from process `sender`. False: its family does not keep to the
/// rules, and loses this way to us.
fn dialed(shared: &Shared, sender: i32, mut fds: Vec<Foreign>) -> bool {
    let accepted = proc::now_ticks();
    let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
        return false;
    };
    let made_by = sockopt::peer_cred(fd.as_fd()).map_or(0, |c| c.pid);
    if !is_seqpacket(fd.as_fd()) || made_by != sender {
        return false;
    }
    super::meet(shared, fd, accepted);
    true
}
