//! One control connection: what waits to be sent on it, and the notice page beside it.
//!
//! Never blocks on the shim. Messages that it does not read pile up to a bound, and for a bounded
//! time; then the connection is cut.

use crate::clients::notice::Notice;
use crate::os::fds::{self, Foreign};
use crate::os::wire::{self, Incoming};
use lane::proto::msg::{ToShim, MAX};
use rustix::event::PollFlags;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

/// Most messages that wait for one shim.
const QUEUE: usize = 4096;
/// How long a shim may leave a full socket unread.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Datagrams of all control connections since the start, read and sent. Used for statistics only, hence `Relaxed`.
pub static DATAGRAMS: AtomicU64 = AtomicU64::new(0);

/// A control connection, shared by the task that serves it and the core that sends on it.
pub struct Control {
    pub sock: AsyncFd<Foreign>,
    queue: RefCell<VecDeque<(ToShim, Vec<Arc<OwnedFd>>)>>,
    notice: RefCell<Option<Notice>>,
    stuck_since: Cell<Option<Instant>>,
    cut: Cell<bool>,
    /// False once it is cut although the process has not closed its end: for helpers that keep a copy of the socket,
    /// and must not keep it open then.
    pub lives: Arc<AtomicBool>,
    /// Something changed that the serving task should look at.
    pub wake: tokio::sync::Notify,
}

impl Control {
    /// Must be called inside the runtime.
    pub fn new(sock: Foreign) -> std::io::Result<Self> {
        Ok(Control {
            sock: crate::os::fds::watch(sock, Interest::READABLE | Interest::WRITABLE)?,
            queue: RefCell::default(),
            notice: RefCell::default(),
            stuck_since: Cell::new(None),
            cut: Cell::new(false),
            lives: Arc::new(AtomicBool::new(true)),
            wake: tokio::sync::Notify::new(),
        })
    }

    /// Reads a message, if there is one.
    pub fn recv(&self, buf: &mut [u8]) -> Result<Incoming, Errno> {
        let got = wire::recv(self.sock.get_ref(), buf)?;
        if matches!(got, Incoming::Message { .. }) {
            DATAGRAMS.fetch_add(1, Relaxed);
        }
        Ok(got)
    }

    /// May it be read? If not, there might be no room for what comes with a message: this party has too many descriptors here,
    /// or all others have.
    pub fn has_room(&self) -> bool {
        self.sock.get_ref().has_room()
    }

    pub fn set_notice(&self, notice: Notice) {
        self.notice.replace(Some(notice));
    }

    /// Sends, or queues what cannot be sent now.
    pub fn send(&self, msg: ToShim, fds: Vec<Arc<OwnedFd>>) {
        let mut queue = self.queue.borrow_mut();
        queue.push_back((msg, fds));
        let (waits, full) = (queue.len() > 1, queue.len() > QUEUE);
        drop(queue);
        if full || self.is_cut() {
            return self.cut(); // `Client::disconnect` keeps what must not be lost
        }
        if !waits {
            self.flush();
            if self.backlog() {
                self.wake.notify_one();
            }
        }
    }

    /// Sends what it can. `false`: the socket takes nothing more now.
    pub fn flush(&self) -> bool {
        let mut queue = self.queue.borrow_mut();
        while let Some((msg, fds)) = queue.front() {
            let mut buf = [0u8; MAX];
            let n = msg.encode(&mut buf);
            match wire::send(self.sock.get_ref().as_fd(), &buf[..n], fds) {
                Ok(()) => {
                    queue.pop_front();
                    DATAGRAMS.fetch_add(1, Relaxed);
                    self.stuck_since.set(None);
                    if let Some(n) = &*self.notice.borrow() {
                        n.bump();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    if self.stuck_since.get().is_none() {
                        self.stuck_since.set(Some(Instant::now()));
                    }
                    return false;
                }
                Err(e) => {
                    drop(queue);
                    if !matches!(e, Errno::PIPE | Errno::CONNRESET) {
                        tracing::warn!("cannot send to a shim: {e}");
                    }
                    self.cut();
                    return true;
                }
            }
        }
        true
    }

    pub fn backlog(&self) -> bool {
        !self.queue.borrow().is_empty()
    }

    /// When the connection will be cut, because the shim leaves a full socket unread.
    pub fn deadline(&self) -> Option<Instant> {
        self.stuck_since.get().map(|t| t + PATIENCE)
    }

    /// Ends the connection; the serving task notices.
    pub fn cut(&self) {
        self.cut.set(true);
        self.wake.notify_one();
    }

    /// It is used no more. If the process still has its end, what it says from now on must not seem to be heard, and it
    /// must see the end as soon as helpers give their copies up.
    pub fn over(&self) {
        self.cut();
        let sock = self.sock.get_ref();
        if !fds::events(sock, PollFlags::empty()).contains(PollFlags::HUP) {
            self.lives.store(false, Relaxed); // (orders nothing: helpers look again)
            let _ = rustix::net::shutdown(sock, rustix::net::Shutdown::Read);
        }
    }

    pub fn is_cut(&self) -> bool {
        self.cut.get()
    }

    /// What was never sent.
    pub fn take_unsent(&self) -> Vec<ToShim> {
        self.queue.borrow_mut().drain(..).map(|(m, _)| m).collect()
    }
}
