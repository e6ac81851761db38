//! Takeover over words that mean nothing: an end that writes anything where its daemon looks when it
//! takes the end's direction over, and what a daemon may leave behind for the end that takes it
//! back. An error, never a panic; never more on TCP than a frame and two rings; never a byte from
//! outside of the rings (guard pages and read-only mappings see to that).
//!
//! No daemon runs here: a whole one (`daemon/world/tests/two_daemons`) never stores such words, and its engine would find
//! many of those of an end before takeover does. So each of the steps that it makes is called, on words that the test
//! has stored.

#![cfg(not(loom))]

mod sim;

use lane::abi::{
    rx, takeover, tx, Control, Cursor, Epoch, Loc, LocWord, RxWord, TakeoverPhase, TakeoverWord,
    TcpPos, TxPhase, TxWord, Word,
};
use lane::half::tx::{claim, mode, Adopted};
use lane::half::{Memory, TxState};
use lane::proto::frame::LEN;
use lane::proto::reason::Reason;
use proptest::prelude::*;
use sim::memory::{packed, raw, CHUNK, CHUNKS};
use sim::{op, send, Act, Wire, World, LANE, TAG};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const L: usize = LANE as usize;
/// What is on the ring of end 1.
const SENT: u64 = 100;
/// The epoch that it is on its ring in, and the next one.
const FIRST: Epoch = Epoch::new(1);
const SECOND: Epoch = Epoch::new(2);

/// End 1 is on its ring, in an epoch that its daemon has granted.
fn up() -> World {
    let mut w = World::across();
    op(&mut w, 1, Act::Attach { log2: 12 });
    let granted = |w: &World, flags| {
        let word = RxWord::new(FIRST, flags);
        w.daemon(1).peer_rx().word.store(word, Relaxed);
    };
    granted(&w, rx::READY);
    op(&mut w, 1, send(7));
    op(&mut w, 1, Act::TryUp);
    granted(&w, rx::READY | rx::ACCEPTED);
    op(&mut w, 1, send(SENT as usize));
    assert!(w.host[1].tx.is_up());
    w.net.borrow_mut().pipe[1].snd_cap = 1 << 24;
    w
}

fn on_tcp(w: &World) -> u64 {
    w.net.borrow().pipe[1].accepted
}

/// The daemon takes end 1 over and goes down, as far as it comes.
fn take(w: &World) -> Result<bool, Reason> {
    let (m, port) = (w.daemon(1), Wire { w, e: 1 });
    let state = m.own_tx().state.load(Relaxed);
    let t = TxState::default();
    if !claim(&m, state, || false) || !matches!(t.adopt(&m, &port, TAG ^ 1)?, Adopted::Ring) {
        return Ok(false);
    }
    t.finish(&m, &port)?;
    for _ in 0..4 {
        t.down(&m, &port)?;
    }
    assert_eq!(t.mode.load(Relaxed), mode::TCP);
    Ok(true)
}

/// End 1 takes its direction back, and goes down as far as it comes.
fn reclaim(w: &World) -> Result<bool, Reason> {
    let (t, m, port) = (&w.host[1].tx, w.memory(1), Wire { w, e: 1 });
    t.reclaim(&m, &port)?;
    for _ in 0..4 {
        t.look(&m, &port)?;
    }
    Ok(t.mode.load(Relaxed) == mode::TCP)
}

/// Somebody puts bytes on TCP that belong to whoever goes on there next.
fn put(w: &World, n: usize) {
    let n = w.net.borrow_mut().send(1, &vec![0; n], false).unwrap();
    assert!(n > 0);
}

/// What the daemon makes of it after the end has stored this.
fn taken(store: impl Fn(&World, &Control)) -> (Result<bool, Reason>, u64) {
    let w = up();
    let before = on_tcp(&w);
    store(&w, w.control(1));
    let put = on_tcp(&w) - before;
    let r = take(&w);
    (r, on_tcp(&w) - before - put)
}

