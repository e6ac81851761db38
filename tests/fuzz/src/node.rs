//! What the container runtime sends, and another node's daemon on queue pairs.

use crate::input::pieces;
use bytes::BytesMut;
use prost::Message;
use underpass_nri::frames::{put, Frame, Received, LONGEST, PLUGIN, RUNTIME};
use underpass_nri::messages as nri;
use underpass_rdma::wire::{Body, Message as OnQueue, DATA_MAX, LEN};

/// What the runtime sends, in pieces, down to the fields of its messages.
pub(crate) fn nri(data: &[u8]) {
    let (mut received, mut come) = (Received::default(), 0);
    for piece in pieces(data) {
        received.raw.extend_from_slice(piece);
        come += piece.len();
        loop {
            match received.next_frame() {
                Ok(None) => break,
                Err(e) => {
                    assert!(e.0 > LONGEST);
                    return;
                }
                Ok(Some(f)) => {
                    come = come
                        .checked_sub(f.payload.len())
                        .expect("more than has come");
                    again(&f);
                }
            }
        }
    }
}

/// The same message, and the same of what is in it.
fn again(f: &Frame) {
    assert!(matches!(f.connection, PLUGIN | RUNTIME));
    let mut sent = BytesMut::new();
    put(&mut sent, f);
    let mut received = Received::default();
    received.raw = sent;
    assert_eq!(received.next_frame().as_ref(), Ok(&Some(f.clone())));
    assert_eq!(received.next_frame(), Ok(None));
    same::<nri::Response>(&f.payload);
    if let Some(r) = same::<nri::Request>(&f.payload) {
        same::<nri::Configure>(&r.payload);
        same::<nri::Synchronize>(&r.payload);
        same::<nri::CreateContainer>(&r.payload);
        same::<nri::StateChange>(&r.payload);
        same::<nri::About>(&r.payload);
    }
}

/// A message that was understood can be said, and then means the same.
fn same<M: Message + Default + PartialEq>(bytes: &[u8]) -> Option<M> {
    let m = M::decode(bytes).ok()?;
    let back = M::decode(m.encode_to_vec().as_slice());
    assert!(back.is_ok_and(|b| b == m));
    Some(m)
}

/// A message on a queue pair: each has exactly one form, and only a snapshot has data behind it.
pub(crate) fn queue(data: &[u8]) {
    let Ok((m, payload)) = OnQueue::decode(data) else {
        return;
    };
    assert_eq!((&m.encode()[..], payload), data.split_at(LEN));
    assert!(payload.is_empty() || matches!(m.body, Body::Cdc(_)) && payload.len() <= DATA_MAX);
}
