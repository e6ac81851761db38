//! One call of the application on a connection. A descriptor number is not an identity: another thread may close
//! it while the call sleeps, and it may then stand for something else. In the kernel, a sleeping call keeps its
//! file. Here it *holds* its connection from before its first sleep, and from before it continues after a part of
//! its bytes. A last close then moves the socket to a hidden number, and the last call that lets go finishes that
//! close. Calls that neither sleep nor continue pay two loads.

use crate::state::fdtab;
use crate::state::table::{self, Local, CALLS};
use crate::sys::{lock, real, thread};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};
use lane::family::Conn;
use lane::num;

// Bits of `Local::calls` beside `CALLS`.

/// The last descriptor of the connection is being closed, or was: no call may begin to hold the connection.
const CLOSING: u32 = 1 << 31;
/// That close is left to the last call that holds the connection.
const DEFERRED: u32 = 1 << 30;

/// Who holds what: connection + 1 in the upper half, thread in the lower; 0: free. In the kernel, a call that a
/// handler has interrupted holds nothing, since the thread has left it; so a close in a handler does not count its
/// own thread (`own`).
static HELD: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Hidden descriptors that a call keeps, plus 1; 0: none.
static KEPT: [[AtomicI32; 2]; 256] = [const { [const { AtomicI32::new(0) }; 2] }; 256];
const FILE: usize = 0;
const SOCKET: usize = 1;

/// A call of the application on connection `i`, and what it holds.
pub struct Call {
    /// The number that the application gave.
    given: i32,
    i: u32,
    gen: u32,
    held: bool,
    /// `Local::shuts` and `Local::disconnects` at the time when it began to hold the connection.
    shuts: u32,
    disconnects: u32,
    /// Its place in `HELD`, plus 1; 0: no place was free.
    place: u32,
    /// `struct _pthread_cleanup_buffer`: a thread that is cancelled, or leaves by `longjmp`, lets the connection
    /// go.
    cleanup: MaybeUninit<[usize; 4]>,
}

impl Call {
    /// `None`: the number stands for something else by now. The value must not be moved once it holds.
    #[inline(always)]
    pub fn begin(given: i32, i: u32) -> Option<Call> {
        let gen = table::conn(i).gen.load(Relaxed);
        // Read in this order, so that the generation is that of a connection for which the number stood.
        core::sync::atomic::compiler_fence(SeqCst);
        (fdtab::conn(given) == Some(i)).then_some(Call {
            given,
            i,
            gen,
            held: false,
            shuts: 0,
            disconnects: 0,
            place: 0,
            cleanup: MaybeUninit::uninit(),
        })
    }

    /// A handler may have closed the number since it was looked up, and the number may stand for another
    /// connection now. `None`: it is no connection of ours any more.
    #[inline(always)]
    pub fn of(given: i32, i: u32) -> Option<(Call, u32)> {
        let mut i = i;
        loop {
            match Call::begin(given, i) {
                Some(call) => return Some((call, i)),
                None => i = fdtab::settled(given)?,
            }
        }
    }

    /// A descriptor of the connection. Unless the call holds the connection, or has one of its locks, the
    /// descriptor may be closed and stand for something else at any time.
    #[inline(always)]
    pub fn fd(&self, l: &Local) -> i32 {
        match self.held {
            true => l.fd.load(Relaxed),
            false => self.given,
        }
    }

    /// Has it slept, or continued after a part? Then its native calls use a descriptor copy of their own.
    #[inline(always)]
    pub fn holds(&self) -> bool {
        self.held
    }

    /// Has this process called `shutdown` since it holds the connection?
    pub fn was_shut(&self, l: &Local) -> bool {
        self.held && l.shuts.load(SeqCst) != self.shuts
    }

    /// The count by which a sleep in the kernel notices a [`disconnect`](crate::process::disconnects).
    pub fn disconnects(&self) -> u32 {
        self.disconnects
    }

    /// Has this process called `connect(AF_UNSPEC)` since it holds the connection?
    pub fn was_disconnected(&self, l: &Local) -> bool {
        self.held && l.disconnects.load(SeqCst) != self.disconnects
    }

    /// Is the entry still that of our connection? Under one of its locks, or counted as native, the answer stays
    /// true, because a last close takes both locks.
    #[inline(always)]
    pub fn current(&self, c: &Conn, l: &Local) -> bool {
        c.gen.load(Relaxed) == self.gen && (self.held || l.calls.load(Relaxed) & CLOSING == 0)
    }

    /// The same after a native call, which may have slept with the kernel's own reference.
    #[inline(always)]
    pub fn counts(&self, c: &Conn) -> bool {
        c.gen.load(Relaxed) == self.gen
    }

    /// Holds the connection until the call ends. False: it was closed before.
    #[cold]
    pub fn hold(&mut self, c: &Conn, l: &Local) -> bool {
        if self.held {
            return self.counts(c);
        }
        // SYNC hold: we count ourselves in, then look whether it is closed; a closer marks it as closed, then
        // looks at the count (`close`).
        let before = l.calls.fetch_add(1, SeqCst);
        if before & CLOSING != 0 || c.gen.load(SeqCst) != self.gen {
            leave(self.i);
            return false;
        }
        self.place = place(self.i);
        self.held = true;
        self.shuts = l.shuts.load(SeqCst);
        self.disconnects = l.disconnects.load(SeqCst);
        let what = what(self.place, self.i);
        // SAFETY: 32 bytes, as large as the C library's; taken back before this frame ends.
        unsafe { real::cleanup_push(self.cleanup.as_mut_ptr().cast(), let_go, what) };
        true
    }

