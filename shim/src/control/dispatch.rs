//! What the daemon says, and what is done about it.

use super::datagram::Fds;
use super::{
    drop_connection, reply, CREDITS, NEXT_TRY_MS, NOTICE, PROBE_S, READY, REFUSED, RING_LOG2,
    RING_MAX_LOG2,
};
use crate::links::{self, Link};
use crate::{promote, sys, table};
use core::sync::atomic::Ordering::*;
use link::msg::{ToDaemon, ToShim};

pub(super) fn handle(m: ToShim, fds: &mut Fds) {
    match m {
        ToShim::HelloAck {
            version: _,
            party: _,
            home,
            credits,
            ring_log2,
            ring_max_log2,
            probe_s,
        } => {
            PROBE_S.store(probe_s.into(), Relaxed);
            greeted(home, credits, (ring_log2.into(), ring_max_log2.into()), fds)
        }
        ToShim::Refused { reason } => {
            REFUSED.store(reason, Relaxed);
            drop_connection();
            NEXT_TRY_MS.store(sys::now_ms() + 60_000, Relaxed);
        }
        ToShim::Credit { n } => {
            CREDITS.fetch_add(n.min(1024) as i32, Relaxed);
        }
        ToShim::Decline {
            conn,
            gen,
            local,
            peer,
            retry_ms,
        } => promote::declined(conn, gen, local, peer, retry_ms),
        ToShim::LinkNew {
            link,
            side,
            bytes,
            far,
        } => new_link((link, side), bytes as usize, far != 0, fds),
        ToShim::Chunk {
            link,
            side,
            chunk,
            bytes,
        } => new_chunk((link, side), true, chunk, bytes, fds),
        ToShim::PeerChunk {
            link,
            side,
            chunk: 0,
            bytes,
        } => peer_first((link, side), bytes, fds),
        ToShim::PeerChunk {
            link,
            side,
            chunk,
            bytes,
        } => new_chunk((link, side), false, chunk, bytes, fds),
        ToShim::ChunkReady { link, side, chunk } => {
            on(link, side, |l| l.chunk_ready(chunk));
        }
        ToShim::Offer {
            link,
            side,
            lane,
            conn,
            gen,
            epoch,
            tag,
        } => {
            let attach = |l: &Link| {
                (
                    promote::attach(l, lane, conn, gen, epoch, tag),
                    l.peer.control().is_some(),
                )
            };
            match on(link, side, attach) {
                Some((true, _)) => {}
                // The file was not mapped, or lost with a control connection.
                Some((false, false)) => reply(&ToDaemon::LinkFailed { link, side }),
                _ => reply(&ToDaemon::LaneRefused { link, side, lane }),
            }
        }
        ToShim::PeerGone { link, side } => {
            on(link, side, Link::gone);
        }
        ToShim::Command { conn, gen, op } => promote::command(conn, gen, op),
        ToShim::LaneGone {
            link,
            side,
            lane,
            conn,
            gen,
        } => {
            on(link, side, |l| promote::lane_gone(l, lane, conn, gen));
        }
    }
}

/// Calls `f` with a link, if there is such a one.
fn on<T>(link: u64, side: u8, f: impl FnOnce(&Link) -> T) -> Option<T> {
    links::find(link, side).map(f)
}

fn greeted(home: u64, credits: u32, (first, max): (u32, u32), fds: &mut Fds) {
    let Some(fd) = fds.take(0) else {
        drop_connection(); // the process had no number for it
        return NEXT_TRY_MS.store(sys::now_ms() + 1000, Relaxed);
    };
    if let Ok(p) = sys::map(fd, 4096, false) {
        NOTICE.store(p.cast(), Release);
    }
    sys::close(fd);
    let (least, most) = (link::layout::RING_LOG2_MIN, link::layout::RING_LOG2_MAX);
    let max = max.clamp(least, most);
    RING_MAX_LOG2.store(max, Relaxed);
    RING_LOG2.store(first.clamp(least, max), Relaxed);
    CREDITS.store(credits.min(1024) as i32, Relaxed);
    REFUSED.store(0, Relaxed);
    if let Some(t) = table::table() {
        t.header.home_number.store(home as u32, Relaxed);
    }
    READY.store(1, Release);
    promote::greeted();
}

fn new_link((link, side): (u64, u8), bytes: usize, far: bool, fds: &mut Fds) {
    let ok = match (fds.take(0), fds.take(1)) {
        (Some(bell), Some(first)) => {
            let ok = links::create(link, side, bell, first, bytes, far);
            sys::close(first);
            ok
        }
        (bell, first) => {
            bell.into_iter().chain(first).for_each(sys::close);
            false
        }
    };
    reply(&match ok {
        true => ToDaemon::Mapped {
            link,
            side,
            chunk: 0,
        },
        false => ToDaemon::LinkFailed { link, side },
    });
}

/// The first file of the peer's area. (The offers behind it say that we have it.)
fn peer_first((link, side): (u64, u8), bytes: u64, fds: &mut Fds) {
    let found = links::find(link, side).zip(fds.take(0));
    let ok = found.is_some_and(|(l, fd)| {
        let ok = keeps_its_size(fd, bytes) && l.map_peer(fd, bytes as usize);
        sys::close(fd);
        ok
    });
    if !ok {
        reply(&ToDaemon::LinkFailed { link, side });
    }
}

/// A further chunk of our own area, or of the peer's.
fn new_chunk((link, side): (u64, u8), own: bool, chunk: u32, bytes: u64, fds: &mut Fds) {
    let Some(l) = links::find(link, side) else {
        return reply(&ToDaemon::LinkFailed { link, side });
    };
    let ok = fds.take(0).is_some_and(|fd| {
        let ok = match own {
            true => l.map_chunk(true, chunk, fd, bytes as usize),
            false => keeps_its_size(fd, bytes) && l.map_further(chunk, fd, bytes as usize),
        };
        sys::close(fd);
        ok
    });
    // If not, of our own: its lanes make do with what there is, and ask again. Of the peer's: it comes again, and
    // nothing lies there until we say that we have it.
    match (ok, own) {
        (true, true) => reply(&ToDaemon::Mapped { link, side, chunk }),
        (true, false) => reply(&ToDaemon::PeerMapped { link, side, chunk }),
        (false, _) => {}
    }
}

/// Only a file that nobody can shrink may be mapped: a fault would kill us.
fn keeps_its_size(fd: i32, bytes: u64) -> bool {
    let seals = sys::fcntl(fd, libc::F_GET_SEALS, 0).unwrap_or(0);
    seals & libc::F_SEAL_SHRINK != 0
        && sys::lseek(fd, 0, libc::SEEK_END).is_ok_and(|n| n as u64 >= bytes)
}
