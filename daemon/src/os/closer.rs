//! Threads that close descriptors which came from outside. They are no helpers: whoever sends many descriptors whose close
//! waits (SO_LINGER, or a file of a FUSE server that does not answer) keeps these threads, and nobody else, from their work.
//!
//! A close that waits for a second is interrupted by a signal, which ends the wait of SO_LINGER: whoever asked for that has
//! closed its own descriptor long ago.

use crate::os::held::Held;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// Most of these threads.
const THREADS_MAX: usize = 256;
/// They only call `close`.
const STACK: usize = 64 << 10;
/// How long a close may wait before it is interrupted, and an idle thread for work.
const WAIT: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(10);
/// Its handler does nothing. (By default it is ignored, and so interrupts nothing.)
const SIGNAL: i32 = libc::SIGURG;

/// What waits to be closed, and who is at it.
struct Closer {
    state: Mutex<State>,
    more: Condvar,
}

struct State {
    queue: VecDeque<Vec<Held>>,
    threads: usize,
    idle: usize,
    /// Threads that close something now, and since when or since when they were interrupted last.
    busy: Vec<(libc::pthread_t, Instant)>,
    /// Is there a thread that looks after them?
    watched: bool,
}

static CLOSER: Closer = Closer {
    state: Mutex::new(State {
        queue: VecDeque::new(),
        threads: 0,
        idle: 0,
        busy: Vec::new(),
        watched: false,
    }),
    more: Condvar::new(),
};

/// Closes these, one after the other, at some time. Does not wait.
pub(super) fn close(fds: Vec<Held>) {
    let mut s = CLOSER.lock();
    s.queue.push_back(fds);
    let wanted = s.queue.len() > s.idle && s.threads < THREADS_MAX;
    if !wanted {
        drop(s);
        return CLOSER.more.notify_one();
    }
    if !s.watched {
        s.watched = start("closes", || CLOSER.watch());
    }
    if start("close", || CLOSER.work()) {
        s.threads += 1;
    } else if s.threads == 0 {
        drop(s);
        CLOSER.take_in_turn(); // there is nobody else
    }
}

fn start(name: &str, work: fn()) -> bool {
    let thread = std::thread::Builder::new().name(name.into());
    let started = thread.stack_size(STACK).spawn(work);
    if let Err(e) = &started {
        tracing::warn!("cannot start a thread: {e}");
    }
    started.is_ok()
}

impl Closer {
    fn lock(&self) -> MutexGuard<'_, State> {
        // (Nobody panics with it.)
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_in_turn(&self) {
        while let Some(fds) = { self.lock().queue.pop_front() } {
            drop(fds);
        }
    }

    /// One of the threads, until there was nothing to do for a while.
    fn work(&self) {
        // SAFETY: plain; it always succeeds.
        let me = unsafe { libc::pthread_self() };
        let mut s = self.lock();
        loop {
            if let Some(fds) = s.queue.pop_front() {
                s.busy.push((me, Instant::now()));
                drop(s);
                drop(fds); // may wait
                s = self.lock();
                s.busy.retain(|b| b.0 != me);
                continue;
            }
            s.idle += 1;
            let (back, waited) = self
                .more
                .wait_timeout(s, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            s = back;
            s.idle -= 1;
            if waited.timed_out() && s.queue.is_empty() {
                s.threads -= 1;
                return;
            }
        }
    }

    /// Interrupts closes that wait, as long as there are any threads.
    fn watch(&self) {
        handle();
        loop {
            std::thread::sleep(WAIT / 4);
            let mut s = self.lock();
            if s.threads == 0 {
                s.watched = false;
                return;
            }
            let now = Instant::now();
            for (thread, since) in &mut s.busy {
                if now.saturating_duration_since(*since) >= WAIT {
                    *since = now;
                    // SAFETY: a thread that is entered in `busy` takes itself out, under the lock that is held, before it
                    // ends. The handler does nothing.
                    unsafe { libc::pthread_kill(*thread, SIGNAL) };
                }
            }
        }
    }
}

extern "C" fn nothing(_: i32) {}

/// Installs the handler, without SA_RESTART.
fn handle() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler: extern "C" fn(i32) = nothing;
        // SAFETY: all-zero is a valid `sigaction`: no flags, and an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as libc::sighandler_t;
        // SAFETY: the handler may run anywhere, because it does nothing. Nothing else in the daemon uses this signal.
        unsafe { libc::sigaction(SIGNAL, &action, std::ptr::null_mut()) };
    });
}
