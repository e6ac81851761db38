//! A daemon brings to TCP what a sleeping end has on its ring: who may ask for that, who is told, and what is left of it.

mod common;
use common::*;
use lane::abi::{takeover, Loc};
use lane::family::flag;
use lane::half::tx::mode;
use lane::half::{Area, Iov, Memory, Port, Sent};
use lane::proto::msg::{ToDaemon, ToShim};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The ends put nothing on TCP here: they are on the ring, or asleep.
struct Idle;

impl Port for Idle {
    fn tcp_send(&self, _: *const u8, _: usize) -> Result<usize, i32> {
        Err(libc::EAGAIN)
    }
    fn tcp_recv(&self, _: *mut u8, _: usize, _: bool) -> Result<usize, i32> {
        Err(libc::EAGAIN)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(0)
    }
    fn tcp_sent(&self) -> Option<u64> {
        Some(0)
    }
    fn ring(&self) {}
}

/// The largest rings, one behind the other.
const RING: Loc = Loc {
    chunk: 1,
    page: 0,
    log2: 21,
};
const NEXT: Loc = Loc { page: 512, ..RING };

/// A connection on a lane of which `a` receives and `b` sends.
struct Pair {
    a: Shim,
    b: Shim,
    x: Lane,
    y: Lane,
    receiver: TcpStream,
    sender: TcpStream,
}

impl Pair {
    fn new(d: &Daemon) -> Pair {
        let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
        let (receiver, sender) = tcp();
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        let (i, j) = (a.enter(&receiver, true), b.enter(&sender, false));
        a.register(i, &receiver);
        b.register(j, &sender);
        let (x, y) = offers(&mut a, &mut b);
        for (s, l) in [(&a, x), (&b, y)] {
            s.conn(l.conn).flags.fetch_or(flag::LANE, Relaxed);
        }
        let p = Pair {
            a,
            b,
            x,
            y,
            receiver,
            sender,
        };
        p.with(|m, n| {
            let (tx, rx) = (&p.b.conn(y.conn).tx, &p.a.conn(x.conn).rx);
            tx.attach(n, y.epoch, RING);
            rx.attach(m, x.epoch, x.tag);
            assert!(rx.declare_ready(m, &Idle));
            assert_eq!(tx.try_up(n, &Idle), Ok(true));
        });
        p
    }

    /// The receiver's and the sender's view of the lane.
    fn with<R>(&self, f: impl FnOnce(&Memory, &Memory) -> R) -> R {
        let areas = [(&self.a, self.x), (&self.b, self.y)].map(|(s, l)| {
            let area = Area::new();
            let first = &s.sides[&(l.group, l.side)].own[&0].1;
            let at = std::ptr::from_ref(first.control()).cast_mut().cast();
            // SAFETY: mapped for that many bytes, page-aligned, and longer than the area is used.
            unsafe { area.set_first(at, first.bytes()) };
            area
        });
        let [m, n] = [(0, 1), (1, 0)]
            .map(|(own, peer)| Memory::new(&areas[own], &areas[peer], self.x.lane).unwrap());
        f(&m, &n)
    }

    /// The sender puts bytes on its ring, and sleeps.
    fn send(&self, bytes: &[u8]) {
        let iov = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut iov = Iov::new(std::slice::from_ref(&iov));
        let tx = &self.b.conn(self.y.conn).tx;
        let sent = self.with(|_, n| tx.send(n, &Idle, &mut iov));
        assert_eq!(sent, Sent::Bytes(bytes.len()));
    }

    fn revoke(&self) {
        let rx = &self.a.conn(self.x.conn).rx;
        self.with(|m, _| rx.revoke(m, &Idle)).unwrap();
    }

    /// The receiver's request, in its own name or in that of another process.
    fn request(&self) -> ToDaemon {
        ToDaemon::TakeOver {
            group: self.x.group,
            side: self.x.side,
            lane: self.x.lane,
            sender: self.y.side,
        }
    }

    fn is_told(&mut self) {
        let want = ToShim::TakenOver {
            group: self.y.group,
            side: self.y.side,
            lane: self.y.lane,
            conn: self.y.conn,
            gen: self.b.gen(self.y.conn),
        };
        self.b.until("the takeover", |m| (*m == want).then_some(()));
        let tx = &self.b.conn(self.y.conn).tx;
        self.with(|_, n| tx.look(n, &Idle)).unwrap();
        assert_eq!(tx.mode.load(Relaxed), mode::TCP);
    }

    fn done(&self) {
        for (s, l) in [(&self.a, self.x), (&self.b, self.y)] {
            let (group, side, lane) = (l.group, l.side, l.lane);
            s.say(ToDaemon::LaneDone { group, side, lane }, &[]);
        }
    }

    fn read(&self, want: &[u8]) {
        let mut got = vec![0; want.len()];
        (&self.receiver).read_exact(&mut got).unwrap();
        assert!(got == want, "other bytes");
    }

    /// Nothing comes on TCP.
    fn is_quiet(&self) {
        std::thread::sleep(Duration::from_millis(200));
        self.receiver.set_nonblocking(true).unwrap();
        let more = (&self.receiver).read(&mut [0]).map_err(|e| e.kind());
        assert_eq!(more, Err(ErrorKind::WouldBlock));
        self.receiver.set_nonblocking(false).unwrap();
    }
}