    /// A descriptor for native calls of a call that has slept or continues: a copy of our own, because another
    /// thread may close the original between the lookup of the number and its use. `None`: the connection was
    /// closed.
    #[cold]
    pub fn native(&mut self, c: &Conn, l: &Local) -> Option<i32> {
        if !self.hold(c, l) {
            return None;
        }
        let _g = lock::lock(&c.tx.lock); // the number stays valid
        Some(self.keep(SOCKET, l.fd.load(Relaxed)))
    }

    /// A copy of the file that a call in several parts reads from, for the same reason.
    pub fn file(&self, fd: i32) -> i32 {
        self.keep(FILE, fd)
    }

    fn keep(&self, which: usize, fd: i32) -> i32 {
        let Some(kept) = KEPT.get((self.place as usize).wrapping_sub(1)) else {
            return fd; // there was no place in `HELD`
        };
        match kept[which].load(Relaxed) {
            0 => match fdtab::hidden_copy(fd) {
                Some(copy) => {
                    kept[which].store(copy + 1, Relaxed);
                    copy
                }
                None => fd, // there are no more descriptors
            },
            copy => copy - 1,
        }
    }
}

impl Drop for Call {
    #[inline(always)]
    fn drop(&mut self) {
        if self.held {
            // SAFETY: pushed by `hold`, in this frame; what came after it has been popped.
            unsafe { real::cleanup_pop(self.cleanup.as_mut_ptr().cast()) };
            crate::preserving_errno(|| let_go(what(self.place, self.i)));
        }
    }
}

/// Takes a place in `HELD` and returns it plus 1; 0: none is free.
fn place(i: u32) -> u32 {
    let me = u64::from(i + 1) << 32 | u64::from(thread::tid());
    let free = |w: &AtomicU64| w.compare_exchange(0, me, Acquire, Relaxed).is_ok();
    HELD.iter().position(free).map_or(0, |p| num::small(p) + 1)
}

/// The argument of [`let_go`].
fn what(place: u32, i: u32) -> usize {
    num::size(u64::from(place) << 32 | u64::from(i))
}

/// The end of a call that held a connection: place in the upper half, connection in the lower.
#[cold]
extern "C" fn let_go(what: usize) {
    let _inside = thread::enter(); // (a cancelled thread is not inside)
    let place = (what >> 32).wrapping_sub(1);
    if let (Some(w), Some(k)) = (HELD.get(place), KEPT.get(place)) {
        k.iter()
            .for_each(|k| fdtab::close_ours(k.swap(0, Relaxed) - 1));
        w.store(0, Release); // the place is free, with nothing kept
    }
    leave(num::low32(what as u64));
}

fn leave(i: u32) {
    let calls = &table::local(i).calls;
    // (In a forked child, the count is 0.)
    let one_less = |v: u32| (v & CALLS != 0).then(|| v - 1);
    let _ = calls.fetch_update(SeqCst, SeqCst, one_less);
    // Several threads may find that they were the last: one of them finishes the close.
    if calls
        .compare_exchange(CLOSING | DEFERRED, CLOSING, SeqCst, Relaxed)
        .is_ok()
    {
        if let Some(l) = super::LISTENER.get() {
            (l.finish_close)(i);
        }
    }
}

/// The last descriptor is about to be closed, with the locks of both directions held: from now on no call may
/// begin to hold the connection. True if other calls hold it.
pub fn close(i: u32, l: &Local) -> bool {
    let held = l.calls.fetch_or(CLOSING, SeqCst) & CALLS; // SYNC hold
    held > own(i)
}

/// Has that been done? Under one of its locks, the answer stays false.
pub fn is_closing(l: &Local) -> bool {
    l.calls.load(SeqCst) & CLOSING != 0
}

/// Leaves the close to the last call that holds the connection. False: no call holds it any more.
pub fn defer(l: &Local) -> bool {
    let some = |v: u32| (v & CALLS != 0).then_some(v | DEFERRED);
    l.calls.fetch_update(SeqCst, SeqCst, some).is_ok()
}

/// Leaves the close to the closing call itself, which holds the connection until [`closed`].
pub fn defer_to_self(i: u32, l: &Local) -> usize {
    l.calls.fetch_add(1, SeqCst);
    defer(l);
    what(place(i), i)
}

pub fn closed(what: usize) {
    let_go(what);
}

/// The number of calls of this thread on the connection, which the handler that now runs has interrupted.
fn own(i: u32) -> u32 {
    let me = u64::from(i + 1) << 32 | u64::from(thread::tid());
    let mine = HELD.iter().filter(|w| w.load(Relaxed) == me);
    num::small(mine.count())
}

/// In a forked child: none of the parent's calls runs here, so what was kept for them is closed.
pub fn after_fork() {
    for k in KEPT.iter().flatten() {
        fdtab::close_ours(k.swap(0, Relaxed) - 1);
    }
    for w in &HELD {
        let what = w.swap(0, Relaxed);
        if what != 0 {
            let l = table::local((what >> 32) as u32 - 1);
            if l.calls.swap(0, Relaxed) & DEFERRED != 0 {
                fdtab::close_ours(l.fd.load(Relaxed));
            }
        }
    }
}
