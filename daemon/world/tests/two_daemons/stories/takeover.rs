//! A sending direction in the hands of the daemon beside its end (`lane/tx/takeover.rs`, `rail/takeover.rs`): one story
//! for each way in which it gets there and comes back, at every byte where it can be interrupted.

use super::*;
use lane::abi::{takeover, tx, Epoch, TxWord};
use lane::half::tx::mode;
use lane::proto::frame::LEN;

pub const FRAME: u64 = LEN as u64;

/// Every one of these, or a few of them where code is slow.
pub fn each(to: u64) -> impl Iterator<Item = u64> {
    let step = if cfg!(debug_assertions) { 23 } else { 1 };
    let edges = [0, 1, FRAME - 1, FRAME, FRAME + 1, to - 1, to];
    (0..=to).filter(move |n| n % step == 0 || edges.contains(n))
}

/// An end sleeps on bytes in its ring while the wires are cut: they come on TCP. When it wakes it goes
/// on there, and on a ring again in a later epoch.
#[test]
fn an_end_that_sleeps() {
    let s = Story::up(0);
    let fd = s.descriptor(1);
    s.send(1, 1000);
    s.carry();
    s.recv(0, 300);
    s.keep();
    assert_eq!(s.word(), takeover::NONE, "while it is up nobody is late");
    s.cut_and_noticed();
    s.keep();
    assert_eq!(s.word(), takeover::DONE);
    let on_tcp = s.on_tcp(&fd);
    assert!((FRAME + 700..=FRAME + 1000).contains(&on_tcp), "{on_tcp}");
    s.recv_all(0);
    assert_eq!(s.got(), 1000);
    assert!(!s.engaged());
    assert_eq!(s.mode(), mode::RING, "it sleeps yet");
    s.send(1, 500);
    assert_eq!(s.mode(), mode::TCP);
    assert_eq!(s.state(), TxWord::new(Epoch::new(1), tx::DOWN));
    assert_eq!(s.on_tcp(&fd), on_tcp + 500);
    let counted = s.as_it_is(1, |e, _, _, _| e.app.tx.tcp_pos.load(Relaxed).get());
    assert_eq!(counted, s.on_tcp(&fd));
    s.mend();
    s.recv_all(0);
    assert!(s.ready(0));
    s.carry();
    s.try_up(1);
    s.carry();
    s.send(1, 100);
    assert_eq!(s.mode(), mode::RING);
    let epoch = s.as_it_is(1, |e, _, _, _| e.app.tx.epoch.load(Relaxed));
    assert_eq!(epoch, Epoch::new(2));
    assert_eq!(s.on_tcp(&fd), on_tcp + 500);
    drop(fd);
    s.whole(0);
}

/// Takeover that is through, and an end that has not looked since: it is not taken again, whatever
/// its own words still say; neither in its sleep nor when it ends.
#[test]
fn a_takeover_that_is_through() {
    for ends in 0..3 {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 1000);
        s.cut_and_noticed();
        s.keep();
        s.keep();
        assert_eq!(s.word(), takeover::DONE);
        assert_eq!(s.state().phase(), tx::UP, "the end has not looked");
        match ends {
            0 => s.shutdown(1),
            1 => s.kill(1),
            _ => {
                // The first that it does may be anything.
                let can = s.with(1, |e, _, m, _| e.app.tx.can_move(m));
                assert!(!can);
            }
        }
        s.keep();
        assert_eq!(s.on_tcp(&fd), FRAME + 1000);
        drop(fd);
        s.whole(0);
    }
}

