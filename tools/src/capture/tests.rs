//! The file, byte by byte, and what a capture makes of what the daemon says.

use super::packet::checksum;
use super::*;
use std::sync::{Arc, Mutex};

/// Written bytes, to be looked at.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(b);
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(b[at..at + 4].try_into().unwrap())
}

/// Type and body of each block; the lengths must agree.
fn blocks(mut b: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    while !b.is_empty() {
        let len = word(b, 4) as usize;
        assert!(len % 4 == 0 && len >= 12 && word(b, len - 4) as usize == len);
        all.push((word(b, 0), b[8..len - 4].to_vec()));
        b = &b[len..];
    }
    all
}

/// Packet and comment of a packet block.
fn packet_of(body: &[u8]) -> (Vec<u8>, String) {
    let len = word(body, 12) as usize;
    assert_eq!(word(body, 16) as usize, len);
    let packet = body[20..20 + len].to_vec();
    let options = &body[20 + len.next_multiple_of(4)..];
    if options.is_empty() {
        return (packet, String::new());
    }
    let code = u16::from_ne_bytes([options[0], options[1]]);
    let n = usize::from(u16::from_ne_bytes([options[2], options[3]]));
    assert_eq!(code, 1);
    assert_eq!(options.len(), 4 + n.next_multiple_of(4) + 4, "and the end");
    (
        packet,
        String::from_utf8(options[4..4 + n].to_vec()).unwrap(),
    )
}

fn be(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(b[at..at + 4].try_into().unwrap())
}

fn captured(
    firsts: [Option<u32>; 2],
    most: Option<u64>,
    all: &[(usize, u64, u64, u64, &[u8])],
) -> (Capture, Vec<(Vec<u8>, String)>) {
    let page = Page::default();
    let ends = [
        "10.1.2.3:80".parse().unwrap(),
        "10.1.2.4:4000".parse().unwrap(),
    ];
    let to: Box<dyn Write> = Box::new(page.clone());
    let mut c = Capture::new(ends, BufWriter::new(to), most).unwrap();
    let state = Captured::State {
        lane: true,
        remote: false,
        up: [true; 2],
        firsts,
    };
    assert!(!c.add(&state, b"").unwrap());
    for (from, at, acked, lost, bytes) in all {
        let one = Captured::Bytes {
            from: *from as u8,
            ns: 1_700_000_000_123_456_789,
            at: *at,
            acked: *acked,
            lost: *lost,
            len: bytes.len() as u32,
        };
        if c.add(&one, bytes).unwrap() {
            break;
        }
    }
    c.to.flush().unwrap();
    let blocks = blocks(&page.0.lock().unwrap());
    assert_eq!([blocks[0].0, blocks[1].0], [0x0a0d_0d0a, 1]);
    let packets = blocks[2..].iter().map(|(kind, body)| {
        assert_eq!(*kind, 6);
        let ns = u64::from(word(body, 4)) << 32 | u64::from(word(body, 8));
        assert_eq!(ns, 1_700_000_000_123_456_789);
        packet_of(body)
    });
    let packets = packets.collect();
    (c, packets)
}

#[test]
fn a_file_begins_with_its_section_and_one_interface_of_ip_packets() {
    let mut b = Vec::new();
    Pcapng::new(&mut b, "me", "why").unwrap();
    let all = blocks(&b);
    assert_eq!(word(&all[0].1, 0), 0x1a2b_3c4d);
    assert_eq!(all[0].1[4..8], [1, 0, 0, 0]);
    assert_eq!(all[0].1[16..24], [1, 0, 3, 0, b'w', b'h', b'y', 0]);
    assert_eq!(all[1].1[..2], [101, 0]);
    assert_eq!(all[1].1[16..24], [9, 0, 1, 0, 9, 0, 0, 0], "nanoseconds");
}

