//! One switch after another, and moves from ring to ring.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, Cursor, Epoch, RxWord, SpaceWord, TcpPos};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::{Event, Fault};
use underpass_rdma::verbs::Memory;
use underpass_rdma::wire::{flag, Body};

fn fresh() -> Side {
    Side::new(Bench::new(quiet(true), 1))
}

/// A direction that was up, came down, and asks again at `start` on the same ring.
fn again(start: u64) -> Side {
    let mut s = fresh();
    s.up();
    s.put(RING, 0, 100);
    s.says.cursor = c(100);
    s.snapshot();
    let (epoch, head) = (e(1), c(100));
    s.say(Body::Landed { epoch, head });
    s.b.pair.finish(s.id);
    s.sender(e(1), tx::RESUMED);
    s.peer_ready(e(2));
    s.b.happened();
    s.received();
    s.b.app().heads[0].store(c(start), Relaxed);
    s.b.app().tx[0].up_start.store(c(start), Relaxed);
    s.sender(e(2), tx::UP);
    s
}

/// The second time begins where it is asked for: nothing of the first one is left.
#[test]
fn sent_again() {
    let mut s = again(300);
    let said = s.received();
    assert!(
        matches!(said[..], [Body::Switch { start, attempt: 2, .. }] if start == c(300)),
        "{said:?}"
    );
    s.answer_switch(e(2), 2, true);
    assert_eq!(s.shown(), RxWord::new(e(2), rx::READY | rx::ACCEPTED));
    assert_eq!(s.b.proxy().cursors[0].load(Relaxed), c(300));
    let said = s
        .last_snapshot()
        .expect("it is to be told when all has landed");
    assert_eq!((said.head, said.flags), (c(300), flag::WANT_LANDED));
    assert_eq!(s.b.happened(), []);
    s.put(RING, 300, 310);
    let (epoch, head, lane) = (e(2), c(310), s.id);
    s.say(Body::Landed { epoch, head });
    assert_eq!(s.b.happened(), [Event::Flushed { lane, head }]);
    s.says.cursor = c(300);
    s.snapshot();
    assert_eq!(s.fault(), None);
    s.says.cursor = c(299);
    s.snapshot();
    assert_eq!(s.fault(), Some(Fault::Peer("an impossible cursor")));
}

/// A direction that the daemon took down goes up again: then its end says how it comes down.
#[test]
fn after_a_takeover() {
    let mut s = fresh();
    s.up();
    s.b.pair.take_down(s.id, e(1));
    s.b.pair.is_down(s.id, e(1), tx::RESUMED);
    s.sender(e(1), tx::RESUMED);
    s.peer_ready(e(2));
    s.ask(e(2), RING, 0);
    s.answer_switch(e(2), 2, true);
    s.received();
    s.sender(e(2), tx::DOWNING);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.tx_epoch, said.tx_phase), (e(2), tx::DOWNING));
}

/// The application has left an epoch, and the peer's reader is ready anew, before anybody has looked.
#[test]
fn left_before_a_look() {
    let mut s = fresh();
    s.up();
    let word = lane::abi::TxWord::new(e(1), tx::DOWN);
    s.b.app().tx[0].state.store(word, Relaxed);
    s.peer_ready(e(2));
    assert_eq!(s.fault(), None);
    assert_eq!(s.shown(), RxWord::new(e(2), rx::READY));
    // The same, and it has asked anew.
    let mut s = fresh();
    s.up();
    s.sender(e(2), tx::UP);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.tx_epoch, said.tx_phase), (e(1), tx::DOWN));
}

fn switch(epoch: u32, start: u64) -> Body {
    Body::Switch {
        epoch: e(epoch),
        attempt: epoch,
        tcp_pos: TcpPos::new(0),
        start: c(start),
    }
}

