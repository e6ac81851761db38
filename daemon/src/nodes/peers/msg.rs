//! What daemons of two nodes say to each other, and how it is framed: `length u32 (big endian) |
//! JSON object`, at most 64 KiB, the object's `kind` naming the message.
//!
//! Unknown kinds and unknown members are ignored, because a newer daemon may send more. Anything else that cannot
//! be parsed ends the channel: after a message whose meaning is unknown, the state of the two nodes may differ.
//! Nothing here allocates more than a message may be long.

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use tokio_util::codec::{Decoder, Encoder, LengthDelimitedCodec};

/// Longest message, without its length.
pub const MAX: usize = 64 << 10;
/// Version that this daemon speaks, and the oldest that it still understands.
pub const VERSION: u32 = 3;
pub const MIN_VERSION: u32 = 3;

/// Proof of knowing both initial sequence numbers of a connection, for one channel and direction;
/// see `digest`.
pub type Digest = [u8; 32];

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Msg {
    /// First message of each side. `incarnation` is another one in each run of a daemon; `lookups`:
    /// how many `Lookup`s the sender keeps for the other at a time.
    Hello {
        version: u32,
        min_version: u32,
        node: String,
        incarnation: u64,
        release: String,
        lookups: u32,
    },
    /// The channel ends, because of this.
    Close {
        code: CloseReason,
        text: String,
    },
    Ping {
        n: u64,
    },
    Pong {
        n: u64,
    },
    /// An end of the sender's node waits for its other end, which may be at the receiver's. Stays
    /// until `LookupDone`, `Make`, or the channel's end.
    Lookup {
        id: u64,
        claim: Claim,
    },
    LookupDone {
        id: u64,
    },
    /// The receiver's end `lookup` will not find its other end here for now, for this reason (shown to the user; the
    /// lookup stays).
    Hint {
        lookup: u64,
        reason: u32,
    },
    /// The other end of `lookup` is here, as `claim` says. If `refusal` is not 0, the sender cannot make a lane
    /// across nodes, for this reason.
    Make {
        lookup: u64,
        make: u64,
        claim: Claim,
        refusal: u32,
    },
    /// They are one connection. `refusal` as in `Make`.
    Made {
        make: u64,
        refusal: u32,
    },
    /// The ends do not make a pair, for this reason.
    Fail {
        make: u64,
        reason: u32,
    },
    /// An end of the sender's node is expedited (`underpass check`): look for the program that
    /// holds its other end, and ask it to register. Addresses as that other end has them, as far
    /// as the sender knows.
    Expedited {
        local: SocketAddr,
        peer: SocketAddr,
    },
    /// An end of the sender's node waits for its other end, with these addresses as that has them: say why it does not come, and
    /// do nothing about it.
    Ask {
        local: SocketAddr,
        peer: SocketAddr,
    },
    /// It was found: this is why it is on TCP so far (shown to the user). Addresses as asked.
    Seen {
        local: SocketAddr,
        peer: SocketAddr,
        reason: u32,
    },
    /// The incarnation of the rails between these two nodes that the sender is in: see `dataplane::rail`. The
    /// following messages are void in any other.
    Rails {
        incarnation: u64,
    },
    /// From engine to engine.
    Engine {
        incarnation: u64,
        control: underpass_rdma::engine::Control,
    },
    /// The sender has a lane for pairing `pair`: the token that names it, and how often its slot was used before.
    /// Only the initiator's `tag` counts.
    Lane {
        incarnation: u64,
        pair: u64,
        token: u32,
        uses: u32,
        tag: u64,
    },
    /// The initiator has connected its end and the responder's: the lane may be used.
    LaneGo {
        incarnation: u64,
        pair: u64,
    },
    /// There will be no lane for this pairing.
    NoLane {
        incarnation: u64,
        pair: u64,
        reason: u32,
    },
    /// A kind of a newer version.
    #[serde(other)]
    Unknown,
}

/// Why a channel ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CloseReason {
    /// The other channel of these two nodes is kept.
    Duplicate,
    /// No common version.
    Version,
    /// The certificate is not one of the expected node.
    Identity,
    /// A message that makes no sense.
    Malformed,
    /// The sender is told to stop.
    Stopping,
    /// Certificates were replaced: connect again.
    Rotated,
    #[serde(other)]
    Other,
}

/// What a daemon says about an end of its node. Nothing in it is believed without the digest and
/// the directory.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Claim {
    /// `None`: nothing was recorded about this connection, it cannot be proven.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "hex")]
    pub proof: Option<Digest>,
    /// As the socket has them.
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Milliseconds since the handshake ended.
    pub age_ms: u64,
    /// On the connecting side of the handshake?
    pub active: bool,
    /// Byte positions; see `socket::Counts`.
    pub sent: u64,
    pub acked: u64,
    pub received: u64,
}