/// The daemon may look into this process, which is not its child, only as root.
fn able() -> bool {
    root_or_skip("a takeover of this process's connection")
}

#[test]
fn for_an_end_that_sleeps() {
    if !able() {
        return;
    }
    let d = Daemon::plain();
    let mut p = Pair::new(&d);
    p.send(b"asleep");
    p.a.say(p.request(), &[]);
    p.is_quiet(); // nobody leaves
    p.revoke();
    p.a.say(p.request(), &[]);
    p.is_told();
    p.read(b"asleep");
    assert_eq!(d.until("a takeover", |s| s.taken_over > 0).taken_over, 1);
    p.done();
    d.until("the lane's end", |s| s.lanes == 0);
}

/// Not a test: another process of the family, which asks for what the words say, and ends with its input.
#[test]
fn role() {
    let Some(words) = std::env::var_os("UNDERPASSD_TEST_ROLE") else {
        return;
    };
    let words = words.into_string().unwrap();
    let [dir, fd, group, side, lane, sender] = words.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{words}");
    };
    // SAFETY: inherited for this; nobody else here knows of it.
    let table = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
    let mut s = Shim::with_table(dir.as_ref(), table);
    s.greet();
    let ask = ToDaemon::TakeOver {
        group: group.parse().unwrap(),
        side: side.parse().unwrap(),
        lane: lane.parse().unwrap(),
        sender: sender.parse().unwrap(),
    };
    s.say(ask, &[]);
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// A child may ask for a lane of the process that has it; a stranger may not.
#[test]
fn who_may_ask() {
    if !able() {
        return;
    }
    let d = Daemon::plain();
    let mut p = Pair::new(&d);
    let stranger = Shim::new(&d.dir);
    p.send(b"asleep");
    p.revoke();
    stranger.say(p.request(), &[]);
    p.is_quiet();
    let s = d.stats();
    assert_eq!((s.taken_over, s.clients), (0, 3));
    let table = p.a.table_fd.try_clone().unwrap();
    rustix::io::fcntl_setfd(&table, rustix::io::FdFlags::empty()).unwrap();
    let Lane {
        group, side, lane, ..
    } = p.x;
    let (dir, fd, sender) = (d.dir.display(), table.as_raw_fd(), p.y.side);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role", "--nocapture", "--test-threads=1"])
        .env(
            "UNDERPASSD_TEST_ROLE",
            format!("{dir} {fd} {group} {side} {lane} {sender}"),
        )
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    p.is_told();
    p.read(b"asleep");
    assert_eq!(d.stats().clients, 4);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// A process that the daemon cannot tell: it would not see that this daemon has died. It is another matter when it has
/// come back.
#[test]
fn for_an_end_without_a_control_connection() {
    if !able() {
        return;
    }
    let d = Daemon::plain();
    let mut p = Pair::new(&d);
    p.send(b"asleep");
    p.revoke();
    p.b.sock = dial(&d.dir); // without a hello
    d.until("one client", |s| s.clients == 1);
    p.a.say(p.request(), &[]);
    p.is_quiet();
    p.b.greet();
    p.a.say(p.request(), &[]);
    p.is_told();
    p.read(b"asleep");
    p.done();
    d.until("the lane's end", |s| s.lanes == 0);
}

/// Both ends are gone from a lane while the daemon is at work on it, and the link group was to end: it ends behind that.
#[test]
fn on_a_group_that_ends() {
    if !able() {
        return;
    }
    let d = Daemon::plain();
    let mut p = Pair::new(&d);
    // More than TCP takes, even of an end that leaves. (Buffers whose size was set do not grow by themselves.)
    rustix::net::sockopt::set_socket_recv_buffer_size(&p.receiver, 64 << 10).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&p.sender, 64 << 10).unwrap();
    let some: Vec<u8> = (0..RING.bytes()).map(|n| (n % 251) as u8).collect();
    p.send(&some);
    let tx = &p.b.conn(p.y.conn).tx;
    p.with(|_, n| tx.move_to(n, NEXT));
    p.send(&some);
    p.revoke();
    p.a.say(p.request(), &[]);
    let end = Instant::now() + PATIENCE;
    let phase = || p.with(|_, n| n.daemon().takeover.load(Relaxed).phase());
    while phase() != takeover::PLAIN {
        assert!(Instant::now() < end, "not taken over: {:?}", phase());
        std::thread::sleep(Duration::from_millis(1));
    }
    let (group, side) = (p.x.group, p.x.side);
    p.a.say(ToDaemon::GroupFailed { group, side }, &[]);
    p.done();
    let s = d.until("the failure", |s| s.lanes == 1);
    assert_eq!((s.links, s.taken_over), (1, 0));
    p.read(&some);
    p.read(&some);
    p.a.until("the group's end", |m| match *m {
        ToShim::PeerGone { group: g, side: s } => ((g, s) == (group, side)).then_some(()),
        _ => None,
    });
    let s = d.until("the end", |s| s.lanes == 0);
    assert_eq!((s.links, s.taken_over), (0, 1));
}
