//! Link groups as this process has them mapped, and the ring memory in our own areas.
//!
//! The table is private to the process. After a fork, the child's copy still shows the same mappings, which the
//! child uses only to take inherited lanes down.

use crate::state::fdtab;
use crate::state::unanswered::Unanswered;
use crate::sys::{self, lock, pids};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use lane::abi::{
    Loc, LocWord, Private, CHUNKS, LANES, RING_FAST_LOG2, RING_LOG2_MAX, RING_LOG2_MIN,
};
use lane::half::Area;
use lane::num;
use std::sync::OnceLock;

/// Link groups per process.
pub const LINK_GROUPS: usize = 1024;
/// Threads that can sleep on lanes at the same time, each with a wake-up of its own.
pub const WAITERS: usize = 4096;
/// Epoll sets per process that may carry lanes.
pub const SETS: usize = 1024;

const CLASSES: usize = (RING_LOG2_MAX - RING_LOG2_MIN + 1) as usize;
const FREE_PER_CLASS: usize = LANES;

/// Ring memory in the data chunks of our own area.
struct Arena {
    lock: AtomicU32,
    /// Chunks that the other client has mapped.
    ready: AtomicU64,
    /// The chunk from which rings are cut now, and its next free page.
    chunk: AtomicU32,
    page: AtomicU32,
    /// When another chunk was asked for (ms, with the lowest bit set); 0: none is asked for.
    asked: AtomicU32,
    count: [AtomicU32; CLASSES],
    free: [[Private<LocWord>; FREE_PER_CLASS]; CLASSES],
}

/// Number of vain rings after which a link group is muted for a while.
const VAIN_MAX: u32 = 64;
/// Longest time for which a link group is muted, in ms.
const MUTE_MAX_MS: u64 = 8;

/// Milliseconds between two requests for the same chunk.
const ASK_MS: u32 = 1000;

/// One side of a link group. Zeroed memory is a free slot.
pub struct LinkGroup {
    pub id: AtomicU64,
    pub side: AtomicU32,
    /// The process that mapped it; children inherit the mapping.
    initiator: AtomicU32,
    /// 0 free, 1 in use, 2 the other client is gone.
    pub state: AtomicU32,
    /// Not 0: the other client is the daemon, and the link group's lanes lead to another node.
    pub remote: AtomicU32,
    /// Not 0: that daemon is dead.
    dead: AtomicU32,
    /// How often the other client rang, or announced news, for nothing since the last byte or event.
    vain: AtomicU32,
    /// Until when (ns) its doorbell and counters are ignored because of that.
    muted_until: AtomicU64,
    /// Shutdowns of both directions for which the other client did not do its part, nor anybody in its stead.
    pub unanswered: Unanswered,
    pub own: Area,
    pub peer: Area,
    /// Our end of the doorbell + 1 (0: none).
    bell: AtomicI32,
    /// The waiter (index + 1) that polls the doorbell for all threads.
    pub leader: AtomicU32,
    /// Threads of this process asleep on the link group.
    pub waiters: [AtomicU64; WAITERS / 64],
    /// Epoll sets of this process that have lanes on the link group.
    pub sets: [AtomicU64; SETS / 64],
    arena: Arena,
    /// Lanes that we have finished with, which the daemon could not be told because its queue was full.
    pending_done: [AtomicU64; LANES / 64],
    /// Rings of each lane slot (newest, and the one before), to be freed at the slot's next use.
    pub rings: [[Private<LocWord>; 2]; LANES],
}

/// What is done for a link group's connections when its other client is gone.
static LISTENER: OnceLock<fn(&LinkGroup)> = OnceLock::new();

/// Sets that function when the library is loaded.
pub fn listen(gone: fn(&LinkGroup)) {
    let _ = LISTENER.set(gone);
}

pub const USED: u32 = 1;
pub const GONE: u32 = 2;

static TABLE: AtomicPtr<LinkGroup> = AtomicPtr::new(core::ptr::null_mut());

