//! `poll`, `select` and their `p` forms over promoted connections.

mod sets;
mod sleep;

use crate::readiness::engine::{self, Look, Rounds, Slept, Until};
use crate::readiness::{epoll, few, room};
use crate::sets::{polled, revents, IN, OUT};
use crate::state::fdtab::{self, Fd};
use crate::state::{attached, table};
use crate::sys::{self, thread};
use crate::tcp::{self, ends};
use crate::{daemon, promotion};
use core::sync::atomic::Ordering::*;
use lane::family::flag;
use lane::half::tx;
use lane::num;
use libc::{pollfd, POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP};
pub use sets::{is_set, reach};

const RDNORM: i16 = libc::POLLRDNORM;
const WRNORM: i16 = libc::POLLWRNORM;
/// Number of entries kept on the stack; more are kept in a mapping.
const STACK: usize = 64;
/// Number of link groups that one wait can listen to; with more it sleeps in short naps.
const LINK_GROUPS: usize = 64;

/// Does any entry concern a lane, or (in small sets) a connection that the daemon may ask for? Epoll sets among the
/// entries are marked as nested here, too.
fn concerned(fds: &[pollfd]) -> bool {
    let mut any = false;
    let listening = daemon::fd() >= 0;
    for p in fds {
        match fdtab::get(p.fd) {
            Fd::Conn(i) => {
                let c = table::conn(i);
                if c.flags.load(Relaxed) & flag::WATCHED == 0 {
                    c.flags.fetch_or(flag::WATCHED, Relaxed);
                    promotion::watched(i, c);
                }
                promotion::expected(i, p.fd, c);
                room::polled(c, table::local(i), p.events, fds.len());
                if c.flags.load(Relaxed) & flag::LANE != 0 {
                    promotion::try_ready(i, c, table::local(i));
                    let ending = ends::left_ms_of(i) >= 0 || ends::is_expected_of(i);
                    any |= (attached::engaged(c) || ending)
                        && tcp::still(p.fd, i, c, table::local(i), tcp::Way::Receive);
                }
                // The kernel does not know about these.
                any |= c.has_error() || table::local(i).owes_notifications();
                any |= listening && fds.len() <= STACK / 2 && promotion::on_call(c);
                any |= waits_for_end(p) && c.flags.load(Relaxed) & flag::DISQUALIFIED == 0;
            }
            Fd::Set(s) => epoll::nest(s),
            _ => {}
        }
    }
    any
}

/// What the application's call passes besides its entries.
#[derive(Clone, Copy)]
pub struct Call {
    pub until: Until,
    /// It is a poll: the kernel refuses more entries than RLIMIT_NOFILE.
    pub limited: bool,
}

/// `poll`. `native(fds, n, ms)` is the application's own call with that time-out; it blocks and is a
/// cancellation point.
///
/// # Safety
/// `fds` is the application's array.
pub unsafe fn poll(
    fds: &mut [pollfd],
    call: Call,
    native: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let _inside = thread::enter();
    if daemon::pending() {
        daemon::pump();
    }
    // The kernel refuses more entries than the limit, whatever is ready.
    if few::refuses(fds.len()) {
        return thread::outside(|| native(fds.as_mut_ptr(), fds.len(), call.until.ms));
    }
    if !concerned(fds) {
        if let Some(r) = natively(fds, |fds| {
            native(fds.as_mut_ptr(), fds.len(), call.until.ms)
        }) {
            return r;
        }
    }
    // SAFETY: passed on.
    unsafe { poll_lanes(fds, call, native) }
}

/// Makes a native wait during which none of the connections watched for data may switch. `None`: one of them is
/// switching already.
fn natively(fds: &mut [pollfd], native: impl FnOnce(&mut [pollfd]) -> i32) -> Option<i32> {
    let native_calls = sleep::NativeCalls::enter(fds, |p, _| sleep::for_data(p))?;
    let undo = || native_calls.leave();
    let r = thread::or_undo(&undo, || thread::outside(|| native(fds)));
    crate::preserving_errno(undo);
    Some(r)
}

