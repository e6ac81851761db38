//! Native calls of one direction: who is inside, and what they have moved.
//!
//! A thread may never come back from one (it is cancelled, or a handler jumps out of it), and then nobody knows
//! what it has moved. The direction is marked, which keeps it from switching, until its count has been taken
//! afresh from the kernel's, at a moment in which nobody else is inside.

use crate::prim::{AtomicU32, AtomicU64};
use core::sync::atomic::Ordering::*;

/// Beside the number of those inside: a call was left that is not counted.
const UNCOUNTED: u32 = 1 << 31;

/// Leaves a call of which nobody knows what it has moved.
pub(super) fn leave_uncounted(natives: &AtomicU32) {
    // The mark first: without anybody inside, and unmarked, it may switch. (SYNC recount)
    natives.fetch_or(UNCOUNTED, SeqCst);
    natives.fetch_sub(1, SeqCst);
}

/// Bytes have moved before anybody counted.
pub(super) fn begin_uncounted(natives: &AtomicU32) {
    natives.fetch_or(UNCOUNTED, SeqCst);
}

/// Is there such a call?
#[inline(always)]
pub(super) fn uncounted(natives: &AtomicU32) -> bool {
    natives.load(Relaxed) & UNCOUNTED != 0
}

/// How many are inside now?
pub(super) fn inside(natives: &AtomicU32) -> u32 {
    natives.load(Relaxed) & !UNCOUNTED
}

/// Another connection begins: the mark was about the one before. Nobody is inside.
pub(super) fn forget(natives: &AtomicU32) {
    natives.fetch_and(!UNCOUNTED, Relaxed);
}

/// Takes the count afresh, if nobody is inside. `position`: the kernel's, in the same bytes; `None`: it cannot
/// tell.
pub(super) fn recount(
    natives: &AtomicU32,
    kpos: &AtomicU64,
    position: impl FnOnce() -> Option<u64>,
) {
    // We are inside ourselves meanwhile, so that nobody switches, and nobody else does this.
    if natives
        .compare_exchange(UNCOUNTED, 1, SeqCst, Relaxed)
        .is_err()
    {
        return;
    }
    let before = kpos.load(Relaxed);
    let now = position();
    // SYNC recount: who moves something counts itself in, moves, adds it to `kpos` and counts itself out, or
    // sets the mark; we ask the kernel, then look who is inside, and at the count. (In this order: whoever is
    // not inside any more has added.)
    let alone = natives.load(SeqCst) == 1 && kpos.load(Relaxed) == before;
    match now.filter(|_| alone) {
        // Added, as all do: calls that came after our look may be at it.
        Some(now) => {
            kpos.fetch_add(now.wrapping_sub(before), Relaxed);
        }
        None => {
            natives.fetch_or(UNCOUNTED, SeqCst);
        }
    }
    natives.fetch_sub(1, SeqCst); // releases `kpos`
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_counted_when_nobody_is_inside() {
        let (natives, kpos) = (AtomicU32::new(2), AtomicU64::new(10));
        leave_uncounted(&natives); // it has moved 5
        recount(&natives, &kpos, || unreachable!()); // somebody is inside
        assert!(uncounted(&natives) && inside(&natives) == 1);
        kpos.fetch_add(7, Relaxed);
        natives.fetch_sub(1, SeqCst);
        recount(&natives, &kpos, || None); // the kernel does not tell now
        assert!(uncounted(&natives) && inside(&natives) == 0);
        recount(&natives, &kpos, || Some(22));
        assert_eq!((natives.load(SeqCst), kpos.load(SeqCst)), (0, 22));
        recount(&natives, &kpos, || unreachable!()); // nothing is missing
    }

    type Act = fn(&AtomicU32, &AtomicU64);

    #[test]
    fn who_comes_meanwhile_is_counted_once() {
        let moves: [Act; 3] = [
            |n, _| {
                n.fetch_add(1, SeqCst); // and is still inside
            },
            |_, k| {
                k.fetch_add(3, SeqCst); // and is out again
            },
            |n, _| {
                n.fetch_add(1, SeqCst);
                leave_uncounted(n);
            },
        ];
        for during in moves {
            let (natives, kpos) = (AtomicU32::new(1), AtomicU64::new(10));
            leave_uncounted(&natives);
            recount(&natives, &kpos, || {
                during(&natives, &kpos);
                Some(18)
            });
            assert!(uncounted(&natives), "the kernel's word may be about more");
            assert!(matches!(kpos.load(SeqCst), 10 | 13));
        }
    }
}
