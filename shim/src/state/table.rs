//! The family table of this process, and what the process itself adds to each entry.

mod births;
mod forks;
mod holders;
mod kin;
mod lending;

pub use births::{await_birth, born, expect_child, settle_births};
pub use forks::*;
pub use holders::*;
pub use kin::KIN;
pub use lending::*;

use crate::state::{fdtab, groups::LinkGroup};
use crate::sys::{self, pids};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use lane::abi::{Cursor, Private, TcpPos};
use lane::family::{flag, state, Conn, Table, CONNS, MAGIC, TABLE_BYTES};
use lane::{num, proto::reason::Reason};

/// Process-private counterpart of an entry of the family table.
#[repr(C, align(64))]
pub struct Local {
    /// Link group of the attached lane, mapped here.
    pub group: AtomicPtr<LinkGroup>,
    /// Descriptors of this process that refer to the connection.
    pub refs: AtomicU32,
    /// First registration in an epoll set (index + 1).
    pub regs: AtomicU32,
    pub regs_lock: AtomicU32,
    /// Events that TCP reported through an inner epoll set and that nobody has checked yet.
    pub tcp_events: AtomicU32,
    /// A descriptor of the connection, for actions on its behalf in other calls. Changes only under the locks of both
    /// directions.
    pub fd: AtomicI32,
    /// Calls that hold the connection, and whether it is being closed: see `tcp::call`.
    pub calls: AtomicU32,
    /// How often `shutdown` and `connect(AF_UNSPEC)` were called here; both wake sleepers. The counts only grow.
    pub shuts: AtomicU32,
    pub disconnects: AtomicU32,
    /// The reader's cursor when the ring was last found full.
    pub full_at: Private<Cursor>,
    /// How many times in a row the ring was full for too long, at most 6: see `promotion::full`.
    pub fulls: AtomicU32,
    /// When the connection was last registered, or first made large calls (CLOCK_MONOTONIC, ms).
    pub hope_ms: AtomicU64,
    /// Number of ways down that native sends know of, and the position on TCP at which the last one ended, until that
    /// is acknowledged (0: it is): see `tcp::behind`.
    pub downs: AtomicU32,
    pub down_end: Private<TcpPos>,
    /// Not 0: TCP's send buffer has once taken only a part of a send.
    pub starved: AtomicU32,
    /// The program continues after a short count: see `conn::short`.
    pub copes: AtomicU32,
    /// Not 0: a send found no room on the ring, or a wait for room found none (then 1), and no wait has found room
    /// since. Other values: the time (ms) after which a send is no mere retry of the first. See `conn::short`.
    pub refused: AtomicU32,
    /// Has this process shut the connection down for sending?
    pub sends_ended: AtomicU32,
    /// Address of the bytes that the last short send did not take; 0: none.
    pub rest: AtomicUsize,
    /// Numbers of the MSG_ZEROCOPY calls, and who counts them: see `conn::zerocopy`.
    pub zerocopy: AtomicU64,
    pub zerocopy_ours: AtomicU32,
    /// How successful recent spins were.
    pub spin: AtomicI32,
    /// Time (ticks) when the sending half last checked whether the peer's TCP end is still there.
    pub checked: AtomicU64,
    /// The ends that were reported; until when TCP may report one (CLOCK_MONOTONIC, ms); is the peer dead? See `ends`.
    pub end_told: AtomicU32,
    pub end_due_ms: AtomicU64,
    pub peer_dead: AtomicU32,
    pub lingered: AtomicU64, // see `linger`
    /// When the probes on TCP are checked next (CLOCK_MONOTONIC, ms), and whether the last one was unanswered.
    pub probe_due_ms: AtomicU64,
    pub unanswered: AtomicU32,
    /// For each direction, the last proof that a descriptor still is this connection: see `tcp::still`.
    pub proved: [AtomicU64; 2],
    /// For a connection that was received: the process that it came from (0: unknown), the counts of both directions
    /// when it was first looked at, and whether it had a number of the standard streams: see `received`.
    pub from: AtomicU32,
    pub began: [Private<TcpPos>; 2],
    pub standard: AtomicU32,
    /// Generation, and descriptor plus 1, by which it leaves its lane while that takes time; and since when, or when it was
    /// last lent (CLOCK_MONOTONIC, ms): see `promotion::leave`.
    pub leaving: AtomicU64,
    pub lent_ms: AtomicU64,
    /// Not 0: since the connection got its lane, its byte counts were once found to be still true.
    pub verified: AtomicU32,
    /// The fork by which it came; 0: it was made in this process. See `family`.
    pub came: AtomicU32,
    /// The entry's generation when this process last took it. A new table counts on from there, so that calls on
    /// connections of the former table can be told from those on its own.
    gen: AtomicU32,
}