#[test]
fn words_of_an_end() {
    let (r, n) = taken(|_, _| ());
    assert_eq!((r, n), (Ok(true), LEN as u64 + SENT));
    let hostile = [
        // A head before the ring's start, beyond the ring, beyond everything.
        taken(|_, c| c.tx[L].up_start.store(Cursor::new(SENT + 1), Relaxed)),
        taken(|_, c| c.tx[L].up_start.store(Cursor::new(u64::MAX), Relaxed)),
        taken(|_, c| c.heads[L].store(Cursor::new(4097), Relaxed)),
        taken(|_, c| c.heads[L].store(Cursor::new(u64::MAX), Relaxed)),
        // Rings that cannot be.
        taken(|_, c| c.tx[L].loc[0].store(LocWord::NONE, Relaxed)),
        taken(|_, c| raw(&c.tx[L].loc[0]).store(u64::MAX, Relaxed)),
    ];
    for (i, r) in hostile.iter().enumerate() {
        assert_eq!(*r, (Err(Reason::Hostile), 0), "{i}");
    }
    // Rings outside of what is mapped.
    for (chunk, page, log2) in [(60, 0, 12), (1, u32::MAX, 12), (1, 63, 13), (1, 0, 22)] {
        let at = Loc { chunk, page, log2 }.word();
        let r = taken(|_, c| c.tx[L].loc[0].store(at, Relaxed));
        assert_eq!(r, (Err(Reason::Internal), 0));
    }
    // More than the ring holds, if the one before is to be believed.
    let r = taken(|_, c| {
        let log2 = 22;
        let at = Loc {
            chunk: 1,
            page: 0,
            log2,
        };
        c.tx[L].loc[1].store(at.word(), Relaxed);
        c.heads[L].store(Cursor::new(1 << 20), Relaxed);
    });
    assert_eq!(r, (Err(Reason::Internal), LEN as u64));
    // Phases that are no phases, and epochs that nobody has granted.
    for state in [
        TxWord::default(),
        TxWord::new(FIRST, tx::DOWN),
        TxWord::new(FIRST, TxPhase::from_raw(77)),
        TxWord::new(SECOND, tx::UP),
        TxWord::from_raw(u64::MAX),
    ] {
        let (r, n) = taken(|_, c| c.tx[L].state.store(state, Relaxed));
        assert_eq!((r, n), (Ok(false), 0));
    }
}

/// Bytes on TCP that nobody has announced, or more than were.
#[test]
fn bytes_of_an_end() {
    let begun = |n, what, at| {
        taken(move |w, c| {
            put(w, n);
            c.rx[L].takeover_at.store(Cursor::new(at), Relaxed);
            c.rx[L].takeover.store(what, Relaxed);
        })
    };
    let down = TakeoverWord::new(FIRST, takeover::DOWN);
    let odd = TakeoverWord::new(FIRST, TakeoverPhase::from_raw(77));
    assert_eq!(
        begun(1, TakeoverWord::default(), 0),
        (Err(Reason::Foreign), 0)
    );
    assert_eq!(
        begun(1, TakeoverWord::new(SECOND, takeover::DOWN), 0),
        (Err(Reason::Foreign), 0)
    );
    assert_eq!(
        begun(1, TakeoverWord::new(FIRST, takeover::TAKEN), 0),
        (Err(Reason::Foreign), 0)
    );
    assert_eq!(begun(1, odd, 0), (Err(Reason::Foreign), 0));
    assert_eq!(begun(LEN + 101, down, 0), (Err(Reason::Foreign), 0));
    assert_eq!(begun(1, down, SENT + 1), (Err(Reason::Hostile), 0));
    assert_eq!(begun(1, down, u64::MAX), (Err(Reason::Hostile), 0));
    let plain = TakeoverWord::new(FIRST, takeover::PLAIN);
    assert_eq!(begun(101, plain, 0), (Err(Reason::Foreign), 0));
    assert_eq!(begun(1, plain, SENT + 1), (Err(Reason::Hostile), 0));
    // ... and what is in order, to see that these fail for what they say.
    assert_eq!(begun(LEN + 100, down, 0), (Ok(true), 0));
    assert_eq!(begun(100, plain, 0), (Ok(true), 0));
    // A position that TCP has not reached.
    let r = taken(|_, c| c.tx[L].up_tcp_pos.store(TcpPos::new(1000), Relaxed));
    assert_eq!(r, (Err(Reason::Sync), 0));
    let r = taken(|_, c| c.tx[L].up_tcp_pos.store(TcpPos::new(0), Relaxed));
    assert_eq!(
        r,
        (Err(Reason::Foreign), 0),
        "seven bytes more than it says"
    );
}

