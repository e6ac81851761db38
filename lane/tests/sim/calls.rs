//! What an application's send and receive calls come to, with the checks of every byte.

use super::scribble::UNWRITTEN;
use super::{content, vecs, Act, Wire, World, RX, TX};
use lane::half::rx::How;
use lane::half::{Iov, Port, Received, Sent};

impl World {
    /// One send call. `false`: nothing went out.
    pub(super) fn send(&self, e: usize, len: usize, up: bool) -> bool {
        let h = &self.host[e];
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let mut data = vec![0u8; len];
        content(self.use_no.get(), e, h.sent.get(), &mut data);
        let v = vecs(&mut data);
        h.in_flight.set(len as u64);
        let mut sent = 0;
        for _ in 0..3 {
            let mut r = Sent::Tcp;
            if h.attached.get() {
                if !self.lock(e, TX) {
                    break;
                }
                let mut iov = Iov::new(&v);
                r = h.tx.send(&m, &port, &mut iov);
                if let Sent::Bytes(n) = r {
                    assert_eq!(
                        iov.left(),
                        len - n,
                        "the position in the caller's buffers is off"
                    );
                }
                let may = up && !h.leaving.get() && !h.execs.get();
                if r == Sent::Tcp && may && h.tx.can_up(&m) {
                    self.try_up(e);
                    if h.tx.is_up() {
                        self.unlock(e, TX);
                        continue;
                    }
                }
                self.unlock(e, TX);
            }
            match r {
                Sent::Bytes(n) => sent = n,
                Sent::Tcp => {
                    if !h.tx.enter_native() {
                        continue;
                    }
                    let r = port.tcp_send(data.as_ptr(), len);
                    h.tx.leave_native(r.unwrap_or(0) as u64);
                    match r {
                        Ok(n) => sent = n,
                        Err(libc::EAGAIN) => {}
                        Err(_) => h.failed.set(true),
                    }
                }
                Sent::Full => self.note("full"),
                Sent::Blocked => self.note("blocked"),
                Sent::Fault => unreachable!("memory of the test's"),
                Sent::Reset(r) => self.poisoned(e, r),
            }
            break;
        }
        assert!(sent <= len);
        if self.host[e].tx.is_up() {
            self.note("bytes on the ring");
        }
        h.sent.set(h.sent.get() + sent as u64);
        h.in_flight.set(0);
        sent > 0
    }

    /// What FIONREAD counts at an end, a peek finds, and receives take.
    pub fn agree(&self, e: usize) {
        let h = &self.host[e];
        let engaged = h.attached.get() && h.rx.engaged();
        let leaves = h.revoking.get() || h.leaving.get() || h.execs.get();
        if !self.live(e) || leaves || h.eof.get() || !engaged {
            return;
        }
        self.calls.set(0);
        self.act(e, &Act::Unread);
        let counted = h.unread.get();
        let recv = |len, peek| Act::Recv {
            len,
            peek,
            discard: false,
            look: true,
        };
        for len in [counted / 2, counted, counted + 100] {
            self.act(e, &recv(len as usize, true));
            if !self.live(e) {
                return; // an error, or the other end's death
            }
            assert_eq!(h.found.get(), counted.min(len), "a peek");
        }
        let before = h.got.get();
        loop {
            self.calls.set(0);
            self.act(e, &recv(3000, false));
            if h.found.get() == 0 || !self.live(e) {
                break;
            }
        }
        assert_eq!(h.got.get() - before, counted, "receives");
        self.note("counted, peeked and received");
    }