/// The bits of [`Local::calls`] that are a count.
pub const CALLS: u32 = (1 << 30) - 1;

/// Bit of [`Local::zerocopy_ours`]: the shim counts the notifications, not the kernel.
pub const ZEROCOPY_OURS: u32 = 1;

impl Local {
    /// Is there a MSG_ZEROCOPY notification of the shim's that was not delivered yet?
    #[inline(always)]
    pub fn owes_notifications(&self) -> bool {
        let word = self.zerocopy.load(Relaxed);
        (word >> 32) as u32 != num::low32(word)
    }

    /// Does the shim count and deliver the notifications of this connection? Then the kernel has none.
    pub fn notifies(&self) -> bool {
        self.zerocopy_ours.load(Relaxed) & ZEROCOPY_OURS != 0
    }
}

static FAMILY: AtomicPtr<Table> = AtomicPtr::new(core::ptr::null_mut());
static LOCALS: AtomicPtr<Local> = AtomicPtr::new(core::ptr::null_mut());
static MEMFD: AtomicI32 = AtomicI32::new(-1);
/// Not 0: there is a table. (One that was given up leaves blank memory in its place: see [`clear`].)
static LIVE: AtomicU32 = AtomicU32::new(0);
/// Number of tables that were given up.
static GIVEN_UP: AtomicU32 = AtomicU32::new(0);
/// Number of entries that this process holds.
pub static HELD: AtomicU32 = AtomicU32::new(0);
/// What the header of a table that was given up said about its daemon: `Header::home`.
static HOME: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static HINT: AtomicU32 = AtomicU32::new(0);
static LOCK: AtomicU32 = AtomicU32::new(0);
/// Entries (index + 1) that this process has recently freed. Only hints: whoever takes one checks that it is free.
static RECENT: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
static RECENT_N: AtomicU32 = AtomicU32::new(0);
/// The entry that the next [`sweep`] looks at.
static SWEEP: AtomicU32 = AtomicU32::new(0);
/// Inode of the pid namespace in which the table was made; 0: unknown.
static PID_NS: AtomicU64 = AtomicU64::new(0);
/// Not 0: this process is in another pid namespace than the table.
static FOREIGN: AtomicU32 = AtomicU32::new(0);

pub fn memfd() -> i32 {
    MEMFD.load(Relaxed)
}

/// Makes the tables. False: no memory, or no memfd (seccomp); then everything stays on TCP.
pub fn init() -> bool {
    if LIVE.load(Acquire) != 0 {
        return true;
    }
    let Some(_g) = crate::sys::lock::lock(&LOCK) else {
        return false;
    };
    if LIVE.load(Acquire) != 0 {
        return true;
    }
    if !fdtab::init() {
        return false; // hidden descriptors have to be entered there
    }
    if LOCALS.load(Relaxed).is_null() {
        let Ok(locals) = sys::map_private(CONNS * core::mem::size_of::<Local>()) else {
            return false;
        };
        LOCALS.store(locals.cast(), Release);
    }
    let Some((fd, t)) = make(address()) else {
        return false;
    };
    moved_to(fdtab::hide(fd));
    let home = HOME.each_ref().map(|n| n.load(Relaxed));
    // SAFETY: just made.
    unsafe { &(*t).header }.set_home(home);
    KIN.clear();
    let first = FAMILY.swap(t, AcqRel).is_null();
    LIVE.store(1, SeqCst);
    if first {
        pids::mark();
        crate::state::signals::take_over();
    }
    true
}

