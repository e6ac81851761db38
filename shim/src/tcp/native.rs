//! Native calls on connections that may have a lane. While such a call runs, its direction does not switch, and
//! the bytes that it moved are counted when it returns, so that positions stay exact.

use super::call::Call;
use super::{after_down, at_mark, broken, fail, left_ms, recv_or_told, send_or_told, CLOSE};
use crate::state::signals;
use crate::state::table::{self, Local};
use crate::sys::{self, lock, real, thread};
use crate::{errno, set_errno};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::half::Iov;
use lane::num;
use lane::os::TcpCounts;
use libc::{iovec, msghdr};

/// Direction of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Send,
    Receive,
}

/// The outcome of a native call.
pub enum Native {
    /// It was made and returned `says`. `ours`: the connection was not closed meanwhile.
    Made { says: isize, ours: bool },
    /// It was not made: this direction is not on TCP.
    Lane,
    /// It was not made: the connection was closed.
    Closed,
}

impl Way {
    #[inline(always)]
    fn enter(self, c: &Conn) -> bool {
        match self {
            Way::Send => c.tx.enter_native(),
            Way::Receive => c.rx.enter_native(),
        }
    }

    /// `tables`: [`table::given_up`], as read before entering.
    #[inline(always)]
    fn leave(self, c: &Conn, moved: u64, tables: u32) {
        if tables != table::given_up() {
            return; // the new table does not count this call
        }
        match self {
            Way::Send => c.tx.leave_native(moved),
            Way::Receive => c.rx.leave_native(moved),
        }
    }

    /// Leaves a call that the thread never returns from.
    #[cold]
    fn lose(self, (c, l): (&Conn, &Local), tables: u32) {
        if tables != table::given_up() {
            return; // as above
        }
        match self {
            Way::Send => c.tx.leave_uncounted(),
            Way::Receive => c.rx.leave_uncounted(),
        }
        // Recount now, unless another call is in progress; otherwise the next attempt to promote the connection
        // does it.
        if let Some(_g) = lock::try_lock(&c.tx.lock) {
            recount(c, l);
        }
    }

    /// Makes the native call `call`, unless an error must be reported to the application first.
    pub fn or_told(self, c: &Conn, fd: i32, flags: i32, call: impl Fn() -> isize) -> isize {
        match self {
            Way::Send => send_or_told(c, call),
            Way::Receive => recv_or_told(c, fd, flags, call),
        }
    }

    /// The result of a call during whose sleep this process has called `connect(AF_UNSPEC)`, with `moved` bytes
    /// done.
    #[cold]
    fn disconnected(self, fd: i32, moved: usize, flags: i32) -> isize {
        match (self, moved) {
            (Way::Receive, 0) => fail(libc::EPIPE), // the error is for the next call
            (Way::Send, 0) => match sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_ERROR) {
                Ok(e) if e != 0 => fail(num::signed(e)),
                _ => broken(flags),
            },
            _ => num::ssize(moved),
        }
    }

    /// Keeps the error that the kernel returned for a part of a call, for the application's next call.
    pub fn put_error(self, c: &Conn, fd: i32, e: i32) {
        match self {
            // The kernel returns EPIPE again by itself. (But EPIPE for a reset after a FIN, which closes the
            // socket, is an error.)
            Way::Send if e == libc::EPIPE && sys::tcp_state(fd) != Some(CLOSE) => {}
            Way::Send => c.tx.error.put(e),
            Way::Receive => c.rx.error.put(e),
        }
    }

    /// The C library's call: it may block, and the thread may be cancelled in it.
    ///
    /// # Safety
    /// The buffers of `h` are the application's, as its own call demands.
    pub unsafe fn block(self, fd: i32, h: *mut msghdr, flags: i32) -> isize {
        // SAFETY: by contract.
        unsafe {
            match self {
                Way::Send => real::sendmsg(fd, h, flags),
                Way::Receive => real::recvmsg(fd, h, flags),
            }
        }
    }

    /// The same for a further part: it neither blocks nor raises a signal. Errors are negative.
    ///
    /// # Safety
    /// As [`Way::block`].
    pub unsafe fn now(self, fd: i32, h: &mut msghdr, flags: i32) -> isize {
        let flags = flags | libc::MSG_DONTWAIT;
        let r = match self {
            Way::Send => sys::sendmsg(fd, h, flags | libc::MSG_NOSIGNAL),
            Way::Receive => sys::recvmsg(fd, h, flags),
        };
        r.map_or_else(|e| -(e as isize), num::ssize)
    }
}