    /// One receive call. `false`: nothing came.
    pub(super) fn recv(&self, e: usize, len: usize, how: How) -> bool {
        let (h, from) = (&self.host[e], &self.host[1 - e]);
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let mut data = vec![UNWRITTEN; len];
        let v = vecs(&mut data);
        let steps = self.steps.get();
        h.found.set(0);
        let mut r = Received::Tcp;
        if h.attached.get() {
            if !self.lock(e, RX) {
                return false;
            }
            r = h.rx.recv(&m, &port, &mut Iov::new(&v), how);
            self.unlock(e, RX);
        }
        if r == Received::Tcp {
            match self.recv_native(e, &mut data, how) {
                Some(native) => r = native,
                None => return false,
            }
        }
        if self.trace.get() {
            eprintln!("        -> {r:?}");
        }
        match r {
            Received::Bytes(n) => return self.came(e, &data, n, how),
            Received::Eof => {
                self.check_end(e);
                h.eof.set(true);
            }
            Received::Error(x) => {
                assert_ne!(x, 0);
                assert!(
                    self.hostile.get() || self.net.borrow().reset || from.dead.get(), // with bytes unread
                    "error {x} from nowhere"
                );
                h.failed.set(true);
            }
            Received::Empty => {
                // A level-triggered wait must not find the kernel readable for ever.
                if how.look
                    && len > 0
                    && steps == self.steps.get()
                    && !h.revoking.get()
                    && !h.leaving.get()
                    && !self.hostile.get()
                {
                    assert!(
                        !self.net.borrow().readable(e),
                        "end {e}: nothing to say, and the kernel stays readable"
                    );
                }
            }
            Received::Reset(r) => self.poisoned(e, r),
            Received::Tcp => unreachable!(),
        }
        false
    }

    /// The direction is on TCP. None: it is not any more.
    fn recv_native(&self, e: usize, data: &mut [u8], how: How) -> Option<Received> {
        let (h, port) = (&self.host[e], Wire { w: self, e });
        if !h.rx.enter_native() {
            return None;
        }
        let len = data.len();
        let p = if how.discard {
            std::ptr::null_mut()
        } else {
            data.as_mut_ptr()
        };
        let n = port.tcp_recv(p, len, how.peek);
        h.rx.leave_native(if how.peek { 0 } else { n.unwrap_or(0) as u64 });
        Some(match n {
            // As the shim: an error that was kept is told where the end would be.
            Ok(0) | Err(libc::EAGAIN) if len > 0 && h.rx.error.is_set() => {
                Received::Error(h.rx.error.take())
            }
            // As the shim's `ends::after_fin`.
            Ok(0) if len > 0 && h.attached.get() && h.rx.notice_death(&self.memory(e), false) => {
                Received::Error(libc::ECONNRESET)
            }
            Ok(0) if len > 0 => Received::Eof,
            Ok(n) => Received::Bytes(n),
            Err(libc::EAGAIN) => Received::Empty,
            Err(x) => Received::Error(x),
        })
    }

    /// Bytes have come: are they the next ones?
    fn came(&self, e: usize, data: &[u8], n: usize, how: How) -> bool {
        let (h, from, len) = (&self.host[e], &self.host[1 - e], data.len());
        assert!(n <= len && (n > 0 || len == 0), "{n} of {len}");
        let written = if how.discard { 0 } else { n };
        assert!(
            data[written..].iter().all(|&b| b == UNWRITTEN),
            "wrote beyond what it reported"
        );
        self.is_written(e, &data[..written]);
        if !self.hostile.get() {
            let mut want = vec![0u8; written];
            content(self.use_no.get(), 1 - e, h.got.get(), &mut want);
            if let Some(i) = (0..written).find(|&i| data[i] != want[i]) {
                panic!(
                    "end {e}: byte {} is {:#x}, not {:#x}",
                    h.got.get() + i as u64,
                    data[i],
                    want[i]
                );
            }
            let most = from.sent.get() + from.in_flight.get();
            assert!(
                h.got.get() + n as u64 <= most,
                "end {e} got more than was sent"
            );
        }
        assert!(
            !h.eof.get() || n == 0 || self.hostile.get(),
            "bytes after end of file"
        );
        h.found.set(n as u64);
        if !how.peek {
            h.got.set(h.got.get() + n as u64);
        }
        n > 0
    }

    /// End `e` finds the end of the stream: has the other one ended, and is nothing missing?
    fn check_end(&self, e: usize) {
        let (h, from) = (&self.host[e], &self.host[1 - e]);
        if self.hostile.get() || from.failed.get() {
            return;
        }
        assert!(
            from.wr_shut.get() || from.closed.get() || from.dead.get() || from.finishing.get(),
            "end of file from nowhere"
        );
        assert!(
            h.got.get() >= from.sent.get(),
            "end {e}: end of file after {} of {} bytes",
            h.got.get(),
            from.sent.get()
        );
    }
}
