//! Daemons that die beside an end whose direction they have, or are about to have.

use super::takeover::{each, FRAME};
use super::*;
use lane::half::tx::mode;

/// The daemon dies after any number of bytes of its frame and of what follows; its end wakes and
/// finishes.
#[test]
fn a_daemon_that_dies_within_a_frame() {
    for at in each(FRAME + 100) {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 100);
        s.room(at);
        s.cut_and_noticed();
        s.keep();
        assert_eq!(s.on_tcp(&fd), at);
        s.w.restart(1);
        s.send(1, 10);
        let done = at == FRAME + 100;
        assert_eq!(s.mode() == mode::TCP, done, "{at}");
        drop(fd);
        s.whole(10);
    }
}

/// The same when the daemon was saying where the stream ends.
#[test]
fn a_daemon_that_dies_within_the_end() {
    for at in each(FRAME) {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 100);
        s.carry();
        s.recv_all(0);
        s.carry();
        s.room(at);
        s.shutdown(1);
        s.keep();
        assert_eq!(s.on_tcp(&fd), at);
        s.w.restart(1);
        s.hear(1);
        tcp::mend();
        let _ = s.look(1);
        assert_eq!(s.on_tcp(&fd), FRAME, "{at}");
        drop(fd);
        s.whole(0);
    }
}

/// The same, and the end is gone as well: an error, or everything and a clean end.
#[test]
fn both_die_within_a_frame() {
    for at in each(FRAME + 100) {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 100);
        s.room(at);
        s.cut_and_noticed();
        s.kill(1);
        s.keep();
        assert_eq!(s.on_tcp(&fd), at);
        drop(fd);
        s.w.restart(1);
        let all = at == FRAME + 100;
        match all {
            true => s.whole(0),
            false => s.broken(),
        }
    }
}

/// The daemon answers a revocation with plain bytes in its end's stead, and dies; the end goes on
/// where it stopped, frame or no frame.
#[test]
fn a_daemon_that_dies_within_plain_bytes() {
    for at in each(100) {
        for framed in [false, true] {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            s.send(1, 100);
            s.room(0);
            if framed {
                s.down(1).unwrap(); // none of it is on TCP yet
            }
            assert_eq!(s.revoke(0), Ok(Revoked::Pending));
            s.carry();
            s.room(at);
            s.keep();
            assert_eq!(s.on_tcp(&fd), at);
            s.w.restart(1);
            s.hear(1);
            tcp::mend();
            s.look(1).unwrap();
            s.look(1).unwrap();
            assert_eq!(s.mode(), mode::TCP);
            let on_tcp = s.on_tcp(&fd);
            assert!(on_tcp == 100 || on_tcp == 100 + FRAME, "{on_tcp}");
            if at > 0 && at < 100 && !framed {
                assert_eq!(on_tcp, 100, "{at}");
            }
        }
    }
}

/// A receiver leaves and has read nothing of the ring, but the daemon that would tell it of a way down without a frame
/// dies: the sender writes one, which needs nobody.
#[test]
fn a_revocation_that_nobody_can_answer() {
    let s = Story::up(0);
    let fd = s.descriptor(1);
    s.send(1, 100);
    assert_eq!(s.revoke(0), Ok(Revoked::Pending));
    s.carry();
    s.w.restart(1);
    s.look(1).unwrap();
    assert_eq!(s.on_tcp(&fd), FRAME + 100);
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    assert!(!s.engaged());
    drop(fd);
    s.whole(0);
}

/// An end sleeps without having seen that it may go up. Its daemon begins a frame, and dies: what is
/// missing of it belongs to the new epoch.
#[test]
fn a_daemon_that_dies_beside_an_end_that_asks() {
    for at in each(FRAME) {
        let s = Story::asking(5);
        let fd = s.descriptor(1);
        s.carry();
        s.cut_and_noticed();
        s.room(at);
        s.keep();
        assert_eq!(s.mode(), mode::ASK);
        assert_eq!(s.on_tcp(&fd), 5 + at);
        s.w.restart(1);
        tcp::mend();
        s.hear(1);
        let _ = s.look(1);
        assert_eq!(s.on_tcp(&fd), 5 + FRAME);
        drop(fd);
        s.whole(100);
    }
}

/// The daemon had shown a switch that the receiver has not noticed, with bytes before it on TCP; then
/// it died. They are read, and what comes after them.
#[test]
fn a_daemon_that_dies_beside_a_receiver() {
    for prefix in [0, 10] {
        let s = Story::asking(prefix);
        s.carry();
        s.look(1).unwrap();
        s.send(1, 100);
        s.w.restart(0);
        s.recv(0, 3);
        assert!(s.engaged());
        s.whole(0);
    }
}

/// Nobody takes what a process has left behind: in the end its daemon gives up, as the kernel does.
#[test]
fn what_nobody_takes() {
    let s = Story::up(0);
    s.send(1, 1000);
    s.room(0);
    s.w.conns.borrow()[0].ends[1].borrow_mut().excused = true;
    s.kill(1);
    s.cut_and_noticed();
    let kept = || s.rails_of(1).contains("Offered");
    let wait = |seconds: u64| {
        for _ in 0..seconds * 20 {
            s.w.pass(50 * MS);
            (0..2).for_each(|n| s.serve(n));
        }
    };
    wait(90);
    assert!(kept(), "{}", s.rails_of(1));
    wait(20);
    assert!(!kept(), "{}", s.rails_of(1));
}

/// A lane is in the making, and the other daemon is lost, or says nothing any more: its connection is told, may try again, and
/// the slot is free.
#[test]
fn a_lane_that_is_not_made() {
    for silent in [false, true] {
        let s = Story::before();
        s.w.open([PLENTY, PLENTY]);
        let making = |n: usize| !s.rails_of(n).contains(" 0 in the making");
        let found = (0..10_000).find_map(|_| {
            (0..2).for_each(|e| s.register(e));
            s.w.pass(MS / 10);
            (0..2).find(|n| {
                s.serve(*n);
                making(*n)
            })
        });
        let n = found.expect("a lane in the making");
        if !silent {
            s.w.set_channel(false);
        }
        for _ in 0..120 {
            s.w.pass(50 * MS);
            s.w.nodes[n].run(&mut Rng(7));
            s.w.nodes[n].said(); // nobody hears it
        }
        assert!(!making(n), "{}", s.rails_of(n));
        s.hear(n);
        let process = s.process(n);
        let declined = process.borrow().declined.values().sum::<u64>();
        assert_eq!(declined, 1, "{:?}", process.borrow().declined);
    }
}
