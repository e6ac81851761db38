//! Lanes across nodes: what each rule is for, one story each. The model of the same protocol (see
//! `tests/model/src/remote.rs`) found most of them.

use super::*;
use lane::half::is_left;
use lane::half::tx::mode;
use lane::proto::frame::LEN;
use underpass_rdma::devices::Change;
use underpass_rdma::verbs::Provider;

const FRAME: u64 = LEN as u64;

/// The sender's node dies in the middle of what its frame announced: TCP ends cleanly there, the
/// stream does not.
#[test]
fn a_down_that_breaks_off_is_no_end() {
    let s = Story::up(0);
    s.send(1, 1000);
    s.cut();
    s.room(FRAME + 8);
    s.down(1).unwrap();
    assert_eq!(s.mode(), mode::DRAIN);
    s.w.restart(1);
    s.kill(1);
    s.recv_all(0);
    assert_eq!(s.got(), 8);
    s.broken();
}

/// The same while the receiver wants to hand its socket over: the error that tells is not used up by
/// the hand-over, and what follows does not look like an end.
#[test]
fn a_hand_over_of_a_stream_that_breaks_off() {
    let s = Story::up(0);
    s.send(1, 1500);
    s.carry();
    s.send(1, 1500);
    s.room(FRAME);
    s.down(1).unwrap();
    assert_eq!(
        s.revoke(0),
        Ok(Revoked::Pending),
        "the frame is there, the bytes are not"
    );
    s.cut();
    s.w.restart(1);
    s.kill(1);
    s.recv_all(0);
    assert_eq!(s.got(), 1500);
    let end = s.w.conns.borrow()[0].ends[0].clone();
    let told = end.borrow_mut().app.error.take();
    assert_eq!(told, Some(libc::ECONNRESET));
    assert_eq!(s.revoke(0), Ok(Revoked::Clear), "it was told");

    // Asked first, and told afterwards.
    let s = Story::up(0);
    s.send(1, 1500);
    s.carry();
    s.send(1, 1500);
    s.room(FRAME);
    s.down(1).unwrap();
    s.cut();
    s.w.restart(1);
    s.kill(1);
    s.recv(0, 1500);
    assert_eq!(s.got(), 1500);
    assert_eq!(s.revoke(0), Ok(Revoked::Impossible));
    s.broken();
}

/// A client sends a little before it goes up, and shuts down; the server has read nothing and hands the
/// socket over. An end announced behind the unread bytes would be in the way of the next owner.
#[test]
fn the_end_is_not_announced_behind_a_prefix() {
    let s = Story::up(10);
    let fd = s.descriptor(1);
    s.send(1, 100);
    s.carry();
    s.shutdown(1);
    s.keep();
    assert_eq!(
        s.on_tcp(&fd),
        10,
        "everything has landed, but the prefix is unread"
    );
    assert_eq!(s.revoke(0), Ok(Revoked::Pending));
    s.carry();
    s.keep();
    assert_eq!(s.on_tcp(&fd), 10 + 100, "plain bytes, and the end");
    s.carry();
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    assert!(!s.engaged());
    drop(fd);
    s.whole(0);
}

/// A revocation meets a send: on one node what TCP does not take of it was never sent. Here a daemon
/// may have sent it on already.
#[test]
fn what_was_published_stays_sent() {
    let s = Story::up(0);
    assert_eq!(s.revoke(0), Ok(Revoked::Pending));
    s.carry();
    s.room(0);
    assert_eq!(s.send(1, 1000), 1000);
    let published = s.as_it_is(1, |_, _, m, _| m.own_head().load(Relaxed).get());
    assert_eq!(published, 1000);
    tcp::mend();
    s.look(1).unwrap();
    s.carry();
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    s.whole(0);
}

/// The sender has gone down on its own, and the wire fails before its word for that arrives: only
/// the frame can tell a receiver that waits to leave.
#[test]
fn a_frame_answers_when_words_cannot() {
    let s = Story::up(0);
    s.send(1, 10);
    s.cut();
    s.down(1).unwrap();
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    assert!(!s.engaged());
    s.recv(0, 100);
    assert_eq!(s.got(), 10);
    s.whole(0);
}

