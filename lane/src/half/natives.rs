//! Native calls of one direction: how many are in progress, and what they have moved.
//!
//! A thread may never return from a native call (it is cancelled, or a handler leaves by `siglongjmp`), and then
//! nobody knows how many bytes it has moved. The direction is marked, which keeps it from switching, until its count
//! has been read again from the kernel's position at a moment when no native call is running.

use crate::prim::{AtomicU32, AtomicU64};
use core::sync::atomic::Ordering::*;

/// Bit beside the number of running calls: a call was left whose bytes were not counted.
const UNCOUNTED: u32 = 1 << 31;

/// Leaves a call whose moved bytes nobody knows.
pub(super) fn leave_uncounted(natives: &AtomicU32) {
    // The mark comes first: a direction without running calls and without the mark may switch. (SYNC recount)
    natives.fetch_or(UNCOUNTED, SeqCst);
    natives.fetch_sub(1, SeqCst);
}

/// Marks a direction that has moved bytes before the shim began to count.
pub(super) fn begin_uncounted(natives: &AtomicU32) {
    natives.fetch_or(UNCOUNTED, SeqCst);
}

/// Is the direction marked?
#[inline(always)]
pub(super) fn uncounted(natives: &AtomicU32) -> bool {
    natives.load(Relaxed) & UNCOUNTED != 0
}

/// How many native calls are running now?
pub(super) fn inside(natives: &AtomicU32) -> u32 {
    natives.load(Relaxed) & !UNCOUNTED
}

/// The entry gets another connection: the mark was about the former one. No call is running.
pub(super) fn forget(natives: &AtomicU32) {
    natives.fetch_and(!UNCOUNTED, Relaxed);
}

/// Reads the count again if no native call is running. `position`: the kernel's, as a count of the same bytes;
/// `None`: not available now.
pub(super) fn recount(
    natives: &AtomicU32,
    kpos: &AtomicU64,
    position: impl FnOnce() -> Option<u64>,
) {
    // This counts as a running call meanwhile, so that nobody switches and no other thread recounts.
    if natives
        .compare_exchange(UNCOUNTED, 1, SeqCst, Relaxed)
        .is_err()
    {
        return;
    }
    let before = kpos.load(Relaxed);
    let now = position();
    // SYNC recount: a native call counts itself in, moves bytes, adds them to `kpos` and counts itself out, or sets
    // the mark; we ask the kernel, then look at the running calls, then at the count. (In this order: a call that has
    // counted itself out has added its bytes.)
    let alone = natives.load(SeqCst) == 1 && kpos.load(Relaxed) == before;
    match now.filter(|_| alone) {
        // Added, as native calls do: calls that began after our look may be adding, too.
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
