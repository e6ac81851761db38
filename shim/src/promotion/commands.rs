//! Commands for connections: from an operator, or from the daemon for an expedited end.

use super::*;
use crate::state::{attached, fdtab, fuse, table};
use crate::{sets, sys};
use lane::family::Cause;
use lane::num;
use lane::proto::msg::{op, ALL};

pub fn command(conn: u32, gen: u32, what: u32) {
    if what == op::EAGER_FD {
        let fd = num::signed(conn);
        if let Some(i) = fdtab::conn(fd) {
            if sys::inode(fd).is_ok_and(|(inode, _)| num::low32(inode) == gen) {
                register_now(i, table::conn(i), fd);
            }
        }
        return;
    }
    if what == op::UP {
        fuse::mend();
    }
    table::each(|i, c| {
        let waits = || c.flags.load(Relaxed) & UNREGISTRABLE == 0;
        if what == op::UP && c.reason.load(Relaxed) == Reason::Fuse.code() && waits() {
            c.not_before_ms.store(0, Relaxed);
            return consider(i, table::local(i).fd.load(Relaxed), c);
        }
        if conn != ALL && (conn != i || c.gen.load(Relaxed) != gen) {
            return;
        }
        match what {
            op::DOWN if c.flags.fetch_or(flag::HELD, Relaxed) & flag::HELD == 0 => {
                set_reason(c, Reason::Operator);
                take_down(i, Cause::Operator);
                sets::notify(i);
            }
            op::UP if c.flags.fetch_and(!flag::HELD, Relaxed) & flag::HELD != 0 => {
                set_reason(
                    c,
                    if c.flags.load(Relaxed) & flag::LANE != 0 {
                        Reason::None
                    } else {
                        Reason::Young
                    },
                );
                c.not_before_ms.store(0, Relaxed);
                let fd = table::local(i).fd.load(Relaxed);
                if let Some((group, m)) = attached::of(c, table::local(i)) {
                    if let Some(_g) = lock::lock(&c.rx.lock) {
                        c.rx.unwant_down(&m, &Sock::new(fd, group)); // the peer does not go up while this stands
                    }
                }
                try_ready(i, c, table::local(i));
            }
            op::GONE if c.flags.load(Relaxed) & (flag::LANE | flag::REMOTE) == flag::LANE => {
                peer_end_gone(i, c, sys::now_ms() + FIN_MS);
            }
            op::EAGER => register_now(i, c, table::local(i).fd.load(Relaxed)),
            _ => {}
        }
    });
}

/// Registers a connection now, although it has not been used yet.
fn register_now(i: u32, c: &Conn, fd: i32) {
    if c.flags.load(Relaxed) & UNREGISTRABLE == 0 {
        c.not_before_ms.store(0, Relaxed);
        c.calls.store(CALLS, Relaxed);
        consider(i, fd, c);
    }
}
