//! A sending direction in the hands of the daemon beside its end (`half/tx/takeover.rs`): one story
//! for each way in which it gets there and comes back, at every byte where it can be interrupted.

#![cfg(not(loom))]

#[path = "lane_takeover/revoked.rs"]
mod revoked;
mod sim;

use lane::abi::{takeover, tx, Epoch, TakeoverPhase, TxWord};
use lane::half::tx::mode;
use lane::proto::frame::LEN;
use sim::{op, recv, send, Act, Op, World, ALL, LANE};
use std::sync::atomic::Ordering::Relaxed;

const CARRY: Act = Act::Carry { n: 1000 };
const KEEP: Act = Act::Keep { patient: true };
const AT_ONCE: Act = Act::Keep { patient: false };
const L: usize = LANE as usize;

/// TCP takes so much of what end 1 sends, and then nothing.
fn room(snd: usize) -> Act {
    Act::Buffers {
        snd,
        rcv: 1 << 16,
        piece: 1 << 16,
    }
}

/// End 1 sends to end 0. `prefix` bytes are on TCP, unread; end 1 asks to go up.
fn asking(prefix: usize) -> World {
    let mut w = World::with_takeover();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    op(&mut w, 0, Act::Ready);
    op(&mut w, 0, CARRY);
    if prefix > 0 {
        op(&mut w, 1, send(prefix));
        op(&mut w, 1, ALL);
    }
    op(&mut w, 1, Act::TryUp);
    assert_eq!(w.host[1].tx.mode.load(Relaxed), mode::ASK);
    w
}

/// The switch is answered.
fn answer(w: &mut World) {
    op(w, 1, CARRY);
    op(w, 0, CARRY);
}

/// The same, granted and noticed.
fn up() -> World {
    let mut w = asking(0);
    answer(&mut w);
    op(&mut w, 1, Act::Look);
    assert!(w.host[1].tx.is_up());
    w
}

/// What end 1 has sent arrives at end 0, as far as it goes on the ring.
fn arrive(w: &mut World) {
    op(w, 1, CARRY);
    op(w, 0, CARRY);
    op(w, 1, ALL);
    for _ in 0..4 {
        op(w, 0, recv(5000));
        op(w, 0, CARRY);
    }
}

fn seen(w: &World, what: &str) -> u64 {
    w.seen.borrow().get(what).copied().unwrap_or(0)
}

/// Bytes that end 1 has put on TCP.
fn on_tcp(w: &World) -> usize {
    w.net.borrow().pipe[1].accepted as usize
}

fn mode_of(w: &World) -> u32 {
    w.host[1].tx.mode.load(Relaxed)
}

/// Phase of the daemon's word about end 1.
fn word(w: &World) -> TakeoverPhase {
    let k = &w.keepers.as_ref().unwrap()[1];
    k.memory().peer_rx().takeover.load(Relaxed).phase()
}

/// End 0 has so much and no more, after everything has come to rest; and the end, if there is one.
fn whole(w: &World, bytes: u64, end: bool) {
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), bytes);
    assert_eq!(w.host[0].eof.get(), end);
    assert!(!w.host[0].failed.get() && !w.net.borrow().reset);
}

/// An end sleeps on bytes in its ring while the wire is cut: they come on TCP. When it wakes it goes
/// on there, and on a ring again in a later epoch.
#[test]
fn an_end_that_sleeps() {
    let mut w = up();
    op(&mut w, 1, send(1000));
    op(&mut w, 1, CARRY);
    op(&mut w, 0, recv(300));
    op(&mut w, 1, KEEP);
    assert_eq!(seen(&w, "taken"), 0, "while it is up nobody is late");
    op(&mut w, 1, Act::Cut);
    op(&mut w, 1, KEEP);
    assert_eq!((seen(&w, "taken"), seen(&w, "kept")), (1, 1));
    assert_eq!(on_tcp(&w), LEN + 1000, "its own cursor has not come back");
    op(&mut w, 1, ALL);
    for _ in 0..4 {
        op(&mut w, 0, recv(5000));
    }
    assert_eq!(w.host[0].got.get(), 1000);
    assert!(!w.host[0].rx.engaged());
    assert_eq!(mode_of(&w), mode::RING, "it sleeps yet");
    op(&mut w, 1, send(500));
    assert_eq!(mode_of(&w), mode::TCP);
    let state = w.control(1).tx[L].state.load(Relaxed);
    assert_eq!(state, TxWord::new(Epoch::new(1), tx::DOWN));
    assert_eq!(on_tcp(&w), LEN + 1500);
    assert_eq!(
        w.host[1].tx.tcp_pos.load(Relaxed).get() as usize,
        on_tcp(&w)
    );
    op(&mut w, 1, Act::Mend);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(5000));
    op(&mut w, 0, Act::Ready);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::TryUp);
    answer(&mut w);
    op(&mut w, 1, send(100));
    assert!(w.host[1].tx.is_up());
    assert_eq!(w.host[1].tx.epoch.load(Relaxed), Epoch::new(2));
    arrive(&mut w);
    assert_eq!(on_tcp(&w), LEN + 1500);
    whole(&w, 1600, false);
}

