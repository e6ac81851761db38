//! The leader of a link group: the one of the threads asleep on it that polls the doorbell for all of them.

use super::{slot, wake_waiter};
use crate::state::groups::{self, LinkGroup};
use crate::sys::{self, thread};
use core::sync::atomic::Ordering::*;
use lane::notify;
use lane::num;

/// Joins the sleepers of a link group; [`leave`] must undo it. True: this thread is the leader.
pub fn join(group: &LinkGroup, w: usize) -> bool {
    group.waiters[w / 64].fetch_or(1 << (w % 64), SeqCst); // SYNC leader: see `resign`
    if let Some(ctl) = group.own.control() {
        notify::fall_asleep(&ctl.sleepers.0);
    }
    lead(group, w)
}

/// Tries to become the leader.
fn lead(group: &LinkGroup, w: usize) -> bool {
    let now = group.leader.load(SeqCst);
    if now != 0 {
        // A leader that was cancelled in its sleep has not given up the post.
        let tid = slot(now as usize - 1).map_or(0, |s| s.tid.load(Relaxed));
        // Nor can a leader poll if it is this same thread: we are in its signal handler, or it has left its sleep
        // by a longjmp.
        let dead = tid != 0 && (tid == thread::tid() || sys::kill0(tid) == Err(libc::ESRCH));
        return dead
            && group
                .leader
                .compare_exchange(now, num::small(w) + 1, SeqCst, Relaxed)
                .is_ok();
    }
    group
        .leader
        .compare_exchange(0, num::small(w) + 1, SeqCst, Relaxed)
        .is_ok()
}

pub fn leave(group: &LinkGroup, w: usize, leader: bool) {
    group.waiters[w / 64].fetch_and(!(1 << (w % 64)), SeqCst);
    if let Some(ctl) = group.own.control() {
        notify::wake_up(&ctl.sleepers.0);
    }
    if leader {
        resign(group, w);
    }
    // A thread that leaves while the post is free wakes another one: it may have been woken as a successor itself,
    // and has not taken the post.
    if group.leader.load(SeqCst) == 0 {
        call_for_leader(group, w);
    }
}

/// Gives the post up, unless that has happened already. True: it was ours.
fn resign(group: &LinkGroup, w: usize) -> bool {
    // SYNC leader: the post is free, then we look for a successor; a newcomer enters itself, then tries for the
    // post.
    let me = num::small(w) + 1;
    group
        .leader
        .compare_exchange(me, 0, SeqCst, Relaxed)
        .is_ok()
}

/// Nobody polls the doorbell: wakes another sleeper, which will.
fn call_for_leader(group: &LinkGroup, me: usize) {
    for (k, word) in group.waiters.iter().enumerate() {
        let own = if me / 64 == k { 1 << (me % 64) } else { 0 };
        let v = word.load(SeqCst) & !own;
        if v != 0 {
            return wake_waiter(k * 64 + v.trailing_zeros() as usize);
        }
    }
}

/// A handler runs in the sleep of a thread. It may take long, and the thread does not poll the doorbell meanwhile,
/// so it gives up the leader's post. True: it was the leader of a link group.
pub fn step_down(w: usize) -> bool {
    let mut led = false;
    for group in groups::seen() {
        if resign(group, w) {
            led = true;
            call_for_leader(group, w);
        }
    }
    led
}
