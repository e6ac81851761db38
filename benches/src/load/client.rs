//! The measuring end. It connects, talks a little until it is told by SIGUSR1 to measure, measures,
//! prints the result, and holds its connections until it is told by another SIGUSR1 to end: who
//! runs it has time to look what the connections really are, before and after.

use super::calls::{Calls, Layer, Socket};
use super::{machine, message, number, op, BLOCK, MESSAGE};
use anyhow::{ensure, Result};
use clap::ValueEnum;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::time::TimeSpec;
use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Case {
    /// One connection, one message at a time.
    RoundTrip,
    /// One connection, one way.
    Bulk,
    /// Many connections, one message at a time on each.
    Many,
}

/// What a run saw.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    pub seconds: f64,
    /// Of round trips in microseconds; not for `Bulk`.
    pub median_us: Option<f64>,
    pub p99_us: Option<f64>,
    /// Payload, both ways together.
    pub bytes: u64,
    /// Both ways together.
    pub messages: u64,
    /// Processor time of the two machines.
    pub client_busy_ns: u64,
    pub server_busy_ns: u64,
    /// Sent by RDMA devices of the client's machine.
    pub rdma_packets: u64,
}

/// Shortest warm-up: windows open, and connections become what they will be.
const WARM: Duration = Duration::from_millis(300);
/// Between rounds of the warm-up, so that who looks on gets a share of the processor.
const PAUSE_NS: i64 = 3_000_000;
/// Bulk data of the first attempt at a rate, and of each round of the warm-up.
const FIRST_BULK: u64 = 1 << 20;
const WARM_BULK: u64 = 256 << 10;

/// One connection to each address.
pub fn run(layer: Layer, case: Case, to: &[SocketAddrV4], time: Duration) -> Result<()> {
    // Before the library of rsockets is there: its threads inherit this.
    let mut go = SigSet::empty();
    go.add(Signal::SIGUSR1);
    go.thread_block()?;
    let calls = Calls::of(layer)?;
    let conns: Vec<Socket> = to
        .iter()
        .map(|a| calls.connect(*a))
        .collect::<Result<_>>()?;
    ensure!(!conns.is_empty(), "no connections");
    let block = vec![b'x'; BLOCK];
    let begin = Instant::now();
    let mut told = false;
    while !awaited(&go, PAUSE_NS)? {
        match case {
            Case::Bulk => drop(bulk(&conns[0], WARM_BULK, &block)?),
            Case::RoundTrip | Case::Many => drop(many(&conns, Duration::ZERO)?),
        }
        if !told && begin.elapsed() >= WARM {
            told = true;
            println!("warm");
        }
    }
    let figures = measure(case, &conns, &block, time)?;
    println!("result {}", serde_json::to_string(&figures)?);
    while !awaited(&go, 1_000_000_000)? {}
    Ok(())
}

/// Waits for the signal no longer than this.
fn awaited(go: &SigSet, ns: i64) -> Result<bool> {
    let limit = TimeSpec::new(ns / 1_000_000_000, ns % 1_000_000_000);
    // SAFETY: both pointers are to values that live as long as the call; no information about the
    // signal is asked for.
    let r = unsafe { libc::sigtimedwait(go.as_ref(), std::ptr::null_mut(), limit.as_ref()) };
    if r >= 0 {
        return Ok(true);
    }
    let e = std::io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(false),
        _ => Err(e.into()),
    }
}

fn measure(case: Case, conns: &[Socket], block: &[u8], time: Duration) -> Result<Figures> {
    let mut size = FIRST_BULK;
    if case == Case::Bulk {
        // How much fits into the time: these attempts only find that out.
        for share in [0.3, 1.0] {
            let took = bulk(&conns[0], size, block)?.as_secs_f64();
            size = ((size as f64 * time.as_secs_f64() * share / took) as u64).max(FIRST_BULK);
        }
    }
    let packets = machine::rdma_packets()?;
    let server = server_busy(&conns[0])?;
    let client = machine::busy_ns()?;
    let begin = Instant::now();
    let mut trips = match case {
        Case::Bulk => {
            bulk(&conns[0], size, block)?;
            Vec::new()
        }
        Case::RoundTrip | Case::Many => many(conns, time)?,
    };
    let seconds = begin.elapsed().as_secs_f64();
    let client_busy_ns = machine::busy_ns()?.saturating_sub(client);
    let server_busy_ns = server_busy(&conns[0])?.saturating_sub(server);
    let rdma_packets = machine::rdma_packets()?.saturating_sub(packets);
    trips.sort_unstable();
    let messages = 2 * trips.len() as u64;
    let bytes = if case == Case::Bulk {
        size
    } else {
        messages * MESSAGE as u64
    };
    Ok(Figures {
        seconds,
        median_us: quantile(&trips, 0.5),
        p99_us: quantile(&trips, 0.99),
        bytes,
        messages,
        client_busy_ns,
        server_busy_ns,
        rdma_packets,
    })
}

