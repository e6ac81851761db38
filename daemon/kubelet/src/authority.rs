//! What kubelets before 1.26 name as the server: the path of its socket. HTTP/2 has a host there (`:authority`), and h2, below
//! tonic, ends a call that has not ("malformed authority", <https://github.com/hyperium/h2/pull/487>). So such a path is
//! replaced, on the way from the socket, by a host of equal length.
//!
//! Of equal length, because both ends keep headers in tables that forget by size (HPACK, RFC 7541): everything else goes
//! through as it is, and means the same. For that, one fact is needed about a string that was compressed: how long it was.

use std::io;
use std::pin::Pin;
use std::task::{ready, Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// Bytes before the first frame, and of a frame's header.
const PREFACE: usize = 24;
const HEADER: usize = 9;
/// Type of a frame that begins a list of headers, and its flags: a length of padding and a priority come first.
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Longest frame without leave; h2 gives none.
const FRAME_MAX: usize = 16 << 10;
/// Number of the header's name in HPACK's table.
const AUTHORITY: usize = 1;

/// How many codes there are of each length in bits (5 to 28), of the code that compresses strings. It is canonical: this
/// says all of it but which symbol is whose. (Longer codes are of bytes that no path has.)
const CODES: [u32; 24] = [
    10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29,
];
const CODE_MIN: usize = 5;
/// Codes of `/` and `%`: these make a path (some clients write `%2F`).
const SLASH: (usize, u32) = (6, 0x18);
const PERCENT: (usize, u32) = (6, 0x15);

/// The kubelet's end of a connection.
pub(crate) struct Connection {
    stream: UnixStream,
    filter: Filter,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream) -> Self {
        let filter = Filter::default();
        Connection { stream, filter }
    }
}

#[derive(Default)]
struct Filter {
    /// Read, and not looked at.
    raw: Vec<u8>,
    /// To be handed on.
    out: Vec<u8>,
    /// Bytes that go through as they are.
    through: usize,
    begun: bool,
}

impl Filter {
    fn take(&mut self, bytes: &[u8]) {
        self.raw.extend_from_slice(bytes);
        if !self.begun {
            self.begun = true;
            self.through = PREFACE;
        }
        loop {
            let n = self.through.min(self.raw.len());
            self.out.extend(self.raw.drain(..n));
            self.through -= n;
            let Some(header) = self
                .raw
                .first_chunk::<HEADER>()
                .filter(|_| self.through == 0)
            else {
                return;
            };
            let size = [0, header[0], header[1], header[2]];
            let size = usize::try_from(u32::from_be_bytes(size)).unwrap_or(usize::MAX);
            if header[3] != HEADERS || size > FRAME_MAX {
                self.through = HEADER + size;
                continue;
            }
            let Some(frame) = self.raw.get(..HEADER + size) else {
                return;
            };
            match with_a_host(frame) {
                Some(changed) => {
                    self.raw.drain(..HEADER + size);
                    self.out.extend(changed);
                }
                None => self.through = HEADER + size,
            }
        }
    }
}

/// The frame with a host in place of a path; `None`: it needs no change.
fn with_a_host(frame: &[u8]) -> Option<Vec<u8>> {
    let flags = *frame.get(4)?;
    let mut start = HEADER;
    if flags & PADDED != 0 {
        start += 1;
    }
    if flags & PRIORITY != 0 {
        start += 5;
    }
    let block = frame.get(start..)?;
    let (at, value) = path_of(block)?;
    let (from, to) = (start + at.start, start + at.end);
    let mut new = frame.get(..from)?.to_vec();
    number(&mut new, value, 7);
    new.resize(new.len() + value, b'a');
    new.extend_from_slice(frame.get(to..)?);
    let size = u32::try_from(new.len() - HEADER).ok()?.to_be_bytes();
    new[..3].copy_from_slice(&size[1..]);
    Some(new)
}

