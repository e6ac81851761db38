//! The TCP connection under a lane: two byte queues with delay and limited buffers.

use lane::half::Port;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

#[derive(Default)]
pub struct Pipe {
    ready: VecDeque<u8>,
    flying: VecDeque<(u64, Vec<u8>)>,
    held: usize,
    sent: u64,
}

const BUFFER: usize = 20_000;

impl Pipe {
    /// Bytes in the buffer, also those on their way.
    pub fn held(&self) -> usize {
        self.held
    }

    pub fn run_until(&mut self, now: u64) -> bool {
        let mut any = false;
        while self.flying.front().is_some_and(|f| f.0 <= now) {
            if let Some((_, b)) = self.flying.pop_front() {
                self.ready.extend(b);
                any = true;
            }
        }
        any
    }
}

/// One end's view.
pub struct End<'a> {
    pub out: &'a RefCell<Pipe>,
    pub inn: &'a RefCell<Pipe>,
    /// When what is sent now arrives.
    pub arrives: u64,
    pub rang: &'a Cell<bool>,
}

impl Port for End<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        let mut p = self.out.borrow_mut();
        let n = len.min(BUFFER - p.held);
        if n == 0 {
            return Err(libc::EAGAIN);
        }
        // SAFETY: the lane code passes `len` readable bytes.
        let b = unsafe { std::slice::from_raw_parts(data, n) }.to_vec();
        let at = self.arrives.max(p.flying.back().map_or(0, |f| f.0));
        p.flying.push_back((at, b));
        p.held += n;
        p.sent += n as u64;
        Ok(n)
    }

    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        let mut p = self.inn.borrow_mut();
        let n = len.min(p.ready.len());
        if n == 0 {
            return Err(libc::EAGAIN);
        }
        for (i, b) in p.ready.iter().take(n).enumerate() {
            if !buf.is_null() {
                // SAFETY: the lane code passes `len` writable bytes.
                unsafe { *buf.add(i) = *b };
            }
        }
        if !peek {
            p.ready.drain(..n);
            p.held -= n;
        }
        Ok(n)
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(self.inn.borrow().ready.len())
    }

    fn tcp_sent(&self) -> Option<u64> {
        Some(self.out.borrow().sent)
    }

    fn ring(&self) {
        self.rang.set(true);
    }
}
