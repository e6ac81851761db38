//! A takeover on real sockets, memory files and a real table. Both ends are in this process, which takes their lane over,
//! too. Only how much TCP takes is the test's.

use super::*;
use crate::clients::ids::{ClientId, ConnRef};
use crate::lanes::groups::Direction;
use crate::os::memfd;
use crate::os::sockopt;
use crate::os::system::Machine;
use lane::abi::{rx, takeover, Epoch, Loc, RxFlags};
use lane::family::{flag, Conn, Table, TABLE_BYTES};
use lane::half::tx::mode;
use lane::half::{Iov, RxState, Sent, TxState};
use lane::proto::frame::LEN;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use underpass_admin::proc;

const SLOT: u32 = 3;
const SENDS: u32 = 5;
const RECEIVES: u32 = 6;
const GEN: u32 = 7;
const TAG: u64 = 0x7a67;
/// Bytes of each chunk.
const CHUNK: usize = 256 << 10;

const fn ring(chunk: u32, page: u32, log2: u32) -> Loc {
    Loc { chunk, page, log2 }
}

/// In either chunk, and not at its beginning.
const FIRST: Loc = ring(1, 1, 12);
const SECOND: Loc = ring(2, 32, 17);

/// This machine, with as much room in TCP as a test gives it.
struct Narrow {
    room: AtomicUsize,
    /// For what an end that leaves has on its way.
    more: AtomicUsize,
}

impl Narrow {
    fn send(room: &AtomicUsize, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        let n = bytes.len().min(room.load(Relaxed));
        if n == 0 {
            return Err(libc::EAGAIN);
        }
        let n = Machine.tcp_send(sock, &bytes[..n])?;
        room.fetch_sub(n, Relaxed);
        Ok(n)
    }
}

impl System for Narrow {
    fn now(&self) -> u64 {
        Machine.now()
    }
    fn help(&self, job: Box<dyn FnOnce() + Send>) {
        job();
    }
    fn random(&self) -> u64 {
        Machine.random()
    }
    fn lives(&self, pid: u32) -> bool {
        Machine.lives(pid)
    }
    fn tcp_send(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        Narrow::send(&self.room, sock, bytes)
    }
    fn tcp_send_more(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        Narrow::send(&self.more, sock, bytes)
    }
    fn tcp_sent(&self, sock: BorrowedFd<'_>) -> Option<u64> {
        Machine.tcp_sent(sock)
    }
}

/// The memory of one end, as the ends have it.
struct Side {
    area: Area,
    files: Vec<(Arc<OwnedFd>, u64)>,
    _maps: Vec<Mapping>,
}

impl Side {
    fn new() -> Side {
        let area = Area::new();
        let (mut files, mut maps) = (Vec::new(), Vec::new());
        for bytes in [CONTROL_BYTES + CHUNK, CHUNK] {
            let fd = memfd::make("area", bytes).unwrap();
            maps.push(Mapping::of(&fd, 0, bytes, true).unwrap());
            files.push((Arc::new(fd), bytes as u64));
        }
        // SAFETY: mapped for these lengths, page-aligned, and kept beside the area.
        unsafe {
            area.set_first(maps[0].addr().as_ptr(), maps[0].len());
            area.set_chunk(2, maps[1].addr().as_ptr(), maps[1].len());
        }
        let header = &area.control().unwrap().header;
        header.version.store(lane::VERSION.into(), Relaxed);
        Side {
            area,
            files,
            _maps: maps,
        }
    }
}

/// A lane, of which one end sends and the other one receives.
struct Lane {
    table: Mapping,
    family: Arc<Family>,
    sides: [Side; 2],
    words: Arc<Mapping>,
    sender: Option<TcpStream>,
    receiver: TcpStream,
    inode: u64,
    cookie: u64,
    lives: Arc<AtomicBool>,
    system: Arc<Narrow>,
    sent: usize,
}

fn me() -> ProcId {
    let pid = std::process::id();
    let start = proc::start_time(pid).unwrap();
    ProcId { pid, start }
}

/// Byte `at` of the stream.
fn byte(at: usize) -> u8 {
    u8::try_from(at * 31 % 251).unwrap()
}

