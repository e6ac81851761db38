//! The 44-byte messages that two daemons send each other on a queue pair.
//!
//! Types, sizes and meanings follow RFC 7609 (CDC and LLC messages of SMC-R); the layouts are our
//! own. All numbers are big endian. This module exists so that nothing else touches foreign bytes:
//! decoding never panics, refuses what it does not know, and refuses bytes that should be zero, so
//! that every message has exactly one form.
//!
//! Only a snapshot may be longer: data of the lane follows it.
//!
//! Common to all: `0 type u8 | 1 length u8 = 44 | 2 seq u16 | 4 token u32 | … | 40 credits u16`. The
//! token names a lane, a link or a region, by the number its receiver gave out; `credits` counts the
//! receive buffers that the sender of the message has ever posted on this queue pair.

use link::layout::{tx, Epoch, RxFlags, TxPhase};
use thiserror::Error;

/// Bytes of every message, without data.
pub const LEN: usize = 44;
/// Bytes of a ring that may come right behind a snapshot, instead of by a write before it.
pub const DATA_MAX: usize = 212;

/// Flags of [`Cdc::flags`].
pub mod flag {
    /// Tell me the cursor as soon as it moves.
    pub const WANT_SPACE: u8 = 1;
    /// The first message about this lane after it moved to another link, and all that follow while
    /// `head` is below one that was announced before: the reader may know more already.
    pub const VALIDATE: u8 = 2;
    /// This lane has failed here; nothing about it will follow.
    pub const ABORT: u8 = 4;
    /// Tell me (`Landed`) when your end has been shown everything up to `head`.
    pub const WANT_LANDED: u8 = 8;
}

/// State of a lane, both directions: a snapshot, never an event. Only this message may have data: the
/// last bytes before `head`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cdc {
    /// Bytes that are in the peer's ring: every write of them precedes this message, or they come with
    /// it.
    pub head: u64,
    /// Bytes that our reader has consumed.
    pub cursor: u64,
    /// Epoch and phase of our sender.
    pub tx_epoch: Epoch,
    pub tx_phase: TxPhase,
    /// Epoch and flags of our reader.
    pub rx_epoch: Epoch,
    pub rx_flags: RxFlags,
    pub flags: u8,
    /// Low byte of the number of ring moves that `head` counts with.
    pub moves: u8,
    /// Ring moves of the peer that we have answered.
    pub acked_moves: u32,
}

/// One end of a link: what the other has to know to connect its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinkEnd {
    pub link: u32,
    /// Rails with the same number reach each other.
    pub fabric: u32,
    pub gid: [u8; 16],
    pub lid: u16,
    /// 24 bits each.
    pub qpn: u32,
    pub psn: u32,
    /// Code of the path MTU: 0 (256) to 4 (4096).
    pub mtu: u8,
    /// Receive buffers that are posted.
    pub depth: u16,
}

/// Where a ring lies in a region of its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub region: u32,
    pub offset: u64,
}

/// How to reach a region over the link that the message came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub addr: u64,
    pub len: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// 1, token = link: the queue pair works. The end that offered asks, the other replies.
    ConfirmLink { reply: bool },
    /// 2, token = link: an offer of another link, the answer to one, or (no end) its refusal.
    AddLink { reply: bool, end: Option<LinkEnd> },
    /// 4, token = link: my end is destroyed. The reply says the same of the other end.
    DeleteLink { reply: bool },
    /// 6, token = region: its key on this link; none if it could not be registered.
    ConfirmRkey(Option<Key>),
    /// 7, token = link: are you there; or yes. A reply nobody asked for only carries credits.
    TestLink { reply: bool },
    /// 9, token = region: it goes. The reply says that no write to it is or will be under way.
    DeleteRkey { reply: bool },
    /// 0xfe, token = lane.
    Cdc(Cdc),
    /// 0x81, token = lane: the sender wants to switch up.
    Switch {
        epoch: Epoch,
        attempt: u32,
        kpos: u64,
        start: u64,
    },
    /// 0x82, token = lane.
    SwitchReply {
        epoch: Epoch,
        attempt: u32,
        ok: bool,
    },
    /// 0x83, token = lane: from cursor `from` on the sender's ring is another one.
    Ring { moves: u32, log2: u8, from: u64 },
    /// 0x85, token = lane: the receiving end has been shown everything up to `head`.
    Landed { epoch: Epoch, head: u64 },
    /// 0x84, token = lane: where its counterpart lies; none if there is no memory.
    RingReply { moves: u32, place: Option<Place> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Counts the messages about one lane; 0 for the others.
    pub seq: u16,
    pub token: u32,
    pub credits: u16,
    pub body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    #[error("a message of {0} bytes")]
    Length(usize),
    #[error("unknown message type {0:#04x}")]
    Type(u8),
    #[error("a field of message type {0:#04x} holds an impossible value")]
    Field(u8),
}