/// The reader takes a second switch: positions and phases begin anew, and whether the sender waits is said anew.
#[test]
fn received_again() {
    let mut s = fresh();
    s.incoming();
    s.says.head = c(100);
    s.says.flags = flag::WANT_SPACE;
    s.snapshot();
    s.read_to(100);
    s.says.tx_phase = tx::BROKEN;
    s.snapshot();
    s.reader(e(2), rx::READY);
    // The sender is still in the former epoch.
    s.snapshot();
    s.b.app().cursors[0].store(c(9999), Relaxed);
    s.b.publish();
    assert_eq!(s.fault(), None);
    s.received();
    s.b.app().cursors[0].store(c(100), Relaxed);
    s.say(switch(2, 300));
    s.say(switch(2, 300));
    (s.says.tx_epoch, s.says.tx_phase) = (e(2), tx::UP);
    (s.says.head, s.says.flags) = (c(303), 0);
    s.snapshot_with(b"abc");
    assert_eq!(s.fault(), None);
    assert_eq!(s.shown_sender().phase(), tx::UP);
    assert_eq!(s.b.proxy().heads[0].load(Relaxed), c(303));
    let waits = s.b.proxy().tx[0].want_space.load(Relaxed);
    assert_eq!(waits, SpaceWord::new(false));
    s.read_to(300);
    s.read_to(303);
    assert_eq!(s.last_snapshot().expect("a snapshot").cursor, c(303));
    s.says.head = c(302);
    s.snapshot();
    assert_eq!(s.fault(), Some(Fault::Peer("a head that goes back")));
}

/// A slot was used before, and its reader's word is far behind: everything is shown.
#[test]
fn a_stale_cursor_behind() {
    let mut s = fresh();
    s.b.app().cursors[0].store(c(50), Relaxed);
    s.reader(e(1), rx::READY);
    let (moves, log2, from) = (1, 12, c(0));
    s.say(Body::Ring { moves, log2, from });
    s.say(switch(1, 100));
    (s.says.tx_epoch, s.says.tx_phase, s.says.moves) = (e(1), tx::UP, 1);
    s.says.head = c(110);
    s.snapshot_with(b"0123456789");
    assert_eq!(s.b.proxy().heads[0].load(Relaxed), c(110));
}

/// Heads on either of two rings: the first one ends where the second one begins.
#[test]
fn heads_on_two_rings() {
    for (moves, head, wanted) in [
        (1, 100, None),
        (1, 101, Some("a head beyond the ring")),
        (2, 100, None),
        (2, 99, Some("a head beyond the ring")),
        (2, 101, None),
        (2, 4196, None),
        (2, 4197, Some("a head beyond the ring")),
    ] {
        let mut s = fresh();
        s.incoming();
        s.says.head = c(50);
        s.snapshot();
        s.read_to(50);
        s.say(Body::Ring {
            moves: 2,
            log2: 12,
            from: c(100),
        });
        (s.says.moves, s.says.head) = (moves, c(head));
        s.snapshot();
        assert_eq!(s.fault(), wanted.map(Fault::Peer), "{moves} {head}");
    }
}

/// A ring for the next epoch, before anybody has looked at the reader, which has left this one.
#[test]
fn a_ring_for_the_next_epoch() {
    let mut s = fresh();
    s.incoming();
    s.says.head = c(100);
    s.snapshot();
    let word = RxWord::new(e(2), rx::READY);
    s.b.app().rx[0].word.store(word, Relaxed);
    s.say(Body::Ring {
        moves: 2,
        log2: 12,
        from: c(50),
    });
    assert_eq!(s.fault(), None);
}

/// Bytes behind a snapshot on both sides of the ring's end, in either direction.
#[test]
fn bytes_around_the_end() {
    let mut s = fresh();
    s.reader(e(1), rx::READY);
    let (moves, log2, from) = (1, 12, c(4090));
    s.say(Body::Ring { moves, log2, from });
    s.say(switch(1, 4090));
    (s.says.tx_epoch, s.says.tx_phase, s.says.moves) = (e(1), tx::UP, 1);
    s.says.head = c(4100);
    s.snapshot_with(b"0123456789");
    let mut got = [[0; 6], [0; 6]];
    let own = &s.b.clients[0].own;
    assert!(own.read(4090, &mut got[0]) && own.read(0, &mut got[1]));
    assert_eq!(got, [*b"012345", *b"6789\0\0"]);
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 4090);
    s.answer_ring(1, 0);
    s.answer_switch(e(1), 1, true);
    s.received();
    s.put(RING, 4090, 4100);
    let said = s.b.peer.received(s.no);
    let all: Vec<u8> = (4090..4100).map(|i| i as u8).collect();
    assert_eq!(said.last().map(|m| &m.1), Some(&all));
}