impl Lane {
    /// The sender is on the first ring.
    fn up() -> Lane {
        let fd = memfd::make("table", TABLE_BYTES).unwrap();
        let table = Mapping::of(&fd, 0, TABLE_BYTES, true).unwrap();
        let ident = memfd::check_fixed(&fd, TABLE_BYTES).unwrap();
        let sides = [Side::new(), Side::new()];
        let words = Mapping::of(&sides[0].files[0].0, 0, CONTROL_BYTES, true).unwrap();
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let receiver = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let limit = Some(Duration::from_secs(20));
        receiver.set_read_timeout(limit).unwrap();
        let sender = l.accept().unwrap().0;
        let cookie = sockopt::get::<u64>(sender.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE);
        let lane = Lane {
            table,
            family: Arc::new(Family::new(ident, Foreign::new(fd))),
            sides,
            words: Arc::new(words),
            inode: rustix::fs::fstat(&sender).unwrap().st_ino,
            cookie: cookie.unwrap().0,
            sender: Some(sender),
            receiver,
            lives: Arc::new(AtomicBool::new(true)),
            system: Arc::new(Narrow {
                room: AtomicUsize::new(usize::MAX / 2),
                more: AtomicUsize::new(usize::MAX / 2),
            }),
            sent: 0,
        };
        let c = lane.conn(SENDS);
        c.gen.store(GEN, Relaxed);
        c.flags.store(flag::LANE, Relaxed);
        c.inode.store(lane.inode, Relaxed);
        c.fd.store(lane.fd() + 1, Relaxed);
        c.holders[0].store(std::process::id(), Relaxed);
        c.state.store(state::OPEN, Relaxed);
        lane.tx().attach(&lane.memory(0), Epoch::base(0), FIRST);
        lane.tx().set_tag(TAG);
        lane.rx().attach(&lane.memory(1), Epoch::base(0), TAG);
        assert!(lane.rx().declare_ready(&lane.memory(1), &lane.port()));
        let up = lane.tx().try_up(&lane.memory(0), &lane.port());
        assert_eq!(up, Ok(true));
        lane
    }

    fn conn(&self, at: u32) -> &Conn {
        // SAFETY: mapped for that many bytes, page-aligned; atomics only.
        let table = unsafe { &*self.table.addr().as_ptr().cast::<Table>() };
        &table.conns[at as usize]
    }

    fn tx(&self) -> &TxState {
        &self.conn(SENDS).tx
    }

    fn rx(&self) -> &RxState {
        &self.conn(RECEIVES).rx
    }

    fn memory(&self, side: usize) -> Memory<'_> {
        let [a, b] = [side, 1 - side].map(|s| &self.sides[s].area);
        Memory::new(a, b, SLOT).unwrap()
    }

    fn fd(&self) -> u32 {
        self.sender.as_ref().unwrap().as_raw_fd().cast_unsigned()
    }

    /// The sender's socket, as the sender uses it. (The receiver's half does not touch it here.)
    fn port(&self) -> Sock<'_> {
        Sock {
            fd: self.sender.as_ref().unwrap().as_fd(),
            system: &*self.system,
            leaves: false,
        }
    }

    fn send(&mut self, n: usize) {
        let bytes: Vec<u8> = (self.sent..self.sent + n).map(byte).collect();
        let iov = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: n,
        };
        let mut iov = Iov::new(std::slice::from_ref(&iov));
        let went = self.tx().send(&self.memory(0), &self.port(), &mut iov);
        assert_eq!(went, Sent::Bytes(n));
        self.sent += n;
    }

    fn revoke(&self) {
        self.rx().revoke(&self.memory(1), &self.port()).unwrap();
    }

    fn phase(&self) -> lane::abi::TakeoverPhase {
        let word = self.memory(0).daemon().takeover.load(Relaxed);
        word.phase()
    }

    fn room(&self, room: usize, more: usize) {
        self.system.room.store(room, Relaxed);
        self.system.more.store(more, Relaxed);
    }

    fn found(&self, own: bool) -> Found {
        Found {
            direction: Direction {
                at: (1, SLOT),
                uses: 0,
                who: ConnRef {
                    client: ClientId(1),
                    conn: SENDS,
                    gen: GEN,
                },
                side: 0,
            },
            words: self.words.clone(),
            files: self.sides[0].files.clone(),
            peer: self.sides[1].files[0].0.clone(),
            tag: TAG,
            cookie: self.cookie,
            own,
        }
    }

    fn takeover(&self, own: bool) -> Takeover {
        let control = Foreign::new(memfd::make("control", 1).unwrap());
        Takeover::new(
            self.found(own),
            (me(), self.family.clone()),
            (control, self.lives.clone()),
            self.system.clone(),
        )
    }

    /// Whoever has the sender's socket in this process.
    fn holders(&self) -> usize {
        let all = proc::descriptors(std::process::id()).unwrap();
        all.iter().filter(|(_, i)| *i == self.inode).count()
    }

    /// A step that is the last one; the daemon's copy of the socket is closed when it returns.
    fn over(&self, t: &mut Takeover) -> End {
        let before = usize::from(self.sender.is_some());
        let Step::Over(end) = t.step() else {
            panic!("it goes on");
        };
        assert_eq!(self.holders(), before, "copies of the socket are left");
        end
    }

    /// The receiver takes these many bytes of the stream from TCP.
    fn read(&self, from: usize, n: usize) {
        let mut got = vec![0; n];
        (&self.receiver).read_exact(&mut got).unwrap();
        let want: Vec<u8> = (from..from + n).map(byte).collect();
        assert!(got == want, "other bytes");
    }

    /// There is nothing more on TCP.
    fn is_all(&self) {
        self.receiver.set_nonblocking(true).unwrap();
        let more = (&self.receiver).read(&mut [0]).map_err(|e| e.kind());
        assert_eq!(more, Err(ErrorKind::WouldBlock));
        self.receiver.set_nonblocking(false).unwrap();
    }

    fn ended(&self) {
        assert_eq!((&self.receiver).read(&mut [0]).unwrap(), 0);
    }
}

