//! What the lane sees of the simulated TCP connection. Everything may be interrupted before and after it.

use super::World;
use lane::half::{Iov, Port};
use lane::os::{position, TcpCounts};

pub struct Wire<'w> {
    pub w: &'w World,
    pub e: usize,
}

impl Wire<'_> {
    /// Each look may be interrupted, and find other counts than the one before.
    pub fn counts(&self) -> Option<TcpCounts> {
        let net = || self.w.net.borrow();
        position(
            || Some(net().info(self.e)),
            || {
                let n = net().outstanding(self.e);
                self.w.hook();
                Some(n)
            },
            || Some(net().unread(self.e) as u64),
        )
    }

    fn send(&self, data: *const u8, len: usize, beyond: bool) -> Result<usize, i32> {
        self.w.hook();
        // SAFETY: the lane passes a run of its own ring or a frame.
        let b = unsafe { std::slice::from_raw_parts(data, len) };
        self.w.is_own(self.e, b);
        let r = self.w.net.borrow_mut().send(self.e, b, beyond);
        self.w.hook();
        r
    }
}

impl Port for Wire<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.send(data, len, false)
    }
    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        let r = self.send(data, len, true);
        if r.is_ok() {
            self.w.note("more on TCP than fits");
        }
        r
    }
    fn leaves(&self) -> bool {
        self.w.net.borrow().pipe[self.e].more % 2 == 1
    }
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        self.w.hook();
        // SAFETY: the lane passes a buffer of its own or of this test's application.
        let b = (!buf.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(buf, len) });
        let r = self.w.net.borrow_mut().recv(self.e, b, len, peek);
        self.w.hook();
        r
    }
    fn tcp_peek(
        &self,
        mut iov: Iov<'_>,
        first: usize,
        gap: &mut [u8],
        rest: usize,
    ) -> Result<usize, i32> {
        let first = first.min(iov.left());
        let most = first + gap.len() + rest.min(iov.left() - first);
        let mut b = vec![0; most];
        let n = self.tcp_recv(b.as_mut_ptr(), most, true)?;
        let (before, after) = b[..n].split_at(first.min(n));
        let (within, after) = after.split_at(gap.len().min(after.len()));
        gap[..within.len()].copy_from_slice(within);
        for mut part in [before, after] {
            while !part.is_empty() {
                let (p, n) = iov.take(part.len()).unwrap();
                // SAFETY: a buffer of this test's application.
                unsafe { p.copy_from_nonoverlapping(part.as_ptr(), n) };
                part = &part[n..];
            }
        }
        Ok(n)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        self.w.hook();
        let r = self.w.net.borrow().unread(self.e);
        self.w.hook();
        Ok(r)
    }
    fn tcp_sent(&self) -> Option<u64> {
        self.w.hook();
        let p = self.counts()?;
        self.w.hook();
        if self.w.net.borrow().estimate(self.e) != p.sent - u64::from(self.e == 0) {
            self.w.note("counters changed by drops");
        }
        Some(p.sent)
    }
    fn tcp_end(&self) {
        if self.w.net.borrow_mut().fin(self.e) {
            self.w.note("an end shuts down late");
        }
    }
    fn ring(&self) {
        self.w.hook();
    }
}
