//! Which lanes of a set are ready: found in the peers' memory, without a system call.
//!
//! Runs under the set's lock. The locks of connections are only tried; if one is taken, the lane is looked at again
//! later.

use super::*;
use crate::promotion::{self, full};
use crate::readiness::room;
use crate::state::{attached, fdtab, table};
use crate::sys;
use crate::tcp::ends;
use lane::num;

/// The events of a promoted connection at this moment. `tcp`: events that TCP has reported and that nobody has
/// checked yet; bits that turn out to be over are cleared. `None`: another thread holds a lock of the connection.
///
/// `patient`: that has been so for some time, and the holder may be dead.
pub fn state(c: &Conn, l: &Local, fd: i32, want: u32, tcp: &mut u32, patient: bool) -> Option<u32> {
    let take = |word| match patient {
        true => lock::try_or_inherit(word),
        false => lock::try_lock(word),
    };
    let (group, m) = attached::mapped(c, l)?;
    let port = Sock::new(fd, group);
    let mut ev = 0;
    match c.rx.ready(&m) {
        Some(true) => ev |= IN,
        _ if *tcp & (IN | RDHUP | HUP | ERR) != 0 || c.rx.has_news(&m) => {
            let _g = take(&c.rx.lock)?;
            match c.rx.probe(&m, &port) {
                Some(true) => ev |= IN,
                Some(false) => *tcp &= !IN,
                None => {
                    // (An end that has come since `tcp` was asked is told whole.)
                    let now = polled(sys::poll1(fd, libc::POLLIN | libc::POLLRDHUP));
                    ev |= now & IN;
                    *tcp = *tcp & !IN | now & (IN | RDHUP | HUP | ERR);
                }
            }
        }
        _ => {}
    }
    if *tcp & (IN | RDHUP | HUP | ERR) != 0 {
        // The reader who comes for this event must ask TCP, however recently it did.
        c.rx.looked.store(0, Relaxed);
    }
    if *tcp & (RDHUP | HUP | ERR) != 0 {
        let tells = || polled(sys::poll1(fd, libc::POLLRDHUP)) & (RDHUP | HUP | ERR);
        let mut p = tells();
        if p == RDHUP {
            ends::after_fin((c, l), (group, &m), take)?;
            p = tells();
        }
        ev |= p;
        *tcp = (*tcp & !(RDHUP | HUP | ERR)) | p;
        if ev & (RDHUP | HUP | ERR) != 0 && want & IN != 0 && ev & IN == 0 && !c.rx.is_up() {
            ev |= polled(sys::poll1(fd, libc::POLLIN)) & IN;
        }
    }
    if c.has_error() {
        // A call of the shim has received the error from the kernel. After the peer's death the socket is shut down
        // under this lock.
        let _g = take(&c.tx.lock)?;
        ev |= IN | ERR | polled(sys::poll1(fd, libc::POLLRDHUP)) & (RDHUP | HUP);
    }
    if l.owes_notifications() {
        ev |= ERR;
    }
    if ev & (HUP | ERR) != 0 {
        l.checked.store(0, Relaxed); // the next send checks whether the peer is still there
    }
    if *tcp & PRI != 0 {
        let p = polled(sys::poll1(fd, libc::POLLPRI)) & PRI;
        ev |= p;
        *tcp = (*tcp & !PRI) | p;
    }
    if !promotion::service(c, group, &m, fd) && ev == 0 {
        return None;
    }
    if want & OUT != 0 && has_space((c, l), (group, &m), fd, take)? {
        ev |= OUT;
        room::has_room(l);
    }
    Some(ev)
}

