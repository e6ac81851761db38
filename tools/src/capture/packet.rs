//! TCP segments in IP packets.

use std::net::{IpAddr, SocketAddr};

/// What a segment says.
pub(super) struct Segment<'a> {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub seq: u32,
    pub ack: u32,
    pub bytes: &'a [u8],
}

const TCP: u8 = 6;
/// Bytes of a header without options.
const TCP_HEADER: usize = 20;
const TTL: u8 = 64;
const ACK_PSH: u8 = 0x18;
const WINDOW: u16 = u16::MAX;
/// Most bytes that a packet can have after its IP header.
const PAYLOAD_MAX: usize = u16::MAX as usize - 20 - TCP_HEADER;

/// The packet. Of more bytes than fit into one it has the first ones.
pub(super) fn segment(s: &Segment<'_>) -> Vec<u8> {
    let bytes = &s.bytes[..s.bytes.len().min(PAYLOAD_MAX)];
    let len = length(TCP_HEADER + bytes.len());
    // The addresses, and what the checksum of TCP counts before its header.
    let (mut packet, pseudo) = match (s.from.ip(), s.to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut h = vec![0x45, 0];
            h.extend_from_slice(&(len + 20).to_be_bytes());
            h.extend_from_slice(&[0, 0, 0x40, 0, TTL, TCP, 0, 0]); // not to be fragmented
            h.extend_from_slice(&from.octets());
            h.extend_from_slice(&to.octets());
            let sum = checksum(&[&h]);
            h[10..12].copy_from_slice(&sum.to_be_bytes());
            let pseudo = [&from.octets()[..], &to.octets()].concat();
            (h, pseudo)
        }
        (from, to) => {
            let octets = |ip| match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let pseudo = [octets(from), octets(to)].concat();
            let mut h = vec![0x60, 0, 0, 0];
            h.extend_from_slice(&len.to_be_bytes());
            h.extend_from_slice(&[TCP, TTL]);
            h.extend_from_slice(&pseudo);
            (h, pseudo)
        }
    };
    let mut tcp = Vec::with_capacity(TCP_HEADER);
    tcp.extend_from_slice(&s.from.port().to_be_bytes());
    tcp.extend_from_slice(&s.to.port().to_be_bytes());
    tcp.extend_from_slice(&s.seq.to_be_bytes());
    tcp.extend_from_slice(&s.ack.to_be_bytes());
    tcp.extend_from_slice(&[0x50, ACK_PSH]);
    tcp.extend_from_slice(&WINDOW.to_be_bytes());
    tcp.extend_from_slice(&[0; 4]);
    let [high, low] = len.to_be_bytes();
    let sum = checksum(&[&pseudo, &[0, TCP, high, low], &tcp, bytes]);
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&tcp);
    packet.extend_from_slice(bytes);
    packet
}

fn length(n: usize) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}

/// The Internet's checksum (RFC 1071). Each part but the last has an even length.
pub(super) fn checksum(parts: &[&[u8]]) -> u16 {
    let pairs = parts.iter().flat_map(|p| p.chunks(2));
    let word = |p: &[u8]| u64::from(p[0]) << 8 | p.get(1).map_or(0, |b| u64::from(*b));
    let mut sum: u64 = pairs.map(word).sum();
    while sum > u64::from(u16::MAX) {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !lane::num::low16(sum)
}
