//! Signals: hooks are to handlers what system calls are.
//!
//! A handler of the application runs before a hook, after it, or while it sleeps, and never in its
//! middle: there it would meet our locks held by its own thread, and lists half changed. So handlers
//! are installed behind [`trampoline`]. Where it finds the thread inside a hook ([`enter`]) it queues
//! the signal once more for this thread, blocks signals until the hook is left or sleeps ([`outside`]),
//! and returns; then the kernel delivers the signal anew. Blocking signals around each hook instead
//! would cost two system calls, which is more than a send on a lane.
//!
//! The application sees its own handlers: `sigaction` returns them, the kernel has their flags and
//! masks. A process without TCP sockets keeps its handlers as they are. Handlers installed by inlined
//! system calls run anywhere: they find locks taken (`lock`) and get EAGAIN.

use crate::{pages, sys, table, wait};
use core::cell::Cell;
use core::sync::atomic::{compiler_fence, AtomicU32, AtomicUsize, Ordering::*};
use libc::{c_void, siginfo_t};
use link::prim::ticks;

/// What a thread and the handlers that interrupt it tell each other. Only this thread uses it.
struct Thread {
    /// Not 0: inside a hook, handlers wait.
    depth: Cell<u32>,
    /// Not 0: a signal waits for the end of the hook, and `mask` is what to restore then.
    deferred: Cell<u32>,
    mask: Cell<u64>,
    /// Handlers run in this thread, and those of them without SA_RESTART.
    ran: Cell<u32>,
    cut: Cell<u32>,
    /// The same when the hook was entered.
    entry_ran: Cell<u32>,
    entry_cut: Cell<u32>,
    /// Eventfd that ends the coming sleep, and whether only handlers without SA_RESTART do.
    wake: Cell<i32>,
    wake_cut_only: Cell<bool>,
    /// Its place among the sleepers, plus 1; 0: none.
    place: Cell<u32>,
    /// Its number; 0: not asked for yet. (Here, so that a hook looks this record up once.)
    tid: Cell<u32>,
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
            tid: Cell::new(0),
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

/// In a forked child: its only thread has another id.
pub fn forget_tid() {
    thread().tid.set(0);
}

/// The thread is inside a hook as long as this lives.
pub struct Inside(&'static Thread);

/// Handlers wait from here on.
#[inline(always)]
pub fn enter() -> Inside {
    let t = thread();
    let depth = t.depth.get();
    t.depth.set(depth + 1);
    // The compiler must not move what follows before it; the processor shows a thread its own order.
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

/// Runs `f`, which may block, as if outside of the hook: handlers run, what they call is served, and
/// they may leave by `siglongjmp`. Nothing of ours may be locked or half done.
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
    // Hooks that handlers called have set these.
    t.entry_ran.set(ran);
    t.entry_cut.set(cut);
    t.wake.set(-1);
    r
}

/// Lets those signals in that only the mask of the application's wait does, where the kernel would put it to sleep
/// and we have other things to do first. True: there was one, and errno is EINTR.
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
    outside(|| unsafe { crate::real::ppoll(core::ptr::null_mut(), 0, &now, mask) }) < 0
}

/// The same for a sleep that `efd` ends: a handler that runs in the last moment before it writes there.
/// `any`: every handler ends the sleep, as it does a poll; else only one without SA_RESTART. `place` among the
/// sleepers: while a handler runs, others do what this one would.
pub fn asleep<T>(efd: i32, any: bool, place: Option<usize>, f: impl FnOnce() -> T) -> T {
    let t = thread();
    t.wake_cut_only.set(!any);
    t.wake.set(efd);
    t.place.set(place.map_or(0, |p| p as u32 + 1));
    let r = outside(f);
    t.place.set(0);
    pages::age(ticks());
    r
}

/// Does a signal wait until this hook sleeps or ends? Then a spin is over.
#[inline(always)]
pub fn waiting() -> bool {
    thread().deferred.get() != 0
}

/// A number that every handler changes that runs in this thread.
pub fn ran() -> u32 {
    thread().ran.get()
}

/// Have handlers run since the hook was entered? `any`: does one with SA_RESTART count, too?
pub fn interrupted(any: bool) -> bool {
    let t = thread();
    match any {
        true => t.ran.get() != t.entry_ran.get(),
        false => t.cut.get() != t.entry_cut.get(),
    }
}

/// A call that has moved nothing begins anew after a handler with SA_RESTART: is it so? Those that have run count no
/// more.
#[cold]
pub fn begins_anew() -> bool {
    let t = thread();
    let ran = interrupted(true);
    t.entry_ran.set(t.ran.get());
    t.entry_cut.set(t.cut.get());
    ran
}

/// Signals are delivered again.
#[cold]
fn deliver(t: &Thread) {
    let e = crate::errno();
    let mask = t.mask.get();
    t.deferred.set(0);
    compiler_fence(SeqCst);
    sys::set_signal_mask(mask);
    crate::set_errno(e);
}

const fn bit(sig: i32) -> u64 {
    1 << (sig - 1)
}

/// Signals by which the kernel reports what the thread itself has just done.
const FAULTS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);
/// What is blocked while a signal waits. 32 and 33 are the C library's own, whose handlers call no hook.
const BLOCKED: u64 = !(FAULTS | bit(32) | bit(33));

