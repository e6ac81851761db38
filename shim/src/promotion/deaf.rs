//! Before this end shuts the last of both directions down: what is unread on its ring goes to its own kernel's queue. Later
//! nobody could put it there for who has the connection next, because a kernel that is to take nothing more answers what
//! comes with a reset.

use super::leave::await_peer;
use super::takeover::Asked;
use crate::state::{attached, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use lane::half::rx::Revoked;

/// Milliseconds for the other end, or the daemon in its stead, to begin; and for the bytes to come, which TCP keeps back until
/// earlier ones are acknowledged: as long as an acknowledgement may be delayed.
const BEGIN_MS: u64 = 200;
const COMING_MS: u64 = 250;

/// Brings the receiving direction to TCP if bytes are unread on its ring. If neither the other end nor a daemon does its
/// part, they stay on the ring, where this process reads them.
pub fn bring_unread(i: u32, fd: i32) {
    let (c, l, began) = (table::conn(i), table::local(i), sys::now_ms());
    let mut asked = Asked::new();
    let mut lay = None;
    loop {
        let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
            return;
        };
        let waited = sys::now_ms() - began;
        {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return;
            };
            let unread = c.rx.ring_unread(&m);
            if c.rx.is_up() && unread == 0 {
                return;
            }
            let lay = *lay.get_or_insert(unread);
            let queued = || sys::ioctl_i32(fd, libc::FIONREAD).map_or(0, lane::num::bits);
            let come = || !c.rx.is_coming(&m) && u64::from(queued()) >= lay;
            match c.rx.revoke(&m, &Sock::leaving(fd, group)) {
                Ok(Revoked::Clear) if come() || waited > COMING_MS => return,
                Ok(Revoked::Clear) => {}
                Ok(Revoked::Pending) if waited > BEGIN_MS && c.rx.go_on(&m) => return,
                Ok(Revoked::Pending) if waited > BEGIN_MS + COMING_MS => return,
                Ok(Revoked::Pending) => {}
                Ok(Revoked::Impossible) | Err(_) => return,
            }
        }
        if c.rx.engaged() && asked.is_due() {
            asked.ask(i);
        }
        await_peer(i, fd, asked.wait_ms());
    }
}
