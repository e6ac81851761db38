//! Lanes whose process has finished with them, or never takes them.

use super::takeover::FRAME;
use super::*;
use crate::world::leaving::{Left, Why};
use lane::abi::takeover;
use lane::half::leave::LINK_DEAD_MS;
use lane::half::rx::BeforeDeaf;

/// A receiver rests within a stream whose sender has shut down, and then reads the rest: it finds the end at once, and not
/// with the daemon's next look.
#[test]
fn the_end_comes_as_soon_as_all_is_read() {
    for prefix in [0, 10] {
        let s = Story::up(prefix);
        s.send(1, 1000);
        s.carry();
        if prefix == 0 {
            s.recv(0, 300);
        }
        let taken = s.takeover_of(1);
        s.shutdown(1);
        let helped = || s.w.nodes[1].machine.helped();
        let turn = || {
            s.w.pass(MS / 20);
            (0..2).for_each(|n| s.serve(n));
        };
        (0..40).for_each(|_| turn());
        let jobs = helped();
        let looked = (0..200).any(|_| {
            turn();
            helped() > jobs
        });
        assert!(looked, "the daemon looks again and again");
        assert_eq!(taken(), takeover::TAKEN);
        s.recv(0, 10);
        s.recv_all(0);
        assert_eq!(s.got(), 1000 + prefix);
        (0..20).for_each(|_| turn());
        assert_eq!(taken(), takeover::DONE, "within a millisecond");
        s.whole(0);
    }
}

/// The other end has shut down, and this one reads slowly and answers meanwhile: it reads all of it from the ring, and only
/// the end is said on TCP.
#[test]
fn who_reads_slowly_reads_on() {
    let s = Story::up(0);
    let fd = s.descriptor(1);
    assert!(s.ready(1));
    s.carry();
    s.try_up(0);
    s.carry();
    s.look(0).unwrap();
    s.send(1, 1000);
    s.carry();
    s.shutdown(1);
    for _ in 0..10 {
        s.recv(0, 100);
        s.send(0, 10);
        (0..2).for_each(|_| s.carry());
    }
    assert_eq!(s.got(), 1000);
    s.keep();
    assert_eq!(s.on_tcp(&fd), FRAME);
    drop(fd);
    s.whole(0);
}

/// A process cannot map the other end's memory, and says so when it is offered a lane: nothing of the lane stays in either
/// daemon, and the connection works on TCP.
#[test]
fn a_lane_that_a_process_cannot_map() {
    let s = Story::before();
    s.process(1).borrow_mut().maps = false;
    s.w.open([PLENTY, PLENTY]);
    let offered = |n: usize| s.rails_of(n).contains("Offered");
    let made = (0..10_000).any(|_| {
        (0..2).for_each(|e| s.register(e));
        s.w.pass(MS / 10);
        (0..2).for_each(|n| s.serve(n));
        offered(1)
    });
    assert!(made, "{}", s.w.state());
    s.hear(1);
    s.keep();
    assert!(!offered(1), "{}", s.rails_of(1));
    {
        let core = &s.w.nodes[1].daemon.borrow().core;
        assert_eq!(core.groups.lanes(), 0);
        let log = core.events.lines(|_| true).concat();
        assert!(log.contains("cannot map link group"), "{log}");
    }
    s.process(1).borrow_mut().maps = true;
    s.whole(1000);
}

/// A helper has looked for the holders of a socket and found none, for the second time. But its process had shut the
/// connection down before it closed it, and the daemon has read that meanwhile: this is the end that counts, and what is
/// on the ring arrives.
#[test]
fn a_look_for_holders_that_is_told_too_late() {
    let s = Story::up(0);
    s.send(1, 100);
    s.carry();
    s.recv_all(0);
    s.carry();
    let look = || s.w.nodes[1].daemon.borrow_mut().core.idle_ends();
    let shut = || s.rails_of(1).contains("ends Some(Shut)");
    look();
    for late in [false, true] {
        let found = look();
        assert_eq!(found.len(), 1, "it is idle");
        if late {
            s.shutdown(1);
            assert!(shut(), "{}", s.rails_of(1));
        }
        let d = &mut *s.w.nodes[1].daemon.borrow_mut();
        d.core
            .rails(|r| found.iter().for_each(|h| r.not_held(&h.idle)));
    }
    assert!(shut(), "{}", s.rails_of(1));
    s.whole(0);
}