/// Is there space for a send, on the ring or on TCP? `None`: as of [`state()`].
#[inline(always)]
fn has_space<'a, G>(
    (c, l): (&'a Conn, &Local),
    (group, m): (&LinkGroup, &Memory),
    fd: i32,
    take: impl FnOnce(&'a core::sync::atomic::AtomicU32) -> Option<G>,
) -> Option<bool> {
    if c.tx.mode.load(Relaxed) == tx::mode::RING {
        return Some(writable(c, l, group, fd, m));
    }
    if c.tx.mode.load(Relaxed) == tx::mode::DRAIN {
        let _g = take(&c.tx.lock)?;
        let port = Sock::new(fd, group);
        let _ = c.tx.look(m, &port);
        c.tx.end_late(&port);
    }
    let on_tcp = c.tx.mode.load(Relaxed) == tx::mode::TCP;
    Some(on_tcp && sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0)
}

/// Is there space on the ring? If there has been none for too long, goes down to TCP, which has larger buffers.
pub(super) fn writable(c: &Conn, l: &Local, group: &LinkGroup, fd: i32, m: &Memory) -> bool {
    if c.tx.writable(m) {
        return true;
    }
    if full::full_for_long(c, l, m) {
        // (The registration ends under the set's lock before the descriptor is closed.)
        full::go_down_full(c, l, group, m, || true);
        return !attached::engaged_tx(c) && sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0;
    }
    c.tx.want_space(m, &Sock::new(fd, group))
}

/// Result of a harvest: how many events were written, and whether a lane was locked by another thread.
#[derive(Default)]
pub(super) struct Harvest {
    pub(super) n: usize,
    pub(super) busy: bool,
    pub(super) blocked: bool,
    /// The application's array has no memory for an event.
    pub(super) fault: bool,
    /// `Set::pushes` at the end of this harvest. A thread that finds it changed before it sleeps looks again: another
    /// thread may have received its wake-up, and left the event for it.
    pub(super) pushes: u32,
    /// A listed event stays ready for the next wait (level-triggered).
    stays: bool,
}

/// Connections that are served by the kernel from now on, as far as one harvest moves them.
#[derive(Default)]
struct Leaving {
    all: [u32; 8],
    n: usize,
}

impl Leaving {
    /// Notes the connection if it is one of them. `conn`: its number plus 1.
    fn note(&mut self, conn: u32) -> bool {
        let found = self.n < self.all.len() && is_leaving(conn - 1);
        if found {
            self.all[self.n] = conn;
            self.n += 1;
        }
        found
    }
}

/// Lists ready lanes. `alone`: kernel events of the same wait stand before `evs`, and `Set::moves` had this value
/// when they were asked for. If a registration has moved since, nothing is listed.
pub(super) fn harvest(
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
    alone: Option<u32>,
    patient: bool,
) -> Harvest {
    let mut h = Harvest::default();
    let mut leaving = Leaving::default();
    {
        let Some(_g) = lock::lock(&s.lock) else {
            h.pushes = s.pushes.load(SeqCst); // this thread holds the lock itself: we are in a signal handler
            return h;
        };
        if alone.is_some_and(|moves| moves != s.moves.load(Acquire)) {
            pass_on(s);
            return h; // the next wait finds everything still queued
        }
        tell_ends(s);
        gather(s, s.notified.swap(0, SeqCst) != 0);
        let rounds = s.queued.load(Relaxed);
        for _ in 0..rounds {
            if h.n >= max {
                // Another thread may have time for the rest.
                if s.waiters.load(SeqCst) > 1 {
                    fdtab::signal(s.wake_fd.load(Relaxed));
                }
                break;
            }
            let r = pop(s);
            // SAFETY: `n < max`, inside the application's array.
            let at = unsafe { evs.add(h.n) };
            if r == 0 || !look_at(s, r, at, patient, &mut h, &mut leaving) {
                break;
            }
        }
        h.pushes = s.pushes.load(SeqCst);
    }
    for conn in leaving.all.iter().take(leaving.n) {
        // It may no longer be held, or the entry may be another connection's.
        deactivate_if(conn - 1, || is_leaving(conn - 1));
    }
    if h.stays && s.asleep.load(SeqCst) & !HEARS != 0 {
        fdtab::signal(s.wake_fd.load(Relaxed)); // the kernel, too, wakes the next thread for what stays ready
    }
    h
}

/// Looks at a registration that was queued, and lists it at `at` if it is ready. Set lock held. False: the array has no
/// memory for it.
#[inline(always)]
fn look_at(
    s: &Set,
    r: u32,
    at: *mut epoll_event,
    patient: bool,
    h: &mut Harvest,
    leaving: &mut Leaving,
) -> bool {
    let reg = reg_at(r);
    let conn = reg.conn.load(Relaxed);
    if conn == 0 || reg.flags.load(Relaxed) & ACTIVE == 0 {
        return true;
    }
    let (c, l) = (table::conn(conn - 1), table::local(conn - 1));
    let flags = reg.flags.load(Relaxed);
    if flags & (DISABLED | PARKED) != 0 {
        return true;
    }
    if s.shared.load(Relaxed) != 0 && leaving.note(conn) {
        return true; // a child may have entered it in the kernel's set, which reports it
    }
    let mask = reg.mask.load(Relaxed);
    let want = wanted(mask);
    let mut tcp = reg.tcp.load(Relaxed);
    let Some(ev) = state(c, l, reg.fd.load(Relaxed), want, &mut tcp, patient) else {
        h.busy = true;
        push(s, r);
        return true;
    };
    reg.tcp.store(tcp, Relaxed);
    let blocked = want & OUT != 0 && ev & OUT == 0 && c.tx.on_lane();
    let told = reported(mask, flags, ev);
    if told != 0 && !pages::writable(at, size_of::<epoll_event>()) {
        h.fault = true;
        push(s, r); // it was not reported, so it stays queued
        return false;
    }
    let keep_flags = reg.flags.load(Relaxed) & !(EDGE_IN | EDGE_OUT | BLOCKED);
    let keep_out = if told == 0 && want & OUT == 0 {
        flags & EDGE_OUT
    } else {
        0
    };
    let waits = if blocked { BLOCKED } else { 0 };
    reg.flags.store(keep_flags | waits | keep_out, Relaxed);
    if blocked {
        h.blocked = true;
        if mask & ET == 0 {
            room::no_room(l);
        }
    }
    if told != 0 {
        // SAFETY: the application's, and just proven.
        unsafe {
            at.write_unaligned(epoll_event {
                events: told,
                u64: reg.data.load(Relaxed),
            })
        };
        h.n += 1;
        if let Some((group, _)) = attached::mapped(c, l) {
            group.moved();
        }
        if mask & ONESHOT != 0 {
            reg.flags.fetch_or(DISABLED, Relaxed);
        } else if mask & ET == 0 || blocked {
            h.stays |= mask & ET == 0;
            push(s, r);
        }
    } else if blocked {
        push(s, r);
    }
    leaving.note(conn);
    true
}

/// What a registration with this mask waits for, as [`state()`] takes it.
#[inline(always)]
fn wanted(mask: u32) -> u32 {
    (mask & (IN | OUT | RDHUP))
        | if mask & RDNORM != 0 { IN } else { 0 }
        | if mask & WRNORM != 0 { OUT } else { 0 }
}

/// What is reported of `ev`. An edge-triggered registration is told only of what is new.
#[inline(always)]
fn reported(mask: u32, flags: u32, ev: u32) -> u32 {
    let told = ev & (mask | ERR | HUP)
        | if ev & IN != 0 { mask & RDNORM } else { 0 }
        | if ev & OUT != 0 { mask & WRNORM } else { 0 };
    if mask & ET == 0 {
        return told;
    }
    let reads = IN | PRI | RDNORM | RDHUP | HUP | ERR;
    let fresh = if flags & EDGE_IN != 0 { reads } else { 0 }
        | if flags & (EDGE_OUT | BLOCKED) != 0 {
            OUT | WRNORM
        } else {
            0
        };
    match told & fresh {
        0 => 0,
        _ => told,
    }
}

/// Is the connection served by the kernel from now on?
fn is_leaving(conn: u32) -> bool {
    let c = table::conn(conn);
    (c.flags.load(Relaxed) & (flag::HELD | flag::DISQUALIFIED) != 0 || is_inherited(c))
        && !attached::engaged(c)
        && !c.has_error()
        && !table::local(conn).notifies()
        && ends::left_ms_of(conn) < 0
        && !ends::is_expected_of(conn)
}

/// A thread leaves the wait after it was told of lanes, or has drained their doorbells, without looking at them: a
/// sleeper has to look instead.
pub(super) fn pass_on(s: &Set) {
    // A sleeper counts itself first and then checks all of these (or, if there were no lanes, whether there are some
    // now).
    let left = s.queued.load(SeqCst) != 0 || s.notified.load(SeqCst) != 0 || changed(s);
    if left && s.asleep.load(SeqCst) & !HEARS != 0 {
        fdtab::signal(s.wake_fd.load(Relaxed));
    }
}

/// A slot with its number, and one of its counters.
type At<'a> = (usize, &'a Slot, usize);

