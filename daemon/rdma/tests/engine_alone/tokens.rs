//! By what lanes are named, which messages are heard, and which answers are said again.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, Epoch, TcpPos, LANES};
use underpass_rdma::engine::{Control, Event, LaneId};
use underpass_rdma::wire::{flag, Body};

/// Removes a lane of a slot whose peer was never told.
fn remove(b: &mut Bench, id: LaneId) {
    b.pair.remove(id);
    b.settle();
    assert!(b.happened().contains(&Event::Removed { lane: id }));
}

/// A place is used again under another number, and the former one means nothing any more.
#[test]
fn numbers_are_not_used_again() {
    let mut b = Bench::new(quiet(true), 1);
    b.link();
    let client = b.clients[0].id;
    let [one, two] = [0, 1].map(|slot| b.pair.open(client, slot).expect("a lane"));
    assert_eq!(two, one + 1);
    remove(&mut b, one);
    let again = b.pair.open(client, 0).expect("a lane");
    assert_eq!(again, one + (1 << 20));
    assert_eq!(b.pair.open(client, 2), Some(one + 2));
    b.happened();
    // Late words about the first one reach nobody.
    b.pair.connect(one, TOKEN, BASE);
    b.pair.remove(one);
    b.says(Control::Close {
        token: one,
        from: TOKEN,
    });
    assert_eq!(b.happened(), []);
    let mut last = again;
    for n in 2..=4096 {
        remove(&mut b, last);
        last = b.pair.open(client, 0).expect("a lane");
        assert_eq!(last >> 20, n % 4095 + 1, "{n}");
    }
}

/// Slots that there are, and clients.
#[test]
fn no_such_slot() {
    let mut b = Bench::new(quiet(true), 1);
    let client = b.clients[0].id;
    assert_eq!(b.pair.open(client, LANES as u32), None);
    assert_eq!(b.pair.open(client + 1, 0), None);
    assert!(b.pair.open(client, LANES as u32 - 1).is_some());
    assert_eq!(b.add_client(), client + 1);
    assert!(b.pair.open(client + 1, 0).is_some());
}

/// A lane is connected once.
#[test]
fn connected_once() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.b.pair.connect(s.id, TOKEN + 5, Epoch::base(9));
    s.reader(e(1), rx::READY);
    assert!(s.last_snapshot().is_some());
}

/// Nothing that the peer says is heard before it has told how it names the lane.
#[test]
fn received_too_early() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    let id = s.b.pair.open(s.b.clients[0].id, 3).expect("a lane");
    s.b.settle();
    let (moves, log2, from) = (1, 12, c(0));
    let ring = Body::Ring { moves, log2, from };
    s.b.peer.say_of(s.no, id, ring, &[]);
    s.b.settle();
    assert_eq!((s.b.host.placed.len(), s.b.peer.bodies(s.no)), (0, vec![]));
}

/// Of snapshots only those are heard that are newer than all before; what is said of it does not depend on that.
#[test]
fn older_snapshots() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    let flags = [
        (5, rx::READY, rx::READY),
        (4, rx::READY | rx::WANT_DOWN, rx::READY),
        (5, rx::READY | rx::WANT_DOWN, rx::READY),
        (6, rx::READY | rx::WANT_DOWN, rx::READY | rx::WANT_DOWN),
        (6 + 32_767, rx::READY, rx::READY),
        (6, rx::READY | rx::WANT_DOWN, rx::READY),
        // 32767 further on, and then half of all numbers: that is older.
        (4, rx::READY | rx::WANT_DOWN, rx::READY | rx::WANT_DOWN),
        (4 + 32_768, rx::READY, rx::READY | rx::WANT_DOWN),
    ];
    for (seq, says, shown) in flags {
        (s.says.rx_epoch, s.says.rx_flags) = (e(1), says);
        let body = Body::Cdc(s.says);
        s.b.peer.speak(s.no, (seq, s.id), body, &[]);
        s.b.settle();
        assert_eq!(s.shown().flags(), shown, "{seq}");
    }
    let (moves, log2, from) = (1, 12, c(0));
    let ring = Body::Ring { moves, log2, from };
    s.b.peer.speak(s.no, (1, s.id), ring, &[]);
    s.b.settle();
    assert_eq!(s.b.host.placed.len(), 1);
}