/// What a dead daemon's words say, bytes of whatever begun on TCP.
#[test]
fn words_of_a_daemon() {
    let back = |n: usize, what, at| {
        let w = up();
        let before = on_tcp(&w);
        if n > 0 {
            put(&w, n);
        }
        let m = w.daemon(1);
        m.daemon().at.store(Cursor::new(at), Relaxed);
        m.daemon().takeover.store(what, Relaxed);
        let r = reclaim(&w);
        (r, on_tcp(&w) - before)
    };
    // It went on with a frame of the end's, but not for so long.
    for (more, r) in [
        (10, Ok(true)),
        (LEN + 95, Ok(true)),
        (LEN + 96, Err(Reason::Foreign)),
    ] {
        let mut w = up();
        w.net.borrow_mut().deliver(1, 1 << 20);
        let room = |snd| Act::Buffers {
            snd,
            rcv: 0,
            piece: 1 << 20,
            more: 0,
        };
        op(&mut w, 1, room(5));
        op(&mut w, 1, Act::Down);
        op(&mut w, 1, room(1 << 20));
        put(&w, more);
        w.daemon(1)
            .daemon()
            .takeover
            .store(TakeoverWord::new(FIRST, takeover::TAKEN), Relaxed);
        assert_eq!(reclaim(&w), r, "{more}");
    }
    let down = TakeoverWord::new(FIRST, takeover::DOWN);
    let odd = TakeoverWord::new(FIRST, TakeoverPhase::from_raw(77));
    assert_eq!(
        back(0, TakeoverWord::default(), 0),
        (Ok(true), LEN as u64 + SENT)
    );
    assert_eq!(back(5, down, 0), (Ok(true), LEN as u64 + SENT));
    assert_eq!(back(5, down, 60), (Ok(true), LEN as u64 + 40));
    assert_eq!(back(5, down, 101), (Err(Reason::Hostile), 5));
    assert_eq!(back(5, down, u64::MAX), (Err(Reason::Hostile), 5));
    assert_eq!(back(200, down, 0), (Err(Reason::Foreign), 200));
    assert_eq!(
        back(1, TakeoverWord::new(FIRST, takeover::TAKEN), 0),
        (Err(Reason::Foreign), 1)
    );
    assert_eq!(back(1, odd, 0), (Err(Reason::Foreign), 1));
    assert_eq!(
        back(101, TakeoverWord::new(FIRST, takeover::PLAIN), 0),
        (Err(Reason::Foreign), 101)
    );
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0u64..20_000,
        (0u64..6).prop_map(|n| u64::MAX - n),
        (0u64..64, -3i64..4).prop_map(|(bit, d)| (1u64 << bit).wrapping_add_signed(d)),
        (0u32..3, 0u8..80).prop_map(packed),
        (1u32..4, 0u32..70, 10u32..24)
            .prop_map(|(chunk, page, log2)| Loc { chunk, page, log2 }.word().raw()),
    ]
}

