//! Dialing descriptors: connections of processes that cannot reach the daemon's socket.

mod common;
use common::*;
use link::family::TABLE_BYTES;
use link::msg::{ToDaemon, ToShim};
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

/// A dialing descriptor of a process that has said hello.
fn dialing(s: &Shim) -> OwnedFd {
    let (ours, theirs) = pair();
    s.say(ToDaemon::Dial {}, &[&theirs]);
    ours
}

/// Does the daemon answer a hello over this new pair, whose other end it gets by `by`?
fn answered(by: &OwnedFd) -> Option<OwnedFd> {
    let (ours, theirs) = pair();
    say(by, &ToDaemon::Dial {}, &[&theirs]);
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
    let s = Shim::new(&d.dir);
    let by = dialing(&s);
    let first = answered(&by).unwrap();
    let second = answered(&by).unwrap();
    d.until("three parties", |s| s.parties == 3);
    drop(first);
    // It outlives who made it, for whoever else has it.
    drop(s);
    d.until("one party", |s| s.parties == 1);
    let third = answered(&by).unwrap();
    d.until("two parties", |s| s.parties == 2);
    drop((second, third));
    d.until("nobody", |s| s.parties == 0);
}

#[test]
fn only_who_made_a_pair_may_send_it() {
    let d = Daemon::plain();
    let s = Shim::new(&d.dir);
    // The kernel says of this one that the daemon is at the other end: somebody else's name.
    let by = dialing(&s);
    say(&by, &ToDaemon::Dial {}, &[&dial(&d.dir)]);
    assert!(closed(&by));
    for what in ["nothing", "two", "a file", "a stream"] {
        let by = dialing(&s);
        let (a, b) = pair();
        let file = std::fs::File::open("/").unwrap();
        let (tcp, _peer) = tcp();
        match what {
            "nothing" => say(&by, &ToDaemon::Dial {}, &[]),
            "two" => say(&by, &ToDaemon::Dial {}, &[&a, &b]),
            "a file" => say(&by, &ToDaemon::Dial {}, &[&file]),
            _ => say(&by, &ToDaemon::Dial {}, &[&tcp]),
        }
        assert!(closed(&by), "{what}");
    }
    // The connection over which they came is none the worse, and another one works.
    assert!(answered(&dialing(&s)).is_some());
}

#[test]
fn what_is_no_dialing_descriptor_is_not_served() {
    let d = Daemon::plain();
    let s = Shim::new(&d.dir);
    let (tcp, peer) = tcp();
    s.say(ToDaemon::Dial {}, &[&tcp]);
    drop(tcp);
    let mut end = [0];
    assert_eq!(std::io::Read::read(&mut &peer, &mut end).unwrap(), 0);
    let mut two = Shim::new(&d.dir);
    let (a, b) = pair();
    two.say(ToDaemon::Dial {}, &[&a, &b]);
    two.hung_up();
}
