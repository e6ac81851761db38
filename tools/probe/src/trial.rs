//! The tests themselves, both sides of each. Only blocking calls, as most programs make them; what bounds their time
//! is the life of the process (`sock::live_for`).

use crate::wire::{self, Request, Test, LAST, LENGTH, MORE, PING_BYTES};
use std::io::{self, Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Round trips of one test at most: 4 MiB of samples.
const SAMPLES_MAX: usize = 1 << 20;

/// What a test has shown.
#[derive(Debug, PartialEq)]
pub enum Shown {
    /// Round trips, in nanoseconds.
    Ping {
        count: usize,
        min: u64,
        median: u64,
        p99: u64,
    },
    Bytes {
        bytes: u64,
        ns: u64,
    },
}

impl Shown {
    /// Bytes of the application that have moved, both ways.
    pub fn moved(&self) -> u64 {
        match self {
            Shown::Ping { count, .. } => (*count as u64) * 2 * (PING_BYTES as u64),
            Shown::Bytes { bytes, .. } => *bytes,
        }
    }
}

/// The client's side.
pub fn client(s: &mut TcpStream, r: Request) -> io::Result<Shown> {
    s.write_all(&wire::request(r))?;
    let time = Duration::from_millis(r.time_ms.into());
    match r.test {
        Test::Ping => ping(s, time),
        Test::Up { block } => {
            let sent = send(s, block as usize, time)?;
            let mut m = [0; LENGTH];
            s.read_exact(&mut m)?;
            match wire::tally_of(&m) {
                (bytes, ns) if bytes == sent && ns > 0 => Ok(Shown::Bytes { bytes, ns }),
                _ => Err(foreign()),
            }
        }
        Test::Down { block } => {
            let (bytes, ns) = receive(s, block as usize)?;
            Ok(Shown::Bytes { bytes, ns })
        }
    }
}

/// The server's side.
pub fn server(s: &mut TcpStream, r: Request) -> io::Result<()> {
    match r.test {
        Test::Ping => {
            let mut b = [0; PING_BYTES];
            loop {
                s.read_exact(&mut b)?;
                s.write_all(&b)?;
                if !more(b[0])? {
                    return Ok(());
                }
            }
        }
        Test::Up { block } => {
            let (bytes, ns) = receive(s, block as usize)?;
            s.write_all(&wire::tally(bytes, ns))
        }
        Test::Down { block } => {
            send(s, block as usize, Duration::from_millis(r.time_ms.into())).map(|_| ())
        }
    }
}

fn ping(s: &mut TcpStream, time: Duration) -> io::Result<Shown> {
    let mut took = Vec::new();
    let begin = Instant::now();
    let mut last = false;
    while !last {
        last = begin.elapsed() >= time || took.len() + 1 == SAMPLES_MAX;
        let mut out = [0; PING_BYTES];
        out[0] = if last { LAST } else { MORE };
        out[8..16].copy_from_slice(&(took.len() as u64).to_le_bytes());
        let mut back = [0; PING_BYTES];
        let sent = Instant::now();
        s.write_all(&out)?;
        s.read_exact(&mut back)?;
        took.push(u32::try_from(sent.elapsed().as_nanos()).unwrap_or(u32::MAX));
        if back != out {
            return Err(foreign());
        }
    }
    took.sort_unstable();
    // The smallest value that so many of 100 do not exceed.
    let at = |percent: usize| u64::from(took[(took.len() * percent).div_ceil(100).max(1) - 1]);
    Ok(Shown::Ping {
        count: took.len(),
        min: at(0),
        median: at(50),
        p99: at(99),
    })
}

/// Sends blocks for this time, then the last one. Returns the number of bytes.
fn send(s: &mut TcpStream, block: usize, time: Duration) -> io::Result<u64> {
    let mut buffer = vec![0; block];
    let begin = Instant::now();
    let mut bytes = 0;
    loop {
        let last = begin.elapsed() >= time;
        buffer[0] = if last { LAST } else { MORE };
        s.write_all(&buffer)?;
        bytes += block as u64;
        if last {
            return Ok(bytes);
        }
    }
}

/// Receives blocks up to the last one: bytes, and nanoseconds since the first of them were there.
fn receive(s: &mut TcpStream, block: usize) -> io::Result<(u64, u64)> {
    let mut buffer = vec![0; block];
    let mut bytes = 0u64;
    let mut begin = None;
    loop {
        let mut at = 0;
        while at < block {
            match s.read(&mut buffer[at..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            begin.get_or_insert_with(Instant::now);
        }
        bytes += block as u64;
        if !more(buffer[0])? {
            let ns = begin.map_or(0, |b| b.elapsed().as_nanos());
            return Ok((bytes, u64::try_from(ns).unwrap_or(u64::MAX).max(1)));
        }
    }
}

fn more(first: u8) -> io::Result<bool> {
    match first {
        MORE => Ok(true),
        LAST => Ok(false),
        _ => Err(foreign()),
    }
}

fn foreign() -> Error {
    Error::new(
        ErrorKind::InvalidData,
        "the other side says what it should not",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        (a, l.accept().unwrap().0)
    }

    #[test]
    fn each_test_ends_with_what_moved() {
        let (mut a, mut b) = pair();
        let server = std::thread::spawn(move || {
            let mut m = [0; LENGTH];
            while b.read_exact(&mut m).is_ok() {
                super::server(&mut b, wire::request_of(&m).unwrap()).unwrap();
            }
        });
        let block = 1 << 16;
        for test in [Test::Ping, Test::Up { block }, Test::Down { block }] {
            let shown = client(&mut a, Request { test, time_ms: 20 }).unwrap();
            assert!(shown.moved() > 0, "{shown:?}");
            match shown {
                Shown::Ping {
                    count,
                    min,
                    median,
                    p99,
                } => {
                    assert!(count > 1 && 0 < min && min <= median && median <= p99);
                }
                Shown::Bytes { bytes, ns } => {
                    assert!(bytes % u64::from(block) == 0 && ns > 0);
                }
            }
        }
        drop(a);
        server.join().unwrap();
    }

    #[test]
    fn another_byte_ends_it() {
        for test in [Test::Ping, Test::Up { block: 4096 }] {
            let (mut a, mut b) = pair();
            a.write_all(&[7; 4096]).unwrap();
            let e = server(&mut b, Request { test, time_ms: 1 }).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidData, "{test:?}");
        }
        // A server that answers with bytes of its own.
        let (mut a, mut b) = pair();
        b.write_all(&[0; 4096]).unwrap();
        for test in [
            Test::Ping,
            Test::Down { block: 4096 },
            Test::Up { block: 4096 },
        ] {
            let e = client(&mut a, Request { test, time_ms: 1 }).unwrap_err();
            let wrong = [ErrorKind::InvalidData, ErrorKind::UnexpectedEof];
            assert!(wrong.contains(&e.kind()), "{test:?}: {e}");
            b.write_all(&[0; 4096]).unwrap();
        }
    }
}
