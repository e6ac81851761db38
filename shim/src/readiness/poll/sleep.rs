//! The sleep of a `poll` or `select` on connections, and what may end it.
//!
//! What the sleep listens to is decided here, after the wait has decided to sleep, and nowhere before. A connection
//! with a lane of this process is heard through the doorbell of its link group, whatever mode it is in. A connection
//! without one is counted as natively waited for, so that nobody can declare it ready meanwhile. A thread that
//! attaches a lane wakes the waits that have a place and watch that connection (`waiters::look`), so that they decide
//! again.

use super::{news, LINK_GROUPS, RDNORM, STACK, WRNORM};
use crate::daemon;
use crate::promotion::full;
use crate::readiness::engine::{self, Patience, Slept};
use crate::readiness::{few, wait};
use crate::state::groups::{self, LinkGroup};
use crate::state::waiters::{self, Place};
use crate::state::{attached, fdtab, table};
use crate::sys::{self, pids, thread};
use crate::tcp::{self, ends};
use core::sync::atomic::Ordering::*;
use lane::half::tx;
use lane::{notify, num};
use libc::{pollfd, sigset_t, POLLIN, POLLOUT, POLLRDHUP};

/// `revents` of an entry whose connection is locked by another thread.
pub(super) const STUCK: i16 = -1;

/// Is the entry watched for data?
pub(super) fn for_data(p: &pollfd) -> bool {
    p.events & (POLLIN | RDNORM | POLLRDHUP) != 0
}

/// Is it watched for bytes?
pub(super) fn for_bytes(p: &pollfd) -> bool {
    p.events & (POLLIN | RDNORM) != 0
}

/// The link groups of a wait without duplicates, by slot numbers. (References would take four times the stack.)
pub(super) struct LinkGroups {
    all: [u16; LINK_GROUPS],
    n: usize,
    /// There are more link groups than one wait can listen to.
    many: bool,
}

impl LinkGroups {
    pub(super) fn new() -> Self {
        LinkGroups {
            all: [0; LINK_GROUPS],
            n: 0,
            many: false,
        }
    }

    pub(super) fn add(&mut self, l: &'static LinkGroup) {
        let slot = num::low16(groups::index(l) as u64);
        if self.all[..self.n].contains(&slot) {
            return;
        }
        match self.all.get_mut(self.n) {
            Some(free) => {
                *free = slot;
                self.n += 1;
            }
            None => self.many = true,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.n
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &'static LinkGroup)> + '_ {
        let all = self.all[..self.n].iter().enumerate();
        all.filter_map(|(k, slot)| Some((k, groups::slot((*slot).into())?)))
    }
}

/// Connections that are counted as natively waited for. They are remembered by index, because descriptors may get
/// another meaning meanwhile.
pub(super) struct NativeCalls {
    stack: [u32; STACK],
    mapped: Option<(*mut u8, usize)>,
    n: usize,
    /// `table::given_up` when they were counted: a table given up since then has lost the counts.
    tables: u32,
}

impl NativeCalls {
    /// Counts the connections for which `which` holds. `None`: one of them is not on TCP.
    pub(super) fn enter(fds: &[pollfd], which: impl Fn(&pollfd, u32) -> bool) -> Option<Self> {
        let mut new = NativeCalls {
            stack: [0; STACK],
            mapped: None,
            n: 0,
            tables: table::given_up(),
        };
        if fds.len() > new.stack.len() {
            let bytes = fds.len() * 4;
            new.mapped = Some((sys::map_private(bytes).ok()?, bytes));
        }
        for p in fds {
            if let Some(i) = fdtab::conn(p.fd).filter(|i| which(p, *i)) {
                if !table::conn(i).rx.enter_native() {
                    new.leave();
                    return None;
                }
                let at = new.n;
                new.all()[at] = i;
                new.n += 1;
            }
        }
        Some(new)
    }

    fn all(&mut self) -> &mut [u32] {
        match self.mapped {
            // SAFETY: a mapping of that many bytes, zeroed at first, unmapped in `leave`.
            Some((p, bytes)) => unsafe { core::slice::from_raw_parts_mut(p.cast(), bytes / 4) },
            None => &mut self.stack,
        }
    }

    pub(super) fn leave(&self) {
        let all = match self.mapped {
            // SAFETY: as in `all`.
            Some((p, bytes)) => unsafe { core::slice::from_raw_parts(p.cast::<u32>(), bytes / 4) },
            None => &self.stack,
        };
        if self.tables == table::given_up() {
            for i in &all[..self.n] {
                table::conn(*i).rx.leave_native(0);
            }
        }
        if let Some((p, bytes)) = self.mapped {
            sys::unmap(p, bytes);
        }
    }
}

/// The link group of the connection's lane, if this process owns the lane.
fn ours(i: u32) -> Option<&'static LinkGroup> {
    let c = table::conn(i);
    (c.owner_pid.load(Relaxed) == pids::me())
        .then(|| attached::of(c, table::local(i)).map(|(l, _)| l))?
}

/// The connections among the entries.
fn conns(fds: &[pollfd]) -> impl Iterator<Item = u32> + '_ {
    fds.iter().filter_map(|p| fdtab::conn(p.fd))
}

