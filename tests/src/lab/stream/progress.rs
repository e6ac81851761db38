//! How far each direction of each connection has come, in a file that is mapped: it is there after
//! a `SIGKILL`, and writing it is no call that a hook could see, as the tests of programs that are
//! asleep need it.

use anyhow::{Context, Result};
use nix::sys::mman::{mmap, MapFlags, ProtFlags};
use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Words per connection: bytes sent, bytes received.
const WORDS: usize = 2;

/// The file, mapped for the life of the program.
#[derive(Clone, Copy)]
pub struct Progress(&'static [AtomicU64]);

impl Progress {
    pub fn create(path: &Path, connections: u32) -> Result<Self> {
        let words = WORDS * connections as usize;
        let length = NonZeroUsize::new(words * 8).context("no connections")?;
        let named = || path.display().to_string();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .with_context(named)?;
        file.set_len(length.get() as u64)?;
        let rw = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses; of a file that nobody shortens.
        let at = unsafe { mmap(None, length, rw, MapFlags::MAP_SHARED, &file, 0) }?;
        // SAFETY: the mapping has this length, is aligned to pages, zero at first, which is a valid
        // word, never unmapped, and written only through these atomics.
        let all = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>().as_ptr(), words) };
        Ok(Progress(all))
    }

    // Relaxed: one writer per word, and whoever reads the file only wants to know "at least so far".

    pub fn sent(&self, connection: u32, bytes: u64) {
        self.0[connection as usize * WORDS].store(bytes, Relaxed);
    }

    pub fn received(&self, connection: u32, bytes: u64) {
        self.0[connection as usize * WORDS + 1].store(bytes, Relaxed);
    }

    /// Such a file: sent and received by connection.
    pub fn parse(file: &[u8]) -> Vec<[u64; WORDS]> {
        let word = |b: &[u8]| b.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
        let connections = file.chunks_exact(8 * WORDS);
        connections
            .map(|c| [word(&c[..8]), word(&c[8..])])
            .collect()
    }
}
