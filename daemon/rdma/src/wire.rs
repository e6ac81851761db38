//! The 44-byte messages that two daemons send each other on a queue pair.
//!
//! Types, sizes and meanings follow RFC 7609 (CDC and LLC messages of SMC-R); the layouts are our own. All numbers
//! are big endian. No other module touches foreign bytes: decoding never panics, and refuses unknown values and
//! nonzero padding, so every message has exactly one form.
//!
//! Only a snapshot may be longer than 44 bytes: data of its lane follows it.
//!
//! Common to all: `0 type u8 | 1 length u8 = 44 | 2 seq u16 | 4 token u32 | … | 40 credits u16`. The token names a
//! lane, a link or a region by the number that the receiver of the message gave out; `credits` counts the receive
//! buffers that the sender of the message has ever posted on this queue pair.

mod codec;

use lane::abi::{Cursor, Epoch, RxFlags, TcpPos, TxPhase};
use thiserror::Error;

/// Length of every message in bytes, without data.
pub const LEN: usize = 44;
/// Maximum number of ring bytes that may follow a snapshot, instead of being written before it.
pub const DATA_MAX: usize = 212;

/// Flags of [`Cdc::flags`].
pub mod flag {
    use std::convert::identity;

    lane::named! { u8, identity => Flag;
        /// Tell me your reader's cursor as soon as it moves.
        WANT_SPACE: WantSpace = 1;
        /// Set in the first message about this lane after it moved to another link, and in all that follow while
        /// `head` is below one that was announced before: the reader may already know more.
        VALIDATE: Validate = 2;
        /// This lane has failed here; nothing about it will follow.
        ABORT: Abort = 4;
        /// Tell me (`Landed`) when your end can see everything up to `head`.
        WANT_LANDED: WantLanded = 8;
    }
}

/// State of a lane in both directions: a snapshot, never an event. Only this message may have data after it: the
/// last bytes before `head`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cdc {
    /// Cursor before which all bytes are in the peer's ring: their writes precede this message, or the bytes follow
    /// it.
    pub head: Cursor,
    /// Cursor up to which our reader has consumed.
    pub cursor: Cursor,
    /// Epoch of our sender.
    pub tx_epoch: Epoch,
    /// How far our sender is in that epoch.
    pub tx_phase: TxPhase,
    /// Epoch of our reader.
    pub rx_epoch: Epoch,
    /// What our reader says about that epoch.
    pub rx_flags: RxFlags,
    /// Bits of [`flag`].
    pub flags: u8,
    /// Low byte of the number of the ring to which `head` refers.
    pub moves: u8,
    /// Number of the last ring of the peer that we have answered.
    pub acked_moves: u32,
}

/// One end of a link: what the other has to know to connect its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinkEnd {
    /// Number of the link, given by the end that offers it.
    pub link: u32,
    /// Rails with the same fabric number reach each other.
    pub fabric: u32,
    /// Address of the port.
    pub gid: [u8; 16],
    /// Local identifier on InfiniBand; with iWARP, in answers, the TCP port to connect to.
    pub lid: u16,
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
    /// First packet number, 24 bits.
    pub psn: u32,
    /// Code of the path MTU: 0 (256) to 4 (4096).
    pub mtu: u8,
    /// Number of receive buffers that are posted.
    pub depth: u16,
}

/// The place of a ring in a region of its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Token of the region.
    pub region: u32,
    /// Offset in bytes from the beginning of the region.
    pub offset: u64,
}

/// How to access a region over the link on which the message came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Address of its first byte, as its owner's device knows it.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: u32,
}

