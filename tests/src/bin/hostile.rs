//! A peer that lies: a program without hooks that speaks the control protocol as a shim does, gets
//! itself promoted with a Redis server that runs under the real shim, and then does to it, and to
//! the daemon, everything that its descriptors and mappings allow.
//!
//! `hostile DIR ADDR UNTIL` plays one episode after the other, each in a process of its own, until
//! the file UNTIL exists, and prints what it achieved. What it must not achieve (a writable mapping
//! of the victim's memory, say) it reports as a breach; whether the victim still serves others
//! well, the test that runs it finds out.

use anyhow::{bail, Context, Result};
use link::family::{state, Header, Table, TABLE_BYTES};
use link::layout::{
    rx, tx, Control, Epoch, Loc, RxFlags, RxWord, TxPhase, TxWord, Word, CHUNK_BYTES,
    CONTROL_BYTES, LANES,
};
use link::msg::{ToDaemon, ToShim, MAX};
use nix::cmsg_space;
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, MapFlags, ProtFlags};
use nix::sys::socket::{
    connect, recvmsg, sendmsg, socket, AddressFamily, ControlMessage, ControlMessageOwned,
    MsgFlags, SockFlag, SockType, UnixAddr,
};
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicU8, Ordering::Relaxed, Ordering::Release};
use std::time::{Duration, Instant};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        [dir, addr, until] => play(dir, addr, Path::new(until)),
        ["episode", dir, addr, seed] => episode(Path::new(dir), addr, seed.parse()?),
        _ => bail!("hostile DIR ADDR UNTIL"),
    }
}

/// Sums of what the episodes printed.
fn play(dir: &str, addr: &str, until: &Path) -> Result<()> {
    let mut sum: HashMap<String, u64> = HashMap::new();
    let me = std::env::current_exe()?;
    let mut seed = 0u64;
    while !until.exists() {
        seed += 1;
        let out = Command::new(&me)
            .args(["episode", dir, addr, &seed.to_string()])
            .output()?;
        *sum.entry("episodes".into()).or_default() += 1;
        for w in String::from_utf8_lossy(&out.stdout).split_whitespace() {
            if let Some((k, v)) = w.split_once('=') {
                *sum.entry(k.into()).or_default() += v.parse::<u64>().unwrap_or(0);
            }
        }
        if !out.status.success() {
            *sum.entry("failed".into()).or_default() += 1;
            eprintln!("episode {seed}: {}", String::from_utf8_lossy(&out.stderr));
        }
    }
    println!("result {}", serde_json::to_string(&sum)?);
    Ok(())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Values that are often at the edge of something.
    fn nasty(&mut self) -> u64 {
        match self.below(9) {
            0 => 0,
            1 => u64::MAX,
            2 => self.below(64),
            3 => 1 << self.below(64),
            4 => (1u64 << self.below(64)).wrapping_sub(1),
            5 => {
                let epoch = Epoch::new(self.below(4) as u32);
                RxWord::new(epoch, RxFlags::from_raw(self.below(16) as u8)).raw()
            }
            6 => Loc {
                chunk: self.below(70) as u32,
                page: self.below(5000) as u32,
                log2: self.below(26) as u32,
            }
            .pack(),
            7 => self.below(1 << 22),
            _ => self.next(),
        }
    }
}

/// A mapping, kept for the life of the episode.
struct Map {
    at: NonNull<core::ffi::c_void>,
    len: usize,
}

impl Map {
    fn new(fd: &OwnedFd, len: usize, write: bool) -> nix::Result<Map> {
        let Some(size) = NonZeroUsize::new(len) else {
            return Err(nix::errno::Errno::EINVAL);
        };
        let mut prot = ProtFlags::PROT_READ;
        prot.set(ProtFlags::PROT_WRITE, write);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { mmap(None, size, prot, MapFlags::MAP_SHARED, fd, 0)? };
        Ok(Map { at, len })
    }

    fn family(&self) -> &Table {
        assert!(self.len >= TABLE_BYTES);
        // SAFETY: mapped for that many bytes; atomics only.
        unsafe { &*self.at.as_ptr().cast::<Table>() }
    }

