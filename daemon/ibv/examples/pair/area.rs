//! Memory as links have it: a file in memory with a writable mapping and, once it is sealed, a
//! read-only one, such as the daemon has of what an application writes.

use crate::Result;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use underpass_rdma::verbs::{Mapping, Memory};

pub struct Area {
    fd: OwnedFd,
    /// The writer's, made before the area was sealed.
    pub writable: Arc<Mapping>,
}

impl Area {
    pub fn new(len: usize) -> Result<Area> {
        let fd = rustix::fs::memfd_create("area", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let writable = Mapping::of(&fd, 0, len, true)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok(Area {
            fd,
            writable: Arc::new(writable),
        })
    }

    pub fn read_only(&self) -> Result<Mapping> {
        Ok(Mapping::of(&self.fd, 0, self.writable.len(), false)?)
    }

    /// Memory in use, in KiB.
    pub fn used(&self) -> Result<i64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks / 2)
    }

    /// What must fail once the area is sealed.
    pub fn another_writer(&self) -> Result<Mapping> {
        Ok(Mapping::of(&self.fd, 0, self.writable.len(), true)?)
    }
}

/// Writes `byte(offset)` everywhere.
pub fn fill(m: &Mapping, byte: impl Fn(usize) -> u8) -> Result<()> {
    let all: Vec<u8> = (0..m.len()).map(byte).collect();
    m.write(0, &all).then_some(()).ok_or("not writable".into())
}

/// The first offset whose byte is not `byte(offset)`.
pub fn differs(m: &Mapping, byte: impl Fn(usize) -> u8) -> Option<usize> {
    let mut all = vec![0; m.len()];
    let read = m.read(0, &mut all);
    (0..m.len()).find(|&i| !read || all[i] != byte(i))
}
