//! `underpass capture`: asks the daemon for what a lane carries, and writes it as packets.

mod packet;
mod pcapng;

use crate::cli;
use crate::client::{follow, unexpected};
use crate::out::{bytes, complain, Failure, Outcome};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use packet::{segment, Segment};
use pcapng::Pcapng;
use std::fs::OpenOptions;
use std::io::{self, BufReader, BufWriter, IsTerminal, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use underpass_admin::capture::{Captured, Decoder};
use underpass_admin::{Request, Response, Target};

const RECONSTRUCTED: &str =
    "Reconstructed from a lane by Underpass: these bytes did not travel in TCP segments";

const GONE: &str =
    "underpassd has ended, or this was stopped for 10 s and more. What was captured is written; begin another one";

pub fn run(dir: Option<PathBuf>, o: &cli::Capture) -> Outcome {
    let target = match o {
        cli::Capture {
            local: Some(l),
            peer: Some(p),
            ..
        } => Target::Pair {
            local: l.clone(),
            peer: p.clone(),
        },
        _ => Target::Inode(o.inode.unwrap_or_default()),
    };
    // Before anything can be interrupted: what was captured is to be written out.
    let stop = SigSet::from_iter([Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM]);
    stop.thread_block().map_err(Failure::new)?;
    let stop = SignalFd::with_flags(&stop, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
    let stop = stop.map_err(Failure::new)?;
    if o.write == Path::new("-") && io::stdout().is_terminal() {
        let message =
            "packets are not for a terminal: name a file with -w, or a program behind a pipe";
        return Err(Failure::new(message).with_code(2));
    }
    let (answer, from) = follow(dir, &Request::Capture { target })?;
    let Response::Capture { local, peer } = &answer else {
        return Err(unexpected(&answer));
    };
    let address = |a: &String| a.parse::<SocketAddr>().map_err(Failure::new);
    let ends = [address(local)?, address(peer)?];
    complain(format_args!("captures {} <-> {}", ends[0], ends[1]));
    let to = open(&o.write)?;
    let mut capture = Capture::new(ends, to, o.bytes)?;
    let until = o.seconds.map(|s| Instant::now() + Duration::from_secs(s));
    let ended = follow_to_end(from, &stop, until, &mut capture);
    let written = capture.to.flush();
    complain(format_args!("{}", capture.summary()));
    match ended.and_then(|why| written.map(|()| why)) {
        Ok(why) => complain(why),
        // Whoever read the packets has left.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
        Err(e) => return Err(Failure::new(format_args!("the capture broke off: {e}"))),
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the packets go. They are nobody's business: a new file is for its owner only.
fn open(path: &Path) -> Result<BufWriter<Box<dyn Write>>, Failure> {
    let to: Box<dyn Write> = match path == Path::new("-") {
        true => Box::new(io::stdout()),
        false => {
            let mut how = OpenOptions::new();
            how.write(true).create(true).truncate(true).mode(0o600);
            let file = how.open(path);
            Box::new(file.map_err(|e| Failure::new(format_args!("{}: {e}", path.display())))?)
        }
    };
    Ok(BufWriter::with_capacity(256 << 10, to))
}

/// Until the connection ends, the time is over, enough was captured, or somebody stops it: why, for people.
fn follow_to_end(
    from: BufReader<UnixStream>,
    stop: &SignalFd,
    until: Option<Instant>,
    capture: &mut Capture,
) -> io::Result<String> {
    let mut decoder = Decoder::default();
    decoder.push(from.buffer());
    let mut from = from.into_inner();
    from.set_nonblocking(true)?;
    let mut room = vec![0; 256 << 10];
    loop {
        while let Some((one, bytes)) = decoder.next_one()? {
            if let Captured::End { why, unread } = &one {
                let rest = match unread {
                    0 => String::new(),
                    n => format!("; nobody has taken the last {n} bytes on the lane"),
                };
                return Ok(format!("{why}{rest}"));
            }
            if capture.add(&one, bytes)? {
                return Ok("enough bytes were captured".into());
            }
        }
        capture.to.flush()?;
        let left = until.map(|u| u.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok("the time is over".into());
        }
        let wait = left.map_or(PollTimeout::NONE, |l| {
            let ms = i32::try_from(l.as_millis().saturating_add(1)).unwrap_or(i32::MAX);
            PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
        });
        let mut fds = [
            PollFd::new(from.as_fd(), PollFlags::POLLIN),
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, wait) {
            Err(nix::errno::Errno::EINTR) => continue,
            r => r?,
        };
        if fds[1].any() == Some(true) {
            return Ok("stopped".into());
        }
        match from.read(&mut room) {
            // (It says so when it ends one.)
            Ok(0) => return Err(io::Error::other(GONE)),
            Ok(n) => decoder.push(&room[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// What was captured.
struct Capture {
    ends: [SocketAddr; 2],
    to: Pcapng<BufWriter<Box<dyn Write>>>,
    firsts: [Option<u32>; 2],
    /// How it was carried when that was told last.
    told: Option<(bool, [bool; 2])>,
    /// Where the next byte of each end should be.
    next: [Option<u64>; 2],
    most: Option<u64>,
    packets: u64,
    bytes: u64,
    gaps: u64,
    missing: u64,
}

impl Capture {
    fn new(
        ends: [SocketAddr; 2],
        to: BufWriter<Box<dyn Write>>,
        most: Option<u64>,
    ) -> Result<Capture, Failure> {
        let version = concat!("underpass ", env!("CARGO_PKG_VERSION"));
        Ok(Capture {
            ends,
            to: Pcapng::new(to, version, RECONSTRUCTED).map_err(Failure::new)?,
            firsts: [None; 2],
            told: None,
            next: [None; 2],
            most,
            packets: 0,
            bytes: 0,
            gaps: 0,
            missing: 0,
        })
    }

    /// Returns whether these were all that are wanted.
    fn add(&mut self, one: &Captured, bytes: &[u8]) -> io::Result<bool> {
        match one {
            Captured::State {
                lane,
                remote,
                up,
                firsts,
            } => {
                self.firsts = *firsts;
                if self.told.replace((*lane, *up)) != Some((*lane, *up)) {
                    complain(mode(*lane, *remote, *up, &self.ends));
                }
            }
            Captured::Bytes {
                from,
                ns,
                at,
                acked,
                lost,
                ..
            } => {
                let left = self.most.map_or(u64::MAX, |m| m.saturating_sub(self.bytes));
                let kept = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let from = usize::from(*from & 1);
                self.packet(from, *ns, [*at, *acked], *lost, &bytes[..kept])?;
            }
            Captured::End { .. } => {}
        }
        Ok(self.most.is_some_and(|m| self.bytes >= m))
    }

    fn packet(
        &mut self,
        from: usize,
        ns: u64,
        [at, acked]: [u64; 2],
        lost: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let mut comment = String::new();
        if self.packets == 0 {
            comment.push_str(RECONSTRUCTED);
            if self.firsts == [None; 2] {
                comment.push_str(
                    ". The connection's own sequence numbers are not known: these begin with 1",
                );
            }
        }
        let missing = self.next[from].map_or(0, |n| at.saturating_sub(n));
        if missing > 0 {
            self.gaps += 1;
            self.missing += missing;
            if !comment.is_empty() {
                comment.push_str(". ");
            }
            comment.push_str(&gap(missing, lost));
        }
        let packet = segment(&Segment {
            from: self.ends[from],
            to: self.ends[1 - from],
            seq: number(self.firsts[from], at),
            ack: number(self.firsts[1 - from], acked),
            bytes,
        });
        self.to.packet(ns, &packet, &comment)?;
        self.next[from] = Some(at.wrapping_add(bytes.len() as u64));
        self.packets += 1;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn summary(&self) -> String {
        let gaps = match self.gaps {
            0 => "no gaps".into(),
            n => format!("{n} gaps ({} missing)", bytes(self.missing)),
        };
        format!("{} packets, {}, {gaps}", self.packets, bytes(self.bytes))
    }
}

/// The sequence number of the byte at this place of a stream.
fn number(first: Option<u32>, at: u64) -> u32 {
    lane::num::low32(u64::from(first.unwrap_or(1)).wrapping_add(at))
}

fn gap(missing: u64, lost: u64) -> String {
    let lost = lost.min(missing);
    match (lost, missing - lost) {
        (n, 0) => format!("{n} bytes are missing before this segment: the lane was faster than the capture"),
        (0, n) => format!("{n} bytes are missing before this segment: they went over TCP"),
        (l, t) => format!(
            "{missing} bytes are missing before this segment: {l} because the lane was faster than the \
             capture, and {t} went over TCP"
        ),
    }
}

fn mode(lane: bool, remote: bool, up: [bool; 2], ends: &[SocketAddr; 2]) -> String {
    let kind = if remote { "SMCR" } else { "SMCD" };
    match (lane, up) {
        (_, [true, true]) => format!("{kind} in both directions"),
        (_, [true, false]) => format!("{kind} from {}, TCP from {}", ends[0], ends[1]),
        (_, [false, true]) => format!("{kind} from {}, TCP from {}", ends[1], ends[0]),
        (true, _) => "on TCP in both directions; waits for the lane to go up".into(),
        (false, _) => "on TCP; waits for a lane".into(),
    }
}

#[cfg(test)]
mod tests;