/// The frame says how many bytes of the ring come again on TCP. Who leaves with some of them unread needs no word of
/// the sender's for that, which may never come.
#[test]
fn a_frame_is_enough_to_leave_a_ring_that_is_not_read() {
    let s = Story::up(0);
    s.send(1, 1000);
    s.carry();
    s.recv(0, 300);
    s.cut();
    s.room(500);
    s.down(1).unwrap();
    assert_eq!(s.revoke(0), Ok(Revoked::Pending), "not all of it is there");
    tcp::mend();
    s.look(1).unwrap();
    assert_eq!(s.mode(), mode::TCP);
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    assert!(!s.engaged());
    s.recv(0, 2000);
    assert_eq!(s.got(), 1000);
    s.whole(0);
}

/// An end that nobody announced, with bytes on their way.
#[test]
fn a_bare_end_is_a_reset() {
    let s = Story::up(0);
    s.send(1, 10);
    s.cut();
    s.w.restart(1);
    s.kill(1);
    s.recv(0, 100);
    s.broken();
}

/// Who inherited a lane goes down, and the frame is quicker than the ring's last bytes, which it has repeated: the
/// head moves behind the reader's back, and nothing of it will ever be read there. The daemon lets go all the same.
#[test]
fn a_frame_that_overtakes_the_ring() {
    let s = Story::up(0);
    s.send(1, 500);
    s.carry();
    s.recv(0, 500);
    s.carry();
    let child = s.fork(0);
    s.send(1, 1000);
    s.want_down(0);
    s.serve(1); // what was sent is on its way
    s.down(1).unwrap();
    let left = |s: &Story| s.as_it_is(0, |e, _, m, _| is_left(m, !e.app.rx.engaged()));
    assert!(!left(&s), "it has not seen the frame yet");
    s.recv(0, 1200);
    s.recv(0, 1200);
    assert_eq!(s.got(), 1500);
    assert!(!s.engaged(), "all of it has come by TCP");
    s.carry();
    let (own, head) = s.as_it_is(0, |_, _, m, _| {
        (
            m.own_cursor().load(Relaxed).get(),
            m.peer_head().load(Relaxed).get(),
        )
    });
    assert_eq!((own, head), (500, 1500), "and once more, for nobody");
    assert!(left(&s));
    // Its owner ends, and a child holds it: nothing is left to wait for.
    child.borrow_mut().enter();
    s.kill(0);
    s.keep();
    let gone = format!(
        "{:?}",
        s.w.nodes[0]
            .daemon
            .borrow()
            .core
            .rails
            .as_ref()
            .unwrap()
            .lock()
    );
    assert!(!gone.contains("Offered"), "{gone}");
    s.whole(0);
}

/// Ready when its owner ends, and never up: nobody will switch to it (`Pair::refuse_switches`).
#[test]
fn a_readiness_that_is_left_over() {
    let s = Story::new();
    assert!(s.ready(0));
    s.carry();
    assert!(s.engaged());
    let left = |e: usize, tcp| s.as_it_is(e, |_, _, m, _| is_left(m, tcp));
    assert!(left(0, false));
    let child = s.fork(0);
    child.borrow_mut().enter();
    let (l, slot) = s.group_of(0);
    s.w.kill(0, 0);
    s.tell_death(0);
    s.try_up(1);
    assert!(!left(1, true), "asked for, and not answered");
    s.carry();
    s.look(1).unwrap();
    assert_eq!(s.mode(), mode::TCP, "refused");
    assert!(is_left(&l.memory(slot), false));
    s.whole(1000);
}

/// A refused switch leaves the epoch to be offered again.
#[test]
fn a_withdrawn_readiness_refuses_the_switch() {
    let s = Story::new();
    assert!(s.ready(0));
    s.carry();
    s.try_up(1);
    assert_eq!(
        s.revoke(0),
        Ok(Revoked::Clear),
        "nobody had switched: at once"
    );
    s.carry();
    s.send(1, 10);
    assert_eq!(s.mode(), mode::TCP);
    s.recv(0, 100);
    assert_eq!(s.got(), 10);
    assert!(s.ready(0));
    s.carry();
    s.try_up(1);
    s.carry();
    s.look(1).unwrap();
    assert_eq!(s.mode(), mode::RING);
    s.whole(100);
}