/// Where in a list of headers a path stands for a host, and how long it is.
fn path_of(block: &[u8]) -> Option<(std::ops::Range<usize>, usize)> {
    let mut at = 0;
    while let Some(&first) = block.get(at) {
        let bits = match first {
            0x80.. => 7,      // in the table
            0x40..=0x7f => 6, // not in the table; to be entered
            0x20..=0x3f => 5, // the table's size
            0..=0x1f => 4,    // not to be entered
        };
        let index = take_number(block, &mut at, bits)?;
        if !matches!(bits, 4 | 6) {
            continue;
        }
        if index == 0 {
            take_string(block, &mut at)?;
        }
        let before = at;
        let (is_path, length) = take_string(block, &mut at)?;
        if index == AUTHORITY && is_path {
            return Some((before..at, length));
        }
    }
    None
}

/// A number in the lower bits of a byte, and in bytes that follow.
fn take_number(block: &[u8], at: &mut usize, bits: u32) -> Option<usize> {
    let mut next = || {
        let b = block.get(*at).copied();
        *at += 1;
        b
    };
    let most = (1usize << bits) - 1;
    let mut n = usize::from(next()?) & most;
    if n < most {
        return Some(n);
    }
    for shift in [0, 7, 14] {
        let b = usize::from(next()?);
        n += (b & 0x7f) << shift;
        if b < 0x80 {
            return Some(n);
        }
    }
    None
}

fn number(to: &mut Vec<u8>, n: usize, bits: u32) {
    let byte = |n: usize| u8::try_from(n & 0xff).unwrap_or(0);
    let most = (1usize << bits) - 1;
    if n < most {
        return to.push(byte(n));
    }
    to.push(byte(most));
    let mut rest = n - most;
    while rest >= 0x80 {
        to.push(byte(rest & 0x7f | 0x80));
        rest >>= 7;
    }
    to.push(byte(rest));
}

/// Skips a string: is it a path, and how long is it, not compressed?
fn take_string(block: &[u8], at: &mut usize) -> Option<(bool, usize)> {
    let compressed = block.get(*at)? & 0x80 != 0;
    let size = take_number(block, at, 7)?;
    let bytes = block.get(*at..*at + size)?;
    *at += size;
    match compressed {
        true => expanded(bytes),
        false => Some((bytes.iter().any(|b| matches!(b, b'/' | b'%')), size)),
    }
}

