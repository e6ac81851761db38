//! Shims that mean harm: whatever they do, others are served; and limits that hold.

mod common;
use common::*;
use lane::abi::TcpPos;
use lane::proto::msg::{ToDaemon, ToShim};
use lane::proto::reason::Reason;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;

fn configured(text: &str) -> (Daemon, tempfile::NamedTempFile) {
    let f = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        f.path(),
        format!("credits = {CREDITS}\n{text}\n[proof]\nbpf = false\n"),
    )
    .unwrap();
    (Daemon::start(&["--config", f.path().to_str().unwrap()]), f)
}

/// A shim may be newer than this daemon, and say what that does not know: what came with it is closed, which is an answer,
/// and nobody is cut off.
#[test]
fn what_comes_with_an_unknown_message_is_closed() {
    let d = Daemon::plain();
    let a = Shim::new(&d.dir);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    say_bytes(&a.sock, &[99, 0, 4, 0, 1, 2, 3, 4], &[theirs.as_fd()]);
    drop(theirs);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    assert_eq!(d.stats().clients, 1);
}

fn served(d: &Daemon) {
    let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut v, &mut w);
}

/// A connection whose last close waits for ever: SO_LINGER, and a peer that does not read.
fn lingering(l: &TcpListener) -> (TcpStream, TcpStream) {
    let mut c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let s = accept(l);
    rustix::net::sockopt::set_socket_linger(&c, Some(std::time::Duration::from_secs(600))).unwrap();
    c.set_nonblocking(true).unwrap();
    while c.write(&[0; 4096]).is_ok() {}
    (c, s)
}

#[test]
fn closes_that_hang_hold_up_nobody() {
    let d = Daemon::start(&["--no-bpf"]);
    let mut a = Shim::new(&d.dir);
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peers = Vec::new();
    // Stopped meanwhile, so that its copies are the last ones. (Stopping it later would interrupt
    // the closes.)
    d.stop();
    for i in 0..16 {
        let (c, s) = lingering(&l);
        assert_eq!(a.enter(&c, true), i);
        // Whatever it says about the bytes: the copy is closed either way.
        a.register_at(i, &c, u64::MAX, 0);
        peers.push(s);
    }
    d.resume();
    served(&d);
    assert_eq!(a.credits, 0, "no credit for what is not closed yet");
    // With the peers' end the closes end, and the answers and the credits come.
    drop(peers);
    for _ in 0..16 {
        // In any order.
        a.until("a refusal", |m| match *m {
            ToShim::Decline { local, .. } => (local == Reason::Bypassed.code()).then_some(()),
            _ => None,
        });
    }
    while a.credits < 16 {
        a.credit();
    }
}

/// Descriptors that hang in the queue of a connection that is cut off.
#[test]
fn a_queue_full_of_hanging_closes_holds_up_nobody() {
    let d = Daemon::plain();
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let (b, mut peers) = (Shim::new(&d.dir), Vec::new());
    d.stop();
    b.say(hello(), &[]); // for this it is cut off
    for _ in 0..8 {
        let (c, s) = lingering(&l);
        b.say(ToDaemon::Forget { conn: 0, gen: 0 }, &[&c, &c]);
        peers.push(s);
    }
    drop(b);
    d.resume();
    served(&d);
    assert_eq!(d.until("its end", |s| s.clients == 0).paired, 1);
}

/// A socket whose lock is held for ever: a send from memory that nobody fills in.
#[test]
fn sockets_that_are_locked_hold_up_nobody() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    let i = a.enter(&c, true);
    let Some(trap) = Trap::new() else {
        return skip("userfaultfd is not available");
    };
    let (fd, at) = (c.as_raw_fd(), trap.at as usize);
    let sender = std::thread::spawn(move || {
        // SAFETY: the memory is mapped; the kernel reads it and waits until the trap is undone.
        unsafe { libc::send(fd, at as *const libc::c_void, 4096, libc::MSG_NOSIGNAL) }
    });
    trap.wait_until_sprung();
    a.register(i, &c);
    served(&d);
    assert_eq!(d.stats().registered, 3, "it was looked at first");
    drop(trap);
    sender.join().unwrap();
    a.credit();
}