fn all() -> &'static [LinkGroup] {
    let p = TABLE.load(Acquire);
    if p.is_null() {
        return &[];
    }
    // SAFETY: LINKS zero-initialised entries, never unmapped; all fields are atomics.
    unsafe { core::slice::from_raw_parts(p, LINK_GROUPS) }
}

pub fn init() -> bool {
    if TABLE.load(Acquire).is_null() {
        let bytes = LINK_GROUPS * core::mem::size_of::<LinkGroup>();
        let Ok(p) = sys::map_private(bytes) else {
            return false;
        };
        if TABLE
            .compare_exchange(core::ptr::null_mut(), p.cast(), AcqRel, Acquire)
            .is_err()
        {
            sys::unmap(p, bytes);
        }
    }
    true
}

/// Slots that were ever used; the others need not be touched.
pub fn seen() -> &'static [LinkGroup] {
    let n = HIGH.load(Acquire);
    all().get(..n).unwrap_or(&[])
}

static HIGH: AtomicUsize = AtomicUsize::new(0);

pub fn find(id: u64, side: u8) -> Option<&'static LinkGroup> {
    seen().iter().find(|l| {
        l.state.load(Acquire) != 0
            && l.id.load(Relaxed) == id
            && l.side.load(Relaxed) == u32::from(side)
    })
}

/// Slot number of a link group.
pub fn index(l: &LinkGroup) -> usize {
    (core::ptr::from_ref(l) as usize - TABLE.load(Relaxed) as usize)
        / core::mem::size_of::<LinkGroup>()
}

/// A slot, whether it is used or not.
pub fn slot(i: usize) -> Option<&'static LinkGroup> {
    all().get(i)
}

pub fn by_index(i: usize) -> Option<&'static LinkGroup> {
    all().get(i).filter(|l| l.state.load(Acquire) != 0)
}

/// Enters a new link group with the first file of our area and with its doorbell, which it takes over.
/// (`family::reap_groups` frees the slots of link groups that are gone.)
pub fn create(id: u64, side: u8, bell: i32, first: i32, bytes: usize, remote: bool) -> bool {
    init();
    let Some(l) = all().iter().find(|l| l.state.load(Relaxed) == 0) else {
        return false;
    };
    let Some(p) = map_first(first, bytes, true, remote) else {
        return false;
    };
    l.id.store(id, Relaxed);
    l.side.store(u32::from(side), Relaxed);
    l.initiator.store(pids::me(), Relaxed);
    l.remote.store(u32::from(remote), Relaxed);
    l.bell.store(fdtab::hide(bell) + 1, Relaxed);
    // SAFETY: just mapped with more than CONTROL_BYTES; stays mapped while the link group is in use.
    unsafe { l.own.set_first(p, bytes) };
    // Chunk 1 counts as mapped by the other client: it has the file mapped when it takes a lane, and before that
    // nothing is put on a ring.
    l.arena.ready.store(1 << 1, Release);
    HIGH.fetch_max(index(l) + 1, AcqRel);
    l.state.store(USED, Release);
    true
}

/// Maps the first file of an area: its control words, and its first data chunk.
fn map_first(fd: i32, bytes: usize, own: bool, remote: bool) -> Option<*mut u8> {
    let data = bytes
        .checked_sub(lane::abi::CONTROL_BYTES)
        .filter(|n| *n > 0)?;
    let p = sys::map(fd, bytes, own).ok()?;
    let ok = !own || !remote || may_be_held(p.wrapping_add(bytes - data), data);
    if !ok {
        sys::unmap(p, bytes);
    }
    ok.then_some(p)
}

/// For rings to another node, the daemon will register the whole chunk with a device, which pins its pages. They
/// are touched here, so that the sender's cgroup is charged. False: there is no memory for them.
fn may_be_held(p: *mut u8, bytes: usize) -> bool {
    sys::populate(p, bytes) != Err(libc::ENOMEM)
}