/// Of sorted nanoseconds, in microseconds.
fn quantile(sorted: &[u64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let i = (last as f64 * q).round() as usize;
    sorted.get(i).map(|ns| *ns as f64 / 1e3)
}

fn server_busy(c: &Socket) -> Result<u64> {
    c.send_all(&message(op::BUSY, 0))?;
    let mut m = [0; MESSAGE];
    c.recv_all(&mut m)?;
    ensure!(m[0] == op::BUSY, "another answer: {m:?}");
    Ok(number(&m))
}

/// Sends so many bytes, until the server says that it has all of them.
fn bulk(c: &Socket, bytes: u64, block: &[u8]) -> Result<Duration> {
    let begin = Instant::now();
    c.send_all(&message(op::SWALLOW, bytes))?;
    let mut left = bytes;
    while left > 0 {
        let n = left.min(block.len() as u64);
        c.send_all(&block[..n as usize])?;
        left -= n;
    }
    let mut m = [0; MESSAGE];
    c.recv_all(&mut m)?;
    ensure!(m[0] == op::SWALLOW, "another answer: {m:?}");
    Ok(begin.elapsed())
}

/// A message out on each connection, and the next one when it has come back; at least once, then
/// until the time is over. The time of each round trip in nanoseconds.
fn many(conns: &[Socket], time: Duration) -> Result<Vec<u64>> {
    let calls = conns[0].calls();
    let mut trips = Vec::new();
    let mut number = 0;
    let begin = Instant::now();
    let mut out = Vec::new();
    for c in conns {
        out.push((message(op::ECHO, number), 0, Instant::now()));
        c.send_all(&message(op::ECHO, number))?;
        number += 1;
    }
    let mut polled: Vec<_> = conns.iter().map(Socket::polled).collect();
    let mut waiting = conns.len();
    let mut answer = [0; MESSAGE];
    while waiting > 0 {
        if conns.len() > 1 {
            calls.readable(&mut polled)?;
        }
        for (i, c) in conns.iter().enumerate() {
            let (sent, have, at) = &mut out[i];
            if *have == MESSAGE || (conns.len() > 1 && polled[i].revents == 0) {
                continue;
            }
            let Some(n) = c.recv(&mut answer[..MESSAGE - *have], conns.len() == 1)? else {
                continue;
            };
            ensure!(n > 0, "the peer hung up");
            ensure!(answer[..n] == sent[*have..*have + n], "another message");
            *have += n;
            if *have < MESSAGE {
                continue;
            }
            trips.push(at.elapsed().as_nanos() as u64);
            if begin.elapsed() < time {
                (*sent, *have, *at) = (message(op::ECHO, number), 0, Instant::now());
                number += 1;
                c.send_all(sent)?;
            } else {
                waiting -= 1;
            }
        }
    }
    Ok(trips)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::server::serve;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn quantiles() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[1000, 2000, 9000], 0.5), Some(2.0));
        let v: Vec<u64> = (0..=100).map(|n| n * 1000).collect();
        assert_eq!(quantile(&v, 0.99), Some(99.0));
    }

    #[test]
    fn all_cases_over_loopback() {
        for (case, n) in [(Case::RoundTrip, 1), (Case::Bulk, 1), (Case::Many, 7)] {
            let port = TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
                .port();
            let calls = Calls::of(Layer::Tcp).unwrap();
            let server = std::thread::spawn(move || serve(calls, port, n));
            let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
            let mut conns = Vec::new();
            while conns.len() < n {
                // Until it listens.
                conns.extend(calls.connect(to).ok());
            }
            let f = measure(case, &conns, &vec![b'x'; BLOCK], Duration::from_millis(50)).unwrap();
            drop(conns);
            server.join().unwrap().unwrap();
            assert!(f.bytes > 0 && f.seconds > 0.0, "{f:?}");
            assert_eq!(f.messages > 0, case != Case::Bulk, "{f:?}");
        }
    }
}
