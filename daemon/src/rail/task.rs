//! The task that polls the engines, and how it sleeps.
//!
//! While there is work, or was a moment ago, it polls, if there is more than one processor; the
//! daemon's other tasks have their turn in between. Otherwise it asks the completion queues for a
//! notification, counts itself asleep on every link, polls once more, and sleeps on all their
//! descriptors until something comes or is due.

use super::{now, Locked, Rails};
use crate::core::Shared;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use underpass_rdma::devices::{Tree, Watch};
use underpass_rdma::verbs::{CompletionQueue, DeviceId};

/// Polls on for so long after the last work, where there is more than one processor: longer than a
/// wake-up costs (about 50 µs).
const SPIN_NS: u64 = 60_000;
/// Where there is only one processor: rounds with work until others have their turn.
const TURNS: u32 = 4;
/// Without work, engines are polled this often for what only time brings.
const IDLE_NS: u64 = 100_000_000;
/// Devices are looked at this often.
const LOOK: Duration = Duration::from_secs(1);

/// What a poll brought.
pub struct Polled {
    pub worked: bool,
    /// When to poll again although nothing happens.
    pub next: u64,
}

impl Rails {
    /// Does what there is to do, in all engines and for all lanes.
    pub fn poll(&mut self, now: u64, locked: Locked<'_>) -> Polled {
        let names = self.names.clone();
        let mut worked = false;
        for name in &*names {
            worked |= self.poll_node(name, now);
        }
        if worked {
            self.busy_until = now + 1_000_000_000;
            self.tend_at = self.tend_at.min(now + super::custody::LATE_NS);
        }
        let mut next = self.tend(now, locked).unwrap_or(u64::MAX);
        let quiet = if now < self.busy_until { 0 } else { IDLE_NS };
        for n in self.nodes.values() {
            next = next.min(n.pair.next_timer_ns() + quiet);
        }
        Polled { worked, next }
    }

    /// Counts us asleep, and asks everything that may wake us to do so. Poll once more.
    fn doze(&mut self) {
        let Some(set) = &self.set else { return };
        for n in self.nodes.values_mut() {
            let node = u64::from(n.number);
            n.pair.arm(|link, cq| {
                if let Some(fd) = cq.fd() {
                    add(set, fd, QUEUE | node << 32 | u64::from(link));
                }
            });
            n.pair.doze();
        }
        self.dozing = true;
    }

    /// Devices may have been opened: their events wake us, too. (A descriptor leaves the set when its
    /// device is closed.) Done once a second: a try may fail.
    pub(super) fn watch_devices(&self) {
        if let (Some(set), Some(d)) = (&self.set, &self.devices) {
            d.event_fds().for_each(|fd| add(set, fd, DEVICE));
        }
    }

    /// Takes [`Rails::doze`] back.
    fn rouse(&mut self) {
        if std::mem::take(&mut self.dozing) {
            self.nodes.values().for_each(|n| n.pair.rouse());
        }
    }

    /// Takes in what has woken us. Whether a device has something to say, and whether there may be
    /// more than these.
    fn woken(&mut self) -> (bool, bool) {
        let Some(set) = &self.set else {
            return (false, false);
        };
        let mut device = false;
        let mut ready = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let Ok((ready, left)) = epoll::wait(set, &mut ready[..], Some(&now)) else {
            return (false, false);
        };
        for e in ready.iter() {
            let data = e.data.u64();
            let (node, low) = ((data >> 32) as u32 & 0xff_ffff, data as u32);
            match data & KIND {
                QUEUE => {
                    let of = self.nodes.values_mut().find(|n| n.number == node);
                    of.into_iter().for_each(|n| n.pair.notified(low));
                }
                BELL => {
                    // Numbers of links differ in their lower half.
                    let of = self.banks.iter().find(|(link, _)| **link as u32 == low);
                    of.map(|(_, b)| link::doorbell::drain(b.bell.as_fd()));
                }
                _ => device = true,
            }
        }
        (device, left.is_empty())
    }
}

/// What an entry of the set stands for: the highest byte of its data.
const KIND: u64 = 0xff << 56;
const QUEUE: u64 = 1 << 56;
const BELL: u64 = 2 << 56;
const DEVICE: u64 = 3 << 56;

fn add(set: &OwnedFd, fd: RawFd, data: u64) {
    // SAFETY: of a link, queue or device that the caller holds; used for this call only.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match epoll::add(set, fd, EventData::new_u64(data), EventFlags::IN) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => tracing::warn!("cannot wait for a device or link: {e}"),
    }
}

/// The doorbell of a link, from its making to its end.
pub(super) fn watch_bell(set: &OwnedFd, bell: BorrowedFd<'_>, link: u64) {
    add(set, bell.as_raw_fd(), BELL | u64::from(link as u32));
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

/// Serves the rails, for ever.
pub async fn run(shared: Shared) {
    let has_devices = shared
        .borrow()
        .rails
        .as_ref()
        .is_some_and(|r| r.devices.is_some());
    let Some(kick) = shared.borrow().rails_kick() else {
        return;
    };
    if !has_devices {
        shared.borrow_mut().rails(Rails::tell_refusals);
        return;
    }
    let (tell, stale) = tokio::sync::mpsc::unbounded_channel();
    tokio::task::spawn_local(watch(shared.clone(), stale));
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)
        .map_err(std::io::Error::from)
        .and_then(|fd| crate::fds::watch(fd, Interest::READABLE));
    let set: AsyncFd<OwnedFd> = match set {
        Ok(s) => s,
        Err(e) => return tracing::error!("rails cannot be served: {e}"),
    };
    if let Some(r) = &mut shared.borrow_mut().rails {
        r.set = set.get_ref().try_clone().ok();
        r.watch_devices();
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut worked_at = 0;
    let mut rounds = 0u32;
    // One timer that is only ever set to an earlier time or when it is over: it wakes us too early
    // now and then, which costs less than setting it before every sleep.
    let mut timer = std::pin::pin!(tokio::time::sleep(Duration::ZERO));
    let mut due = 0;
    let mut ready = false;
    loop {
        let t = now();
        let Some(p) = shared.borrow_mut().poll_rails(t) else {
            return;
        };
        if p.worked {
            worked_at = t;
        }
        if processors > 1 && t < worked_at + SPIN_NS {
            tokio::task::yield_now().await;
            continue;
        }
        if let Some(r) = &mut shared.borrow_mut().rails {
            r.doze();
        }
        let t = now();
        let Some(p) = shared.borrow_mut().poll_rails(t) else {
            return;
        };
        if p.worked {
            worked_at = t;
            rounds += 1;
            if rounds.is_multiple_of(TURNS) {
                tokio::task::yield_now().await; // the daemon's other tasks have their turn
            }
        } else if !ready {
            if due <= t || p.next < due {
                due = p.next;
                let left = Duration::from_nanos(due.saturating_sub(t));
                timer.as_mut().reset(tokio::time::Instant::now() + left);
            }
            tokio::select! {
                r = set.readable() => {
                    if let Ok(mut r) = r {
                        r.clear_ready();
                    }
                    ready = true;
                }
                () = kick.notified() => {}
                () = &mut timer => due = 0,
            }
        }
        let stale = shared.borrow_mut().rails(|r| {
            r.rouse();
            let (device, more) = if ready { r.woken() } else { (false, false) };
            ready = more;
            match device {
                true => r.device_events(),
                false => Vec::new(),
            }
        });
        for id in stale.into_iter().flatten() {
            let _ = tell.send(id);
        }
    }
}