/// Takeover that is through, and an end that has not looked since: it is not taken again, whatever
/// its own words still say; neither in its sleep nor when it ends.
#[test]
fn a_takeover_that_is_through() {
    for ends in [None, Some(Act::ShutWr), Some(Act::Close), Some(Act::Kill)] {
        let mut w = up();
        op(&mut w, 1, send(1000));
        op(&mut w, 1, Act::Cut);
        for _ in 0..3 {
            op(&mut w, 1, KEEP);
        }
        assert_eq!(word(&w), takeover::DONE);
        let state = w.control(1).tx[L].state.load(Relaxed);
        assert_eq!(state.phase(), tx::UP, "the end has not looked");
        let end = ends.is_some();
        match ends {
            Some(act) => op(&mut w, 1, act),
            // The first that it does may be anything.
            None => op(&mut w, 1, Act::Move { log2: 13 }),
        }
        assert_eq!(seen(&w, "moved"), 0);
        for _ in 0..3 {
            op(&mut w, 1, KEEP);
        }
        assert_eq!(seen(&w, "taken"), 1);
        assert_eq!(on_tcp(&w), LEN + 1000);
        whole(&w, 1000, end);
    }
}

/// The daemon dies after any number of bytes of its frame and of what follows; its end wakes and
/// finishes.
#[test]
fn a_daemon_that_dies_within_a_frame() {
    for at in 0..=LEN + 100 {
        let mut w = up();
        op(&mut w, 1, send(100));
        op(&mut w, 1, room(at));
        op(&mut w, 1, Act::Cut);
        op(&mut w, 1, KEEP);
        assert_eq!(on_tcp(&w), at);
        op(&mut w, 1, Act::DaemonDies);
        op(&mut w, 1, send(10));
        let done = at == LEN + 100;
        assert_eq!(mode_of(&w) == mode::TCP, done, "{at}");
        w.settle([0, 10], false);
        assert_eq!(on_tcp(&w), LEN + 100 + w.host[1].sent.get() as usize - 100);
        whole(&w, w.host[1].sent.get(), false);
    }
}

/// The same when the daemon was saying where the stream ends.
#[test]
fn a_daemon_that_dies_within_the_end() {
    for at in 0..=LEN {
        let mut w = up();
        op(&mut w, 1, send(100));
        arrive(&mut w);
        op(&mut w, 1, room(at));
        op(&mut w, 1, Act::ShutWr);
        op(&mut w, 1, KEEP);
        assert_eq!(on_tcp(&w), at);
        let done = at == LEN;
        assert_eq!(seen(&w, "kept to the end") == 1, done);
        op(&mut w, 1, Act::DaemonDies);
        whole(&w, 100, true);
        assert_eq!(on_tcp(&w), LEN);
    }
}

/// The same, and the end is gone as well: an error, or everything and a clean end.
#[test]
fn both_die_within_a_frame() {
    for at in 0..=LEN + 100 {
        let mut w = up();
        op(&mut w, 1, send(100));
        op(&mut w, 1, room(at));
        op(&mut w, 1, Act::Kill);
        op(&mut w, 1, Act::Cut);
        op(&mut w, 1, KEEP);
        op(&mut w, 1, Act::DaemonDies);
        w.settle([0, 0], false);
        let all = at == LEN + 100;
        assert_eq!(w.host[0].eof.get(), all, "{at}");
        assert_eq!(w.host[0].failed.get(), !all, "{at}");
    }
}

