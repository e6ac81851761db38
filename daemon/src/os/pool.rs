//! Threads for what may wait for as long as a program likes, because it has to do with that program's descriptors. There are
//! some for each purpose, so that closes that wait keep nobody from reading, and in each the tenants have shares: one may
//! keep as many threads as are still free, and each of them has one at least. Whoever makes all of its threads wait waits
//! for itself only.
//!
//! A close that waits for a second is interrupted by a signal, which ends the wait of SO_LINGER. The option is left as it is,
//! because it is the application's: whoever asked for that wait has closed its own descriptor long ago.

use crate::os::held::Account;
use crate::os::panics::{contained, Part};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Threads of a purpose that tenants share.
const SHARED: usize = 256;
/// And with those of tenants that have no more than one.
const MOST: usize = 1024;
/// Jobs have small stacks.
const STACK: usize = 512 << 10;
/// How long a close may wait before it is interrupted, and an idle thread for work.
const WAIT: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(10);
/// Its handler does nothing. (By default it is ignored, and so interrupts nothing.)
const SIGNAL: i32 = libc::SIGURG;

type Job = Box<dyn FnOnce() + Send>;
/// Whose a job is. `None`: this daemon's own, or it is not known yet.
pub(crate) type Payer = Option<Arc<Account>>;

/// Closes what programs have sent.
pub(crate) static CLOSES: LazyLock<Pool> = LazyLock::new(|| Pool::new("close", true));
/// Reads sockets that are registered.
pub(crate) static READS: LazyLock<Pool> = LazyLock::new(|| Pool::new("read", false));
/// Makes the steps of takeovers, and whatever else lanes that end need of their sockets; seals chunks.
pub(crate) static LANES: LazyLock<Pool> = LazyLock::new(|| Pool::new("lane", false));

/// The threads of one purpose.
pub(crate) struct Pool {
    name: &'static str,
    /// What waits for long is interrupted.
    interrupts: bool,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    /// By address of the account, which each keeps alive. None without jobs that wait or are under way.
    shares: HashMap<usize, Share>,
    /// Those with jobs that wait, in the order of their turns.
    turns: VecDeque<usize>,
    /// Jobs that have begun, and those among them whose threads are on their way.
    busy: usize,
    handed: VecDeque<(usize, Job)>,
    threads: usize,
    /// Threads that wait and were not woken; and those that were, and have not fetched their jobs.
    idle: usize,
    woken: usize,
    /// Threads at work where these are interrupted, and since when or since when they were interrupted last.
    since: Vec<(libc::pthread_t, Instant)>,
    /// Is there a thread that looks after them?
    watched: bool,
}

struct Share {
    _account: Payer,
    queue: VecDeque<Job>,
    busy: usize,
}

impl State {
    /// May a party with so many threads have another one?
    fn may(&self, has: usize) -> bool {
        has < SHARED.saturating_sub(self.busy) || has == 0 && self.busy < MOST
    }

    fn push(&mut self, payer: Payer, job: Job) {
        let key = payer.as_ref().map_or(0, |a| Arc::as_ptr(a) as usize);
        let p = self.shares.entry(key).or_insert_with(|| Share {
            _account: payer,
            queue: VecDeque::new(),
            busy: 0,
        });
        if p.queue.is_empty() {
            self.turns.push_back(key);
        }
        p.queue.push_back(job);
    }

    /// The next job that may begin: it does, now.
    fn take(&mut self) -> Option<(usize, Job)> {
        let has = |key| self.shares.get(key).map_or(0, |p| p.busy);
        let turn = self.turns.iter().position(|key| self.may(has(key)))?;
        let key = self.turns.remove(turn)?;
        let p = self.shares.get_mut(&key)?;
        let job = p.queue.pop_front()?;
        p.busy += 1;
        self.busy += 1;
        if !p.queue.is_empty() {
            self.turns.push_back(key);
        }
        Some((key, job))
    }

    /// It has not begun after all.
    fn put_back(&mut self, key: usize, job: Job) {
        self.busy -= 1;
        if let Some(p) = self.shares.get_mut(&key) {
            p.busy -= 1;
            if p.queue.is_empty() {
                self.turns.push_back(key);
            }
            p.queue.push_front(job);
        }
    }

    fn done(&mut self, key: usize) {
        self.busy -= 1;
        if let Some(p) = self.shares.get_mut(&key) {
            p.busy -= 1;
            if p.busy == 0 && p.queue.is_empty() {
                self.shares.remove(&key);
            }
        }
    }
}

impl Pool {
    fn new(name: &'static str, interrupts: bool) -> Pool {
        Pool {
            name,
            interrupts,
            state: Mutex::default(),
            more: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // (Nobody panics with it.)
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does this at some time, for this one. Does not wait.
    pub(crate) fn start(&'static self, payer: Payer, job: impl FnOnce() + Send + 'static) {
        let mut s = self.lock();
        s.push(payer, Box::new(job));
        self.hand_out(&mut s);
        if s.threads == 0 {
            self.in_turn(s); // there is nobody else
        }
    }

    /// Does this for somebody, and returns what comes of it; `None`: it has panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &'static self,
        payer: Payer,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (tell, told) = oneshot::channel();
        self.start(payer, move || {
            let _ = tell.send(work()); // (who asked may be gone)
        });
        told.await.ok()
    }

    /// Gives the jobs that may begin to threads.
    fn hand_out(&'static self, s: &mut State) {
        while let Some((key, job)) = s.take() {
            if s.idle > 0 {
                s.idle -= 1;
                s.woken += 1;
                s.handed.push_back((key, job));
                self.more.notify_one();
                continue;
            }
            if self.interrupts && !s.watched {
                s.watched = self.thread("watch", move || self.watch());
            }
            if !self.thread(self.name, move || self.work()) {
                return s.put_back(key, job); // for those that there are
            }
            s.threads += 1;
            s.handed.push_back((key, job));
        }
    }

    fn thread(&self, name: &str, work: impl FnOnce() + Send + 'static) -> bool {
        let thread = std::thread::Builder::new().name(name.into());
        let started = thread.stack_size(STACK).spawn(work);
        if let Err(e) = &started {
            tracing::warn!("cannot start a thread: {e}");
        }
        started.is_ok()
    }

    fn in_turn<'a>(&'a self, mut s: MutexGuard<'a, State>) {
        while let Some((key, job)) = s.take() {
            drop(s);
            contained(Part::Helper, job);
            s = self.lock();
            s.done(key);
        }
    }

