//! Which threads sleep in a set, and are counted as sleepers on its link groups.

use super::*;

/// The link groups of a set. Set lock held.
pub fn each_group(s: &Set, f: impl FnMut(&LinkGroup)) {
    s.slots.each().filter_map(|(_, l)| l.group()).for_each(f);
}

/// Adds that many threads to the sleepers of a link group, or removes them.
pub fn count(l: &LinkGroup, asleep: u32, more: bool) {
    // (This process must not listen to the doorbell of an inherited link group.)
    let Some(ctl) = l.own.control().filter(|_| !l.is_inherited()) else {
        return;
    };
    for _ in 0..asleep & !HEARS {
        match more {
            true => notify::fall_asleep(&ctl.sleepers.0),
            false => notify::wake_up(&ctl.sleepers.0),
        }
    }
}

/// Counts the caller as asleep in the set. While the set has lanes, each of its link groups counts all threads asleep
/// in it as sleepers. That includes those that fell asleep when the set had no lanes, or fewer link groups, because the
/// thread that is woken to look at a new lane may not come back. `false`: not possible now (this thread holds the lock;
/// we are in a signal handler).
///
/// A thread that falls asleep looks for news after this, as after `notify::fall_asleep`.
pub fn fall_asleep(s: &Set) -> bool {
    let mut v = s.asleep.load(SeqCst);
    while v & HEARS == 0 {
        match s.asleep.compare_exchange(v, v + 1, SeqCst, SeqCst) {
            Ok(_) => return true,
            Err(now) => v = now,
        }
    }
    let Some(_g) = lock::lock(&s.lock) else {
        return false;
    };
    if s.asleep.fetch_add(1, SeqCst) & HEARS != 0 {
        each_group(s, |l| count(l, 1, true));
    }
    true
}

/// Takes [`fall_asleep`] back.
pub fn awake(s: &Set) {
    let mut v = s.asleep.load(SeqCst);
    while v & HEARS == 0 {
        match s
            .asleep
            .compare_exchange(v, v.saturating_sub(1), SeqCst, SeqCst)
        {
            Ok(_) => return,
            Err(now) => v = now,
        }
    }
    let _g = lock::lock(&s.lock);
    if s.asleep.fetch_sub(1, SeqCst) & HEARS != 0 {
        each_group(s, |l| count(l, 1, false));
    }
}

/// The set has got its first lane: from now on its link groups count the threads that sleep in it. Set lock held.
pub fn listen(s: &Set) {
    let asleep = s.asleep.fetch_or(HEARS, SeqCst);
    each_group(s, |l| count(l, asleep, true));
}

/// The set has no lanes any more: its link groups no longer count its sleepers. Set lock held.
pub fn deafen(s: &Set) {
    let asleep = s.asleep.fetch_and(!HEARS, SeqCst);
    if asleep & HEARS != 0 {
        each_group(s, |l| count(l, asleep, false));
    }
}

/// A link group was added to the set: it counts the set's sleepers from now on. Set lock held.
pub fn hear_too(s: &Set, l: &LinkGroup) {
    let asleep = s.asleep.load(SeqCst);
    if asleep & HEARS != 0 {
        count(l, asleep, true);
    }
}

/// A link group is about to be removed from the set: it no longer counts the set's sleepers. Set lock held.
pub fn unhear(s: &Set, l: &LinkGroup) {
    let asleep = s.asleep.load(SeqCst);
    if asleep & HEARS != 0 {
        count(l, asleep, false);
    }
}
