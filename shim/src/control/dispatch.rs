//! What the daemon says, and what is done about it.

use super::datagram::Fds;
use super::{
    drop_connection, handover, reply, CREDITS, FEATURES, NEXT_TRY_MS, NOTICE, READY, REFUSED,
    RING_LOG2, RING_MAX_LOG2,
};
use crate::links::{self, Link};
use crate::{promote, sys, table};
use core::sync::atomic::Ordering::*;
use link::msg::{feature, ToDaemon, ToShim};

pub(super) fn handle(m: ToShim, fds: &mut Fds) {
    match m {
        ToShim::HelloAck {
            version: _,
            features,
            party: _,
            home,
            credits,
            ring_log2,
            ring_max_log2,
        } => greeted(
            (features, home),
            credits,
            (ring_log2.into(), ring_max_log2.into()),
            fds,
        ),
        ToShim::Refused { reason } => {
            REFUSED.store(reason, Relaxed);
            drop_connection();
            NEXT_TRY_MS.store(sys::now_ms() + 60_000, Relaxed);
        }
        ToShim::Credit { n } => {
            CREDITS.fetch_add(n.min(1024) as i32, Relaxed);
            handover::settle(false);
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
            let attach = |l: &Link| promote::attach(l, lane, conn, gen, epoch, tag);
            if on(link, side, attach) != Some(true) {
                reply(&ToDaemon::LaneRefused { link, side, lane });
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

fn greeted((features, home): (u32, u64), credits: u32, (first, max): (u32, u32), fds: &mut Fds) {
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
    FEATURES.store(features, Relaxed);
    if let Some(t) = table::table().filter(|_| features & feature::HOME != 0) {
        t.header.home_number.store(home as u32, Relaxed);
    }
    READY.store(1, Release);
    promote::greeted();
}

fn new_link((link, side): (u64, u8), bytes: usize, far: bool, fds: &mut Fds) {
    let ok = match (fds.take(0), fds.take(1)) {
        (Some(bell), Some(chunk)) => {
            let ok = links::create(link, side, bell, chunk, bytes, far);
            sys::close(chunk);
            ok
        }
        (bell, chunk) => {
            bell.into_iter().chain(chunk).for_each(sys::close);
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

/// A chunk of our own area, or of the peer's.
fn new_chunk((link, side): (u64, u8), own: bool, chunk: u32, bytes: u64, fds: &mut Fds) {
    let known = links::find(link, side);
    let ok = known
        .and_then(|l| Some((l, fds.take(0)?)))
        .is_some_and(|(l, fd)| {
            let bytes_here = bytes as usize;
            let ok = match own {
                true => l.map_chunk(true, chunk, fd, bytes_here),
                false if !keeps_its_size(fd, bytes) => false,
                false if chunk > 1 => l.map_further(chunk, fd, bytes_here),
                false => l.map_chunk(false, chunk, fd, bytes_here),
            };
            sys::close(fd);
            ok
        });
    if !ok && chunk > 1 && known.is_some() {
        // Of our own: its lanes make do with what there is, and ask again. Of the peer's: it comes again, and
        // nothing lies there until we say that we have it.
        return;
    }
    reply(&match (ok, own) {
        (true, true) => ToDaemon::Mapped { link, side, chunk },
        (true, false) => ToDaemon::PeerMapped { link, side, chunk },
        (false, _) => ToDaemon::LinkFailed { link, side },
    });
}

/// Only a file that nobody can shrink may be mapped: a fault would kill us.
fn keeps_its_size(fd: i32, bytes: u64) -> bool {
    let seals = sys::fcntl(fd, libc::F_GET_SEALS, 0).unwrap_or(0);
    seals & libc::F_SEAL_SHRINK != 0
        && sys::lseek(fd, 0, libc::SEEK_END).is_ok_and(|n| n as u64 >= bytes)
}
