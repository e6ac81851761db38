//! Registrations: connections in sets.
//!
//! Each registration is in a list of its connection; the list has a lock of its own. A registration begins and ends
//! under the lock of its set. A thread that finds it in the list without that lock checks it again under the lock
//! ([`is_of`]): it may have ended, or belong to another connection by now.

use super::*;
use crate::state::{fdtab, table};
use lane::abi::{Cursor, Private, TcpPos};

pub const REGS: usize = 1 << 17;

/// The registration of a connection in a set.
pub struct Reg {
    pub set: AtomicU32,
    pub conn: AtomicU32,
    pub fd: AtomicI32,
    pub mask: AtomicU32,
    pub data: AtomicU64,
    /// Value of `Set::told` when the application last armed it: has it been told since then that TCP has space?
    pub armed_at: AtomicU32,
    pub flags: AtomicU32,
    /// Events of the TCP socket that nobody has checked yet.
    pub tcp: AtomicU32,
    /// The peer's head when the registration last had news.
    pub last_head: Private<Cursor>,
    /// Position of TCP's sending direction when the registration entered the inner set: see `members::is_old`.
    pub tcp_pos: Private<TcpPos>,
    /// Slot of the link group in the set × `COUNTERS` + number of the lane's counter.
    pub slot: AtomicU32,
    pub next_conn: AtomicU32,
    pub next_counter: AtomicU32,
    pub next_queue: AtomicU32,
}

pub static REG_TABLE: AtomicPtr<Reg> = AtomicPtr::new(core::ptr::null_mut());
pub static REG_LOCK: AtomicU32 = AtomicU32::new(0);
pub static REG_FREE: AtomicU32 = AtomicU32::new(0);
pub static REG_USED: AtomicU32 = AtomicU32::new(0);

pub const TABLE_BYTES: usize = REGS * core::mem::size_of::<Reg>();

/// An address in this library, as a value that the application does not use.
pub fn address() -> u64 {
    &raw const REG_FREE as u64
}

/// Registration by index + 1.
pub fn reg_at(i: u32) -> &'static Reg {
    // SAFETY: only reached with indices from `alloc`, after the table was made; index 0 is never dereferenced
    // as "none" by callers, and stays in bounds.
    unsafe {
        &*REG_TABLE
            .load(Acquire)
            .add(i.wrapping_sub(1) as usize & (REGS - 1))
    }
}

/// All registrations that were ever used.
pub fn all() -> impl Iterator<Item = (u32, &'static Reg)> {
    (1..=REG_USED.load(Relaxed)).map(|r| (r, reg_at(r)))
}

pub fn alloc() -> Option<u32> {
    let _g = lock::lock(&REG_LOCK)?;
    let f = REG_FREE.load(Relaxed);
    if f != 0 {
        REG_FREE.store(reg_at(f).next_conn.load(Relaxed), Relaxed);
        return Some(f);
    }
    let n = REG_USED.load(Relaxed) + 1;
    if n as usize > REGS {
        return None;
    }
    REG_USED.store(n, Relaxed);
    Some(n)
}

pub fn free(r: u32) {
    let fd = reg_at(r).fd.swap(-1, Relaxed);
    if fdtab::get(fd) == fdtab::Fd::Ours {
        fdtab::close_ours(fd); // see `copy_closed`
    }
    if let Some(_g) = lock::lock(&REG_LOCK) {
        let reg = reg_at(r);
        reg.conn.store(0, Relaxed);
        reg.set.store(0, Relaxed);
        reg.flags.store(0, Relaxed);
        // Release: a thread that follows this link group out of its list sees that the registration has no connection
        // (`each`).
        reg.next_conn.store(REG_FREE.load(Relaxed), Release);
        REG_FREE.store(r, Relaxed);
    }
}

/// Does the registration still belong to this set and connection? Set lock held.
pub fn is_of(r: u32, set: u32, conn: u32) -> bool {
    let reg = reg_at(r);
    reg.set.load(Relaxed) == set + 1 && reg.conn.load(Relaxed) == conn + 1
}

/// Enters a registration, whose other fields are filled in, in its connection's list. Set lock held.
pub fn begin(r: u32, set: u32, conn: u32) {
    let (reg, l) = (reg_at(r), table::local(conn));
    reg.set.store(set + 1, Relaxed);
    reg.conn.store(conn + 1, Relaxed);
    if let Some(_g) = lock::lock(&l.regs_lock) {
        reg.next_conn.store(l.regs.load(Relaxed), Relaxed);
        l.regs.store(r, Release); // pairs with the Acquire in `each`
    }
}

/// Ends a registration: takes it out of its connection's list and frees it. Set lock held; it is not active, and was
/// found under the lock to be this connection's.
pub fn end(r: u32, conn: u32) {
    let l = table::local(conn);
    if let Some(_g) = lock::lock(&l.regs_lock) {
        let mut at = &l.regs;
        loop {
            let k = at.load(Relaxed);
            if k == 0 {
                break;
            }
            if k == r {
                at.store(reg_at(r).next_conn.load(Relaxed), Release);
                break;
            }
            at = &reg_at(k).next_conn;
        }
    }
    free(r);
}

/// In a forked child, which has no other thread: registrations that the kernel's sets contain are forgotten here,
/// since the kernel reports them to the child. The parent's active ones are kept as INHERITED, in case the child uses
/// the set.
pub fn inherit_all() {
    REG_LOCK.store(0, Relaxed);
    for (_, reg) in all() {
        let c = reg.conn.load(Relaxed);
        if c != 0 {
            table::local(c - 1).regs.store(0, Relaxed);
        }
    }
    for (r, reg) in all() {
        let (c, set) = (reg.conn.load(Relaxed), reg.set.load(Relaxed));
        if c == 0 {
            continue;
        }
        let flags = reg.flags.load(Relaxed);
        let spent = flags & ACTIVE != 0 && flags & DISABLED != 0;
        if flags & PARKED != 0 || flags & (ACTIVE | ABSENT | INHERITED) == 0 {
            free(r);
            continue;
        }
        let absent = spent || flags & ABSENT != 0;
        reg.flags
            .store(if absent { ABSENT } else { INHERITED }, Relaxed);
        begin(r, set - 1, c - 1);
    }
}

/// Calls `f(registration, its set)` for each registration of a connection; `f` has to take the set's lock itself. If
/// one ends meanwhile, here or in another thread, its link group leads elsewhere: then the walk starts again, so `f`
/// may see one twice. (The walk is bounded, in case a bug has spoiled the list.)
pub fn each(conn: u32, mut f: impl FnMut(u32, u32)) {
    'walk: for _ in 0..REGS {
        let mut r = table::local(conn).regs.load(Acquire);
        while r != 0 {
            let reg = reg_at(r);
            if let Some(set) = reg.set.load(Relaxed).checked_sub(1) {
                f(r, set);
            }
            let next = reg.next_conn.load(Acquire);
            if reg.conn.load(Relaxed) != conn + 1 {
                continue 'walk;
            }
            r = next;
        }
        return;
    }
}

/// The connection's registration in a set, by its descriptor.
pub fn find(conn: u32, set: u32, fd: i32) -> Option<u32> {
    let mut found = None;
    each(conn, |r, s| {
        if s == set && reg_at(r).fd.load(Relaxed) == fd {
            found = Some(r);
        }
    });
    found
}