    /// One of the threads, until there was nothing to do for a while.
    fn work(&'static self) {
        // SAFETY: plain; it always succeeds.
        let me = unsafe { libc::pthread_self() };
        let mut s = self.lock();
        let mut next = s.handed.pop_front();
        loop {
            while let Some((key, job)) = next {
                if self.interrupts {
                    s.since.push((me, Instant::now()));
                }
                drop(s);
                contained(Part::Helper, job); // may wait
                s = self.lock();
                s.since.retain(|b| b.0 != me);
                s.done(key);
                next = s.take();
                self.hand_out(&mut s); // others may begin as well
            }
            s.idle += 1;
            while s.woken == 0 {
                let waited = self.more.wait_timeout(s, IDLE);
                let (back, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                s = back;
                if waited.timed_out() && s.woken == 0 {
                    s.idle -= 1;
                    s.threads -= 1;
                    return;
                }
            }
            s.woken -= 1;
            next = s.handed.pop_front();
        }
    }

    /// Interrupts what waits, as long as there are any threads.
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
            for (thread, since) in &mut s.since {
                if now.saturating_duration_since(*since) >= WAIT {
                    *since = now;
                    // SAFETY: a thread that is entered in `since` takes itself out, under the lock that is held, before it
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn pool() -> &'static Pool {
        Box::leak(Box::new(Pool::new("test", false)))
    }

    fn tenant() -> Payer {
        Some(Arc::default())
    }

    /// Jobs that wait until the test lets them go.
    struct Hanging {
        began: mpsc::Receiver<()>,
        _until: mpsc::Sender<()>,
    }

    fn hang(pool: &'static Pool, of: &Payer, many: usize) -> Hanging {
        let (tell, began) = mpsc::channel();
        let (until, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        for _ in 0..many {
            let (tell, ends) = (tell.clone(), ends.clone());
            pool.start(of.clone(), move || {
                let _ = tell.send(());
                let _ = ends.lock().unwrap().recv();
            });
        }
        Hanging {
            began,
            _until: until,
        }
    }

    impl Hanging {
        fn await_begun(&self, many: usize) {
            for n in 0..many {
                let began = self.began.recv_timeout(Duration::from_secs(60));
                assert!(began.is_ok(), "{n} of {many} have begun");
            }
        }
    }

    /// Whatever a job of the one waits for, and however many of them there are, the others' jobs are done.
    #[test]
    fn who_hangs_keeps_nobody_else() {
        let pool = pool();
        let first = hang(pool, &tenant(), 2000);
        first.await_begun(SHARED / 2);
        let second = hang(pool, &tenant(), 2000);
        second.await_begun(SHARED / 4);
        // More of them than there are threads to share.
        let more: Vec<_> = (0..20).map(|_| hang(pool, &tenant(), 300)).collect();
        more.iter().for_each(|m| m.await_begun(1));
        let busy = pool.lock().busy;
        assert!((SHARED..SHARED + 30).contains(&busy), "{busy}");
        for of in [tenant(), None] {
            let (tell, told) = mpsc::channel();
            for n in 0..100 {
                let tell = tell.clone();
                pool.start(of.clone(), move || tell.send(n).unwrap());
            }
            let wait = Duration::from_secs(60);
            let done: Vec<i32> = (0..100)
                .map_while(|_| told.recv_timeout(wait).ok())
                .collect();
            assert_eq!(done.len(), 100);
        }
        assert!(first.began.try_recv().is_err(), "it has as many as it may");
    }

    /// Those that waited are done, by turns, as soon as there is somebody for them, and nothing is left.
    #[test]
    fn what_waits_is_done() {
        let pool = pool();
        let (a, b) = (tenant(), tenant());
        let hanging = hang(pool, &a, 1000);
        hanging.await_begun(SHARED / 2);
        let other = hang(pool, &b, 1000);
        other.await_begun(SHARED / 4);
        drop((hanging._until, other._until));
        let end = Instant::now() + Duration::from_secs(60);
        while !pool.lock().shares.is_empty() {
            assert!(Instant::now() < end, "{} wait", pool.lock().turns.len());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(hanging.began.try_iter().count(), 1000 - SHARED / 2);
        let s = pool.lock();
        assert_eq!((s.busy, s.turns.len()), (0, 0));
        assert!(s.threads <= SHARED);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_result_comes_back() {
        let pool = pool();
        assert_eq!(pool.run(None, || 5).await, Some(5));
        assert_eq!(pool.run(tenant(), || 6).await, Some(6));
        for _ in 0..2 * MOST {
            assert_eq!(pool.run(None, || panic!("a job")).await, None::<()>);
        }
        assert_eq!(pool.run(None, || 7).await, Some(7));
    }
}
