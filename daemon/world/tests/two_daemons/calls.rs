//! Calls of an application besides plain sends and receives: looks, counts, peeks, bytes that it throws away; and a
//! direction that is taken back although the connection stays.

use super::app::{byte, iov, App};
use super::family::Entry;
use super::process::Call;
use super::seen::note;
use super::sock::Sock;
use super::tcp;
use lane::half::rx::{How, Revoked, RxState};
use lane::half::{Iov, Memory, Port, Received};
use lane::os::TcpInfo;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::sim::Rng;

/// A revocation that takes longer is given up, with the connection.
const REVOKE_NS: u64 = super::leaving::LEAVE_NS;

const LOOK: How = How {
    peek: false,
    discard: false,
    look: true,
    part: false,
};
const PEEK: How = How { peek: true, ..LOOK };

impl App {
    /// Are both positions those of the kernel, as before a registration? `None`: the connection is on its way to its end.
    pub fn is_counted(&self, port: &Sock<'_>, client: bool) -> Option<bool> {
        let k = tcp::look(port.fd, false)?;
        let idle =
            self.tx.native_calls.load(Relaxed) == 0 && self.rx.native_calls.load(Relaxed) == 0;
        let own = [self.tx.tcp_pos.load(Relaxed), self.rx.tcp_pos.load(Relaxed)];
        (k.state == TcpInfo::ESTABLISHED).then(|| idle && own == [k.tx_pos(client), k.rx_pos()])
    }

    /// Something that only looks, or does not care for what it gets.
    fn look(&mut self, m: &Memory<'_>, port: &Sock<'_>, rng: &mut Rng) {
        match rng.below(5) {
            0 => {
                let _held = self.lock_rx();
                self.rx.probe(m, port);
                note("a look for something to read");
            }
            1 => {
                let _held = self.lock_rx();
                let n = self.rx.unread(m, port).unwrap_or(0);
                note("unread bytes counted");
                assert!(self.received + n <= self.expected, "{n} unread");
            }
            2 => {
                let n = 1 + rng.below(3000) as usize;
                self.peek(m, port, n);
                note("a peek");
            }
            3 => self.discard(m, port, 1 + rng.below(100) as usize),
            _ => self.agree(m, port),
        }
    }

    fn get(&mut self, m: &Memory<'_>, port: &Sock<'_>, b: &mut [u8], how: How) -> Received {
        let v = iov(b);
        let _held = self.lock_rx();
        self.rx.recv(m, port, &mut Iov::new(&v), how)
    }

    /// How many bytes a peek finds, which are the next ones.
    pub fn peek(&mut self, m: &Memory<'_>, port: &Sock<'_>, len: usize) -> usize {
        let mut b = vec![0; len];
        let got = self.get(m, port, &mut b, PEEK);
        let n = match got {
            Received::Bytes(n) => n,
            Received::Tcp => match port.tcp_recv(b.as_mut_ptr(), len, true) {
                Ok(n) => n,
                Err(libc::EAGAIN) => 0,
                Err(e) => {
                    self.error = Some(e);
                    0
                }
            },
            Received::Error(e) => {
                self.error = Some(e);
                0
            }
            Received::Reset(r) => panic!("a peek resets: {r:?}"),
            _ => 0,
        };
        for (i, b) in b[..n].iter().enumerate() {
            let at = self.received + i as u64;
            assert_eq!(*b, byte(self.peer_salt, at), "byte {at}, peeked at");
        }
        n
    }

    fn discard(&mut self, m: &Memory<'_>, port: &Sock<'_>, len: usize) {
        let mut b = vec![0xaa; len];
        let how = How {
            discard: true,
            ..LOOK
        };
        match self.get(m, port, &mut b, how) {
            Received::Bytes(n) => {
                note("bytes thrown away");
                self.received += n as u64;
            }
            Received::Eof => self.end(),
            Received::Error(e) => self.error = Some(e),
            Received::Reset(r) => panic!("a receive resets: {r:?}"),
            _ => {}
        }
        assert!(b.iter().all(|b| *b == 0xaa), "written");
    }

    /// What FIONREAD counts, a peek finds, and receives take, while nothing else happens.
    pub fn agree(&mut self, m: &Memory<'_>, port: &Sock<'_>) {
        let _quiet = tcp::quiet();
        let usable = self.rx.engaged() && !self.ended && self.error.is_none();
        if !usable {
            return;
        }
        let held = self.lock_rx();
        let counted = self.rx.unread(m, port).unwrap_or(0);
        drop(held);
        let counted = match self.rx.engaged() {
            true => counted as usize,
            false => port.tcp_unread().unwrap_or(0),
        };
        // (On TCP, the sender's kernel sends what it still held back when it hears of the first bytes, by its own clock; and
        // what is under way there comes by it: a beginning of the stream, a frame.)
        let on_ring = |rx: &RxState| rx.mode.load(Relaxed) == lane::half::rx::mode::RING;
        let was = on_ring(&self.rx);
        let at_least =
            |rx: &RxState, found: usize, n: usize| found == n || found > n && !(was && on_ring(rx));
        for len in [counted / 2, counted, counted + 100] {
            let found = self.peek(m, port, len);
            if self.error.is_some() {
                return;
            }
            assert!(
                at_least(&self.rx, found, counted.min(len)),
                "peeked at {found} of {counted}"
            );
        }
        let before = self.received;
        loop {
            let mut b = vec![0; 3000];
            let n = match self.get(m, port, &mut b, LOOK) {
                Received::Bytes(n) => n,
                Received::Tcp => self.receive_native(port, &mut b),
                Received::Eof => {
                    self.end();
                    0
                }
                Received::Error(e) => {
                    self.error = Some(e);
                    return;
                }
                Received::Reset(r) => panic!("a receive resets: {r:?}"),
                Received::Empty => 0,
            };
            if n == 0 {
                break;
            }
            self.take(&b[..n]);
        }
        if self.error.is_none() {
            let took = (self.received - before) as usize;
            assert!(
                at_least(&self.rx, took, counted),
                "received {took} of {counted}"
            );
            note("counted, peeked and received");
        }
    }
}

impl Entry {
    /// Something that its application does now and then. `false`: a direction could not be taken back, and the
    /// connection is to be reset.
    pub fn whim(&mut self, c: &Call<'_>, now: u64, rng: &mut Rng) -> bool {
        let (m, port, a) = (&c.m, &c.port, &mut self.app);
        let revoked = a.rx.mode.load(Relaxed) == lane::half::rx::mode::REVOKING;
        if !revoked && !a.ended && rng.one_in(20) {
            a.look(m, port, rng);
        }
        let idle = !a.ended && self.revoking.is_none() && a.rx.engaged();
        if idle && a.whims > 0 && rng.one_in(4 * a.whims) {
            self.revoking = Some(now + REVOKE_NS);
        }
        let Some(until) = self.revoking else {
            return true;
        };
        let held = a.lock_rx();
        let done = a.rx.revoke(m, port);
        drop(held);
        match done {
            Ok(Revoked::Pending) if now < until => return true,
            Ok(Revoked::Pending) => {
                note("a direction that could not be taken back in time");
                self.revoking = None;
                return false;
            }
            Ok(Revoked::Clear) => note("a direction taken back"),
            Ok(Revoked::Impossible) => note("a direction that could not be taken back"),
            Err(r) => panic!("no way back: {r:?}"),
        }
        self.revoking = None;
        true
    }
}