mod hex {
    use super::Digest;
    use serde::{de::Error, Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(d: &Option<Digest>, s: S) -> Result<S::Ok, S::Error> {
        match d {
            Some(d) => s.serialize_str(&d.iter().map(|b| format!("{b:02x}")).collect::<String>()),
            None => s.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Digest>, D::Error> {
        let Some(text) = Option::<String>::deserialize(d)? else {
            return Ok(None);
        };
        let mut out = Digest::default();
        let digits = text.as_bytes();
        if digits.len() != 2 * out.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(D::Error::custom("a proof is 64 hexadecimal digits"));
        }
        for (b, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(D::Error::custom)?;
            *b = u8::from_str_radix(pair, 16).map_err(D::Error::custom)?;
        }
        Ok(Some(out))
    }
}

#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    #[error("a message of more than {MAX} bytes")]
    Long,
    #[error("an empty message")]
    Empty,
    #[error("a message that cannot be read: {0}")]
    Json(String),
}

impl Msg {
    /// Puts the message, with its length in front, after what is there. Ours always fit: the longest text in them is
    /// cut by [`Msg::close`].
    pub fn encode(&self, out: &mut BytesMut) {
        // Writing into a vector does not fail, and neither do these types.
        let body = serde_json::to_vec(self).unwrap_or_default();
        let _ = framing().encode(Bytes::from(body), out);
    }

    pub fn close(code: CloseReason, text: &str) -> Msg {
        Msg::Close {
            code,
            text: text.chars().take(300).collect(),
        }
    }
}

fn framing() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .max_frame_length(MAX)
        .new_codec()
}

/// Free space that is made for each read.
const READ: usize = 16 << 10;

/// Puts messages together from what arrives.
pub struct Frames {
    buf: BytesMut,
    framing: LengthDelimitedCodec,
}

impl Default for Frames {
    fn default() -> Self {
        Frames {
            buf: BytesMut::new(),
            framing: framing(),
        }
    }
}

impl Frames {
    /// The buffer to read into.
    pub fn room(&mut self) -> &mut BytesMut {
        self.buf.reserve(READ);
        &mut self.buf
    }

    /// The next complete message. After an error there are no more.
    pub fn take(&mut self) -> Result<Option<Msg>, Malformed> {
        let Some(body) = self
            .framing
            .decode(&mut self.buf)
            .map_err(|_| Malformed::Long)?
        else {
            return Ok(None);
        };
        if body.is_empty() {
            return Err(Malformed::Empty);
        }
        let msg = serde_json::from_slice(&body).map_err(|e| Malformed::Json(e.to_string()))?;
        Ok(Some(msg))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim() -> impl Strategy<Value = Claim> {
        (
            any::<Option<Digest>>(),
            any::<(SocketAddr, SocketAddr)>(),
            any::<(u64, bool, u64, u64, u64)>(),
        )
            .prop_map(|(proof, (local, peer), n)| Claim {
                proof,
                // The textual form of an address has no scope.
                local: crate::os::address::normal(strip(local)),
                peer: crate::os::address::normal(strip(peer)),
                age_ms: n.0,
                active: n.1,
                sent: n.2,
                acked: n.3,
                received: n.4,
            })
    }

    fn addresses() -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
        any::<(SocketAddr, SocketAddr)>().prop_map(|(a, b)| (strip(a), strip(b)))
    }

    fn strip(a: SocketAddr) -> SocketAddr {
        SocketAddr::new(a.ip(), a.port())
    }