#[test]
fn segments_have_addresses_numbers_and_valid_checksums() {
    for (from, to) in [
        ("10.1.2.3:80", "10.1.2.4:65535"),
        ("[fe80::1]:1", "[2001:db8::2]:2"),
    ] {
        for n in [0, 1, 2, 1461, 32 << 10] {
            let bytes: Vec<u8> = (0..n).map(|i| (i * 7 % 251) as u8).collect();
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let p = segment(&Segment {
                from,
                to,
                seq: u32::MAX,
                ack: 7,
                bytes: &bytes,
            });
            let (ip, addresses) = match p[0] >> 4 {
                4 => (20, &p[12..20]),
                _ => (40, &p[8..40]),
            };
            let length = match ip {
                20 => usize::from(u16::from_be_bytes([p[2], p[3]])),
                _ => 40 + usize::from(u16::from_be_bytes([p[4], p[5]])),
            };
            assert_eq!((length, p.len()), (ip + 20 + n, ip + 20 + n));
            if ip == 20 {
                assert_eq!(checksum(&[&p[..20]]), 0, "of IP");
                assert_eq!(p[9], 6);
            }
            let len = (20 + n as u32).to_be_bytes();
            assert_eq!(checksum(&[addresses, &len, &[0, 0, 0, 6], &p[ip..]]), 0);
            assert_eq!((be(&p, ip + 4), be(&p, ip + 8)), (u32::MAX, 7));
            assert_eq!(p[ip + 13], 0x18);
            assert_eq!(&p[ip + 20..], &bytes[..]);
        }
    }
}

#[test]
fn sequence_numbers_go_on_from_the_connections_own() {
    let all: &[(usize, u64, u64, u64, &[u8])] = &[
        (0, 10, 3, 0, b"abc"),
        (1, 3, 13, 0, b"de"),
        (0, 13, 5, 0, b"f"),
    ];
    let (c, p) = captured([Some(u32::MAX), Some(1000)], None, all);
    let numbers: Vec<_> = p.iter().map(|(p, _)| (be(p, 24), be(p, 28))).collect();
    assert_eq!(numbers, [(9, 1003), (1003, 12), (12, 1005)]);
    assert!(p[0].1.starts_with(RECONSTRUCTED) && !p[0].1.contains("begin with 1"));
    assert_eq!((p[1].1.as_str(), p[2].1.as_str()), ("", ""));
    assert_eq!(c.summary(), "3 packets, 6 B, no gaps");
    let (_, p) = captured([None; 2], None, all);
    assert_eq!((be(&p[0].0, 24), be(&p[0].0, 28)), (11, 4));
    assert!(p[0].1.contains("begin with 1"));
}

#[test]
fn gaps_are_marked_with_what_is_missing() {
    let (c, p) = captured(
        [None; 2],
        None,
        &[
            (0, 0, 0, 0, b"abc"),
            (1, 50, 0, 0, b"z"),
            (0, 10, 0, 7, b"d"),
            (0, 20, 0, 0, b"e"),
            (0, 31, 0, 4, b"f"),
        ],
    );
    assert!(!p[0].1.contains("missing") && p[1].1.is_empty());
    assert!(p[2].1.starts_with("7 bytes are missing") && p[2].1.contains("faster"));
    assert!(p[3].1.starts_with("9 bytes are missing") && p[3].1.contains("TCP"));
    assert!(p[4]
        .1
        .starts_with("10 bytes are missing before this segment: 4 because"));
    assert!(p[4].1.ends_with("and 6 went over TCP"));
    assert_eq!(c.summary(), "5 packets, 7 B, 3 gaps (26 B missing)");
}

#[test]
fn it_ends_with_the_last_byte_that_is_wanted() {
    let all: &[(usize, u64, u64, u64, &[u8])] = &[
        (0, 0, 0, 0, b"abc"),
        (0, 3, 0, 0, b"def"),
        (0, 6, 0, 0, b"g"),
    ];
    let (c, p) = captured([None; 2], Some(5), all);
    assert_eq!((c.bytes, p.len()), (5, 2));
    assert_eq!(&p[1].0[40..], b"de");
}