/// Is there a lane whose end the daemon must still be told?
static PENDING_DONE: AtomicU32 = AtomicU32::new(0);

/// Lock between mapping a further chunk of a peer and forking: see [`LinkGroup::map_further`].
static MAPPING: AtomicU32 = AtomicU32::new(0);

/// Called before a fork, when all connections have counted the child: a mapping in progress finishes first, and a
/// later one sees the count.
pub fn before_fork() {
    drop(lock::lock(&MAPPING));
}

/// In a forked child: what the parent owes the daemon is the parent's to send.
pub fn after_fork() {
    PENDING_DONE.store(0, Relaxed);
    let all = seen().iter().flat_map(|l| &l.pending_done);
    all.for_each(|w| w.store(0, Relaxed));
}

/// Sends what could not be sent before. `tell` returns false if it still cannot be sent; then this does, too.
pub fn send_pending_done(tell: impl Fn(&LinkGroup, u32) -> bool) -> bool {
    if PENDING_DONE.load(Relaxed) == 0 || PENDING_DONE.swap(0, Relaxed) == 0 {
        return true;
    }
    let mut all = true;
    for l in seen().iter().filter(|l| l.state.load(Acquire) != 0) {
        for (k, w) in l.pending_done.iter().enumerate() {
            let mut bits = w.swap(0, Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let lane = num::small(k) * 64 + bit;
                if !tell(l, lane) {
                    l.add_pending_done(lane);
                    all = false;
                }
            }
        }
    }
    all
}

impl LinkGroup {
    /// Does a thread or epoll set of this process still count as sleeper on the link group, or must the daemon still be
    /// told of one of its lanes?
    pub fn is_waited_on(&self) -> bool {
        let sleeps = |c: &lane::abi::Control| c.sleepers.0.load(SeqCst) != 0;
        self.own.control().is_some_and(sleeps)
            || self.waiters.iter().any(|w| w.load(SeqCst) != 0)
            || self.pending_done.iter().any(|w| w.load(Relaxed) != 0)
    }

    /// No connection here uses the link group any more, and no epoll set has its doorbell (`family::retire_group`):
    /// frees its slot, doorbell and memory. The memory is replaced by private zero pages instead of being
    /// unmapped: a thread that still has an old pointer into it must read zeros and not fault.
    pub fn retire(&self) {
        fdtab::close_ours(self.bell.swap(0, Relaxed) - 1);
        for a in [&self.own, &self.peer] {
            a.clear(sys::blank);
        }
        self.leader.store(0, Relaxed);
        self.dead.store(0, Relaxed);
        self.vain.store(0, Relaxed);
        self.unanswered.clear();
        for w in &self.sets {
            w.store(0, Relaxed);
        }
        let a = &self.arena;
        for w in [&a.lock, &a.chunk, &a.page, &a.asked] {
            w.store(0, Relaxed);
        }
        a.ready.store(0, Relaxed);
        for c in &a.count {
            c.store(0, Relaxed);
        }
        for r in self.rings.iter().flatten() {
            r.store(LocWord::NONE, Relaxed);
        }
        for w in &self.pending_done {
            w.store(0, Relaxed);
        }
        self.state.store(0, Release);
    }

    /// Notes that the daemon must still be told that `lane` is done.
    pub fn add_pending_done(&self, lane: u32) {
        if let Some(w) = self.pending_done.get(lane as usize / 64) {
            w.fetch_or(1 << (lane % 64), Relaxed);
            PENDING_DONE.store(1, Relaxed);
        }
    }

    /// Was the link group made by an ancestor of this process? Then its doorbell and its count of sleepers are that
    /// one's.
    pub fn is_inherited(&self) -> bool {
        self.initiator.load(Relaxed) != pids::me()
    }

    #[inline(always)]
    pub fn is_remote(&self) -> bool {
        self.remote.load(Relaxed) != 0
    }