/// An end was on its way down, and had put any number of bytes on TCP, when it fell asleep or was
/// killed: its daemon goes on there, and may die in turn.
#[test]
fn an_end_on_its_way_down() {
    let all = FRAME + 100;
    for at in each(all) {
        let start = || {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            s.send(1, 100);
            s.room(at);
            s.down(1).unwrap();
            assert_eq!(s.on_tcp(&fd), at);
            assert_eq!(s.mode() == mode::DRAIN, at < all);
            (s, fd)
        };
        let (s, fd) = start();
        s.room(all - at);
        s.keep();
        assert_eq!(s.on_tcp(&fd), all);
        let taken = s.word() == takeover::DONE;
        assert_eq!(taken, at < all);
        s.look(1).unwrap();
        assert_eq!(s.mode(), mode::TCP);
        drop(fd);
        s.whole(0);

        let (s, fd) = start();
        s.room(all - at);
        s.kill(1);
        s.serve_3s(); // with nothing on TCP yet it might wait for the ring to arrive
        assert_eq!(s.on_tcp(&fd), all);
        drop(fd);
        s.whole(0);

        for more in (at..=all).step_by(if cfg!(debug_assertions) { 61 } else { 17 }) {
            let (s, fd) = start();
            s.room(more - at);
            s.keep();
            assert_eq!(s.on_tcp(&fd), more);
            s.w.restart(1);
            s.hear(1);
            tcp::mend();
            let _ = s.look(1);
            assert_eq!(s.on_tcp(&fd), all);
            drop(fd);
            s.whole(0);
        }
    }
}

/// The same when a receiver that leaves has asked for plain bytes, without a frame.
#[test]
fn an_end_on_its_way_down_without_a_frame() {
    for at in each(100) {
        for how in 0..3 {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            assert_eq!(s.revoke(0), Ok(Revoked::Pending));
            s.carry();
            s.room(at);
            // Published before it looks: what TCP does not take is the daemon's.
            assert_eq!(s.send(1, 100), 100);
            assert_eq!(s.on_tcp(&fd), at);
            assert_eq!(s.mode() == mode::DRAIN, at < 100);
            // It sleeps; is killed; sleeps, and its daemon takes it and dies.
            match how {
                0 => {}
                1 => s.kill(1),
                _ => {
                    s.room((100 - at) / 2);
                    s.keep();
                    s.w.restart(1);
                }
            }
            tcp::mend();
            s.keep();
            if how != 1 {
                s.look(1).unwrap();
                assert_eq!(s.mode(), mode::TCP);
            }
            assert_eq!(s.on_tcp(&fd), 100, "no frame: {at} {how}");
            drop(fd);
            if how == 2 {
                // The word that these bytes are plain died with the daemon.
                continue;
            }
            s.carry();
            assert_eq!(s.revoke(0), Ok(Revoked::Clear), "{at} {how}");
            s.whole(0);
        }
    }
}

/// Whoever comes second finds the other: a daemon that wants to take does not while the end is at
/// it, and an end that comes while the daemon has it does nothing.
#[test]
fn one_at_a_time() {
    // Points within a send that goes down: the ring, each call to TCP.
    let mut points = 0;
    for at in 0..20 {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 100);
        s.cut_and_noticed();
        // It would be taken now, as the daemon sees it.
        s.w.pass(19 * MS);
        let reached = s.script(at, |w| {
            w.pass(5 * MS);
            for _ in 0..20 {
                w.nodes[1].run(&mut Rng(w.now.get()));
                w.pass(MS);
            }
            assert_eq!(
                w.nodes[1].machine.jobs(),
                0,
                "taken from an end that is at it"
            );
        });
        assert_eq!(s.send(1, 100), 100);
        points += u64::from(reached.get());
        s.w.script.take();
        assert!(s.word() == takeover::NONE || s.word() == takeover::DONE);
        s.keep();
        let _ = s.look(1);
        assert_eq!(s.on_tcp(&fd), FRAME + 200);
        drop(fd);
        s.whole(0);
    }
    assert!(points >= 5, "{points}");

    let mut points = 0;
    for at in 0..20 {
        for act in 0..4 {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            s.send(1, 100);
            s.cut_and_noticed();
            let heads = s.as_it_is(1, |_, _, m, _| m.own_head().load(Relaxed));
            let sent = Rc::new(std::cell::Cell::new(0));
            let (story, told) = (Story { w: s.w.clone() }, sent.clone());
            let reached = s.script(at, move |_| match act {
                0 => told.set(story.send(1, 50)),
                1 => drop(story.down(1)),
                2 => drop(story.look(1)),
                _ => assert!(!story.with(1, |e, _, m, _| e.app.tx.can_move(m))),
            });
            s.keep();
            s.w.script.take();
            // (Where it came before or behind all of it, the bytes have gone out on TCP.)
            let within = reached.get() && sent.get() == 0;
            points += u64::from(act == 0 && within);
            assert_eq!(
                s.as_it_is(1, |_, _, m, _| m.own_head().load(Relaxed)),
                heads
            );
            assert_eq!(s.on_tcp(&fd), FRAME + 100 + sent.get(), "{act} at {at}");
            drop(fd);
            s.whole(0);
        }
    }
    assert!(points >= 3, "{points}");
}

