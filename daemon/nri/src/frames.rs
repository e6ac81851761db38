//! How messages of ttrpc lie on the runtime's socket.
//!
//! The socket is a sequence of chunks: number of a connection, length (4 bytes each, big endian), bytes. The bytes of one
//! connection are a stream of messages of ttrpc: length, number of the call (4 bytes each, big endian), kind, flags (a byte
//! each), payload.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The connection on which the runtime calls the plugin.
pub const PLUGIN: u32 = 1;
/// The connection on which the plugin calls the runtime.
pub const RUNTIME: u32 = 2;

/// A call.
pub const REQUEST: u8 = 1;
/// An answer.
pub const RESPONSE: u8 = 2;

/// Bytes before a chunk and before a message.
const CHUNK_HEAD: usize = 8;
const HEAD: usize = 10;
/// Longest payload of a message, and of a chunk. ttrpc has 4 MiB; but containerd 1.7 tells of all pods in one message, however
/// long.
pub const LONGEST: usize = 64 << 20;
const LONGEST_CHUNK: usize = 2 * LONGEST;

/// A message of ttrpc.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// [`PLUGIN`] or [`RUNTIME`].
    pub connection: u32,
    /// Number of the call, the same in its answer.
    pub call: u32,
    /// [`REQUEST`] or [`RESPONSE`]; others are for streams, which NRI does not use.
    pub kind: u8,
    /// A message of protobuf.
    pub payload: Bytes,
}

/// Something is longer than may be: the other end does not speak this protocol.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the runtime announces {0} bytes, which is more than the protocol allows")]
pub struct TooLong(pub usize);

/// Puts a message after what is to be sent.
pub fn put(out: &mut BytesMut, frame: &Frame) {
    let length = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // (a plugin's messages are short)
    out.put_u32(frame.connection);
    out.put_u32(length(HEAD + frame.payload.len()));
    out.put_u32(length(frame.payload.len()));
    out.put_u32(frame.call);
    out.put_u8(frame.kind);
    out.put_u8(0);
    out.put_slice(&frame.payload);
}

/// What has been received, and is no whole message yet.
#[derive(Debug, Default)]
pub struct Received {
    /// As it came from the socket.
    pub raw: BytesMut,
    /// The streams of the connections.
    plugin: BytesMut,
    runtime: BytesMut,
}

impl Received {
    /// The next message; `None`: more has to come.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, TooLong> {
        loop {
            for (connection, stream) in [(PLUGIN, &mut self.plugin), (RUNTIME, &mut self.runtime)] {
                if let Some(frame) = message(connection, stream)? {
                    return Ok(Some(frame));
                }
            }
            let Some(mut head) = self.raw.get(..CHUNK_HEAD) else {
                return Ok(None);
            };
            let (connection, length) = (head.get_u32(), head.get_u32() as usize);
            if length > LONGEST_CHUNK {
                return Err(TooLong(length));
            }
            if self.raw.len() < CHUNK_HEAD + length {
                return Ok(None);
            }
            self.raw.advance(CHUNK_HEAD);
            let bytes = self.raw.split_to(length);
            match connection {
                PLUGIN => self.plugin.unsplit(bytes),
                RUNTIME => self.runtime.unsplit(bytes),
                _ => {} // a service of the runtime that is newer than this
            }
        }
    }
}

/// The first message of a connection's stream.
fn message(connection: u32, stream: &mut BytesMut) -> Result<Option<Frame>, TooLong> {
    let Some(mut head) = stream.get(..HEAD) else {
        return Ok(None);
    };
    let (length, call, kind) = (head.get_u32() as usize, head.get_u32(), head.get_u8());
    if length > LONGEST {
        return Err(TooLong(length));
    }
    if stream.len() < HEAD + length {
        return Ok(None);
    }
    stream.advance(HEAD);
    Ok(Some(Frame {
        connection,
        call,
        kind,
        payload: stream.split_to(length).freeze(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let frame = (
            1u32..3,
            any::<u32>(),
            1u8..4,
            prop::collection::vec(any::<u8>(), 0..40),
        );
        let frame = frame.prop_map(|(connection, call, kind, payload)| Frame {
            connection,
            call,
            kind,
            payload: payload.into(),
        });
        prop::collection::vec(frame, 0..6)
    }

    proptest! {
        /// Whatever pieces the socket delivers them in.
        #[test]
        fn what_was_put_comes_out(frames in frames(), pieces in prop::collection::vec(1usize..30, 1..40)) {
            let mut bytes = BytesMut::new();
            frames.iter().for_each(|f| put(&mut bytes, f));
            let (mut received, mut out) = (Received::default(), Vec::new());
            let mut pieces = pieces.iter().cycle();
            while !bytes.is_empty() {
                let n = bytes.len().min(*pieces.next().unwrap());
                received.raw.extend_from_slice(&bytes.split_to(n));
                while let Some(f) = received.next_frame().unwrap() {
                    out.push(f);
                }
            }
            prop_assert_eq!(out, frames);
        }

        /// Whatever comes: no panic, and no more kept than has come.
        #[test]
        fn anything_may_come(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut received = Received::default();
            received.raw.extend_from_slice(&bytes);
            while let Ok(Some(f)) = received.next_frame() {
                prop_assert!(f.payload.len() < bytes.len());
            }
        }
    }

    /// A message may be spread over chunks, between which another connection has one.
    #[test]
    fn a_message_in_several_chunks() {
        let (mut whole, mut other) = (BytesMut::new(), BytesMut::new());
        let long = Frame {
            connection: PLUGIN,
            call: 7,
            kind: REQUEST,
            payload: vec![5; 20].into(),
        };
        let short = Frame {
            connection: RUNTIME,
            call: 1,
            kind: RESPONSE,
            payload: Bytes::new(),
        };
        put(&mut whole, &long);
        put(&mut other, &short);
        let stream = whole.split_off(CHUNK_HEAD);
        let mut received = Received::default();
        let chunk = |out: &mut BytesMut, connection: u32, part: &[u8]| {
            out.put_u32(connection);
            out.put_u32(u32::try_from(part.len()).unwrap());
            out.put_slice(part);
        };
        chunk(&mut received.raw, PLUGIN, &stream[..4]);
        received.raw.extend_from_slice(&other);
        chunk(&mut received.raw, 9, &[0; 30]); // a connection that nobody knows
        chunk(&mut received.raw, PLUGIN, &stream[4..]);
        assert_eq!(received.next_frame(), Ok(Some(short)));
        assert_eq!(received.next_frame(), Ok(Some(long)));
        assert_eq!(received.next_frame(), Ok(None));
    }

    #[test]
    fn too_long() {
        let mut received = Received::default();
        received.raw.put_u32(PLUGIN);
        received.raw.put_u32(u32::MAX);
        assert_eq!(received.next_frame(), Err(TooLong(0xffff_ffff)));
        let mut received = Received::default();
        received.raw.put_slice(&[0, 0, 0, 1, 0, 0, 0, 10]);
        received.raw.put_u32(u32::try_from(LONGEST + 1).unwrap());
        received.raw.put_slice(&[0, 0, 0, 1, 1, 0]);
        assert_eq!(received.next_frame(), Err(TooLong(LONGEST + 1)));
    }
}
