//! Waiting on a set: harvest, ask the kernel, spin, sleep.

use super::kernel::{faulted, inner, look_at_kernel, strip, told, Found};
use super::*;
use crate::promotion::{self, full};
use crate::readiness::engine::{self, Look, Rounds, Slept, Until};
use crate::sets::sleepers::{awake, fall_asleep};
use crate::state::{attached, groups, table};
use crate::sys::{self, clock, thread};
use crate::tcp::ends;
use lane::{notify, num};

/// Appends the lanes that are ready to the kernel's events, then moves them to the place where the inner set's entry
/// was, because the kernel lists events in the order in which they came.
///
/// # Safety
/// `evs` is the application's array of `max` events, with the kernel's in it.
unsafe fn join(
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
    k: &Found,
    moves: u32,
    patient: bool,
) -> Harvest {
    if k.n >= max {
        pass_on(s);
        return Harvest::default();
    }
    let alone = if k.n > 0 { Some(moves) } else { None };
    // SAFETY: inside the array.
    let h = harvest(s, unsafe { evs.add(k.n) }, max - k.n, alone, patient);
    if let Some(at) = k.at.filter(|at| h.n > 0 && *at < k.n) {
        const SIZE: usize = size_of::<epoll_event>();
        // SAFETY: all of this has just been written to, and bytes need no alignment.
        let from = unsafe {
            let first = evs.add(at).cast::<u8>();
            core::slice::from_raw_parts_mut(first, (k.n + h.n - at) * SIZE)
        };
        from.rotate_left((k.n - at) * SIZE);
    }
    if h.busy && k.n + h.n > 0 {
        pass_on(s);
    }
    h
}

/// `epoll_wait` and its variants. `native(ep, evs, max, ms)` is the application's own call with another time-out; it
/// blocks and is a cancellation point.
///
/// # Safety
/// `evs` is the application's array of `max` events.
pub unsafe fn wait(
    (i, ep): (u32, i32),
    evs: *mut epoll_event,
    max: i32,
    until: Until,
    native: impl Fn(i32, *mut epoll_event, i32, i64) -> i32,
) -> i32 {
    let timeout_ms = until.ms;
    let _inside = thread::enter();
    if daemon::pending() {
        daemon::pump();
    }
    if daemon::lost() {
        promotion::find_daemon();
    }
    let s = set_at(i);
    if max <= 0 || num::word(max) > i32::MAX as usize / size_of::<epoll_event>() {
        return thread::outside(|| native(ep, evs, max, timeout_ms));
    }
    adopted(i, s);
    waited(i, s);
    let max_n = num::word(max);
    if s.ringed.load(Relaxed) != 0 {
        // SAFETY: passed on.
        let ringed = crate::preserving_errno(|| unsafe { adopted::tell(i, s, evs, max_n) });
        if let Some(n) = ringed {
            return n;
        }
    }
    let start = sys::now_ns();
    s.waiters.fetch_add(1, SeqCst);
    let plain = s.lanes.load(SeqCst) == 0;
    let counted = plain && timeout_ms != 0 && fall_asleep(s);
    if counted && s.lanes.load(SeqCst) != 0 {
        awake(s);
    } else if plain && (counted || timeout_ms == 0) {
        let native = || native(ep, evs, max, timeout_ms);
        // SAFETY: passed on.
        let done = unsafe { wait_plain((i, s), (evs, max_n), counted, native) };
        if let Some(r) = done {
            return r;
        }
    }
    let mut lanes = Lanes {
        i,
        ep,
        s,
        evs,
        max: max_n,
        native,
        blocked: false,
        pushes: 0,
    };
    let r = engine::wait(&mut lanes, until, start);
    wait_over(i, s);
    r
}