/// An end was on its way down, and had put any number of bytes on TCP, when it fell asleep or was
/// killed: its daemon goes on there, and may die in turn.
#[test]
fn an_end_on_its_way_down() {
    let all = LEN + 100;
    for at in 0..=all {
        let start = || {
            let mut w = up();
            op(&mut w, 1, send(100));
            op(&mut w, 1, room(at));
            op(&mut w, 1, Act::Down);
            assert_eq!(on_tcp(&w), at);
            assert_eq!(mode_of(&w) == mode::DRAIN, at < all);
            w
        };
        let mut w = start();
        op(&mut w, 1, room(all));
        op(&mut w, 1, KEEP);
        assert_eq!(on_tcp(&w), all);
        assert_eq!(seen(&w, "taken"), u64::from(at < all));
        assert_eq!(
            seen(&w, "taken in the middle"),
            u64::from(0 < at && at < all)
        );
        op(&mut w, 1, Act::Look);
        assert_eq!(mode_of(&w), mode::TCP);
        whole(&w, 100, false);

        let mut w = start();
        op(&mut w, 1, Act::Kill);
        op(&mut w, 1, room(all));
        op(&mut w, 1, AT_ONCE); // with nothing on TCP yet it might wait for the ring to arrive
        assert_eq!(on_tcp(&w), all);
        whole(&w, 100, true);

        for more in (at..=all).step_by(7) {
            let mut w = start();
            op(&mut w, 1, room(more));
            op(&mut w, 1, KEEP);
            assert_eq!(on_tcp(&w), more);
            op(&mut w, 1, Act::DaemonDies);
            whole(&w, 100, false);
            assert_eq!(on_tcp(&w), all);
        }
    }
}

/// The same when a receiver that leaves has asked for plain bytes, without a frame.
#[test]
fn an_end_on_its_way_down_without_a_frame() {
    for at in 0..=100 {
        let start = || {
            let mut w = up();
            op(&mut w, 0, Act::Revoke);
            op(&mut w, 0, CARRY);
            op(&mut w, 1, room(at));
            // Published before it looks: what TCP does not take is the daemon's.
            op(&mut w, 1, send(100));
            assert_eq!(on_tcp(&w), at);
            assert_eq!(mode_of(&w) == mode::DRAIN, at < 100);
            w
        };
        // It sleeps; is killed; sleeps, and its daemon takes it and dies.
        for how in 0..3 {
            let mut w = start();
            match how {
                0 => op(&mut w, 1, Act::Cut),
                1 => op(&mut w, 1, Act::Kill),
                _ => {
                    op(&mut w, 1, Act::Cut);
                    op(&mut w, 1, room(at + (100 - at) / 2));
                    op(&mut w, 1, KEEP);
                    assert_eq!(
                        seen(&w, "taken in the middle"),
                        u64::from(0 < at && at < 100)
                    );
                    op(&mut w, 1, Act::DaemonDies);
                }
            }
            op(&mut w, 1, room(100));
            op(&mut w, 1, KEEP);
            op(&mut w, 1, Act::Look);
            assert_eq!(on_tcp(&w), 100, "no frame: {at} {how}");
            assert!(mode_of(&w) == mode::TCP || how == 1);
            w.settle([0, 0], false);
            if how == 2 {
                // The word that these bytes are plain died with the daemon.
                assert!(w.host[0].failed.get() || w.host[0].got.get() == 100);
            } else {
                whole(&w, 100, how == 1);
            }
        }
    }
}