/// The application has moved twice since the last look. The ring between is told if it holds bytes.
#[test]
fn two_moves_at_once() {
    for from in [100, 150] {
        let mut s = fresh();
        s.up();
        s.put(RING, 0, 100);
        s.says.cursor = c(100);
        s.snapshot();
        s.received();
        s.ring(2, loc(8, 12), 100);
        s.ring(3, loc(16, 13), from);
        s.put(loc(16, 13), from, 200);
        let first = if from == 100 { 13 } else { 12 };
        let said = s.received();
        let (moves, log2) = (2, first);
        assert_eq!(
            said,
            [Body::Ring {
                moves,
                log2,
                from: c(100)
            }]
        );
        s.answer_ring(2, 65_536);
        if from == 150 {
            let (moves, log2, from) = (3, 13, c(150));
            let ring = Body::Ring { moves, log2, from };
            assert!(s.received().contains(&ring));
            s.answer_ring(3, 131_072);
        }
        assert_eq!(s.last_snapshot().expect("a snapshot").head, c(200));
        assert_eq!(s.fault(), None);
    }
}

/// Few bytes, on both sides of a move.
#[test]
fn bytes_around_a_move() {
    let mut s = fresh();
    s.up();
    s.put(RING, 0, 1000);
    s.says.cursor = c(1000);
    s.snapshot();
    s.received();
    for i in 1000..1050 {
        assert!(s.b.clients[0].chunk.write(i, &[i as u8]));
    }
    s.b.app().heads[0].store(c(1050), Relaxed);
    s.b.world.set_wire(0, false);
    s.ring(2, loc(8, 12), 1050);
    s.put(loc(8, 12), 1050, 1100);
    s.b.world.set_wire(0, true);
    s.b.later(250_000);
    s.answer_ring(2, 65_536);
    s.b.later(250_000);
    let all: Vec<u8> = (1000..1100).map(|i| i as u8).collect();
    let heads: Vec<Cursor> =
        s.b.peer
            .received(s.no)
            .iter()
            .filter_map(|(m, data)| match m.body {
                Body::Cdc(c) => {
                    let at = c.head.get() - data.len() as u64;
                    assert_eq!(data[..], all[at as usize - 1000..][..data.len()]);
                    Some(c.head)
                }
                _ => None,
            })
            .collect();
    assert_eq!(heads.last(), Some(&c(1100)));
}

/// There is no memory for another ring: the application is asked to come down, and the peer asked again later.
#[test]
fn no_place_for_another_ring() {
    let mut s = fresh();
    s.up();
    s.put(RING, 0, 100);
    s.says.cursor = c(100);
    s.snapshot();
    s.ring(2, loc(8, 12), 100);
    s.put(loc(8, 12), 100, 400);
    s.received();
    s.b.happened();
    let (moves, place) = (2, None);
    s.say(Body::RingReply { moves, place });
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::WANT_DOWN)
    );
    assert_eq!((s.b.happened(), s.received()), (vec![Event::Asked], vec![]));
    s.b.later(20_000_000);
    let (log2, from) = (12, c(100));
    assert_eq!(s.received(), [Body::Ring { moves, log2, from }]);
}

/// More than half of the ring is unread: the peer is asked to tell its reader's cursor.
#[test]
fn space() {
    for (head, flags) in [(2048, 0), (2049, flag::WANT_SPACE)] {
        let mut s = fresh();
        s.up();
        s.put(RING, 0, head);
        assert_eq!(s.last_snapshot().expect("a snapshot").flags, flags);
    }
}

/// A place is inside the peer's region, to the last byte; elsewhere nothing is written.
#[test]
fn places() {
    let end = crate::peer::BYTES as u64 - 4096;
    for (offset, inside) in [(end, true), (end + 1, false)] {
        let mut s = fresh();
        s.peer_ready(e(1));
        s.ask(e(1), RING, 0);
        s.answer_ring(1, offset);
        s.answer_switch(e(1), 1, true);
        s.received();
        s.put(RING, 0, 1000);
        assert_eq!(s.last_snapshot().is_some(), inside);
    }
}

/// A slot that was used more often than half of all epochs reach: its sender goes up as any other.
#[test]
fn a_slot_that_was_used_often() {
    for uses in [3, 32_767, 32_768, 65_535] {
        let mut s = fresh();
        let base = Epoch::base(uses);
        s.id = s.b.pair.open(s.b.clients[0].id, 0).expect("a lane");
        s.b.pair.connect(s.id, TOKEN, base);
        s.peer_ready(base.next());
        s.ask(base.next(), RING, 0);
        s.answer_ring(1, 0);
        s.answer_switch(base.next(), 1, true);
        assert!(s.b.pair.is_up(s.id), "{uses}");
    }
}