/// Memory whose first touch waits.
struct Trap {
    uffd: OwnedFd,
    at: *mut core::ffi::c_void,
}

impl Trap {
    fn new() -> Option<Trap> {
        #[repr(C)]
        struct Api {
            api: u64,
            features: u64,
            ioctls: u64,
        }
        #[repr(C)]
        struct Register {
            start: u64,
            len: u64,
            mode: u64,
            ioctls: u64,
        }
        const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
        const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
        let flags = rustix::mm::UserfaultfdFlags::CLOEXEC;
        // SAFETY: a new descriptor; it serves only the page below.
        let uffd = unsafe { rustix::mm::userfaultfd(flags) }.ok()?;
        use rustix::mm::{MapFlags, ProtFlags};
        // SAFETY: a new anonymous mapping at an address the kernel chooses.
        let at = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                4096,
                ProtFlags::READ,
                MapFlags::PRIVATE,
            )
            .unwrap()
        };
        let mut api = Api {
            api: 0xaa,
            features: 0,
            ioctls: 0,
        };
        let mut reg = Register {
            start: at as u64,
            len: 4096,
            mode: 1,
            ioctls: 0,
        };
        // SAFETY: both structures are as the kernel defines them, and valid for the calls.
        let ok = unsafe {
            libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) == 0
                && libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut reg) == 0
        };
        ok.then_some(Trap { uffd, at })
    }

    fn wait_until_sprung(&self) {
        let mut p = [rustix::event::PollFd::new(
            &self.uffd,
            rustix::event::PollFlags::IN,
        )];
        let t = rustix::event::Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        assert_eq!(
            rustix::event::poll(&mut p, Some(&t)),
            Ok(1),
            "nobody touched the memory"
        );
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        #[repr(C)]
        struct Zero {
            start: u64,
            len: u64,
            mode: u64,
            zeroed: i64,
        }
        const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
        let mut z = Zero {
            start: self.at as u64,
            len: 4096,
            mode: 0,
            zeroed: 0,
        };
        // SAFETY: as the kernel defines it; fills the page and lets the sender go.
        unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut z) };
    }
}

#[test]
fn heaps_of_descriptors() {
    let d = Daemon::plain();
    let a = Shim::new(&d.dir);
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let fds = vec![null.as_fd(); 250];
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut buf = [0; lane::proto::msg::MAX];
    let n = ToDaemon::Register {
        conn: 0,
        gen: 0,
        tx_tcp_pos: TcpPos::default(),
        rx_tcp_pos: TcpPos::default(),
        flags: 0,
    }
    .encode(&mut buf);
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let iov = [std::io::IoSlice::new(&buf[..n])];
    rustix::net::sendmsg(&a.sock, &iov, &mut control, rustix::net::SendFlags::empty()).unwrap();
    let mut a = a;
    a.hung_up();
    served(&d);
    d.until("no descriptor left over", |_| {
        std::fs::read_dir(format!("/proc/{}/fd", d.pid()))
            .unwrap()
            .count()
            < 60
    });
}

#[test]
fn lanes_of_a_cgroup() {
    let (d, _f) = configured("[limits]\nlanes = 4");
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    pair(&mut a, &mut b); // both ends count here: two lanes, four ends
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    a.credit();
    b.register(j, &s);
    let limit = (Reason::Limit.code(), Reason::PeerDeclined.code());
    let (ra, rb) = (a.declined(i), b.declined(j));
    assert!(
        (ra.0, ra.1) == limit || (rb.0, rb.1) == limit,
        "{ra:?} {rb:?}"
    );
    assert!((ra.0, ra.1) == (limit.1, limit.0) || (rb.0, rb.1) == (limit.1, limit.0));
    assert!(ra.2 > 0 && rb.2 > 0, "both may try again");
    a.say(
        ToDaemon::LaneDone {
            group: x.group,
            side: x.side,
            lane: x.lane,
        },
        &[],
    );
    b.say(
        ToDaemon::LaneDone {
            group: y.group,
            side: y.side,
            lane: y.lane,
        },
        &[],
    );
    d.until("a free lane", |s| s.lanes == 1);
    a.register(i, &c);
    b.register(j, &s);
    offers(&mut a, &mut b);
}