/// A new table: its file and its address. If `at` is not null, the table replaces what is mapped there.
pub fn make(at: *mut u8) -> Option<(i32, *mut Table)> {
    if sys::is_below(lane::os::FILE_SIZE) {
        return None; // a memfd counts as a file
    }
    let fd = sys::memfd(c"underpass-family").ok()?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let mapped = sys::ftruncate(fd, TABLE_BYTES)
        .and_then(|()| sys::fcntl(fd, libc::F_ADD_SEALS, num::word(seals)))
        .and_then(|_| match at.is_null() {
            true => sys::map(fd, TABLE_BYTES, true),
            false => sys::map_over(at, TABLE_BYTES, fd).map(|()| at),
        });
    let Ok(p) = mapped else {
        sys::close(fd);
        return None;
    };
    let t: *mut Table = p.cast();
    // SAFETY: freshly mapped, TABLE_BYTES long; atomics accept zeroed memory.
    let h = unsafe { &(*t).header };
    h.version.store(u32::from(lane::MIN_VERSION), Relaxed);
    h.conns.store(num::small(CONNS), Relaxed);
    h.pid.store(pids::pid(), Relaxed);
    pids::found(h);
    h.magic.store(MAGIC, Release);
    Some((fd, t))
}

/// Address of the table, or of the last one; null: there never was one.
pub fn address() -> *mut u8 {
    FAMILY.load(Acquire).cast()
}

/// From now on `fd`, which is hidden, is the file of the table.
pub fn moved_to(fd: i32) {
    births::forget_children(); // (entries are others from now on)
    MEMFD.store(fd, Relaxed);
    PID_NS.store(pids::here(), Relaxed);
    FOREIGN.store(0, Relaxed);
}

/// Gives up the table, in which this process holds nothing. Its memory becomes private zero pages, because threads
/// may still read it. False: a thread has taken an entry meanwhile.
pub fn clear() -> bool {
    let Some(_g) = crate::sys::lock::lock(&LOCK) else {
        return false;
    };
    // SYNC clear: the table is gone, then we look whether anything is held; who takes an entry counts it, then looks
    // whether there is a table (`alloc`).
    if LIVE.swap(0, SeqCst) == 0 {
        return false;
    }
    if HELD.load(SeqCst) != 0 {
        LIVE.store(1, SeqCst);
        return false;
    }
    if let Some(t) = table() {
        for (to, n) in HOME.iter().zip(t.header.home()) {
            to.store(n, Relaxed);
        }
    }
    fdtab::close_ours(MEMFD.swap(-1, Relaxed));
    sys::blank(address(), TABLE_BYTES);
    GIVEN_UP.fetch_add(1, SeqCst);
    true
}

/// Changes when a table is given up, because the counts in its entries are lost with it.
#[inline(always)]
pub fn given_up() -> u32 {
    GIVEN_UP.load(SeqCst)
}

pub fn table() -> Option<&'static Table> {
    // SAFETY: set once in `init`, never unmapped (others' memory may take its place); all fields are atomics.
    unsafe { FAMILY.load(Acquire).as_ref() }
}

#[inline(always)]
pub fn conn(i: u32) -> &'static Conn {
    // SAFETY: indices come from `alloc` (below CONNS) by way of the descriptor table, which is
    // empty until `init` has succeeded; the mask keeps any value in bounds.
    unsafe { &(*FAMILY.load(Relaxed)).conns[i as usize & (CONNS - 1)] }
}

#[inline(always)]
pub fn local(i: u32) -> &'static Local {
    // SAFETY: as in `conn`; LOCALS has CONNS zero-initialised entries.
    unsafe { &*LOCALS.load(Relaxed).add(i as usize & (CONNS - 1)) }
}

/// Does this descriptor (still) refer to the connection?
pub fn is_at(c: &Conn, fd: i32) -> bool {
    sys::inode(fd).is_ok_and(|(inode, _)| inode == c.inode.load(Relaxed))
}

/// Does this descriptor refer to the connection, as the kernel has it? (Without an inode here it has no lane.)
pub fn is_same(fd: i32, c: &Conn) -> bool {
    let known = c.inode.load(Relaxed);
    known == 0 || sys::inode(fd).is_ok_and(|(inode, _)| inode == known)
}

/// Does a descriptor that the table has for a connection refer to something else by now? For actions on the
/// connection's behalf in other calls, under its locks: nothing is removed from the table here.
pub fn is_other(fd: i32) -> bool {
    fdtab::conn(fd).is_some_and(|i| !is_same(fd, conn(i)))
}

