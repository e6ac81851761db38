//! The receiving direction: what the application's reader says, what the peer's sender says, and what follows.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, Cursor, Epoch, Loc, RxFlags, TcpPos, TxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Fault;
use underpass_rdma::verbs::Memory;
use underpass_rdma::wire::{flag, Body};

fn fresh() -> Side {
    Side::new(Bench::new(config(true), 1))
}

fn up() -> Side {
    let mut s = fresh();
    s.incoming();
    s
}

fn head(s: &Side) -> Cursor {
    s.b.proxy().heads[0].load(Relaxed)
}

fn received(s: &Side, at: usize, n: usize) -> Vec<u8> {
    let mut all = vec![0; n];
    assert!(s.b.clients[0].own.read(at, &mut all));
    all
}

/// Bytes behind a snapshot are put into the ring, and shown; the reader's cursor is told when it has everything.
#[test]
fn bytes() {
    let mut s = up();
    assert_eq!(s.shown_sender(), TxWord::new(e(1), tx::UP));
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    assert_eq!((head(&s), received(&s, 0, 3)), (c(3), b"abc".to_vec()));
    s.read_to(2);
    assert_eq!(s.received(), []);
    s.read_to(3);
    assert!(matches!(s.received()[..], [Body::Cdc(said)] if said.cursor == c(3)));
    assert_eq!(s.fault(), None);
}

/// A sender that waits for space is told of every byte, another one of a quarter of the ring.
#[test]
fn space() {
    let mut s = up();
    s.says.head = c(4096);
    s.snapshot();
    assert!(!s.b.proxy().tx[0].want_space.load(Relaxed).waits());
    s.read_to(1023);
    assert_eq!(s.received(), []);
    s.read_to(1024);
    assert_eq!(s.last_snapshot().expect("a snapshot").cursor, c(1024));
    s.read_to(1025);
    assert_eq!(s.received(), []);
    s.says.flags = flag::WANT_SPACE;
    s.snapshot();
    assert!(s.b.proxy().tx[0].want_space.load(Relaxed).waits());
    s.received();
    s.read_to(1026);
    assert_eq!(s.last_snapshot().expect("a snapshot").cursor, c(1026));
    s.says.flags = 0;
    s.snapshot();
    assert!(!s.b.proxy().tx[0].want_space.load(Relaxed).waits());
}

/// What no application says of its reader.
#[test]
fn impossible_readers() {
    let all: [Case; 8] = [
        (|s| s.read_to(10), None),
        (|s| s.read_to(11), Some("an impossible cursor")),
        (|s| s.read_to(4), Some("an impossible cursor")),
        (|s| s.reader(e(2), rx::READY), None),
        (|s| s.reader(e(65_535), rx::READY), None),
        (
            |s| s.reader(e(65_536), rx::READY),
            Some("a readiness of another use of the lane"),
        ),
        (
            |s| s.reader(e(0), rx::READY),
            Some("a readiness of another use of the lane"),
        ),
        (
            |s| {
                s.reader(e(3), rx::READY);
                s.reader(e(2), rx::READY);
            },
            Some("a readiness that goes back"),
        ),
    ];
    for (says, wanted) in all {
        let mut s = up();
        s.says.head = c(10);
        s.snapshot_with(b"0123456789");
        s.read_to(5);
        assert_eq!(s.fault(), None);
        says(&mut s);
        assert_eq!(s.fault(), wanted.map(Fault::App));
    }
}

/// What no peer says of its sender.
#[test]
fn impossible_senders() {
    let all: [Case; 11] = [
        (|s| s.says.head = c(4096), None),
        (|s| s.says.head = c(4097), Some("a head beyond the ring")),
        (|s| s.says.head = c(9), Some("a head that goes back")),
        (
            |s| (s.says.head, s.says.flags) = (c(9), flag::VALIDATE),
            None,
        ),
        (
            |s| s.says.tx_phase = tx::NONE,
            Some("a sender that goes back"),
        ),
        (|s| s.says.tx_phase = tx::DOWNING, None),
        (
            |s| s.says.tx_epoch = e(2),
            Some("a sender in an epoch that was not agreed"),
        ),
        (
            |s| s.says.tx_epoch = e(0),
            Some("a sender in an epoch that was not agreed"),
        ),
        (|s| s.says.tx_epoch = Epoch::NONE, None),
        (
            |s| (s.says.head, s.says.moves) = (c(11), 2),
            Some("a head on a ring that is not there"),
        ),
        (|s| (s.says.head, s.says.moves) = (c(10), 2), None),
    ];
    for (says, wanted) in all {
        let mut s = up();
        s.says.head = c(10);
        s.snapshot_with(b"0123456789");
        assert_eq!(s.fault(), None);
        says(&mut s);
        s.snapshot();
        assert_eq!(s.fault(), wanted.map(Fault::Peer));
    }
}

/// A phase goes forwards, and is shown.
#[test]
fn phases() {
    let mut s = up();
    for phase in [tx::UP, tx::DOWNING, tx::DOWNING, tx::BROKEN] {
        s.says.tx_phase = phase;
        s.snapshot();
        assert_eq!(s.shown_sender(), TxWord::new(e(1), phase));
    }
    s.says.tx_phase = tx::RESUMED;
    s.snapshot();
    assert_eq!(s.fault(), Some(Fault::Peer("a sender that goes back")));
}

