//! The calling thread: its id, whether it is inside a hook, and what handlers that ran in it mean for the call that
//! they interrupted. See `signals`.

use crate::sys::{self, pages, real};
use core::cell::Cell;
use core::sync::atomic::{compiler_fence, Ordering::*};
use lane::num;
use lane::prim::ticks;

/// A place among the sleepers, and a function that a handler calls when it runs there: other threads have to do what
/// this thread would do. The function returns true if it did something for them.
pub type Place = (usize, Leave);
/// See [`Place`].
pub type Leave = fn(usize) -> bool;

/// State that a thread shares with the handlers that interrupt it. Only this thread uses it.
struct Thread {
    /// Not 0: the thread is inside a hook, and handlers are deferred.
    depth: Cell<u32>,
    /// Not 0: a signal is deferred to the end of the hook, and `mask` is the mask to restore then.
    deferred: Cell<u32>,
    mask: Cell<u64>,
    /// Number of handlers that ran in this thread, and of those without SA_RESTART.
    ran: Cell<u32>,
    cut: Cell<u32>,
    /// The same counts when the hook was entered.
    entry_ran: Cell<u32>,
    entry_cut: Cell<u32>,
    /// Eventfd that ends the coming sleep, and whether only handlers without SA_RESTART write to it.
    wake: Cell<i32>,
    wake_cut_only: Cell<bool>,
    /// Its place among the sleepers, plus 1; 0: none. (One word, because a handler may run between any two
    /// instructions.)
    place: Cell<u32>,
    /// Gives up what the thread does for the others at that place.
    leave: Cell<Option<Leave>>,
    /// The thread's id; 0: not known yet. (Here, so that a hook looks up only this one thread-local record.)
    tid: Cell<u32>,
    /// The bit of the fork that it makes: see [`fork_bit`].
    fork: Cell<u64>,
}

thread_local! {
    // Const-initialised and without a destructor: plain thread-local storage, no allocation.
    static THREAD: Thread = const {
        Thread {
            depth: Cell::new(0),
            deferred: Cell::new(0),
            mask: Cell::new(0),
            ran: Cell::new(0),
            cut: Cell::new(0),
            entry_ran: Cell::new(0),
            entry_cut: Cell::new(0),
            wake: Cell::new(-1),
            wake_cut_only: Cell::new(false),
            place: Cell::new(0),
            leave: Cell::new(None),
            tid: Cell::new(0),
            fork: Cell::new(0),
        }
    };
}

#[inline(always)]
fn thread() -> &'static Thread {
    THREAD.with(|t| {
        let t: *const Thread = t;
        // SAFETY: no destructor: it lives as long as the thread, whose code alone gets at it here.
        unsafe { &*t }
    })
}

/// This thread's id, cached.
#[inline(always)]
pub fn tid() -> u32 {
    let t = &thread().tid;
    match t.get() {
        0 => {
            t.set(sys::gettid());
            t.get()
        }
        id => id,
    }
}

/// This thread begins a fork that has this bit; 0: it has ended.
pub fn begin_fork(bit: u64) {
    thread().fork.set(bit);
}

/// The bit of the fork that this thread makes; in the child, of the one that made it.
pub fn fork_bit() -> u64 {
    thread().fork.get()
}

/// In a forked child: its only thread has another id.
pub fn forget_tid() {
    thread().tid.set(0);
}