/// FIONREAD that sees a switch in its middle goes past it: nothing that could be heard comes after.
#[test]
fn a_count_that_meets_a_switch_goes_past_it() {
    for at in 0..8 {
        let s = Story::asking(0);
        let reached = s.script(at, |w| {
            for _ in 0..60 {
                w.pass(MS / 20);
                for n in 0..2 {
                    w.nodes[n].run(&mut Rng(w.now.get()));
                    w.carry(n);
                }
            }
        });
        let n = s.with(0, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.unread(m, port)
        });
        assert_eq!(n, Some(0));
        s.w.script.take();
        if reached.get() {
            s.look(1).unwrap();
            s.send(1, 100);
            s.carry();
        }
        s.whole(100);
    }
}

/// A receiver leaves with bytes from before the switch unread; the sender answers with plain bytes, and is gone at once.
/// Nothing on TCP tells that no frame is among them: the word that does must come before the lane ends.
#[test]
fn how_a_sender_came_down_is_told_before_its_lane_ends() {
    for killed in [false, true] {
        let s = Story::up(10);
        s.send(1, 100);
        assert_eq!(s.revoke(0), Ok(Revoked::Pending));
        s.carry();
        match killed {
            false => {
                s.look(1).unwrap();
                assert_eq!(s.mode(), mode::TCP);
                s.set_totals(0);
                s.process(1)
                    .borrow_mut()
                    .give_back(&mut s.w.conns.borrow()[0].ends[1].borrow_mut());
            }
            true => s.kill(1),
        }
        s.keep();
        assert_eq!(s.revoke(0), Ok(Revoked::Clear), "killed {killed}");
        s.whole(0);
    }
}

/// The other daemon is killed and started again: the link groups to its node are given up, since lanes of a new incarnation
/// need new ones.
#[test]
fn the_other_daemon_is_restarted() {
    let s = Story::up(0);
    s.send(1, 100);
    s.carry();
    s.recv_all(0);
    s.carry();
    let gone = || {
        let process = s.process(1);
        let p = process.borrow();
        p.groups.values().all(|g| g.gone) && !p.groups.is_empty()
    };
    assert!(!gone());
    s.w.restart(0);
    s.keep();
    s.hear(1);
    assert!(gone(), "{}", s.rails_of(1));
}

/// A process has closed its end in a way that nobody has seen: two looks find nobody who holds it, and the daemon closes its
/// own copy, so that the other end hears of it. (One look may have come between the processes' steps.)
#[test]
fn an_end_that_nobody_holds() {
    let s = Story::up(0);
    s.send(1, 100);
    s.carry();
    s.recv_all(0);
    s.carry();
    let offered = || s.rails_of(1).contains("Offered");
    {
        let process = s.process(1);
        let inode = s.w.conns.borrow()[0].ends[1].borrow().inode;
        let pid = process.borrow().pid;
        s.w.nodes[1].machine.closes(pid, inode);
        process.borrow_mut().ends.last_mut().unwrap().sock = None;
    }
    assert!(offered());
    for _ in 0..100 {
        s.w.pass(50 * MS);
        (0..2).for_each(|n| s.serve(n));
    }
    assert!(!offered(), "{}", s.rails_of(1));
}

/// A device is pulled out of a node: the lane goes on over the other one, and the first counts no more.
#[test]
fn a_device_that_goes() {
    let s = Story::up(0);
    s.send(1, 100);
    s.carry();
    assert!(s.rails_of(1).contains("rails 2"), "{}", s.rails_of(1));
    let id = {
        let all = s.w.nodes[1].verbs.scan().unwrap();
        all.into_iter().find(|d| d.name == "sim0").unwrap()
    };
    {
        let d = s.w.nodes[1].daemon.borrow();
        let plane = d.core.rails.as_ref().unwrap();
        plane.lock().devices_changed(&[Change::Removed(id)]);
    }
    s.carry();
    assert!(s.rails_of(1).contains("rails 1"), "{}", s.rails_of(1));
    s.send(1, 100);
    s.carry();
    s.recv_all(0);
    s.whole(0);
}
