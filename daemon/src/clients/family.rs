//! Family tables, as the daemon reads them.
//!
//! Read with `pread`, not through a mapping: a mapping of memory that another process made can fault, and touching
//! a hole in it would charge the page to the daemon. Every entry is a copy, and every value in it is hostile until
//! checked.

use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use lane::family::{
    flag, state, Cause, Conn, Header, Home, More, Stats, Table, View, CONNS, MAGIC,
};
use lane::num;
use std::mem::{offset_of, size_of, MaybeUninit};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The table of one family of processes.
pub struct Family {
    pub ident: Ident,
    fd: Foreign,
}

/// Entries read at once.
const BLOCK: usize = 64;

impl Family {
    /// `fd` has been checked to have the size of a table, for good.
    pub fn new(ident: Ident, fd: Foreign) -> Self {
        Family { ident, fd }
    }

    pub fn into_table(self) -> Foreign {
        self.fd
    }

    /// A copy of one entry, if it is in use.
    pub fn view(&self, index: u32) -> Option<View> {
        if index as usize >= CONNS {
            return None;
        }
        self.block(index as usize, 1).pop()
    }

    /// Does a thread hold the lock of this connection's sending direction?
    pub fn sending(&self, index: u32, gen: u32) -> bool {
        let c = self.entry(index);
        c.is_some_and(|c| c.gen.load(Relaxed) == gen && c.tx.lock.load(Relaxed) != 0)
    }

    /// A copy of one entry, perhaps torn.
    fn entry(&self, index: u32) -> Option<Conn> {
        if index as usize >= CONNS {
            return None;
        }
        let offset = offset_of!(Table, conns) + index as usize * size_of::<Conn>();
        copy(&self.fd, offset, 1)?.pop()
    }

    /// Does a thread hold that lock, or is the entry not that of this connection's lane any more? (A process that moves
    /// to a table of its own leaves it without one.)
    pub fn at_work(&self, index: u32, gen: u32) -> bool {
        self.entry(index).is_none_or(|c| {
            let open = c.state.load(Relaxed) == state::OPEN && c.gen.load(Relaxed) == gen;
            let lane = c.flags.load(Relaxed) & flag::LANE != 0;
            !open || !lane || c.tx.lock.load(Relaxed) != 0
        })
    }

    /// Copies of all entries in use.
    pub fn views(&self) -> Vec<View> {
        let used = self
            .header()
            .map_or(0, |h| h.used.load(Relaxed) as usize)
            .min(CONNS);
        let mut all = Vec::new();
        let mut at = 0;
        while at < used {
            let n = BLOCK.min(used - at);
            all.append(&mut self.block(at, n));
            at += n;
        }
        all
    }

    pub fn stats(&self) -> Totals {
        let header = || {
            let mut t = self
                .header()
                .map_or_else(Totals::default, |h| Totals::of(&h.stats));
            (t.downs_by, t.deaths) = self.more();
            t
        };
        let mut ended = header();
        let mut last = ended;
        // The header has the bytes of connections that have ended; the others have their own. A connection that
        // ends in between would be missed, or counted twice, so the header must not have changed.
        for _ in 0..4 {
            let mut t = ended;
            for v in self.views() {
                t.lane_tx = t.lane_tx.wrapping_add(v.lane_tx);
                t.lane_rx = t.lane_rx.wrapping_add(v.lane_rx);
            }
            let again = header();
            if (again.lane_tx, again.lane_rx) == (ended.lane_tx, ended.lane_rx) {
                return t;
            }
            (ended, last) = (again, t);
        }
        last
    }

    fn more(&self) -> ([u64; CAUSES], u64) {
        let more = copy::<More>(&self.fd, offset_of!(Table, more), 1).and_then(|mut m| m.pop());
        more.map_or(([0; CAUSES], 0), |m| {
            let downs_by = std::array::from_fn(|i| m.downs_by[i].load(Relaxed));
            (downs_by, m.deaths.load(Relaxed))
        })
    }

    fn header(&self) -> Option<Header> {
        copy::<Header>(&self.fd, offset_of!(Table, header), 1)?.pop()
    }

    /// Entries `[at, at + n)`. Read twice, because an entry whose generation changed in between may be torn.
    fn block(&self, at: usize, n: usize) -> Vec<View> {
        let offset = offset_of!(Table, conns) + at * size_of::<Conn>();
        let read = || copy::<Conn>(&self.fd, offset, n);
        let (Some(first), Some(second)) = (read(), read()) else {
            return Vec::new();
        };
        let same = |a: &Conn, b: &Conn| {
            a.gen.load(Relaxed) == b.gen.load(Relaxed)
                && a.state.load(Relaxed) == b.state.load(Relaxed)
        };
        let views = first.iter().zip(&second).enumerate().map(|(i, (a, b))| {
            // The second copy began after the first had ended: if the generation is the same in
            // both, everything in the first belongs to it.
            same(a, b).then(|| a.view(num::small(at + i))).flatten()
        });
        views.flatten().collect()
    }
}