/// Kinds of messages: the type on the wire, and the meaning of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// 1, token = link: the queue pair works. The offering end sends it, the other replies.
    ConfirmLink {
        /// Is it the reply?
        reply: bool,
    },
    /// 2, token = link: an offer of another link, the answer to one, or (no end) its refusal.
    AddLink {
        /// Is it the answer?
        reply: bool,
        /// The queue pair of the sender of this message; none: a refusal.
        end: Option<LinkEnd>,
    },
    /// 4, token = link: our end is destroyed. The reply reports the same of the other end.
    DeleteLink {
        /// Is it the reply?
        reply: bool,
    },
    /// 6, token = region: its key on this link; none if it could not be registered.
    ConfirmRkey(Option<Key>),
    /// 7, token = link: are you there? The reply: yes. An unrequested reply only carries credits.
    TestLink {
        /// Is it the reply?
        reply: bool,
    },
    /// 9, token = region: it is withdrawn. The reply says that no write to it is in flight, or will be.
    DeleteRkey {
        /// Is it the reply?
        reply: bool,
    },
    /// 0xfe, token = lane.
    Cdc(Cdc),
    /// 0x81, token = lane: the sender wants to switch up.
    Switch {
        /// Epoch for which the reader is ready.
        epoch: Epoch,
        /// Grows with each request; a repeated request has the same number.
        attempt: u32,
        /// Kernel position, in bytes, at which the TCP bytes end.
        tcp_pos: TcpPos,
        /// Ring cursor of the first byte on the ring.
        start: Cursor,
    },
    /// 0x82, token = lane: the answer to a switch.
    SwitchReply {
        /// Epoch of the switch.
        epoch: Epoch,
        /// Attempt number of the switch.
        attempt: u32,
        /// Does the switch stand? If not, it never will.
        ok: bool,
    },
    /// 0x83, token = lane: from cursor `from` on, the sender's bytes are on another ring.
    Ring {
        /// Number of the ring on this lane, from 1.
        moves: u32,
        /// log2 of the ring's size in bytes.
        log2: u8,
        /// Cursor of the first byte on this ring.
        from: Cursor,
    },
    /// 0x85, token = lane: the receiving end can see everything up to `head`.
    Landed {
        /// Epoch of the sender.
        epoch: Epoch,
        /// Ring cursor, in bytes.
        head: Cursor,
    },
    /// 0x84, token = lane: where the receiver has placed the ring; none if there is no memory.
    RingReply {
        /// Number of the ring, as in RING ([`Body::Ring`]).
        moves: u32,
        /// Where the sender has to write.
        place: Option<Place>,
    },
}

/// One message on a queue pair, without the data after a [`Body::Cdc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Counts the messages about one lane; 0 in other messages.
    pub seq: u16,
    /// Number of a lane, link or region, given out by the receiver of the message.
    pub token: u32,
    /// Number of receive buffers that the sender has ever posted on this queue pair, modulo 2^16.
    pub credits: u16,
    /// The kind of the message, and its fields.
    pub body: Body,
}

/// Why bytes are no valid message; the pair then fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// Too short, too long, or the length in it is wrong.
    #[error("a message of {0} bytes")]
    Length(usize),
    /// A type that this build does not know.
    #[error("unknown message type {0:#04x}")]
    Type(u8),
    /// A value that no sender can mean, or bytes that should be zero are not.
    #[error("a field of message type {0:#04x} holds an impossible value")]
    Field(u8),
}

impl LinkEnd {
    pub(crate) fn possible(&self) -> bool {
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
                    head: Cursor::new(head),
                    cursor: Cursor::new(cursor),
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
            any::<(u32, u32, u64, u64)>().prop_map(|(epoch, attempt, tcp_pos, start)| {
                Body::Switch {
                    epoch: Epoch::new(epoch),
                    attempt,
                    tcp_pos: TcpPos::new(tcp_pos),
                    start: Cursor::new(start),
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
                from: Cursor::new(from)
            }),
            any::<(u32, u64)>().prop_map(|(epoch, head)| Body::Landed {
                epoch: Epoch::new(epoch),
                head: Cursor::new(head)
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

        /// Any bytes: decoding does not panic, and accepted messages have only one form.
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

        /// Data may follow only a snapshot, and no more than there is room for.
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
                head: Cursor::new(1),
                cursor: Cursor::new(2),
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
