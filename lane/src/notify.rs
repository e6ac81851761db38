//! Publish and sleep: work in shared memory wakes a sleeper without a lost wake-up, and without an atomic
//! read-modify-write on a cache line that both sides write.
//!
//! Publisher: store the data and its head or cursor; increment the lane's publish counter; full fence; look at the
//! other side's sleepers. Sleeper: increment the sleepers; full fence; look at every counter once more; sleep. One of
//! the two sees the other (Dekker). The loom test below checks this.

pub mod doorbell;

use crate::prim::{fence_after_rmw, AtomicU32, Ordering};

/// Makes all earlier stores visible and returns whether the doorbell must be rung.
#[inline(always)]
pub fn publish(own_seq: &AtomicU32, peer_sleepers: &AtomicU32) -> bool {
    // SYNC wake-1: release for the acquire of `counter`; with the fence, the first half of the Dekker
    // pair with `fall_asleep`. Several threads of this client may bump: hence a read-modify-write.
    own_seq.fetch_add(1, Ordering::SeqCst);
    fence_after_rmw();
    peer_sleepers.load(Ordering::SeqCst) != 0
}

/// Counts the caller as a sleeper. It must look at every [`counter`] afterwards, and
/// call [`wake_up`] when it no longer sleeps.
#[inline]
pub fn fall_asleep(own_sleepers: &AtomicU32) {
    // SYNC wake-2: the other half of the Dekker pair with `publish`.
    own_sleepers.fetch_add(1, Ordering::SeqCst);
    fence_after_rmw();
}

/// How a thread goes to sleep: it enters itself among the sleepers ([`fall_asleep`], and whoever else may have news for
/// it), looks once more, and only then sleeps. What `enter` has returned is what it has to leave again. `None`: there was
/// news, and it has not slept.
///
/// All sleeps on lanes are this one, so that none forgets the look.
#[inline(always)]
pub fn rest<P, R>(
    enter: impl FnOnce() -> P,
    news: impl FnOnce(&P) -> bool,
    sleep: impl FnOnce(&P) -> R,
) -> (P, Option<R>) {
    let place = enter();
    let mut slept = None;
    if !news(&place) {
        slept = Some(sleep(&place));
    }
    (place, slept)
}

/// Undoes [`fall_asleep`].
#[inline]
pub fn wake_up(own_sleepers: &AtomicU32) {
    own_sleepers.fetch_sub(1, Ordering::SeqCst);
}

/// The peer's counter. If it differs from the private copy, something was published.
#[inline(always)]
pub fn counter(peer_seq: &AtomicU32) -> u32 {
    // Acquire: pairs with the bump in `publish`; heads and data stored before it are visible.
    peer_seq.load(Ordering::SeqCst)
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::Arc;

    /// One publisher, one sleeper, a doorbell that remembers: the sleeper never sleeps on work. `sleeps`, with the counter and the
    /// sleepers: does it sleep, and did it know of the work before it began to?
    fn beside_a_publisher(sleeps: fn(&AtomicU32, &AtomicU32) -> (bool, bool)) {
        loom::model(move || {
            let seq = Arc::new(AtomicU32::new(0));
            let sleepers = Arc::new(AtomicU32::new(0));
            let head = Arc::new(AtomicU64::new(0));
            let bell = Arc::new(AtomicU32::new(0));
            let (s, p, h, b) = (seq.clone(), sleepers.clone(), head.clone(), bell.clone());
            let t = loom::thread::spawn(move || {
                h.store(1, Ordering::Release);
                if publish(&s, &p) {
                    b.store(1, Ordering::Release);
                }
            });
            let (asleep, knew) = sleeps(&seq, &sleepers);
            if !asleep {
                assert_eq!(head.load(Ordering::Acquire), 1, "counter without its head");
            }
            t.join().unwrap();
            let told = knew || bell.load(Ordering::Acquire) == 1;
            assert!(!asleep || told, "asleep and nobody rang");
            wake_up(&sleepers);
        });
    }

    #[test]
    fn no_lost_wakeup() {
        beside_a_publisher(|seq, sleepers| {
            fall_asleep(sleepers);
            (counter(seq) == 0, false)
        });
    }

    /// The same for a thread that goes to sleep as all do. One that finds news sees what is new.
    #[test]
    fn no_rest_on_work() {
        beside_a_publisher(|seq, sleepers| {
            let before = counter(seq);
            let enter = || fall_asleep(sleepers);
            let ((), slept) = rest(enter, |()| counter(seq) != before, |()| ());
            (slept.is_some(), before != 0)
        });
    }

    /// Two threads of one client publish by the same counter: no bump is lost.
    #[test]
    fn two_publishers() {
        loom::model(|| {
            let seq = Arc::new(AtomicU32::new(0));
            let sleepers = Arc::new(AtomicU32::new(0));
            let hs: Vec<_> = (0..2)
                .map(|_| {
                    let (s, p) = (seq.clone(), sleepers.clone());
                    loom::thread::spawn(move || publish(&s, &p))
                })
                .collect();
            for h in hs {
                h.join().unwrap();
            }
            assert_eq!(counter(&seq), 2);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod order {
    use super::*;
    use std::cell::RefCell;

    /// Nobody rings for a thread that is awake again; for another one that sleeps, all do.
    #[test]
    fn of_two_sleepers() {
        let (seq, sleepers) = (AtomicU32::new(0), AtomicU32::new(0));
        let rings = || publish(&seq, &sleepers);
        assert!(!rings());
        (0..2).for_each(|_| fall_asleep(&sleepers));
        assert!(rings());
        wake_up(&sleepers);
        assert!(rings());
        wake_up(&sleepers);
        assert!(!rings());
        assert_eq!(counter(&seq), 4);
    }

    /// It looks when it has entered, and sleeps when there is nothing new.
    #[test]
    fn of_a_rest() {
        for news in [false, true] {
            let did = RefCell::new(Vec::new());
            let note = |what| did.borrow_mut().push(what);
            let (place, slept) = rest(
                || {
                    note("enters");
                    7
                },
                |_| {
                    note("looks");
                    news
                },
                |place| {
                    note("sleeps");
                    place + 1
                },
            );
            assert_eq!((place, slept), (7, (!news).then_some(8)));
            let all = ["enters", "looks", "sleeps"];
            assert_eq!(*did.borrow(), all[..if news { 2 } else { 3 }]);
        }
    }
}
