//! The data plane: the task that polls the engines, and how it sleeps.
//!
//! While there is work, or was a moment ago, it polls, if there is more than one processor.
//! Otherwise it asks the completion queues for a notification, counts itself asleep on every link,
//! polls once more, and sleeps on all their descriptors until something comes or is due. Where there
//! is one processor only it stays counted so: nobody else runs while it works, and so one poll for
//! each wake-up is enough.
//!
//! As long as there was work a little while ago it does not sleep in the runtime, whose way from a
//! descriptor to a task and back takes longer than a poll, but in its own set of descriptors, in
//! which the runtime's is one among others.

use crate::core::Shared;
use crate::rail::waker::{add, drain, ALARM, RUNTIME};
use crate::rail::{now, Rails};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use underpass_rdma::devices::{Tree, Watch};
use underpass_rdma::verbs::DeviceId;

/// Polls on for so long after the last work, where there is more than one processor: longer than a
/// wake-up costs (about 50 µs).
const SPIN_NS: u64 = 60_000;
/// The daemon's other tasks have their turn this often while there is work all the time, where
/// polling on, and where not (there also as soon as a descriptor of theirs is ready).
const TURN_SPINNING_NS: u64 = 50_000;
const TURN_NS: u64 = 1_000_000;
/// Timers of theirs may be so late.
const LATE_NS: u64 = 10_000_000;
/// After so long without work, the task sleeps in the runtime.
const WARM_NS: u64 = 20_000_000;
/// Devices are looked at this often.
const LOOK: Duration = Duration::from_secs(1);

/// A timer in the set. It is only ever set to an earlier time or when it is over: it wakes us too
/// early now and then, which costs less than setting it before every sleep.
struct Alarm {
    fd: OwnedFd,
    /// When it goes off; 0: it is over.
    at: u64,
}

impl Alarm {
    fn new(set: &OwnedFd) -> Result<Alarm, Errno> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(set, &fd, EventData::new_u64(ALARM), EventFlags::IN)?;
        Ok(Alarm { fd, at: 0 })
    }

    /// Goes off at this time at the latest; whether it does.
    fn by(&mut self, at: u64) -> bool {
        if self.at != 0 && self.at <= at {
            return true;
        }
        let at = at.max(1); // 0 would be never
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: (at / 1_000_000_000) as _,
                tv_nsec: (at % 1_000_000_000) as _,
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

/// Looks at the devices, for ever. Reading a device's addresses takes a thousand files: not on the
/// thread that serves everybody.
async fn watch(shared: Shared, mut stale: tokio::sync::mpsc::UnboundedReceiver<DeviceId>) {
    let mut watch = Some(Watch::new(Tree::system()));
    loop {
        let Some(mut w) = watch.take() else { return };
        while let Ok(id) = stale.try_recv() {
            w.stale(&id);
        }
        let looked = tokio::task::spawn_blocking(move || {
            let changes = w.look();
            (w, changes)
        });
        let Ok((w, changes)) = looked.await else {
            return;
        };
        watch = Some(w);
        shared.borrow_mut().rails(|r| match changes.is_empty() {
            true => r.watch_devices(),
            false => r.devices_changed(&changes),
        });
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            id = stale.recv() => {
                if let (Some(w), Some(id)) = (&mut watch, id) {
                    w.stale(&id);
                }
            }
        }
    }
}

/// Serves the rails, for ever. `runtime`: the descriptor on which the runtime of this thread waits.
#[expect(clippy::too_many_lines)]
pub async fn run(shared: Shared, runtime: Option<OwnedFd>) {
    let has_devices = shared
        .borrow()
        .rails
        .as_ref()
        .is_some_and(Rails::has_devices);
    if !has_devices {
        shared.borrow_mut().rails(Rails::tell_refusals);
        return;
    }
    let (tell, stale) = tokio::sync::mpsc::unbounded_channel();
    tokio::task::spawn_local(watch(shared.clone(), stale));
    let set = match epoll::create(epoll::CreateFlags::CLOEXEC) {
        Ok(s) => Arc::new(s),
        Err(e) => return tracing::error!("rails cannot be served: {e}"),
    };
    let mut alarm = match Alarm::new(&set) {
        Ok(a) => a,
        Err(e) => return tracing::error!("rails cannot be served: {e}"),
    };
    if let Some(r) = &mut shared.borrow_mut().rails {
        r.wait_in(&set);
    }
    let alone = std::thread::available_parallelism().map_or(1, usize::from) == 1;
    let turn_ns = if alone { TURN_NS } else { TURN_SPINNING_NS };
    let mut worked_at = 0;
    let mut turn_at = 0;
    // Is the runtime's descriptor in our set? (Otherwise ours is in the runtime's.)
    let mut warm = false;
    // May a task of this thread be ready? The runtime's descriptor does not tell.
    let mut others = true;
    loop {
        let t = now();
        let Some(p) = shared.borrow_mut().poll_rails(t) else {
            return;
        };
        if p.worked {
            worked_at = t;
        }
        others |= p.told;
        let spins = !alone && t < worked_at + SPIN_NS;
        if spins {
            shared.borrow_mut().rails(Rails::rouse);
        }
        if spins || p.more {
            if t >= turn_at + turn_ns {
                turn_at = t;
                tokio::task::yield_now().await;
            }
            continue;
        }
        if shared.borrow_mut().rails(Rails::doze) == Some(true) {
            continue;
        }
        if std::mem::take(&mut others) {
            turn_at = t;
            tokio::task::yield_now().await;
            continue;
        }
        let is_warm = t < worked_at + WARM_NS;
        if is_warm != warm {
            warm = is_warm;
            if let Some(fd) = &runtime {
                match warm {
                    true => add(&set, fd.as_raw_fd(), RUNTIME),
                    false => drop(epoll::delete(&*set, fd)),
                }
            }
        }
        let mut sleeps = false;
        if warm {
            let turn = match runtime {
                Some(_) => LATE_NS,
                None => turn_ns,
            };
            sleeps = alarm.by(p.next.min(t + turn));
        } else {
            let left = Duration::from_nanos(p.next.saturating_sub(t));
            match crate::fds::watch(set.clone(), Interest::READABLE) {
                Ok(ours) => tokio::select! {
                    _ = ours.readable() => {}
                    () = tokio::time::sleep(left) => {}
                },
                Err(_) => tokio::time::sleep(left.min(Duration::from_nanos(LATE_NS))).await,
            }
        }
        let mut stale = Vec::new();
        let woken = shared.borrow_mut().rails(|r| {
            let woken = r.wait(sleeps, alone);
            if woken.device {
                stale = r.device_events();
            }
            woken
        });
        let woken = woken.unwrap_or_default();
        others |= woken.device;
        for id in stale {
            let _ = tell.send(id);
        }
        if woken.alarm {
            alarm.over();
        }
        if woken.runtime || woken.alarm {
            turn_at = now();
            tokio::task::yield_now().await;
            others = true; // what had its turn may have woken more
        }
    }
}
