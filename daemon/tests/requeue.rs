//! Unread bytes of a peer that is gone, as a shim has them put back to TCP.

mod common;
use common::*;
use lane::proto::msg::ToDaemon;
use rustix::fs::MemfdFlags;
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const BYTES: &[u8] = b"bytes that nobody has read";

fn file() -> OwnedFd {
    let f = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
    assert_eq!(rustix::io::write(&f, BYTES), Ok(BYTES.len()));
    f
}

/// Sends the request with these descriptors, or some of them; what comes of it: the daemon's byte, or its hanging up.
fn ask(a: &Shim, (conn, gen): (u32, u32), s: &TcpStream, fds: usize) -> Option<u8> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let (file, bytes) = (file(), BYTES.len() as u64);
    let all: [&dyn AsFdDyn; 3] = [s, &file, &theirs];
    a.say(ToDaemon::Requeue { conn, gen, bytes }, &all[3 - fds..]);
    drop(theirs);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut said = [0];
    (ours.read(&mut said).unwrap() == 1).then_some(said[0])
}

#[test]
fn what_a_dead_peer_has_left_is_read() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (mut x, y) = tcp();
    let (i, j) = (a.enter(&x, true), b.enter(&y, false));
    let who = (i, a.gen(i));
    assert_eq!(ask(&a, who, &x, 3), None, "it was never paired");
    a.register(i, &x);
    b.register(j, &y);
    offers(&mut a, &mut b);
    assert_eq!(ask(&a, who, &x, 3), Some(0), "its peer lives");
    assert_eq!(ask(&a, who, &x, 2), None, "a descriptor is missing");
    assert_eq!(ask(&a, (i, who.1 + 1), &x, 3), None, "another connection");
    assert_eq!(ask(&b, (j, b.gen(j)), &x, 3), Some(0), "another's socket");
    let (other, _peer) = tcp();
    assert_eq!(ask(&a, who, &other, 3), Some(0), "another socket");
    // Its peer is gone, and the daemon has heard of it or not.
    drop((b, y));
    std::thread::sleep(Duration::from_millis(100));
    let done = ask(&a, who, &x, 3);
    let mut got = Vec::new();
    x.set_read_timeout(Some(PATIENCE)).unwrap();
    x.read_to_end(&mut got).unwrap();
    match rustix::process::geteuid().is_root() {
        true => assert_eq!((done, &got[..]), (Some(1), BYTES)),
        false => assert_eq!((done, &got[..]), (Some(0), &b""[..])),
    }
    assert_eq!(d.stats().clients, 1, "it was not cut off");
    let _ = x.shutdown(Shutdown::Both);
}

/// A shim may ask a daemon that is older than this message, or any later one: what came with it is closed, which is
/// an answer, and nobody is cut off.
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
