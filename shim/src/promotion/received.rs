//! Connections that this process got from another one, with a message (SCM_RIGHTS) or by exec.
//!
//! We know neither how many bytes such a connection has moved before, nor who else holds it. So the first look
//! takes both counts from the kernel; from then on, the counts show whether hooked calls move all bytes. The
//! daemon promotes the connection only if it finds no other holder (`RegisterReceived`).

use crate::state::fdtab;
use crate::state::table::{self, Local};
use crate::sys::{self, env, lock};
use crate::tcp;
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::family::{flag, Conn};
use lane::os::{Side, TcpInfo};
use lane::proto::msg::{register, ToDaemon};
use lane::proto::reason::Reason;

/// A descriptor of this process that the table has for this socket, and its entry, which satisfies `which`.
pub fn another(inode: u64, which: impl Fn(u32) -> bool) -> Option<(i32, u32)> {
    let all = (0..=fdtab::high()).filter_map(|fd| Some((fd, fdtab::conn(fd)?)));
    let same = |i: u32| table::conn(i).inode.load(Relaxed) == inode && which(i);
    all.into_iter().find(|(_, i)| same(*i))
}

/// Has this process handed the socket on and kept it, and received another descriptor of the same socket?
pub fn is_twice(i: u32, c: &Conn) -> bool {
    let received = c.flags.load(Relaxed) & flag::RECEIVED != 0;
    received && another(c.inode.load(Relaxed), |k| k != i).is_some()
}

/// The first look at a connection, once it has been used enough. False: it cannot be promoted, or not yet.
pub fn begin(fd: i32, c: &Conn, l: &Local) -> bool {
    let (Some(_t), Some(_r)) = (lock::try_lock(&c.tx.lock), lock::try_lock(&c.rx.lock)) else {
        return false;
    };
    if c.flags.load(Relaxed) & flag::NEW == 0 {
        return true;
    }
    if has_what_no_lane_carries(fd) {
        table::disqualify(c, Reason::Option);
        return false;
    }
    // (Of a connection that was only lent it is known.)
    if !table::is_lent(c) {
        let Some(side) = side(fd) else {
            table::later(c, Reason::Young, 5);
            return false;
        };
        for (bit, on) in [(flag::CLIENT, side.client), (flag::UNSURE, !side.certain)] {
            match on {
                true => c.flags.fetch_or(bit, Relaxed),
                false => c.flags.fetch_and(!bit, Relaxed),
            };
        }
    }
    tcp::recount(c, l);
    if c.tx.uncounted() || c.rx.uncounted() {
        table::later(c, Reason::Young, 5); // a call is in progress, or the connection is ending
        return false;
    }
    let counts = [&c.tx.tcp_pos, &c.rx.tcp_pos];
    for (began, count) in l.began.iter().zip(counts) {
        began.store(count.load(Relaxed), Relaxed);
    }
    c.calls.store(0, Relaxed);
    c.flags.fetch_and(!flag::NEW, Release);
    true
}

/// Options that no lane carries, and that the previous process may have set unseen. (The daemon checks the
/// others.)
fn has_what_no_lane_carries(fd: i32) -> bool {
    let set = |name| sys::getsockopt_u32(fd, libc::SOL_SOCKET, name) != Ok(0);
    let filtered = || sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_GET_FILTER, &mut []) != Ok(0);
    let signals = || sys::fcntl(fd, libc::F_GETFL, 0).map_or(true, |f| f & libc::O_ASYNC != 0);
    set(libc::SO_ZEROCOPY) || filtered() || signals() // (the kernel has numbered earlier zero-copy calls)
}

/// `None`: not established, or never quiet, or its counters are inconclusive.
fn side(fd: i32) -> Option<Side> {
    let info = || sys::tcp_info(fd).filter(|k| k.state == TcpInfo::ESTABLISHED);
    let mut before = info()?;
    for _ in 0..8 {
        let outstanding = sys::ioctl_i32(fd, libc::TIOCOUTQ).ok()?;
        let now = info()?;
        if (now.acked, now.sent) == (before.acked, before.sent) {
            return now.side(u64::try_from(outstanding).unwrap_or(0));
        }
        before = now;
    }
    None
}

/// Has it been used here enough for the usual evidence? The C library's own streams, which the hooks do not see,
/// may have the numbers 0, 1 and 2: for these, hooked calls must have moved bytes in both directions.
pub fn is_evident(c: &Conn, l: &Local) -> bool {
    let moved = |n: usize, count: TcpPos| l.began[n].load(Relaxed) != count;
    l.standard.load(Relaxed) == 0
        || moved(0, c.tx.tcp_pos.load(Relaxed)) && moved(1, c.rx.tcp_pos.load(Relaxed))
}

/// The connection has moved bytes that nobody here has counted: it is looked at again from the start.
pub fn begin_anew(c: &Conn) {
    c.tx.begin_uncounted();
    c.rx.begin_uncounted();
    c.flags.fetch_or(flag::NEW, Relaxed);
}

/// Is the count of bytes taken from TCP still right? The process that handed the connection on may have read
/// between our count and the daemon's search for other holders; after that search, nobody else can. Checked before
/// the receiver first declares itself ready on a lane. The lock of the receiving direction is held.
pub fn is_still_counted(c: &Conn, l: &Local) -> bool {
    if c.flags.load(Relaxed) & flag::RECEIVED == 0 || l.verified.load(Relaxed) != 0 {
        return true;
    }
    let counted = c.rx.tcp_pos.load(SeqCst);
    let quiet = || c.rx.inside() == 0 && c.rx.tcp_pos.load(SeqCst) == counted;
    let taken = quiet().then(|| sys::tcp_position(l.fd.load(Relaxed)));
    match taken.flatten().filter(|_| quiet()) {
        Some(k) if k.rx_pos() == counted => l.verified.store(1, Relaxed),
        Some(_) => table::disqualify(c, Reason::Bypassed),
        None => {}
    }
    l.verified.load(Relaxed) != 0
}

/// The message that registers connection `conn` with the daemon. `more`: flags in addition to the usual ones.
pub fn registration(
    c: &Conn,
    l: &Local,
    (conn, gen): (u32, u32),
    tcp_pos: [TcpPos; 2],
    more: u32,
) -> ToDaemon {
    let [tx_tcp_pos, rx_tcp_pos] = tcp_pos;
    let flags = c.flags.load(Relaxed);
    let all = [
        (register::INQ_ZEROCOPY, true),
        (register::EAGER, env::eager()),
        (register::CLIENT, flags & flag::CLIENT != 0),
        (register::CERTAIN, flags & flag::UNSURE == 0),
    ];
    let said = all.iter().filter(|f| f.1).fold(more, |w, f| w | f.0);
    match flags & flag::RECEIVED {
        0 => ToDaemon::Register {
            conn,
            gen,
            tx_tcp_pos,
            rx_tcp_pos,
            flags: said,
        },
        _ => ToDaemon::RegisterReceived {
            conn,
            gen,
            tx_tcp_pos,
            rx_tcp_pos,
            flags: said,
            from: match l.from.load(Relaxed) {
                0 if table::is_lent(c) => register::ENDED,
                from => from,
            },
            copies: l.refs.load(SeqCst) + fdtab::hidden_copies(c.inode.load(Relaxed)),
        },
    }
}
