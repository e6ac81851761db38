//! The other end of a measurement: one connection. `underpass check --serve` starts this when a client knocks; the
//! listening socket is standard input.
//!
//! What accepts is under the shim, since a connection that another process had accepted would have two holders for a
//! while, and a daemon that may not look at the first process of a container could not tell whether it still has. A
//! client that wants TCP gets this program once more, by exec, without the shim: so no hook is in its way.

use crate::wire::{self, Answer, Path, LENGTH};
use crate::{say, sock, trial, FAILURE, SUCCESS};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

/// Seconds for a greeting.
const GREETING_S: u32 = 5;
/// Seconds that a client may take until its next request, and beyond the time of a test.
const PATIENCE_S: u32 = 30;
/// Requests of one client.
const REQUESTS_MAX: u32 = 10_000;
/// The longest that a client is served, so that it does not keep its place for days: the longest measurement that the tool
/// makes (100 rounds of three tests of 10 s, on two connections in turn) takes 100 minutes.
const LIFE: Duration = Duration::from_secs(2 * 60 * 60);
/// Time for a client that is turned away to have sent its greeting: with bytes unread, it would see a reset.
const GOODBYE: Duration = Duration::from_millis(200);
/// What the program is told, with the addresses of which no more clients are wanted.
pub const SERVE: &str = "serve=";
/// What it is told the second time.
pub const PLAIN: &str = "serve-tcp";

/// Accepts one client, and serves it, or turns it away. (Whose it is, nobody knows before it is accepted.)
pub fn accept(unwanted: &str) -> i32 {
    // SAFETY: standard input is the listening socket, nothing else in this process uses it, and it is closed once.
    let listener = unsafe { TcpListener::from_raw_fd(libc::STDIN_FILENO) };
    let Ok((mut s, from)) = listener.accept() else {
        return SUCCESS; // it went away meanwhile
    };
    drop(listener);
    let ip = from.ip().to_canonical();
    say(format_args!("accepted {ip}"));
    sock::live_for(GREETING_S);
    if unwanted.split(',').any(|u| u.parse::<IpAddr>() == Ok(ip)) {
        turn_away(&mut s);
        return SUCCESS;
    }
    let mut m = [0; LENGTH];
    let path = s.read_exact(&mut m).ok().and_then(|()| wire::path_of(&m));
    let Some(path) = path else {
        return FAILURE;
    };
    say(format_args!("serving {ip}:{} {}", from.port(), path.name()));
    match path {
        Path::Lane => serve(s, LIFE),
        Path::Tcp => {
            sock::again_without_shim(&s, PLAIN);
            FAILURE
        }
    }
}

fn turn_away(s: &mut TcpStream) {
    let _ = s.write_all(&wire::answer(Answer::Busy));
    let _ = s.shutdown(Shutdown::Write);
    let _ = s.set_read_timeout(Some(GOODBYE));
    let _ = s.read(&mut [0; LENGTH]);
}

/// Serves the client whose connection is standard input.
pub fn plain() -> i32 {
    // SAFETY: as above, of the connection.
    serve(unsafe { TcpStream::from_raw_fd(libc::STDIN_FILENO) }, LIFE)
}

fn serve(mut s: TcpStream, life: Duration) -> i32 {
    let began = Instant::now();
    sock::live_for(PATIENCE_S);
    let _ = s.set_nodelay(true);
    if s.write_all(&wire::answer(Answer::Ready)).is_err() {
        return FAILURE;
    }
    for _ in 0..REQUESTS_MAX {
        if began.elapsed() >= life {
            break;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Request, Test};

    #[test]
    fn a_client_whose_time_is_over_is_not_served() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let asks = Request {
            test: Test::Up {
                block: wire::BLOCK_MIN,
            },
            time_ms: 1,
        };
        client.write_all(&wire::request(asks)).unwrap();
        assert_eq!(serve(server, Duration::ZERO), FAILURE);
        sock::live_for(0); // (this process is not the probe)
        let mut m = [0; LENGTH];
        client.read_exact(&mut m).unwrap();
        assert_eq!(wire::answer_of(&m), Some(Answer::Ready));
        assert!(client.read_exact(&mut m).is_err(), "it is closed");
    }
}