/// What a sleep listens to besides the application's entries. (References, because a copy would need stack.)
struct Ears<'a> {
    place: &'a Place,
    groups: &'a LinkGroups,
    native_calls: &'a NativeCalls,
    /// No entry has a lane: only the kernel and the daemon can wake this thread.
    alone: bool,
    /// One bit for each link group that this thread leads.
    leads: u64,
    /// The same for those that were muted when the length of the sleep was decided.
    muted: u64,
}

impl Ears<'_> {
    /// Joins the sleepers of all link groups. Returns the milliseconds that the sleep may last. `full`: an entry waits for
    /// room on a ring.
    fn join(&mut self, (left, end): (i64, i64), full: bool, patient: bool) -> i64 {
        let has_place = self.place.index().is_some() && !self.groups.many;
        let mut nap = ends::sooner(engine::nap(left, self.alone || has_place), end);
        if full {
            let most = num::long(full::FULL_MS) + 1;
            nap = if nap < 0 { most } else { nap.min(most) };
        }
        if let Some(w) = self.place.index() {
            for (k, l) in self.groups.iter() {
                let leader = waiters::join(l, w);
                self.leads |= u64::from(leader) << k;
                if !leader && !(0..1000).contains(&nap) {
                    nap = 1000; // a follower checks from time to time that there is still a leader
                }
            }
        }
        for (k, l) in self.groups.iter() {
            self.muted |= u64::from(l.is_muted()) << k;
        }
        if (patient || self.muted != 0) && !(0..Patience::NAP_MS).contains(&nap) {
            nap = Patience::NAP_MS;
        }
        nap
    }

    fn leads(&self, k: usize) -> bool {
        self.leads >> k & 1 != 0
    }

    /// Writes our entries: the place, the daemon, the doorbells. Returns how many there are.
    fn enter(&self, own: &mut [pollfd]) -> usize {
        let bells = self.groups.iter().map(|(k, l)| {
            let hears = self.leads(k) && self.muted >> k & 1 == 0;
            match hears {
                true => l.audible(),
                false => -1,
            }
        });
        let mut n = 0;
        for fd in [self.place.efd(), daemon::fd()].into_iter().chain(bells) {
            own[n] = pollfd {
                fd,
                events: POLLIN,
                revents: 0,
            };
            n += 1;
        }
        n
    }

    /// The sleep is over. `rung(k)`: is our entry `k` ready?
    fn give(&self, rung: impl Fn(usize) -> bool) {
        self.native_calls.leave();
        for (k, l) in self.groups.iter() {
            if rung(2 + k) {
                if l.drain_bell() == notify::doorbell::Drained::Gone {
                    l.gone();
                }
                wait::forward(l, self.place.index(), None);
            }
            if let Some(w) = self.place.index() {
                waiters::leave(l, w, self.leads(k));
            }
        }
        self.place.give(rung(0));
        if rung(1) {
            daemon::pump();
        }
    }

    /// The thread ends in its sleep.
    fn undo(&self) {
        self.native_calls.leave();
        for (k, l) in self.groups.iter() {
            if let Some(w) = self.place.index() {
                waiters::leave(l, w, self.leads(k));
            }
        }
        self.place.give(true);
    }
}

/// Fills `tmp` with what the kernel is asked about the application's entries. Does one of them wait for room on a ring?
fn ask(fds: &[pollfd], tmp: &mut [pollfd], patient: bool) -> bool {
    let mut full = false;
    for (p, t) in fds.iter().zip(tmp.iter_mut()) {
        let stuck = patient && t.revents == STUCK;
        // A FIN that has been looked at and is no event of this wait must not end the sleep again.
        let ended = t.revents != STUCK && t.revents & POLLRDHUP != 0;
        *t = super::asked(p);
        if ended && p.events & POLLRDHUP == 0 && !for_bytes(p) {
            t.events &= !POLLRDHUP;
        }
        if stuck {
            t.fd = -1; // nobody can look into what the kernel reports about it
        }
        if let Some(i) = fdtab::conn(p.fd) {
            let c = table::conn(i);
            full |= p.events & (POLLOUT | WRNORM) != 0 && c.tx.on_lane();
            let of = attached::of(c, table::local(i));
            let ours = || of.is_none_or(|(_, m)| !c.tx.awaits(&m));
            if c.tx.mode.load(Relaxed) == tx::mode::DRAIN && ours() {
                t.events |= POLLOUT; // the way down goes on when TCP has space
            }
        }
    }
    full
}