#[test]
fn memory_of_a_cgroup() {
    let (d, _f) = configured("[limits]\nmemory_mib = 40");
    let (mut a, mut b, mut c) = (Shim::new(&d.dir), Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut a, &mut b);
    let (x, y) = tcp();
    let (i, j) = (a.enter(&x, true), c.enter(&y, false));
    a.register(i, &x);
    c.register(j, &y);
    let reasons = [a.declined(i).0, c.declined(j).0];
    assert!(reasons.contains(&Reason::Limit.code()), "{reasons:x?}");
    pair(&mut a, &mut b); // the link group that there is goes on
}

#[test]
fn processes_of_a_cgroup() {
    let (d, _f) = configured("[limits]\nprocesses = 2");
    let (_a, _b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let c = Shim::silent(&d.dir);
    say(&c.sock, &hello(), &[&c.table_fd]);
    let limit = Reason::Limit.code();
    assert!(matches!(hear(&c.sock), Some((ToShim::Refused { reason }, _)) if reason == limit));
}

#[test]
fn exclusions() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let (d, _f) = configured(&format!("[exclude]\nports = [{port}]"));
    let mut a = Shim::new(&d.dir);
    let c = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let i = a.enter(&c, true);
    a.register(i, &c);
    assert_eq!(a.declined(i).0, Reason::Config.code());
    served(&d);
}

#[test]
fn bad_configurations_are_refused() {
    for text in [
        "ring_log2 = 30",
        "ring_lgo2 = 16",
        "credits = 0",
        "[limits]\nlanes = 'many'",
    ] {
        let f = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(f.path(), text).unwrap();
        let tmp = tempfile::tempdir().unwrap();
        let mut c = Daemon::spawn(
            &tmp.path().join("run"),
            &["--config", f.path().to_str().unwrap()],
        );
        assert!(!c.wait().unwrap().success(), "{text}");
    }
}

#[test]
fn ring_sizes_reach_the_shims() {
    let d = Daemon::start(&["--no-bpf", "--ring-log2", "12", "--ring-max-log2", "13"]);
    let s = Shim::silent(&d.dir);
    say(&s.sock, &hello(), &[&s.table_fd]);
    match hear(&s.sock) {
        Some((
            ToShim::HelloAck {
                ring_log2,
                ring_max_log2,
                ..
            },
            _,
        )) => {
            assert_eq!((ring_log2, ring_max_log2), (12, 13))
        }
        m => panic!("{m:?}"),
    }
}

/// A process that shows one table after the other, each of which takes long to read: the daemon keeps four of them for each
/// process that the tenant may have, and none of those keeps it out.
#[test]
fn tables_are_not_kept_without_end() {
    let (d, _f) = configured("[limits]\nprocesses = 40");
    let descriptors = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", d.pid()));
        all.unwrap().count()
    };
    let mut refused = 0;
    for _ in 0..400 {
        let s = Shim::silent(&d.dir);
        s.table().header.used.store(u32::MAX, Relaxed);
        s.say(hello(), &[&s.table_fd]);
        let (answer, _) = hear(&s.sock).expect("an answer");
        refused += u32::from(matches!(answer, ToShim::Refused { .. }));
    }
    let most = descriptors();
    assert!((100..260).contains(&most), "{most} descriptors");
    assert_eq!(refused, 0);
    // (They are read for the last time every few seconds.)
    d.until("they are given up", |_| descriptors() < 60);
}
