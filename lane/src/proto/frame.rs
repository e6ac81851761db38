//! In-band frames: what a direction that has switched up may still put on the TCP stream.
//!
//! Layout (32 bytes, little endian): `magic u32 | version u8 | kind u8 | 0 u16 | epoch u32 |
//! rest u32 | cursor u64 | tag u64`. The tag is a secret that the daemon gives to the two ends of a
//! lane; a byte on TCP that does not belong to a frame with this tag was written by somebody
//! else, and ends the connection.

use crate::abi::{Cursor, Epoch};
use crate::num;

/// Bytes of one frame on the wire.
pub const LEN: usize = 32;
const MAGIC: u32 = 0x5055_4446; // "FDUP"
/// Of the frames alone: the shims at the two ends of a connection between nodes may be of different releases.
const VERSION: u8 = 2;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The ring ends at `cursor`; plain stream bytes follow on TCP from there.
    Down,
    /// The stream ends at `cursor`, and every byte before it is in the receiver's node. Across nodes
    /// only: there a FIN overtakes the ring.
    Fin,
}

/// A frame. Nothing but its form is checked here: whether tag, epoch and cursor fit is the receiver's to find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it says.
    pub kind: Kind,
    /// The epoch that ends with it.
    pub epoch: Epoch,
    /// Bytes that follow at once, from `cursor` on. A FIN before they have come is no clean end.
    pub rest: u32,
    /// Ring cursor: bytes since the slot's first use.
    pub cursor: Cursor,
    /// The lane's secret: 64 random bits that its two ends were given.
    pub tag: u64,
}

impl Frame {
    /// Its bytes for TCP.
    pub fn encode(&self) -> [u8; LEN] {
        let mut b = [0u8; LEN];
        b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4] = VERSION;
        b[5] = match self.kind {
            Kind::Down => 1,
            Kind::Fin => 2,
        };
        b[8..12].copy_from_slice(&self.epoch.get().to_le_bytes());
        b[12..16].copy_from_slice(&self.rest.to_le_bytes());
        b[16..24].copy_from_slice(&self.cursor.get().to_le_bytes());
        b[24..32].copy_from_slice(&self.tag.to_le_bytes());
        b
    }

    /// Decodes exactly one frame; `None` if the bytes are not one.
    pub fn decode(b: &[u8; LEN]) -> Option<Self> {
        let word = |r: core::ops::Range<usize>| {
            let mut w = [0u8; 8];
            w[..r.len()].copy_from_slice(&b[r]);
            u64::from_le_bytes(w)
        };
        if word(0..4) != u64::from(MAGIC) || b[4] != VERSION || word(6..8) != 0 {
            return None;
        }
        let kind = match b[5] {
            1 => Kind::Down,
            2 => Kind::Fin,
            _ => return None,
        };
        Some(Frame {
            kind,
            epoch: Epoch::new(num::low32(word(8..12))),
            rest: num::low32(word(12..16)),
            cursor: Cursor::new(word(16..24)),
            tag: word(24..32),
        })
    }

    /// Is `b`, which is not empty, the beginning of a frame, and not of a stream? `None`: it is too short to tell.
    pub fn starts(b: &[u8]) -> Option<bool> {
        let could = Self::could_start(b);
        (!could || b.len() >= size_of_val(&MAGIC)).then_some(could)
    }

    /// Could `b` be the beginning of a frame? Frames may arrive in pieces.
    pub fn could_start(b: &[u8]) -> bool {
        let m = MAGIC.to_le_bytes();
        let n = b.len().min(4);
        b[..n] == m[..n]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(fin: bool, epoch: u32, rest: u32, cursor: u64, tag: u64) {
            let kind = if fin { Kind::Fin } else { Kind::Down };
            let f = Frame { kind, epoch: Epoch::new(epoch), rest, cursor: Cursor::new(cursor), tag };
            let b = f.encode();
            prop_assert_eq!(Frame::decode(&b), Some(f));
            for n in 0..LEN { prop_assert!(Frame::could_start(&b[..n])); }
        }

        /// Every byte before the epoch counts.
        #[test]
        fn one_bit_off_is_not_a_frame(fin: bool, at in 0usize..8, bit in 0u8..8) {
            let kind = if fin { Kind::Fin } else { Kind::Down };
            let f = Frame { kind, epoch: Epoch::new(1), rest: 0, cursor: Cursor::default(), tag: 0 };
            let mut b = f.encode();
            b[at] ^= 1 << bit;
            let other = [Kind::Down, Kind::Fin].map(|kind| Some(Frame { kind, ..f }));
            let is_kind = at == 5 && matches!(b[5], 1 | 2);
            prop_assert_eq!(other.contains(&Frame::decode(&b)), is_kind);
            prop_assert_eq!(Frame::could_start(&b), at >= 4);
        }

        #[test]
        fn noise_is_not_a_frame(b: [u8; LEN]) {
            if b[0..4] != MAGIC.to_le_bytes() { prop_assert_eq!(Frame::decode(&b), None); }
        }
    }
}