/// What we say of a lane is numbered.
#[test]
fn our_numbers() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    let mut last = None;
    for n in 1..5 {
        s.reader(e(n), rx::READY);
        let all = s.b.peer.received(s.no);
        assert_eq!(all.len(), 1);
        let seq = all[0].0.seq;
        assert!(last.is_none_or(|l| seq == l + 1));
        last = Some(seq);
    }
}

/// The link that answers went over is gone, and with it perhaps the answers: they are said again over another one.
#[test]
fn answers_are_said_again() {
    let mut s = Side::new(Bench::new(quiet(true), 2));
    let other = s.b.link();
    s.tell_key(other);
    s.incoming();
    s.says.head = c(3);
    s.says.flags = flag::WANT_LANDED;
    s.snapshot_with(b"abc");
    s.b.peer.received(other);
    let link = s.no;
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.peer.destroy(link);
    s.b.says(Control::QpDeadAck { link });
    s.no = other;
    let (epoch, head) = (e(1), c(3));
    let said = s.received();
    let (attempt, ok) = (1, true);
    assert!(
        said.contains(&Body::SwitchReply { epoch, attempt, ok }),
        "{said:?}"
    );
    assert!(said.contains(&Body::Landed { epoch, head }), "{said:?}");
    let rings = said.iter().filter(|b| {
        matches!(
            b,
            Body::RingReply {
                moves: 1,
                place: Some(_)
            }
        )
    });
    assert_eq!(rings.count(), 1);
    assert!(matches!(said.last(), Some(Body::Cdc(c)) if c.flags == flag::VALIDATE));
}

/// Questions are asked again over another link: for the ring's place, and for the switch.
#[test]
fn questions_are_asked_again() {
    for placed in [false, true] {
        let mut s = Side::new(Bench::new(quiet(true), 2));
        let other = s.b.link();
        s.tell_key(other);
        s.b.peer.received(other);
        s.peer_ready(e(1));
        s.ask(e(1), RING, 0);
        if placed {
            s.answer_ring(1, 0);
        }
        let link = s.no;
        s.received();
        s.b.pair.set_rail(s.b.rails[0], false);
        s.b.peer.destroy(link);
        s.b.says(Control::QpDeadAck { link });
        s.no = other;
        let said = s.received();
        let asks = |b: &&Body| match placed {
            true => matches!(b, Body::Switch { attempt: 1, .. }),
            false => matches!(b, Body::Ring { moves: 1, .. }),
        };
        assert_eq!(said.iter().filter(asks).count(), 1, "{said:?}");
    }
}

/// A switch in doubt is asked about again over a new control channel, and so is everything else said again.
#[test]
fn another_control_channel() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    let other = s.b.lane(1);
    s.b.pair.remove(other);
    let link = s.no;
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    let all = s.b.controls();
    let kinds = |all: &[Control]| {
        let count = |is: fn(&Control) -> bool| all.iter().filter(|m| is(m)).count();
        [
            count(|m| matches!(m, Control::SwitchQuery { .. })),
            count(|m| matches!(m, Control::QpDead { .. })),
            count(|m| matches!(m, Control::Close { .. })),
        ]
    };
    assert_eq!(kinds(&all), [1, 1, 1], "{all:?}");
    s.b.pair.set_control(true);
    s.b.settle();
    let all = s.b.controls();
    assert_eq!(kinds(&all), [1, 1, 1], "{all:?}");
    assert!(all.contains(&Control::QpDead { link }));
    s.b.pair.set_control(false);
    s.b.later(30_000_000);
    assert_eq!(s.b.controls(), []);
}

/// A lane that is closed on both sides has been heard to the end: what the peer says then is not.
#[test]
fn nothing_after_the_end() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.incoming();
    s.b.pair.remove(s.id);
    s.b.settle();
    s.received();
    s.says.head = c(9999);
    s.snapshot();
    let attempt = 2;
    s.say(Body::Switch {
        epoch: e(1),
        attempt,
        tcp_pos: TcpPos::new(0),
        start: c(0),
    });
    assert_eq!((s.fault(), s.received()), (None, vec![]));
    assert_eq!(s.shown_sender().phase(), tx::UP);
}
