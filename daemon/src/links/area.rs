//! The memory and the doorbell of a link, as they are made. What may be done with a chunk follows
//! from its stage: given to its writer, mapped by him, sealed, given to the other.

use crate::memfd;
use link::layout::{CHUNK_BYTES, CONTROL_BYTES, FAR_CHUNK_BYTES, LANES};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// How far a chunk has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// With its writer, who has not mapped it yet.
    Given,
    /// Sealed, with the other party.
    Sealed,
    /// Mapped by both.
    Shared,
}

/// One memory file of an area.
pub struct Chunk {
    pub fd: Arc<OwnedFd>,
    pub bytes: u64,
    pub stage: Stage,
    /// When it was last given to somebody.
    pub sent: Instant,
}

/// Both doorbell ends and the first two chunks of both areas.
pub type Areas = ([OwnedFd; 2], [Vec<Chunk>; 2]);

/// Bytes of a data chunk.
pub fn chunk_bytes(far: bool) -> usize {
    if far {
        FAR_CHUNK_BYTES
    } else {
        CHUNK_BYTES
    }
}

/// Makes what a new link needs.
pub fn make_areas(id: u64, far: bool) -> Result<Areas, Errno> {
    use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
    let (a, b) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let chunk = |side, n| make_chunk(id, side, n, far);
    let area = |side| Ok::<_, Errno>(vec![chunk(side, 0)?, chunk(side, 1)?]);
    Ok(([a, b], [area(0)?, area(1)?]))
}

/// Makes chunk `n` of an area; chunk 0 says in its head what it is.
pub fn make_chunk(id: u64, side: usize, n: usize, far: bool) -> Result<Chunk, Errno> {
    let bytes = if n == 0 {
        CONTROL_BYTES
    } else {
        chunk_bytes(far)
    };
    let fd = memfd::make(&format!("underpass-{id:x}-{side}-{n}"), bytes)?;
    if n == 0 {
        let mut h = Vec::with_capacity(28);
        h.extend_from_slice(&link::layout::MAGIC.to_ne_bytes());
        h.extend_from_slice(&u32::from(link::VERSION).to_ne_bytes());
        h.extend_from_slice(&(side as u32).to_ne_bytes());
        h.extend_from_slice(&id.to_ne_bytes());
        h.extend_from_slice(&(LANES as u32).to_ne_bytes());
        rustix::io::pwrite(&fd, &h, 0)?;
    }
    Ok(Chunk {
        fd: Arc::new(fd),
        bytes: bytes as u64,
        stage: Stage::Given,
        sent: Instant::now(),
    })
}
