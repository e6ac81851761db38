//! When the caller may sleep, and what wakes it.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, RxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Config;
use underpass_rdma::sim::Faults;
use underpass_rdma::wire::Body;

fn up() -> Side {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.up();
    s
}

/// Arms until nothing is news; returns the links that were new.
fn arm(s: &mut Side) -> (Vec<u32>, bool) {
    let mut fresh = Vec::new();
    let news = s.b.pair.arm(|no, _| fresh.push(no));
    (fresh, news)
}

/// A queue is shown once, and armed once until it has notified.
#[test]
fn arms() {
    let mut s = up();
    assert_eq!(arm(&mut s), (vec![s.no], true));
    assert_eq!(arm(&mut s), (vec![], false));
    s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    s.b.settle();
    assert_eq!(s.b.world.notified(0).len(), 1);
    s.b.pair.notified(s.no, false);
    assert_eq!(s.b.world.notified(0).len(), 0);
    assert_eq!(arm(&mut s), (vec![], true));
    s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    s.b.settle();
    s.b.pair.notified(s.no, true);
    assert_eq!(arm(&mut s), (vec![], false), "it was armed again at once");
    s.b.pair.notified(99, true);
}

/// Completions of what was sent notify only if something waits for room.
#[test]
fn notified_of_requests() {
    let mut s = up();
    arm(&mut s);
    s.put(RING, 0, 10);
    assert_eq!(s.b.world.notified(0).len(), 0);
    s.b.world.set_wire(0, false);
    // Bytes for which there is room, but the lane's next ring waits for its requests to be done.
    s.b.app().heads[0].store(c(400), Relaxed);
    s.b.publish();
    s.sender(e(1), tx::RESUMED);
    s.peer_ready(e(2));
    let (_, news) = arm(&mut s);
    assert!(!news);
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    s.peer_ready(e(2));
    s.b.pair.notified(s.no, false);
    s.b.world.set_wire(0, false);
    s.ask(e(2), loc(4, 12), 400);
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    assert_eq!(
        s.received().last(),
        Some(&Body::Ring {
            moves: 2,
            log2: 12,
            from: c(400)
        })
    );
}

/// A lane waits because so many bytes are in flight: whoever sleeps is woken when there is room again, and not only by the
/// next look at all lanes.
#[test]
fn woken_for_room() {
    let config = Config {
        window: 2000,
        ..quiet(true)
    };
    let mut s = Side::new(Bench::new(config, 1));
    s.up();
    arm(&mut s);
    s.b.world.set_wire(0, false);
    s.put(RING, 0, 2000);
    assert_eq!(woken_when_mended(&mut s), (true, true));
}

/// The same of a lane whose next ring waits for its own requests to be done, also if something else could be said.
#[test]
fn woken_for_a_ring() {
    for says in [false, true] {
        let mut s = up();
        s.sender(e(1), tx::RESUMED);
        s.peer_ready(e(2));
        arm(&mut s);
        s.b.world.set_wire(0, false);
        s.reader(e(1), rx::READY);
        assert_eq!(arm(&mut s), (vec![], false), "nothing waits yet");
        if says {
            let word = RxWord::new(e(1), rx::READY | rx::WANT_DOWN);
            s.b.app().rx[0].word.store(word, Relaxed);
        }
        s.ask(e(2), loc(4, 12), 0);
        assert_eq!(woken_when_mended(&mut s), (true, true), "says {says}");
    }
}

/// Whether the caller has to arm once more before it sleeps, and is woken when the wire is mended.
fn woken_when_mended(s: &mut Side) -> (bool, bool) {
    let (_, news) = arm(s);
    assert_eq!(s.b.world.notified(0), []);
    s.b.world.set_wire(0, true);
    s.b.now += MS;
    s.b.world.run_until(s.b.now);
    (news, !s.b.world.notified(0).is_empty())
}

/// A handshake is looked at every two milliseconds, and otherwise all lanes every 20, at most.
#[test]
fn timers() {
    let iwarp = Faults {
        iwarp: 1,
        ..Faults::default()
    };
    let mut b = Bench::with(quiet(true), 1, iwarp);
    let offer = b.offered();
    let next = |b: &Bench, quiet| b.pair.next_timer_ns(quiet) - b.now;
    assert!(next(&b, 0) > 19 * MS && next(&b, 0) <= 20 * MS);
    assert_eq!(next(&b, 7 * MS), next(&b, 0) + 7 * MS);
    let end = b.peer.end(offer.link, 0);
    b.says(underpass_rdma::engine::Control::QpAnswer(end));
    assert_eq!(next(&b, 7 * MS), 2 * MS);
}

