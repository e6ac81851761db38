//! What tools ask the daemon, and what it answers.

use crate::input::pieces;
use serde::{de::DeserializeOwned, Serialize};
use underpass_admin::capture::{Captured, Decoder, BYTES_MAX};
use underpass_admin::{client, Request, Response};

/// A line: a request, or an answer.
pub(crate) fn admin(data: &[u8]) {
    same::<Request>(data);
    if let Some(r) = same::<Response>(data) {
        assert!(!client::unexpected(&r).to_string().is_empty());
    }
}

/// What was understood can be said, and then means the same.
fn same<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(line: &[u8]) -> Option<M> {
    let m: M = serde_json::from_slice(line).ok()?;
    let text = serde_json::to_string(&m).expect("text");
    assert!(!text.contains('\n'), "more than a line");
    assert_eq!(serde_json::from_str::<M>(&text).ok().as_ref(), Some(&m));
    Some(m)
}

/// What follows the answer to a request for a capture, in pieces.
pub(crate) fn capture(data: &[u8]) {
    let (mut decoder, mut come) = (Decoder::default(), 0);
    for piece in pieces(data) {
        decoder.push(piece);
        come += piece.len();
        loop {
            match decoder.next_one() {
                Ok(None) => break,
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    return;
                }
                Ok(Some((c, bytes))) => {
                    come = come.checked_sub(bytes.len()).expect("more than has come");
                    again(&c, bytes);
                }
            }
        }
    }
}

fn again(c: &Captured, bytes: &[u8]) {
    assert!(bytes.len() <= BYTES_MAX);
    let (mut decoder, mut text) = (Decoder::default(), Vec::new());
    c.encode(bytes, &mut text);
    decoder.push(&text);
    let one = decoder.next_one().expect("what was encoded");
    assert_eq!(one, Some((c.clone(), bytes)));
}