/// An end that slept while it asked finds its epoch used up.
#[test]
fn an_end_that_sleeps_while_it_asks() {
    let s = Story::asking(5);
    let fd = s.descriptor(1);
    s.carry();
    s.cut_and_noticed();
    s.keep();
    assert_eq!((s.mode(), s.word()), (mode::ASK, takeover::DONE));
    s.send(1, 10);
    let epoch = s.as_it_is(1, |e, _, _, _| e.app.tx.epoch.load(Relaxed));
    assert_eq!((s.mode(), epoch), (mode::TCP, Epoch::new(1)));
    assert_eq!(s.on_tcp(&fd), 5 + FRAME + 10);
    drop(fd);
    s.whole(0);
}

/// An application shuts down or is killed, with everything on its ring: its daemon waits
/// until all has arrived and is read, and the receiver is past what TCP held before, and then says
/// where the stream ends.
#[test]
fn an_end_is_announced_when_all_is_there() {
    for killed in [false, true] {
        let s = Story::up(10);
        let fd = s.descriptor(1);
        s.send(1, 1000);
        let taken = s.takeover_of(1);
        match killed {
            false => s.shutdown(1),
            true => s.kill(1),
        }
        s.keep();
        assert_eq!(taken(), takeover::TAKEN, "the prefix is unread");
        assert_eq!(s.on_tcp(&fd), 10);
        s.recv(0, 10);
        s.carry();
        s.recv_all(0);
        s.keep();
        assert_eq!(taken(), takeover::DONE);
        assert_eq!(s.on_tcp(&fd), 10 + FRAME);
        drop(fd);
        s.whole(0);
    }
}

/// The receiver rests with bytes unread: they go to TCP before the end, and it leaves its lane with all of them, without
/// anybody's help. If it reads on, the end is only announced.
#[test]
fn what_is_unread_at_the_end_goes_to_tcp() {
    for killed in [false, true] {
        for reads in [false, true] {
            let s = Story::up(0);
            let fd = s.descriptor(1);
            s.send(1, 1000);
            s.carry();
            s.recv(0, 300);
            s.carry();
            match killed {
                false => s.shutdown(1),
                true => s.kill(1),
            }
            if reads {
                s.carry();
                s.recv_all(0);
            }
            s.keep();
            let again = if reads { 0 } else { 700 };
            assert_eq!(s.on_tcp(&fd), FRAME + again);
            s.cut();
            if !reads {
                assert_eq!(s.revoke(0), Ok(Revoked::Clear));
                assert!(!s.engaged());
                s.recv_all(0);
            }
            assert_eq!(s.got(), 1000);
            drop(fd);
            s.whole(0);
        }
    }
}