/// The private counterpart of an entry of the table.
pub fn local_of(c: &Conn) -> &'static Local {
    let at = core::ptr::from_ref(c) as usize - core::ptr::from_ref(conn(0)) as usize;
    local(num::small(at / core::mem::size_of::<Conn>()))
}

/// The entry of the table that contains this word.
pub fn entry_of(word: &AtomicU32) -> Option<u32> {
    let first = table()?.conns.as_ptr() as usize;
    let at = (&raw const *word as usize).checked_sub(first)? / core::mem::size_of::<Conn>();
    (at < CONNS).then_some(num::small(at))
}

/// Is this the lock of a direction?
pub fn is_direction(word: &AtomicU32) -> bool {
    entry_of(word).is_some_and(|i| {
        let c = conn(i);
        core::ptr::eq(word, &c.tx.lock) || core::ptr::eq(word, &c.rx.lock)
    })
}

/// Every connection of this process, by index.
pub fn each(mut f: impl FnMut(u32, &Conn)) {
    let Some(t) = table() else { return };
    let me = pids::me();
    for i in 0..t.header.used.load(Acquire) {
        let c = conn(i);
        if c.state.load(Acquire) == state::OPEN && c.holders.iter().any(|h| h.load(Relaxed) == me) {
            f(i, c);
        }
    }
}

/// Calls `f` for every TCP socket among this process's descriptors, also if it listens or is not connected yet.
pub fn each_fd(mut f: impl FnMut(i32, u32, &Conn)) {
    for fd in 0..=fdtab::high() {
        if let Some(i) = fdtab::conn(fd) {
            f(fd, i, conn(i));
        }
    }
}

/// Takes a free entry for a socket of this process, which holds it from now on.
pub fn alloc(fd: i32, flags: u32) -> Option<u32> {
    HELD.fetch_add(1, SeqCst); // SYNC clear
    while LIVE.load(SeqCst) == 0 {
        HELD.fetch_sub(1, SeqCst);
        if !init() {
            return None;
        }
        HELD.fetch_add(1, SeqCst);
    }
    let taken = take(fd, flags);
    if taken.is_none() {
        HELD.fetch_sub(1, SeqCst);
    }
    taken
}

fn take(fd: i32, flags: u32) -> Option<u32> {
    let t = table()?;
    // Two entries for one that is taken, so that entries of dead processes are found faster than new ones are needed.
    sweep(t);
    sweep(t);
    let start = HINT.load(Relaxed) as usize;
    let fresh = (0..CONNS).map(|k| (start + k) % CONNS);
    for i in core::iter::from_fn(recent).chain(fresh) {
        let c = &t.conns[i];
        // A native call on the entry's former connection may take long, and is counted here until it ends.
        let left = c.tx.inside() == 0 && c.rx.inside() == 0;
        if !left
            || c.state.load(Relaxed) != state::FREE
            || c.state
                .compare_exchange(state::FREE, state::BUSY, AcqRel, Relaxed)
                .is_err()
        {
            continue;
        }
        if i >= start % CONNS {
            HINT.store((num::small(i) + 1) % num::small(CONNS), Relaxed);
        }
        t.header.used.fetch_max(num::small(i) + 1, Relaxed);
        reset(c);
        c.tx.forget_uncounted();
        c.rx.forget_uncounted();
        let l = local(num::small(i));
        let gen = c.gen.load(Relaxed).max(l.gen.load(Relaxed)) + 1;
        c.gen.store(gen, Relaxed);
        l.gen.store(gen, Relaxed);
        c.flags.store(flags, Relaxed);
        c.reason.store(Reason::Young.code(), Relaxed);
        c.holders[0].store(pids::me(), Relaxed);
        c.fd.store(num::bits(fd) + 1, Relaxed);
        // In another pid namespace, our number means something else to the rest of the family: none may judge by it.
        c.forks.store(FOREIGN.load(Relaxed), Relaxed);
        l.group.store(core::ptr::null_mut(), Relaxed);
        forget_counts(num::small(i));
        l.refs.store(1, Release); // a fork may count it from now on
        l.fd.store(fd, Relaxed);
        l.calls.fetch_and(CALLS, SeqCst); // (calls that have not noticed yet that their connection is gone stay counted)
        l.spin.store(4, Relaxed);
        l.downs.store(c.tx.downs.load(Relaxed), Relaxed);
        l.down_end.store(TcpPos::default(), Relaxed);
        l.rest.store(0, Relaxed);
        let words = [&l.regs, &l.tcp_events, &l.starved, &l.copes, &l.fulls];
        words.iter().for_each(|w| w.store(0, Relaxed));
        let words = [&l.refused, &l.sends_ended, &l.came, &l.end_told, &l.from];
        words.iter().for_each(|w| w.store(0, Relaxed));
        let words = [&l.peer_dead, &l.unanswered, &l.standard, &c.probes];
        words.iter().for_each(|w| w.store(0, Relaxed));
        l.zerocopy_ours.store(0, Relaxed);
        let words = [&l.lingered, &l.checked, &l.end_due_ms, &l.probe_due_ms];
        words.iter().for_each(|w| w.store(0, Relaxed));
        let words = [&l.leaving, &l.lent_ms, &l.hope_ms, &l.zerocopy];
        words.iter().for_each(|w| w.store(0, Relaxed));
        l.proved.iter().for_each(|p| p.store(0, Relaxed));
        c.state.store(state::EMBRYO, Release); // opens the entry: pairs with `Conn::view`
        return Some(num::small(i));
    }
    None
}

