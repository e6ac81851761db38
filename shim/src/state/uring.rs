//! io_uring: the application's rings, as far as they are made with libc's `syscall`.
//!
//! For descriptors that do not concern the shim a ring works unchanged. Requests that are about to be submitted are
//! inspected in the ring's own memory, which is mapped here a second time until the application closes the ring.
//! Rings that a kernel thread polls for requests (SQPOLL) are not inspected.

use crate::state::fdtab;
use crate::sys::{self, lock};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};
use lane::num;

const RINGS: usize = 1024;
const SETUP_IOPOLL: u32 = 1;
const SETUP_SQPOLL: u32 = 1 << 1;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_NO_MMAP: u32 = 1 << 14;
const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// All flags up to the last one above, and one about completions (CQE_MIXED). Unknown flags may change the layout of
/// requests, as SQE_MIXED and SQ_REWIND do.
const SETUP_KNOWN: u32 = ((1 << 17) - 1) | (1 << 18);
const OFF_SQES: usize = 0x1000_0000;

/// `struct io_uring_params`, as the kernel has filled it in.
#[repr(C)]
pub struct Params {
    sq_entries: u32,
    _cq_entries: u32,
    flags: u32,
    _other: [u32; 7],
    sq: Offsets,
    cq: Offsets,
}

/// `struct io_sqring_offsets`; of `struct io_cqring_offsets` only the last member is used.
#[repr(C)]
struct Offsets {
    head: u32,
    tail: u32,
    _mask: u32,
    _entries: u32,
    _flags: u32,
    _dropped: u32,
    array: u32,
    _resv: u32,
    user_addr: u64,
}

/// The beginning of `struct io_uring_sqe`.
#[repr(C)]
pub struct Sqe {
    pub opcode: u8,
    pub flags: u8,
    pub ioprio: u16,
    pub fd: i32,
    pub off: u64,
    pub addr: u64,
    pub len: u32,
    pub op_flags: u32,
    pub user_data: u64,
    pub buf_index: u16,
    pub personality: u16,
    pub splice_fd_in: i32,
    rest: [u64; 2],
}

/// One ring. All-zero is a free entry.
struct Ring {
    refs: AtomicU32,
    /// What is mapped here: the ring (0 bytes: the memory is the application's own) and the requests.
    ring: AtomicPtr<u8>,
    ring_bytes: AtomicUsize,
    sqes: AtomicPtr<u8>,
    sqes_bytes: AtomicUsize,
    entries: AtomicU32,
    /// Distance in bytes from one request to the next.
    stride: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    /// Offset of the ring's index array; 0: it has none.
    array: AtomicU32,
    /// Position up to which requests have been looked at.
    seen: AtomicU32,
}

static TABLE: AtomicPtr<Ring> = AtomicPtr::new(core::ptr::null_mut());

fn at(i: u32) -> Option<&'static Ring> {
    let t = TABLE.load(Acquire);
    // SAFETY: null, or RINGS zero-initialised entries that stay mapped; masked in bounds.
    (!t.is_null()).then(|| unsafe { &*t.add(i as usize & (RINGS - 1)) })
}

fn init() -> bool {
    if TABLE.load(Acquire).is_null() {
        let bytes = RINGS * core::mem::size_of::<Ring>();
        let Ok(p) = sys::map_private(bytes) else {
            return false;
        };
        // Release: the table is initialised before other threads find it.
        let won = TABLE.compare_exchange(core::ptr::null_mut(), p.cast(), AcqRel, Acquire);
        if won.is_err() {
            sys::unmap(p, bytes);
        }
    }
    true
}

/// A ring was made. Returns its index in the table; `None`: it is not inspected.
pub fn made(fd: i32, p: &Params) -> Option<u32> {
    // Rings without a descriptor of their own, or emptied by a kernel thread, cannot be inspected. IOPOLL rings take
    // no requests that concern the shim.
    let unseen = SETUP_SQPOLL | SETUP_IOPOLL | SETUP_REGISTERED_FD_ONLY | !SETUP_KNOWN;
    if p.flags & unseen != 0 || !init() {
        return None;
    }
    let (n, r) = (0..num::small(RINGS))
        .filter_map(|i| Some((i, at(i)?)))
        .find(|(_, r)| r.refs.compare_exchange(0, 1, AcqRel, Relaxed).is_ok())?;
    let stride = if p.flags & SETUP_SQE128 != 0 { 128 } else { 64 };
    let entries = p.sq_entries as usize;
    let array = match p.flags & SETUP_NO_SQARRAY {
        0 => p.sq.array,
        _ => 0,
    };
    let end = p.sq.head.max(p.sq.tail) as usize + 4;
    let (ring_bytes, sqes_bytes) = (end.max(array as usize + entries * 4), entries * stride);
    let (ring, sqes, mapped) = if p.flags & SETUP_NO_MMAP != 0 {
        (p.cq.user_addr as *mut u8, p.sq.user_addr as *mut u8, false)
    } else {
        let maps = sys::map_at(fd, ring_bytes, 0).and_then(|a| {
            Ok((
                a,
                sys::map_at(fd, sqes_bytes, OFF_SQES).inspect_err(|_| sys::unmap(a, ring_bytes))?,
            ))
        });
        let Ok((a, b)) = maps else {
            r.refs.store(0, Release);
            return None;
        };
        (a, b, true)
    };
    let bytes = |n| if mapped { n } else { 0 };
    r.ring.store(ring, Relaxed);
    r.ring_bytes.store(bytes(ring_bytes), Relaxed);
    r.sqes.store(sqes, Relaxed);
    r.sqes_bytes.store(bytes(sqes_bytes), Relaxed);
    r.entries.store(p.sq_entries, Relaxed);
    r.stride.store(num::small(stride), Relaxed);
    r.head.store(p.sq.head, Relaxed);
    r.tail.store(p.sq.tail, Relaxed);
    r.array.store(array, Relaxed);
    r.seen.store(0, Release);
    Some(n)
}

