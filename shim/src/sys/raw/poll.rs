//! `poll` that is no cancellation point, and tells the end of a TCP connection whole.

use super::{sets, syscall6, tcp_state, CLOSE, R};
use libc::{pollfd, timespec, POLLERR, POLLHUP, POLLIN, POLLRDHUP};

fn of(fd: i32, events: i16) -> pollfd {
    let revents = 0;
    pollfd {
        fd,
        events,
        revents,
    }
}

/// The `revents` of one descriptor now.
pub fn poll1(fd: i32, events: i16) -> i16 {
    let mut p = of(fd, events);
    poll_now(core::slice::from_mut(&mut p));
    p.revents
}

/// Fills in `revents` without waiting.
pub fn poll_now(fds: &mut [pollfd]) -> usize {
    match poll_once(fds) {
        n if n > 0 && settled(fds) => poll_once(fds),
        n => n,
    }
}

/// `tcp_poll` takes no lock, and `tcp_reset` stores the error, the state and the end of both directions one after the
/// other. A thread that has slept on the socket is woken after that; one that something else has woken may see a part of
/// it. Waits until each such reset is whole: whoever asks for TCP_INFO waits for the socket's lock. False: there is none.
fn settled(fds: &[pollfd]) -> bool {
    let may_be_a_part = |p: &&pollfd| {
        let whole = POLLHUP | p.events & (POLLIN | libc::POLLRDNORM | POLLRDHUP);
        p.revents & (POLLERR | POLLHUP) != 0 && p.revents & whole != whole
    };
    let parts = fds.iter().filter(may_be_a_part);
    // (`tcp_get_info` loads the state before it waits, so that it is asked twice. In other states it is no reset, but
    // notifications, or an error that an ICMP message has brought.)
    let closed = |p: &&pollfd| tcp_state(p.fd).is_some() && tcp_state(p.fd) == Some(CLOSE);
    parts.filter(closed).count() > 0 // (not `any`: it waits for all of them)
}

fn poll_once(fds: &mut [pollfd]) -> usize {
    let ts = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let (n, ts) = (fds.len(), &raw const ts);
    match sc!(libc::SYS_ppoll, fds.as_mut_ptr(), n, ts, 0, 8) {
        // There are more entries than RLIMIT_NOFILE, or the kernel has no memory for them.
        Err(libc::EINVAL | libc::ENOMEM) => sets::now(fds, 0).unwrap_or(0),
        r => r.unwrap_or(0),
    }
}

/// Waits for events on one descriptor for at most `ms` milliseconds.
pub fn poll_ms(fd: i32, events: i16, ms: u32) -> R<i16> {
    let mut p = of(fd, events);
    let ts = timespec {
        tv_sec: 0,
        tv_nsec: i64::from(ms) * 1_000_000,
    };
    let r = sc_once!(libc::SYS_ppoll, &raw mut p, 1, &raw const ts, 0, 8);
    match r {
        Err(libc::EINVAL) => sets::now(core::slice::from_mut(&mut p), ms)?,
        r => r?,
    };
    Ok(p.revents)
}
