//! Descriptors whose close waits: a process may send as many as it likes, and others are served.

mod common;
use common::*;
use rustix::process::{getrlimit, setrlimit, Resource};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// More than the daemon has helpers.
const MANY: usize = 1200;

/// Connections whose last close waits for ten minutes (SO_LINGER): their peers do not read. Small buffers.
struct Lingering(TcpListener, Vec<TcpStream>);

impl Lingering {
    fn new() -> Lingering {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit).unwrap();
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&l, 1).unwrap();
        Lingering(l, Vec::new())
    }

    fn next(&mut self) -> TcpStream {
        let mut c = TcpStream::connect(self.0.local_addr().unwrap()).unwrap();
        self.1.push(accept(&self.0));
        rustix::net::sockopt::set_socket_send_buffer_size(&c, 1).unwrap();
        rustix::net::sockopt::set_socket_linger(&c, Some(Duration::from_secs(600))).unwrap();
        c.set_nonblocking(true).unwrap();
        while c.write(&[0; 4096]).is_ok() {}
        c
    }
}

/// `attack` sends many of them, in whichever way. The daemon is stopped meanwhile, so that its copies are the last ones.
/// (Stopping it later would interrupt the closes.)
fn others_are_served(attack: impl Fn(&[Shim], &Daemon, &[TcpStream])) {
    let d = Daemon::start(&["--no-bpf"]);
    // (A queue takes some hundred messages.)
    let shims: Vec<Shim> = (0..16).map(|_| Shim::new(&d.dir)).collect();
    let mut all = Lingering::new();
    let sent: Vec<TcpStream> = (0..MANY).map(|_| all.next()).collect();
    d.stop();
    attack(&shims, &d, &sent);
    drop(sent);
    d.resume();
    for _ in 0..3 {
        let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
        pair(&mut v, &mut w);
    }
}

/// A message that this daemon does not know, with descriptors.
fn say_with(sock: impl AsFd, some: &[TcpStream]) {
    let fds: Vec<BorrowedFd<'_>> = some.iter().map(|c| c.as_fd()).collect();
    say_bytes(&sock, &[99, 0, 4, 0, 1, 2, 3, 4], &fds);
}

#[test]
fn many_beside_each_message() {
    others_are_served(|shims, _, all| {
        for (some, a) in all.chunks(100).zip(shims) {
            say_with(&a.sock, some);
        }
    });
}

#[test]
fn one_beside_each_message() {
    others_are_served(|shims, _, all| {
        for (some, a) in all.chunks(1).zip(shims.iter().cycle()) {
            say_with(&a.sock, some);
        }
    });
}

/// From connections that never say hello, and in their queues.
#[test]
fn beside_first_messages() {
    others_are_served(|_, d, all| {
        for two in all.chunks(2) {
            let s = dial(&d.dir);
            say_with(&s, &two[..1]);
            say_with(&s, &two[1..]);
        }
    });
}
