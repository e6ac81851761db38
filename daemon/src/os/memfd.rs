//! Memory that the daemon makes for shims, and the check of memory that a shim made.

use lane::abi::CHUNK_SEALS;
use lane::num;
use rustix::fs::{AtFlags, MemfdFlags, SealFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Makes an anonymous file of a fixed size. It can be sealed further.
pub fn make(name: &str, bytes: usize) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // NOEXEC_SEAL exists since Linux 6.3.
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        r => r?,
    };
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// Seals of every chunk that is given to the other client.
const FINAL: SealFlags = SealFlags::from_bits_retain(CHUNK_SEALS.cast_unsigned());

/// From here on nobody can map it writable, write to it or punch holes in it; mappings that exist
/// stay as they are. Adding seals to a file that its writer has sealed already fails, so the
/// result is what counts. For helpers, if another process has the file: it waits for a write that is under way, whose
/// page its owner may never give.
pub fn seal(fd: &OwnedFd) -> Result<(), Errno> {
    let added = rustix::fs::fcntl_add_seals(fd, FINAL);
    match is_sealed(fd) {
        true => Ok(()),
        false => Err(added.err().unwrap_or(Errno::PERM)),
    }
}

/// Is it sealed so? This waits for nothing.
pub fn is_sealed(fd: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|s| s.contains(FINAL))
}

/// Reads from this place on as far as the file goes, or the buffer. How many bytes that were.
pub fn read_at(fd: impl AsFd, buf: &mut [u8], from: u64) -> Result<usize, Errno> {
    let mut at = 0;
    while at < buf.len() {
        match rustix::io::pread(&fd, &mut buf[at..], from + at as u64)? {
            0 => break,
            n => at += n,
        }
    }
    Ok(at)
}

/// Bytes of memory that are really in use.
pub fn touched(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).map_or(0, |s| num::natural(s.st_blocks) * 512)
}

/// When a memory file was made, since 1970. Nobody can change that. `None`: this kernel does not keep it.
pub fn made_at(fd: impl AsFd) -> Option<Duration> {
    let (none, btime) = (AtFlags::EMPTY_PATH, StatxFlags::BTIME);
    let s = rustix::fs::statx(fd, c"", none, btime).ok()?;
    let kept = StatxFlags::from_bits_retain(s.stx_mask).contains(btime);
    let t = s.stx_btime;
    kept.then(|| Duration::new(num::natural(t.tv_sec), t.tv_nsec))
}

/// Identity of a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ident {
    pub dev: u64,
    pub ino: u64,
}

/// Is this a memory file of exactly `bytes` bytes that can no longer shrink or grow?
pub fn check_fixed(fd: impl AsFd, bytes: usize) -> Option<Ident> {
    // Seals first: on anything but a memory file this fails without asking the file system, which may never
    // answer.
    let seals = rustix::fs::fcntl_get_seals(&fd).ok()?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return None;
    }
    let s = rustix::fs::fstat(&fd).ok()?;
    (usize::try_from(s.st_size) == Ok(bytes)).then_some(Ident {
        dev: s.st_dev,
        ino: s.st_ino,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_is_sealed() {
        let fd = make("t", 8192).unwrap();
        assert!(check_fixed(&fd, 8192).is_some());
        assert!(check_fixed(&fd, 4096).is_none());
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Ok(1));
        seal(&fd).unwrap();
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        assert!(touched(&fd) > 0);
        seal(&fd).expect("sealing twice is no error");
    }

    #[test]
    fn a_writer_that_sealed_too_little_is_noticed() {
        let fd = make("t", 4096).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL).unwrap();
        assert!(seal(&fd).is_err());
    }

    #[test]
    fn a_file_that_can_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(check_fixed(&fd, 4096).is_none());
        let dir = std::fs::File::open("/").unwrap();
        assert!(check_fixed(&dir, 4096).is_none());
    }
}