/// The last close of a connection waits until what was sent has arrived at the other kernel, which may answer with a reset
/// otherwise; but not for ever.
#[test]
fn the_last_close_waits_for_what_was_sent() {
    for arrives in [true, false] {
        let s = Story::up(0);
        let taken = || s.rails_of(1).contains("Offered");
        s.send(1, 1000);
        s.carry();
        s.recv_all(0);
        s.carry();
        let outstanding = |is| s.w.nodes[1].machine.outstanding.store(is, Relaxed);
        outstanding(true);
        s.kill(1);
        s.keep();
        assert!(taken(), "{}", s.rails_of(1));
        if arrives {
            outstanding(false);
            s.keep();
        } else {
            s.serve_3s();
        }
        assert!(!taken(), "{}", s.rails_of(1));
        s.whole(0);
    }
}

/// A process is killed with bytes unread on its ring, of which its kernel does not know: what it has sent is told, then a
/// reset.
#[test]
fn killed_with_bytes_unread() {
    let s = Story::up(0);
    assert!(s.ready(1));
    s.carry();
    s.try_up(0);
    s.carry();
    s.look(0).unwrap();
    s.send(0, 200);
    s.send(1, 1000);
    s.carry();
    s.w.kill(1, 0);
    s.tell_death(1);
    s.keep();
    s.recv_all(0);
    assert_eq!(s.got(), 1000);
    s.broken();
}

/// The same, and the wires fail, or time is up, before everything has arrived.
#[test]
fn an_end_that_cannot_be_announced() {
    for killed in [false, true] {
        for cut in [false, true] {
            let s = Story::up(10);
            let fd = s.descriptor(1);
            s.send(1, 1500);
            s.carry();
            s.send(1, 1500);
            let taken = s.takeover_of(1);
            match killed {
                false => s.shutdown(1),
                true => s.kill(1),
            }
            s.keep();
            assert_eq!(taken(), takeover::TAKEN);
            if cut {
                s.cut_and_noticed();
                s.keep();
            } else {
                s.serve_3s();
            }
            assert_eq!(taken(), takeover::DONE);
            assert_eq!(s.on_tcp(&fd), 10 + FRAME + 3000);
            drop(fd);
            s.whole(0);
        }
    }
}

/// A process that is killed while it asks whether it may go up.
#[test]
fn killed_while_asking() {
    for prefix in [0, 10] {
        for (granted, cut) in [(true, false), (true, true), (false, false), (false, true)] {
            let s = Story::asking(prefix);
            let fd = s.descriptor(1);
            let taken = s.takeover_of(1);
            if !granted {
                assert_eq!(
                    s.revoke(0),
                    Ok(Revoked::Clear),
                    "it has not heard of the switch"
                );
            }
            s.kill(1);
            for _ in 0..30 {
                s.w.pass(MS);
                s.w.nodes[1].run(&mut Rng(s.w.now.get()));
                while s.w.help_once(1, &mut Rng(7)) {}
            }
            s.carry();
            if cut {
                s.cut_and_noticed();
            } else {
                s.recv_all(0);
                s.carry();
            }
            s.keep();
            let frame = if granted { FRAME } else { 0 };
            assert_eq!(taken() == takeover::DONE, granted);
            assert_eq!(s.on_tcp(&fd), prefix + frame);
            drop(fd);
            s.whole(0);
        }
    }
}

/// The peer has closed: the direction is over, and the end must not be shut out for ever.
#[test]
fn a_peer_that_has_closed() {
    for ends in [false, true] {
        let s = Story::up(0);
        let fd = s.descriptor(1);
        s.send(1, 10);
        s.carry();
        s.recv_all(0);
        s.carry();
        if ends {
            s.room(0);
            s.shutdown(1);
            s.keep();
        }
        // As a close does; its daemon keeps the socket until the end is said.
        s.with(0, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.close(m, port, lane::abi::TcpPos::default());
        });
        s.carry();
        tcp::mend();
        s.keep();
        let _ = s.look(1);
        assert_eq!(s.mode(), mode::TCP);
        assert!(s.state().phase() > tx::DOWNING, "a daemon would take it");
        let before = s.on_tcp(&fd);
        s.cut_and_noticed();
        s.keep();
        assert_eq!(s.on_tcp(&fd), before);
    }
}

