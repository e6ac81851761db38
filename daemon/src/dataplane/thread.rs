//! The data plane: the thread that polls the engines, and how it sleeps.
//!
//! It has an epoll set of its own and does not run in the async runtime: no requests, handshakes or messages come
//! before a lane's bytes. It shares the rails with the core, whose steps on them are short. The lock is fair, so
//! neither a core with much to do nor a data plane that polls all the time keeps the other out.
//!
//! While there is work, or was a moment ago, it polls, if there is more than one processor. Otherwise it arms the
//! completion queues, counts itself asleep on every link group, polls once more, and sleeps on all their descriptors
//! until something arrives or is due. With a single processor it stays counted as asleep: nobody else runs while
//! it works, so one poll per wake-up is enough.

use crate::dataplane::rail::waker::{drain, Woken, ALARM};
use crate::dataplane::rail::Rails;
use crate::os::system::System;
use lane::num;
use parking_lot::{FairMutex, FairMutexGuard};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::Notify;
use underpass_ibv::Ibv;
use underpass_rdma::verbs::{DeviceId, Provider};

/// With more than one processor it goes on polling for this long after the last work: longer than a wake-up takes
/// (about 50 µs).
const SPIN_NS: u64 = 60_000;
/// Events taken from the set at once.
const EVENTS: usize = 64;

/// The rails, as the core and the data plane's thread share them.
pub struct DataPlane<V: Provider> {
    system: Arc<dyn System>,
    rails: FairMutex<Rails<V>>,
    /// Notified when the thread's steps have left effects for the core.
    pub news: Notify,
    /// Tells the thread to end.
    ends: AtomicBool,
}

impl<V: Provider> DataPlane<V> {
    pub fn new(system: Arc<dyn System>, rails: Rails<V>) -> Self {
        DataPlane {
            system,
            rails: FairMutex::new(rails),
            news: Notify::new(),
            ends: AtomicBool::new(false),
        }
    }

    /// Locks the rails for a short step, because no bytes move meanwhile. Not reentrant.
    pub fn lock(&self) -> FairMutexGuard<'_, Rails<V>> {
        self.rails.lock()
    }
}

/// The running thread; ends when this is dropped.
pub struct Thread {
    plane: Arc<DataPlane<Ibv>>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts the thread. It enters the runtime, whose blocking pool does what may hang. `stale` is told of
    /// devices that should be looked at again.
    pub fn start(
        plane: &Arc<DataPlane<Ibv>>,
        stale: UnboundedSender<DeviceId>,
    ) -> std::io::Result<Thread> {
        let alone = std::thread::available_parallelism().map_or(1, usize::from) == 1;
        let mut served = Loop::new(plane.clone(), stale, alone)?;
        let runtime = tokio::runtime::Handle::current();
        let run = move || {
            let _inside = runtime.enter();
            while served.turn() {}
        };
        let thread = std::thread::Builder::new().name("dataplane".into());
        Ok(Thread {
            plane: plane.clone(),
            thread: Some(thread.spawn(run)?),
        })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // Relaxed: the thread reads it under the lock, after we have held that here or after the wake
        self.plane.ends.store(true, Relaxed);
        self.plane.lock().notify();
        if let Some(t) = self.thread.take() {
            let _ = t.join(); // it has not panicked: a panic aborts the process
        }
    }
}

/// A timer in the set. It is set only to an earlier time or after it has expired. That causes a wake-up too early
/// now and then, which costs less than setting it before every sleep.
struct Alarm {
    fd: OwnedFd,
    /// When it expires; 0: not set.
    at: u64,
}

impl Alarm {
    fn new(set: &OwnedFd) -> Result<Alarm, Errno> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(set, &fd, EventData::new_u64(ALARM), EventFlags::IN)?;
        Ok(Alarm { fd, at: 0 })
    }

    /// Makes it expire at this time or earlier; false if it cannot be set.
    fn by(&mut self, at: u64) -> bool {
        if self.at != 0 && self.at <= at {
            return true;
        }
        let at = at.max(1); // 0 would be never
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: num::long(at / 1_000_000_000),
                tv_nsec: num::long(at % 1_000_000_000),
            },
        };
        let flags = TimerfdTimerFlags::ABSTIME;
        self.at = match rustix::time::timerfd_settime(&self.fd, flags, &value) {
            Ok(_) => at,
            Err(_) => 0,
        };
        self.at != 0
    }

    fn over(&mut self) {
        drain(Some(&self.fd));
        self.at = 0;
    }
}

/// What to do after a poll.
pub enum Next {
    End,
    Poll,
    /// Sleep until then at the latest.
    Sleep(u64),
}

/// The thread's loop, which tests run step by step.
pub struct Loop<V: Provider> {
    plane: Arc<DataPlane<V>>,
    /// What wakes it.
    set: Arc<OwnedFd>,
    alarm: Alarm,
    stale: UnboundedSender<DeviceId>,
    /// There is one processor only.
    alone: bool,
    worked_at: u64,
}

impl<V: Provider> Loop<V> {
    /// `alone`: there is one processor only.
    pub fn new(
        plane: Arc<DataPlane<V>>,
        stale: UnboundedSender<DeviceId>,
        alone: bool,
    ) -> std::io::Result<Loop<V>> {
        let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        plane.lock().wait_in(&set);
        Ok(Loop {
            alarm: Alarm::new(&set)?,
            set,
            plane,
            stale,
            alone,
            worked_at: 0,
        })
    }

