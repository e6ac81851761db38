//! The leader of a link: of the threads asleep on it, the one that polls the doorbell for all.

use super::{poke, slot};
use crate::links::{self, Link};
use crate::{sys, thread};
use core::sync::atomic::Ordering::*;
use link::lane::wake;

/// Joins the sleepers of a link. Must be taken back with [`leave`].
pub fn join(link: &Link, w: usize) -> bool {
    link.waiters[w / 64].fetch_or(1 << (w % 64), SeqCst); // SYNC leader: see `resign`
    if let Some(ctl) = link.own.control() {
        wake::doze(&ctl.sleepers.0);
    }
    lead(link, w)
}

/// Tries to become the one who polls the doorbell.
fn lead(link: &Link, w: usize) -> bool {
    let now = link.leader.load(SeqCst);
    if now != 0 {
        // A leader that was cancelled in its sleep has left the post without a word.
        let tid = slot(now as usize - 1).map_or(0, |s| s.tid.load(Relaxed));
        // Nor can one that we have interrupted look: this is its thread, in a signal handler or after
        // a longjmp out of its sleep.
        let dead = tid != 0 && (tid == thread::tid() || sys::kill0(tid) == Err(libc::ESRCH));
        return dead
            && link
                .leader
                .compare_exchange(now, w as u32 + 1, SeqCst, Relaxed)
                .is_ok();
    }
    link.leader
        .compare_exchange(0, w as u32 + 1, SeqCst, Relaxed)
        .is_ok()
}

pub fn leave(link: &Link, w: usize, leader: bool) {
    link.waiters[w / 64].fetch_and(!(1 << (w % 64)), SeqCst);
    if let Some(ctl) = link.own.control() {
        wake::rouse(&ctl.sleepers.0);
    }
    if leader {
        resign(link, w);
    }
    // Whoever leaves while the post is free passes the news on: it may have been told itself, and
    // has not taken the post.
    if link.leader.load(SeqCst) == 0 {
        call_for_leader(link, w);
    }
}

/// Gives the post up, unless that has been done. True: it was ours.
fn resign(link: &Link, w: usize) -> bool {
    // SYNC leader: the post is free, then we look for a successor; a newcomer enters itself,
    // then tries for the post.
    let me = w as u32 + 1;
    link.leader.compare_exchange(me, 0, SeqCst, Relaxed).is_ok()
}

/// Nobody polls the doorbell: another of those asleep shall.
fn call_for_leader(link: &Link, me: usize) {
    for (k, word) in link.waiters.iter().enumerate() {
        let own = if me / 64 == k { 1 << (me % 64) } else { 0 };
        let v = word.load(SeqCst) & !own;
        if v != 0 {
            return poke(k * 64 + v.trailing_zeros() as usize);
        }
    }
}

/// A handler runs in the sleep of a thread: it may take its time, and polls no doorbell meanwhile. True: it was
/// the leader of a link.
pub fn step_down(w: usize) -> bool {
    let mut led = false;
    for link in links::seen() {
        if resign(link, w) {
            led = true;
            call_for_leader(link, w);
        }
    }
    led
}
