//! An end of a lane that works, and a peer that writes anything into everything it may write.
//!
//! The end must not panic, hang, touch memory that is not its own to touch, put bytes on TCP that its application has
//! not sent, or hand out bytes that nobody has written. The world is that of `lane/tests/lane_hostile.rs`, which makes up
//! its cases at random; here what the lane has not done before leads to the next one.

#[path = "../../../lane/tests/sim/mod.rs"]
#[allow(unreachable_pub, clippy::all)]
mod sim;

use crate::input::Input;
use lane::abi::{Loc, Word};
use sim::memory::packed;
use sim::scribble::{begin, plan, Scribble, BAD, WORDS};
use sim::{op, Act};

/// Most actions, and most scribbles, of one input.
const MOST: usize = 60;

/// A word that means something more often than any bits would.
fn value(i: &mut Input<'_>) -> u64 {
    match i.u8() % 6 {
        0 => i.u64(),
        1 => i.u32().into(),
        2 => u64::MAX - u64::from(i.u8()),
        3 => {
            let power = 1u64.rotate_left(i.u8().into());
            power.wrapping_add(u64::from(i.u8() % 8)).wrapping_sub(3)
        }
        4 => packed((u32::from(i.u8()) % 6, i.u8() % 32)),
        _ => {
            let (chunk, page) = (u32::from(i.u8()), i.u16().into());
            let log2 = i.u8().into();
            Loc { chunk, page, log2 }.word().raw()
        }
    }
}

fn scribble(i: &mut Input<'_>) -> Scribble {
    match i.u8() % 12 {
        0..=3 => Scribble::Word(usize::from(i.u8()) % WORDS, value(i)),
        4..=6 => Scribble::Nudge(usize::from(i.u8()) % WORDS, i.u16().cast_signed().into()),
        7 | 8 => {
            let (at, n) = (i.u32() as usize, usize::from(i.u8()));
            Scribble::Bytes(at, i.bytes(n).to_vec())
        }
        9 => {
            let n = usize::from(i.u8()) % 100;
            Scribble::Tcp(i.bytes(n).to_vec())
        }
        10 => Scribble::Frame(u32::from(i.u8()) % 4, value(i)),
        _ => Scribble::Fin,
    }
}

fn act(i: &mut Input<'_>) -> Act {
    let len = |i: &mut Input<'_>| usize::from(i.u16()) % 10_000;
    match i.u8() % 13 {
        0 | 1 => {
            let (len, up) = (len(i), i.u8() % 2 == 1);
            Act::Send { len, up }
        }
        2 | 3 => {
            let (len, how) = (len(i), i.u8());
            let (peek, look) = (how & 1 != 0, how & 4 != 0);
            let discard = how & 2 != 0 && !peek;
            Act::Recv {
                len,
                peek,
                discard,
                look,
            }
        }
        4 => Act::Deliver { n: 1 + len(i) * 10 },
        5 => Act::Ready,
        6 => Act::TryUp,
        7 => Act::Down,
        8 => Act::WantDown,
        9 => Act::Revoke,
        10 => Act::Look,
        11 => match i.u8() % 2 {
            0 => Act::Probe,
            _ => Act::Unread,
        },
        _ => Act::Move {
            log2: 12 + u32::from(i.u8()) % 3,
        },
    }
}

/// Records of an action (bit 7: of the hostile end) or, with bit 6, of a scribble and when it is done.
pub(crate) fn area(data: &[u8]) {
    let mut input = Input(data);
    let (mut acts, mut scribbles) = (Vec::new(), Vec::new());
    while !input.0.is_empty() && acts.len().max(scribbles.len()) < MOST {
        let kind = input.u8();
        match kind & 0x40 {
            0 => acts.push((usize::from(kind >> 7), act(&mut input))),
            _ => scribbles.push((usize::from(kind) % 12, scribble(&mut input))),
        }
    }
    let mut w = begin();
    plan(&w, scribbles);
    for (end, act) in acts {
        op(&mut w, end * BAD, act);
    }
}
