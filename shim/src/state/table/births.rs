//! Which children have taken back what their fork had counted for them (`forks`). One that is killed before its first
//! instruction in the shim never does that; its parent, which alone knows its number, does it instead.

use super::{forget_fork, uncount_child};
use crate::sys::{self, lock, pids};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

const PAGE: usize = 4096;
/// So many forks may wait for a word of their children; then the parent waits no longer. (There are 64 bits.)
const MOST: u32 = 48;

/// Bits of the forks whose children have not been seen to be born.
static UNBORN: AtomicU64 = AtomicU64::new(0);
/// These children.
static CHILDREN: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
/// Memory that this process shares with its children: bits of the forks whose children are born. Null: it has none.
static BORN: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
/// The process that made it: a child has its parent's until it forks itself.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Held while it is made, so that all children of a process have the same.
static MAKING: AtomicU32 = AtomicU32::new(0);

fn born_word() -> Option<&'static AtomicU64> {
    // SAFETY: null, or a page that stays mapped (another one may take its place).
    unsafe { BORN.load(Acquire).as_ref() }
}

fn own_word() -> Option<&'static AtomicU64> {
    born_word().filter(|_| OWNER.load(Acquire) == pids::pid())
}

/// Before a fork.
pub fn expect_child() {
    settle_births(false);
    if UNBORN.load(SeqCst).count_ones() >= MOST {
        settle_births(true);
        if UNBORN.load(SeqCst).count_ones() >= MOST {
            forget_children();
        }
    }
    if own_word().is_some() {
        return;
    }
    let Some(_g) = lock::lock(&MAKING).filter(|_| own_word().is_none()) else {
        return;
    };
    let parents = BORN.load(Acquire);
    let made = match parents.is_null() {
        true => sys::map(-1, PAGE, true),
        false => sys::map_shared_over(parents.cast(), PAGE).map(|()| parents.cast()),
    };
    if let Ok(p) = made {
        BORN.store(p.cast(), Release);
        OWNER.store(pids::pid(), Release);
    }
}

/// In the parent, after the fork with this bit. False: the child is not waited for.
pub fn await_birth(bit: u64, child: u32) -> bool {
    let Some(word) = CHILDREN.get(bit.trailing_zeros() as usize) else {
        return false; // (it has no bit)
    };
    if own_word().is_none() {
        return false;
    }
    word.store(child, Relaxed);
    UNBORN.fetch_or(bit, SeqCst); // releases the number
    true
}

/// In the child, before it takes back what was counted. (If it is killed in the middle of that, the rest stays counted.)
pub fn born(bit: u64) {
    // SeqCst: before what the child takes back; its parent looks here once it has found the child dead.
    born_word().iter().for_each(|w| _ = w.fetch_or(bit, SeqCst));
}

/// In the child: it has none itself.
pub fn no_child() {
    UNBORN.store(0, SeqCst);
}

/// What is known of the children by now. `deaths`: also which of them are dead.
pub fn settle_births(deaths: bool) {
    let unborn = UNBORN.load(SeqCst);
    let Some(word) = own_word().filter(|_| unborn != 0) else {
        return;
    };
    for (k, child) in CHILDREN.iter().enumerate() {
        let bit = 1 << k;
        if unborn & bit == 0 {
            continue;
        }
        // In this order: what a dead child has said is final.
        let dead = deaths && pids::dead(child.load(Relaxed));
        let is_born = word.load(SeqCst) & bit != 0;
        if is_born || dead {
            end(bit, !is_born);
        }
    }
}

/// Their entries mean something else from now on, or there are too many of them: what is counted for children that are never
/// born stays counted.
pub fn forget_children() {
    let unborn = UNBORN.load(SeqCst);
    (0..64)
        .filter(|k| unborn >> k & 1 != 0)
        .for_each(|k| end(1 << k, false));
}

fn end(bit: u64, stillborn: bool) {
    if UNBORN.fetch_and(!bit, SeqCst) & bit == 0 {
        return; // another thread does it
    }
    if stillborn {
        uncount_child(bit);
    }
    forget_fork(bit);
    own_word()
        .iter()
        .for_each(|w| _ = w.fetch_and(!bit, SeqCst));
    pids::forget_bit(bit);
}