/// The application's own call on all entries.
fn in_kernel(
    ears: &Ears,
    all: &mut [pollfd],
    (nap, mask): (&mut i64, *const sigset_t),
    native: &impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let undo = || ears.undo();
    let place = ears.place;
    let asleep = |f: &dyn Fn() -> i32| thread::asleep(place.efd(), true, place.in_sleep(), f);
    let (entries, n) = (all.as_mut_ptr(), all.len());
    thread::or_undo(&undo, || {
        match asleep(&|| native(entries, n, *nap)) {
            // RLIMIT_NOFILE refuses the additional entries.
            -1 if crate::errno() == libc::EINVAL => few::poll(all, nap, mask, asleep),
            r => r,
        }
    })
}

/// Numbers that mean something else by now.
fn leave_to_the_kernel(fds: &[pollfd]) {
    for p in fds {
        if let Some(i) = fdtab::conn(p.fd).filter(|i| attached::engaged(table::conn(*i))) {
            tcp::still(p.fd, i, table::conn(i), table::local(i), tcp::Way::Receive);
        }
    }
}

/// Sleeps in the application's own call until something may have changed. Nothing is held that a cancelled thread
/// would leave locked. `tmp` has room for all entries and for ours. `patient`: an entry has been locked by another
/// thread for long, so its news must not keep this one awake.
pub(super) fn sleep(
    fds: &[pollfd],
    tmp: &mut [pollfd],
    (left, mask): (i64, *const sigset_t),
    patient: bool,
    native: &impl Fn(*mut pollfd, usize, i64) -> i32,
) -> Slept {
    leave_to_the_kernel(fds);
    // A forked child shares its parent's doorbells and must not drain them, so it sleeps in naps.
    let foreign = conns(fds).any(|i| {
        let c = table::conn(i);
        attached::engaged(c) && c.owner_pid.load(Relaxed) != pids::me()
    });
    let left_ms = || conns(fds).fold(-1, |ms, i| ends::sooner(ms, ends::left_ms_of(i)));
    let end = left_ms();
    if end == 0 {
        return Slept::Again;
    }
    let alone = !foreign && !conns(fds).any(|i| ours(i).is_some());
    let place = match foreign || alone {
        true => Place::none(),
        // From here on, a thread that attaches a lane to one of these connections wakes this one.
        false => Place::take(conns(fds).fold(0, |mask, i| mask | waiters::bit(i))),
    };
    let mut groups = LinkGroups::new();
    conns(fds).filter_map(ours).for_each(|l| groups.add(l));
    let native_one = |p: &pollfd, i: u32| {
        for_bytes(p) && ours(i).is_none() && !(foreign && attached::engaged(table::conn(i)))
    };
    let native_calls = match alone && groups.len() > 0 {
        true => None, // a lane was attached just now
        false => NativeCalls::enter(fds, native_one),
    };
    let Some(native_calls) = native_calls else {
        place.give(false);
        sys::sched_yield();
        return Slept::Again;
    };
    let full = ask(fds, tmp, patient);
    let n = fds.len();
    let enter = || {
        let mut ears = Ears {
            place: &place,
            groups: &groups,
            native_calls: &native_calls,
            alone,
            leads: 0,
            muted: 0,
        };
        let nap = ears.join((left, end), full, patient);
        (ears, nap)
    };
    let asleep = |(ears, nap): &(Ears<'_>, i64)| {
        let (mut nap, all) = (*nap, n + ears.enter(&mut tmp[n..]));
        let r = in_kernel(ears, &mut tmp[..all], (&mut nap, mask), native);
        (r, nap)
    };
    // (An end that was announced since the look above, while nobody was counted asleep, rings nowhere.)
    let ended = || end < 0 && left_ms() >= 0;
    let no_sleep = |_: &_| news(fds) && !patient || daemon::pending() || ended();
    let ((ears, _), slept) = notify::rest(enter, no_sleep, asleep);
    let e = crate::errno();
    ears.give(|k| slept.is_some_and(|(r, _)| r > 0) && tmp[n + k].revents != 0);
    match slept {
        Some((r, _)) if r < 0 => {
            crate::set_errno(e);
            Slept::Ends(r)
        }
        Some((0, nap)) => {
            if daemon::fd() < 0 {
                daemon::ensure();
            }
            match left >= 0 && nap >= left {
                true => Slept::Over,
                false => Slept::Again,
            }
        }
        _ => Slept::Again,
    }
}