/// The wait on a set that has no lane: the application's own call. `None`: only the inner set was ready, so the lanes are
/// looked at. `counted`: this thread counts among the sleepers.
///
/// # Safety
/// `evs` is the application's array of `max` events.
#[inline(always)]
unsafe fn wait_plain(
    (i, s): (u32, &Set),
    (evs, max): (*mut epoll_event, usize),
    counted: bool,
    native: impl Fn() -> i32,
) -> Option<i32> {
    hear(s);
    let undo = || {
        if counted {
            awake(s);
        }
        wait_over(i, s);
    };
    let r = thread::or_undo(&undo, || thread::outside(native));
    if counted {
        crate::preserving_errno(|| awake(s));
    }
    let mut n = num::word(r.max(0));
    if r >= 0 {
        told(s, n, max);
    }
    // SAFETY: the kernel wrote `n` events. (The event that it had no memory for may have been the inner set's.)
    let ours = r > 0 && unsafe { strip(evs, &mut n) }.is_some() || faulted(s, r);
    if ours && n == 0 && s.inner.load(Relaxed) < 0 {
        // Only the parent's inner set is ready, which concerns only the parent: sleep 1 ms instead of looping at
        // full speed.
        let _ = sys::poll_ms(-1, 0, 1);
    }
    if ours {
        crate::preserving_errno(|| inner(i, s));
        if n == 0 {
            return None;
        }
        crate::preserving_errno(|| pass_on(s));
    }
    wait_over(i, s);
    Some(if r < 0 { r } else { num::int(n as u64) })
}

/// Lists what is ready: the kernel's events, then the lanes. `None`: the array has no memory for an event.
///
/// # Safety
/// `evs` is the application's array of `max` events.
#[inline(always)]
unsafe fn look(
    i: u32,
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
    patient: bool,
) -> Option<Harvest> {
    // A connection that the kernel has just reported may move to the inner set before the lanes are harvested; it
    // must not be listed a second time.
    let moves = s.moves.load(Acquire);
    // The kernel comes first when it is due, so that busy lanes starve nothing; then the lanes are harvested
    // once, so that none is listed twice.
    let turn = s.filled.load(Relaxed) != 0;
    if turn {
        s.filled.store(0, Relaxed);
    }
    let since = ticks().wrapping_sub(s.looked.load(Relaxed));
    let due = !turn && since > LOOK_US * clock::cycles_per_us();
    let mut kernel = match due {
        // SAFETY: the application's array of `max` events.
        true => unsafe { look_at_kernel(i, s, evs, max) }?,
        false => Found { n: 0, at: None },
    };
    // SAFETY: passed on.
    let mut h = unsafe { join(s, evs, max, &kernel, moves, patient) };
    if kernel.n + h.n == 0 && !due {
        // SAFETY: as above; nothing was harvested.
        kernel = unsafe { look_at_kernel(i, s, evs, max) }?;
        // SAFETY: passed on.
        h = unsafe { join(s, evs, max, &kernel, moves, patient) };
    }
    if kernel.n == max {
        s.filled.store(1, Relaxed); // so the next wait begins with the lanes
    }
    h.n += kernel.n;
    match h.fault && h.n == 0 {
        true => None,
        false => Some(h),
    }
}

/// A wait on a set with lanes: set and number, the application's set and array, and its own call.
struct Lanes<'a, F> {
    i: u32,
    ep: i32,
    s: &'a Set,
    evs: *mut epoll_event,
    max: usize,
    native: F,
    /// `Harvest::{blocked, pushes}` of the last look.
    blocked: bool,
    pushes: u32,
}

