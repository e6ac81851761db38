//! Peers and applications that lie. The engine may not panic, may not touch memory outside, and
//! only what the liar has a part in may fail.

mod sim;

use lane::abi::{Cursor, Epoch, RxFlags, Shared, TcpPos, TxPhase, Word};
use sim::Sim;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Control;
use underpass_rdma::sim::{Faults, Rng};
use underpass_rdma::wire::{Body, Message, DATA_MAX, LEN};

fn faults() -> Faults {
    Faults {
        delay_ns: 5_000,
        late_ns: 100_000,
        ..Faults::default()
    }
}

/// Each of these checks has caught a lie.
fn all_of(found: &BTreeSet<String>, wanted: &[&str]) {
    for w in wanted {
        assert!(
            found.iter().any(|f| f.contains(w)),
            "not among {found:#?}: {w}"
        );
    }
}

/// A number that is wrong, but perhaps not by much.
fn lie(x: u64, rng: &mut Rng) -> u64 {
    match rng.below(6) {
        0 => x.wrapping_add(1 + rng.below(5_000)),
        1 => x.wrapping_sub(1 + rng.below(5_000)),
        2 => 0,
        3 => u64::MAX,
        4 => x ^ 1 << rng.below(64),
        _ => rng.next_u64(),
    }
}

fn lie_about(body: &mut Body, rng: &mut Rng) {
    let pick = rng.below(24);
    let mut l = |x: u64| lie(x, rng);
    match body {
        Body::Cdc(c) => match pick % 8 {
            0 => c.head = Cursor::new(l(c.head.get())),
            1 => c.cursor = Cursor::new(l(c.cursor.get())),
            2 => c.tx_epoch = Epoch::new(l(c.tx_epoch.get().into()) as u32),
            3 => c.rx_epoch = Epoch::new(l(c.rx_epoch.get().into()) as u32),
            4 => c.tx_phase = TxPhase::from_raw((l(c.tx_phase.raw().into()) % 6) as u8),
            5 => c.rx_flags = RxFlags::from_raw(l(c.rx_flags.raw().into()) as u8),
            6 => c.flags = (l(c.flags.into()) % 8) as u8,
            _ => c.moves = l(c.moves.into()) as u8,
        },
        Body::Switch {
            epoch,
            attempt,
            tcp_pos,
            start,
        } => match pick % 4 {
            0 => *epoch = Epoch::new(l(epoch.get().into()) as u32),
            1 => *attempt = l((*attempt).into()) as u32,
            2 => *tcp_pos = TcpPos::new(l(tcp_pos.get())),
            _ => *start = Cursor::new(l(start.get())),
        },
        Body::SwitchReply { epoch, attempt, ok } => match pick % 3 {
            0 => *epoch = Epoch::new(l(epoch.get().into()) as u32),
            1 => *attempt = l((*attempt).into()) as u32,
            _ => *ok = !*ok,
        },
        Body::Ring { moves, log2, from } => match pick % 3 {
            0 => *moves = l((*moves).into()) as u32,
            1 => *log2 = l((*log2).into()) as u8,
            _ => *from = Cursor::new(l(from.get())),
        },
        Body::RingReply { moves, place } => match (pick % 3, place) {
            (0, _) => *moves = l((*moves).into()) as u32,
            (1, Some(p)) => p.region = l(p.region.into()) as u32,
            (_, Some(p)) => p.offset = l(p.offset),
            _ => {}
        },
        Body::ConfirmRkey(Some(k)) => match pick % 3 {
            0 => k.addr = l(k.addr),
            1 => k.len = l(k.len),
            _ => k.rkey = l(k.rkey.into()) as u32,
        },
        _ => {}
    }
}

