//! Native calls of one direction: how many are in progress, and what they have moved.
//!
//! A thread may never return from a native call (it is cancelled, or a handler leaves by `siglongjmp`), and then
//! nobody knows how many bytes it has moved. The direction is marked, which keeps it from switching, until its count
//! has been read again from the kernel's position at a moment when no native call is running.

use crate::abi::{Shared, TcpPos};
use crate::prim::{fence_after_rmw, AtomicU32};
use core::sync::atomic::Ordering::*;

/// Bit beside the number of running calls: a call was left whose bytes were not counted.
const UNCOUNTED: u32 = 1 << 31;

/// What both halves have for native calls, in terms of their `mode`, `native_calls` and `tcp_pos`.
macro_rules! methods {
    ($half:ty) => {
        impl $half {
            /// Counts a native call (or, of a receiver, a native wait for one) without the lock. `false`: this
            /// direction is not on TCP. Every `true` is followed by [`Self::leave_native`].
            #[inline(always)]
            pub fn enter_native(&self) -> bool {
                native_calls::enter(&self.native_calls, || self.mode.load(SeqCst) == mode::TCP)
            }

            /// Ends a native call that moved so many bytes on TCP.
            #[inline(always)]
            pub fn leave_native(&self, bytes: u64) {
                native_calls::leave(&self.native_calls, &self.tcp_pos, bytes);
            }

            /// Ends a native call whose moved bytes nobody knows: see `half::native_calls`.
            pub fn leave_uncounted(&self) {
                native_calls::leave_uncounted(&self.native_calls);
            }

            /// The connection has moved bytes before it came to this process: they are counted by
            /// [`Self::recount`].
            pub fn begin_uncounted(&self) {
                native_calls::begin_uncounted(&self.native_calls);
            }

            /// Is there such a call that [`Self::recount`] has not corrected yet? Then this direction stays on TCP.
            #[inline(always)]
            pub fn uncounted(&self) -> bool {
                native_calls::uncounted(&self.native_calls)
            }

            /// Reads the count again from the kernel if no native call is running. Needs no lock.
            pub fn recount(&self, position: impl FnOnce() -> Option<TcpPos>) {
                native_calls::recount(&self.native_calls, &self.tcp_pos, position);
            }

            /// How many native calls are running now?
            pub fn inside(&self) -> u32 {
                native_calls::inside(&self.native_calls)
            }

            /// The entry gets another connection; no native call is running.
            pub fn forget_uncounted(&self) {
                native_calls::forget(&self.native_calls);
            }
        }
    };
}
pub(super) use methods;

/// Counts a call in, unless the direction is not on TCP.
#[inline(always)]
pub(super) fn enter(native_calls: &AtomicU32, on_tcp: impl FnOnce() -> bool) -> bool {
    // SYNC native-calls: see `TxState::try_up` and `RxState::declare_ready`.
    native_calls.fetch_add(1, SeqCst);
    fence_after_rmw();
    if on_tcp() {
        return true;
    }
    native_calls.fetch_sub(1, SeqCst);
    false
}

/// Leaves a call that moved so many bytes.
#[inline(always)]
pub(super) fn leave(native_calls: &AtomicU32, tcp_pos: &Shared<TcpPos>, bytes: u64) {
    tcp_pos.add(bytes, Relaxed);
    native_calls.fetch_sub(1, SeqCst); // releases `tcp_pos`
}

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
