//! The other end of a measurement: one connection, which is standard input. `underpass check --serve` has accepted it
//! and read its greeting.

use crate::wire::{self, Answer, LENGTH};
use crate::{sock, trial, FAILURE, SUCCESS};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::FromRawFd;

/// Seconds that a client may take until its next request, and beyond the time of a test.
const PATIENCE_S: u32 = 30;
/// Requests of one client: with the above, its time has an end.
const REQUESTS_MAX: u32 = 10_000;

pub fn run() -> i32 {
    // SAFETY: standard input is this connection, nothing else in this process uses it, and it is closed once.
    let mut s = unsafe { TcpStream::from_raw_fd(libc::STDIN_FILENO) };
    sock::live_for(PATIENCE_S);
    let _ = s.set_nodelay(true);
    if s.write_all(&wire::answer(Answer::Ready)).is_err() {
        return FAILURE;
    }
    for _ in 0..REQUESTS_MAX {
        sock::live_for(PATIENCE_S);
        let mut m = [0; LENGTH];
        if s.read_exact(&mut m).is_err() {
            return SUCCESS; // the client has what it wants
        }
        let Some(r) = wire::request_of(&m) else {
            break;
        };
        sock::live_for(PATIENCE_S + r.time_ms.div_ceil(1000));
        if trial::server(&mut s, r).is_err() {
            break;
        }
    }
    FAILURE
}
