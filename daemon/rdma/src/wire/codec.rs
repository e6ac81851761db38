//! Encodes messages, and decodes foreign bytes.

use super::{Body, Cdc, Key, LinkEnd, Malformed, Message, Place, DATA_MAX, LEN};
use lane::abi::{tx, Cursor, Epoch, RxFlags, TcpPos, TxPhase};
use lane::num;

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
    fn cursor(&self, at: usize) -> Cursor {
        Cursor::new(self.u64(at))
    }

    /// `None`: there is no such kind.
    fn body(&self, kind: u8) -> Option<Body> {
        let b = self.0;
        let (reply, none) = (b[8] & REPLY != 0, b[8] & NONE != 0);
        Some(match kind {
            1 => Body::ConfirmLink { reply },
            2 => Body::AddLink {
                reply,
                end: (!none).then(|| self.link_end()),
            },
            4 => Body::DeleteLink { reply },
            6 => Body::ConfirmRkey((!none).then(|| Key {
                rkey: self.u32(12),
                addr: self.u64(16),
                len: self.u64(24),
            })),
            7 => Body::TestLink { reply },
            9 => Body::DeleteRkey { reply },
            0xfe => Body::Cdc(self.cdc()),
            0x81 => Body::Switch {
                epoch: Epoch::new(self.u32(8)),
                attempt: self.u32(12),
                tcp_pos: TcpPos::new(self.u64(16)),
                start: self.cursor(24),
            },
            0x82 => Body::SwitchReply {
                epoch: Epoch::new(self.u32(8)),
                attempt: self.u32(12),
                ok: b[16] == 1,
            },
            0x85 => Body::Landed {
                epoch: Epoch::new(self.u32(8)),
                head: self.cursor(16),
            },
            0x83 => Body::Ring {
                moves: self.u32(8),
                log2: b[12],
                from: self.cursor(16),
            },
            0x84 => Body::RingReply {
                moves: self.u32(8),
                place: (b[12] & NONE == 0).then(|| Place {
                    region: self.u32(16),
                    offset: self.u64(24),
                }),
            },
            _ => return None,
        })
    }

    fn link_end(&self) -> LinkEnd {
        LinkEnd {
            link: self.u32(4),
            mtu: self.0[9],
            lid: self.u16(10),
            gid: self.get(12),
            qpn: self.u32(28),
            psn: self.u32(32),
            fabric: self.u32(36),
            depth: self.u16(42),
        }
    }

    fn cdc(&self) -> Cdc {
        Cdc {
            head: self.cursor(8),
            cursor: self.cursor(16),
            tx_epoch: Epoch::new(self.u32(24)),
            rx_epoch: Epoch::new(self.u32(28)),
            tx_phase: TxPhase::from_raw(self.0[32]),
            rx_flags: RxFlags::from_raw(self.0[33]),
            flags: self.0[34],
            moves: self.0[35],
            acked_moves: self.u32(36),
        }
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
    /// The bytes of the message. Data may follow a [`Body::Cdc`].
    pub fn encode(&self) -> [u8; LEN] {
        let mut w = Writer([0; LEN]);
        w.0[0] = self.body.kind();
        w.0[1] = num::tiny(LEN);
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
                w.put(8, c.head.get().to_be_bytes());
                w.put(16, c.cursor.get().to_be_bytes());
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
                tcp_pos,
                start,
            } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(12, attempt.to_be_bytes());
                w.put(16, tcp_pos.get().to_be_bytes());
                w.put(24, start.get().to_be_bytes());
            }
            Body::SwitchReply { epoch, attempt, ok } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(12, attempt.to_be_bytes());
                w.0[16] = u8::from(ok);
            }
            Body::Ring { moves, log2, from } => {
                w.put(8, moves.to_be_bytes());
                w.0[12] = log2;
                w.put(16, from.get().to_be_bytes());
            }
            Body::Landed { epoch, head } => {
                w.put(8, epoch.get().to_be_bytes());
                w.put(16, head.get().to_be_bytes());
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

    /// Decodes a complete message; returns the data after it, too.
    pub fn decode(bytes: &[u8]) -> Result<(Message, &[u8]), Malformed> {
        let Some((b, data)) = bytes.split_first_chunk::<LEN>() else {
            return Err(Malformed::Length(bytes.len()));
        };
        if usize::from(b[1]) != LEN {
            return Err(Malformed::Length(usize::from(b[1])));
        }
        let (r, kind) = (Reader(b), b[0]);
        let body = r.body(kind).ok_or(Malformed::Type(kind))?;
        let m = Message {
            seq: r.u16(2),
            token: r.u32(4),
            credits: r.u16(40),
            body,
        };
        // Every message has exactly one form: bytes that the fields do not cover have to be zero.
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

    /// Can these values mean anything, whatever the state of the two daemons?
    fn possible(&self) -> bool {
        match self {
            Body::AddLink { end: Some(e), .. } => e.possible(),
            Body::ConfirmRkey(Some(k)) => k.addr.checked_add(k.len).is_some(),
            Body::Cdc(c) => c.flags < 16 && c.tx_phase <= tx::BROKEN,
            _ => true,
        }
    }
}
