//! The measuring end: connects to `underpass check --serve`, and runs the tests that come on standard input, one a
//! line: `ping MS`, `up MS BLOCK`, `down MS BLOCK`. The answer to each is a line, too, and ends with the number of bytes
//! that the kernel's TCP has carried meanwhile: what was on the lane is not among them.

use crate::trial::{self, Shown};
use crate::wire::{self, Answer, Path, Request, Test, LENGTH};
use crate::{failed, say, sock, SUCCESS};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time for the server's greeting.
const GREETING_MS: u64 = 10_000;
/// Seconds beyond the time of a test after which the server is taken for gone.
const PATIENCE_S: u32 = 20;

pub fn run(host: &str, port: u16, path: Path) -> i32 {
    let (mut s, local, peer) = match open(host, port, path) {
        Ok(o) => o,
        Err(why) => return failed(why),
    };
    say(format_args!("connected {local} {peer}"));
    while let Some(line) = sock::line() {
        let Some(request) = parse(&line) else {
            return failed(format_args!("no such test: {line}"));
        };
        let before = sock::kernel_bytes(&s);
        sock::live_for(PATIENCE_S + request.time_ms.div_ceil(1000));
        let shown = match trial::client(&mut s, request) {
            Ok(shown) => shown,
            Err(e) => return failed(format_args!("the measurement broke off: {e}")),
        };
        sock::live_for(0);
        let after = sock::kernel_bytes(&s);
        let Some(kernel) = before.zip(after).map(|(b, a)| a.wrapping_sub(b)) else {
            return failed("the kernel does not count the connection's bytes");
        };
        let moved = shown.moved();
        match shown {
            Shown::Ping {
                count,
                min,
                median,
                p99,
            } => say(format_args!(
                "ping {count} {min} {median} {p99} {moved} {kernel}"
            )),
            Shown::Bytes { bytes, ns } => say(format_args!("bytes {bytes} {ns} {moved} {kernel}")),
        }
    }
    SUCCESS
}

fn open(host: &str, port: u16, path: Path) -> Result<(TcpStream, SocketAddr, SocketAddr), String> {
    let cannot = |e: io::Error| format!("cannot connect to {host} port {port}: {e}");
    let mut s = sock::connect(host, port).map_err(cannot)?;
    let (local, peer) = sock::ends(&s).map_err(cannot)?;
    s.set_nodelay(true).map_err(cannot)?;
    let none = || format!("no `underpass check --serve` answers at {host} port {port}");
    s.write_all(&wire::hello(path)).map_err(|_| none())?;
    let m = greeting(&mut s).ok_or_else(none)?;
    match wire::answer_of(&m) {
        Some(Answer::Ready) => Ok((s, local, peer)),
        Some(Answer::Busy) => Err(format!(
            "`underpass check --serve` at {host} port {port} has as many clients as it takes, or as many of this address"
        )),
        None if wire::is_other_version(&m) => Err(format!(
            "`underpass check --serve` at {host} port {port} is of another version"
        )),
        None => Err(none()),
    }
}

/// Sixteen bytes in time. (A service that is something else may send fewer, and then nothing.)
fn greeting(s: &mut TcpStream) -> Option<[u8; LENGTH]> {
    let end = Instant::now() + Duration::from_millis(GREETING_MS);
    let mut m = [0; LENGTH];
    let mut have = 0;
    while have < LENGTH {
        let left = end.saturating_duration_since(Instant::now()).as_millis();
        let left = i32::try_from(left).unwrap_or(i32::MAX);
        if left == 0 || !sock::readable(s.as_fd(), left) {
            return None;
        }
        match s.read(&mut m[have..]) {
            Ok(n) if n > 0 => have += n,
            _ => return None,
        }
    }
    Some(m)
}

/// (Checked as a server checks it, so that the tool's mistakes are found here.)
fn parse(line: &str) -> Option<Request> {
    let mut words = line.split(' ');
    let (name, time) = (words.next()?, words.next()?);
    let block = words.next().unwrap_or_default();
    let test = match name {
        "ping" => Test::Ping,
        "up" => Test::Up {
            block: block.parse().ok()?,
        },
        "down" => Test::Down {
            block: block.parse().ok()?,
        },
        _ => return None,
    };
    let time_ms = time.parse().ok()?;
    wire::request_of(&wire::request(Request { test, time_ms }))
}
