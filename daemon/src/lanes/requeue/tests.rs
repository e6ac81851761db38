//! Real sockets whose receive queues get bytes.

use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Is this process allowed to? (Otherwise all is refused.)
fn may() -> bool {
    let (a, _b) = ends();
    Of(a.as_fd()).set(libc::IPPROTO_TCP, TCP_REPAIR, 1)
}

fn ends() -> (TcpStream, TcpStream) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    (a, l.accept().unwrap().0)
}

fn until(what: impl Fn() -> bool) {
    let began = Instant::now();
    while !what() {
        assert!(began.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn state(s: &TcpStream) -> u8 {
    let info = sockopt::get::<[u8; 1]>(s.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO);
    info.unwrap().0[0]
}

/// The peer of this one is gone.
fn left_alone() -> TcpStream {
    let (a, b) = ends();
    drop(b);
    until(|| state(&a) == TcpInfo::CLOSE_WAIT);
    a
}

fn file(bytes: &[u8]) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let f = rustix::fs::memfd_create("t", flags).unwrap();
    assert_eq!(rustix::io::write(&f, bytes), Ok(bytes.len()));
    f
}

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 31 % 251) as u8).collect()
}

fn copy(fd: impl AsFd) -> Foreign {
    Foreign::new(fd.as_fd().try_clone_to_owned().unwrap())
}

/// Asks for it; the answer.
fn ask(s: &TcpStream, file: &OwnedFd, bytes: usize, change: impl FnOnce(&mut Requeue)) -> bool {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let cookie = sockopt::get::<u64>(s.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE);
    let mut r = Requeue {
        socket: copy(s),
        cookie: cookie.unwrap().0,
        file: copy(file),
        bytes: bytes as u64,
        answer: copy(&theirs),
    };
    drop(theirs);
    change(&mut r);
    let done = r.run();
    let mut said = Vec::new();
    ours.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let _ = ours.read_to_end(&mut said);
    assert!(matches!(said[..], [] | [0] | [1]));
    assert_eq!(said == [1], done);
    done
}

fn option(s: &TcpStream, name: i32) -> Option<u32> {
    Of(s.as_fd()).get(libc::SOL_SOCKET, name)
}

/// As TCP leaves a socket whose peer has sent so many bytes and has died: all are counted and read, then there is the
/// end, and who replies gets a reset.
#[test]
fn the_bytes_come_before_the_end() {
    if !may() {
        return;
    }
    let sizes = [1, 2000, 4096, 65_536, 65_537, 300_000, 600_000, 2 << 20];
    for (k, n) in sizes.into_iter().enumerate() {
        let (mut s, bytes) = (left_alone(), pattern(n));
        let of = |name, value| Of(s.as_fd()).set(libc::SOL_SOCKET, name, value);
        assert!(k % 2 == 0 || of(libc::SO_REUSEADDR, 1));
        assert!(k % 3 != 0 || of(libc::SO_RCVBUF, 4096));
        let names = [libc::SO_REUSEADDR, libc::SO_RCVBUF, SO_BUF_LOCK];
        let before = names.map(|name| option(&s, name));
        assert!(ask(&s, &file(&bytes), n, |_| ()), "{n}");
        assert_eq!(names.map(|name| option(&s, name)), before, "{n}");
        // (The last byte is missing where the buffer of the FIN does not hold all of them.)
        let missing = usize::from(n > EXACT_MAX);
        assert_eq!(sockopt::unread(s.as_fd()), Ok(n - missing), "{n}");
        let mut got = vec![0; n / 2];
        s.read_exact(&mut got).unwrap();
        assert_eq!(sockopt::unread(s.as_fd()), Ok(n - n / 2 - missing), "{n}");
        s.read_to_end(&mut got).unwrap();
        assert!(got == bytes, "{n}");
        assert_eq!(option(&s, libc::SO_ERROR), Some(0));
        assert_eq!(s.write(b"reply").unwrap(), 5);
        until(|| state(&s) == TcpInfo::CLOSE);
        assert_eq!(s.write(b"reply").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}

/// The FIN was read before. Then one byte is not counted.
#[test]
fn after_the_end_was_read() {
    let mut s = left_alone();
    assert_eq!(s.read(&mut [0; 9]).unwrap(), 0);
    if ask(&s, &file(b"some bytes"), 10, |_| ()) {
        let mut got = String::new();
        assert_eq!(sockopt::unread(s.as_fd()), Ok(9));
        s.read_to_string(&mut got).unwrap();
        assert_eq!(got, "some bytes");
    }
}

/// Nothing is done to other sockets, nor with other files, and the socket is as it was before.
#[test]
fn what_is_refused() {
    let (f, n) = (|| file(&pattern(5000)), 5000);
    let (a, mut b) = ends();
    assert!(!ask(&a, &f(), n, |_| ()), "nobody has ended");
    b.write_all(b"unread").unwrap();
    drop(b);
    until(|| state(&a) == TcpInfo::CLOSE_WAIT);
    assert!(!ask(&a, &f(), n, |_| ()), "its queue is not empty");
    let mut s = left_alone();
    assert!(!ask(&s, &f(), n, |r| r.cookie ^= 1), "another socket");
    assert!(!ask(&s, &f(), n, |r| r.cookie = 0), "not known");
    assert!(!ask(&s, &f(), n - 1, |_| ()), "another size");
    assert!(!ask(&s, &f(), 0, |_| ()), "no byte");
    let most = BYTES_MAX as usize + 1;
    assert!(!ask(&s, &f(), most, |_| ()), "too many");
    let dir = std::fs::File::open("/").unwrap();
    assert!(!ask(&s, &f(), n, |r| r.file = copy(&dir)), "no memory");
    assert!(!ask(&s, &f(), n, |r| r.answer = copy(&dir)), "no answer");
    let given_up = f();
    rustix::fs::ftruncate(&given_up, 0).unwrap();
    assert!(!ask(&s, &given_up, n, |_| ()), "nobody waits any longer");
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    let ended = |r: &mut Requeue| r.answer = copy(&theirs);
    assert!(!ask(&s, &f(), n, ended), "the process has ended");
    let unix = UnixStream::pair().unwrap();
    assert!(!ask(&s, &f(), n, |r| r.socket = copy(&unix.0)));
    assert_eq!(s.read(&mut [0; 9]).unwrap(), 0);
    assert_eq!(sockopt::unread(s.as_fd()), Ok(0));
    let begun = f();
    assert!(!may() || ask(&s, &begun, n, |_| ()));
    let emptied = rustix::fs::ftruncate(&begun, 0);
    assert!(!may() || emptied == Err(Errno::PERM), "too late");
}
