//! The blocks of a pcapng file (draft-ietf-opsawg-pcapng) that a capture of one interface has. Written here because they
//! are three; the crate for them, pcap-file, is at a release candidate.

use std::io::{self, Write};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// Packets begin with their IP header (LINKTYPE_RAW).
const RAW_IP: u16 = 101;
const END: u16 = 0;
const COMMENT: u16 = 1;
const USER_APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const TIME_RESOLUTION: u16 = 9;
/// Times are in units of 10^-9 s.
const NANOSECONDS: u8 = 9;

/// A file that is being written.
pub(super) struct Pcapng<W: Write>(W);

impl<W: Write> Pcapng<W> {
    /// Begins a file.
    pub(super) fn new(to: W, application: &str, comment: &str) -> io::Result<Self> {
        let mut file = Pcapng(to);
        let mut section = Vec::new();
        section.extend_from_slice(&BYTE_ORDER.to_ne_bytes());
        section.extend_from_slice(&1u16.to_ne_bytes());
        section.extend_from_slice(&0u16.to_ne_bytes());
        section.extend_from_slice(&u64::MAX.to_ne_bytes()); // its length is not known
        option(&mut section, COMMENT, comment.as_bytes());
        option(&mut section, USER_APPLICATION, application.as_bytes());
        option(&mut section, END, &[]);
        file.block(SECTION, &section)?;
        let mut interface = Vec::new();
        interface.extend_from_slice(&RAW_IP.to_ne_bytes());
        interface.extend_from_slice(&[0; 2]);
        interface.extend_from_slice(&0u32.to_ne_bytes()); // packets are whole
        option(&mut interface, INTERFACE_NAME, b"lane");
        option(&mut interface, TIME_RESOLUTION, &[NANOSECONDS]);
        option(&mut interface, END, &[]);
        file.block(INTERFACE, &interface)?;
        Ok(file)
    }

    /// Adds a packet that was seen at this time (ns since 1970). An empty comment is none.
    pub(super) fn packet(&mut self, ns: u64, packet: &[u8], comment: &str) -> io::Result<()> {
        let len = lane::num::small(packet.len());
        let mut body = Vec::with_capacity(packet.len() + comment.len() + 64);
        for word in [0, high32(ns), lane::num::low32(ns), len, len] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        padded(&mut body, packet);
        if !comment.is_empty() {
            option(&mut body, COMMENT, comment.as_bytes());
            option(&mut body, END, &[]);
        }
        self.block(PACKET, &body)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    /// A block: its type and length, the body, and its length once more.
    fn block(&mut self, kind: u32, body: &[u8]) -> io::Result<()> {
        let len = lane::num::small(body.len() + 12).to_ne_bytes();
        self.0.write_all(&kind.to_ne_bytes())?;
        self.0.write_all(&len)?;
        self.0.write_all(body)?;
        self.0.write_all(&len)
    }
}

fn high32(n: u64) -> u32 {
    lane::num::low32(n >> 32)
}

/// Appends bytes, and zeros up to a multiple of four.
fn padded(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(bytes);
    to.resize(to.len().next_multiple_of(4), 0);
}

fn option(to: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    to.extend_from_slice(&code.to_ne_bytes());
    to.extend_from_slice(&lane::num::low16(value.len() as u64).to_ne_bytes());
    padded(to, value);
}
