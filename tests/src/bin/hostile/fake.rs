//! A shim that is none, and what it holds of link groups with its victim.

use super::Random;
use anyhow::{Context, Result};
use lane::abi::{Control, Epoch, CONTROL_BYTES};
use lane::family::{state, Header, Table, TABLE_BYTES};
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use nix::cmsg_space;
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, MapFlags, ProtFlags};
use nix::sys::socket::{
    connect, recvmsg, sendmsg, socket, AddressFamily, ControlMessage, ControlMessageOwned,
    MsgFlags, SockFlag, SockType, UnixAddr,
};
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicU8, Ordering::Relaxed, Ordering::Release};
use std::time::{Duration, Instant};

/// A mapping, kept for the life of the episode.
pub struct Map {
    pub at: NonNull<core::ffi::c_void>,
    pub len: usize,
}

impl Map {
    pub fn new(fd: &OwnedFd, len: usize, write: bool) -> nix::Result<Map> {
        let Some(size) = NonZeroUsize::new(len) else {
            return Err(nix::errno::Errno::EINVAL);
        };
        let mut prot = ProtFlags::PROT_READ;
        prot.set(ProtFlags::PROT_WRITE, write);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { mmap(None, size, prot, MapFlags::MAP_SHARED, fd, 0)? };
        Ok(Map { at, len })
    }

    pub fn family(&self) -> &Table {
        assert!(self.len >= TABLE_BYTES);
        // SAFETY: mapped for that many bytes; atomics only.
        unsafe { &*self.at.as_ptr().cast::<Table>() }
    }

    pub fn word(&self, byte: usize) -> &AtomicU64 {
        let at = byte.min(self.len - 8) & !7;
        // SAFETY: inside the mapping and aligned; atomics may be shared with anybody.
        unsafe { &*self.at.as_ptr().cast::<u8>().add(at).cast::<AtomicU64>() }
    }

    pub fn byte(&self, at: usize) -> &AtomicU8 {
        // SAFETY: inside the mapping; an atomic.
        unsafe {
            &*self
                .at
                .as_ptr()
                .cast::<AtomicU8>()
                .add(at.min(self.len - 1))
        }
    }
}

#[derive(Default)]
pub struct LinkGroup {
    pub bell: Option<OwnedFd>,
    pub own: Option<Map>,
    pub peer: Vec<Map>,
}

impl LinkGroup {
    pub fn control(&self) -> Option<&Control> {
        let m = self.own.as_ref().filter(|m| m.len >= CONTROL_BYTES)?;
        // SAFETY: mapped for that many bytes; atomics only.
        Some(unsafe { &*m.at.as_ptr().cast::<Control>() })
    }
}

#[derive(Clone, Copy)]
pub struct Offer {
    pub key: (u64, u8),
    pub lane: u32,
    pub conn: u32,
    pub epoch: Epoch,
}

/// A shim that is none.
pub struct Fake {
    pub control: OwnedFd,
    _table: Map,
    pub links: HashMap<(u64, u8), LinkGroup>,
    pub offers: Vec<Offer>,
    credits: u32,
    pub refused: bool,
    pub breaches: u64,
}

