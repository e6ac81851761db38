//! What is done to the victim by a lane, and to the daemon by messages.

use super::fake::{Fake, LinkGroup, Map, Offer};
use super::{Conn, Random};
use anyhow::Result;
use lane::abi::{
    rx, tx, Control, Cursor, Epoch, Loc, LocWord, RxFlags, RxWord, SpaceWord, TcpPos, TxPhase,
    TxWord, Word, CHUNK_BYTES, CONTROL_BYTES, LANES,
};
use lane::proto::msg::ToDaemon;
use nix::sys::socket::{send, shutdown, MsgFlags, Shutdown};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{Ordering::Relaxed, Ordering::Release};

/// One lane's worth of harm.
pub fn attack(kind: u64, o: Offer, l: &LinkGroup, conn: &mut Conn, r: &mut Random) -> Option<()> {
    let lane = (o.lane as usize).min(LANES - 1);
    let mut a = Attack {
        control: l.control()?,
        own: l.own.as_ref()?,
        bell: l.bell.as_ref(),
        lane,
        epoch: o.epoch,
        conn,
        r,
    };
    match kind {
        0 => a.random_words(),
        1 => a.local_words(true),
        2 => a.local_words(false),
        3 => a.bytes_that_change(true),
        4 => a.bytes_that_change(false),
        5 => a.bell_that_is_full(),
        _ => a.no_frame(),
    }
    Some(())
}

/// A lane of the victim's, and what may be written there.
struct Attack<'a> {
    control: &'a Control,
    own: &'a Map,
    bell: Option<&'a OwnedFd>,
    lane: usize,
    epoch: Epoch,
    conn: &'a mut Conn,
    r: &'a mut Random,
}

impl Attack<'_> {
    fn ring(&self) {
        if let Some(b) = self.bell {
            let _ = send_now(b, &[7; 300]);
        }
    }

    fn publish(&self) {
        self.control.seq[self.lane / 64].0.fetch_add(1, Release);
        self.ring();
    }

    fn declare_ready(&self) {
        let word = RxWord::new(self.epoch.next(), rx::READY);
        self.control.rx[self.lane].word.store(word, Release);
    }

    /// Random words all over the control area, while the victim looks.
    fn random_words(&mut self) {
        for _ in 0..3000 {
            for _ in 0..50 {
                let at = self.r.below(self.own.len as u64) as usize;
                self.own.word(at).store(self.r.nasty(), Relaxed);
            }
            self.ring();
            self.conn.nudge(b"PING\r\n");
        }
    }

    /// The lane's own words, one after the other, with values near the right ones.
    fn local_words(&mut self, steady: bool) {
        let (txw, rxw) = (&self.control.tx[self.lane], &self.control.rx[self.lane]);
        for step in 0..3000u64 {
            let r = &mut *self.r;
            let epoch = Epoch::new(self.epoch.get().wrapping_add(r.below(4) as u32));
            let flags = RxFlags::from_raw(r.below(16) as u8);
            rxw.word.store(RxWord::new(epoch, flags), Release);
            rxw.revoked.store(Cursor::new(r.nasty()), Relaxed);
            let tcp_pos = self.conn.sent.wrapping_add(r.below(20)).wrapping_sub(10);
            txw.up_tcp_pos.store(TcpPos::new(tcp_pos), Relaxed);
            txw.up_start.store(Cursor::new(r.below(100)), Relaxed);
            let n = r.below(2) as usize;
            txw.loc[n].store(LocWord::from_raw(r.nasty()), Relaxed);
            txw.loc_from[n].store(Cursor::new(r.nasty()), Relaxed);
            txw.loc_seq.store(r.below(4) as u32, Relaxed);
            let space = SpaceWord::from_raw(r.next() as u32);
            txw.want_space.store(space, Relaxed);
            let phase = TxPhase::from_raw(r.below(6) as u8);
            txw.state.store(TxWord::new(epoch, phase), Release);
            let head = if steady { step * 7 } else { r.nasty() };
            self.control.heads[self.lane].store(Cursor::new(head), Release);
            let cursor = Cursor::new(r.nasty());
            self.control.cursors[self.lane].store(cursor, Release);
            self.publish();
            self.conn.nudge(b"PING\r\n");
        }
    }

    /// A proper switch up; then a ring whose contents change under the reader, and heads that
    /// run, go back, and stand still.
    fn bytes_that_change(&mut self, steady: bool) {
        let txw = &self.control.tx[self.lane];
        let loc = Loc {
            chunk: 1,
            page: 64 * (self.lane as u32 % 32),
            log2: 16,
        };
        self.declare_ready();
        txw.loc[1].store(loc.word(), Relaxed);
        txw.loc_from[1].store(Cursor::default(), Relaxed);
        txw.loc_seq.store(1, Relaxed);
        txw.up_tcp_pos.store(TcpPos::new(self.conn.sent), Relaxed);
        txw.up_start.store(Cursor::default(), Relaxed);
        let up = TxWord::new(self.epoch.next(), tx::UP);
        txw.state.store(up, Release);
        let mut head = 0u64;
        for _ in 0..2000 {
            for i in 0..2000 {
                let at = loc.page as usize * 4096 + self.r.below(65536) as usize;
                let byte = self.own.byte(CONTROL_BYTES + at.min(CHUNK_BYTES - 1));
                byte.store(b"PING\r\n*3$"[i % 9], Relaxed);
            }
            head = match steady {
                true => head + self.r.below(65536),
                false => self.r.nasty(),
            };
            self.control.heads[self.lane].store(Cursor::new(head), Release);
            self.publish();
        }
    }

    /// A full doorbell that nobody reads, sleepers that are none, and a hang-up.
    fn bell_that_is_full(&mut self) {
        self.control.sleepers.0.store(u32::MAX, Release);
        self.declare_ready();
        for _ in 0..5000 {
            self.ring();
            self.conn.nudge(b"PING\r\n");
        }
        if let Some(b) = self.bell {
            let _ = shutdown(b.as_raw_fd(), Shutdown::Both);
        }
        self.conn.nudge(b"PING\r\n");
    }

    /// Ready, and then bytes on TCP that are no frame.
    fn no_frame(&mut self) {
        let txw = &self.control.tx[self.lane];
        self.declare_ready();
        let up = TxWord::new(self.epoch.next(), tx::UP);
        txw.state.store(up, Release);
        txw.up_tcp_pos.store(TcpPos::new(self.conn.sent), Release);
        self.publish();
        for _ in 0..200 {
            self.ring();
            let n = self.r.below(200);
            let noise: Vec<u8> = (0..n).map(|_| self.r.next() as u8).collect();
            self.conn.nudge(&noise);
        }
    }
}

