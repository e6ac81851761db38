//! The end of the process by its own decision: `exit`, the return of `main`, `_exit`.

use super::close::{sole_holder, RESET_AT_CLOSE};
use crate::state::{attached, table};
use crate::sys::{self, env, lock, thread};
use crate::tcp::port::Sock;
use core::sync::atomic::Ordering::Relaxed;

/// Called before the kernel closes what is open. What this process has on rings within the node, unread, goes to TCP, as
/// before a close: the other end may leave its lane later, and then nobody could put it there. If this process itself has
/// not read everything, the kernel's close is a reset, as it would be without lanes. Waits for nothing; other
/// threads may still run, and are left alone where they are at work. (Across nodes the daemon finishes.)
pub fn exits() {
    if env::off() || table::is_vfork_child() {
        return;
    }
    let _inside = thread::enter();
    table::each(|i, c| {
        let l = table::local(i);
        let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
            return;
        };
        let fd = l.fd.load(Relaxed);
        if !attached::engaged(c) || !sole_holder(c) || table::is_other(fd) {
            return;
        }
        let port = Sock::leaving(fd, group);
        if let Some(_t) = lock::try_lock(&c.tx.lock) {
            let _ = c.tx.before_fin(&m, &port);
        }
        let Some(_r) = lock::try_lock(&c.rx.lock) else {
            return;
        };
        if c.rx.ring_unread(&m) > 0 {
            // As a close with bytes unread. (It is not announced: the kernel's reset would then be a second event.)
            let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &RESET_AT_CLOSE);
        }
    });
}

extern "C" fn at_exit() {
    exits();
}

/// Called by the dynamic loader when `exit` has run the program's own handlers.
#[used]
#[link_section = ".fini_array"]
static AT_EXIT: extern "C" fn() = at_exit;
