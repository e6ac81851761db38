//! One direction of one connection, apart from how its calls are made: what to send next and when,
//! and what to make of that which came.

use super::pattern::{mix, Pattern};
use super::{await_file, failed, Outcome, Progress, Sending, Spec, Way};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// log2 of the largest piece: 256 KiB, and smaller ones where a rate is to be kept.
const PIECE_LOG2: u64 = 18;
const PACED_LOG2: u64 = 15;

/// Numbers for sizes and pauses.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, stream: u32) -> Self {
        Random(mix(seed ^ mix(u64::from(stream) + 1)))
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0) % n
    }

    /// From 1 to 2^log2, small ones as often as large ones.
    pub fn size(&mut self, log2: u64) -> u64 {
        let bits = self.below(log2 + 1);
        1 + self.below(1 << bits)
    }
}

/// What a connection sends.
pub struct Source {
    pattern: Pattern,
    random: Random,
    connection: u32,
    progress: Progress,
    total: u64,
    rate: u64,
    gate: Option<(u64, PathBuf)>,
    /// When the next piece may go. Time that was lost is not made up for: a machine that is slow for a
    /// while would have more and more to do.
    due: Instant,
    at: u64,
}

impl Source {
    pub fn new(spec: &Spec, what: &Sending, connection: u32, progress: Progress) -> Self {
        let stream = spec.stream(connection, true);
        let gate = what.gate.clone();
        Source {
            pattern: Pattern::new(spec.seed, stream),
            random: Random::new(spec.seed, stream),
            connection,
            progress,
            total: what.bytes,
            rate: what.rate,
            gate: gate.map(|(last, file)| (what.bytes.saturating_sub(last), file)),
            due: Instant::now(),
            at: 0,
        }
    }

    /// Has all been sent?
    pub fn ended(&self) -> bool {
        self.at == self.total
    }

    /// The next piece, and how long to wait before it is sent.
    pub fn piece(&mut self, out: &mut Vec<u8>) -> Duration {
        let mut end = self.total;
        match &self.gate {
            Some((at, file)) if *at == self.at => {
                await_file(file);
                self.gate = None;
            }
            Some((at, _)) => end = *at,
            None => {}
        }
        let log2 = if self.rate > 0 {
            PACED_LOG2
        } else {
            PIECE_LOG2
        };
        let n = self.random.size(log2).min(end - self.at);
        out.resize(n as usize, 0);
        self.pattern.fill(self.at, out);
        let mut wait = Duration::ZERO;
        if self.random.below(8) == 0 {
            wait = Duration::from_micros(self.random.below(3000));
        }
        if self.rate > 0 {
            let now = Instant::now();
            wait = wait.max(self.due.saturating_duration_since(now));
            self.due = now + wait + Duration::from_secs_f64(n as f64 / self.rate as f64);
        }
        wait
    }

    /// A call has taken so many more bytes.
    pub fn took(&mut self, n: usize) {
        self.at += n as u64;
        self.progress.sent(self.connection, self.at);
    }

    pub fn way(&self, outcome: Outcome) -> Way {
        Way {
            bytes: self.at,
            outcome,
        }
    }
}

/// What a connection receives.
pub struct Sink {
    pattern: Pattern,
    random: Random,
    connection: u32,
    progress: Progress,
    gate: Option<(u64, PathBuf)>,
    at: u64,
    scratch: Vec<u8>,
    buffer: Vec<u8>,
}

impl Sink {
    pub fn new(spec: &Spec, connection: u32, progress: Progress) -> Self {
        let stream = spec.stream(connection, false);
        Sink {
            pattern: Pattern::new(spec.seed, stream),
            random: Random::new(!spec.seed, stream),
            connection,
            progress,
            gate: spec.receive_gate.clone(),
            at: 0,
            scratch: Vec::new(),
            buffer: vec![0; 128 << 10],
        }
    }

    /// Makes one call, `recv` into what it is given; `Some`: the direction has ended. Of a call that
    /// would have to wait, the error is returned.
    pub fn receive(
        &mut self,
        recv: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<Outcome>> {
        let mut most = self.random.size(17);
        match &self.gate {
            Some((at, file)) if *at == self.at => {
                await_file(file);
                self.gate = None;
            }
            Some((at, _)) => most = most.min(at - self.at),
            None => {}
        }
        let most = most as usize;
        let n = match recv(&mut self.buffer[..most]) {
            Ok(0) => return Ok(Some(Outcome::Done)),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(e),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(None),
            Err(e) => return Ok(Some(failed("recv", &e))),
        };
        let wrong = self
            .pattern
            .wrong(self.at, &self.buffer[..n], &mut self.scratch);
        if let Some((at, text)) = wrong {
            return Ok(Some(Outcome::Wrong(at, text)));
        }
        self.at += n as u64;
        self.progress.received(self.connection, self.at);
        Ok(None)
    }

    pub fn way(&self, outcome: Outcome) -> Way {
        Way {
            bytes: self.at,
            outcome,
        }
    }
}
