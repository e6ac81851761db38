//! Within the node: brings to TCP what is on the ring of an end that does not do it, because it sleeps, computes or is
//! stopped while the other end leaves (`lane::half::tx::takeover`). For helper threads: the socket's lock may be held
//! for as long as its owner likes.

use super::groups::Found;
use super::sock::{disconnect, Sock};
use crate::clients::family::Family;
use crate::os::fds::Foreign;
use crate::os::process::{socket_of, ProcId};
use crate::os::system::System;
use lane::abi::{rx, tx, TxWord, CONTROL_BYTES};
use lane::family::{flag, state};
use lane::half::tx::{claim, is_done, mode, release, Adopted};
use lane::half::{Area, Memory, TxState};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::*;
use std::sync::Arc;
use std::time::{Duration, Instant};
use underpass_rdma::verbs::{Mapping, Memory as _};

/// For how long an end that is at work on its direction is asked again.
const BUSY: Duration = Duration::from_millis(50);
/// Time between two attempts, at first and at most.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(50);
/// If the receiver takes nothing for so long, and the sender's process has ended, the connection is reset: it is an
/// orphan then (tcp(7), tcp_orphan_retries).
const ORPHAN: Duration = Duration::from_secs(100);

/// What comes of a step.
pub(crate) enum Step {
    /// The end has its direction: on TCP, where this daemon has brought it, or else as before.
    Over(bool),
    /// TCP is full, or the end is at work: to be tried again after a while.
    Again(Duration),
}

/// Both areas as far as a takeover needs them.
struct Areas {
    sender: Area,
    receiver: Area,
    _maps: Vec<Arc<Mapping>>,
}

impl Areas {
    /// `None`: no memory.
    fn map(found: &Found) -> Option<Areas> {
        let (sender, receiver) = (Area::new(), Area::new());
        let mut maps = vec![found.words.clone()];
        let mut keep = |fd: &OwnedFd, at: u64, len: u64| {
            let map = Mapping::of(fd, at, usize::try_from(len).ok()?, false).ok()?;
            maps.push(Arc::new(map));
            maps.last().cloned()
        };
        let control = CONTROL_BYTES as u64;
        let peer = keep(&found.peer, 0, control)?;
        for (n, (fd, bytes)) in found.files.iter().enumerate() {
            // The first file has chunks 0 and 1, each other one a chunk.
            let at = if n == 0 { control } else { 0 };
            let map = keep(fd, at, bytes.checked_sub(at)?)?;
            // SAFETY: mapped for its length, page-aligned, and kept beside the area.
            unsafe { sender.set_chunk(n + 1, map.addr().as_ptr(), map.len()) };
        }
        // SAFETY: both are `CONTROL_BYTES` long, page-aligned, and kept beside the areas.
        unsafe {
            sender.set_control(found.words.addr().as_ptr().cast());
            receiver.set_control(peer.addr().as_ptr().cast());
        }
        Some(Areas {
            sender,
            receiver,
            _maps: maps,
        })
    }

    fn memory(&self, slot: u32) -> Option<Memory<'_>> {
        Memory::new(&self.sender, &self.receiver, slot).map(Memory::for_takeover)
    }
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
    /// A copy of the process's control connection: as long as it is open, the process does not take us for dead.
    _control: OwnedFd,
    system: Arc<dyn System>,
    began: Instant,
    areas: Option<Areas>,
    held: Option<Held>,
}

impl Takeover {
    pub(crate) fn new(
        found: Found,
        (process, family): (ProcId, Arc<Family>),
        control: OwnedFd,
        system: Arc<dyn System>,
    ) -> Takeover {
        Takeover {
            found,
            process,
            family,
            _control: control,
            system,
            began: Instant::now(),
            areas: None,
            held: None,
        }
    }

    /// Goes on as far as it can without waiting.
    pub(crate) fn step(&mut self) -> Step {
        let areas = self.areas.take().or_else(|| Areas::map(&self.found));
        let Some(areas) = areas else {
            return Step::Over(false);
        };
        let Some(m) = areas.memory(self.found.at.1) else {
            return Step::Over(false);
        };
        let step = match self.held.take() {
            None => self.begin(&m),
            Some(h) => self.go_on(&m, h),
        };
        self.areas = Some(areas);
        step
    }

    /// Takes the direction, if its end does nothing.
    fn begin(&mut self, m: &Memory<'_>) -> Step {
        let now = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        if !is_asked(m, now) || is_done(m, now) {
            return Step::Over(false);
        }
        let who = self.found.who;
        let again = match self.began.elapsed() < BUSY {
            true => Step::Again(REST_MIN),
            false => Step::Over(false),
        };
        if self.family.sending(who.conn, who.gen) {
            return again;
        }
        // Before the claim: an end that finds it closes its descriptors, and counts on ours.
        let Some(sock) = self.socket() else {
            return Step::Over(false);
        };
        if !claim(m, now, || self.family.sending(who.conn, who.gen)) {
            sock.close();
            return again;
        }
        let port = Sock {
            fd: sock.as_fd(),
            system: &*self.system,
        };
        let tx = Box::<TxState>::default();
        match tx.adopt(m, &port, self.found.tag) {
            Ok(Adopted::Ring) => {
                let held = Held {
                    sock,
                    tx,
                    moved: Instant::now(),
                    rest: REST_MIN,
                };
                self.go_on(m, held)
            }
            other => {
                if let Err(r) = other {
                    tracing::debug!(?r, "a direction cannot be taken over");
                }
                sock.close();
                release(m, now.epoch());
                Step::Over(false)
            }
        }
    }

    /// The socket of the end, as its process has it now.
    fn socket(&self) -> Option<Foreign> {
        let who = self.found.who;
        let view = self.family.view(who.conn)?;
        let named = view.flags & flag::NAMED != 0 || view.inode != 0;
        if view.gen != who.gen || view.state != state::OPEN || !named {
            return None;
        }
        socket_of(self.process, view.fd.checked_sub(1), view.inode)
    }

    /// Puts on TCP as much as it takes.
    fn go_on(&mut self, m: &Memory<'_>, mut h: Held) -> Step {
        let before = h.tx.tcp_pos.load(Relaxed);
        let port = Sock {
            fd: h.sock.as_fd(),
            system: &*self.system,
        };
        let failed = h.tx.down(m, &port).err();
        if failed.is_none() && h.tx.mode.load(Relaxed) != mode::TCP {
            if h.tx.tcp_pos.load(Relaxed) != before {
                (h.moved, h.rest) = (Instant::now(), REST_MIN);
            }
            let gone = || crate::os::process::is_gone(self.process);
            if h.moved.elapsed() < ORPHAN || !gone() {
                let rest = h.rest;
                h.rest = (2 * rest).min(REST_MAX);
                self.held = Some(h);
                return Step::Again(rest);
            }
        }
        if h.tx.mode.load(Relaxed) != mode::TCP {
            // Its words are impossible, or nobody takes the bytes: nobody can go on with it.
            tracing::debug!(?failed, "a direction that was taken over is reset");
            disconnect(h.sock.as_fd());
        }
        h.sock.close();
        h.tx.give_back(m, h.tx.epoch.load(Relaxed));
        Step::Over(true)
    }
}

/// Has the receiver revoked, and is the sender on its ring, or on its way down?
fn is_asked(m: &Memory<'_>, now: TxWord) -> bool {
    let word = m.peer_rx().word.load(Acquire); // pairs with the SeqCst store in `RxState::revoke`
    let revoked = word.epoch() == now.epoch() && word.has(rx::REVOKED);
    revoked && matches!(now.phase(), tx::UP | tx::DOWNING)
}
