//! The connection of `check`. This runs with the shim preloaded, so that connecting, reading and closing go through
//! its hooks as in any program.
//!
//! It sends nothing: its writes have length zero, which TCP does not carry. It reads and drops what the service sends
//! by itself, because a connection with unread bytes cannot be promoted, and would be reset when it is closed.

use crate::out::{self, Outcome};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// Time that the service may take to close after we did.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);
/// Interval between two calls on the socket, in milliseconds.
const STEP_MS: u16 = 20;

/// What the probe prints on standard output, one JSON object per line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    Connected { local: String, peer: String },
    Failed { message: String },
    Closed,
}

fn say(e: &Event) {
    if let Ok(mut s) = serde_json::to_string(e) {
        s.push('\n');
        let _ = out::print(&s); // if nobody reads any more, standard input will end, too
    }
}

/// Connects, and makes calls on the socket until standard input ends.
pub fn run(host: &str, port: u16) -> Outcome {
    let opened = connect(host, port).and_then(|s| Ok((s.local_addr()?, s.peer_addr()?, s)));
    let (local, peer, mut stream) = match opened {
        Ok(o) => o,
        Err(e) => {
            say(&Event::Failed {
                message: format!("cannot connect to {host} port {port}: {e}"),
            });
            return Ok(ExitCode::FAILURE);
        }
    };
    let canonical = |a: std::net::SocketAddr| {
        std::net::SocketAddr::new(a.ip().to_canonical(), a.port()).to_string()
    };
    say(&Event::Connected {
        local: canonical(local),
        peer: canonical(peer),
    });
    let mut open = stream.set_nonblocking(true).is_ok();
    let stdin = io::stdin();
    let mut buffer = [0; 4096];
    loop {
        let mut wait = STEP_MS;
        if open {
            let _ = stream.write(&[]);
            match stream.read(&mut buffer) {
                Ok(n) if n > 0 => wait = 0, // there may be more; but first look whether to end
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                _ => {
                    open = false;
                    say(&Event::Closed);
                }
            }
        }
        // The other side of this pipe never writes: anything but a time-out means its end.
        let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(wait)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            _ => break,
        }
    }
    if open {
        leave(&stream);
    }
    Ok(ExitCode::SUCCESS)
}

/// Closes in order: shuts down sending, then reads the service's last bytes for a while. Closing with bytes unread
/// would send a reset, which services log as an error.
fn leave(mut stream: &TcpStream) {
    let deadline = Instant::now() + LEAVE_PATIENCE;
    let _ = stream.shutdown(Shutdown::Write);
    let mut buffer = [0; 4096];
    while Instant::now() < deadline {
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut fds, PollTimeout::from(STEP_MS));
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for a in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&a, CONNECT_PATIENCE) {
            Ok(s) => return Ok(s),
            Err(e) => last = e,
        }
    }
    Err(last)
}