/// An entry that was freed recently: using these first keeps the table short and its pages warm.
fn recent() -> Option<usize> {
    let n = RECENT_N.load(Relaxed) as usize;
    let last = n.checked_sub(1)?;
    RECENT_N.store(num::small(last), Relaxed);
    let i = RECENT.get(last)?.swap(0, Relaxed);
    i.checked_sub(1).map(|i| i as usize & (CONNS - 1))
}

fn remember(i: u32) {
    let n = RECENT_N.load(Relaxed);
    if let Some(r) = RECENT.get(n as usize) {
        r.store(i + 1, Relaxed);
        RECENT_N.store(n + 1, Relaxed);
    }
}

/// Looks at the next entry: frees it if every process that held it is dead. A child that exits without closing leaves
/// its entries behind (forking servers: one per connection). Costs a system call only for an entry that another
/// process holds.
fn sweep(t: &Table) {
    let used = t.header.used.load(Relaxed);
    if used == 0 || FOREIGN.load(Relaxed) != 0 {
        return;
    }
    let i = SWEEP.fetch_add(1, Relaxed) % used;
    let c = &t.conns[i as usize & (CONNS - 1)];
    let s = c.state.load(Acquire);
    if matches!(s, state::FREE | state::BUSY) || c.forks.load(SeqCst) != 0 {
        return;
    }
    // An entry without any holder is between two of them (an exec that may fail, a close in progress).
    let abandoned = || {
        let mut dead = 0;
        for h in &c.holders {
            let p = h.load(SeqCst);
            if p != 0 {
                if p == pids::me() || !pids::is_gone(p) {
                    return false;
                }
                dead += 1;
            }
        }
        dead > 0 && c.forks.load(SeqCst) == 0
    };
    if abandoned()
        && c.state
            .compare_exchange(s, state::BUSY, AcqRel, Relaxed)
            .is_ok()
    {
        // Check again now that no other process can take it: it may have changed hands meanwhile.
        if !abandoned() {
            let _ = c.state.compare_exchange(state::BUSY, s, AcqRel, Relaxed);
            return;
        }
        // Threads that were inside a call died there.
        for w in [&c.tx.lock, &c.rx.lock] {
            w.store(0, Relaxed);
        }
        c.tx.native_calls.store(0, Relaxed);
        c.rx.native_calls.store(0, Relaxed);
        t.count_ended(c);
        free(i);
    }
}

/// Is this process in the pid namespace of the table's process numbers? If not, nobody can tell which holders are
/// alive, and what it inherits counts as shared for good. If /proc does not tell, the namespace is assumed to be the
/// same. Asked after each fork, in the child.
pub fn same_pid_namespace() -> bool {
    let (then, now) = (PID_NS.load(Relaxed), sys::pid_namespace());
    let same = then == 0 || now == 0 || then == now;
    FOREIGN.store(u32::from(!same), Relaxed);
    pids::forked(now, table());
    same
}