fn switch(epoch: u32, attempt: u32, start: u64) -> Body {
    Body::Switch {
        epoch: e(epoch),
        attempt,
        tcp_pos: TcpPos::new(77),
        start: c(start),
    }
}

fn reply(epoch: u32, attempt: u32, ok: bool) -> Body {
    let epoch = e(epoch);
    Body::SwitchReply { epoch, attempt, ok }
}

/// A switch stands if the reader is ready in its epoch, and says nothing else but that it wants to go down.
#[test]
fn switches() {
    for (epoch, flags, ok) in [
        (1, rx::READY, true),
        (1, rx::READY | rx::WANT_DOWN, true),
        (1, rx::READY | rx::REVOKED, false),
        (1, rx::NONE, false),
        (2, rx::READY, false),
    ] {
        let mut s = fresh();
        s.reader(e(epoch), flags);
        let (moves, log2, from) = (1, 12, c(0));
        s.say(Body::Ring { moves, log2, from });
        s.received();
        s.say(switch(1, 1, 5));
        assert_eq!(s.received(), [reply(1, 1, ok)]);
        let words = &s.b.proxy().tx[0];
        assert_eq!(words.state.load(Relaxed).phase() == tx::UP, ok);
        if ok {
            let shown = (words.up_start.load(Relaxed), words.up_tcp_pos.load(Relaxed));
            assert_eq!((shown, head(&s)), ((c(5), TcpPos::new(77)), c(5)));
        }
        // Asked again: the first answer may be lost. What came late is not answered.
        s.say(switch(1, 1, 5));
        assert_eq!(s.received(), [reply(1, 1, ok)]);
        s.say(switch(1, 0, 5));
        assert_eq!(s.received(), []);
        assert_eq!(s.fault(), None);
        s.say(switch(1, 2, 5));
        match ok {
            true => {
                let wanted = Fault::Peer("a switch that was made already");
                assert_eq!(s.fault(), Some(wanted));
            }
            false => assert_eq!(s.received(), [reply(1, 2, false)]),
        }
    }
}

#[test]
fn impossible_switches() {
    let max = Cursor::START_MAX.get();
    for (ring, says, wanted) in [
        (false, switch(1, 1, 100), Some("a switch without a ring")),
        (true, switch(1, 1, 100), None),
        (
            true,
            switch(1, 1, 99),
            Some("a switch to an impossible place"),
        ),
        (true, switch(1, 1, max), None),
        (
            true,
            switch(1, 1, max + 1),
            Some("a switch to an impossible place"),
        ),
        (
            true,
            switch(65_536, 1, 100),
            Some("a switch of another use of the lane"),
        ),
        (
            true,
            switch(0, 1, 100),
            Some("a switch of another use of the lane"),
        ),
    ] {
        let mut s = fresh();
        s.reader(e(1), rx::READY);
        if ring {
            let (moves, log2, from) = (1, 12, c(100));
            s.say(Body::Ring { moves, log2, from });
        }
        s.say(says);
        assert_eq!(s.fault(), wanted.map(Fault::Peer));
    }
}

/// After this nobody is switched up any more; what was said stays so.
#[test]
fn switches_are_refused() {
    let mut s = fresh();
    s.reader(e(1), rx::READY);
    let (moves, log2, from) = (1, 12, c(0));
    s.say(Body::Ring { moves, log2, from });
    s.b.pair.refuse_switches(s.id);
    s.received();
    s.say(switch(1, 1, 0));
    assert_eq!(s.received(), [reply(1, 1, false)]);
}

/// A sender's move to another ring: the place is told, also twice; and it is shown where to read on.
#[test]
fn another_ring() {
    let mut s = up();
    let rings = s.b.host.placed.clone();
    assert_eq!(rings.len(), 1);
    s.says.head = c(100);
    s.snapshot();
    s.received();
    let next = Body::Ring {
        moves: 2,
        log2: 13,
        from: c(100),
    };
    s.say(next);
    let said = s.received();
    assert!(matches!(said[..], [Body::RingReply { moves: 2, place: Some(p) }] if p.offset == 4096));
    s.say(next);
    assert_eq!((s.received(), s.b.host.placed.len()), (said, 2));
    let words = &s.b.proxy().tx[0];
    let seq = words.loc_seq.load(Relaxed);
    let i = lane::abi::loc_index(seq);
    assert_eq!(words.loc[i].load(Relaxed).loc(), Some(s.b.host.placed[1]));
    assert_eq!(words.loc_from[i].load(Relaxed), c(100));
    // Bytes on the second ring.
    s.says.moves = 2;
    s.says.head = c(103);
    s.snapshot_with(b"abc");
    let at = 4096 + 100;
    assert_eq!((head(&s), received(&s, at, 3)), (c(103), b"abc".to_vec()));
    assert_eq!(s.b.host.freed, []);
    s.read_to(103);
    s.received();
    s.say(Body::Ring {
        moves: 3,
        log2: 12,
        from: c(103),
    });
    assert_eq!(s.b.host.freed, rings, "the one before the last two");
    assert_eq!(s.fault(), None);
}

