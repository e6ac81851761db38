//! The connection of `check` to any service.
//!
//! It sends nothing: its writes have length zero, which TCP does not carry. It reads and drops what the service sends
//! by itself, because a connection with unread bytes cannot be promoted, and would be reset when it is closed.

use crate::{failed, say, sock, SUCCESS};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time that the service may take to close after we did.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);
/// Interval between two calls on the socket, in milliseconds.
const STEP_MS: i32 = 20;

/// Connects, and makes calls on the socket until standard input ends.
pub fn run(host: &str, port: u16) -> i32 {
    let opened = sock::connect(host, port).and_then(|s| Ok((sock::ends(&s)?, s)));
    let ((local, peer), mut stream) = match opened {
        Ok(o) => o,
        Err(e) => return failed(format_args!("cannot connect to {host} port {port}: {e}")),
    };
    say(format_args!("connected {local} {peer}"));
    let mut open = stream.set_nonblocking(true).is_ok();
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
                    say("closed");
                }
            }
        }
        // The other side of this pipe never writes: anything but a time-out means its end.
        if sock::readable(sock::input(), wait) {
            break;
        }
    }
    if open {
        leave(&stream);
    }
    SUCCESS
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
                sock::readable(stream.as_fd(), STEP_MS);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}