const REPLY: u8 = 1;
const NONE: u8 = 2;

struct Writer([u8; LEN]);

impl Writer {
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }
}

struct Reader<'a>(&'a [u8; LEN]);

impl Reader<'_> {
    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut b = [0; N];
        b.copy_from_slice(&self.0[at..at + N]);
        b
    }
    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.get(at))
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.get(at))
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.get(at))
    }
}

fn bits(reply: bool, none: bool) -> u8 {
    if reply {
        REPLY | if none { NONE } else { 0 }
    } else if none {
        NONE
    } else {
        0
    }
}

impl Message {
    pub fn encode(&self) -> [u8; LEN] {
        let mut w = Writer([0; LEN]);
        w.0[0] = self.body.kind();
        w.0[1] = LEN as u8;
        w.put(2, self.seq.to_be_bytes());
        w.put(4, self.token.to_be_bytes());
        w.put(40, self.credits.to_be_bytes());
        match self.body {
            Body::ConfirmLink { reply }
            | Body::DeleteLink { reply }
            | Body::TestLink { reply }
            | Body::DeleteRkey { reply } => w.0[8] = bits(reply, false),
            Body::AddLink { reply, end } => {
                w.0[8] = bits(reply, end.is_none());
                if let Some(e) = end {
                    w.0[9] = e.mtu;
                    w.put(10, e.lid.to_be_bytes());
                    w.put(12, e.gid);
                    w.put(28, e.qpn.to_be_bytes());
                    w.put(32, e.psn.to_be_bytes());
                    w.put(36, e.fabric.to_be_bytes());
                    w.put(42, e.depth.to_be_bytes());
                }
            }
            Body::ConfirmRkey(key) => {
                w.0[8] = bits(false, key.is_none());
                if let Some(k) = key {
                    w.put(12, k.rkey.to_be_bytes());
                    w.put(16, k.addr.to_be_bytes());
                    w.put(24, k.len.to_be_bytes());
                }
            }
            Body::Cdc(c) => {
                w.put(8, c.head.to_be_bytes());
                w.put(16, c.cursor.to_be_bytes());
                w.put(24, c.tx_epoch.get().to_be_bytes());
                w.put(28, c.rx_epoch.get().to_be_bytes());
                w.0[32] = c.tx_phase.raw();
                w.0[33] = c.rx_flags.raw();
                w.0[34] = c.flags;
                w.0[35] = c.moves;
                w.put(36, c.acked_moves.to_be_bytes());
            }
            Body::Switch {
                epoch,
                attempt,
                kpos,
                start,
            } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(12, attempt.to_be_bytes());
                w.put(16, kpos.to_be_bytes());
                w.put(24, start.to_be_bytes());
            }
            Body::SwitchReply { epoch, attempt, ok } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(12, attempt.to_be_bytes());
                w.0[16] = u8::from(ok);
            }
            Body::Ring { moves, log2, from } => {
                w.put(8, moves.to_be_bytes());
                w.0[12] = log2;
                w.put(16, from.to_be_bytes());
            }
            Body::Landed { epoch, head } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(16, head.to_be_bytes());
            }
            Body::RingReply { moves, place } => {
                w.put(8, moves.to_be_bytes());
                w.0[12] = bits(false, place.is_none());
                if let Some(p) = place {
                    w.put(16, p.region.to_be_bytes());
                    w.put(24, p.offset.to_be_bytes());
                }
            }
        }
        w.0
    }

    /// Decodes a whole message, and what comes behind it.
    #[expect(clippy::too_many_lines)]
    pub fn decode(bytes: &[u8]) -> Result<(Message, &[u8]), Malformed> {
        let Some((b, data)) = bytes.split_first_chunk::<LEN>() else {
            return Err(Malformed::Length(bytes.len()));
        };
        if usize::from(b[1]) != LEN {
            return Err(Malformed::Length(usize::from(b[1])));
        }
        let r = Reader(b);
        let kind = b[0];
        let (reply, none) = (b[8] & REPLY != 0, b[8] & NONE != 0);
        let body = match kind {
            1 => Body::ConfirmLink { reply },
            2 => Body::AddLink {
                reply,
                end: (!none).then(|| LinkEnd {
                    link: r.u32(4),
                    mtu: b[9],
                    lid: r.u16(10),
                    gid: r.get(12),
                    qpn: r.u32(28),
                    psn: r.u32(32),
                    fabric: r.u32(36),
                    depth: r.u16(42),
                }),
            },
            4 => Body::DeleteLink { reply },
            6 => Body::ConfirmRkey((!none).then(|| Key {
                rkey: r.u32(12),
                addr: r.u64(16),
                len: r.u64(24),
            })),
            7 => Body::TestLink { reply },
            9 => Body::DeleteRkey { reply },
            0xfe => Body::Cdc(Cdc {
                head: r.u64(8),
                cursor: r.u64(16),
                tx_epoch: Epoch::new(r.u32(24)),
                rx_epoch: Epoch::new(r.u32(28)),
                tx_phase: TxPhase::from_raw(b[32]),
                rx_flags: RxFlags::from_raw(b[33]),
                flags: b[34],
                moves: b[35],
                acked_moves: r.u32(36),
            }),
            0x81 => Body::Switch {
                epoch: Epoch::new(r.u32(8)),
                attempt: r.u32(12),
                kpos: r.u64(16),
                start: r.u64(24),
            },
            0x82 => Body::SwitchReply {
                epoch: Epoch::new(r.u32(8)),
                attempt: r.u32(12),
                ok: b[16] == 1,
            },
            0x85 => Body::Landed {
                epoch: Epoch::new(r.u32(8)),
                head: r.u64(16),
            },
            0x83 => Body::Ring {
                moves: r.u32(8),
                log2: b[12],
                from: r.u64(16),
            },
            0x84 => Body::RingReply {
                moves: r.u32(8),
                place: (b[12] & NONE == 0).then(|| Place {
                    region: r.u32(16),
                    offset: r.u64(24),
                }),
            },
            other => return Err(Malformed::Type(other)),
        };
        let m = Message {
            seq: r.u16(2),
            token: r.u32(4),
            credits: r.u16(40),
            body,
        };
        // One form per message: whatever the fields above do not cover has to be zero.
        if m.encode() != *b || !m.body.possible() {
            return Err(Malformed::Field(kind));
        }
        let most = match m.body {
            Body::Cdc(_) => DATA_MAX,
            _ => 0,
        };
        if data.len() > most {
            return Err(Malformed::Length(bytes.len()));
        }
        Ok((m, data))
    }
}

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Body::ConfirmLink { .. } => 1,
            Body::AddLink { .. } => 2,
            Body::DeleteLink { .. } => 4,
            Body::ConfirmRkey(_) => 6,
            Body::TestLink { .. } => 7,
            Body::DeleteRkey { .. } => 9,
            Body::Cdc(_) => 0xfe,
            Body::Switch { .. } => 0x81,
            Body::SwitchReply { .. } => 0x82,
            Body::Ring { .. } => 0x83,
            Body::RingReply { .. } => 0x84,
            Body::Landed { .. } => 0x85,
        }
    }

    /// Whether the values could mean something, whatever the state of the two daemons.
    fn possible(&self) -> bool {
        match self {
            Body::AddLink { end: Some(e), .. } => e.possible(),
            Body::ConfirmRkey(Some(k)) => k.addr.checked_add(k.len).is_some(),
            Body::Cdc(c) => c.flags < 16 && c.tx_phase <= tx::BROKEN,
            _ => true,
        }
    }
}

