//! What follows the answer to [`crate::Request::Capture`]: a line of JSON for each [`Captured`], and after the line of
//! [`Captured::Bytes`] the bytes themselves.

use serde::{Deserialize, Serialize};
use std::io;

/// Most bytes of one [`Captured::Bytes`].
pub const BYTES_MAX: usize = 32 << 10;
/// Longest line.
const LINE_MAX: usize = 4096;

/// Something about the connection. Its ends are 0 and 1, as the answer has them.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Captured {
    /// How it is carried has changed, or the capture has begun.
    State {
        /// Is there a lane?
        lane: bool,
        /// Is the second end on another node?
        #[serde(default)]
        remote: bool,
        /// Is what each end sends on the ring?
        up: [bool; 2],
        /// Sequence number of the first byte that each end has sent, if that is known.
        firsts: [Option<u32>; 2],
    },
    /// Bytes that one end has sent over its lane, and the other one has taken; or, where the other one is on another node,
    /// that have left for it or arrived from it.
    Bytes {
        /// The end that sent them.
        from: u8,
        /// When they were seen: ns since 1970.
        ns: u64,
        /// Bytes that this end had sent before these, on lanes and on TCP.
        at: u64,
        /// Bytes that it had received, as far as they were shown.
        acked: u64,
        /// Of the bytes that are missing before these, how many went over the lane. (The others went over TCP.)
        lost: u64,
        /// How many follow the line, at most [`BYTES_MAX`].
        len: u32,
    },
    /// There will be no more.
    End {
        /// Why, in words for people.
        why: String,
        /// Bytes on the lane that nobody has taken: they are not shown.
        unread: u64,
    },
}

impl Captured {
    /// Appends the line, and the bytes after it.
    pub fn encode(&self, bytes: &[u8], to: &mut Vec<u8>) {
        if serde_json::to_writer(&mut *to, self).is_ok() {
            to.push(b'\n');
            to.extend_from_slice(bytes);
        }
    }
}

/// Takes apart what a daemon sends.
#[derive(Default)]
pub struct Decoder {
    /// What has come and was not taken, from this place on.
    come: Vec<u8>,
    at: usize,
}

impl Decoder {
    /// Some more has come.
    pub fn push(&mut self, more: &[u8]) {
        self.come.drain(..self.at);
        self.at = 0;
        self.come.extend_from_slice(more);
    }

    /// The next one that is complete, with its bytes.
    pub fn next_one(&mut self) -> io::Result<Option<(Captured, &[u8])>> {
        let rest = &self.come[self.at..];
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let Some(line) = rest.iter().position(|b| *b == b'\n') else {
            return match rest.len() > LINE_MAX {
                true => Err(wrong("a line that is too long")),
                false => Ok(None),
            };
        };
        let one: Captured = serde_json::from_slice(&rest[..line])?;
        let len = match &one {
            Captured::Bytes { len, .. } => *len as usize,
            _ => 0,
        };
        if len > BYTES_MAX {
            return Err(wrong("more bytes than there may be"));
        }
        let begin = self.at + line + 1;
        match self.come.get(begin..begin + len) {
            None => Ok(None),
            Some(bytes) => {
                self.at = begin + len;
                Ok(Some((one, bytes)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: u32) -> Captured {
        Captured::Bytes {
            from: 1,
            ns: 7,
            at: 8,
            acked: 9,
            lost: 10,
            len,
        }
    }

    #[test]
    fn what_is_sent_comes_out_again_however_it_is_cut() {
        let all = [
            (
                Captured::State {
                    lane: true,
                    remote: true,
                    up: [true, false],
                    firsts: [Some(u32::MAX), None],
                },
                &b""[..],
            ),
            (bytes(3), b"\n{\n"),
            (bytes(0), b""),
            (
                Captured::End {
                    why: "a\nb".into(),
                    unread: 5,
                },
                b"",
            ),
        ];
        let mut sent = Vec::new();
        for (c, b) in &all {
            c.encode(b, &mut sent);
        }
        for cut in 1..sent.len() {
            let (mut d, mut got) = (Decoder::default(), Vec::new());
            for part in sent.chunks(cut) {
                d.push(part);
                while let Some((c, b)) = d.next_one().unwrap() {
                    got.push((c, b.to_vec()));
                }
            }
            let want: Vec<_> = all.iter().map(|(c, b)| (c.clone(), b.to_vec())).collect();
            assert_eq!(got, want, "cut every {cut}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut many = Vec::new();
        bytes(1 << 20).encode(b"", &mut many);
        for bad in [&b"{}\n"[..], &many, &[b'x'; LINE_MAX + 1]] {
            let mut d = Decoder::default();
            d.push(bad);
            assert!(d.next_one().is_err());
        }
    }
}