/// A handler of the application, and its flags. It stays here while the kernel has another one.
struct Action {
    handler: AtomicUsize,
    flags: AtomicU32,
}

static ACTIONS: [Action; 65] = [const {
    Action {
        handler: AtomicUsize::new(0),
        flags: AtomicU32::new(0),
    }
}; 65];

/// Flags that the kernel's entry does not have as the application has set them: the trampoline always
/// wants to be told, and resets by itself.
const CHANGED: u32 = (libc::SA_SIGINFO | libc::SA_RESETHAND) as u32;

type Handler = unsafe extern "C" fn(i32, *mut siginfo_t, *mut c_void);

fn ours() -> usize {
    let f: Handler = trampoline;
    f as usize
}

/// Stands in the kernel's table for every handler of the application.
unsafe extern "C" fn trampoline(sig: i32, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments, passed on.
    let handler = unsafe { prepare(sig, info, context) };
    if handler > 1 {
        let t = thread();
        let (cut, wake, wake_cut_only) = (t.cut.get(), t.wake.get(), t.wake_cut_only.get());
        // Handlers that interrupt this one decide nothing about the call that it has interrupted...
        t.wake.set(-1);
        // SAFETY: the application's handler; one that takes fewer arguments ignores the others.
        let f: Handler = unsafe { core::mem::transmute(handler) };
        // SAFETY: as above.
        unsafe { f(sig, info, context) }
        // ... and those that come between it and that call's sleep do, whatever hooks it has called.
        t.cut.set(cut);
        t.wake_cut_only.set(wake_cut_only);
        t.wake.set(wake);
    }
}

/// The handler to run now; 0: none.
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn prepare(sig: i32, info: *mut siginfo_t, context: *mut c_void) -> usize {
    let t = thread();
    // SAFETY: by contract.
    let fault = FAULTS & bit(sig) != 0 && unsafe { (*info).si_code } > 0;
    // SAFETY: by contract.
    if t.depth.get() != 0 && !fault && unsafe { defer(t, sig, info, context.cast()) } {
        return 0;
    }
    let a = &ACTIONS[sig as usize & 63 | sig as usize & 64];
    let (handler, flags) = (a.handler.load(Acquire), a.flags.load(Relaxed) as i32);
    if flags & libc::SA_RESETHAND != 0 {
        sys::reset_handler(sig, ours());
    }
    let cut = flags & libc::SA_RESTART == 0;
    t.ran.set(t.ran.get().wrapping_add(1));
    if cut {
        t.cut.set(t.cut.get().wrapping_add(1));
    }
    let wake = t.wake.get();
    // (One that comes in the last moment before the sleep has to find that it is nobody's leader any more.)
    let led = match t.place.replace(0) {
        0 => false,
        place => wait::step_down(place as usize - 1),
    };
    if wake >= 0 && (cut || led || !t.wake_cut_only.get()) {
        sys::poke(wake);
    }
    handler
}