/// # Safety
/// As [`poll`].
unsafe fn poll_lanes(
    fds: &mut [pollfd],
    call: Call,
    native: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let n = fds.len();
    let extra = LINK_GROUPS + 2;
    let none = pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    };
    let mut stack = [none; STACK + LINK_GROUPS + 2];
    let mut mapped: Option<(*mut u8, usize)> = None;
    let tmp: &mut [pollfd] = if n <= STACK {
        &mut stack[..n + extra]
    } else {
        let bytes = (n + extra) * core::mem::size_of::<pollfd>();
        match sys::map_private(bytes) {
            Ok(p) => {
                mapped = Some((p, bytes));
                // SAFETY: a fresh zeroed mapping of that many entries, unmapped at the end.
                unsafe { core::slice::from_raw_parts_mut(p.cast(), n + extra) }
            }
            Err(e) => {
                crate::set_errno(e);
                return -1;
            }
        }
    };
    let mut entries = Entries {
        fds,
        tmp,
        call,
        native,
    };
    let r = engine::wait(&mut entries, call.until, sys::now_ns());
    if let Some((p, bytes)) = mapped {
        sys::unmap(p, bytes);
    }
    r
}

/// `tmp`: room for what the kernel is asked.
struct Entries<'a, F> {
    fds: &'a mut [pollfd],
    tmp: &'a mut [pollfd],
    call: Call,
    native: F,
}

impl<F: Fn(*mut pollfd, usize, i64) -> i32> Rounds for Entries<'_, F> {
    fn look(&mut self, patient: bool) -> Look {
        let (count, busy) = scan(self.fds, self.tmp, patient);
        if self.call.limited && few::refuses(self.fds.len()) {
            crate::set_errno(libc::EINVAL); // the limit was lowered during this call
            return Look::Ends(-1);
        }
        if count > 0 {
            return Look::Ends(count);
        }
        if self.call.until.ms == 0 && thread::let_in(self.call.until.mask) {
            return Look::Ends(-1);
        }
        Look::Nothing { busy }
    }

    fn spin(&mut self) -> bool {
        spin(self.fds, self.tmp)
    }

    fn sleep(&mut self, left: i64, patient: bool) -> Slept {
        let mask = self.call.until.mask;
        sleep::sleep(self.fds, self.tmp, (left, mask), patient, &self.native)
    }
}

/// Is an entry watched only for the end of its connection (or urgent data)? A lane may be attached during such a
/// wait.
fn waits_for_end(p: &pollfd) -> bool {
    p.events & (POLLIN | RDNORM | POLLOUT | WRNORM) == 0
}

/// What the kernel is asked about an entry: only what the lane cannot answer. It is always asked for a FIN, since
/// that may be all that the kernel reports when the peer died with bytes unread on a ring.
fn asked(p: &pollfd) -> pollfd {
    let mut events = p.events;
    if let Some(c) = fdtab::conn(p.fd).map(table::conn) {
        if waits_for_end(p) {
            events |= POLLRDHUP;
        }
        if attached::engaged(c) {
            let data = POLLRDHUP | if sleep::for_bytes(p) { POLLIN } else { 0 };
            let tcp_out = if c.tx.on_lane() {
                0
            } else {
                p.events & (POLLOUT | WRNORM)
            };
            events = data | tcp_out | (p.events & libc::POLLPRI);
        }
    }
    pollfd {
        events,
        revents: 0,
        ..*p
    }
}

