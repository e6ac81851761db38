//! The kernel's TCP, made as bad as a network makes it. Over loopback it is quick, and loses nothing; here it may be
//! full at any byte, what is sent may arrive later, and the kernel's counts are those of a network that drops:
//!
//! - `bytes_sent` has grown by what was dropped before the device, and not been corrected by `bytes_retrans`;
//! - of what was sent, a part is not acknowledged yet, and its acknowledgement may come between two looks.
//!
//! Both a process's calls and those of its daemon's helpers go through this file, and everything else that happens in
//! the world may come between them: see [`between`].

use super::seen::note;
use lane::half::Iov;
use lane::os::{position, TcpInfo};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Weak;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use underpass_rdma::sim::Rng;
use underpassd::os::sockopt;

/// What comes between the calls of one actor.
pub trait Others {
    /// `may_die`: this is within a call of the lane's, in which its caller may be killed.
    fn act(&self, may_die: bool);
}

/// Unwinds out of the middle of a call of the lane's: its caller was killed there.
pub struct Killed;

#[derive(Default)]
struct Way {
    /// The cookie of the other end.
    to: u64,
    /// Bytes that this socket takes before it is full; None: as many as the kernel takes.
    room: Option<u64>,
    /// What this socket sends takes its time.
    slow: bool,
    /// Bytes at the end of its receive queue that have not arrived yet.
    late: u64,
    /// Bytes that were dropped before the device and had to be sent again.
    dropped: u64,
}

thread_local! {
    static WAYS: RefCell<HashMap<u64, Way>> = RefCell::default();
    static RNG: RefCell<Rng> = const { RefCell::new(Rng(0)) };
    static OTHERS: RefCell<Option<Weak<dyn Others>>> = const { RefCell::new(None) };
    /// Drops, and looks that are disturbed, happen one time in so many; 0: never.
    static DROPS_IN: Cell<u64> = const { Cell::new(0) };
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// A new world.
pub fn begin(seed: u64, drops_in: u64) {
    WAYS.with(|w| w.borrow_mut().clear());
    RNG.with(|r| *r.borrow_mut() = Rng(seed));
    OTHERS.with(|o| *o.borrow_mut() = None);
    DROPS_IN.set(drops_in);
    QUIET.set(false);
}

pub fn set_others(others: Weak<dyn Others>) {
    OTHERS.with(|o| *o.borrow_mut() = Some(others));
}

/// An address of this node for the next connection: one after the other, because ports of ended connections stay
/// taken for a minute.
pub fn address() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Relaxed).to_be_bytes(); // only a count
    Ipv4Addr::new(
        127,
        1 + n[2] % 100,
        n[3],
        1 + std::process::id() as u8 % 200,
    )
}

/// The two sockets of a connection.
pub fn enter(ends: [BorrowedFd<'_>; 2]) {
    let [a, b] = ends.map(cookie);
    for (own, to) in [(a, b), (b, a)] {
        let way = Way {
            to,
            ..Way::default()
        };
        WAYS.with(|w| w.borrow_mut().insert(own, way));
    }
}

pub fn cookie(socket: BorrowedFd<'_>) -> u64 {
    let got = sockopt::get(socket, libc::SOL_SOCKET, libc::SO_COOKIE);
    got.expect("a socket").0
}

/// This socket takes so many more bytes; None: as many as the kernel takes.
pub fn set_room(cookie: u64, room: Option<u64>) {
    with(cookie, |w| w.room = room);
}

/// Everything arrives, and there is room everywhere, from now on.
pub fn mend() {
    WAYS.with(|all| {
        for w in all.borrow_mut().values_mut() {
            (w.room, w.slow, w.late) = (None, false, 0);
        }
    });
}

/// A way that is bad for a while, or is well again.
pub fn disturb(cookie: u64, rng: &mut Rng) {
    let room = [rng.below(40), rng.below(300), rng.below(5000)][rng.below(3) as usize];
    let what = rng.below(5);
    let n = rng.below(300);
    with(cookie, |w| match what {
        0 | 1 => w.room = Some(room),
        2 => w.slow = true,
        3 => w.late -= n.min(w.late),
        _ => (w.room, w.slow, w.late) = (None, false, 0),
    });
}

fn with<T>(cookie: u64, f: impl FnOnce(&mut Way) -> T) -> Option<T> {
    WAYS.with(|all| all.borrow_mut().get_mut(&cookie).map(f))
}

fn late(cookie: u64) -> u64 {
    with(cookie, |w| w.late).unwrap_or(0)
}

fn one_in(n: u64) -> bool {
    RNG.with(|r| r.borrow_mut().one_in(n))
}

fn below(n: u64) -> u64 {
    RNG.with(|r| r.borrow_mut().below(n))
}

/// As long as it lives, nothing comes between.
pub struct Quiet(bool);

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.set(self.0);
    }
}

pub fn quiet() -> Quiet {
    Quiet(QUIET.replace(true))
}

/// Anything may happen here.
pub fn between(may_die: bool) {
    if QUIET.get() {
        return;
    }
    let others = OTHERS.with(|o| o.borrow().as_ref().and_then(Weak::upgrade));
    others.inspect(|o| o.act(may_die));
}

/// Has the kernel itself taken nothing since the last call? What it waits for (a delayed acknowledgement, of small
/// buffers) comes by its own clock.
pub fn take_refused() -> bool {
    REFUSED.take()
}

pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], may_die: bool) -> Result<usize, i32> {
    between(may_die);
    let own = cookie(socket);
    let room = with(own, |w| w.room).flatten();
    let most = room.map_or(usize::MAX, |r| r as usize);
    let n = bytes.len().min(most);
    if n == 0 && !bytes.is_empty() {
        note("TCP is full");
        return Err(libc::EAGAIN);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `n` readable bytes.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), n, flags) };
    let sent = usize::try_from(sent).map_err(|_| errno());
    REFUSED.set(REFUSED.get() || sent == Err(libc::EAGAIN));
    if let Ok(n) = sent {
        let dropped = one_in(DROPS_IN.get());
        let slow = with(own, |w| {
            w.room = w.room.map(|r| r - n as u64);
            w.dropped += if dropped { n as u64 } else { 0 };
            w.slow.then_some(w.to)
        });
        if let Some(to) = slow.flatten() {
            with(to, |w| w.late += n as u64);
        }
    }
    between(may_die);
    sent
}

/// A missing buffer discards.
pub fn recv(
    socket: BorrowedFd<'_>,
    buf: *mut u8,
    len: usize,
    peek: bool,
    may_die: bool,
) -> Result<usize, i32> {
    between(may_die);
    let mut len = len;
    let late = late(cookie(socket));
    if late > 0 {
        let there = queued(socket, libc::FIONREAD)?.saturating_sub(late) as usize;
        if there == 0 {
            note("a look before it arrives");
            return Err(libc::EAGAIN);
        }
        len = len.min(there);
    }
    let mut flags = libc::MSG_DONTWAIT;
    flags |= if peek { libc::MSG_PEEK } else { 0 };
    flags |= if buf.is_null() { libc::MSG_TRUNC } else { 0 };
    // SAFETY: `len` writable bytes, or none and MSG_TRUNC.
    let n = unsafe { libc::recv(socket.as_raw_fd(), buf.cast(), len, flags) };
    let n = usize::try_from(n).map_err(|_| errno());
    between(may_die);
    n
}

/// As `Port::tcp_peek`.
pub fn peek(
    socket: BorrowedFd<'_>,
    mut iov: Iov<'_>,
    first: usize,
    gap: &mut [u8],
    rest: usize,
) -> Result<usize, i32> {
    let first = first.min(iov.left());
    let most = first + gap.len() + rest.min(iov.left() - first);
    let mut b = vec![0; most];
    let n = recv(socket, b.as_mut_ptr(), most, true, false)?;
    let (before, after) = b[..n].split_at(first.min(n));
    let (within, after) = after.split_at(gap.len().min(after.len()));
    gap[..within.len()].copy_from_slice(within);
    for mut part in [before, after] {
        while !part.is_empty() {
            let (p, n) = iov.take(part.len()).expect("as many as it has room for");
            // SAFETY: a buffer of this test's application.
            unsafe { p.copy_from_nonoverlapping(part.as_ptr(), n) };
            part = &part[n..];
        }
    }
    Ok(n)
}

pub fn unread(socket: BorrowedFd<'_>, may_die: bool) -> Result<usize, i32> {
    between(may_die);
    let there = queued(socket, libc::FIONREAD)?;
    let n = there.saturating_sub(late(cookie(socket))) as usize;
    between(may_die);
    Ok(n)
}

fn queued(socket: BorrowedFd<'_>, what: u64) -> Result<u64, i32> {
    let mut n = 0i32;
    // SAFETY: both requests write one int.
    match unsafe { libc::ioctl(socket.as_raw_fd(), what as _, &mut n) } {
        0 => Ok(n.max(0) as u64),
        _ => Err(errno()),
    }
}

/// The kernel's counts, with what drops have made of them.
pub fn sent(socket: BorrowedFd<'_>, may_die: bool) -> Option<u64> {
    look(socket, may_die).map(|p| p.sent)
}

pub fn taken(socket: BorrowedFd<'_>) -> Option<u64> {
    look(socket, false)?.bytes_taken()
}

/// Where its streams are.
pub fn look(socket: BorrowedFd<'_>, may_die: bool) -> Option<lane::os::TcpCounts> {
    between(may_die);
    let dropped = with(cookie(socket), |w| w.dropped).unwrap_or(0);
    let raw = || {
        let read = sockopt::get::<[u8; TcpInfo::BYTES]>(socket, libc::IPPROTO_TCP, libc::TCP_INFO);
        let (b, len) = read.ok()?;
        TcpInfo::parse(b.get(..len)?)
    };
    // So much of what was acknowledged is not yet; the acknowledgements come while the counts are read, but not for ever.
    let lag = match one_in(DROPS_IN.get()) {
        true => Cell::new(below(raw()?.acked.min(3000) + 1)),
        false => Cell::new(0),
    };
    let (began, moves) = (lag.get(), Cell::new(0));
    let acknowledge = || {
        if moves.get() < 4 && lag.get() > 0 && one_in(2) {
            moves.set(moves.get() + 1);
            lag.set(below(lag.get()));
        }
    };
    let info = || {
        acknowledge();
        let mut i = raw()?;
        i.acked -= lag.get();
        i.sent = i
            .sent
            .map(|(sent, again, unsent)| (sent + dropped, again, unsent));
        Some(i)
    };
    let outstanding = || {
        acknowledge();
        Some(queued(socket, libc::TIOCOUTQ).ok()? + lag.get())
    };
    let p = position(info, outstanding, || queued(socket, libc::FIONREAD).ok());
    if dropped > 0 || began > 0 {
        note("counts that drops have changed");
    }
    between(may_die);
    p
}

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
