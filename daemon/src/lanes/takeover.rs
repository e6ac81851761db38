//! Within the node: brings to TCP what is on the ring of an end that does not do it, because it sleeps, computes or is
//! stopped while the other end leaves (`lane::half::tx::takeover`). For helper threads: the socket's lock may be held
//! for as long as its owner likes.

use super::groups::Found;
use super::sock::{disconnect, Sock};
use crate::clients::family::Family;
use crate::os::fds::Foreign;
use crate::os::process::{is_gone, socket_of, ProcId};
use crate::os::system::System;
use lane::abi::CONTROL_BYTES;
use lane::family::{state, View};
use lane::half::tx::{claim, is_asked, is_done, mode, release, Adopted};
use lane::half::{Area, Memory, Port, TxState};
use std::cmp::Ordering;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed},
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use underpass_rdma::verbs::{Mapping, Memory as _};

/// For how long an end that is at work on its direction is asked again.
const BUSY: Duration = Duration::from_millis(50);
/// Time between two attempts: at first; at most; and when TCP has taken nothing for so long.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(50);
const REST_LONG: Duration = Duration::from_secs(1);
const STILL: Duration = Duration::from_secs(10);
/// If the receiver takes nothing for so long, and the sender has closed or its process has ended, the connection is reset:
/// it is an orphan then (tcp(7), tcp_orphan_retries).
const ORPHAN: Duration = Duration::from_secs(100);
/// Most bytes that are sent at once.
const PIECE: usize = 64 << 10;

/// How a takeover ended.
#[derive(Clone, Copy, Default)]
pub(crate) struct End {
    /// The end may have seen that its direction was this daemon's.
    pub claimed: bool,
    /// The direction is on TCP, where this daemon has brought it.
    pub brought: bool,
}

/// What comes of a step.
pub(crate) enum Step {
    /// The end has its direction, or its process goes on with it.
    Over(End),
    /// TCP is full, or the end is at work: to be tried again after a while.
    Again(Duration),
}

impl Step {
    /// Nothing was done, or nothing can be done.
    const NONE: Step = Step::Over(End {
        claimed: false,
        brought: false,
    });
}

/// A ring's chunk. It is mapped so that it has an address, and read as a file: a page that its writer has never touched
/// would be charged to this daemon.
struct Chunk {
    map: Mapping,
    fd: Arc<OwnedFd>,
    /// Where it begins in the file.
    at: u64,
}

/// Both areas as far as a takeover needs them.
struct Areas {
    sender: Area,
    receiver: Area,
    chunks: Vec<Chunk>,
    /// The control words of both.
    _words: (Arc<Mapping>, Mapping),
}

impl Areas {
    /// `None`: no memory.
    fn map(found: &Found) -> Option<Areas> {
        let peer = Mapping::of(&found.peer, 0, CONTROL_BYTES, false).ok()?;
        let (sender, receiver) = (Area::new(), Area::new());
        // SAFETY: both are `CONTROL_BYTES` long, page-aligned, and kept beside the areas.
        unsafe {
            sender.set_control(found.words.addr().as_ptr().cast());
            receiver.set_control(peer.addr().as_ptr().cast());
        }
        let mut areas = Areas {
            sender,
            receiver,
            chunks: Vec::new(),
            _words: (found.words.clone(), peer),
        };
        let newest = Memory::new(&areas.sender, &areas.receiver, found.direction.at.1)?.own_tx();
        let used = newest.loc.each_ref().map(|l| l.load(Relaxed).loc());
        let mut used: Vec<u32> = used.iter().flatten().map(|l| l.chunk).collect();
        used.dedup();
        for n in used {
            areas.map_chunk(found, n)?;
        }
        Some(areas)
    }

    /// The first file has chunks 0 and 1, each other one a chunk.
    fn map_chunk(&mut self, found: &Found, n: u32) -> Option<()> {
        let (fd, bytes) = found.files.get(n.checked_sub(1)? as usize)?;
        let at = if n == 1 { CONTROL_BYTES as u64 } else { 0 };
        let len = usize::try_from(bytes.checked_sub(at)?).ok()?;
        let map = Mapping::of(fd, at, len, false).ok()?;
        // SAFETY: mapped for its length, page-aligned, and kept beside the area.
        unsafe {
            self.sender
                .set_chunk(n as usize, map.addr().as_ptr(), map.len());
        }
        let fd = fd.clone();
        self.chunks.push(Chunk { map, fd, at });
        Some(())
    }