pub fn duplicated(i: u32) {
    if let Some(r) = at(i) {
        r.refs.fetch_add(1, Relaxed);
    }
}

/// A descriptor of the ring is about to be closed: our mapping must not keep the ring alive.
pub fn closed(i: u32) {
    let Some(r) = at(i) else { return };
    // The entry is free only when the mapping is gone.
    if r.refs.load(Acquire) > 1 {
        r.refs.fetch_sub(1, AcqRel);
        return;
    }
    for (p, n) in [(&r.ring, &r.ring_bytes), (&r.sqes, &r.sqes_bytes)] {
        let (p, n) = (p.swap(core::ptr::null_mut(), Relaxed), n.swap(0, Relaxed));
        if n > 0 {
            sys::unmap(p, n);
        }
    }
    r.refs.store(0, Release);
}

/// Calls `f`, in order, with each of the next `to_submit` requests that was not inspected yet. A request that is
/// submitted again because a submission stopped short is inspected only once.
pub fn each_new(i: u32, to_submit: u32, mut f: impl FnMut(&mut Sqe)) {
    let Some(r) = at(i) else { return };
    let (ring, sqes) = (r.ring.load(Relaxed), r.sqes.load(Relaxed));
    let (entries, stride) = (r.entries.load(Relaxed), r.stride.load(Relaxed));
    if ring.is_null() || !entries.is_power_of_two() {
        return;
    }
    // SAFETY: offsets that the kernel gave for this ring, inside what is mapped.
    let word = |offset: u32| unsafe { &*ring.add(offset as usize).cast::<AtomicU32>() };
    let (from, to) = loop {
        // Acquire: pairs with the application's store, after which the requests are as they are to be.
        let tail = word(r.tail.load(Relaxed)).load(Acquire);
        let head = word(r.head.load(Relaxed)).load(Acquire);
        let n = tail.wrapping_sub(head).min(to_submit).min(entries);
        let to = head.wrapping_add(n);
        let seen = r.seen.load(Relaxed);
        let from = match seen.wrapping_sub(head) {
            ahead if ahead > entries => head, // requests were submitted in a way that we did not see
            ahead if ahead >= n => return,
            _ => seen,
        };
        if r.seen.compare_exchange(seen, to, AcqRel, Relaxed).is_ok() {
            break (from, to);
        }
    };
    let mut p = from;
    while p != to {
        let slot = p & (entries - 1);
        let index = match r.array.load(Relaxed) {
            0 => slot,
            array => word(array + slot * 4).load(Relaxed),
        };
        if index < entries {
            // SAFETY: one of `entries` requests; they are the application's to write until it submits
            // them, which is what it is doing now, in this call.
            f(unsafe { &mut *sqes.add((index * stride) as usize).cast::<Sqe>() });
        }
        p = p.wrapping_add(1);
    }
}

static EXAMPLE_LOCK: AtomicU32 = AtomicU32::new(0);
static EXAMPLE: AtomicI32 = AtomicI32::new(-1);
static MEMBER: AtomicI32 = AtomicI32::new(-1);

/// An epoll set that has one member, and that member: for requests that the kernel is to answer with a known error.
pub fn example() -> Option<(i32, i32)> {
    let _g = lock::lock(&EXAMPLE_LOCK)?;
    if EXAMPLE.load(Relaxed) < 0 {
        let set = fdtab::hide(sys::epoll_create().ok()?);
        let member = sys::eventfd().map(fdtab::hide);
        let made = member.and_then(|m| {
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, m, 0, 0)?;
            Ok(m)
        });
        match made {
            Ok(m) => {
                MEMBER.store(m, Relaxed);
                EXAMPLE.store(set, Relaxed);
            }
            Err(_) => {
                fdtab::close_ours(member.unwrap_or(-1));
                fdtab::close_ours(set);
            }
        }
    }
    let set = EXAMPLE.load(Relaxed);
    (set >= 0).then(|| (set, MEMBER.load(Relaxed)))
}
