//! All connections in one level-triggered epoll set and one thread, as event loops do it: writing
//! is watched for only while there is something to write.

use super::flow::{Sink, Source};
use super::{failed, End, Outcome, Progress, Spec};
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Longest wait: pauses end, and the stop file is looked for.
const TURN: u16 = 20;

/// Calls per connection before the next one's turn.
const BUDGET: u32 = 4;

struct Conn {
    socket: TcpStream,
    source: Option<Source>,
    piece: Vec<u8>,
    /// How much of the piece has gone, and when it may.
    gone: usize,
    due: Instant,
    sink: Sink,
    receiving: bool,
    /// `None`: no longer in the set.
    watched: Option<EpollFlags>,
    end: End,
}

pub fn run(spec: &Spec, sockets: Vec<TcpStream>, progress: Progress) -> Result<Vec<End>> {
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let now = Instant::now();
    let mut conns = Vec::new();
    for (number, socket) in (0..).zip(sockets) {
        socket.set_nonblocking(true)?;
        let watched = EpollFlags::EPOLLIN;
        set.add(&socket, EpollEvent::new(watched, u64::from(number)))?;
        let send = spec.send.as_ref();
        conns.push(Conn {
            socket,
            source: send.map(|what| Source::new(spec, what, number, progress)),
            piece: Vec::new(),
            gone: 0,
            due: now,
            sink: Sink::new(spec, number, progress),
            receiving: true,
            watched: Some(watched),
            end: End::default(),
        });
    }
    let mut events = [EpollEvent::empty(); 64];
    while conns.iter().any(Conn::busy) {
        let stop = spec.stop.exists();
        let now = Instant::now();
        for (number, c) in (0..).zip(&mut conns) {
            c.watch(&set, number, now)?;
        }
        let wait = conns.iter().filter_map(|c| c.pause(now)).min();
        let wait = wait.map_or(TURN, |w| (w.as_millis() as u16).clamp(1, TURN));
        let n = match set.wait(&mut events, EpollTimeout::from(wait)) {
            Ok(n) => n,
            Err(Errno::EINTR) => 0,
            Err(e) => return Err(e.into()),
        };
        for e in &events[..n] {
            let c = conns.get_mut(e.data() as usize).context("event")?;
            let (what, bad) = (e.events(), EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
            if what.intersects(EpollFlags::EPOLLIN | bad) {
                c.read();
            }
            if what.intersects(EpollFlags::EPOLLOUT | bad) {
                c.write(stop);
            }
        }
        if stop {
            // Who pauses has no event.
            conns.iter_mut().for_each(|c| c.write(true));
        }
    }
    Ok(conns.into_iter().map(|c| c.end).collect())
}

impl Conn {
    fn busy(&self) -> bool {
        self.receiving || self.source.is_some()
    }

    /// How long it may not write, if it wants to.
    fn pause(&self, now: Instant) -> Option<Duration> {
        self.source.as_ref()?;
        Some(self.due.saturating_duration_since(now)).filter(|w| !w.is_zero())
    }

    fn watch(&mut self, set: &Epoll, number: u64, now: Instant) -> Result<()> {
        if !self.busy() {
            if self.watched.take().is_some() {
                set.delete(&self.socket)?;
            }
            return Ok(());
        }
        let mut wanted = EpollFlags::empty();
        if self.receiving {
            wanted |= EpollFlags::EPOLLIN;
        }
        if self.source.is_some() && self.due <= now {
            wanted |= EpollFlags::EPOLLOUT;
        }
        if self.watched.replace(wanted) != Some(wanted) {
            set.modify(&self.socket, &mut EpollEvent::new(wanted, number))?;
        }
        Ok(())
    }

    fn read(&mut self) {
        for _ in 0..BUDGET {
            if !self.receiving {
                return;
            }
            let mut socket = &self.socket;
            match self.sink.receive(|to| socket.read(to)) {
                Ok(None) => {}
                Ok(Some(outcome)) => {
                    self.end.received = self.sink.way(outcome);
                    self.receiving = false;
                }
                Err(_) => return, // would have to wait
            }
        }
    }

    fn write(&mut self, stop: bool) {
        for _ in 0..BUDGET {
            let Some(source) = &mut self.source else {
                return;
            };
            let between = self.gone == self.piece.len();
            let outcome = if between && (stop || source.ended()) {
                let shut = self.socket.shutdown(Shutdown::Write);
                shut.map_or_else(|e| failed("shutdown", &e), |()| Outcome::Done)
            } else if between {
                let wait = source.piece(&mut self.piece);
                self.gone = 0;
                self.due = Instant::now() + wait;
                if !wait.is_zero() {
                    return;
                }
                continue;
            } else {
                match (&self.socket).write(&self.piece[self.gone..]) {
                    Ok(n) => {
                        self.gone += n;
                        source.took(n);
                        continue;
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => failed("send", &e),
                }
            };
            self.end.sent = source.way(outcome);
            self.source = None;
        }
    }
}