fn send_now(fd: &OwnedFd, b: &[u8]) -> nix::Result<usize> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    send(fd.as_raw_fd(), b, flags)
}

/// Registrations that are lies, messages that are noise, answers nobody asked for. Sends until the
/// daemon hangs up or takes no more.
pub fn forge(fake: &Fake, r: &mut Random, addr: &str) -> Result<()> {
    let tcp = TcpStream::connect(addr)?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let (unix, _other) = UnixStream::pair()?;
    let file = std::fs::File::open("/dev/zero")?;
    let (pipe, _end) = nix::unistd::pipe()?;
    // A socket with no peer in this protocol: one that is connected to itself, if the kernel lets it.
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let fds = [
        tcp.as_raw_fd(),
        udp.as_raw_fd(),
        unix.as_raw_fd(),
        file.as_raw_fd(),
        pipe.as_fd().as_raw_fd(),
        listener.as_raw_fd(),
        fake.control.as_raw_fd(),
    ];
    let links: Vec<(u64, u8)> = fake.links.keys().copied().collect();
    // Every other time well-formed lies only: the daemon hangs up at the first message that is not.
    let polite = r.below(2) == 0;
    for _ in 0..400 {
        let (group, side) = match links.get(r.below(4) as usize) {
            Some(l) => *l,
            None => (r.below(20), r.below(3) as u8),
        };
        let (chunk, lane, conn, gen) = (
            r.below(70) as u32,
            r.below(1100) as u32,
            r.nasty() as u32,
            r.nasty() as u32,
        );
        let fd = fds[r.below(fds.len() as u64) as usize];
        let sent = match r.below(9) {
            0 | 1 => {
                let m = ToDaemon::Register {
                    conn,
                    gen,
                    tx_tcp_pos: TcpPos::new(r.nasty()),
                    rx_tcp_pos: TcpPos::new(r.nasty()),
                    flags: r.next() as u32,
                };
                fake.say(&m, &vec![fd; if polite { 1 } else { r.below(4) as usize }])
            }
            2 => fake.say(&ToDaemon::Mapped { group, side, chunk }, &[]),
            3 => fake.say(&ToDaemon::PeerMapped { group, side, chunk }, &[]),
            4 => fake.say(&ToDaemon::LaneDone { group, side, lane }, &[]),
            5 => fake.say(&ToDaemon::WantChunk { group, side }, &[]),
            6 => fake.say(&ToDaemon::Forget { conn, gen }, &[]),
            7 => fake.say(&ToDaemon::GroupFailed { group, side }, &[]),
            _ if polite => fake.say(&ToDaemon::Forget { conn, gen }, &[]),
            _ => {
                let noise: Vec<u8> = (0..1 + r.below(400)).map(|_| r.next() as u8).collect();
                fake.raw(&noise, &vec![fd; r.below(20) as usize])
            }
        };
        if sent.is_err() {
            break;
        }
    }
    Ok(())
}
