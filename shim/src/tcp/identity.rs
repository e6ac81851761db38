//! Is a descriptor number still the connection that the table says? An inlined system call may have closed it,
//! and the number be a file, or another program's pipe, by now. The kernel is asked (fstat), and what has
//! another identity is forgotten.

use super::Way;
use crate::table::{self, Local};
use crate::{fdtab, pages, wait};
use core::sync::atomic::Ordering::Relaxed;
use link::family::Conn;
use link::prim::ticks;

/// Microseconds for which a proof holds. (An event loop comes back to each of its connections after tens of
/// microseconds: with 20, Redis with 50 clients spends a quarter of its time on proofs.)
const PROOF_US: u64 = 50;

/// Bits of a number in `Local::proved`; above them are the ticks of its proof.
const NUMBER: u32 = fdtab::MAX_FD.trailing_zeros();

/// The same for a send or receive: a proof of this number, for whatever direction, holds for a while. (Another
/// number of the connection says nothing of this one.)
#[inline(always)]
pub fn still(fd: i32, i: u32, c: &Conn, l: &Local, way: Way) -> bool {
    let now = ticks();
    let mark = now << NUMBER | fd as u64;
    let holds = PROOF_US * wait::cycles_per_us();
    let proved = |way: usize| {
        let age = mark.wrapping_sub(l.proved[way].load(Relaxed));
        age & (fdtab::MAX_FD as u64 - 1) == 0 && age >> NUMBER <= holds
    };
    proved(way as usize) || {
        pages::age(now);
        proved(1 - way as usize) || prove(fd, i, c, l, way, mark)
    }
}

#[cold]
fn prove(fd: i32, i: u32, c: &Conn, l: &Local, way: Way, mark: u64) -> bool {
    let same = is(fd, i, c);
    if same {
        l.proved[way as usize].store(mark, Relaxed);
    }
    same
}

/// The connection behind a number, for a call that does something to it.
pub fn proven(fd: i32) -> Option<u32> {
    let i = fdtab::conn(fd)?;
    is(fd, i, table::conn(i)).then_some(i)
}

/// Is `fd` connection `i`? If not, that number is forgotten.
fn is(fd: i32, i: u32, c: &Conn) -> bool {
    let same = table::is_same(fd, c);
    if let Some(l) = super::LISTENER.get().filter(|_| !same) {
        (l.vanished)(fd, i);
    }
    same
}