const BROUGHT: End = End {
    claimed: true,
    brought: true,
    failed: None,
};
const CLAIMED: End = End {
    claimed: true,
    brought: false,
    failed: None,
};

/// The receiver has left its ring, and the sender sleeps.
#[test]
fn an_end_that_sleeps() {
    let mut l = Lane::up();
    l.send(1000);
    assert_eq!(l.takeover(true).step(), Step::NONE, "nobody leaves");
    l.revoke();
    let mut t = l.takeover(false);
    assert_eq!(l.over(&mut t), BROUGHT);
    assert!(t.control.is_some());
    l.read(0, 1000);
    l.is_all();
    assert_eq!(l.phase(), takeover::DONE);
    assert_eq!(l.takeover(false).step(), Step::NONE, "it is done");
    l.tx().look(&l.memory(0), &l.port()).unwrap();
    assert_eq!(l.tx().mode.load(Relaxed), mode::TCP);
    assert_eq!(l.tx().tcp_pos.load(Relaxed).get(), 1000);
}

/// More than is sent at once, and in two chunks, each of which is a file or a part of one.
#[test]
fn a_ring_that_has_moved() {
    for (from, to, chunks) in [
        (FIRST, SECOND, 2),
        (SECOND, ring(1, 32, 17), 2),
        (FIRST, ring(1, 32, 17), 1),
    ] {
        let mut l = Lane::up();
        if from != FIRST {
            l.tx().move_to(&l.memory(0), from);
            l.tx().move_to(&l.memory(0), from); // (nothing is unread on the first one)
        }
        l.send(1000);
        l.tx().move_to(&l.memory(0), to);
        l.send(100_000);
        l.revoke();
        let mut t = l.takeover(false);
        assert_eq!(l.over(&mut t), BROUGHT);
        l.read(0, 101_000);
        l.is_all();
        // Each one is mapped once.
        assert_eq!(t.areas.map_or(0, |a| a.chunks.len()), chunks);
    }
}

/// The sender leaves, and may not have as much of TCP as its way down needs. (With a frame if bytes of the ring may be taken.)
#[test]
fn an_end_that_asks_itself() {
    for (flags, before) in [(RxFlags::default(), 0), (rx::PAST, LEN)] {
        let mut l = Lane::up();
        l.send(1000);
        let word = &l.memory(1).own_rx().word;
        word.store(word.load(Relaxed).with(flags), Relaxed);
        l.room(10, 0);
        l.tx().down(&l.memory(0), &l.port()).unwrap();
        assert_eq!(l.takeover(false).step(), Step::NONE, "nobody else may ask");
        l.room(0, 1 << 20);
        assert_eq!(l.over(&mut l.takeover(true)), BROUGHT);
        (&l.receiver).read_exact(&mut vec![0; before]).unwrap();
        l.read(0, 1000);
        l.is_all();
    }
}