impl<F: Fn(i32, *mut epoll_event, i32, i64) -> i32> Rounds for Lanes<'_, F> {
    #[inline(always)]
    fn look(&mut self, patient: bool) -> Look {
        // SAFETY: `evs` is the application's array of `max` events, as the caller of `wait` has promised.
        match unsafe { look(self.i, self.s, self.evs, self.max, patient) } {
            None => Look::Ends(fault()),
            Some(h) if h.n > 0 => Look::Ends(num::int(h.n as u64)),
            Some(h) => {
                (self.blocked, self.pushes) = (h.blocked, h.pushes);
                Look::Nothing { busy: h.busy }
            }
        }
    }

    fn gives_up(&self) {
        crate::preserving_errno(|| pass_on(self.s));
    }

    #[inline(always)]
    fn spin(&mut self) -> bool {
        let s = self.s;
        let kernel_has = || sys::poll1(s.epfd.load(Relaxed), libc::POLLIN) != 0;
        !self.blocked
            && engine::spin_with_kernel(&s.spin, || producer_cpu(s), kernel_has, || changed(s))
    }

    #[inline(always)]
    fn sleep(&mut self, left: i64, patient: bool) -> Slept {
        let (s, evs, max) = (self.s, self.evs, self.max);
        let ctl = hear_daemon(s);
        let (mut nap, kin) = nap_ms(s, left, self.blocked, patient);
        let moves = s.moves.load(Acquire);
        let pushes = self.pushes;
        let news = || {
            changed(s)
                || s.pushes.load(SeqCst) != pushes
                || s.notified.load(SeqCst) != 0
                || daemon::pending()
        };
        let (counted, slept) = notify::rest(
            || fall_asleep(s),
            |_| news(),
            |&counted| {
                nap = ends::sooner(nap, end_left_ms(s)); // SYNC end
                if !counted {
                    nap = if nap < 0 { 1 } else { nap.min(1) };
                }
                let r = in_kernel((self.i, self.ep), s, counted, |fd| {
                    (self.native)(fd, evs, num::int(max as u64), nap)
                });
                (r, crate::errno())
            },
        );
        if counted {
            awake(s);
        }
        let Some((r, e)) = slept else {
            return Slept::Again;
        };
        if r < 0 {
            crate::set_errno(e);
            return match faulted(s, r) {
                true => Slept::Again, // the next round finds that out, and reports it
                false => Slept::Ends(r),
            };
        }
        // SAFETY: the kernel wrote `r` events.
        let n = unsafe { woken(self.i, s, evs, max, (num::word(r), moves, patient)) };
        if n > 0 {
            return Slept::Ends(num::int(n as u64));
        }
        if r > 0 {
            return Slept::Again;
        }
        if kin {
            look_at_kin(s);
        }
        if ctl < 0 {
            daemon::ensure();
        }
        match left >= 0 && nap >= left {
            true => Slept::Over,
            false => Slept::Again,
        }
    }
}

/// The inner set listens to the daemon's present connection. Returns its descriptor; negative: there is none.
fn hear_daemon(s: &Set) -> i32 {
    let ctl = daemon::fd();
    let ctl_gen = num::signed(daemon::generation());
    let listening = ctl >= 0 && s.disqualified.load(Relaxed) == 0;
    if listening && s.ctl.swap(ctl_gen, Relaxed) != ctl_gen {
        let _ = sys::epoll_ctl(s.inner.load(Relaxed), libc::EPOLL_CTL_ADD, ctl, IN, TAG_CTL);
    }
    ctl
}

/// Milliseconds that the sleep may last, and whether there are registrations on link groups of an ancestor process,
/// whose doorbells it does not hear.
fn nap_ms(s: &Set, left: i64, blocked: bool, patient: bool) -> (i64, bool) {
    let mut nap = engine::nap(left, true);
    if blocked {
        let full = num::long(full::FULL_MS) + 1;
        nap = if nap < 0 { full } else { nap.min(full) };
    }
    let muted = mute(s);
    let kin = s.kin.load(Relaxed) != 0;
    if (muted || patient || kin) && !(0..engine::Patience::NAP_MS).contains(&nap) {
        nap = engine::Patience::NAP_MS;
    }
    (nap, kin)
}