/// The daemon answers a revocation with plain bytes in its end's stead, and dies; the end goes on
/// where it stopped, frame or no frame.
#[test]
fn a_daemon_that_dies_within_plain_bytes() {
    for at in 0..=100 {
        for framed in [false, true] {
            let mut w = up();
            op(&mut w, 1, send(100));
            op(&mut w, 1, room(0));
            if framed {
                op(&mut w, 1, Act::Down); // none of it is on TCP yet
            }
            op(&mut w, 0, Act::Revoke);
            op(&mut w, 0, CARRY);
            op(&mut w, 1, Act::Cut);
            op(&mut w, 1, room(at));
            op(&mut w, 1, KEEP);
            assert_eq!(seen(&w, "taken"), 1);
            assert_eq!(on_tcp(&w), at);
            op(&mut w, 1, Act::DaemonDies);
            op(&mut w, 1, room(200));
            op(&mut w, 1, Act::Look);
            op(&mut w, 1, Act::Look);
            assert_eq!(mode_of(&w), mode::TCP);
            if at > 0 {
                assert_eq!(on_tcp(&w), 100, "{at}");
            }
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
        let mut w = up();
        op(&mut w, 1, send(100));
        op(&mut w, 1, Act::Cut);
        w.run(&Op {
            end: 1,
            act: send(100),
            inner: vec![(at, 1, KEEP)],
        });
        points += seen(&w, "not taken");
        assert_eq!(seen(&w, "taken"), 0, "point {at}");
        assert!(
            matches!(word(&w), takeover::NONE | takeover::DONE),
            "it has given way"
        );
        assert_eq!(w.host[1].sent.get(), 200);
        whole(&w, 200, false);
    }
    assert!(points >= 5, "{points}");

    let mut points = 0;
    for at in 0..20 {
        for act in [send(50), Act::Down, Act::Look, Act::Move { log2: 13 }] {
            let mut w = up();
            op(&mut w, 1, send(100));
            op(&mut w, 1, Act::Cut);
            let before = w.control(1).heads[L].load(Relaxed);
            let probe = act.clone();
            w.run(&Op {
                end: 1,
                act: KEEP,
                inner: vec![(at, 1, probe)],
            });
            assert_eq!(seen(&w, "taken"), 1);
            assert_eq!(seen(&w, "moved"), 0);
            assert_eq!(w.control(1).heads[L].load(Relaxed), before);
            assert_eq!(on_tcp(&w), LEN + 100, "{act:?} at {at}");
            points += u64::from(act == send(50) && w.host[1].sent.get() == 100);
            whole(&w, 100, false);
        }
    }
    assert!(points >= 5, "{points}");
}

/// An end that slept while it asked finds its epoch used up.
#[test]
fn an_end_that_sleeps_while_it_asks() {
    let mut w = asking(5);
    answer(&mut w);
    op(&mut w, 1, Act::Cut);
    op(&mut w, 1, KEEP);
    assert_eq!((mode_of(&w), word(&w)), (mode::ASK, takeover::DONE));
    op(&mut w, 1, send(10));
    assert_eq!(
        (mode_of(&w), w.host[1].tx.epoch.load(Relaxed)),
        (mode::TCP, Epoch::new(1))
    );
    assert_eq!(on_tcp(&w), 5 + LEN + 10);
    whole(&w, 15, false);
}

/// An application shuts down, closes, or is killed, with everything on its ring: its daemon waits
/// until all has arrived and the receiver has read what TCP held before, and then says where the
/// stream ends.
#[test]
fn an_end_is_announced_when_all_is_there() {
    for act in [Act::ShutWr, Act::Close, Act::Kill] {
        let mut w = asking(10);
        answer(&mut w);
        op(&mut w, 1, send(1000));
        op(&mut w, 1, act);
        for _ in 0..3 {
            op(&mut w, 1, KEEP);
        }
        assert_eq!(word(&w), takeover::TAKEN, "not landed");
        op(&mut w, 1, CARRY);
        op(&mut w, 0, CARRY);
        op(&mut w, 1, KEEP);
        assert_eq!(word(&w), takeover::TAKEN, "the prefix is unread");
        op(&mut w, 0, recv(10));
        op(&mut w, 0, CARRY);
        assert_eq!(on_tcp(&w), 10);
        op(&mut w, 1, KEEP);
        assert_eq!(word(&w), takeover::DONE);
        assert_eq!(on_tcp(&w), 10 + LEN);
        op(&mut w, 1, ALL);
        whole(&w, 1010, true);
    }
}

/// The same, and the wire fails, or time is up, before everything has arrived.
#[test]
fn an_end_that_cannot_be_announced() {
    for act in [Act::ShutWr, Act::Close, Act::Kill] {
        for cut in [false, true] {
            let mut w = up();
            op(&mut w, 1, send(3000));
            op(&mut w, 1, Act::Carry { n: 2 });
            op(&mut w, 0, recv(1000));
            op(&mut w, 1, act.clone());
            op(&mut w, 1, KEEP);
            assert_eq!(word(&w), takeover::TAKEN);
            if cut {
                op(&mut w, 1, Act::Cut);
                op(&mut w, 1, KEEP);
            } else {
                op(&mut w, 1, AT_ONCE);
            }
            assert_eq!(word(&w), takeover::DONE);
            assert_eq!(on_tcp(&w), LEN + 3000);
            whole(&w, 3000, true);
        }
    }
}

/// A process that is killed while it asks whether it may go up.
#[test]
fn killed_while_asking() {
    for prefix in [0, 10] {
        for (granted, cut) in [(true, false), (true, true), (false, false), (false, true)] {
            let mut w = asking(prefix);
            op(&mut w, 1, Act::Kill);
            op(&mut w, 1, KEEP);
            assert_eq!(seen(&w, "not taken"), 1, "nobody knows yet");
            assert_eq!(word(&w), takeover::NONE);
            if !granted {
                op(&mut w, 0, Act::Revoke);
                assert!(!w.host[0].rx.engaged(), "it has not heard of the switch");
            }
            answer(&mut w);
            if cut {
                op(&mut w, 1, Act::Cut);
            } else {
                op(&mut w, 0, recv(100));
                op(&mut w, 0, CARRY);
            }
            op(&mut w, 1, KEEP);
            assert_eq!(seen(&w, "taken"), u64::from(granted));
            assert_eq!(on_tcp(&w), prefix + if granted { LEN } else { 0 });
            whole(&w, prefix as u64, true);
        }
    }
}

/// An end sleeps without having seen that it may go up. Its daemon begins a frame, and dies: what is
/// missing of it belongs to the new epoch.
#[test]
fn a_daemon_that_dies_beside_an_end_that_asks() {
    for at in 0..=LEN {
        let mut w = asking(5);
        answer(&mut w);
        op(&mut w, 1, Act::Cut);
        op(&mut w, 1, room(at));
        op(&mut w, 1, KEEP);
        assert_eq!(mode_of(&w), mode::ASK);
        assert_eq!(on_tcp(&w), 5 + at);
        op(&mut w, 1, Act::DaemonDies);
        w.settle([0, 100], false);
        assert_eq!(on_tcp(&w), 5 + LEN + 100);
        whole(&w, 105, false);
    }
}

/// The peer has closed: the direction is over, and the end must not be shut out for ever.
#[test]
fn a_peer_that_has_closed() {
    for ends in [false, true] {
        let mut w = up();
        op(&mut w, 1, send(10));
        arrive(&mut w);
        if ends {
            op(&mut w, 1, send(10));
            op(&mut w, 1, Act::ShutWr);
            op(&mut w, 1, KEEP);
            assert_eq!(word(&w), takeover::TAKEN);
        }
        op(&mut w, 0, Act::Close);
        op(&mut w, 0, CARRY);
        op(&mut w, 1, KEEP);
        op(&mut w, 1, Act::Look);
        assert_eq!(mode_of(&w), mode::TCP);
        let state = w.control(1).tx[L].state.load(Relaxed);
        assert!(state.phase() > tx::DOWNING, "a daemon would take it");
        op(&mut w, 1, Act::Cut);
        op(&mut w, 1, KEEP);
        assert_eq!(seen(&w, "taken"), u64::from(ends));
        assert_eq!(on_tcp(&w), 0);
    }
}

/// The daemon had shown a switch that the receiver has not noticed, with bytes before it on TCP; then
/// it died. They are read, and what comes after them.
#[test]
fn a_daemon_that_dies_beside_a_receiver() {
    for prefix in [0, 10] {
        let mut w = asking(prefix);
        answer(&mut w);
        op(&mut w, 1, send(100));
        op(&mut w, 0, Act::DaemonDies);
        op(&mut w, 0, recv(3));
        assert!(w.host[0].lost.get() && w.host[0].rx.engaged());
        whole(&w, prefix as u64 + 100, false);
    }
}

/// A slot's last use ended in the middle of a way down. What it has left behind is not taken for the
/// next use's.
#[test]
fn a_slot_that_is_used_again() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 1, room(7));
    op(&mut w, 1, Act::Down);
    op(&mut w, 0, Act::Reuse { gap: 0 });
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    let state = w.control(1).tx[L].state.load(Relaxed);
    assert_eq!(state, TxWord::new(Epoch::new(1), tx::NONE));
    op(&mut w, 1, send(50));
    for _ in 0..3 {
        op(&mut w, 1, KEEP);
    }
    assert_eq!(seen(&w, "taken"), 0);
    assert_eq!(on_tcp(&w), 50);
    whole(&w, 50, false);
}