    fn any_msg() -> impl Strategy<Value = Msg> {
        let reason = any::<u32>;
        prop_oneof![
            (any::<(u32, u32, u64, u32)>(), ".{0,40}", ".{0,40}").prop_map(|(n, node, release)| {
                Msg::Hello {
                    version: n.0,
                    min_version: n.1,
                    node,
                    incarnation: n.2,
                    release,
                    lookups: n.3,
                }
            }),
            ".{0,400}".prop_map(|t| Msg::close(CloseReason::Version, &t)),
            any::<u64>().prop_map(|n| Msg::Ping { n }),
            any::<u64>().prop_map(|n| Msg::Pong { n }),
            (any::<u64>(), claim()).prop_map(|(id, claim)| Msg::Lookup { id, claim }),
            any::<u64>().prop_map(|id| Msg::LookupDone { id }),
            (any::<u64>(), reason()).prop_map(|(lookup, reason)| Msg::Hint { lookup, reason }),
            any::<u64>().prop_map(|incarnation| Msg::Rails { incarnation }),
            any::<(u64, u64, u32, u32, u64)>().prop_map(|n| Msg::Lane {
                incarnation: n.0,
                pair: n.1,
                token: n.2,
                uses: n.3,
                tag: n.4,
            }),
            any::<(u64, u64)>().prop_map(|n| Msg::LaneGo {
                incarnation: n.0,
                pair: n.1
            }),
            any::<(u64, u64, u32)>().prop_map(|n| Msg::NoLane {
                incarnation: n.0,
                pair: n.1,
                reason: n.2,
            }),
            any::<(u64, u32)>().prop_map(|n| Msg::Engine {
                incarnation: n.0,
                control: underpass_rdma::engine::Control::QpDead { link: n.1 },
            }),
            (any::<(u64, u64)>(), claim(), reason()).prop_map(|(n, claim, refusal)| Msg::Make {
                lookup: n.0,
                make: n.1,
                claim,
                refusal,
            }),
            (any::<u64>(), reason()).prop_map(|(make, refusal)| Msg::Made { make, refusal }),
            (any::<u64>(), reason()).prop_map(|(make, reason)| Msg::Fail { make, reason }),
            addresses().prop_map(|(local, peer)| Msg::Expedited { local, peer }),
            addresses().prop_map(|(local, peer)| Msg::Ask { local, peer }),
            (addresses(), reason()).prop_map(|((local, peer), reason)| Msg::Seen {
                local,
                peer,
                reason,
            }),
        ]
    }

    proptest! {
        /// However the bytes are cut, the messages come out as they went in.
        #[test]
        fn round_trip(msgs in proptest::collection::vec(any_msg(), 1..6), cut in 1usize..50) {
            let mut bytes = BytesMut::new();
            msgs.iter().for_each(|m| m.encode(&mut bytes));
            let mut f = Frames::default();
            let mut got = Vec::new();
            for part in bytes.chunks(cut) {
                f.room().extend_from_slice(part);
                while let Some(m) = f.take().unwrap() { got.push(m); }
            }
            prop_assert_eq!(got, msgs);
        }

        #[test]
        fn noise_never_panics(parts in proptest::collection::vec(any::<Vec<u8>>(), 0..6)) {
            let mut f = Frames::default();
            for p in parts {
                f.room().extend_from_slice(&p);
                while let Ok(Some(_)) = f.take() {}
            }
        }

        /// Whatever one byte is changed to: a message, or an error; never more than was sent.
        #[test]
        fn a_changed_byte(m in any_msg(), at: proptest::sample::Index, to: u8) {
            let mut b = BytesMut::new();
            m.encode(&mut b);
            let i = at.index(b.len());
            b[i] = to;
            let mut f = Frames::default();
            f.room().extend_from_slice(&b);
            let mut n = 0;
            while let Ok(Some(_)) = f.take() { n += 1; }
            prop_assert!(n <= 1);
        }
    }

    fn one(text: &str) -> Result<Option<Msg>, Malformed> {
        let mut f = Frames::default();
        f.room()
            .extend_from_slice(&(text.len() as u32).to_be_bytes());
        f.room().extend_from_slice(text.as_bytes());
        f.take()
    }

    #[test]
    fn newer_versions_may_say_more() {
        assert_eq!(one(r#"{"kind":"dance","n":[1,2]}"#), Ok(Some(Msg::Unknown)));
        let more = r#"{"kind":"ping","n":7,"color":"red"}"#;
        assert_eq!(one(more), Ok(Some(Msg::Ping { n: 7 })));
        let close = r#"{"kind":"close","code":"bored","text":""}"#;
        let other = Msg::close(CloseReason::Other, "");
        assert_eq!(one(close), Ok(Some(other)));
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        for bad in [
            "{}",
            "[]",
            "null",
            r#"{"kind":7}"#,
            r#"{"kind":"ping"}"#,
            r#"{"kind":"ping","n":-1}"#,
            r#"{"kind":"ping","n":1} x"#,
            r#"{"kind":"lookup","id":1,"claim":{}}"#,
            "\u{0}",
        ] {
            assert!(matches!(one(bad), Err(Malformed::Json(_))), "{bad}");
        }
        let mut f = Frames::default();
        f.room().extend_from_slice(&[0; 4]);
        assert_eq!(f.take(), Err(Malformed::Empty));
        let mut f = Frames::default();
        f.room().extend_from_slice(&(MAX as u32 + 1).to_be_bytes());
        assert_eq!(f.take(), Err(Malformed::Long), "before it has come");
    }
}