/// The same of a compressed one.
fn expanded(bytes: &[u8]) -> Option<(bool, usize)> {
    let (mut is_path, mut length) = (false, 0);
    // The code so far, its length, and the first code of that length.
    let (mut code, mut size, mut first) = (0u32, 0, 0u32);
    let bits = bytes
        .iter()
        .flat_map(|b| (0..8).rev().map(move |i| u32::from(b >> i & 1)));
    for bit in bits {
        (code, size, first) = (code << 1 | bit, size + 1, first << 1);
        if size < CODE_MIN {
            continue;
        }
        let count = *CODES.get(size - CODE_MIN)?;
        if code - first < count {
            is_path |= [SLASH, PERCENT].contains(&(size, code));
            length += 1;
            (code, size, first) = (0, 0, 0);
        } else {
            first += count;
        }
    }
    Some((is_path, length)) // (what is left is padding)
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.filter.out.is_empty() {
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.filter.take(read.filled());
        }
        let n = buf.remaining().min(this.filter.out.len());
        buf.put_slice(&this.filter.out[..n]);
        this.filter.out.drain(..n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The registration socket's path as the kubelet's library compresses it.
    const COMPRESSED: [u8; 42] = [
        0x63, 0xb8, 0xec, 0x62, 0x83, 0x46, 0xc7, 0x5b, 0x63, 0x2d, 0x05, 0x4b, 0x15, 0xd1, 0x6c,
        0xc6, 0xa9, 0x11, 0x58, 0x59, 0x8c, 0x84, 0xd9, 0xe9, 0x82, 0x20, 0xcb, 0xdb, 0x54, 0x85,
        0xb2, 0xb1, 0xa1, 0x0b, 0x98, 0xeb, 0x58, 0x59, 0x97, 0x41, 0xc9, 0xd7,
    ];
    const LENGTH: usize = 59;
    const LOCALHOST: [u8; 6] = [0xa0, 0xe4, 0x1d, 0x13, 0x9d, 0x09];

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut f = vec![size[1], size[2], size[3], kind, flags, 0, 0, 0, stream];
        f.extend_from_slice(payload);
        f
    }

    fn string(to: &mut Vec<u8>, s: &[u8], mark: u8) {
        let at = to.len();
        number(to, s.len(), 7);
        to[at] |= mark;
        to.extend_from_slice(s);
    }

    /// What a kubelet of 1.20 sends for a call without an argument: the headers are entered in the table by the first call
    /// (`first`), and taken from there by others.
    pub(crate) fn call(path: &str, stream: u8, first: bool) -> Vec<u8> {
        let mut block = vec![0x83, 0x86]; // POST, http
        block.push(0x04); // :path, not to be entered
        string(&mut block, path.as_bytes(), 0);
        if first {
            block.push(0x40 | 1); // :authority
            string(&mut block, &COMPRESSED, 0x80);
            block.push(0x40 | 31); // content-type
            string(&mut block, b"application/grpc", 0);
            block.push(0x40);
            string(&mut block, b"te", 0);
            string(&mut block, b"trailers", 0);
        } else {
            block.extend([0x80 | 64, 0x80 | 63, 0x80 | 62]);
        }
        let mut all = frame(HEADERS, 0x4, stream, &block);
        all.extend(frame(0, 0x1, stream, &[0; 5])); // a message of no bytes
        all
    }

    /// Before the first call.
    pub(crate) fn hello() -> Vec<u8> {
        let mut all = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        all.extend(frame(4, 0, 0, &[]));
        all
    }

    fn filtered(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut f = Filter::default();
        bytes.chunks(piece).for_each(|b| f.take(b));
        assert!(f.raw.is_empty());
        f.out
    }

    #[test]
    fn lengths_of_compressed_strings() {
        assert_eq!(expanded(&COMPRESSED), Some((true, LENGTH)));
        assert_eq!(expanded(&LOCALHOST), Some((false, 9)));
        assert_eq!(expanded(&[0x54, 0x58, 0x7b, 0x8e, 0xcf]), Some((true, 6))); // %2Fvar
        assert_eq!(expanded(&[0xff; 8]), None);
    }

    #[test]
    fn a_path_becomes_a_host() {
        let mut all = hello();
        all.extend(call("/a.B/C", 1, true));
        all.extend(call("/a.B/D", 3, false));
        let whole = filtered(&all, usize::MAX);
        let host = [b'a'; LENGTH];
        assert!(whole.windows(LENGTH).any(|w| w == host));
        assert_eq!(whole.len(), all.len() - COMPRESSED.len() + LENGTH);
        // The same, whatever the pieces are that it comes in.
        for piece in [1, 2, 7, 33] {
            assert_eq!(filtered(&all, piece), whole);
        }
        // The second frame is longer by as much as is said.
        let second = all.iter().position(|b| *b == 0x83).unwrap();
        let grown = LENGTH - COMPRESSED.len();
        assert_eq!(
            usize::from(whole[second - 7]),
            usize::from(all[second - 7]) + grown
        );
    }

    #[test]
    fn what_is_right_is_left_alone() {
        let mut block = vec![0x3f, 0xe1, 0x1f, 0x83, 0x41]; // a size of the table, and a long index
        string(&mut block, &LOCALHOST, 0x80);
        block.push(0x04);
        string(&mut block, &COMPRESSED, 0x80); // a path where one belongs
        let mut padded = vec![1];
        padded.extend([0; 5]);
        padded.extend(&block);
        padded.push(0);
        let mut all = hello();
        all.extend(frame(HEADERS, 0x4, 1, &block));
        all.extend(frame(HEADERS, 0x4 | PADDED | PRIORITY, 3, &padded));
        all.extend(frame(0, 0, 3, b"\x41\x01/"));
        all.extend(frame(HEADERS, 0, 5, &[0x41, 0x7f])); // it is cut off
        all.extend(frame(HEADERS, PADDED, 5, &[]));
        for piece in [1, 5, usize::MAX] {
            assert_eq!(filtered(&all, piece), all);
        }
        let numbers = |n| {
            let mut v = Vec::new();
            number(&mut v, n, 7);
            take_number(&v, &mut 0, 7)
        };
        for n in [0, 126, 127, 128, 254, 255, 300, 16384] {
            assert_eq!(numbers(n), Some(n));
        }
    }
}