/// Calls `f(slot and counter, peer's words, seen, now)` (`seen` and `now` are its values) for each counter that has moved.
/// Set lock held.
#[inline(always)]
fn published(s: &Set, all: bool, mut f: impl FnMut(At<'_>, &Control, u32, u32)) {
    for (k, slot) in s.slots.each() {
        let Some(ctl) = slot.group().and_then(|l| l.peer.control()) else {
            continue;
        };
        for g in slot.each_counter() {
            let (seen, now) = (slot.seen[g].load(Relaxed), notify::counter(&ctl.seq[g].0));
            if now != seen || all {
                f((k, slot, g), ctl, seen, now);
            }
        }
    }
}

/// Queues every registration with news in the peers' memory, in the order in which the news came as far as the peers'
/// logs tell. Set lock held.
pub(super) fn gather(s: &Set, all: bool) {
    let mut several = 0;
    published(s, false, |(_, slot, g), _, seen, now| {
        let chain = slot.chain[g].load(Relaxed);
        let alone = now.wrapping_sub(seen) == 1
            || chain != 0 && reg_at(chain).next_counter.load(Relaxed) == 0;
        several += if alone { 1 } else { 2 };
    });
    let told = match several {
        0 | 1 => None,
        _ => Some(in_order(s)),
    };
    published(s, all, |(k, slot, g), _, _, now| {
        slot.seen[g].store(now, Relaxed);
        let mut vain = !all && !told.is_some_and(|t| t.has(k));
        let mut r = slot.chain[g].load(Relaxed);
        while r != 0 {
            let reg = reg_at(r);
            vain &= !news(s, r, reg, all);
            r = reg.next_counter.load(Relaxed);
        }
        if vain {
            slot.group().iter().for_each(|l| l.rung());
        }
    });
}

/// Queues what several lanes have published, in the order of the logs. (The caller queues what the logs do not have.)
/// Returns the slots whose link groups had news.
#[cold]
fn in_order(s: &Set) -> Marks {
    let mut early = Early {
        n: 0,
        told: Marks::default(),
        found: [(0, 0); EARLY],
    };
    published(s, false, |(_, slot, g), ctl, seen, now| {
        early.read(s, ctl, slot.chain[g].load(Relaxed), g, seen..now);
    });
    early.queue(s);
    early.told
}

/// Registrations whose lanes have published, with the time (ticks) of their first publication.
struct Early {
    n: usize,
    told: Marks,
    found: [(u64, u32); EARLY],
}

const EARLY: usize = 64;

impl Early {
    /// Reads a counter's log. (If a lane has several registrations, only one of them is found here.)
    fn read(
        &mut self,
        s: &Set,
        ctl: &Control,
        chain: u32,
        g: usize,
        published: core::ops::Range<u32>,
    ) {
        if published.end.wrapping_sub(published.start) > num::small(LOG) {
            return; // the log has wrapped around
        }
        let mut of = [0u32; LANES_PER_COUNTER];
        let mut r = chain;
        while r != 0 {
            let reg = reg_at(r);
            let conn = reg.conn.load(Relaxed);
            if conn != 0 {
                of[table::conn(conn - 1).lane.load(Relaxed) as usize % LANES_PER_COUNTER] = r;
            }
            r = reg.next_counter.load(Relaxed);
        }
        let mut at = published.start;
        while at != published.end {
            // The peer writes this word: a wrong one can only spoil the order of the peer's own lanes among the
            // others.
            let entry = ctl.log[g][at as usize % LOG].load(Relaxed);
            let r = core::mem::take(&mut of[entry.lane()]);
            if r != 0 {
                if self.n == EARLY {
                    self.queue(s);
                }
                self.found[self.n] = (entry.ticks(), r);
                self.n += 1;
            }
            at = at.wrapping_add(1);
        }
    }

    fn queue(&mut self, s: &Set) {
        let found = &mut self.found[..self.n];
        // Insertion sort: entries are usually nearly sorted, and it is stable.
        for k in 1..found.len() {
            let mut j = k;
            while j > 0 && found[j - 1].0 > found[j].0 {
                found.swap(j - 1, j);
                j -= 1;
            }
        }
        for (_, r) in found.iter() {
            let reg = reg_at(*r);
            if news(s, *r, reg, false) {
                self.told.set(reg.slot.load(Relaxed) as usize / COUNTERS);
            }
        }
        self.n = 0;
    }
}

/// Queues the registration if there is news. False: there is none.
pub(super) fn news(s: &Set, r: u32, reg: &Reg, all: bool) -> bool {
    let conn = reg.conn.load(Relaxed);
    if conn == 0 {
        return false;
    }
    let c = table::conn(conn - 1);
    let l = table::local(conn - 1);
    let Some((group, m)) = attached::mapped(c, l) else {
        return false;
    };
    let ending = ends::left_ms(c, l, group, &m);
    if ending >= 0 {
        await_end(s, ending);
    }
    let head = m.peer_head().load(Acquire);
    let moved = head != reg.last_head.load(Relaxed);
    if moved
        || all
        || ending >= 0
        || c.tx.has_work(&m)
        || c.rx.has_news(&m)
        || reg.flags.load(Relaxed) & BLOCKED != 0
    {
        // (An end of file that was reported is not news again. Only an error may follow it.)
        let over = reg.tcp.load(Relaxed) & RDHUP != 0 && !c.has_error() && !group.is_remote();
        if moved || all && !over {
            reg.last_head.store(head, Relaxed);
            reg.flags.fetch_or(EDGE_IN, Relaxed);
        }
        if all {
            if !over {
                reg.flags.fetch_or(EDGE_OUT, Relaxed);
            }
            reg.tcp.fetch_or(IN | RDHUP | HUP | ERR, Relaxed);
        }
        push(s, r);
        return true;
    }
    false
}

/// Milliseconds until an end of connection has to be reported in this set; negative: none is pending.
pub(super) fn end_left_ms(s: &Set) -> i64 {
    match s.end_ms.load(SeqCst) {
        0 => -1,
        at => num::long(at.saturating_sub(sys::now_ms())),
    }
}

/// Reports the ends whose time has come. Set lock held.
fn tell_ends(s: &Set) {
    if end_left_ms(s) != 0 {
        return;
    }
    s.end_ms.store(0, SeqCst);
    each_chained(s, |_, reg| {
        let left = match reg.conn.load(Relaxed) {
            0 => -1,
            conn => ends::left_ms_of(conn - 1),
        };
        if left > 0 {
            await_end(s, left);
        }
    });
}

/// Calls `f(number, registration)` for each active registration. Set lock held.
pub(super) fn each_chained(s: &Set, mut f: impl FnMut(u32, &Reg)) {
    published(s, true, |(_, slot, g), _, _, _| {
        let mut r = slot.chain[g].load(Relaxed);
        while r != 0 {
            let reg = reg_at(r);
            f(r, reg);
            r = reg.next_counter.load(Relaxed);
        }
    });
}

/// Has any counter that this set watches moved? Only reads, and takes no lock. (Not of link groups whose doorbell the inner set
/// does not hear: the sleep is a short one then. Whether they are muted now may have changed since that was decided.)
pub(super) fn changed(s: &Set) -> bool {
    let moved = |slot: &Slot| {
        let Some(ctl) = slot.group().and_then(|l| l.peer.control()) else {
            return false;
        };
        let mut counters = slot.each_counter();
        counters.any(|g| notify::counter(&ctl.seq[g].0) != slot.seen[g].load(Relaxed))
    };
    s.slots.pages().any(|(_, page)| {
        let muted = page.muted.load(Relaxed);
        let mut audible = page.each().filter(|(n, _)| muted >> n & 1 == 0);
        audible.any(|(_, slot)| moved(slot))
    })
}