/// The peer's daemon lies about one lane of several: all others arrive whole.
#[test]
fn lies_about_one_lane() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 4, faults());
        sim.lied(|l| l == 0);
        let token = sim.lanes[0].ids[0];
        let mut rng = Rng(seed);
        sim.world.set_lie(move |node, bytes| {
            let Ok((mut m, _)) = Message::decode(bytes) else {
                return;
            };
            let of_lane = bytes[0] >= 0x80;
            if node == 1 && of_lane && m.token == token && rng.one_in(6) {
                let truth = m.body;
                lie_about(&mut m.body, &mut rng);
                // Two lies spoil memory that the liar may write to anyhow, of any lane of the same
                // processes, and nobody can prevent that: a wrong place inside the liar's own memory,
                // and a ring that is smaller than what it will write there.
                let lied = m.body != truth;
                match (&mut m.body, truth) {
                    (Body::RingReply { place: Some(p), .. }, _) if lied => p.offset |= 1 << 40,
                    (Body::Ring { log2, .. }, Body::Ring { log2: size, .. }) if *log2 < size => {
                        *log2 |= 0x80;
                    }
                    _ => {}
                }
                bytes[..LEN].copy_from_slice(&m.encode());
            }
        });
        sim.run(50_000, 0);
        for n in &sim.nodes {
            // A write to a place that is a lie may cost a link, never the pair.
            assert_eq!(n.pair_failed, None, "seed {seed}");
            assert!(
                n.faults.iter().all(|f| f.0 == 0),
                "seed {seed}: {:?}",
                n.faults
            );
            failed += n.faults.len();
            found.extend(n.faults.iter().map(|f| f.1.to_string()));
        }
        sim.lanes[0].reset = true;
        sim.end();
    }
    assert!(failed > 50, "only {failed} lanes failed");
    all_of(
        &found,
        &[
            "a head beyond the ring",
            "an impossible cursor",
            "an impossible readiness",
            "an impossible ring",
            "a switch to an impossible place",
            "a sender that goes back",
        ],
    );
}

/// Spoils a message between nodes in one of several ways.
fn spoil(bytes: &mut Vec<u8>, rng: &mut Rng) {
    match (rng.below(3), Message::decode(bytes)) {
        (0, Ok((mut m, _))) => {
            lie_about(&mut m.body, rng);
            match rng.below(8) {
                0 => m.token = lie(m.token.into(), rng) as u32,
                1 => m.credits = lie(m.credits.into(), rng) as u16,
                2 => m.seq = lie(m.seq.into(), rng) as u16,
                _ => {}
            }
            bytes[..LEN].copy_from_slice(&m.encode());
        }
        (1, _) => {
            let i = rng.below(bytes.len() as u64) as usize;
            bytes[i] = rng.next_u64() as u8;
        }
        (_, _) if rng.one_in(10) => {
            let n = rng.below((LEN + DATA_MAX) as u64) as usize;
            bytes.resize(n, rng.next_u64() as u8);
        }
        _ => bytes[8..].fill_with(|| rng.next_u64() as u8),
    }
}

/// What the peer's daemon says instead over the channel.
fn tampered(m: Control, rng: &mut Rng) -> Control {
    let mut l = |x: u32| lie(x.into(), rng) as u32;
    match m {
        Control::QpOffer(mut e) | Control::QpAnswer(mut e) => {
            match l(0) % 5 {
                0 => e.link = l(e.link),
                1 => e.qpn = l(e.qpn),
                2 => e.depth = l(e.depth.into()) as u16,
                3 => e.mtu = l(e.mtu.into()) as u8,
                _ => return Control::QpOffer(e),
            }
            Control::QpAnswer(e)
        }
        Control::QpDead { link } => Control::QpDeadAck { link: l(link) },
        Control::SwitchQuery { token, from, .. } => Control::SwitchAnswer {
            token: l(token),
            epoch: l(from),
            attempt: 1,
            stands: true,
        },
        Control::Close { token, from } => Control::Close {
            token: l(token),
            from: l(from),
        },
        _ => Control::CloseAck { token: l(0) },
    }
}

