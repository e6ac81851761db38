//! Native calls of one direction: how many are in progress, and what they have moved.
//!
//! A thread may never return from a native call (it is cancelled, or a handler leaves by `siglongjmp`), and then
//! nobody knows how many bytes it has moved. The direction is marked, which keeps it from switching, until its count
//! has been read again from the kernel's position at a moment when no native call is running.

use crate::abi::{Shared, TcpPos};
use crate::prim::AtomicU32;
use core::sync::atomic::Ordering::*;

/// Bit beside the number of running calls: a call was left whose bytes were not counted.
const UNCOUNTED: u32 = 1 << 31;

/// Leaves a call whose moved bytes nobody knows.
pub(super) fn leave_uncounted(native_calls: &AtomicU32) {
    // The mark comes first: a direction without running calls and without the mark may switch. (SYNC recount)
    native_calls.fetch_or(UNCOUNTED, SeqCst);
    native_calls.fetch_sub(1, SeqCst);
}

/// Marks a direction that has moved bytes before the shim began to count.
pub(super) fn begin_uncounted(native_calls: &AtomicU32) {
    native_calls.fetch_or(UNCOUNTED, SeqCst);
}

/// Is the direction marked?
#[inline(always)]
pub(super) fn uncounted(native_calls: &AtomicU32) -> bool {
    native_calls.load(Relaxed) & UNCOUNTED != 0
}

/// How many native calls are running now?
pub(super) fn inside(native_calls: &AtomicU32) -> u32 {
    native_calls.load(Relaxed) & !UNCOUNTED
}

/// The entry gets another connection: the mark was about the former one. No call is running.
pub(super) fn forget(native_calls: &AtomicU32) {
    native_calls.fetch_and(!UNCOUNTED, Relaxed);
}

/// Reads the count again if no native call is running. `position`: the kernel's, as a count of the same bytes;
/// `None`: not available now.
pub(super) fn recount(
    native_calls: &AtomicU32,
    tcp_pos: &Shared<TcpPos>,
    position: impl FnOnce() -> Option<TcpPos>,
) {
    // This counts as a running call meanwhile, so that nobody switches and no other thread recounts.
    if native_calls
        .compare_exchange(UNCOUNTED, 1, SeqCst, Relaxed)
        .is_err()
    {
        return;
    }
    let before = tcp_pos.load(Relaxed);
    let now = position();
    // SYNC recount: a native call counts itself in, moves bytes, adds them to `tcp_pos` and counts itself out, or sets
    // the mark; we ask the kernel, then look at the running calls, then at the count. (In this order: a call that has
    // counted itself out has added its bytes.)
    let alone = native_calls.load(SeqCst) == 1 && tcp_pos.load(Relaxed) == before;
    match now.filter(|_| alone) {
        // Added, as native calls do: calls that began after our look may be adding, too.
        Some(now) => tcp_pos.add(now.since(before), Relaxed),
        None => {
            native_calls.fetch_or(UNCOUNTED, SeqCst);
        }
    }
    native_calls.fetch_sub(1, SeqCst); // releases `tcp_pos`
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn counted(bytes: u64) -> Shared<TcpPos> {
        let pos = Shared::default();
        pos.store(TcpPos::new(bytes), Relaxed);
        pos
    }

    #[test]
    fn what_was_lost_is_counted_when_nobody_is_inside() {
        let (native_calls, tcp_pos) = (AtomicU32::new(2), counted(10));
        leave_uncounted(&native_calls); // it has moved 5
        recount(&native_calls, &tcp_pos, || unreachable!()); // somebody is inside
        assert!(uncounted(&native_calls) && inside(&native_calls) == 1);
        tcp_pos.add(7, Relaxed);
        native_calls.fetch_sub(1, SeqCst);
        recount(&native_calls, &tcp_pos, || None); // the kernel does not tell now
        assert!(uncounted(&native_calls) && inside(&native_calls) == 0);
        recount(&native_calls, &tcp_pos, || Some(TcpPos::new(22)));
        let now = (native_calls.load(SeqCst), tcp_pos.load(SeqCst).get());
        assert_eq!(now, (0, 22));
        recount(&native_calls, &tcp_pos, || unreachable!()); // nothing is missing
    }

    type Act = fn(&AtomicU32, &Shared<TcpPos>);

    #[test]
    fn who_comes_meanwhile_is_counted_once() {
        let moves: [Act; 3] = [
            |n, _| {
                n.fetch_add(1, SeqCst); // and is still inside
            },
            |_, k| {
                k.add(3, SeqCst); // and is out again
            },
            |n, _| {
                n.fetch_add(1, SeqCst);
                leave_uncounted(n);
            },
        ];
        for during in moves {
            let (native_calls, tcp_pos) = (AtomicU32::new(1), counted(10));
            leave_uncounted(&native_calls);
            recount(&native_calls, &tcp_pos, || {
                during(&native_calls, &tcp_pos);
                Some(TcpPos::new(18))
            });
            assert!(
                uncounted(&native_calls),
                "the kernel's word may be about more"
            );
            assert!(matches!(tcp_pos.load(SeqCst).get(), 10 | 13));
        }
    }
}