    fn word(&self, byte: usize) -> &AtomicU64 {
        let at = byte.min(self.len - 8) & !7;
        // SAFETY: inside the mapping and aligned; atomics may be shared with anybody.
        unsafe { &*self.at.as_ptr().cast::<u8>().add(at).cast::<AtomicU64>() }
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
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
struct Link {
    bell: Option<OwnedFd>,
    own: Option<Map>,
    peer: Vec<Map>,
}

impl Link {
    fn control(&self) -> Option<&Control> {
        let m = self.own.as_ref().filter(|m| m.len >= CONTROL_BYTES)?;
        // SAFETY: mapped for that many bytes; atomics only.
        Some(unsafe { &*m.at.as_ptr().cast::<Control>() })
    }
}

#[derive(Clone, Copy)]
struct Offer {
    key: (u64, u8),
    lane: u32,
    conn: u32,
    epoch: Epoch,
}

/// A shim that is none.
struct Fake {
    control: OwnedFd,
    _table: Map,
    links: HashMap<(u64, u8), Link>,
    offers: Vec<Offer>,
    credits: u32,
    refused: bool,
    breaches: u64,
}

impl Fake {
    fn new(dir: &Path, r: &mut Random) -> Result<Fake> {
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
            version: link::VERSION,
            min_version: link::MIN_VERSION,
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

    fn say(&self, m: &ToDaemon, fds: &[i32]) -> Result<()> {
        let mut buf = [0u8; MAX];
        let n = m.encode(&mut buf);
        self.raw(&buf[..n], fds)
    }

    fn raw(&self, bytes: &[u8], fds: &[i32]) -> Result<()> {
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
    fn listen(&mut self, time: Duration, enough: impl Fn(&Fake) -> bool) -> Result<bool> {
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
    fn handle(&mut self, m: ToShim, mut fds: Vec<OwnedFd>) -> Result<()> {
        match m {
            ToShim::HelloAck { credits, .. } => self.credits += credits,
            ToShim::Credit { n } => self.credits += n,
            ToShim::Refused { .. } => self.refused = true,
            ToShim::LinkNew {
                link, side, bytes, ..
            } if fds.len() == 2 => {
                let own = Map::new(&fds.remove(1), bytes as usize, true).ok();
                let bell = fds.pop();
                self.links.insert(
                    (link, side),
                    Link {
                        bell,
                        own,
                        ..Link::default()
                    },
                );
                let _ = self.say(
                    &ToDaemon::Mapped {
                        link,
                        side,
                        chunk: 0,
                    },
                    &[],
                );
            }
            ToShim::Chunk {
                link, side, chunk, ..
            } if fds.len() == 1 => {
                let _ = self.say(&ToDaemon::Mapped { link, side, chunk }, &[]);
            }
            ToShim::PeerChunk {
                link,
                side,
                chunk,
                bytes,
            } if fds.len() == 1 => {
                self.breaches += breach(&fds[0], bytes as usize);
                if let Some(l) = self.links.get_mut(&(link, side)) {
                    l.peer.extend(Map::new(&fds[0], bytes as usize, false).ok());
                }
                if chunk > 0 {
                    let _ = self.say(&ToDaemon::PeerMapped { link, side, chunk }, &[]);
                }
            }
            ToShim::Offer {
                link,
                side,
                lane,
                conn,
                epoch,
                ..
            } => {
                self.offers.push(Offer {
                    key: (link, side),
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

/// A connection to the victim, and what went over it.
struct Conn {
    sock: TcpStream,
    sent: u64,
    received: u64,
}

impl Conn {
    fn open(addr: &str) -> Result<Conn> {
        let sock = TcpStream::connect(addr)?;
        sock.set_nodelay(true)?;
        sock.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Conn {
            sock,
            sent: 0,
            received: 0,
        })
    }

    fn ping(&mut self) -> Result<()> {
        self.sock.write_all(b"PING\r\n")?;
        let mut b = [0; 7];
        self.sock.read_exact(&mut b)?;
        self.sent += 6;
        self.received += 7;
        Ok(())
    }

    /// Gives the victim a reason to look, whatever comes of it.
    fn nudge(&mut self, bytes: &[u8]) {
        let _ = self.sock.set_nonblocking(true);
        let _ = self.sock.write(bytes);
        let mut b = [0; 4096];
        let _ = self.sock.read(&mut b);
    }
}

fn episode(dir: &Path, addr: &str, seed: u64) -> Result<()> {
    let mut r = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut fake = Fake::new(dir, &mut r)?;
    if fake.refused {
        println!("refused=1");
        return Ok(());
    }
    if seed % 8 == 7 {
        forge(&fake, &mut r, addr)?;
        println!("forged=1 breaches={}", fake.breaches);
        return Ok(());
    }
    let mut conns = Vec::new();
    for _ in 0..4 {
        conns.push(Conn::open(addr)?);
    }
    for c in &mut conns {
        for _ in 0..100 {
            c.ping()?;
        }
    }
    for (i, c) in conns.iter().enumerate() {
        let m = ToDaemon::Register {
            conn: i as u32,
            gen: 1,
            tx_kpos: c.sent,
            rx_kpos: c.received,
            flags: 0,
        };
        fake.say(&m, &[c.sock.as_raw_fd()])?;
    }
    fake.listen(Duration::from_secs(3), |f| f.offers.len() == 4)?;
    let offers = fake.offers.clone();
    let mut attacks = 0u64;
    for o in &offers {
        let Some(conn) = conns.get_mut(o.conn as usize) else {
            continue;
        };
        let Some(l) = fake.links.get(&o.key) else {
            continue;
        };
        if attack(seed % 8, *o, l, conn, &mut r).is_some() {
            attacks += 1;
        }
    }
    // The lanes are as broken as they get: now the daemon, too.
    if seed % 3 == 0 {
        forge(&fake, &mut r, addr)?;
    }
    println!(
        "offers={} attacks={attacks} breaches={}",
        offers.len(),
        fake.breaches
    );
    Ok(())
}

/// One lane's worth of harm.
#[expect(clippy::too_many_lines)]
fn attack(kind: u64, o: Offer, l: &Link, conn: &mut Conn, r: &mut Random) -> Option<()> {
    let control = l.control()?;
    let lane = (o.lane as usize).min(LANES - 1);
    let (txw, rxw) = (&control.tx[lane], &control.rx[lane]);
    let ring_bell = || {
        if let Some(b) = &l.bell {
            let _ = send_now(b, &[7; 300]);
        }
    };
    match kind {
        // Random words all over the control area, while the victim looks.
        0 => {
            let own = l.own.as_ref()?;
            for _ in 0..3000 {
                for _ in 0..50 {
                    own.word(r.below(own.len as u64) as usize)
                        .store(r.nasty(), Relaxed);
                }
                ring_bell();
                conn.nudge(b"PING\r\n");
            }
        }
        // The lane's own words, one after the other, with values near the right ones.
        1 | 2 => {
            for step in 0..3000u64 {
                let epoch = Epoch::new(o.epoch.get().wrapping_add(r.below(4) as u32));
                let flags = RxFlags::from_raw(r.below(16) as u8);
                rxw.word.store(RxWord::new(epoch, flags), Release);
                rxw.revoked.store(r.nasty(), Relaxed);
                txw.up_kpos.store(
                    conn.sent.wrapping_add(r.below(20)).wrapping_sub(10),
                    Relaxed,
                );
                txw.up_start.store(r.below(100), Relaxed);
                let n = r.below(2) as usize;
                txw.loc[n].store(r.nasty(), Relaxed);
                txw.loc_from[n].store(r.nasty(), Relaxed);
                txw.loc_seq.store(r.below(4) as u32, Relaxed);
                txw.want_space.store(r.next() as u32, Relaxed);
                let phase = TxPhase::from_raw(r.below(6) as u8);
                txw.state.store(TxWord::new(epoch, phase), Release);
                control.heads[lane].store(if kind == 1 { step * 7 } else { r.nasty() }, Release);
                control.cursors[lane].store(r.nasty(), Release);
                control.seq[lane / 64].0.fetch_add(1, Release);
                ring_bell();
                conn.nudge(b"PING\r\n");
            }
        }
        // A proper switch up; then a ring whose contents change under the reader, and heads that
        // run, go back, and stand still.
        3 | 4 => {
            let loc = Loc {
                chunk: 1,
                page: 64 * (o.lane % 32),
                log2: 16,
            };
            let first = l.own.as_ref()?;
            let fill = |r: &mut Random| {
                for i in 0..2000 {
                    let at = loc.page as usize * 4096 + r.below(65536) as usize;
                    first
                        .byte(CONTROL_BYTES + at.min(CHUNK_BYTES - 1))
                        .store(b"PING\r\n*3$"[i % 9], Relaxed);
                }
            };
            rxw.word
                .store(RxWord::new(o.epoch.next(), rx::READY), Release);
            txw.loc[1].store(loc.pack(), Relaxed);
            txw.loc_from[1].store(0, Relaxed);
            txw.loc_seq.store(1, Relaxed);
            txw.up_kpos.store(conn.sent, Relaxed);
            txw.up_start.store(0, Relaxed);
            txw.state
                .store(TxWord::new(o.epoch.next(), tx::UP), Release);
            let mut head = 0u64;
            for _ in 0..2000 {
                fill(r);
                head = if kind == 3 {
                    head + r.below(65536)
                } else {
                    r.nasty()
                };
                control.heads[lane].store(head, Release);
                control.seq[lane / 64].0.fetch_add(1, Release);
                ring_bell();
            }
        }
        // A full doorbell that nobody reads, sleepers that are none, and a hang-up.
        5 => {
            control.sleepers.0.store(u32::MAX, Release);
            rxw.word
                .store(RxWord::new(o.epoch.next(), rx::READY), Release);
            for _ in 0..5000 {
                ring_bell();
                conn.nudge(b"PING\r\n");
            }
            if let Some(b) = &l.bell {
                let _ = nix::sys::socket::shutdown(b.as_raw_fd(), nix::sys::socket::Shutdown::Both);
            }
            conn.nudge(b"PING\r\n");
        }
        // Ready, and then bytes on TCP that are no frame.
        _ => {
            rxw.word
                .store(RxWord::new(o.epoch.next(), rx::READY), Release);
            txw.state
                .store(TxWord::new(o.epoch.next(), tx::UP), Release);
            txw.up_kpos.store(conn.sent, Release);
            control.seq[lane / 64].0.fetch_add(1, Release);
            for _ in 0..200 {
                ring_bell();
                let noise: Vec<u8> = (0..r.below(200)).map(|_| r.next() as u8).collect();
                conn.nudge(&noise);
            }
        }
    }
    Some(())
}

fn send_now(fd: &OwnedFd, b: &[u8]) -> nix::Result<usize> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    nix::sys::socket::send(fd.as_raw_fd(), b, flags)
}

/// Registrations that are lies, messages that are noise, answers nobody asked for. Sends until the
/// daemon hangs up or takes no more.
fn forge(fake: &Fake, r: &mut Random, addr: &str) -> Result<()> {
    let tcp = TcpStream::connect(addr)?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let (unix, _other) = UnixStream::pair()?;
    let file = std::fs::File::open("/dev/zero")?;
    let (pipe, _end) = nix::unistd::pipe()?;
    // A socket with no peer in this protocol: one that is connected to itself, if the kernel lets it.
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let fds = [
        tcp.as_raw_fd(),
        udp.as_raw_fd(),
        unix.as_raw_fd(),
        file.as_raw_fd(),
        pipe.as_fd().as_raw_fd(),
        listener.as_raw_fd(),
        fake.control.as_raw_fd(),
    ];
    let links: Vec<(u64, u8)> = fake.links.keys().copied().collect();
    // Every other time well-formed lies only: the daemon hangs up at the first message that is not.
    let polite = r.below(2) == 0;
    for _ in 0..400 {
        let (link, side) = match links.get(r.below(4) as usize) {
            Some(l) => *l,
            None => (r.below(20), r.below(3) as u8),
        };
        let (chunk, lane, conn, gen) = (
            r.below(70) as u32,
            r.below(1100) as u32,
            r.nasty() as u32,
            r.nasty() as u32,
        );
        let fd = fds[r.below(fds.len() as u64) as usize];
        let sent = match r.below(9) {
            0 | 1 => {
                let m = ToDaemon::Register {
                    conn,
                    gen,
                    tx_kpos: r.nasty(),
                    rx_kpos: r.nasty(),
                    flags: r.next() as u32,
                };
                fake.say(&m, &vec![fd; if polite { 1 } else { r.below(4) as usize }])
            }
            2 => fake.say(&ToDaemon::Mapped { link, side, chunk }, &[]),
            3 => fake.say(&ToDaemon::PeerMapped { link, side, chunk }, &[]),
            4 => fake.say(&ToDaemon::LaneDone { link, side, lane }, &[]),
            5 => fake.say(&ToDaemon::WantChunk { link, side }, &[]),
            6 => fake.say(&ToDaemon::Forget { conn, gen }, &[]),
            7 => fake.say(&ToDaemon::LinkFailed { link, side }, &[]),
            _ if polite => fake.say(&ToDaemon::Forget { conn, gen }, &[]),
            _ => {
                let noise: Vec<u8> = (0..1 + r.below(400)).map(|_| r.next() as u8).collect();
                fake.raw(&noise, &vec![fd; r.below(20) as usize])
            }
        };
        if sent.is_err() {
            break;
        }
    }
    Ok(())
}