/// The signal comes again when the hook is left. False: it cannot be queued (a limit, a filter).
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn defer(
    t: &Thread,
    sig: i32,
    info: *mut siginfo_t,
    context: *mut libc::ucontext_t,
) -> bool {
    // SAFETY: the kernel's frame; its signal set has 64 bits.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    let all = BLOCKED | bit(sig) | *mask;
    // Before it is queued: the handler may have been installed with SA_NODEFER.
    sys::set_signal_mask(all);
    // SAFETY: the kernel's record.
    if !unsafe { sys::queue_signal(sig, info) } {
        sys::set_signal_mask(*mask | bit(sig));
        return false;
    }
    if t.deferred.replace(1) == 0 {
        t.mask.set(*mask);
    }
    *mask = all;
    true
}

/// Puts a new action of the application in place of the old one. `install(new, old)` is the C library's
/// function.
///
/// # Safety
/// As `sigaction`.
pub unsafe fn change(
    sig: i32,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
    install: impl Fn(*const libc::sigaction, *mut libc::sigaction) -> i32,
) -> i32 {
    let Some(a) = usize::try_from(sig)
        .ok()
        .filter(|s| *s > 0)
        .and_then(|s| ACTIONS.get(s))
    else {
        return install(new, old);
    };
    // A vfork child has signal actions of its own, but our memory: it keeps out of the table.
    let tabled = table::table().is_some() && sys::getpid() == table::pid();
    let before = (a.handler.load(Relaxed), a.flags.load(Relaxed));
    // SAFETY: null, or the application's.
    let mut mine = unsafe { new.as_ref() }.copied();
    let wrapped = mine.as_mut().filter(|n| tabled && n.sa_sigaction > 1);
    let entered = wrapped.is_some();
    if let Some(n) = wrapped {
        // First: a signal may come as soon as the kernel knows.
        a.flags.store(n.sa_flags as u32, Relaxed);
        a.handler.store(n.sa_sigaction, Release);
        n.sa_sigaction = ours();
        n.sa_flags = (n.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND;
    }
    // SAFETY: all-zero is a valid action.
    let mut was: libc::sigaction = unsafe { core::mem::zeroed() };
    let r = install(mine.as_ref().map_or(core::ptr::null(), |m| m), &mut was);
    if r != 0 && entered {
        a.handler.store(before.0, Relaxed);
        a.flags.store(before.1, Relaxed);
    }
    if r == 0 && !old.is_null() {
        if was.sa_sigaction == ours() {
            was.sa_sigaction = before.0;
            was.sa_flags = (was.sa_flags as u32 & !CHANGED | before.1 & CHANGED) as i32;
        }
        // SAFETY: the application's.
        unsafe { old.write(was) };
    }
    r
}

/// The process gets its first TCP socket: handlers that it has installed so far go behind the trampoline.
pub fn take_over() {
    for sig in (1..=31).chain(34..=64) {
        let Some(mut k) = sys::kernel_action(sig, None).filter(|k| k[0] as usize > 1) else {
            continue;
        };
        if k[0] as usize == ours() {
            continue;
        }
        let a = &ACTIONS[sig as usize];
        a.flags.store(k[1] as u32, Relaxed);
        a.handler.store(k[0] as usize, Release);
        k[0] = ours() as u64;
        k[1] = (k[1] | libc::SA_SIGINFO as u64) & !(libc::SA_RESETHAND as u32 as u64);
        sys::kernel_action(sig, Some(&k));
    }
}

/// Does a handler that we do not stand before let interrupted calls end?
pub fn foreign_cut() -> bool {
    // 32 and 33 are the C library's own (cancellation, setxid).
    (1..=31).chain(34..=64).any(|sig| {
        sys::kernel_action(sig, None).is_some_and(|k| {
            k[0] > 1 && k[0] as usize != ours() && k[1] & libc::SA_RESTART as u64 == 0
        })
    })
}

/// Runs `f`, which may block, and `undo` instead of the rest if the thread does not come back from it:
/// it is cancelled, or a handler leaves by `siglongjmp`.
///
/// The C library does it: the cleanup buffers of its old binary interface run in both cases.
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
    unsafe { crate::real::cleanup_push(b, run, what) };
    let r = f();
    // SAFETY: pushed above; what came after it has been popped.
    unsafe { crate::real::cleanup_pop(b) };
    r
}