#[test]
fn impossible_rings() {
    for (moves, log2, from, wanted) in [
        (2, 12, 100, None),
        (2, 22, 100, None),
        (9, 12, 100, None),
        (0, 12, 100, Some("an impossible ring")),
        (1 << 31, 12, 100, None),
        ((1 << 31) + 1, 12, 100, Some("an impossible ring")),
        (2, 11, 100, Some("an impossible ring")),
        (2, 23, 100, Some("an impossible ring")),
        (
            2,
            12,
            99,
            Some("a ring moved before the reader could follow"),
        ),
    ] {
        let mut s = up();
        s.says.head = c(100);
        s.snapshot();
        s.b.host.answers = vec![Some(loc(8, 12))];
        let from = c(from);
        s.say(Body::Ring { moves, log2, from });
        assert_eq!(s.fault(), wanted.map(Fault::Peer), "{moves} {log2}");
    }
}

/// A second move, while the reader's cursor that was told is still on the ring before the last one.
#[test]
fn a_ring_too_many() {
    for (read, wanted) in [(99, true), (100, false)] {
        let mut s = up();
        s.says.head = c(100);
        s.snapshot();
        s.say(Body::Ring {
            moves: 2,
            log2: 12,
            from: c(100),
        });
        s.read_to(read);
        s.b.publish();
        s.say(Body::Ring {
            moves: 3,
            log2: 12,
            from: c(100),
        });
        let why = Fault::Peer("a ring moved before the reader could follow");
        assert_eq!(s.fault(), wanted.then_some(why));
    }
}

/// No memory, and a place that is none.
#[test]
fn no_place() {
    let wrong = [
        None,
        Some(loc(0, 13)),
        Some(loc(256, 12)),
        Some(Loc {
            chunk: 2,
            ..loc(0, 12)
        }),
    ];
    for at in wrong {
        let mut s = fresh();
        s.b.host.answers = vec![at];
        let (moves, log2, from) = (1, 12, c(0));
        s.say(Body::Ring { moves, log2, from });
        let none = Body::RingReply { moves, place: None };
        assert_eq!(s.received(), [none]);
        let freed: Vec<Loc> = at.into_iter().collect();
        assert_eq!(s.b.host.freed, freed);
        // Asked again, there is.
        s.say(Body::Ring { moves, log2, from });
        let said = s.received();
        assert!(matches!(said[..], [Body::RingReply { place: Some(_), .. }]));
    }
}

/// A slot was used before: until the reader has changed its word, a head that could be confused with it is not shown.
#[test]
fn a_stale_cursor() {
    let mut s = fresh();
    s.b.app().cursors[0].store(c(50), Relaxed);
    s.incoming();
    s.says.head = c(100);
    s.snapshot();
    assert_eq!(head(&s), c(49));
    s.read_to(0);
    assert_eq!(head(&s), c(100));
    s.read_to(100);
    assert_eq!(s.fault(), None);
}

/// A revocation after bytes were read becomes a request to come down; before, it stays one.
#[test]
fn revoked() {
    for (at, flags) in [
        (Cursor::UNSEEN, rx::READY | rx::REVOKED),
        (c(0), rx::READY | rx::REVOKED),
        (c(2), rx::READY | rx::WANT_DOWN),
    ] {
        let mut s = up();
        s.b.app().rx[0].revoked.store(at, Relaxed);
        s.reader(e(1), rx::READY | rx::REVOKED);
        let said = s.last_snapshot().expect("a snapshot");
        assert_eq!((said.rx_epoch, said.rx_flags), (e(1), flags));
    }
}

/// Only what a reader may say is passed on, and only once.
#[test]
fn words_of_the_reader() {
    let mut s = fresh();
    s.reader(e(1), RxFlags::from_raw(0xff));
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!(said.rx_flags, RxFlags::from_raw(0b10_1111));
    s.reader(e(1), RxFlags::from_raw(0xff));
    assert_eq!(s.received(), []);
}

/// Whoever wants to know when bytes can be seen is told then.
#[test]
fn landed() {
    let mut s = up();
    s.says.flags = flag::WANT_LANDED;
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    let (epoch, head) = (e(1), c(3));
    assert_eq!(s.received(), [Body::Landed { epoch, head }]);
}

/// Bytes that would lie before the ring's first one.
#[test]
fn bytes_before_the_ring() {
    for (data, wanted) in [
        (&b"abcde"[..], None),
        (b"abcdef", Some("bytes outside of the ring")),
    ] {
        let mut s = fresh();
        s.reader(e(1), rx::READY);
        let (moves, log2, from) = (1, 12, c(100));
        s.say(Body::Ring { moves, log2, from });
        s.say(switch(1, 1, 100));
        (s.says.tx_epoch, s.says.tx_phase, s.says.moves) = (e(1), tx::UP, 1);
        s.says.head = c(105);
        s.snapshot_with(data);
        assert_eq!(s.fault(), wanted.map(Fault::Peer));
    }
}
