//! A daemon in a directory of its own, and shims that are not: they speak the real messages over
//! the real socket, but hook nothing.

#![allow(dead_code, unused_imports)] // every test binary uses a part

mod cgroup;
mod daemon;
mod peer;
mod skip;
mod tenants;
pub use cgroup::*;
pub use daemon::*;
pub use peer::*;
pub(crate) use skip::skip;
pub use tenants::*;

use lane::abi::{Control, Epoch, TcpPos, CONTROL_BYTES};
use lane::family::{flag, state, Conn, Table, TABLE_BYTES};
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::*;
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Nothing here takes long; a wait that ends without result is a failure.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A mapping of a memory file.
pub struct Map {
    at: *mut core::ffi::c_void,
    len: usize,
}

impl Map {
    pub fn new(fd: impl AsFd, len: usize, write: bool) -> Result<Map, rustix::io::Errno> {
        let prot = if write {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address the kernel chooses.
        let at =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        Ok(Map { at, len })
    }

    pub fn bytes(&self) -> usize {
        self.len
    }

    pub fn control(&self) -> &Control {
        assert!(self.len >= CONTROL_BYTES);
        // SAFETY: mapped for that many bytes; atomics only.
        unsafe { &*self.at.cast() }
    }

    pub fn byte(&self, at: usize) -> &std::sync::atomic::AtomicU8 {
        assert!(at < self.len);
        // SAFETY: inside the mapping; an atomic.
        unsafe { &*self.at.cast::<std::sync::atomic::AtomicU8>().add(at) }
    }

    fn table(&self) -> &Table {
        assert!(self.len >= TABLE_BYTES);
        // SAFETY: mapped for that many bytes; atomics only.
        unsafe { &*self.at.cast() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: our own mapping, no longer referred to.
        unsafe { rustix::mm::munmap(self.at, self.len).unwrap() };
    }
}

pub fn table_fd(bytes: usize, seals: SealFlags) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create("table", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// One area as a client sees it: chunks by number.
#[derive(Default)]
pub struct Side {
    pub bell: Option<OwnedFd>,
    pub own: HashMap<u32, (OwnedFd, Map)>,
    pub peer: HashMap<u32, (OwnedFd, Map)>,
}

/// A lane that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub group: u64,
    pub side: u8,
    pub lane: u32,
    pub conn: u32,
    pub epoch: Epoch,
    pub tag: u64,
}

pub struct Shim {
    pub sock: OwnedFd,
    pub table_fd: OwnedFd,
    table: Map,
    pub notice: Option<Map>,
    pub seen: u32,
    pub credits: u32,
    pub sides: HashMap<(u64, u8), Side>,
    /// Maps what it is given and says so by itself.
    pub helpful: bool,
    next: u32,
}

pub fn dial(dir: &Path) -> OwnedFd {
    let s = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    connect(&s, &SocketAddrUnix::new(dir.join("control.sock")).unwrap()).unwrap();
    s
}

pub fn say(sock: impl AsFd, m: &ToDaemon, fds: &[&dyn AsFdDyn]) {
    let mut buf = [0; MAX];
    let n = m.encode(&mut buf);
    let fds: Vec<_> = fds.iter().map(|f| f.fd()).collect();
    say_bytes(sock, &buf[..n], &fds);
}

pub fn say_bytes(sock: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // A daemon that has cut us off is seen when reading.
    let _ = sendmsg(
        sock,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

/// Anything with a descriptor, behind a reference.
pub trait AsFdDyn {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_>;
}
impl<T: AsFd> AsFdDyn for T {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.as_fd()
    }
}

/// Reads one message; `None`: the daemon hung up.
pub fn hear(sock: impl AsFd) -> Option<(ToShim, Vec<OwnedFd>)> {
    let mut p = [rustix::event::PollFd::new(
        &sock,
        rustix::event::PollFlags::IN,
    )];
    let t = rustix::event::Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    assert_eq!(
        rustix::event::poll(&mut p, Some(&t)),
        Ok(1),
        "the daemon says nothing"
    );
    let mut buf = [0u8; MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = match recvmsg(
        &sock,
        &mut [IoSliceMut::new(&mut buf)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    ) {
        Ok(g) => g.bytes,
        Err(rustix::io::Errno::CONNRESET) => 0,
        Err(e) => panic!("{e}"),
    };
    if got == 0 {
        return None;
    }
    let mut fds = Vec::new();
    for m in control.drain() {
        if let RecvAncillaryMessage::ScmRights(r) = m {
            fds.extend(r);
        }
    }
    Some((ToShim::decode(&buf[..got]).unwrap(), fds))
}

pub fn hello() -> ToDaemon {
    ToDaemon::Hello {
        version: lane::VERSION,
        min_version: lane::MIN_VERSION,
        pid: std::process::id(),
        table_bytes: TABLE_BYTES as u64,
    }
}

impl Shim {
    pub fn new(dir: &Path) -> Shim {
        let mut s = Shim::silent(dir);
        s.greet();
        s
    }

    /// Connected, has said nothing.
    pub fn silent(dir: &Path) -> Shim {
        Shim::with_table(dir, table_fd(TABLE_BYTES, SEALS))
    }

    /// The same, with the table of a family that may have other members.
    pub fn with_table(dir: &Path, table_fd: OwnedFd) -> Shim {
        Shim {
            sock: dial(dir),
            ..Shim::unconnected(table_fd)
        }
    }

    /// As a shim that has not found its daemon.
    pub fn unconnected(table_fd: OwnedFd) -> Shim {
        let table = Map::new(&table_fd, TABLE_BYTES, true).unwrap();
        let (sock, _) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        Shim {
            sock,
            table_fd,
            table,
            notice: None,
            seen: 0,
            credits: 0,
            sides: HashMap::new(),
            helpful: true,
            next: 0,
        }
    }

    pub fn greet(&mut self) {
        self.greet_with(&[]);
    }

    /// With these descriptors beside that of the table.
    pub fn greet_with(&mut self, more: &[&dyn AsFdDyn]) {
        let mut fds: Vec<&dyn AsFdDyn> = vec![&self.table_fd];
        fds.extend(more);
        say(&self.sock, &hello(), &fds);
        match hear(&self.sock).expect("an answer to hello") {
            (
                ToShim::HelloAck {
                    credits, version, ..
                },
                fds,
            ) => {
                assert_eq!(version, lane::VERSION);
                self.credits = credits;
                self.notice = Some(Map::new(&fds[0], 4096, false).unwrap());
            }
            m => panic!("{m:?}"),
        }
    }

    /// Another control connection of the same shim.
    pub fn reconnect(&mut self, dir: &Path) {
        self.sock = dial(dir);
        self.greet();
    }

    pub fn conn(&self, i: u32) -> &Conn {
        &self.table.table().conns[i as usize]
    }

    /// Says whose daemon the table belongs to.
    pub fn home(&self, of: lane::family::Home) {
        let header = &self.table.table().header;
        header.set_home(of);
        header.version.store(u32::from(lane::VERSION), Relaxed);
        header.magic.store(lane::family::MAGIC, Relaxed);
    }

    pub fn stats(&self) -> &lane::family::Stats {
        &self.table().header.stats
    }

    pub fn table(&self) -> &Table {
        self.table.table()
    }

    /// Enters a connection in the table; its number.
    pub fn enter(&mut self, s: &TcpStream, client: bool) -> u32 {
        let i = self.next;
        self.next += 1;
        let c = self.conn(i);
        c.gen.fetch_add(1, Relaxed);
        c.inode.store(rustix::fs::fstat(s).unwrap().st_ino, Relaxed);
        c.uid.store(rustix::process::geteuid().as_raw(), Relaxed);
        c.holders[0].store(std::process::id(), Relaxed);
        store(&c.local, s.local_addr().unwrap());
        store(&c.peer, s.peer_addr().unwrap());
        c.flags
            .store(flag::NAMED | if client { flag::CLIENT } else { 0 }, Relaxed);
        c.state
            .store(state::OPEN, std::sync::atomic::Ordering::Release);
        self.table.table().header.used.fetch_max(i + 1, Relaxed);
        i
    }

    pub fn gen(&self, conn: u32) -> u32 {
        self.conn(conn).gen.load(Relaxed)
    }

    pub fn say(&self, m: ToDaemon, fds: &[&dyn AsFdDyn]) {
        say(&self.sock, &m, fds);
    }

    /// Registers a connection that has moved nothing yet.
    pub fn register(&mut self, conn: u32, s: &dyn AsFdDyn) {
        self.register_at(conn, s, 0, 0);
    }

    pub fn register_at(&mut self, conn: u32, s: &dyn AsFdDyn, sent: u64, received: u64) {
        let gen = self.gen(conn);
        self.credits = self.credits.saturating_sub(1);
        self.say(
            ToDaemon::Register {
                conn,
                gen,
                tx_tcp_pos: TcpPos::new(sent),
                rx_tcp_pos: TcpPos::new(received),
                flags: 0,
            },
            &[s],
        );
    }

    /// Reads one message and does what a shim does with it.
    pub fn step(&mut self) -> Option<ToShim> {
        let (m, mut fds) = hear(&self.sock)?;
        self.seen += 1;
        match m {
            ToShim::Credit { n } => self.credits += n,
            ToShim::GroupNew {
                group, side, bytes, ..
            } => {
                assert!(fds.len() == 2 && bytes as usize > CONTROL_BYTES);
                let first = fds.pop().unwrap();
                let map = Map::new(&first, bytes as usize, true).unwrap();
                let s = self.sides.entry((group, side)).or_default();
                s.bell = fds.pop();
                s.own.insert(0, (first, map));
                if self.helpful {
                    self.say(
                        ToDaemon::Mapped {
                            group,
                            side,
                            chunk: 0,
                        },
                        &[],
                    );
                }
            }
            ToShim::Chunk {
                group,
                side,
                chunk,
                bytes,
            } => {
                assert_eq!(fds.len(), 1);
                let fd = fds.pop().unwrap();
                let map = Map::new(&fd, bytes as usize, true).unwrap();
                self.sides
                    .get_mut(&(group, side))
                    .unwrap()
                    .own
                    .insert(chunk, (fd, map));
                if self.helpful {
                    self.say(ToDaemon::Mapped { group, side, chunk }, &[]);
                }
            }
            ToShim::PeerChunk {
                group,
                side,
                chunk,
                bytes,
            } => {
                let fd = fds.pop().unwrap();
                let map = Map::new(&fd, bytes as usize, false).unwrap();
                self.sides
                    .get_mut(&(group, side))
                    .unwrap()
                    .peer
                    .insert(chunk, (fd, map));
                if self.helpful && chunk > 0 {
                    self.say(ToDaemon::PeerMapped { group, side, chunk }, &[]);
                }
            }
            _ => assert!(fds.is_empty()),
        }
        Some(m)
    }

    /// Steps until a message fits; everything before it must be about link groups, or credits.
    pub fn until<T>(&mut self, what: &str, fits: impl Fn(&ToShim) -> Option<T>) -> T {
        loop {
            let m = self
                .step()
                .unwrap_or_else(|| panic!("hung up while waiting for {what}"));
            if let Some(t) = fits(&m) {
                return t;
            }
            let expected = matches!(
                m,
                ToShim::Credit { .. }
                    | ToShim::GroupNew { .. }
                    | ToShim::Chunk { .. }
                    | ToShim::PeerChunk { .. }
                    | ToShim::ChunkReady { .. }
            );
            assert!(expected, "{m:?} while waiting for {what}");
        }
    }

    pub fn offer(&mut self) -> Lane {
        self.until("an offer", |m| match *m {
            ToShim::Offer {
                group,
                side,
                lane,
                conn,
                epoch,
                tag,
                ..
            } => Some(Lane {
                group,
                side,
                lane,
                conn,
                epoch,
                tag,
            }),
            _ => None,
        })
    }

    /// Local reason, peer's reason, milliseconds until it may try again.
    pub fn declined(&mut self, conn: u32) -> (u32, u32, u32) {
        self.until("a refusal", |m| match *m {
            ToShim::Decline {
                conn: c,
                local,
                peer,
                retry_ms,
                ..
            } if c == conn => Some((local, peer, retry_ms)),
            _ => None,
        })
    }

    pub fn credit(&mut self) {
        self.until("a credit", |m| {
            matches!(m, ToShim::Credit { .. }).then_some(())
        });
    }

    pub fn hung_up(&mut self) {
        while self.step().is_some() {}
    }
}

pub fn store(at: &lane::family::Addr, a: SocketAddr) {
    let (ip, family) = match a {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), libc::AF_INET),
        SocketAddr::V6(v6) => (*v6.ip(), libc::AF_INET6),
    };
    at.store(ip.octets(), family as u32, a.port());
}

/// Both ends of a new connection over loopback: client, server.
pub fn tcp() -> (TcpStream, TcpStream) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let b = l.accept().unwrap().0;
    (a, b)
}

/// Sets the link groups of several shims up: each is stepped by a thread of its own elsewhere,
/// or here, in turn, until both have been offered a lane.
pub fn pair(a: &mut Shim, b: &mut Shim) -> (Lane, Lane) {
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    b.register(j, &s);
    let lanes = offers(a, b);
    // The connections stay open: what happens to them is the test's business.
    std::mem::forget((c, s));
    lanes
}

/// Steps two shims in turn until both have an offer.
pub fn offers(a: &mut Shim, b: &mut Shim) -> (Lane, Lane) {
    let (mut x, mut y) = (None, None);
    let end = Instant::now() + PATIENCE;
    while x.is_none() || y.is_none() {
        assert!(Instant::now() < end, "no offer");
        for (s, o) in [(&mut *a, &mut x), (&mut *b, &mut y)] {
            if readable(s.sock.as_raw_fd(), 10) {
                match s.step().expect("a daemon") {
                    ToShim::Offer {
                        group,
                        side,
                        lane,
                        conn,
                        epoch,
                        tag,
                        ..
                    } => {
                        *o = Some(Lane {
                            group,
                            side,
                            lane,
                            conn,
                            epoch,
                            tag,
                        })
                    }
                    ToShim::Decline { local, .. } => panic!("declined: {local:#x}"),
                    _ => {}
                }
            }
        }
    }
    (x.unwrap(), y.unwrap())
}

/// Accepts, but does not wait for ever for somebody who never comes.
pub fn accept(l: &TcpListener) -> TcpStream {
    assert!(
        readable(l.as_raw_fd(), PATIENCE.as_millis() as i32),
        "nobody connects"
    );
    l.accept().unwrap().0
}

fn readable(fd: i32, ms: i32) -> bool {
    let mut p = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut p, 1, ms) == 1 }
}

/// Is this root? Tests of what only root can set up say so when they cannot.
pub fn root_or_skip(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(&format!("{what} needs root"));
    }
    root
}