/// Asks the kernel and the lanes about every entry, without waiting. Returns the number of entries with events, and
/// whether a connection was locked by another thread.
fn scan(fds: &mut [pollfd], tmp: &mut [pollfd], patient: bool) -> (i32, bool) {
    for (p, t) in fds.iter().zip(tmp.iter_mut()) {
        *t = asked(p);
    }
    sys::poll_now(&mut tmp[..fds.len()]);
    let mut count = 0;
    let mut busy = false;
    for (p, t) in fds.iter_mut().zip(tmp.iter_mut()) {
        p.revents = t.revents & (p.events | POLLERR | POLLHUP | libc::POLLNVAL);
        if let Some(i) = fdtab::conn(p.fd) {
            let c = table::conn(i);
            let engaged = attached::engaged(c);
            if !engaged && p.events & !t.events != 0 {
                // It has left its lane since the kernel was asked.
                p.revents = sys::poll1(p.fd, p.events);
            }
            if engaged {
                let want = if p.events & (POLLIN | RDNORM) != 0 {
                    IN
                } else {
                    0
                } | if p.events & (POLLOUT | WRNORM) != 0 {
                    OUT
                } else {
                    0
                };
                let urgent = t.revents & libc::POLLPRI;
                let mut tcp = polled(t.revents) & !OUT;
                match epoll::state(c, table::local(i), p.fd, want, &mut tcp, patient) {
                    Some(ev) => {
                        let mut r = revents(ev) & (p.events | POLLERR | POLLHUP);
                        if ev & IN != 0 {
                            r |= p.events & RDNORM;
                        }
                        if ev & OUT != 0 {
                            r |= p.events & WRNORM;
                        } else if want & OUT != 0 && c.tx.on_lane() {
                            room::no_room(table::local(i));
                        }
                        p.revents = r | urgent;
                    }
                    None => {
                        p.revents = 0;
                        t.revents = sleep::STUCK;
                        busy = true;
                    }
                }
            } else if c.has_error() {
                p.revents |= POLLERR | p.events & (POLLIN | RDNORM);
            } else if table::local(i).owes_notifications() {
                p.revents |= POLLERR;
            }
        }
        if p.revents & POLLERR != 0 {
            crate::sets::tell_error(p.fd);
        }
        if p.revents != 0 {
            count += 1;
        }
    }
    (count, busy)
}

/// Does any lane among the entries have news for this wait? Only reads.
fn news(fds: &[pollfd]) -> bool {
    fds.iter().any(|p| {
        fdtab::conn(p.fd).is_some_and(|i| {
            let c = table::conn(i);
            match attached::of(c, table::local(i)) {
                Some((_, m)) => {
                    (sleep::for_bytes(p) && c.rx.has_news(&m))
                        || c.tx.on_lane() && c.tx.has_work(&m)
                        || (p.events & POLLOUT != 0
                            && c.tx.mode.load(Relaxed) == tx::mode::RING
                            && c.tx.writable(&m))
                }
                None => false,
            }
        })
    })
}

/// Spins for a bounded time. True: look again.
fn spin(fds: &[pollfd], tmp: &mut [pollfd]) -> bool {
    let n = fds.len();
    let mut engaged = None;
    let mut groups = sleep::LinkGroups::new();
    for p in fds {
        let Some(i) = fdtab::conn(p.fd) else { continue };
        let c = table::conn(i);
        if attached::engaged(c) {
            if p.events & (POLLOUT | WRNORM) != 0 && c.tx.on_lane() {
                return false; // waits for space, for which spinning is too short
            }
            if let Some((l, _)) = attached::of(c, table::local(i)) {
                groups.add(l);
                engaged = engaged.or(Some(i));
            }
        }
    }
    let Some(i) = engaged else {
        return false;
    };
    let cpu = || match attached::of(table::conn(i), table::local(i)) {
        Some((_, m)) if groups.len() == 1 => m.peer_rx().cpu.load(Relaxed),
        _ => u32::MAX,
    };
    engine::spin_with_kernel(
        &table::local(i).spin,
        cpu,
        || n > 1 && sys::poll_now(&mut tmp[..n]) > 0,
        || news(fds),
    )
}