/// A thread of the end has the direction's lock: it is waited for, but not for long.
#[test]
fn an_end_at_work() {
    let mut l = Lane::up();
    l.send(1000);
    l.revoke();
    type Change = dyn Fn(&Conn);
    let conn = |f: &Change| f(l.conn(SENDS));
    let works: [(&Change, &Change); 4] = [
        (&|c| c.tx.lock.store(1, Relaxed), &|c| {
            c.tx.lock.store(0, Relaxed)
        }),
        (&|c| c.gen.store(GEN + 1, Relaxed), &|c| {
            c.gen.store(GEN, Relaxed)
        }),
        (&|c| c.state.store(state::BUSY, Relaxed), &|c| {
            c.state.store(state::OPEN, Relaxed)
        }),
        (&|c| c.flags.store(0, Relaxed), &|c| {
            c.flags.store(flag::LANE, Relaxed)
        }),
    ];
    for (works, rests) in works {
        conn(works);
        let mut t = l.takeover(false);
        assert_eq!(t.step(), Step::Again(1));
        assert_eq!(l.phase(), takeover::NONE);
        t.began = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        assert_eq!(t.step(), Step::NONE);
        conn(rests);
    }
    l.is_all();
    assert_eq!(l.over(&mut l.takeover(false)), BROUGHT);
}

/// TCP takes a part only: the daemon comes again, and has everything as it was.
#[test]
fn a_takeover_beside_a_full_buffer() {
    for shut in [false, true] {
        let mut l = Lane::up();
        l.send(1000);
        l.revoke();
        l.room(300, 0);
        let mut t = l.takeover(false);
        assert!(matches!(t.step(), Step::Again(_)));
        assert_eq!((l.holders(), l.phase()), (2, takeover::PLAIN));
        let at = |t: &Takeover| t.areas.as_ref().map(|a| a.chunks[0].map.addr());
        let first = at(&t);
        l.room(0, 100);
        assert!(matches!(t.step(), Step::Again(_)));
        assert_eq!(at(&t), first, "mapped once");
        assert!(t.control.is_some());
        l.tx().shut.store(u32::from(shut), Relaxed);
        l.room(1 << 20, 0);
        assert_eq!(l.over(&mut t), BROUGHT);
        l.read(0, 1000);
        match shut {
            true => l.ended(),
            false => l.is_all(),
        }
    }
}

/// The process sees that its connection to the daemon is gone, and goes on itself.
#[test]
fn a_process_that_is_cut() {
    let mut l = Lane::up();
    l.send(1000);
    l.revoke();
    l.room(300, 0);
    let mut t = l.takeover(false);
    assert!(matches!(t.step(), Step::Again(_)));
    l.lives.store(false, Relaxed);
    l.room(1 << 20, 0);
    assert_eq!(l.over(&mut t), CLAIMED);
    l.read(0, 300);
    l.is_all();
    l.tx().reclaim(&l.memory(0), &l.port()).unwrap();
    l.read(300, 700);
    assert_eq!(l.tx().mode.load(Relaxed), mode::TCP);
    // Before it has begun, there is nothing to do for it.
    let mut l = Lane::up();
    l.send(1000);
    l.revoke();
    l.lives.store(false, Relaxed);
    assert_eq!(l.takeover(false).step(), Step::NONE);
    l.is_all();
}

/// The process ends during the takeover: the daemon is the only one who has the rest, and its copy the last one of the
/// socket. The FIN comes after it.
#[test]
fn a_process_that_ends() {
    let mut l = Lane::up();
    l.send(1000);
    l.revoke();
    l.room(300, 0);
    let mut t = l.takeover(false);
    assert!(matches!(t.step(), Step::Again(_)));
    t.process.start += 1;
    l.sender = None;
    l.lives.store(false, Relaxed);
    l.room(0, 100);
    assert!(matches!(t.step(), Step::Again(_)));
    assert!(t.control.is_none(), "nobody looks at it any more");
    l.room(1 << 20, 0);
    assert_eq!(l.over(&mut t), BROUGHT);
    l.read(0, 1000);
    l.ended();
}