/// Makes a native call, and counts the bytes that it returns. If the thread never returns from it (it is
/// cancelled, or a handler jumps out of it), nobody knows how many bytes it moved: see [`recount`]. `counts`: the
/// call consumes or sends bytes, and does not merely peek.
#[inline]
pub fn native(
    call: &Call,
    (c, l): (&Conn, &Local),
    way: Way,
    counts: bool,
    make: impl FnOnce() -> isize,
) -> Native {
    let tables = table::given_up();
    if !way.enter(c) {
        return Native::Lane;
    }
    if !call.current(c, l) {
        way.leave(c, 0, tables);
        return Native::Closed;
    }
    let undo = || match counts && call.counts(c) {
        true => way.lose((c, l), tables),
        false => way.leave(c, 0, tables),
    };
    let says = thread::or_undo(&undo, make);
    // (If the connection was closed meanwhile, the bytes need no counting.)
    let ours = call.counts(c);
    if says < 0 && matches!(errno(), libc::EFAULT | libc::EINVAL) {
        crate::preserving_errno(undo); // it may have failed after it had taken bytes
    } else {
        let moved = match ours && counts {
            true => num::count(says) as u64,
            false => 0,
        };
        way.leave(c, moved, tables);
        if way == Way::Send && moved > 0 && after_down::may_wait(c, l) {
            crate::preserving_errno(|| after_down::push(c, l, moved));
        }
    }
    Native::Made { says, ours }
}

/// Reads from the kernel the counts that a thread has left unknown, once no call of that direction runs. (A
/// receive that fails with EFAULT or EINVAL also leaves its count unknown: bytes that it took are lost.) A lock of
/// the connection is held, so that its descriptor stays valid.
#[cold]
pub fn recount(c: &Conn, l: &Local) {
    let fd = l.fd.load(Relaxed);
    let known = c.inode.load(Relaxed);
    if known != 0 && !sys::inode(fd).is_ok_and(|(inode, _)| inode == known) {
        return; // an inlined system call has closed the socket
    }
    let client = c.flags.load(Relaxed) & flag::CLIENT != 0;
    // (After a FIN, the kernel's count of that direction is higher by one.)
    let position = |open: fn(&TcpCounts) -> bool| sys::tcp_position(fd).filter(open);
    c.tx.recount(|| position(TcpCounts::may_send).map(|k| k.tx_pos(client)));
    c.rx.recount(|| position(TcpCounts::may_receive).map(|k| k.rx_pos()));
}

/// A call that continues natively may sleep.
#[derive(Clone, Copy)]
pub struct Sleep {
    /// End of the wait; `None`: for ever.
    pub until: Option<u64>,
    /// `Local::disconnects` when the call began.
    pub disconnects: u32,
}

/// The descriptor for a native call; a call that continues has a copy of its own. `None`: the connection was
/// closed.
#[inline]
pub fn descriptor(call: &mut Call, (c, l): (&Conn, &Local), total: usize) -> Option<i32> {
    match total > 0 || call.holds() {
        true => call.native(c, l),
        false => Some(call.fd(l)),
    }
}