/// `select` over lanes: converted to `poll`, and its result converted back. If no lane is concerned, `native` runs,
/// with the connections counted as natively waited for.
///
/// # Safety
/// The sets are null or the application's, with at least `nfds` bits.
pub unsafe fn select(
    nfds: i32,
    sets: [*mut libc::fd_set; 3],
    call: Call,
    native: impl Fn() -> i32,
    sleep: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let _inside = thread::enter();
    if nfds < 0 {
        return native();
    }
    // SAFETY: by contract.
    let any = |fd: &i32| sets.iter().any(|s| unsafe { is_set(*s, *fd) });
    let n = (0..nfds).filter(any).count();
    let none = pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    };
    let mut stack = [none; STACK];
    let mut mapped = None;
    let fds: &mut [pollfd] = if n <= STACK {
        &mut stack[..n]
    } else {
        let bytes = n * core::mem::size_of::<pollfd>();
        match sys::map_private(bytes) {
            Ok(p) => {
                mapped = Some((p, bytes));
                // SAFETY: a fresh zeroed mapping of that many entries, unmapped at the end.
                unsafe { core::slice::from_raw_parts_mut(p.cast(), n) }
            }
            Err(e) => {
                crate::set_errno(e);
                return -1;
            }
        }
    };
    let undo = || {
        if let Some((p, bytes)) = mapped {
            sys::unmap(p, bytes);
        }
    };
    let r = thread::or_undo(&undo, || {
        // SAFETY: passed on.
        unsafe { select_in(fds, nfds, sets, call, native, sleep) }
    });
    crate::preserving_errno(undo);
    r
}

const BITS: [i16; 3] = [POLLIN, POLLOUT, libc::POLLPRI];

/// `fds` has room for all descriptors that are in any set.
///
/// # Safety
/// As [`select`].
unsafe fn select_in(
    fds: &mut [pollfd],
    nfds: i32,
    sets: [*mut libc::fd_set; 3],
    call: Call,
    native: impl Fn() -> i32,
    sleep: impl Fn(*mut pollfd, usize, i64) -> i32,
) -> i32 {
    let events = |fd: i32| {
        let of = sets.iter().zip(BITS);
        // SAFETY: by contract.
        of.filter(|(s, _)| unsafe { is_set(**s, fd) })
            .fold(0, |e, (_, b)| e | b)
    };
    let wanted = (0..nfds).filter(|fd| events(*fd) != 0);
    for (p, fd) in fds.iter_mut().zip(wanted) {
        *p = pollfd {
            fd,
            events: events(fd),
            revents: 0,
        };
    }
    if !concerned(fds) {
        if let Some(r) = natively(fds, |_| native()) {
            return r;
        }
    }
    let (start, ms) = (sys::now_ns(), call.until.ms);
    let mut left = ms;
    loop {
        let until = Until {
            ms: left,
            ..call.until
        };
        // SAFETY: our own array.
        let r = unsafe { poll_lanes(fds, Call { until, ..call }, &sleep) };
        if r < 0 {
            return r;
        }
        if fds.iter().any(|p| p.revents & libc::POLLNVAL != 0) {
            crate::set_errno(libc::EBADF);
            return -1;
        }
        let told = |p: &&mut pollfd| p.revents & answers(p) != 0;
        if r == 0 || left == 0 || fds.iter_mut().any(|p| told(&p)) {
            break;
        }
        // (A descriptor that is only in the exceptional set is not reported for the end of its connection.)
        fds.iter_mut()
            .filter(|p| p.revents != 0)
            .for_each(|p| p.fd = !p.fd);
        if ms >= 0 {
            left = (ms - num::long(sys::now_ns().saturating_sub(start) / 1_000_000)).max(0);
        }
    }
    let mut count = 0;
    for p in fds.iter() {
        let fd = if p.fd < 0 { !p.fd } else { p.fd };
        for ((s, b), y) in sets.iter().zip(BITS).zip(SAYS) {
            if p.events & b == 0 {
                continue;
            }
            if p.fd >= 0 && p.revents & y != 0 {
                count += 1;
            } else {
                // SAFETY: the bit was set in this set, so the set is there and large enough.
                unsafe { *s.cast::<u8>().add(num::word(fd) / 8) &= !(1 << (fd % 8)) };
            }
        }
    }
    count
}

/// The poll events that `select` reports in each set.
const SAYS: [i16; 3] = [POLLIN | POLLHUP | POLLERR, POLLOUT | POLLERR, libc::POLLPRI];

/// The poll events for which `select` reports an entry.
fn answers(p: &pollfd) -> i16 {
    let asked = BITS.iter().zip(SAYS).filter(|(b, _)| p.events & **b != 0);
    asked.fold(0, |all, (_, y)| all | y)
}
