//! The notice page: one word per shim that grows with every message sent to it, so that a hook
//! sees with one load that there is something to read. The shim can only read it.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering::Release};

const BYTES: usize = 4096;

/// Our writable mapping.
#[derive(Debug)]
pub struct Notice {
    at: *mut core::ffi::c_void,
}

impl Notice {
    /// Makes a page; the descriptor is for the shim.
    pub fn new() -> Result<(Notice, OwnedFd), Errno> {
        let fd = crate::os::memfd::make("underpass-notice", BYTES)?;
        // SAFETY: a new mapping at an address the kernel chooses; the file is ours, has BYTES bytes
        // and cannot shrink.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        let notice = Notice { at };
        crate::os::memfd::seal(&fd)?; // our mapping stays writable, nobody else's can be
        Ok((notice, fd))
    }

    /// Announces a message to the shim.
    pub fn bump(&self) {
        // SAFETY: `at` is mapped for BYTES bytes, page aligned, until drop; only atomics touch it.
        let word = unsafe { &*self.at.cast::<AtomicU32>() };
        word.fetch_add(1, Release); // pairs with the hook's Acquire: the message is in its queue
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.at, BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reader_sees_bumps_and_cannot_write() {
        let (n, fd) = Notice::new().unwrap();
        n.bump();
        n.bump();
        let mut b = [0u8; 4];
        rustix::io::pread(&fd, &mut b, 0).unwrap();
        assert_eq!(u32::from_ne_bytes(b), 2);
        // SAFETY: a new mapping nobody uses.
        let w = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                BYTES,
                ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        assert_eq!(w.err(), Some(Errno::PERM));
    }
}
