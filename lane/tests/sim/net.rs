//! A TCP connection made of byte queues: limited send and receive buffers, partial sends, kernel
//! positions, FIN and RST. What Linux does where it matters here: queued bytes are handed out
//! before an error is told, a FIN travels behind the bytes, closing with unread bytes is a reset.

use lane::os::TcpInfo;
use std::collections::VecDeque;

/// One direction.
pub struct Pipe {
    snd: VecDeque<u8>,
    rcv: VecDeque<u8>,
    pub snd_cap: usize,
    pub rcv_cap: usize,
    /// Most bytes one send takes: shorter than asked for means a partial send.
    pub piece: usize,
    /// How far beyond `snd_cap` the kernel lets an end go that leaves. Odd: this one does.
    pub more: usize,
    /// Bytes ever accepted from the sender.
    pub accepted: u64,
    /// Bytes that the other end's kernel has taken, and that a drop on the way has made this end send again.
    pub delivered: u64,
    pub dropped: u64,
    fin: bool,
    fin_arrived: bool,
    /// The receiving end is closed: what arrives there is answered with a reset.
    nobody: bool,
}

impl Pipe {
    fn new() -> Self {
        Pipe {
            snd: VecDeque::new(),
            rcv: VecDeque::new(),
            snd_cap: 1 << 16,
            rcv_cap: 1 << 16,
            piece: usize::MAX,
            more: 0,
            accepted: 0,
            delivered: 0,
            dropped: 0,
            fin: false,
            fin_arrived: false,
            nobody: false,
        }
    }
}

/// Both directions; `pipe[e]` carries what end `e` sends.
pub struct Net {
    pub pipe: [Pipe; 2],
    pub reset: bool,
}

impl Default for Net {
    fn default() -> Self {
        Net {
            pipe: [Pipe::new(), Pipe::new()],
            reset: false,
        }
    }
}

impl Net {
    /// `beyond`: also more than fits, if the kernel lets it.
    pub fn send(&mut self, e: usize, b: &[u8], beyond: bool) -> Result<usize, i32> {
        let p = &mut self.pipe[e];
        if p.fin {
            return Err(libc::EPIPE);
        }
        if self.reset {
            return Err(libc::ECONNRESET);
        }
        // (Byte by byte, a call that leaves would not end.)
        let (more, piece) = match beyond {
            true => (p.more, p.piece.max(100)),
            false => (0, p.piece),
        };
        let n = b
            .len()
            .min((p.snd_cap + more).saturating_sub(p.snd.len()))
            .min(piece);
        if n == 0 && !b.is_empty() {
            return Err(libc::EAGAIN);
        }
        p.snd.extend(&b[..n]);
        p.accepted += n as u64;
        Ok(n)
    }

    /// Receives at end `e`; a missing buffer discards.
    pub fn recv(
        &mut self,
        e: usize,
        buf: Option<&mut [u8]>,
        len: usize,
        peek: bool,
    ) -> Result<usize, i32> {
        let p = &mut self.pipe[1 - e];
        let n = len.min(p.rcv.len());
        if n == 0 {
            return match () {
                _ if self.reset => Err(libc::ECONNRESET),
                _ if p.fin_arrived => Ok(0),
                _ => Err(libc::EAGAIN),
            };
        }
        if let Some(b) = buf {
            for (d, s) in b[..n].iter_mut().zip(&p.rcv) {
                *d = *s;
            }
        }
        if !peek {
            p.rcv.drain(..n);
        }
        Ok(n)
    }

    pub fn unread(&self, e: usize) -> usize {
        self.pipe[1 - e].rcv.len()
    }

    pub fn readable(&self, e: usize) -> bool {
        let p = &self.pipe[1 - e];
        !p.rcv.is_empty() || p.fin_arrived || self.reset
    }

    pub fn writable(&self, e: usize) -> bool {
        let p = &self.pipe[e];
        p.snd.len() < p.snd_cap || p.fin || self.reset
    }

    /// Moves up to `n` bytes from `e`'s send buffer to the other end. `true`: something moved.
    pub fn deliver(&mut self, e: usize, n: usize) -> bool {
        let p = &mut self.pipe[e];
        if self.reset {
            return false;
        }
        if p.nobody && !p.snd.is_empty() {
            self.rst();
            return true;
        }
        let n = n
            .min(p.snd.len())
            .min(p.rcv_cap.saturating_sub(p.rcv.len()));
        p.rcv.extend(p.snd.drain(..n));
        p.delivered += n as u64;
        // One segment in three is dropped by the sender's own device first: counted as sent, never as
        // sent again.
        if p.delivered.is_multiple_of(3) {
            p.dropped += n as u64;
        }
        let fin = p.fin && p.snd.is_empty() && !p.fin_arrived;
        p.fin_arrived |= fin;
        n > 0 || fin
    }

    /// What `TCP_INFO` says of end `e`, which connected if it is end 0: its SYN counts.
    pub fn info(&self, e: usize) -> TcpInfo {
        TcpInfo {
            state: TcpInfo::ESTABLISHED,
            acked: self.pipe[e].delivered + u64::from(e == 0),
            received: self.pipe[1 - e].delivered,
            sent: None,
        }
    }

    /// What SIOCOUTQ says of end `e`.
    pub fn outstanding(&self, e: usize) -> u64 {
        self.pipe[e].accepted - self.pipe[e].delivered
    }

    /// `bytes_sent - bytes_retrans + notsent` of end `e`: what it would be without those drops, and no
    /// position with them.
    pub fn estimate(&self, e: usize) -> u64 {
        self.pipe[e].accepted + self.pipe[e].dropped
    }

    /// False: that was done before.
    pub fn fin(&mut self, e: usize) -> bool {
        !std::mem::replace(&mut self.pipe[e].fin, true)
    }

    pub fn rst(&mut self) {
        self.reset = true;
        self.pipe.iter_mut().for_each(|p| p.snd.clear());
    }

    /// The last descriptor of end `e` is gone.
    pub fn close(&mut self, e: usize) {
        self.pipe[e].fin = true;
        self.pipe[1 - e].nobody = true;
        if !self.pipe[1 - e].rcv.is_empty() {
            self.rst();
        }
    }

    /// Puts foreign bytes into the stream, as a peer that bypasses everything would.
    pub fn inject(&mut self, e: usize, b: &[u8]) {
        self.pipe[e].rcv.extend(b);
    }
}