/// The sleep itself, in the application's own call. `counted`: the thread is counted among the sleepers.
fn in_kernel((i, ep): (u32, i32), s: &Set, counted: bool, native: impl Fn(i32) -> i32) -> i32 {
    if let Some(t) = table::table() {
        t.header.stats.sleeps.fetch_add(1, Relaxed);
    }
    let undo = || {
        if counted {
            awake(s);
        }
        wait_over(i, s);
    };
    // (When the set was closed, its number may have got another meaning.)
    let fd = match s.ending.load(SeqCst) {
        0 => ep,
        _ => s.epfd.load(Relaxed),
    };
    thread::or_undo(&undo, || {
        thread::asleep(s.wake_fd.load(Relaxed), true, None, || native(fd))
    })
}

/// The kernel has ended a sleep with `n` events. Returns how many there are with the lanes', which are looked at if the
/// inner set is among them.
///
/// # Safety
/// `evs` is the application's array of `max` events, with the kernel's in it.
unsafe fn woken(
    i: u32,
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
    (mut n, moves, patient): (usize, u32, bool),
) -> usize {
    told(s, n, max);
    // SAFETY: the kernel wrote `n` events.
    let at = unsafe { strip(evs, &mut n) };
    if at.is_some() {
        if n == 0 && s.inner.load(Relaxed) < 0 {
            let _ = sys::poll_ms(-1, 0, 1); // as in `wait`: only the parent is concerned
        }
        inner(i, s);
    }
    // (A thread that was woken only for a lane lists that before the events that the kernel has by now.)
    if n > 0 || at.is_some() {
        // SAFETY: passed on.
        n += unsafe { join(s, evs, max, &Found { n, at }, moves, patient) }.n;
    }
    n
}

/// A nap has ended. During it, no doorbell was heard of link groups that this process has inherited, so each
/// registration on them is looked at: a way down may have to go on, and what is on TCP for good returns to the kernel's
/// set.
#[cold]
fn look_at_kin(s: &Set) {
    if let Some(_g) = lock::lock(&s.lock) {
        each_chained(s, |r, reg| {
            if reg.flags.load(Relaxed) & KIN != 0 {
                push(s, r);
            }
        });
    }
}

fn fault() -> i32 {
    crate::set_errno(libc::EFAULT);
    -1
}

/// Takes the doorbells of muted link groups out of the inner set, and puts those of link groups no longer muted back
/// in. True: some are muted, and the sleep has to be short.
fn mute(s: &Set) -> bool {
    let mut any = false;
    for (_, page) in s.slots.pages() {
        any |= mute_page(s, page);
    }
    any
}

/// The same for the link groups of a page.
fn mute_page(s: &Set, page: &Page) -> bool {
    let mut muted = 0u64;
    for (n, slot) in page.each() {
        if slot.group().is_some_and(LinkGroup::is_muted) {
            muted |= 1 << n;
        }
    }
    let before = page.muted.load(Relaxed);
    if muted == before {
        return muted != 0;
    }
    let Some(_g) = lock::lock(&s.lock) else {
        return true;
    };
    let mut differ = muted ^ page.muted.swap(muted, Relaxed);
    while differ != 0 {
        let k = differ.trailing_zeros() as usize;
        differ &= differ - 1;
        if let Some(l) = page.slot(k).group() {
            let events = if muted & 1 << k != 0 { 0 } else { IN };
            let data = TAG_BELL | groups::index(l) as u64;
            let inner = s.inner.load(Relaxed);
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_MOD, l.bell(), events, data);
        }
    }
    muted != 0
}

/// CPU that the producer last ran on, if the set has only one link group; otherwise none.
pub(super) fn producer_cpu(s: &Set) -> u32 {
    let lane = s.slots.only().and_then(|slot| {
        let g = slot.each_counter().next()?;
        Some(reg_at(slot.chain[g].load(Relaxed)))
    });
    let conn = lane.map_or(0, |r| r.conn.load(Relaxed));
    if conn == 0 {
        return u32::MAX;
    }
    match attached::of(table::conn(conn - 1), table::local(conn - 1)) {
        Some((_, m)) => m.peer_rx().cpu.load(Relaxed),
        None => u32::MAX,
    }
}