    fn memory(&self, slot: u32) -> Option<Memory<'_>> {
        Memory::new(&self.sender, &self.receiver, slot).map(Memory::for_takeover)
    }

    /// A piece of what lies at this address of a ring; `None`: it is no ring's.
    fn read(&self, data: *const u8, len: usize) -> Option<std::io::Result<Vec<u8>>> {
        let within = |c: &&Chunk| {
            let offset = (data as usize).checked_sub(c.map.addr().as_ptr() as usize);
            offset.is_some_and(|o| o < c.map.len())
        };
        let c = self.chunks.iter().find(within)?;
        let offset = data as usize - c.map.addr().as_ptr() as usize;
        let mut bytes = vec![0; len.min(PIECE).min(c.map.len() - offset)];
        let n = rustix::io::pread(&c.fd, &mut bytes[..], c.at + offset as u64);
        Some(n.map_err(Into::into).map(|n| {
            bytes.truncate(n);
            bytes
        }))
    }
}

/// The socket as the lane's code uses it.
struct Wire<'a> {
    sock: Sock<'a>,
    areas: &'a Areas,
}

impl Wire<'_> {
    fn send(
        &self,
        data: *const u8,
        len: usize,
        send: impl FnOnce(&Sock, *const u8, usize) -> Result<usize, i32>,
    ) -> Result<usize, i32> {
        match self.areas.read(data, len) {
            None => send(&self.sock, data, len),
            Some(Ok(bytes)) => send(&self.sock, bytes.as_ptr(), bytes.len()),
            Some(Err(e)) => Err(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

impl Port for Wire<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.send(data, len, |sock, p, n| sock.tcp_send(p, n))
    }

    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.send(data, len, |sock, p, n| sock.tcp_send_more(p, n))
    }

    fn leaves(&self) -> bool {
        true // one of the ends does, and waits
    }

    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        self.sock.tcp_recv(buf, len, peek)
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        self.sock.tcp_unread()
    }

    fn tcp_sent(&self) -> Option<u64> {
        self.sock.tcp_sent()
    }

    fn ring(&self) {}
}

/// A direction that is this daemon's.
struct Held {
    sock: Foreign,
    tx: Box<TxState>,
    /// When TCP took something last.
    moved: Instant,
    rest: Duration,
}

/// A takeover under way.
pub(crate) struct Takeover {
    found: Found,
    process: ProcId,
    family: Arc<Family>,
    /// A copy of the process's control connection: as long as it is open, the process does not take us for dead. The
    /// connection itself lives as long as the flag says.
    control: Option<(Foreign, Arc<AtomicBool>)>,
    system: Arc<dyn System>,
    began: Instant,
    areas: Option<Areas>,
    held: Option<Held>,
}

impl Takeover {
    pub(crate) fn new(
        found: Found,
        (process, family): (ProcId, Arc<Family>),
        control: (Foreign, Arc<AtomicBool>),
        system: Arc<dyn System>,
    ) -> Takeover {
        Takeover {
            found,
            process,
            family,
            control: Some(control),
            system,
            began: Instant::now(),
            areas: None,
            held: None,
        }
    }

    /// Goes on as far as it can without waiting. After the end, drop it where it may block.
    pub(crate) fn step(&mut self) -> Step {
        let areas = self.areas.take().or_else(|| Areas::map(&self.found));
        let Some(areas) = areas else {
            return Step::NONE;
        };
        let step = match self.held.take() {
            None => self.begin(&areas),
            Some(h) => self.go_on(&areas, h),
        };
        self.areas = Some(areas);
        step
    }