/// Nothing is left for another poll, unless something was told meanwhile.
#[test]
fn unfinished() {
    let mut s = up();
    assert!(!s.b.pair.unfinished());
    s.b.pair.finish(s.id);
    assert!(s.b.pair.unfinished(), "a lane waits for its turn");
    s.b.settle();
    assert!(!s.b.pair.unfinished());
    s.b.pair
        .control(underpass_rdma::engine::Control::CloseAck { token: 99 });
    assert!(s.b.pair.unfinished(), "a message");
    s.b.settle();
    s.b.pair.set_rail(s.b.rails[0], true);
    assert!(s.b.pair.unfinished(), "links");
    s.b.settle();
    assert!(!s.b.pair.unfinished());
    // More completions than one poll takes.
    for _ in 0..70 {
        s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    }
    s.b.now += MS;
    s.b.world.run_until(s.b.now);
    assert!(s.b.pair.poll(s.b.now, &mut s.b.host));
    assert!(s.b.pair.unfinished());
    s.b.pair.poll(s.b.now, &mut s.b.host);
    s.b.settle();
    assert!(!s.b.pair.unfinished());
}

/// A poll says whether there was anything to do.
#[test]
fn polls() {
    let mut s = up();
    let poll = |s: &mut Side| {
        s.b.now += 1_000;
        s.b.world.run_until(s.b.now);
        s.b.pair.poll(s.b.now, &mut s.b.host)
    };
    assert!(!poll(&mut s));
    s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    assert!(poll(&mut s), "a message came");
    assert!(!poll(&mut s));
    let token = 99;
    s.b.pair
        .control(underpass_rdma::engine::Control::CloseAck { token });
    assert!(poll(&mut s), "over the channel");
    assert!(!poll(&mut s));
    s.b.app().seq[0].0.fetch_add(1, Relaxed);
    assert!(poll(&mut s), "the application stored something");
    assert!(!poll(&mut s));
    s.b.app().seq[5].0.fetch_add(1, Relaxed);
    assert!(!poll(&mut s), "about no lane");
}

/// The application's doorbell is rung if it sleeps and its words were stored, and not otherwise; the daemon counts as
/// asleep in between.
#[test]
fn doorbells() {
    let mut s = up();
    s.b.host.rung.clear();
    s.peer_ready(e(1));
    s.says.cursor = c(0);
    s.b.app().sleepers.0.store(1, Relaxed);
    s.snapshot();
    assert_eq!(s.b.host.rung, [], "nothing is new");
    s.says.rx_flags = rx::READY | rx::WANT_DOWN;
    s.snapshot();
    assert_eq!(s.b.host.rung, [s.b.clients[0].id]);
    s.b.app().sleepers.0.store(0, Relaxed);
    s.says.rx_flags = rx::READY;
    s.snapshot();
    assert_eq!(s.b.host.rung.len(), 1);
    let asleep = |s: &Side| s.b.proxy().sleepers.0.load(Relaxed);
    s.b.pair.fall_asleep();
    assert_eq!(asleep(&s), 1);
    s.b.pair.wake_up();
    assert_eq!(asleep(&s), 0);
}

/// While the application reads, its cursor is looked at in turns, without being told.
#[test]
fn a_reader_at_work() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.incoming();
    s.says.head = c(100);
    s.snapshot();
    s.received();
    s.b.app().cursors[0].store(c(60), Relaxed);
    s.snapshot();
    s.b.app().cursors[0].store(c(100), Relaxed);
    s.b.settle();
    assert_eq!(s.received(), [], "it does not look without reason");
    s.b.publish();
    assert_eq!(s.last_snapshot().expect("a snapshot").cursor, c(100));
    s.b.publish();
    assert_eq!(s.received(), []);
}

/// What was sent a while ago does not make completions notify, unless a device tells nothing by them.
#[test]
fn requests_in_flight() {
    let mut s = up();
    s.b.world.set_wire(0, false);
    s.put(RING, 0, 400);
    for _ in 0..2 {
        s.b.pair.set_rail(s.b.rails[0], true);
        s.b.settle();
    }
    arm(&mut s);
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    assert_eq!(s.received().len(), 1);
    assert_eq!(s.b.world.notified(0), []);
}
