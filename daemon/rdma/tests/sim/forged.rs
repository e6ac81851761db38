//! What peers and applications say and write that lie. What is a lie, and which, somebody else's numbers decide.

use lane::abi::{Control as Words, Cursor, Epoch, RxFlags, Shared, TcpPos, TxPhase, Word};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Control;
use underpass_rdma::sim::{Faults, Rng};
use underpass_rdma::wire::{Body, Message, DATA_MAX, LEN};

/// Where a liar takes numbers from: a seed, or the bytes of a fuzz target's input.
pub trait Numbers {
    fn next_u64(&mut self) -> u64;

    /// A number from 0 to `n - 1`.
    fn below(&mut self, n: u64) -> u64;

    /// True one time out of `n`.
    fn one_in(&mut self, n: u64) -> bool;
}

impl Numbers for Rng {
    fn next_u64(&mut self) -> u64 {
        Rng::next_u64(self)
    }

    fn below(&mut self, n: u64) -> u64 {
        Rng::below(self, n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        Rng::one_in(self, n)
    }
}

pub fn faults() -> Faults {
    Faults {
        delay_ns: 5_000,
        late_ns: 100_000,
        ..Faults::default()
    }
}

/// A number that is wrong, but perhaps not by much.
fn lie(x: u64, rng: &mut impl Numbers) -> u64 {
    match rng.below(6) {
        0 => x.wrapping_add(1 + rng.below(5_000)),
        1 => x.wrapping_sub(1 + rng.below(5_000)),
        2 => 0,
        3 => u64::MAX,
        4 => x ^ 1 << rng.below(64),
        _ => rng.next_u64(),
    }
}

pub fn lie_about(body: &mut Body, rng: &mut impl Numbers) {
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

/// Spoils a message between nodes in one of several ways.
pub fn spoil(bytes: &mut Vec<u8>, rng: &mut impl Numbers) {
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
pub fn tampered(m: Control, rng: &mut impl Numbers) -> Control {
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

fn scribble<W: Word>(word: &Shared<W>, rng: &mut impl Numbers) {
    let new = lie(word.load(Relaxed).raw(), rng);
    word.store(W::from_raw(new), Relaxed);
}

/// An application writes something into its words for one lane, and says that they have changed.
pub fn scribble_about(words: &Words, slot: usize, rng: &mut impl Numbers) {
    let (t, r) = (&words.tx[slot], &words.rx[slot]);
    match rng.below(11) {
        0 => scribble(&words.heads[slot], rng),
        1 => scribble(&words.cursors[slot], rng),
        2 => scribble(&t.up_tcp_pos, rng),
        3 => scribble(&t.up_start, rng),
        4 => scribble(&t.loc[0], rng),
        5 => scribble(&t.loc[1], rng),
        6 => scribble(&t.loc_from[0], rng),
        7 => scribble(&t.loc_from[1], rng),
        8 => scribble(&r.revoked, rng),
        9 => scribble(&t.state, rng),
        _ => scribble(&r.word, rng),
    }
    if rng.one_in(6) {
        t.loc_seq.store(rng.next_u64() as u32, Relaxed);
    }
    words.seq[slot / lane::abi::LANES_PER_COUNTER]
        .0
        .fetch_add(1, Relaxed);
}