/// A slot's last use ended in the middle of a way down. What it has left behind is not taken for the
/// next use's.
#[test]
fn a_slot_that_is_used_again() {
    let s = Story::up(0);
    s.send(1, 100);
    s.room(7);
    s.down(1).unwrap();
    let slot = s.as_it_is(1, |e, _, _, _| e.lane);
    for e in 0..2 {
        s.process(e).borrow_mut().abort(0);
    }
    (0..40).for_each(|_| s.keep());
    s.connect();
    assert_eq!(s.as_it_is(1, |e, _, _, _| e.lane), slot);
    assert_eq!(s.state().phase(), tx::NONE);
    let fd = s.descriptor(1);
    s.send(1, 50);
    s.keep();
    s.keep();
    assert_eq!(s.on_tcp(&fd), 50);
    let error = s.w.conns.borrow()[1].ends[1].borrow().app.error;
    assert_eq!(error, None);
    assert_eq!(s.recv(0, 100), 50);
}

/// An end has shut down, and its receiver leaves: its daemon answers with plain bytes, of which there are none, and the
/// end looks before its daemon's engine is told. The remote daemon must not hear of a frame that nobody has sent.
#[test]
fn an_end_that_is_quicker_than_its_daemon() {
    let s = Story::up(0);
    s.shutdown(1);
    s.keep();
    assert_eq!(
        s.word(),
        takeover::TAKEN,
        "it has not heard that the receiver has seen the switch"
    );
    assert_eq!(s.revoke(0), Ok(Revoked::Pending));
    for _ in 0..200 {
        s.w.pass(MS / 10);
        s.serve(0);
        s.w.nodes[1].run(&mut Rng(s.w.now.get()));
        s.w.help_once(1, &mut Rng(1));
        if s.word() == takeover::DONE {
            break;
        }
    }
    assert_eq!(s.word(), takeover::DONE);
    s.look(1).unwrap();
    assert_eq!(s.mode(), mode::TCP);
    s.carry();
    assert_eq!(s.revoke(0), Ok(Revoked::Clear));
    s.whole(0);
}

/// The daemon puts a ring back on TCP in the stead of an end that has shut down or is gone, and the receiver is ready anew
/// before the daemon's engine is told.
#[test]
fn a_receiver_that_is_quicker_than_a_daemon() {
    for killed in [false, true] {
        let s = Story::up(10);
        let fd = s.descriptor(1);
        s.send(1, 100);
        s.carry();
        match killed {
            false => s.shutdown(1),
            true => s.kill(1),
        }
        s.keep();
        assert_eq!(s.on_tcp(&fd), 10);
        s.recv(0, 1);
        s.want_down(0);
        for _ in 0..200 {
            s.w.pass(MS / 10);
            s.serve(0);
            s.w.nodes[1].run(&mut Rng(s.w.now.get()));
            s.w.help_once(1, &mut Rng(1));
            if s.on_tcp(&fd) > 10 {
                break;
            }
        }
        assert!(s.on_tcp(&fd) > 10);
        s.recv_all(0);
        assert!(s.ready(0));
        for _ in 0..20 {
            s.w.pass(MS / 20);
            s.serve(0);
        }
        drop(fd);
        s.whole(0);
    }
}

/// TCP is full, or the receiver has not read what came before its ring: the daemon looks now and then, and not all the
/// time.
#[test]
fn a_takeover_that_waits() {
    for full in [false, true] {
        let s = Story::up(10);
        s.send(1, 1000);
        s.carry();
        s.room(0);
        let taken = s.takeover_of(1);
        match full {
            true => s.cut_and_noticed(),
            false => s.shutdown(1),
        }
        s.keep();
        assert_ne!(taken(), takeover::DONE);
        let before = s.w.nodes[1].machine.helped();
        s.keep();
        let attempts = s.w.nodes[1].machine.helped() - before;
        assert!((6..=20).contains(&attempts), "{attempts} in 60 ms");
        s.whole(0);
    }
}