    /// The other client has rung, or incremented a counter. An honest client does so for a reason: bytes, space that
    /// is used afterwards, an end. If it does nothing else, it is looked at less and less often, so that it cannot
    /// keep a waiting thread busy; real news are then found some milliseconds later.
    #[cold]
    pub fn rung(&self) {
        let vain = self.vain.load(Relaxed).saturating_add(1);
        self.vain.store(vain, Relaxed);
        if vain >= VAIN_MAX {
            let ms = u64::from(vain / VAIN_MAX).min(MUTE_MAX_MS);
            self.muted_until
                .store(sys::now_ns() + ms * 1_000_000, Relaxed);
        }
    }

    /// The link group has brought something: bytes, or an event for the application.
    #[inline(always)]
    pub fn moved(&self) {
        if self.vain.load(Relaxed) != 0 {
            self.vain.store(0, Relaxed);
        }
    }

    /// Is the link group to be ignored for the next milliseconds (see [`LinkGroup::rung`])?
    #[inline(always)]
    pub fn is_muted(&self) -> bool {
        self.vain.load(Relaxed) >= VAIN_MAX && sys::now_ns() < self.muted_until.load(Relaxed)
    }

    /// The other client is gone. The first thread that notices it calls the listener.
    pub fn gone(&self) {
        let first = self.state.swap(GONE, AcqRel) != GONE;
        // A daemon that gave the link group up may have taken over directions of ours until it dies.
        let died = self.is_remote() && self.is_dead() && self.dead.swap(1, AcqRel) == 0;
        if first || died {
            if let Some(told) = LISTENER.get() {
                told(self);
            }
        }
    }

    /// Has the other client closed its end of the doorbell, which it does only when it dies or has
    /// nothing left to do with the link group?
    pub fn is_dead(&self) -> bool {
        sys::poll1(self.bell(), 0) & libc::POLLHUP != 0
    }

    /// The doorbell for a sleep to poll; -1 if it must not be polled. The doorbell of a client that is gone for
    /// good would end every sleep at once.
    pub fn audible(&self) -> i32 {
        let gone = self.state.load(Acquire) == GONE;
        let over = gone && (!self.is_remote() || self.dead.load(Acquire) != 0);
        match over {
            true => -1,
            false => self.bell(),
        }
    }

    pub fn bell(&self) -> i32 {
        self.bell.load(Relaxed) - 1
    }