/// The peer's daemon says anything.
#[test]
fn lies_about_everything() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 3, faults());
        sim.lied(|_| true);
        let mut rng = Rng(seed);
        let every = 3 + rng.below(60);
        sim.world.set_lie(move |node, bytes| {
            if node == 1 && rng.one_in(every) {
                spoil(bytes, &mut rng);
            }
        });
        let mut rng = Rng(seed + 1);
        sim.tamper = Some(Box::new(move |n, m| match n == 1 && rng.one_in(4) {
            true => tampered(m, &mut rng),
            false => m,
        }));
        sim.set_control(true);
        for _ in 0..3000 {
            sim.tick(true);
        }
        failed += usize::from(sim.nodes[0].pair_failed.is_some());
        found.extend(sim.nodes[0].pair_failed.map(str::to_string));
        let world = sim.world.clone();
        drop(sim);
        // The liar's own receive queue is its own affair.
        let mut bad = world.violations();
        bad.retain(|v| !v.contains("node 1 has no receive buffer"));
        assert_eq!(bad, Vec::<String>::new(), "seed {seed}");
        assert_eq!(world.live(), Default::default());
    }
    assert!(failed > 20, "only {failed} pairs failed");
    all_of(
        &found,
        &[
            "a message of a wrong length",
            "a message that is none",
            "impossible credits",
            "an impossible offer",
        ],
    );
}

fn scribble<W: Word>(word: &Shared<W>, rng: &mut Rng) {
    let new = lie(word.load(Relaxed).raw(), rng);
    word.store(W::from_raw(new), Relaxed);
}

/// An application writes anything into its words for one lane: its other lanes, and all others, do
/// not notice.
#[test]
fn an_application_scribbles() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 4, faults());
        sim.lied(|l| l == 0);
        sim.set_control(true);
        let mut rng = Rng(seed);
        let slot = sim.lanes[0].ends[0].slot as usize;
        for _ in 0..4000 {
            sim.tick(true);
            if rng.one_in(20) {
                let words = sim.nodes[0].clients[0].app.control().expect("mapped");
                let (t, r) = (&words.tx[slot], &words.rx[slot]);
                match rng.below(11) {
                    0 => scribble(&words.heads[slot], &mut rng),
                    1 => scribble(&words.cursors[slot], &mut rng),
                    2 => scribble(&t.up_tcp_pos, &mut rng),
                    3 => scribble(&t.up_start, &mut rng),
                    4 => scribble(&t.loc[0], &mut rng),
                    5 => scribble(&t.loc[1], &mut rng),
                    6 => scribble(&t.loc_from[0], &mut rng),
                    7 => scribble(&t.loc_from[1], &mut rng),
                    8 => scribble(&r.revoked, &mut rng),
                    9 => scribble(&t.state, &mut rng),
                    _ => scribble(&r.word, &mut rng),
                }
                if rng.one_in(6) {
                    t.loc_seq.store(rng.next_u64() as u32, Relaxed);
                }
                words.seq[slot / lane::abi::LANES_PER_COUNTER]
                    .0
                    .fetch_add(1, Relaxed);
            }
        }
        sim.run(0, 0);
        for n in &sim.nodes {
            assert_eq!(n.pair_failed, None, "seed {seed}");
            assert!(
                n.faults.iter().all(|f| f.0 == 0),
                "seed {seed}: {:?}",
                n.faults
            );
        }
        failed += sim.nodes[0].faults.len();
        found.extend(sim.nodes[0].faults.iter().map(|f| f.1.to_string()));
        sim.lanes[0].reset = true;
        sim.end();
    }
    assert!(failed > 50, "only {failed} lanes failed");
    all_of(
        &found,
        &[
            "a head beyond the ring",
            "a head that goes back",
            "a ring outside of its memory",
            "an impossible cursor",
            "an impossible ring",
            "a readiness that goes back",
        ],
    );
}
