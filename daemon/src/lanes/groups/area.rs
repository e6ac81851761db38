//! The memory and the doorbell of a link group, and how they are made. A chunk's stage decides what may be done with
//! it: given to its writer, mapped by the writer, sealed, given to the other client.

use crate::os::memfd;
use lane::abi::{CHUNK_BYTES, CONTROL_BYTES, LANES, REMOTE_CHUNK_BYTES, RING_LOG2_MAX};
use lane::num;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use underpass_rdma::verbs::Mapping;

/// Stage of a chunk on its way to both clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// With its writer, who has not mapped it yet.
    Given,
    /// Sealed, with the other client.
    Sealed,
    /// Mapped by both.
    Shared,
}

/// One memory file of an area.
pub(super) struct Chunk {
    pub fd: Arc<OwnedFd>,
    pub bytes: u64,
    pub stage: Stage,
    /// A helper seals it.
    pub sealing: bool,
    /// When it was last given to somebody.
    pub sent: Duration,
}

/// Both doorbell ends, and the first file of both areas.
pub(super) type Areas = ([OwnedFd; 2], [Chunk; 2]);

/// The least that the first data chunk has if its writer's memory is limited.
const SMALL_FIRST: usize = 256 << 10;

/// How much memory an area gets at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// More than most areas ever use: nobody counts what is not touched.
    Whole,
    /// The memory of its writer is limited: for the first rings of a few lanes, which have so many bytes (log2). Before there
    /// is more, somebody looks whether there is room.
    Small(u32),
    /// Across nodes, where a device holds all of it.
    Remote,
}

impl Size {
    /// Bytes of the first file of an area: chunks 0 and 1.
    pub(crate) fn first_bytes(self) -> usize {
        CONTROL_BYTES
            + match self {
                Size::Small(log2) => (4 << log2.min(RING_LOG2_MAX)).max(SMALL_FIRST),
                size => size.chunk_bytes(),
            }
    }

    /// Bytes of a further data chunk. The largest ring fits into each.
    pub(crate) fn chunk_bytes(self) -> usize {
        match self {
            Size::Whole => CHUNK_BYTES,
            Size::Small(_) => 1 << RING_LOG2_MAX,
            Size::Remote => REMOTE_CHUNK_BYTES,
        }
    }
}

/// Makes the doorbell and the first files of a new link group.
pub(super) fn make_areas(id: u64, sizes: [Size; 2], now: Duration) -> Result<Areas, Errno> {
    use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
    let (a, b) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let first = |side: u8| make_chunk(id, side, 0, sizes[usize::from(side)], now);
    Ok(([a, b], [first(0)?, first(1)?]))
}

/// The control words of an area, for what this daemon writes there.
pub(super) fn words(first: &Chunk) -> Option<Arc<Mapping>> {
    let map = Mapping::of(&*first.fd, 0, CONTROL_BYTES, true);
    map.ok().map(Arc::new)
}

/// Makes chunk `n` of an area. Chunk 0 begins with a header that identifies it; chunk 1 follows it in the same
/// file.
pub(super) fn make_chunk(
    id: u64,
    side: u8,
    n: u32,
    size: Size,
    now: Duration,
) -> Result<Chunk, Errno> {
    let bytes = match n {
        0 => size.first_bytes(),
        _ => size.chunk_bytes(),
    };
    let fd = memfd::make(&format!("underpass-{id:x}-{side}-{n}"), bytes)?;
    if n == 0 {
        let mut h = Vec::with_capacity(28);
        h.extend_from_slice(&lane::abi::MAGIC.to_ne_bytes());
        h.extend_from_slice(&u32::from(lane::VERSION).to_ne_bytes());
        h.extend_from_slice(&u32::from(side).to_ne_bytes());
        h.extend_from_slice(&id.to_ne_bytes());
        h.extend_from_slice(&num::small(LANES).to_ne_bytes());
        rustix::io::pwrite(&fd, &h, 0)?;
    }
    Ok(Chunk {
        fd: Arc::new(fd),
        bytes: bytes as u64,
        stage: Stage::Given,
        sealing: false,
        sent: now,
    })
}