/// The thread is inside a hook as long as this lives.
pub struct Inside(&'static Thread);

/// From here on, handlers are deferred.
#[inline(always)]
pub fn enter() -> Inside {
    let t = thread();
    let depth = t.depth.get();
    t.depth.set(depth + 1);
    // The compiler must not move later accesses before this store. The processor shows a thread its own program
    // order.
    compiler_fence(SeqCst);
    if depth == 0 {
        t.entry_ran.set(t.ran.get());
        t.entry_cut.set(t.cut.get());
        t.wake.set(-1);
    }
    Inside(t)
}

impl Drop for Inside {
    #[inline(always)]
    fn drop(&mut self) {
        compiler_fence(SeqCst);
        let depth = self.0.depth.get() - 1;
        self.0.depth.set(depth);
        compiler_fence(SeqCst);
        if depth == 0 && self.0.deferred.get() != 0 {
            deliver(self.0);
        }
    }
}

/// Runs `f`, which may block, as if outside of the hook: handlers run, hooks that they call work, and they may leave
/// by `siglongjmp`. Nothing of ours may be locked or half done.
#[inline(always)]
pub fn outside<T>(f: impl FnOnce() -> T) -> T {
    let t = thread();
    let (depth, ran, cut) = (t.depth.get(), t.entry_ran.get(), t.entry_cut.get());
    compiler_fence(SeqCst);
    t.depth.set(0);
    compiler_fence(SeqCst);
    if t.deferred.get() != 0 {
        deliver(t);
    }
    let r = f();
    compiler_fence(SeqCst);
    t.depth.set(depth);
    compiler_fence(SeqCst);
    // Hooks that handlers called have changed these.
    t.entry_ran.set(ran);
    t.entry_cut.set(cut);
    t.wake.set(-1);
    r
}

/// Delivers signals that only the mask of the application's wait lets in, where the kernel would deliver them during
/// its sleep but the shim has other things to do first. True: there was one, and errno is EINTR.
#[inline(always)]
pub fn let_in(mask: *const libc::sigset_t) -> bool {
    !mask.is_null() && let_in_masked(mask)
}

#[cold]
fn let_in_masked(mask: *const libc::sigset_t) -> bool {
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: no entries; the mask was proven readable by the hook.
    outside(|| unsafe { real::ppoll(core::ptr::null_mut(), 0, &now, mask) }) < 0
}

/// The same as [`outside`] for a sleep on `efd`: a handler that runs in the last moment before the sleep writes to
/// it. `any`: every handler ends the sleep, as in poll; otherwise only one without SA_RESTART. `place` among the
/// sleepers: while a handler runs, other threads do what this one would do.
pub fn asleep<T>(efd: i32, any: bool, place: Option<Place>, f: impl FnOnce() -> T) -> T {
    let t = thread();
    t.wake_cut_only.set(!any);
    t.wake.set(efd);
    if let Some((n, leave)) = place {
        t.leave.set(Some(leave)); // (the same function for every place)
        t.place.set(num::small(n) + 1);
    }
    let r = outside(f);
    t.place.set(0);
    pages::age(ticks());
    r
}

/// Is a signal deferred until this hook sleeps or ends? Then a spin has to end.
#[inline(always)]
pub fn waiting() -> bool {
    thread().deferred.get() != 0
}

/// A number that changes whenever a handler runs in this thread.
pub fn ran() -> u32 {
    thread().ran.get()
}

/// Have handlers run since the hook was entered? `any`: handlers with SA_RESTART count, too.
pub fn interrupted(any: bool) -> bool {
    let t = thread();
    match any {
        true => t.ran.get() != t.entry_ran.get(),
        false => t.cut.get() != t.entry_cut.get(),
    }
}

/// Has a handler with SA_RESTART run, so that a call that has moved nothing begins anew? Handlers that ran before
/// that are no longer counted.
#[cold]
pub fn begins_anew() -> bool {
    let t = thread();
    let ran = interrupted(true);
    t.entry_ran.set(t.ran.get());
    t.entry_cut.set(t.cut.get());
    ran
}

/// Restores the signal mask, so that deferred signals are delivered.
#[cold]
fn deliver(t: &Thread) {
    let e = crate::errno();
    let mask = t.mask.get();
    t.deferred.set(0);
    compiler_fence(SeqCst);
    sys::set_signal_mask(mask);
    crate::set_errno(e);
}

/// Is this thread inside a hook?
pub fn is_inside() -> bool {
    thread().depth.get() != 0
}

/// Notes that a signal is deferred to the end of the hook; `mask` is the thread's mask.
pub fn defer(mask: u64) {
    let t = thread();
    if t.deferred.replace(1) == 0 {
        t.mask.set(mask);
    }
}

/// A handler is about to run; `cut`: it ends the call that it interrupts. Returns the eventfd to write to, if the
/// thread was about to sleep.
pub fn handler_runs(cut: bool) -> Option<i32> {
    let t = thread();
    t.ran.set(t.ran.get().wrapping_add(1));
    if cut {
        t.cut.set(t.cut.get().wrapping_add(1));
    }
    // (A leader that is interrupted in the last moment before its sleep has to find that it leads no longer.)
    let led = match (t.place.replace(0), t.leave.get()) {
        (0, _) | (_, None) => false,
        (n, Some(leave)) => leave(n as usize - 1),
    };
    let wake = t.wake.get();
    (wake >= 0 && (cut || led || !t.wake_cut_only.get())).then_some(wake)
}

/// Runs a handler of the application.
pub fn handling(f: impl FnOnce()) {
    let t = thread();
    let (cut, wake, wake_cut_only) = (t.cut.get(), t.wake.get(), t.wake_cut_only.get());
    // Handlers that interrupt this handler do not affect the call that it has interrupted...
    t.wake.set(-1);
    f();
    // ... but handlers that run between this one and that call's sleep do, whatever hooks this one has called.
    t.cut.set(cut);
    t.wake_cut_only.set(wake_cut_only);
    t.wake.set(wake);
}

/// Runs `f`, which may block. If the thread does not come back from it (it is cancelled, or a handler leaves by
/// `siglongjmp`), runs `undo` instead of what follows.
///
/// The C library calls `undo`: the cleanup buffers of its old binary interface run in both cases.
pub fn or_undo<T>(undo: &dyn Fn(), f: impl FnOnce() -> T) -> T {
    extern "C" fn run(what: usize) {
        // SAFETY: `what` is the reference below, in a frame that still stands.
        let undo = unsafe { *(what as *const &dyn Fn()) };
        let _inside = enter();
        undo();
    }
    let what = (&raw const undo) as usize;
    let mut buffer = core::mem::MaybeUninit::<[usize; 4]>::uninit();
    let b = buffer.as_mut_ptr().cast();
    // SAFETY: 32 bytes, as large as the C library's buffer; it stays here until it is popped, or until
    // the frame is unwound, which takes it from the list.
    unsafe { real::cleanup_push(b, run, what) };
    let r = f();
    // SAFETY: pushed above; what came after it has been popped.
    unsafe { real::cleanup_pop(b) };
    r
}
