//! Does a descriptor number still stand for the connection in the table? An inlined system call may have closed
//! it, and it may be a file by now, or a pipe to another program. The kernel is asked (fstat), and a number with
//! another identity is forgotten.

use super::Way;
use crate::state::fdtab;
use crate::state::table::{self, Local};
use crate::sys::{clock, pages};
use core::sync::atomic::Ordering::Relaxed;
use lane::family::Conn;
use lane::num;
use lane::prim::ticks;

/// Microseconds for which a proof is valid. (An event loop returns to each of its connections after tens of
/// microseconds: with 20, Redis with 50 clients spends a quarter of its time on proofs.)
const PROOF_US: u64 = 50;

/// Low bits of a word of `Local::proved`, which hold the number; the bits above are the time of its proof, in
/// ticks.
const NUMBER: u32 = fdtab::MAX_FD.trailing_zeros();

/// Does `fd` still stand for connection `i`, for a send or receive? A proof of this number, for either direction,
/// is valid for a while. (It says nothing about the connection's other numbers.)
#[inline(always)]
pub fn still(fd: i32, i: u32, c: &Conn, l: &Local, way: Way) -> bool {
    let now = ticks();
    let mark = now << NUMBER | num::word(fd) as u64;
    let holds = PROOF_US * clock::cycles_per_us();
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

/// The connection for which a number stands, proven, for a call that acts on it.
pub fn proven(fd: i32) -> Option<u32> {
    let i = fdtab::conn(fd)?;
    is(fd, i, table::conn(i)).then_some(i)
}

/// Does `fd` stand for connection `i`? If not, the number is forgotten.
fn is(fd: i32, i: u32, c: &Conn) -> bool {
    let same = table::is_same(fd, c);
    if let Some(l) = super::LISTENER.get().filter(|_| !same) {
        (l.vanished)(fd, i);
    }
    same
}
