//! Memory as links have it: a file in memory with a writable mapping and, once it is sealed, a
//! read-only one, such as the daemon has of what an application writes.

use crate::Result;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use underpass_rdma::verbs::Memory;

pub struct Area {
    fd: OwnedFd,
    /// The writer's, made before the area was sealed.
    pub writable: Arc<Mapping>,
}

impl Area {
    pub fn new(len: usize) -> Result<Area> {
        let fd = rustix::fs::memfd_create("area", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let writable = Mapping::new(&fd, len, ProtFlags::READ | ProtFlags::WRITE)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok(Area {
            fd,
            writable: Arc::new(writable),
        })
    }

    pub fn read_only(&self) -> Result<Mapping> {
        Mapping::new(&self.fd, self.writable.len, ProtFlags::READ)
    }

    /// Memory in use, in KiB.
    pub fn used(&self) -> Result<i64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks / 2)
    }

    /// What must fail once the area is sealed.
    pub fn another_writer(&self) -> Result<Mapping> {
        Mapping::new(
            &self.fd,
            self.writable.len,
            ProtFlags::READ | ProtFlags::WRITE,
        )
    }
}

pub struct Mapping {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value alone, and is read and written by raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above; threads that copy at the same time spoil bytes and nothing else.
unsafe impl Sync for Mapping {}

// SAFETY: mapped in `new`, unmapped in `drop`, and no reference into it is made.
unsafe impl Memory for Mapping {
    fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Mapping {
    fn new(fd: &OwnedFd, len: usize, prot: ProtFlags) -> Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let addr =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        let addr = NonNull::new(addr.cast()).ok_or("mapped at 0")?;
        Ok(Mapping { addr, len })
    }

    /// Writes `byte(offset)` everywhere. For writable mappings.
    pub fn fill(&self, byte: impl Fn(usize) -> u8) {
        for i in 0..self.len {
            // SAFETY: inside the mapping.
            unsafe { self.addr.as_ptr().add(i).write_volatile(byte(i)) };
        }
    }

    /// The first offset whose byte is not `byte(offset)`.
    pub fn differs(&self, byte: impl Fn(usize) -> u8) -> Option<usize> {
        // SAFETY: inside the mapping.
        (0..self.len).find(|&i| unsafe { self.addr.as_ptr().add(i).read_volatile() } != byte(i))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length.
        let _ = unsafe { rustix::mm::munmap(self.addr.as_ptr().cast(), self.len) };
    }
}
