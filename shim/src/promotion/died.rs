//! A process of the family has died while it held the lock of a direction.

use crate::state::{attached, table};
use crate::tcp;
use crate::tcp::port::Sock;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// We have taken over the lock `word` from a dead process. If it is a direction's lock, the direction's state is
/// repaired by what the kernel says about the holder's last step.
#[cold]
pub fn holder_died(word: &AtomicU32) {
    let Some(i) = table::entry_of(word) else {
        return;
    };
    let (c, l) = (table::conn(i), table::local(i));
    let Some((group, m)) = attached::of(c, l) else {
        return;
    };
    let fd = l.fd.load(Relaxed);
    if !table::is_at(c, fd) {
        return; // it is being closed, or an inlined system call has closed it
    }
    let port = Sock::new(fd, group);
    let found = match core::ptr::eq(word, &c.tx.lock) {
        true => c.tx.holder_died(&m, &port),
        false => c.rx.holder_died(&m, &port),
    };
    if let Err(r) = found {
        crate::preserving_errno(|| tcp::reset(c, fd, r));
    }
}
