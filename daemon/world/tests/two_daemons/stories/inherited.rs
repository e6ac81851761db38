//! Lanes whose owner ends while another process holds the connection.

use super::*;
use lane::half::tx::mode;

/// A sender's child goes on with what its parent had on the ring: it takes the lane down when it first uses it, and
/// until then the peer reads the ring.
#[test]
fn a_child_that_goes_on_sending() {
    for late in [false, true] {
        let s = Story::up(0);
        s.send(1, 500);
        s.carry();
        let child = s.fork(1);
        if !late {
            child.borrow_mut().enter();
        }
        s.send(1, 500);
        s.w.kill(1, 0);
        s.tell_death(1);
        s.carry();
        s.recv_all(0);
        assert_eq!(s.got(), 1000);
        assert!(s.engaged(), "nobody has touched it");
        s.keep();
        s.keep();
        assert!(s.engaged());
        s.whole(1000);
    }
}

/// The owner and its child use the lane in turn: it is down for good, as long as there are two.
#[test]
fn two_who_use_a_lane() {
    let s = Story::up(0);
    s.send(1, 500);
    let child = s.fork(1);
    child.borrow_mut().enter();
    {
        let c = child.borrow();
        let end = c.ends.last().unwrap();
        let e = &mut *end.entry.borrow_mut();
        let call = c.call(e, end.sock.as_ref().unwrap().as_fd()).unwrap();
        c.visit(e, &call);
    }
    assert_eq!(s.mode(), mode::TCP);
    s.carry();
    s.recv_all(0);
    assert_eq!(s.got(), 500);
    assert!(!s.engaged());
    s.whole(1000);
}

/// Nobody takes over what a process and its only child leave: the connection ends, with all that was sent.
#[test]
fn a_child_that_dies_too() {
    for late in [false, true] {
        let s = Story::up(0);
        s.send(1, 500);
        s.carry();
        s.recv_all(0);
        let child = s.fork(1);
        if !late {
            child.borrow_mut().enter();
        }
        s.send(1, 500);
        s.w.kill(1, 0);
        s.tell_death(1);
        s.w.kill(1, 1);
        s.whole(0);
    }
}

/// The daemon beside an inherited lane dies: the child brings it down by itself.
#[test]
fn a_daemon_that_dies_beside_a_child() {
    let s = Story::up(0);
    s.send(1, 500);
    let child = s.fork(1);
    child.borrow_mut().enter();
    s.w.kill(1, 0);
    s.tell_death(1);
    s.w.restart(1);
    s.whole(1000);
}

/// The wires are cut while nobody looks after an inherited lane: the daemon takes the direction over.
#[test]
fn an_inherited_lane_whose_wires_are_cut() {
    let s = Story::up(0);
    s.send(1, 500);
    s.carry();
    let child = s.fork(1);
    child.borrow_mut().enter();
    s.send(1, 500);
    s.w.kill(1, 0);
    s.tell_death(1);
    s.cut_and_noticed();
    s.keep();
    s.recv_all(0);
    assert_eq!(s.got(), 1000);
    assert!(!s.engaged());
    s.whole(1000);
}

/// A child executes a program that has no shim, and its parent ends: the daemon must not keep the socket.
#[test]
fn a_child_that_executes_another_program() {
    let s = Story::up(0);
    s.send(1, 500);
    s.carry();
    s.recv_all(0);
    let child = s.fork(1);
    child.borrow_mut().enter();
    child.borrow_mut().exec();
    s.w.kill(1, 0);
    s.tell_death(1);
    s.whole(1000);
}

/// A process is killed before its daemon has read that it took its lane. Its receiver was ready, and the peer is up: what
/// that has put on the ring is there for the child, and nothing else comes after it on TCP.
#[test]
fn a_lane_that_nobody_knows_to_be_taken() {
    let s = Story::before();
    s.connect_and(|s| {
        let process = s.process(0);
        let p = process.borrow();
        p.control.iter().for_each(|(_, wire)| wire.lose_held());
    });
    assert_eq!(s.send(1, 100), 100);
    assert!(s.ready(0));
    s.carry();
    s.try_up(1);
    s.carry();
    s.look(1).unwrap();
    assert_eq!(s.mode(), mode::RING);
    s.send(1, 500);
    let child = s.fork(0);
    s.kill(0);
    s.carry();
    s.down(1).unwrap();
    s.carry();
    child.borrow_mut().enter();
    s.whole(1000);
}

/// A process is killed whose receiver was ready, and its child has not touched the connection yet: nobody who could take
/// part in a switch is left, so the other end's sender is refused, and stays on TCP.
#[test]
fn nobody_goes_up_to_an_inherited_lane() {
    let s = Story::up(0);
    assert!(s.ready(1));
    s.carry();
    let child = s.fork(1);
    child.borrow_mut().enter();
    s.w.kill(1, 0);
    s.tell_death(1);
    s.try_up(0);
    s.carry();
    let _ = s.look(0);
    let sender = s.as_it_is(0, |e, _, _, _| e.app.tx.mode.load(Relaxed));
    assert_eq!(sender, mode::TCP);
    s.whole(1000);
}