/// Words of the end that a takeover looks at.
fn end_word(c: &Control, n: usize) -> &AtomicU64 {
    let (t, r) = (&c.tx[L], &c.rx[L]);
    [
        raw(&t.state),
        raw(&t.up_tcp_pos),
        raw(&t.up_start),
        raw(&t.loc[0]),
        raw(&t.loc[1]),
        raw(&t.loc_from[0]),
        raw(&t.loc_from[1]),
        raw(&r.takeover),
        raw(&r.takeover_at),
        raw(&c.heads[L]),
    ][n]
}

/// Words of the daemon that its end looks at.
fn daemon_word<'a>(m: &Memory<'a>, n: usize) -> &'a AtomicU64 {
    let (r, d) = (m.peer_rx(), m.daemon());
    [
        raw(&r.word),
        raw(&r.revoked),
        raw(&r.landed),
        raw(&d.takeover),
        raw(&d.at),
        raw(&d.tcp_pos),
        raw(m.peer_cursor()),
    ][n]
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(3000)
}

/// Most that may go out: a frame and two rings, each no longer than its chunk.
const MOST: u64 = LEN as u64 + (CHUNKS * CHUNK) as u64;

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn anything_from_an_end(
        words in proptest::collection::vec((0usize..10, value()), 1..4),
        moves in 0u32..3,
        begun in prop_oneof![Just(0usize), 1usize..200],
        began in proptest::option::of((1u8..6, 0u64..120)),
    ) {
        let w = up();
        w.hostile.set(true);
        if begun > 0 {
            put(&w, begun);
        }
        let c = w.control(1);
        if let Some((what, at)) = began {
            c.rx[L].takeover_at.store(Cursor::new(at), Relaxed);
            let what = TakeoverPhase::from_raw(what);
            c.rx[L].takeover.store(TakeoverWord::new(FIRST, what), Relaxed);
        }
        for (n, v) in words {
            end_word(c, n).store(v, Relaxed);
        }
        c.tx[L].loc_seq.fetch_add(moves, Relaxed);
        let before = on_tcp(&w);
        let _ = take(&w);
        prop_assert!(on_tcp(&w) - before <= MOST);
    }

    #[test]
    fn anything_from_a_daemon(
        words in proptest::collection::vec((0usize..7, value()), 1..4),
        down in any::<bool>(),
        room in 0usize..200,
        begun in prop_oneof![Just(0usize), 1usize..200],
    ) {
        let mut w = up();
        w.hostile.set(true);
        if down {
            w.net.borrow_mut().deliver(1, 1 << 20);
            op(&mut w, 1, Act::Buffers { snd: room, rcv: 1 << 16, piece: 1 << 20, more: 0 });
            op(&mut w, 1, Act::Down);
            w.net.borrow_mut().pipe[1].snd_cap = 1 << 24;
        }
        if begun > 0 {
            put(&w, begun);
        }
        for (n, v) in words {
            daemon_word(&w.daemon(1), n).store(v, Relaxed);
        }
        let before = on_tcp(&w);
        let _ = reclaim(&w);
        prop_assert!(on_tcp(&w) - before <= MOST);
        // And while it lives.
        let (m, port) = (w.memory(1), Wire { w: &w, e: 1 });
        let _ = w.host[1].tx.down(&m, &port);
        prop_assert!(on_tcp(&w) - before <= 2 * MOST);
    }
}

/// The word of a receiver, too, is only believed about the epoch in question.
#[test]
fn a_granted_epoch_and_no_other() {
    for (word, yes) in [
        (RxWord::new(FIRST, rx::READY | rx::ACCEPTED), true),
        (RxWord::new(FIRST, rx::READY), false),
        (RxWord::new(SECOND, rx::READY), false),
        (RxWord::default(), false),
    ] {
        let w = up();
        w.daemon(1).peer_rx().word.store(word, Relaxed);
        assert_eq!(take(&w), Ok(yes), "{word:?}");
    }
}
