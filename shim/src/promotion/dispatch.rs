//! What the daemon says about connections and link groups, and what is done then. (For what it says about itself, see
//! `daemon`.)

use crate::daemon::{reply, Fds};
use crate::promotion::{self, family};
use crate::state::groups::{self, LinkGroup};
use crate::sys;
use lane::abi::{Epoch, CHUNK_SEALS};
use lane::num;
use lane::proto::msg::{ToDaemon, ToShim};

/// The function that `daemon` calls for each message; it is set when the library is loaded.
pub fn said(m: ToShim, fds: &mut Fds) {
    match m {
        // `daemon` has handled these already.
        ToShim::HelloAck { .. } | ToShim::Refused { .. } | ToShim::Credit { .. } => {}
        ToShim::Decline {
            conn,
            gen,
            local,
            peer,
            retry_ms,
        } => promotion::declined(conn, gen, local, peer, retry_ms),
        ToShim::GroupNew {
            group,
            side,
            bytes,
            remote,
        } => new_group((group, side), num::size(bytes), remote != 0, fds),
        ToShim::Chunk {
            group,
            side,
            chunk,
            bytes,
        } => new_chunk((group, side), true, chunk, bytes, fds),
        ToShim::PeerChunk {
            group,
            side,
            chunk: 0,
            bytes,
        } => peer_first((group, side), bytes, fds),
        ToShim::PeerChunk {
            group,
            side,
            chunk,
            bytes,
        } => new_chunk((group, side), false, chunk, bytes, fds),
        ToShim::ChunkReady { group, side, chunk } => {
            on(group, side, |l| l.chunk_ready(chunk));
        }
        ToShim::Offer {
            group,
            side,
            lane,
            conn,
            gen,
            epoch,
            tag,
        } => offered((group, side), (lane, conn, gen), epoch, tag),
        ToShim::PeerGone { group, side } => {
            on(group, side, LinkGroup::gone);
        }
        ToShim::Command { conn, gen, op } => promotion::command(conn, gen, op),
        ToShim::LaneGone {
            group,
            side,
            lane,
            conn,
            gen,
        } => {
            on(group, side, |l| promotion::lane_gone(l, lane, conn, gen));
        }
        ToShim::TakenOver {
            group,
            side,
            lane,
            conn,
            gen,
        } => {
            on(group, side, |l| promotion::given_back(l, lane, conn, gen));
        }
    }
}

/// A lane is offered for a connection.
fn offered((group, side): (u64, u8), (lane, conn, gen): (u32, u32, u32), epoch: Epoch, tag: u64) {
    let attach = |l: &LinkGroup| {
        (
            promotion::attach(l, lane, conn, gen, epoch, tag),
            l.peer.control().is_some(),
        )
    };
    match on(group, side, attach) {
        Some((true, _)) => {}
        // The first file of the peer's area was not mapped.
        Some((false, false)) => reply(&ToDaemon::GroupFailed { group, side }),
        _ => reply(&ToDaemon::LaneRefused { group, side, lane }),
    }
}

/// Calls `f` with a link group, if that link group exists.
fn on<T>(group: u64, side: u8, f: impl FnOnce(&LinkGroup) -> T) -> Option<T> {
    groups::find(group, side).map(f)
}

fn new_group((group, side): (u64, u8), bytes: usize, remote: bool, fds: &mut Fds) {
    let ok = match (fds.take(0), fds.take(1)) {
        (Some(bell), Some(first)) => {
            family::reap_groups();
            let ok = groups::create(group, side, bell, first, bytes, remote);
            if ok {
                seal(first);
            }
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
            group,
            side,
            chunk: 0,
        },
        false => ToDaemon::GroupFailed { group, side },
    });
}

/// The first file of the peer's area. (There is no reply: the answers to the offers that follow tell that we have
/// it.)
fn peer_first((group, side): (u64, u8), bytes: u64, fds: &mut Fds) {
    let known = groups::find(group, side);
    if known.is_some_and(|l| l.peer.control().is_some()) {
        return; // it is sent again over each new control connection
    }
    let ok = known.zip(fds.take(0)).is_some_and(|(l, fd)| {
        let ok = keeps_its_size(fd, bytes) && l.map_peer(fd, num::size(bytes));
        sys::close(fd);
        ok
    });
    if !ok {
        reply(&ToDaemon::GroupFailed { group, side });
    }
}

/// A further chunk of our own area, or of the peer's.
fn new_chunk((group, side): (u64, u8), own: bool, chunk: u32, bytes: u64, fds: &mut Fds) {
    let Some(l) = groups::find(group, side) else {
        return reply(&ToDaemon::GroupFailed { group, side });
    };
    let ok = fds.take(0).is_some_and(|fd| {
        let ok = match own {
            true => {
                let ok = l.map_chunk(true, chunk, fd, num::size(bytes));
                ok.then(|| seal(fd)).is_some()
            }
            false => {
                keeps_its_size(fd, bytes) && {
                    l.map_further(chunk, fd, num::size(bytes), || family::is_shared(l))
                }
            }
        };
        sys::close(fd);
        ok
    });
    // If an own chunk fails, its lanes use the chunks there are, and ask again. If a peer's chunk fails, it is
    // sent again, and nothing lies there until we confirm it.
    match (ok, own) {
        (true, true) => reply(&ToDaemon::Mapped { group, side, chunk }),
        (true, false) => reply(&ToDaemon::PeerMapped { group, side, chunk }),
        (false, _) => {}
    }
}

/// We have mapped this chunk: nobody else is to write to it. (What cannot be sealed here, the daemon seals.)
fn seal(fd: i32) {
    let _ = sys::fcntl(fd, libc::F_ADD_SEALS, num::word(CHUNK_SEALS));
}

/// Map a file only if nobody can shrink it: a fault would kill this process.
fn keeps_its_size(fd: i32, bytes: u64) -> bool {
    let seals = sys::fcntl(fd, libc::F_GET_SEALS, 0).unwrap_or(0);
    seals & libc::F_SEAL_SHRINK != 0
        && sys::lseek(fd, 0, libc::SEEK_END).is_ok_and(|n| num::natural(n) >= bytes)
}
