//! Within the node: brings to TCP what is on the ring of an end that does not do it, because it sleeps, computes or is
//! stopped while the other end leaves (`lane::half::tx::takeover`). For helper threads: the socket's lock may be held
//! for as long as its owner likes.

#[cfg(test)]
mod tests;

pub(crate) use lane::half::tx::bring::Step;

use super::groups::Found;
use super::sock::{disconnect, Sock};
use crate::clients::family::Family;
use crate::os::fds::Foreign;
use crate::os::process::{is_gone, socket_of, ProcId};
use crate::os::system::System;
use lane::abi::CONTROL_BYTES;
use lane::family::{state, View};
use lane::half::tx::bring::{Around, Bringing, End};
use lane::half::{Area, Memory, Port};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Instant;
use underpass_rdma::verbs::{Mapping, Memory as _};

/// Most bytes that are sent at once.
const PIECE: usize = 64 << 10;

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

/// What the steps need to know of an end, and its socket.
struct Beside<'a> {
    found: &'a Found,
    process: ProcId,
    family: &'a Family,
    lives: Option<&'a AtomicBool>,
    system: &'a dyn System,
    areas: &'a Areas,
    began: Instant,
}

impl Around for Beside<'_> {
    type Sock = Foreign;

    fn at_work(&self) -> bool {
        let who = self.found.direction.who;
        self.family.at_work(who.conn, who.gen)
    }

    fn copy(&self) -> Option<Foreign> {
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

    fn port<'a>(&'a self, sock: &'a Foreign) -> impl Port + 'a {
        let sock = Sock {
            fd: sock.as_fd(),
            system: self.system,
            leaves: false, // (the receiver's word says so)
        };
        Wire {
            sock,
            areas: self.areas,
        }
    }

    fn close(&self, sock: Foreign) {
        sock.close();
    }

    fn reset(&self, sock: &Foreign) {
        disconnect(sock.as_fd());
    }

    fn shut_down(&self, sock: &Foreign) {
        let _ = rustix::net::shutdown(sock, rustix::net::Shutdown::Write);
    }

    fn is_shut(&self) -> bool {
        let who = self.found.direction.who;
        let view = self.family.view(who.conn);
        view.is_some_and(|v| v.gen == who.gen && v.shut)
    }

    fn is_cut(&self) -> bool {
        self.lives.is_some_and(|l| !l.load(Relaxed))
    }

    fn is_orphan(&self) -> bool {
        let who = self.found.direction.who;
        let view = self.family.view(who.conn);
        let open = view.filter(|v| v.gen == who.gen && v.state == state::OPEN);
        // (Holders are not asked whether they live.)
        let alone = |v: View| v.forks == 0 && v.holders.len() <= 1;
        open.is_none_or(|v| alone(v) && is_gone(self.process))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
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
    bringing: Bringing<Foreign>,
}

impl Takeover {
    pub(crate) fn new(
        found: Found,
        (process, family): (ProcId, Arc<Family>),
        control: (Foreign, Arc<AtomicBool>),
        system: Arc<dyn System>,
    ) -> Takeover {
        Takeover {
            bringing: Bringing::new(found.tag, found.own, 0),
            found,
            process,
            family,
            control: Some(control),
            system,
            began: Instant::now(),
            areas: None,
        }
    }

    /// Goes on as far as it can without waiting. After the end, drop it where it may block.
    pub(crate) fn step(&mut self) -> Step {
        if self.areas.is_none() {
            self.areas = Areas::map(&self.found);
        }
        let slot = self.found.direction.at.1;
        let Some(areas) = &self.areas else {
            return Step::NONE;
        };
        let Some(m) = areas.memory(slot) else {
            return Step::NONE;
        };
        let around = Beside {
            found: &self.found,
            process: self.process,
            family: &self.family,
            lives: self.control.as_ref().map(|c| &*c.1),
            system: &*self.system,
            areas,
            began: self.began,
        };
        let step = self.bringing.step(&m, &around);
        if self.bringing.is_alone() {
            self.control = None; // (the process is gone, and nobody looks at it)
        }
        if let Step::Over(End { claimed: true, .. }) = step {
            let group = format_args!("{:#x}", self.found.direction.at.0);
            let _lane = tracing::debug_span!("lane", %group, slot).entered();
            tracing::debug!(?step, "a direction that was taken over");
        }
        step
    }
}