    /// Polls, and sleeps if there is nothing to do; `false`: it is over.
    fn turn(&mut self) -> bool {
        let until = match self.poll() {
            Next::End => return false,
            Next::Poll => return true,
            Next::Sleep(until) => until,
        };
        let sleeps = until == u64::MAX || self.alarm.by(until);
        self.wait(sleeps);
        true
    }

    /// Sleeps, or only looks at the set, and handles the events. Returns whether there were any.
    pub fn wait(&mut self, sleeps: bool) -> bool {
        let mut ready = [const { MaybeUninit::<Event>::uninit() }; EVENTS];
        let look = Timespec::default();
        let got = epoll::wait(&*self.set, &mut ready[..], (!sleeps).then_some(&look));
        let ready = got.map_or(&[][..], |(ready, _)| ready);
        self.take_in(ready);
        !ready.is_empty()
    }

    pub fn poll(&mut self) -> Next {
        let t = self.plane.system.now();
        let mut rails = self.plane.lock();
        if self.plane.ends.load(Relaxed) {
            return Next::End;
        }
        let p = rails.poll(t);
        if rails.has_effects() {
            self.plane.news.notify_one();
        }
        if p.worked {
            self.worked_at = t;
        }
        if !self.alone && t < self.worked_at + SPIN_NS {
            rails.wake_up();
            return Next::Poll;
        }
        match p.more || rails.fall_asleep() {
            true => Next::Poll,
            false => Next::Sleep(p.next),
        }
    }

    /// Handles the events that have woken the thread.
    fn take_in(&mut self, ready: &[Event]) {
        let mut rails = self.plane.lock();
        let Woken { device, alarm } = rails.woken(ready, self.alone);
        if device {
            for id in rails.device_events() {
                let _ = self.stale.send(id); // fails only if nobody looks at devices any more
            }
        }
        drop(rails);
        if alarm {
            self.alarm.over();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RailRules;
    use crate::os::system::Machine;

    const MS: u64 = 1_000_000;

    /// Whether the alarm goes off within so many ms.
    fn rings(set: &OwnedFd, ms: u64) -> bool {
        let mut ready = [const { MaybeUninit::<Event>::uninit() }; 4];
        let most = Timespec {
            tv_sec: 0,
            tv_nsec: (ms * MS) as _,
        };
        let (ready, _) = epoll::wait(set, &mut ready[..], Some(&most)).expect("a set");
        ready.iter().any(|e| e.data.u64() == ALARM)
    }

    /// It goes off at the earliest of the times that it was given since it went off last.
    #[test]
    fn an_alarm() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let mut alarm = Alarm::new(&set).expect("a timer");
        let remote = Machine.now() + 10_000 * MS;
        assert!(alarm.by(remote));
        assert!(!rings(&set, 5));
        let soon = Machine.now() + 30 * MS;
        assert!(alarm.by(soon) && alarm.by(remote), "the earlier one counts");
        assert!(rings(&set, 900) && Machine.now() >= soon);
        assert!(rings(&set, 0), "until it is taken in");
        alarm.over();
        assert!(!rings(&set, 5));
        // A time that has passed, even the very first.
        for at in [0, 1, Machine.now()] {
            assert!(alarm.by(at) && rings(&set, 900), "{at}");
            alarm.over();
            assert!(!rings(&set, 0));
        }
        // To the second.
        let next = (Machine.now() / 1_000_000_000 + 1) * 1_000_000_000;
        assert!(alarm.by(next) && !rings(&set, 0));
        assert!((0..3).any(|_| rings(&set, 500)) && Machine.now() >= next);
    }

    /// A data plane without devices, of one peer.
    fn plane() -> Arc<DataPlane<Ibv>> {
        let (own, peers) = ("a".into(), ["b".into()]);
        let rails = Rails::new(
            Arc::new(Machine),
            None,
            RailRules::default(),
            &own,
            peers.into_iter(),
        );
        Arc::new(DataPlane::new(Arc::new(Machine), rails))
    }

    /// Whether this comes to its end, which it does in much less time than this waits.
    fn returns(act: impl FnOnce() + Send + 'static) -> bool {
        let (done, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            act();
            let _ = done.send(());
        });
        told.recv_timeout(std::time::Duration::from_secs(30))
            .is_ok()
    }

    /// It sleeps no longer than until something is due: nothing else wakes it here.
    #[test]
    fn sleeps_until_something_is_due() {
        let (stale, _) = tokio::sync::mpsc::unbounded_channel();
        assert!(returns(|| {
            let mut served = Loop::new(plane(), stale, true).expect("descriptors");
            let slept = Machine.now();
            (0..4).for_each(|_| assert!(served.turn()));
            assert!(Machine.now() > slept + 50 * MS, "it does sleep");
        }));
    }

    /// The daemon ends while its data plane sleeps.
    #[test]
    fn a_thread_that_is_to_end() {
        let (stale, _) = tokio::sync::mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime");
        let _inside = runtime.enter();
        let thread = Thread::start(&plane(), stale).expect("a thread");
        assert!(returns(move || drop(thread)));
    }
}
