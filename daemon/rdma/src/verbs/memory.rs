//! Memory that devices may reach.

use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// A mapping that outlives every region registered over it.
///
/// # Safety
///
/// As long as the value lives, `[addr, addr + len)` stays mapped at the same place, readable and, if
/// [`Memory::writable`], writable; and no Rust reference into it exists in this process, because devices and other
/// processes write there at any time.
pub unsafe trait Memory: Send + Sync {
    /// Address of the first byte.
    fn addr(&self) -> NonNull<u8>;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Is it writable?
    fn writable(&self) -> bool;

    /// Is its length 0?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes out of it. If the range is not completely inside, returns false and copies nothing.
    #[must_use]
    fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let inside = offset
            .checked_add(out.len())
            .is_some_and(|e| e <= self.len());
        if inside {
            // SAFETY: checked above to lie in the mapping; `out` is memory of somebody else.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.addr().as_ptr().add(offset),
                    out.as_mut_ptr(),
                    out.len(),
                );
            }
        }
        inside
    }

    /// Copies bytes into it. If the range is not completely inside, or not writable, returns false and copies
    /// nothing.
    #[must_use]
    fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let inside = offset
            .checked_add(bytes.len())
            .is_some_and(|e| e <= self.len());
        let able = inside && self.writable();
        if able {
            // SAFETY: checked above to lie in the mapping; `bytes` is memory of somebody else.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    self.addr().as_ptr().add(offset),
                    bytes.len(),
                );
            }
        }
        able
    }
}

/// A part of a mapping. Registering memory populates and pins all its pages, whoever is charged for them, so no more
/// should be registered than is in use.
pub struct Part {
    whole: Arc<dyn Memory>,
    offset: usize,
    len: usize,
}

impl Part {
    /// `None` if the range is not completely inside.
    pub fn new(whole: Arc<dyn Memory>, offset: usize, len: usize) -> Option<Part> {
        let end = offset.checked_add(len)?;
        (end <= whole.len()).then_some(Part { whole, offset, len })
    }
}

// SAFETY: inside the whole, which is held and promises the same.
unsafe impl Memory for Part {
    fn addr(&self) -> NonNull<u8> {
        // SAFETY: checked in `new` to be inside the same mapping.
        unsafe { self.whole.addr().add(self.offset) }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn writable(&self) -> bool {
        self.whole.writable()
    }
}

/// A mapping of this process, accessed by devices, by raw copies and through atomics.
pub struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to the value alone, and no reference to its data is ever made.
unsafe impl Send for Mapping {}
// SAFETY: as above; two threads that copy at the same time spoil bytes, as devices may, and nothing else.
unsafe impl Sync for Mapping {}

// SAFETY: mapped by the two below, unmapped in `drop`, and no reference into it is ever made.
unsafe impl Memory for Mapping {
    fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    fn len(&self) -> usize {
        self.len
    }

    fn writable(&self) -> bool {
        self.writable
    }
}

impl Mapping {
    /// Zeroed memory for messages. It is mapped shared, so that a fork of the process cannot move the pages away from
    /// the device (by copy-on-write).
    pub fn anonymous(len: usize) -> rustix::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let addr = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::SHARED)?
        };
        Self::new(addr, len, true)
    }

    /// Maps `len` bytes from `at` (a multiple of the page size) of a file that has them and, sealed or our own, keeps
    /// them.
    pub fn of(fd: impl AsFd, at: u64, len: usize, writable: bool) -> rustix::io::Result<Self> {
        let prot = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: as above.
        let addr =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, at)? };
        Self::new(addr, len, writable)
    }

    fn new(addr: *mut std::ffi::c_void, len: usize, writable: bool) -> rustix::io::Result<Self> {
        Ok(Mapping {
            addr: NonNull::new(addr.cast()).ok_or(rustix::io::Errno::NOMEM)?,
            len,
            writable,
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; regions over it hold the value, so none is left.
        // An error would only mean that the memory stays.
        let _ = unsafe { rustix::mm::munmap(self.addr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside() {
        let b = Mapping::anonymous(4096).unwrap();
        assert!(b.write(4093, b"end"));
        assert!(!b.write(4094, b"end"));
        assert!(!b.write(usize::MAX, b"end"));
        let mut got = [0; 4];
        assert!(b.read(4092, &mut got));
        assert_eq!(&got, b"\0end");
        assert!(!b.read(4093, &mut got));
        assert_eq!(&got, b"\0end");
        assert!(!b.read(usize::MAX, &mut got));
    }

    #[test]
    fn parts_are_inside() {
        let b: Arc<dyn Memory> = Arc::new(Mapping::anonymous(8192).unwrap());
        let p = Part::new(b.clone(), 4096, 4096).unwrap();
        assert_eq!(
            p.addr().as_ptr() as usize,
            b.addr().as_ptr() as usize + 4096
        );
        assert_eq!(p.len(), 4096);
        assert!(Part::new(b.clone(), 4097, 4096).is_none());
        assert!(Part::new(b, usize::MAX, 2).is_none());
    }
}