/// Copies `n` values of a table.
fn copy<T: Atomics>(table: &Foreign, offset: usize, n: usize) -> Option<Vec<T>> {
    let mut out = Vec::<T>::with_capacity(n);
    let bytes = out.spare_capacity_mut().get_mut(..n)?;
    // SAFETY: the same memory as bytes that need not be initialised, borrowed from `out`.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(
            bytes.as_mut_ptr().cast::<MaybeUninit<u8>>(),
            n * size_of::<T>(),
        )
    };
    let want = bytes.len();
    let got = rustix::io::pread(table, &mut *bytes, offset as u64)
        .ok()?
        .0
        .len();
    if got != want {
        return None;
    }
    // SAFETY: all `n` values were just filled, and by `Atomics` any bytes are valid.
    unsafe { out.set_len(n) };
    Some(out)
}

/// The runtime directory whose daemon a table belongs to, as its shim says. `None`: also a table of another layout.
pub fn home(table: &Foreign) -> Option<Home> {
    let header = copy::<Header>(table, offset_of!(Table, header), 1)?.pop()?;
    let version = header.version.load(Relaxed);
    let known = u32::from(lane::MIN_VERSION)..=u32::from(lane::VERSION);
    let ours = header.magic.load(Relaxed) == MAGIC && known.contains(&version);
    ours.then(|| header.home())
}

/// Types of the table, which consist of integers only.
///
/// # Safety
/// Any bytes must be a valid value.
unsafe trait Atomics {}
// SAFETY: atomic integers and arrays of them.
unsafe impl Atomics for Header {}
// SAFETY: atomic integers and arrays of them.
unsafe impl Atomics for Conn {}
// SAFETY: atomic integers and arrays of them.
unsafe impl Atomics for More {}

/// Causes of switches to TCP.
pub const CAUSES: usize = Cause::ALL.len();

/// Sums over tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub promoted: u64,
    pub ups: u64,
    pub downs: u64,
    /// By the causes that shims knew, in the order of [`Cause::ALL`].
    pub downs_by: [u64; CAUSES],
    pub lane_tx: u64,
    pub lane_rx: u64,
    pub rings: u64,
    pub sleeps: u64,
    pub resets: u64,
    pub deaths: u64,
    /// Readings of tables that could not be true. (In no table: the daemon counts them.)
    pub implausible: u64,
}

/// More than one family can do in a second on any machine. Far more than anybody does, and so little that years of it
/// leave sums in which a single reset is still seen.
const MOST: Totals = Totals {
    promoted: 1 << 20,
    ups: 1 << 22,
    downs: 1 << 22,
    downs_by: [1 << 22; CAUSES],
    lane_tx: 1 << 39,
    lane_rx: 1 << 39,
    rings: 1 << 28,
    sleeps: 1 << 28,
    resets: 1 << 20,
    deaths: 1 << 20,
    implausible: 0,
};

impl Totals {
    fn of(s: &Stats) -> Self {
        Totals {
            promoted: s.promoted.load(Relaxed),
            ups: s.ups.load(Relaxed),
            downs: s.downs.load(Relaxed),
            downs_by: [0; CAUSES],
            lane_tx: s.lane_tx.load(Relaxed),
            lane_rx: s.lane_rx.load(Relaxed),
            rings: s.rings.load(Relaxed),
            sleeps: s.sleeps.load(Relaxed),
            resets: s.resets(),
            deaths: 0,
            implausible: 0,
        }
    }

    /// Adds, up to the largest number that there is.
    pub fn add(&mut self, o: &Totals) {
        *self = self.each(o, u64::saturating_add);
    }

    /// What has been added since `before`; 0 where there is less.
    pub fn grown(&self, before: &Totals) -> Totals {
        self.each(before, u64::saturating_sub)
    }

    /// The larger of both, number by number.
    pub fn highest(&self, o: &Totals) -> Totals {
        self.each(o, u64::max)
    }

    /// Those numbers that may become less in a table, because a process takes its connections to another one (or because
    /// one of them ends while the table is read).
    pub fn movable(&self) -> Totals {
        Totals {
            promoted: self.promoted,
            lane_tx: self.lane_tx,
            lane_rx: self.lane_rx,
            ..Totals::default()
        }
    }

    /// Can one family have done this in that time?
    pub fn is_possible_in(&self, time: Duration) -> bool {
        let seconds = time.as_secs().saturating_add(1);
        let most = MOST.each(&MOST, |m, _| m.saturating_mul(seconds));
        self.grown(&most) == Totals::default()
    }

    fn each(&self, o: &Totals, f: impl Fn(u64, u64) -> u64) -> Totals {
        Totals {
            promoted: f(self.promoted, o.promoted),
            ups: f(self.ups, o.ups),
            downs: f(self.downs, o.downs),
            downs_by: std::array::from_fn(|i| f(self.downs_by[i], o.downs_by[i])),
            lane_tx: f(self.lane_tx, o.lane_tx),
            lane_rx: f(self.lane_rx, o.lane_rx),
            rings: f(self.rings, o.rings),
            sleeps: f(self.sleeps, o.sleeps),
            resets: f(self.resets, o.resets),
            deaths: f(self.deaths, o.deaths),
            implausible: f(self.implausible, o.implausible),
        }
    }
}