impl LinkEnd {
    pub fn possible(&self) -> bool {
        self.qpn < 1 << 24
            && self.psn < 1 << 24
            && self.mtu <= 4
            && (4..=1 << 14).contains(&self.depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn body() -> impl Strategy<Value = Body> {
        let end = (any::<(u32, [u8; 16], u16)>(), 0..1u32 << 24, 0..1u32 << 24);
        let end = (end, 0..5u8, 4..1u16 << 14).prop_map(
            |(((fabric, gid, lid), qpn, psn), mtu, depth)| LinkEnd {
                link: 0,
                fabric,
                gid,
                lid,
                qpn,
                psn,
                mtu,
                depth,
            },
        );
        let key = any::<(u32, u32, u32)>().prop_map(|(addr, len, rkey)| Key {
            addr: addr.into(),
            len: len.into(),
            rkey,
        });
        let cdc = (any::<(u64, u64, u32, u32, u8)>(), 0..6u8, 0..16u8).prop_map(
            |((head, cursor, tx_epoch, rx_epoch, rx_flags), tx_phase, flags)| {
                Body::Cdc(Cdc {
                    head,
                    cursor,
                    tx_epoch: Epoch::new(tx_epoch),
                    tx_phase: TxPhase::from_raw(tx_phase),
                    rx_epoch: Epoch::new(rx_epoch),
                    rx_flags: RxFlags::from_raw(rx_flags),
                    flags,
                    moves: head as u8,
                    acked_moves: cursor as u32,
                })
            },
        );
        prop_oneof![
            any::<bool>().prop_map(|reply| Body::ConfirmLink { reply }),
            any::<bool>().prop_map(|reply| Body::DeleteLink { reply }),
            any::<bool>().prop_map(|reply| Body::TestLink { reply }),
            any::<bool>().prop_map(|reply| Body::DeleteRkey { reply }),
            (any::<bool>(), proptest::option::of(end))
                .prop_map(|(reply, end)| Body::AddLink { reply, end }),
            proptest::option::of(key).prop_map(Body::ConfirmRkey),
            cdc,
            any::<(u32, u32, u64, u64)>().prop_map(|(epoch, attempt, kpos, start)| {
                Body::Switch {
                    epoch: Epoch::new(epoch),
                    attempt,
                    kpos,
                    start,
                }
            }),
            any::<(u32, u32, bool)>().prop_map(|(epoch, attempt, ok)| Body::SwitchReply {
                epoch: Epoch::new(epoch),
                attempt,
                ok
            }),
            any::<(u32, u8, u64)>().prop_map(|(moves, log2, from)| Body::Ring {
                moves,
                log2,
                from
            }),
            any::<(u32, u64)>().prop_map(|(epoch, head)| Body::Landed {
                epoch: Epoch::new(epoch),
                head
            }),
            any::<(u32, Option<(u32, u64)>)>().prop_map(|(moves, p)| Body::RingReply {
                moves,
                place: p.map(|(region, offset)| Place { region, offset }),
            }),
        ]
    }

    proptest! {
        #[test]
        fn round_trip(seq: u16, token: u32, credits: u16, mut body in body()) {
            if let Body::AddLink { end: Some(e), .. } = &mut body {
                e.link = token; // the link's number is the token
            }
            let m = Message { seq, token, credits, body };
            let b = m.encode();
            prop_assert_eq!(Message::decode(&b), Ok((m, &[][..])));
        }

        /// Any bytes: no panic, and what is accepted has one form.
        #[test]
        fn noise(mut b: [u8; LEN], kind in 0..13u8, lucky: bool) {
            if lucky {
                b[0] = [1, 2, 4, 6, 7, 9, 0xfe, 0x81, 0x82, 0x83, 0x84, 0x85, 0][usize::from(kind)];
                b[1] = LEN as u8;
            }
            if let Ok((m, _)) = Message::decode(&b) {
                prop_assert_eq!(m.encode(), b);
            }
        }

        #[test]
        fn too_short(b in proptest::collection::vec(any::<u8>(), 0..LEN)) {
            prop_assert_eq!(Message::decode(&b), Err(Malformed::Length(b.len())));
        }

        /// Data comes behind a snapshot only, and no more than there is room for.
        #[test]
        fn data(m in body(), data in proptest::collection::vec(any::<u8>(), 1..300)) {
            let m = Message { seq: 1, token: 0, credits: 2, body: m };
            let whole = [&m.encode()[..], &data].concat();
            let fits = matches!(m.body, Body::Cdc(_)) && data.len() <= DATA_MAX;
            match Message::decode(&whole) {
                Ok((back, d)) => prop_assert!(fits && back == m && d == data),
                Err(e) => prop_assert!(!fits, "{e}"),
            }
        }
    }

    #[test]
    fn a_cdc_message_has_the_layout_of_the_table() {
        let m = Message {
            seq: 0x0102,
            token: 0x0304_0506,
            credits: 0x0708,
            body: Body::Cdc(Cdc {
                head: 1,
                cursor: 2,
                tx_epoch: Epoch::new(3),
                tx_phase: TxPhase::from_raw(4),
                rx_epoch: Epoch::new(5),
                rx_flags: RxFlags::from_raw(6),
                flags: 7,
                moves: 8,
                acked_moves: 9,
            }),
        };
        let mut b = [0; LEN];
        b[..8].copy_from_slice(&[0xfe, 44, 1, 2, 3, 4, 5, 6]);
        (b[15], b[23], b[27], b[31]) = (1, 2, 3, 5);
        b[32..36].copy_from_slice(&[4, 6, 7, 8]);
        b[39] = 9;
        b[40..42].copy_from_slice(&[7, 8]);
        assert_eq!(m.encode(), b);
        b[43] = 1;
        assert_eq!(Message::decode(&b), Err(Malformed::Field(0xfe)));
    }
}