/// The receiver shuts both directions down, and then its kernel answers whatever comes with a reset. Its sender leaves the
/// lane right after that, and cannot have heard of it yet: what it has to put on TCP has come before.
#[test]
fn nothing_comes_to_who_has_shut_both_directions_down() {
    for (sent, read) in [(0, 0), (100, 0), (100, 60), (100, 100)] {
        for asleep in [false, true] {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            if sent > 0 {
                s.send(1, sent);
            }
            s.carry();
            s.recv(0, read);
            let mut turns = 0..3;
            while s.before_deaf(0) == BeforeDeaf::Sender {
                turns.next().expect("the sender's daemon has had 60 ms");
                match asleep {
                    true => s.keep(),
                    false => {
                        s.carry();
                        s.look(1).unwrap();
                        s.carry();
                    }
                }
            }
            s.shutdown(0);
            let own = s.descriptor(0);
            rustix::net::shutdown(&own, rustix::net::Shutdown::Both).unwrap();
            s.down(1).unwrap();
            s.keep();
            let error = socket2::SockRef::from(&fd).take_error().unwrap();
            assert!(error.is_none(), "{sent} {read} {asleep}: {error:?}");
            s.set_totals(0);
            s.recv_all(0);
            assert_eq!(s.got(), sent, "{read} {asleep}");
            drop((fd, own));
            s.whole(0);
        }
    }
}

/// An end has left its FIN to its daemon, and leaves its lane for good before the daemon has heard of it. Whoever has the
/// connection then cannot send: its peer would find bytes instead of the end.
#[test]
fn who_has_the_connection_next_cannot_send() {
    let s = Story::up(0);
    let own = s.descriptor(1);
    let may_send = || tcp::look(own.as_fd(), false).unwrap().may_send();
    s.send(1, 50);
    let process = s.process(1);
    let i = process.borrow().ends.len() - 1;
    process.borrow_mut().shutdown(i);
    assert!(may_send(), "it is the daemon's");
    let down = s.as_it_is(1, |e, _, m, port| {
        let _held = e.app.lock_tx();
        e.app.tx.come_down(m, port)
    });
    assert_eq!(down, Ok(Progress::Done));
    assert!(!may_send());
    drop(own);
    s.whole(0);
}

/// Who leaves, beside a peer that does nothing any more: how that ends, and after how many ms.
fn leaves(s: &Story) -> (Left, u64) {
    let process = s.process(0);
    let i = process.borrow().ends.len() - 1;
    process.borrow_mut().leave(i, Why::Left);
    let ended = (0..10_000).find_map(|took| {
        let step = process.borrow_mut().go_on_leaving(s.w.now.get());
        s.w.pass(MS);
        (0..2).for_each(|n| s.serve(n));
        (step != Left::Waits).then_some((step, took))
    });
    ended.expect("an end")
}

/// An end leaves its lane when all links have just fallen silent, beside a peer that is stopped and has sent what is unread,
/// or has shut down or ended after that. The daemons get to know that the links are dead after two seconds, and only then
/// can one of them bring the bytes to TCP. The end waits for both, and nobody is reset.
#[test]
fn who_leaves_when_the_links_have_died() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Peer {
        Stopped,
        StoppedWithPrefix,
        StoppedWithMore,
        Shut,
        Killed,
    }
    use Peer::*;
    for peer in [Stopped, StoppedWithPrefix, StoppedWithMore, Shut, Killed] {
        let s = Story::up(if peer == StoppedWithPrefix { 500 } else { 0 });
        s.send(1, 1000);
        s.carry();
        // (The device repeats a packet for as long as the real ones do, and the silence is noticed first.)
        s.w.verbs.set_faults(Faults {
            delay_ns: 1_000,
            repeat_ns: 600 * MS,
            ..Faults::default()
        });
        s.cut();
        match peer {
            // (These are on their way when the wires are cut.)
            StoppedWithMore => _ = s.send(1, 1000),
            Shut => s.shutdown(1),
            Killed => s.kill(1),
            _ => {}
        }
        let (ended, took) = leaves(&s);
        assert_eq!(ended, Left::Done, "{peer:?}: after {took} ms");
        // It took as long as the silence does, and on a machine that has much to do there is as much time left as a call
        // within a node has.
        let noticed = LINK_DEAD_MS - 100..LINK_DEAD_MS + 500;
        assert!(noticed.contains(&took), "{peer:?}: {took} ms");
        match peer {
            Killed => drop(s),
            _ => s.whole(0),
        }
    }
}

/// What was sent before a switch is unread, and its sender has come down by itself since then: the frame lies behind bytes
/// that only the connection's next owner may read. It is reset, and at once.
#[test]
fn who_leaves_before_a_frame() {
    let s = Story::up(500);
    s.send(1, 1000);
    s.carry();
    s.down(1).unwrap();
    s.carry();
    let (ended, took) = leaves(&s);
    assert_eq!(ended, Left::Framed);
    assert!(took < 200, "{took}");
    s.process(0).borrow_mut().abort(0);
}