/// Copies an entry that no other thread uses.
pub fn copy(from: &Conn, to: &Conn) {
    let (from, to) = (core::ptr::from_ref(from), core::ptr::from_ref(to));
    for w in 0..core::mem::size_of::<Conn>() / 4 {
        // SAFETY: inside the entries, aligned; they consist of atomics.
        let (a, b) = unsafe {
            (
                &*from.cast::<AtomicU32>().add(w),
                &*to.cast::<AtomicU32>().add(w),
            )
        };
        b.store(a.load(Relaxed), Relaxed);
    }
}

fn reset(c: &Conn) {
    // Locks and counts of threads inside are kept: these have not noticed yet that the entry has changed hands.
    let skip = [
        &c.state,
        &c.gen,
        &c.tx.lock,
        &c.tx.native_calls,
        &c.rx.lock,
        &c.rx.native_calls,
    ]
    .map(|a| core::ptr::from_ref::<AtomicU32>(a) as usize);
    let base = core::ptr::from_ref(c) as usize;
    for w in 0..core::mem::size_of::<Conn>() / 4 {
        let p = base + w * 4;
        if !skip.contains(&p) {
            // SAFETY: inside the entry, aligned; the whole entry consists of atomics, and it is
            // BUSY, so nobody else uses it.
            unsafe { (*(p as *const AtomicU32)).store(0, Relaxed) };
        }
    }
}

/// Gives an entry back. The caller has ended its lane.
pub fn free(i: u32) {
    let c = conn(i);
    c.state.store(state::BUSY, Relaxed);
    c.flags.store(0, Relaxed);
    c.gen.fetch_add(1, Release);
    c.state.store(state::FREE, Release);
    remember(i);
}

/// Records why the connection is (or stays) on TCP.
pub fn set_reason(c: &Conn, r: Reason) {
    c.reason.store(r.code(), Relaxed);
}

/// No promotion now: the next attempt comes after `ms` milliseconds.
pub fn later(c: &Conn, r: Reason, ms: u64) {
    set_reason(c, r);
    c.not_before_ms.store(sys::now_ms() + ms, Relaxed);
}

/// The connection is never promoted again.
pub fn disqualify(c: &Conn, r: Reason) {
    set_reason(c, r);
    let left = if r == Reason::Left { flag::LEFT } else { 0 };
    c.flags.fetch_or(flag::DISQUALIFIED | left, Relaxed);
}

/// Fills in what `ss` shows: inode, owner, addresses. This takes three system calls, so it is done only for
/// connections that live long enough to be considered.
pub fn name(i: u32, fd: i32) {
    let c = conn(i);
    if c.flags.load(Relaxed) & flag::NAMED != 0 {
        return;
    }
    if let Ok((ino, uid)) = sys::inode(fd) {
        c.inode.store(ino, Relaxed);
        c.uid.store(uid, Relaxed);
    }
    for (peer, to) in [(false, &c.local), (true, &c.peer)] {
        if let Ok(ss) = sys::sockaddr(fd, peer) {
            let (ip, port) = match i32::from(ss.ss_family) {
                libc::AF_INET => {
                    // SAFETY: the family says that this is a sockaddr_in, which fits the storage.
                    let a = unsafe { &*(&raw const ss).cast::<libc::sockaddr_in>() };
                    let v4 = std::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
                    (v4.to_ipv6_mapped().octets(), u16::from_be(a.sin_port))
                }
                libc::AF_INET6 => {
                    // SAFETY: as above, for sockaddr_in6.
                    let a = unsafe { &*(&raw const ss).cast::<libc::sockaddr_in6>() };
                    (a.sin6_addr.s6_addr, u16::from_be(a.sin6_port))
                }
                _ => continue,
            };
            to.store(ip, u32::from(ss.ss_family), port);
        }
    }
    c.flags.fetch_or(flag::NAMED, Release);
}

/// Reads from the kernel whether the application has made the socket non-blocking.
pub fn sync_nonblock(c: &Conn, fd: i32) {
    if let Ok(f) = sys::fcntl(fd, libc::F_GETFL, 0) {
        _ = match f & libc::O_NONBLOCK != 0 {
            true => c.flags.fetch_or(flag::NONBLOCK, Relaxed),
            false => c.flags.fetch_and(!flag::NONBLOCK, Relaxed),
        };
    }
}

/// Is this a vfork child, which shares our memory but has a descriptor table of its own?
pub fn is_vfork_child() -> bool {
    table().is_some() && sys::getpid() != pids::pid()
}