    /// Rings the other client. False: there is no bell any more. (Counted by `port::ring`.)
    pub fn ring(&self) -> bool {
        let fd = self.bell();
        let ours = fd >= 0 && fdtab::is_ours(fd);
        if ours {
            // SAFETY: a descriptor of ours, open while the link group is in use.
            lane::notify::doorbell::ring(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) });
        }
        ours
    }

    pub fn drain_bell(&self) -> lane::notify::doorbell::Drained {
        let fd = self.bell();
        if fd < 0 || !fdtab::is_ours(fd) {
            return lane::notify::doorbell::Drained::Quiet;
        }
        // SAFETY: as in `ring`.
        let d = lane::notify::doorbell::drain(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) });
        if d == lane::notify::doorbell::Drained::Rung {
            self.rung();
        }
        d
    }

    /// Maps the first file of the peer's area. False: it could not be mapped.
    pub fn map_peer(&self, fd: i32, bytes: usize) -> bool {
        let Some(p) = map_first(fd, bytes, false, self.is_remote()) else {
            return false;
        };
        // SAFETY: mapped for `bytes`, and kept so while the link group is in use. The file is sealed, so it cannot
        // shrink under the mapping.
        unsafe { self.peer.set_first(p, bytes) };
        true
    }

    /// Maps a further chunk of our own area (writable) or of the peer's. False: it could not be mapped.
    pub fn map_chunk(&self, own: bool, chunk: u32, fd: i32, bytes: usize) -> bool {
        if !(2..CHUNKS).contains(&(chunk as usize)) {
            return false;
        }
        let area = if own { &self.own } else { &self.peer };
        if area.has_chunk(chunk as usize) {
            return true; // it is sent twice if our answer was late or lost
        }
        let Ok(p) = sys::map(fd, bytes, own) else {
            return false;
        };
        if own && self.is_remote() && !may_be_held(p, bytes) {
            sys::unmap(p, bytes);
            return false;
        }
        // SAFETY: as in `map_peer` (the daemon has made our own files, and seals them when we say that they are
        // mapped).
        unsafe { area.set_chunk(chunk as usize, p, bytes) };
        true
    }

    /// Maps a further chunk of the peer, for rings that grow. Refused while other processes hold an inherited
    /// connection on this link group, because they would not have the ring mapped. False: it is sent again.
    pub fn map_further(
        &self,
        chunk: u32,
        fd: i32,
        bytes: usize,
        is_shared: impl FnOnce() -> bool,
    ) -> bool {
        // A fork first counts its child at the connections, then waits for this lock.
        let Some(_g) = lock::lock(&MAPPING) else {
            return false;
        };
        !is_shared() && self.map_chunk(false, chunk, fd, bytes)
    }

    /// The other client has mapped our chunk: rings may be placed in it.
    pub fn chunk_ready(&self, chunk: u32) {
        if (chunk as usize) < CHUNKS {
            let old = self.arena.ready.fetch_or(1 << chunk, Release);
            if old & 1 << chunk == 0 {
                self.arena.asked.store(0, Relaxed);
            }
        }
    }

    /// Ring memory of `1 << log2` bytes; `None`: there is none now. `want` asks the daemon for another chunk.
    pub fn alloc(&self, log2: u32, want: impl FnOnce(&LinkGroup)) -> Option<Loc> {
        let a = &self.arena;
        let class = log2.checked_sub(RING_LOG2_MIN)? as usize;
        let _g = lock::lock(&a.lock)?;
        let n = a.count.get(class)?.load(Relaxed);
        if n > 0 {
            a.count[class].store(n - 1, Relaxed);
            return a.free[class][n as usize - 1].load(Relaxed).loc();
        }
        let pages = 1u32 << (log2 - 12);
        // (The largest rings leave room for those of the other lanes.)
        let chunks = match log2 > RING_FAST_LOG2 {
            true => CHUNKS / 2,
            false => CHUNKS,
        };
        for _ in 0..CHUNKS {
            let chunk = a.chunk.load(Relaxed).max(1);
            if chunk as usize >= chunks {
                return None;
            }
            a.chunk.store(chunk, Relaxed);
            if a.ready.load(Acquire) & (1 << chunk) == 0 {
                break;
            }
            let per_chunk = num::small(self.own.chunk_len(chunk as usize) / 4096);
            let page = a.page.load(Relaxed);
            if page + pages <= per_chunk {
                a.page.store(page + pages, Relaxed);
                return Some(Loc { chunk, page, log2 });
            }
            a.chunk.store(chunk + 1, Relaxed);
            a.page.store(0, Relaxed);
        }
        // Ask again after a while: the daemon may have refused, or the answer may be lost.
        let (now, asked) = (num::low32(sys::now_ms()) | 1, a.asked.load(Relaxed));
        if asked == 0 || now.wrapping_sub(asked) >= ASK_MS {
            a.asked.store(now, Relaxed);
            want(self);
        }
        None
    }

    pub fn free(&self, loc: Loc) {
        let a = &self.arena;
        let class = (loc.log2 - RING_LOG2_MIN) as usize;
        let Some(_g) = lock::lock(&a.lock) else {
            return;
        };
        let n = a.count[class].load(Relaxed) as usize;
        if n < FREE_PER_CLASS {
            a.free[class][n].store(loc.word(), Relaxed);
            a.count[class].store(num::small(n) + 1, Relaxed);
        }
    }
}
