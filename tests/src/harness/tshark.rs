//! What tshark reads in the packets of a capture of `tests/programs/captured.py`, where every eight bytes of a stream say
//! where in it they are.

use anyhow::{ensure, Context, Result};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::process::Command;

/// What each end of `captured.py` sends after the gate.
pub struct Load {
    pub rounds: usize,
    pub chunk: usize,
    pub reply: usize,
    pub pause_ms: u32,
}

impl Load {
    /// The program's words at the server, but for `apart`.
    pub fn serve(&self, host: &str, gate: &str) -> String {
        let Load {
            rounds,
            chunk,
            reply,
            ..
        } = self;
        format!("serve {host} {gate} {rounds} {chunk} {reply}")
    }

    /// The same at the client.
    pub fn connect(&self, host: &str, port: &str, gate: &str) -> String {
        let Load {
            rounds,
            chunk,
            reply,
            pause_ms,
        } = self;
        format!("connect {host} {port} {gate} {rounds} {chunk} {reply} {pause_ms}")
    }
}

/// What tshark reassembles: the stream of the end with this port, and the other's; gaps are not in them.
pub fn followed(file: &Path, first: &str) -> Result<[Vec<u8>; 2]> {
    let out = tshark(file, &["-q", "-z", "follow,tcp,raw,0"])?;
    let mut streams: [Vec<u8>; 2] = Default::default();
    for line in out.lines() {
        let hex = line.trim_start_matches('\t');
        if !hex.is_empty() && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            let of = &mut streams[usize::from(line.starts_with('\t'))];
            let byte = |p: &[u8]| u8::from_str_radix(std::str::from_utf8(p).unwrap_or("x"), 16);
            for pair in hex.as_bytes().chunks(2) {
                of.push(byte(pair)?);
            }
        }
    }
    let node = out.lines().find_map(|l| l.strip_prefix("Node 0: "));
    if !node.context("Node 0")?.ends_with(&format!(":{first}")) {
        streams.reverse();
    }
    Ok(streams)
}

fn tshark(file: &Path, args: &[&str]) -> Result<String> {
    let out = Command::new("tshark")
        .env("HOME", "/nonexistent")
        .arg("-r")
        .arg(file)
        .args(args)
        .output()
        .context("tshark")?;
    ensure!(out.status.success(), "{out:?}");
    Ok(String::from_utf8(out.stdout)?)
}

/// SHA-256 of the last bytes of a stream.
pub fn hash_of_last(stream: &[u8], size: usize) -> Result<String> {
    let from = stream.len().checked_sub(size);
    let from = from.context("bytes are missing")?;
    Ok(format!("{:x}", Sha256::digest(&stream[from..])))
}

/// A segment, as tshark shows it.
pub struct Packet {
    pub from: String,
    pub seq: u32,
    pub bytes: Vec<u8>,
    pub comment: String,
}

pub fn packets(file: &Path) -> Result<Vec<Packet>> {
    let fields = "-T fields -o tcp.check_checksum:TRUE -o ip.check_checksum:TRUE -o tcp.relative_sequence_numbers:FALSE \
                  -e tcp.srcport -e tcp.seq -e tcp.payload -e frame.comment -e tcp.checksum.status -e ip.checksum.status";
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let mut all = Vec::new();
    for line in tshark(file, &fields)?.lines() {
        let f: Vec<&str> = line.split('\t').collect();
        ensure!(f.len() == 6, "{line:.200}");
        ensure!(
            f[4] == "1" && matches!(f[5], "1" | ""),
            "checksums: {} {}",
            f[4],
            f[5]
        );
        let byte = |p: &[u8]| u8::from_str_radix(std::str::from_utf8(p).unwrap_or("x"), 16);
        let bytes: Result<Vec<u8>, _> = f[2].as_bytes().chunks(2).map(byte).collect();
        all.push(Packet {
            from: f[0].into(),
            seq: f[1].parse()?,
            bytes: bytes?,
            comment: f[3].into(),
        });
    }
    Ok(all)
}

/// Each byte must be the one that belongs to its sequence number; the numbers of an end begin where those of the first
/// segment say. Returns how many bytes of this end there are.
pub fn compare(all: &[Packet], port: &str, proof: bool) -> Result<u64> {
    let (mut first, mut n): (Option<u32>, u64) = (None, 0);
    for p in all.iter().filter(|p| p.from == port) {
        // Every eight bytes are their place in the stream, divided by eight; the places are multiples of eight only if
        // a segment begins there, so look for the first whole one.
        let begin = match first {
            None => {
                let at = u64::from_ne_bytes(p.bytes[..8].try_into()?) * 8;
                let f = p.seq.wrapping_sub(at as u32);
                ensure!(proof || f == 1, "the numbers of {port} begin with {f}");
                first = Some(f);
                at
            }
            Some(f) => u64::from(p.seq.wrapping_sub(f)),
        };
        for (at, b) in (begin..).zip(&p.bytes) {
            let right = (at / 8).to_ne_bytes()[(at % 8) as usize];
            ensure!(right == *b, "byte {at} of {port} is {b:#x}, not {right:#x}");
        }
        n += p.bytes.len() as u64;
    }
    Ok(n)
}