/// Makes natively what is left of a call of which `total` bytes are done, or which has slept. Returns the bytes
/// that this moves, or an error if the call has moved none at all. `sleeps`: it may block. (The kernel decides
/// about blocking and the time-out when a call begins, and ignores later changes of the socket. So this does not
/// block in the kernel, which would read them again.)
///
/// # Safety
/// The buffers are the application's, as its own call demands.
#[cold]
pub unsafe fn rest(
    way: Way,
    c: &Conn,
    fd: i32,
    mut iov: Iov<'_>,
    mut flags: i32,
    total: usize,
    sleeps: Option<Sleep>,
) -> isize {
    if way == Way::Send {
        flags &= !libc::MSG_ZEROCOPY; // this call is counted by us: see `zerocopy`
    }
    let all = way == Way::Send || flags & libc::MSG_WAITALL != 0;
    // (Only the kernel can wake a peek that waits for more bytes than there are.)
    let peeks_all = all && flags & libc::MSG_PEEK != 0;
    let mut sleeps = sleeps.filter(|_| flags & libc::MSG_DONTWAIT == 0);
    if sleeps.is_some() && !peeks_all {
        flags |= libc::MSG_DONTWAIT;
    }
    let mut moved = 0;
    loop {
        let part = total + moved > 0;
        if way == Way::Receive && part && at_mark(fd) {
            return num::ssize(moved); // the kernel's own call ends there, too
        }
        if way == Way::Send && part {
            flags |= libc::MSG_NOSIGNAL; // after a part of the bytes there is no SIGPIPE
        }
        let mut v = [NONE; VECS];
        let (mut h, want) = header(&mut v, iov.clone(), usize::MAX);
        // As in the kernel, a zero-length receive that has slept leaves the error for the next call.
        if way == Way::Receive && want == 0 && sleeps.is_some() && sys::poll1(fd, ANY_NEWS) != 0 {
            return 0;
        }
        // SAFETY: by contract.
        let r = thread::outside(|| unsafe { way.block(fd, &mut h, flags) });
        let waits = sleeps.filter(|_| r < 0 && (!peeks_all || is_nonblocking(fd)));
        if let Some(sleep) = waits.filter(|_| errno() == libc::EAGAIN) {
            let goes_on = sleeps_on(way, fd, sleep.until, part);
            if table::local_of(c).disconnects.load(SeqCst) != sleep.disconnects {
                return way.disconnected(fd, moved, flags);
            }
            if goes_on {
                continue;
            }
            if way == Way::Receive && want == 0 {
                return 0; // the kernel gives no reason when a zero-length receive wakes
            }
        }
        if r < 0 && !part {
            return r;
        }
        if r < 0 {
            way.put_error(c, fd, errno());
        }
        let r = num::count(r);
        moved += r;
        iov.skip(r);
        let goes_on = || all && r > 0 && sleeps.is_some() && !thread::interrupted(true);
        if iov.left() == 0 || flags & libc::MSG_PEEK != 0 || r < want && !goes_on() {
            return num::ssize(moved);
        }
        if !all {
            (sleeps, flags) = (None, flags | libc::MSG_DONTWAIT); // buffers full: take only what is there
        }
    }
}

/// Events that wake a receive.
pub const ANY_NEWS: i16 = libc::POLLIN | libc::POLLPRI | libc::POLLRDHUP;

/// The kernel has returned EAGAIN to a call that may block: sleeps. False: the time is over, or a handler has run,
/// and errno is what the call ends with.
#[cold]
fn sleeps_on(way: Way, fd: i32, end: Option<u64>, part: bool) -> bool {
    let events = match way {
        Way::Send => libc::POLLOUT,
        Way::Receive if part => libc::POLLIN | libc::POLLPRI, // an urgent byte ends it
        Way::Receive => libc::POLLIN,
    };
    let mut p = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let ms = num::millis(left_ms(end));
    // (A handler that has run since the call began, in a sleep on the lane, ends this sleep, too.)
    let n = match thread::interrupted(true) {
        true => {
            set_errno(libc::EINTR);
            -1
        }
        // SAFETY: a valid entry. A cancellation point, as the call itself.
        false => thread::outside(|| unsafe { real::poll(&mut p, 1, ms) }),
    };
    let anew = n < 0 && !ends(end.is_some() || part);
    if anew {
        thread::begins_anew();
    }
    // (A call that restarts reads the blocking mode again, and may not block now.)
    if n == 0 || anew && is_nonblocking(fd) {
        set_errno(libc::EAGAIN);
        return false;
    }
    n > 0 || anew
}

/// Does the signal that has interrupted a sleep end the call? `any`: the call has a time-out or has moved
/// something.
fn ends(any: bool) -> bool {
    match thread::interrupted(true) {
        true => thread::interrupted(any),
        false => any || signals::foreign_cut(),
    }
}

/// Is the description non-blocking, whoever has made it so?
pub fn is_nonblocking(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0)
}

/// Buffers of one part.
pub const VECS: usize = 16;

pub const NONE: iovec = iovec {
    iov_base: core::ptr::null_mut(),
    iov_len: 0,
};

/// A message header for the next bytes of `iov`, at most `most`, and how many bytes these are.
pub fn header(v: &mut [iovec; VECS], mut iov: Iov<'_>, most: usize) -> (msghdr, usize) {
    let (mut n, mut bytes) = (0, 0);
    while n < VECS && bytes < most {
        let Some((p, len)) = iov.take(most - bytes) else {
            break;
        };
        v[n] = iovec {
            iov_base: p.cast(),
            iov_len: len,
        };
        n += 1;
        bytes += len;
    }
    // SAFETY: all-zero is a valid msghdr.
    let mut h: msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = v.as_mut_ptr();
    h.msg_iovlen = n;
    (h, bytes)
}