impl Fake {
    pub fn new(dir: &Path, r: &mut Random) -> Result<Fake> {
        let control = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        connect(
            control.as_raw_fd(),
            &UnixAddr::new(&dir.join("control.sock"))?,
        )?;
        let memfd = memfd_create(
            c"table",
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
        )?;
        nix::unistd::ftruncate(&memfd, TABLE_BYTES as i64)?;
        use nix::fcntl::{fcntl, FcntlArg, SealFlag};
        fcntl(
            &memfd,
            FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW),
        )?;
        let table = Map::new(&memfd, TABLE_BYTES, true)?;
        // The daemon shows this table to operators: it may say anything.
        // (Not its counters: the test reads the sums.)
        for at in (size_of::<Header>()..1 << 20).step_by(8) {
            table.word(at).store(r.nasty(), Relaxed);
        }
        // Except that the connections to be registered are there.
        for c in &table.family().conns[..4] {
            c.gen.store(1, Relaxed);
            c.flags.store(0, Relaxed);
            c.state.store(state::OPEN, Release);
        }
        let mut f = Fake {
            control,
            _table: table,
            links: HashMap::new(),
            offers: Vec::new(),
            credits: 0,
            refused: false,
            breaches: 0,
        };
        let hello = ToDaemon::Hello {
            version: lane::VERSION,
            min_version: lane::MIN_VERSION,
            pid: if r.below(2) == 0 {
                std::process::id()
            } else {
                1
            },
            table_bytes: TABLE_BYTES as u64,
        };
        f.say(&hello, &[memfd.as_raw_fd()])?;
        f.listen(Duration::from_secs(5), |f| f.credits > 0 || f.refused)?;
        Ok(f)
    }

    pub fn say(&self, m: &ToDaemon, fds: &[i32]) -> Result<()> {
        let mut buf = [0u8; MAX];
        let n = m.encode(&mut buf);
        self.raw(&buf[..n], fds)
    }

    pub fn raw(&self, bytes: &[u8], fds: &[i32]) -> Result<()> {
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(
            self.control.as_raw_fd(),
            &[IoSlice::new(bytes)],
            rights,
            flags,
            None,
        )?;
        Ok(())
    }

    /// Handles messages until `enough`, the time is over, or the daemon has hung up.
    pub fn listen(&mut self, time: Duration, enough: impl Fn(&Fake) -> bool) -> Result<bool> {
        let end = Instant::now() + time;
        while !enough(self) {
            if Instant::now() > end {
                return Ok(false);
            }
            let mut buf = [0u8; MAX];
            let mut iov = [IoSliceMut::new(&mut buf)];
            let mut space = cmsg_space!([i32; 8]);
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let got =
                match recvmsg::<()>(self.control.as_raw_fd(), &mut iov, Some(&mut space), flags) {
                    Ok(m) => m,
                    Err(nix::errno::Errno::EAGAIN) => {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    Err(_) => return Ok(false),
                };
            let mut fds = Vec::new();
            for c in got.cmsgs()? {
                if let ControlMessageOwned::ScmRights(list) = c {
                    // SAFETY: just received, nobody else has them.
                    fds.extend(list.into_iter().map(|f| unsafe { OwnedFd::from_raw_fd(f) }));
                }
            }
            let n = got.bytes;
            if n == 0 {
                return Ok(false);
            }
            let message = ToShim::decode(&buf[..n]);
            self.handle(
                message
                    .ok()
                    .context("the daemon's message does not decode")?,
                fds,
            )?;
        }
        Ok(true)
    }

    /// As a shim does, so that the lane really comes up.
    pub fn handle(&mut self, m: ToShim, mut fds: Vec<OwnedFd>) -> Result<()> {
        match m {
            ToShim::HelloAck { credits, .. } => self.credits += credits,
            ToShim::Credit { n } => self.credits += n,
            ToShim::Refused { .. } => self.refused = true,
            ToShim::GroupNew {
                group, side, bytes, ..
            } if fds.len() == 2 => {
                let own = Map::new(&fds.remove(1), bytes as usize, true).ok();
                let bell = fds.pop();
                self.links.insert(
                    (group, side),
                    LinkGroup {
                        bell,
                        own,
                        ..LinkGroup::default()
                    },
                );
                let _ = self.say(
                    &ToDaemon::Mapped {
                        group,
                        side,
                        chunk: 0,
                    },
                    &[],
                );
            }
            ToShim::Chunk {
                group, side, chunk, ..
            } if fds.len() == 1 => {
                let _ = self.say(&ToDaemon::Mapped { group, side, chunk }, &[]);
            }
            ToShim::PeerChunk {
                group,
                side,
                chunk,
                bytes,
            } if fds.len() == 1 => {
                self.breaches += breach(&fds[0], bytes as usize);
                if let Some(l) = self.links.get_mut(&(group, side)) {
                    l.peer.extend(Map::new(&fds[0], bytes as usize, false).ok());
                }
                if chunk > 0 {
                    let _ = self.say(&ToDaemon::PeerMapped { group, side, chunk }, &[]);
                }
            }
            ToShim::Offer {
                group,
                side,
                lane,
                conn,
                epoch,
                ..
            } => {
                self.offers.push(Offer {
                    key: (group, side),
                    lane,
                    conn,
                    epoch,
                });
            }
            _ => {}
        }
        Ok(())
    }
}

/// Everything by which the victim's memory could be changed through our descriptor of it. Each of
/// these must fail.
fn breach(fd: &OwnedFd, bytes: usize) -> u64 {
    let mut n = 0;
    n += u64::from(Map::new(fd, bytes, true).is_ok());
    n += u64::from(nix::unistd::ftruncate(fd, 0).is_ok());
    n += u64::from(nix::unistd::ftruncate(fd, bytes as i64 * 2).is_ok());
    n += u64::from(nix::unistd::write(fd, b"x").is_ok());
    use nix::fcntl::{fallocate, open, FallocateFlags, OFlag};
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    n += u64::from(fallocate(fd, punch, 0, 4096).is_ok());
    // The way round the descriptor's own mode.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if let Ok(again) = open(path.as_str(), OFlag::O_RDWR, nix::sys::stat::Mode::empty()) {
        n += u64::from(Map::new(&again, bytes, true).is_ok());
        n += u64::from(nix::unistd::write(&again, b"x").is_ok());
    }
    n
}
