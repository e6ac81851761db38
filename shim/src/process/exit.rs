//! The end of the process by its own decision: `exit`, the return of `main`, `_exit`.

use super::close::sole_holder;
use super::linger;
use super::shutdown::take_frame;
use crate::state::attached;
use crate::state::table;
use crate::sys::{env, lock, pids, thread};
use crate::tcp::port::Sock;
use core::sync::atomic::Ordering::Relaxed;
use lane::proto::reason::Reason;

/// Called before the kernel closes what is open. What this process has on rings within the node goes to TCP, as before a
/// close: the other end may leave its lane later, and then nobody could put it there. From now on these connections are on
/// TCP. If this process has not read everything, the kernel's close is a reset, as it would be without lanes. Waits only for
/// frames that are on their way ([`take_frame`]), once for all connections together; other threads may still run, and are left
/// alone where they are at work. (Across nodes the daemon finishes.)
pub fn exits() {
    if env::off() || table::is_vfork_child() {
        return;
    }
    let _inside = thread::enter();
    let mut until = None;
    table::each(|i, c| {
        let l = table::local(i);
        let Some((group, m)) = attached::of(c, l) else {
            return;
        };
        let (fd, mine) = (l.fd.load(Relaxed), c.owner_pid.load(Relaxed) == pids::me());
        if !mine || !attached::engaged(c) || table::is_other(fd) {
            return;
        }
        let (port, alone) = (Sock::leaving(fd, group), sole_holder(c));
        if group.is_remote() {
            // What repeats the ring would be unread for the kernel.
            if let Some(_r) = lock::try_lock(&c.rx.lock).filter(|_| c.rx.awaits_repeated(&m)) {
                let _ = c.rx.probe(&m, &port);
            }
            return;
        }
        if let Some(_t) = lock::try_lock(&c.tx.lock) {
            table::disqualify(c, Reason::NotEstablished);
            if alone {
                c.rx.will_exit(&m);
            }
            let _ = c.tx.before_fin(&m, &port);
            let _ = c.tx.down(&m, &port); // also if nothing is unread now
            if alone {
                c.rx.announce_exit(&m, &port, c.tx.tcp_pos.load(Relaxed));
            }
        }
        let Some(_r) = lock::try_lock(&c.rx.lock) else {
            return;
        };
        // SYNC taken: what this process has taken from the ring is stored, now we look whether the other end goes down. A frame
        // that is left on TCP would make it a reset. (If others go on with the connection, it does not end.)
        let no_time = &mut Some(0);
        take_frame(c, &m, &port, true, if alone { &mut until } else { no_time });
        if c.rx.ring_unread(&m) > 0 && alone {
            // As a close with bytes unread. (It is not announced: the kernel's reset would then be a second event.)
            linger::prepare_reset(l, fd);
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
