//! The other end of a measurement: one connection. `underpass check --serve` starts this when a client knocks; the
//! listening socket is standard input.
//!
//! What accepts is under the shim, since a connection that another process had accepted would have two holders for a
//! while, and a daemon that may not look at the first process of a container could not tell whether it still has. A
//! client that wants TCP gets this program once more, by exec, without the shim: so no hook is in its way.

use crate::wire::{self, Answer, Path, LENGTH};
use crate::{say, sock, trial, FAILURE, SUCCESS};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::FromRawFd;

/// Seconds for a greeting.
const GREETING_S: u32 = 5;
/// Seconds that a client may take until its next request, and beyond the time of a test.
const PATIENCE_S: u32 = 30;
/// Requests of one client: with the above, its time has an end.
const REQUESTS_MAX: u32 = 10_000;
/// What the program is told the second time.
pub const PLAIN: &str = "serve-tcp";

/// Accepts one client, and serves it.
pub fn accept() -> i32 {
    // SAFETY: standard input is the listening socket, nothing else in this process uses it, and it is closed once.
    let listener = unsafe { TcpListener::from_raw_fd(libc::STDIN_FILENO) };
    let Ok((mut s, from)) = listener.accept() else {
        return SUCCESS; // it went away meanwhile
    };
    drop(listener);
    say("accepted");
    sock::live_for(GREETING_S);
    let mut m = [0; LENGTH];
    let path = s.read_exact(&mut m).ok().and_then(|()| wire::path_of(&m));
    let Some(path) = path else {
        return FAILURE;
    };
    let (ip, port) = (from.ip().to_canonical(), from.port());
    say(format_args!("serving {ip}:{port} {}", path.name()));
    match path {
        Path::Lane => serve(s),
        Path::Tcp => {
            sock::again_without_shim(&s, PLAIN);
            FAILURE
        }
    }
}

/// Serves the client whose connection is standard input.
pub fn plain() -> i32 {
    // SAFETY: as above, of the connection.
    serve(unsafe { TcpStream::from_raw_fd(libc::STDIN_FILENO) })
}

fn serve(mut s: TcpStream) -> i32 {
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
