//! Dialing descriptors: connections of processes that cannot reach the daemon's socket.

mod common;
use common::*;
use lane::family::TABLE_BYTES;
use lane::proto::msg::{ToDaemon, ToShim};
use rustix::net::{socketpair, sockopt, AddressFamily, SocketFlags, SocketType};
use std::os::fd::OwnedFd;

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (a, b) = socketpair(AddressFamily::UNIX, kind.0, kind.1, None).unwrap();
    for fd in [&a, &b] {
        sockopt::set_socket_passcred(fd, true).unwrap();
    }
    (a, b)
}

/// A process that says hello, and its dialing descriptor.
fn dialing(d: &Daemon) -> (Shim, OwnedFd) {
    let (ours, theirs) = pair();
    let mut s = Shim::silent(&d.dir);
    s.greet_with(&[&theirs]);
    (s, ours)
}

/// Sends these over a dialing descriptor. (Beside a message: what that says is not looked at.)
fn over(by: &OwnedFd, fds: &[&dyn AsFdDyn]) {
    say(by, &ToDaemon::Forget { conn: 0, gen: 0 }, fds);
}

/// Does the daemon answer a hello over this new pair, whose other end it gets by `by`?
fn answered(by: &OwnedFd) -> Option<OwnedFd> {
    let (ours, theirs) = pair();
    over(by, &[&theirs]);
    drop(theirs);
    say(&ours, &hello(), &[&table_fd(TABLE_BYTES, SEALS)]);
    matches!(hear(&ours), Some((ToShim::HelloAck { .. }, _))).then_some(ours)
}

/// Has the daemon closed its end?
fn closed(dialing: &OwnedFd) -> bool {
    hear(dialing).is_none()
}

#[test]
fn a_pair_is_a_connection() {
    let d = Daemon::plain();
    let (s, by) = dialing(&d);
    let first = answered(&by).unwrap();
    let second = answered(&by).unwrap();
    d.until("three clients", |s| s.clients == 3);
    drop(first);
    // It outlives who made it, for whoever else has it.
    drop(s);
    d.until("one client", |s| s.clients == 1);
    let third = answered(&by).unwrap();
    d.until("two clients", |s| s.clients == 2);
    drop((second, third));
    d.until("nobody", |s| s.clients == 0);
}

#[test]
fn only_who_made_a_pair_may_send_it() {
    let d = Daemon::plain();
    // The kernel says of this one that the daemon is at the other end: somebody else's name.
    let (one, by) = dialing(&d);
    over(&by, &[&dial(&d.dir)]);
    assert!(closed(&by));
    for what in ["nothing", "two", "a file", "a stream"] {
        let (mut s, by) = dialing(&d);
        let (a, b) = pair();
        let file = std::fs::File::open("/").unwrap();
        let (tcp, peer) = tcp();
        match what {
            "nothing" => over(&by, &[]),
            "two" => over(&by, &[&a, &b]),
            "a file" => over(&by, &[&file]),
            _ => over(&by, &[&tcp]),
        }
        assert!(closed(&by), "{what}");
        // The connection with which it came is none the worse.
        let i = s.enter(&peer, false);
        s.register(i, &peer);
        s.credit();
    }
    drop(one);
    assert!(answered(&dialing(&d).1).is_some());
}

#[test]
fn what_is_no_dialing_descriptor_is_not_served() {
    let d = Daemon::plain();
    let (tcp, peer) = tcp();
    let mut s = Shim::silent(&d.dir);
    s.greet_with(&[&tcp]);
    drop(tcp);
    let mut end = [0];
    assert_eq!(std::io::Read::read(&mut &peer, &mut end).unwrap(), 0);
    // More than a table and one of those is no hello.
    let mut three = Shim::silent(&d.dir);
    let (a, b) = pair();
    say(&three.sock, &hello(), &[&three.table_fd, &a, &b]);
    three.until("a refusal", |m| {
        matches!(m, ToShim::Refused { .. }).then_some(())
    });
}