/// Somebody has sent on the socket past the lane: the stream is lost.
#[test]
fn bytes_of_somebody_else() {
    let mut l = Lane::up();
    l.send(1000);
    l.revoke();
    l.room(300, 0);
    let mut t = l.takeover(false);
    assert!(matches!(t.step(), Step::Again(_)));
    l.sender.as_ref().unwrap().write_all(b"!").unwrap();
    l.room(1 << 20, 0);
    assert_eq!(l.over(&mut t), CLAIMED);
    let mut rest = Vec::new();
    let e = (&l.receiver).read_to_end(&mut rest).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ConnectionReset);
}

/// A ring in memory that the daemon does not have.
#[test]
fn a_ring_of_no_chunk() {
    for (chunk, files) in [(2, 1), (9, 2), (1, 0)] {
        let mut l = Lane::up();
        l.send(1000);
        l.tx().move_to(&l.memory(0), ring(chunk, 0, 12));
        l.revoke();
        let mut t = l.takeover(false);
        t.found.files.truncate(files);
        assert_eq!(l.over(&mut t), End::default(), "{chunk} {files}");
        l.is_all();
    }
}

/// What the end's words say of a socket is looked at, and what they say of a lane that has ended since is not believed.
#[test]
fn an_entry_that_changes() {
    let l = Lane::up();
    let t = l.takeover(false);
    let areas = Areas::map(&t.found).unwrap();
    let about = |process| Beside {
        found: &t.found,
        process,
        family: &t.family,
        lives: None,
        system: &*l.system,
        areas: &areas,
        began: t.began,
    };
    let gone = ProcId {
        start: me().start + 1,
        ..me()
    };
    let (here, gone) = (about(me()), about(gone));
    let copies = |b: &Beside| b.copy().map(Foreign::close).is_some();
    let c = l.conn(SENDS);
    assert!(!here.is_cut());
    assert!(copies(&here) && !copies(&gone));
    assert!(!here.is_orphan() && gone.is_orphan());
    // Others hold it, too.
    c.forks.store(1, Relaxed);
    assert!(!gone.is_orphan());
    c.forks.store(0, Relaxed);
    c.holders[1].store(1, Relaxed);
    assert!(!gone.is_orphan());
    c.holders[1].store(0, Relaxed);
    assert!(gone.is_orphan());
    c.holders[0].store(0, Relaxed);
    assert!(gone.is_orphan() && !here.is_orphan());
    // The application has shut it down.
    assert!(!here.is_shut());
    c.tx.shut.store(1, Relaxed);
    assert!(here.is_shut());
    // It is closed, or another one has its place.
    c.state.store(state::EMBRYO, Relaxed);
    assert!(!copies(&here) && here.is_orphan());
    c.state.store(state::OPEN, Relaxed);
    c.gen.store(GEN + 1, Relaxed);
    assert!(!copies(&here) && here.is_orphan() && !here.is_shut());
    c.tx.shut.store(0, Relaxed);
    assert!(!here.is_shut());
    c.state.store(state::FREE, Relaxed);
    assert!(!copies(&here) && here.is_orphan() && !here.is_shut());
}

/// Bytes of a ring are read from its file, and nothing but its bytes.
#[test]
fn what_lies_in_a_chunk() {
    let mut l = Lane::up();
    l.send(100);
    let mut found = l.found(false);
    let areas = Areas::map(&found).unwrap();
    let c = &areas.chunks[0];
    let at = |n: usize| c.map.addr().as_ptr().wrapping_add(n).cast_const();
    let read = |n, len| areas.read(at(n), len).map(Result::unwrap);
    assert_eq!(read(4096, 3), Some(vec![byte(0), byte(1), byte(2)]));
    assert_eq!(read(CHUNK - 1, 100), Some(vec![0]));
    assert_eq!(read(CHUNK, 100), None);
    assert_eq!(areas.read(at(0).wrapping_sub(1), 1).map(|_| ()), None);
    assert_eq!(read(0, CHUNK).unwrap().len(), PIECE);
    // A file that is shorter than it is said to be.
    found.files[0].1 += 4096;
    let areas = Areas::map(&found).unwrap();
    let at = areas.chunks[0].map.addr().as_ptr();
    let end = areas.read(at.wrapping_add(CHUNK - 3), 100).unwrap();
    assert_eq!(end.unwrap(), [0; 3]);
}
