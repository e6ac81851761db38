//! A peer that lies: a program without hooks that speaks the control protocol as a shim does, gets
//! itself promoted with a Redis server that runs under the real shim, and then does to it, and to
//! the daemon, everything that its descriptors and mappings allow.
//!
//! `hostile DIR ADDR UNTIL` plays one episode after the other, each in a process of its own, until
//! the file UNTIL exists, and prints what it achieved. What it must not achieve (a writable mapping
//! of the victim's memory, say) it reports as a breach; whether the victim still serves others
//! well, the test that runs it finds out.

mod attack;
mod fake;

use anyhow::{bail, Result};
use attack::{attack, forge};
use fake::Fake;
use lane::abi::{Epoch, Loc, RxFlags, RxWord, TcpPos, Word};
use lane::proto::msg::ToDaemon;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        [dir, addr, until] => play(dir, addr, Path::new(until)),
        ["episode", dir, addr, seed] => episode(Path::new(dir), addr, seed.parse()?),
        _ => bail!("hostile DIR ADDR UNTIL"),
    }
}

/// Sums of what the episodes printed.
fn play(dir: &str, addr: &str, until: &Path) -> Result<()> {
    let mut sum: HashMap<String, u64> = HashMap::new();
    let me = std::env::current_exe()?;
    let mut seed = 0u64;
    while !until.exists() {
        seed += 1;
        let out = Command::new(&me)
            .args(["episode", dir, addr, &seed.to_string()])
            .output()?;
        *sum.entry("episodes".into()).or_default() += 1;
        for w in String::from_utf8_lossy(&out.stdout).split_whitespace() {
            if let Some((k, v)) = w.split_once('=') {
                *sum.entry(k.into()).or_default() += v.parse::<u64>().unwrap_or(0);
            }
        }
        if !out.status.success() {
            *sum.entry("failed".into()).or_default() += 1;
            eprintln!("episode {seed}: {}", String::from_utf8_lossy(&out.stderr));
        }
    }
    println!("result {}", serde_json::to_string(&sum)?);
    Ok(())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Values that are often at the edge of something.
    fn nasty(&mut self) -> u64 {
        match self.below(9) {
            0 => 0,
            1 => u64::MAX,
            2 => self.below(64),
            3 => 1 << self.below(64),
            4 => (1u64 << self.below(64)).wrapping_sub(1),
            5 => {
                let epoch = Epoch::new(self.below(4) as u32);
                RxWord::new(epoch, RxFlags::from_raw(self.below(16) as u8)).raw()
            }
            6 => Loc {
                chunk: self.below(70) as u32,
                page: self.below(5000) as u32,
                log2: self.below(26) as u32,
            }
            .word()
            .raw(),
            7 => self.below(1 << 22),
            _ => self.next(),
        }
    }
}

/// A connection to the victim, and what went over it.
struct Conn {
    sock: TcpStream,
    sent: u64,
    received: u64,
}

impl Conn {
    fn open(addr: &str) -> Result<Conn> {
        let sock = TcpStream::connect(addr)?;
        sock.set_nodelay(true)?;
        sock.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Conn {
            sock,
            sent: 0,
            received: 0,
        })
    }

    fn ping(&mut self) -> Result<()> {
        self.sock.write_all(b"PING\r\n")?;
        let mut b = [0; 7];
        self.sock.read_exact(&mut b)?;
        self.sent += 6;
        self.received += 7;
        Ok(())
    }

    /// Gives the victim a reason to look, whatever comes of it.
    fn nudge(&mut self, bytes: &[u8]) {
        let _ = self.sock.set_nonblocking(true);
        let _ = self.sock.write(bytes);
        let mut b = [0; 4096];
        let _ = self.sock.read(&mut b);
    }
}

fn episode(dir: &Path, addr: &str, seed: u64) -> Result<()> {
    let mut r = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut fake = Fake::new(dir, &mut r)?;
    if fake.refused {
        println!("refused=1");
        return Ok(());
    }
    if seed % 8 == 7 {
        forge(&fake, &mut r, addr)?;
        println!("forged=1 breaches={}", fake.breaches);
        return Ok(());
    }
    let mut conns = Vec::new();
    for _ in 0..4 {
        conns.push(Conn::open(addr)?);
    }
    for c in &mut conns {
        for _ in 0..100 {
            c.ping()?;
        }
    }
    for (i, c) in conns.iter().enumerate() {
        let m = ToDaemon::Register {
            conn: i as u32,
            gen: 1,
            tx_tcp_pos: TcpPos::new(c.sent),
            rx_tcp_pos: TcpPos::new(c.received),
            flags: 0,
        };
        fake.say(&m, &[c.sock.as_raw_fd()])?;
    }
    fake.listen(Duration::from_secs(3), |f| f.offers.len() == 4)?;
    let offers = fake.offers.clone();
    let mut attacks = 0u64;
    for o in &offers {
        let Some(conn) = conns.get_mut(o.conn as usize) else {
            continue;
        };
        let Some(l) = fake.links.get(&o.key) else {
            continue;
        };
        if attack(seed % 8, *o, l, conn, &mut r).is_some() {
            attacks += 1;
        }
    }
    // The lanes are as broken as they get: now the daemon, too.
    if seed.is_multiple_of(3) {
        forge(&fake, &mut r, addr)?;
    }
    println!(
        "offers={} attacks={attacks} breaches={}",
        offers.len(),
        fake.breaches
    );
    Ok(())
}