    fn port<'a>(&'a self, areas: &'a Areas, sock: &'a Foreign) -> Wire<'a> {
        let sock = Sock {
            fd: sock.as_fd(),
            system: &*self.system,
            leaves: false, // (the receiver's word says so)
        };
        Wire { sock, areas }
    }

    /// Is the process's control connection no more? Then the process goes on with the direction when it sees that.
    fn is_cut(&self) -> bool {
        let lives = self.control.as_ref().map(|c| &c.1);
        lives.is_some_and(|l| !l.load(Relaxed))
    }

    /// Takes the direction, if its end does nothing.
    fn begin(&mut self, areas: &Areas) -> Step {
        let who = self.found.direction.who;
        let Some(m) = areas.memory(self.found.direction.at.1) else {
            return Step::NONE;
        };
        let now = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        if self.is_cut() || !is_asked(&m, now, self.found.own) || is_done(&m, now) {
            return Step::NONE;
        }
        let again = match self.began.elapsed() < BUSY {
            true => Step::Again(REST_MIN),
            false => Step::NONE,
        };
        if self.family.at_work(who.conn, who.gen) {
            return again;
        }
        // Before the claim: an end that finds it recorded closes its descriptors, and counts on ours.
        let Some(sock) = self.socket() else {
            return Step::NONE;
        };
        if !claim(&m, now, || self.family.at_work(who.conn, who.gen)) {
            sock.close();
            return again;
        }
        let tx = Box::<TxState>::default();
        let adopted = tx.adopt(&m, &self.port(areas, &sock), self.found.tag);
        match adopted {
            Ok(Adopted::Ring) => {
                let held = Held {
                    sock,
                    tx,
                    moved: Instant::now(),
                    rest: REST_MIN,
                };
                self.go_on(areas, held)
            }
            other => {
                if let Err(r) = other {
                    tracing::debug!(?r, "a direction cannot be taken over");
                }
                sock.close();
                release(&m, now.epoch());
                Step::Over(End {
                    claimed: true,
                    brought: false,
                })
            }
        }
    }

    /// The socket of the end, as its process has it now.
    fn socket(&self) -> Option<Foreign> {
        let who = self.found.direction.who;
        let view = self.family.view(who.conn)?;
        if view.gen != who.gen || view.state != state::OPEN {
            return None;
        }
        socket_of(
            self.process,
            view.fd.checked_sub(1),
            view.inode,
            self.found.cookie,
        )
    }

    /// Has the end closed, or its process ended, and nobody else may go on with it?
    fn is_orphan(&self) -> bool {
        let view = self.family.view(self.found.direction.who.conn);
        let open = view.filter(|v| v.gen == self.found.direction.who.gen && v.state == state::OPEN);
        // (Holders are not asked whether they live.)
        let alone = |v: View| v.forks == 0 && v.holders.len() <= 1;
        open.is_none_or(|v| alone(v) && is_gone(self.process))
    }

    /// Puts on TCP as much as it takes.
    fn go_on(&mut self, areas: &Areas, mut h: Held) -> Step {
        let Some(m) = areas.memory(self.found.direction.at.1) else {
            return Step::NONE;
        };
        let mut end = End {
            claimed: true,
            brought: false,
        };
        if self.is_cut() {
            if !self.is_orphan() {
                h.sock.close();
                return Step::Over(end);
            }
            self.control = None; // nobody else has the rest
        }
        let before = h.tx.tcp_pos.load(Relaxed);
        let port = self.port(areas, &h.sock);
        let taken = h.tx.taken_by_kernel(&m, &port);
        if taken != Ordering::Equal {
            tracing::debug!(
                ?taken,
                "a direction that was taken over is not ours any more"
            );
            if taken == Ordering::Greater {
                disconnect(h.sock.as_fd()); // the stream is lost
            }
            h.sock.close();
            h.tx.give_back(&m, h.tx.epoch.load(Relaxed));
            return Step::Over(end);
        }
        let failed = h.tx.down(&m, &port).err();
        if failed.is_none() && h.tx.mode.load(Relaxed) != mode::TCP {
            if h.tx.tcp_pos.load(Relaxed) != before {
                (h.moved, h.rest) = (Instant::now(), REST_MIN);
            }
            let still = h.moved.elapsed();
            if still < ORPHAN || !self.is_orphan() {
                let rest = h.rest;
                h.rest = (2 * rest).min(REST_MAX);
                self.held = Some(h);
                return Step::Again(if still < STILL { rest } else { REST_LONG });
            }
        }
        end.brought = h.tx.mode.load(Relaxed) == mode::TCP;
        if !end.brought {
            // Its words are impossible, or nobody takes the bytes: nobody can go on with it.
            tracing::debug!(?failed, "a direction that was taken over is reset");
            disconnect(h.sock.as_fd());
        }
        self.give_back(&m, h, end)
    }

    /// The direction is its end's again. If the application has shut it down meanwhile, its kernel is told.
    fn give_back(&self, m: &Memory<'_>, h: Held, end: End) -> Step {
        let shut = self.family.view(self.found.direction.who.conn);
        if shut.is_some_and(|v| v.gen == self.found.direction.who.gen && v.shut) {
            let _ = rustix::net::shutdown(&h.sock, rustix::net::Shutdown::Write);
        }
        h.sock.close();
        h.tx.give_back(m, h.tx.epoch.load(Relaxed));
        Step::Over(end)
    }
}
