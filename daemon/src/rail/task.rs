//! The task that polls the engines, and how it sleeps.
//!
//! While there is work, or was a moment ago and processors are not scarce, it polls; the daemon's
//! other tasks have their turn in between. Otherwise it asks the completion queues for a
//! notification, counts itself asleep on every link, polls once more, and sleeps on all their
//! descriptors until something comes or is due.

use super::{now, Locked, Rails};
use crate::core::Shared;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use underpass_rdma::devices::{Tree, Watch};
use underpass_rdma::verbs::{CompletionQueue, DeviceId};

/// Polls on for so long after the last work, where there is more than one processor: longer than a
/// wake-up costs (about 50 µs).
const SPIN_NS: u64 = 60_000;
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
        let names: Vec<_> = self.nodes.keys().cloned().collect();
        let mut worked = false;
        for name in &names {
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

    /// Counts us asleep, and puts everything that may wake us into the set. Poll once more.
    fn doze(&mut self, set: &OwnedFd) {
        let add = |fd: RawFd| {
            // SAFETY: of a link or device that is held here; used for this call only.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            match epoll::add(set, fd, EventData::new_u64(0), EventFlags::IN) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => tracing::warn!("cannot wait for a device or link: {e}"),
            }
        };
        for n in self.nodes.values() {
            let _ = n.pair.each_cq(|cq| {
                let _ = cq.take_notifications();
                if cq.arm().is_ok() {
                    cq.fd().into_iter().for_each(add);
                }
            });
            n.pair.doze();
        }
        for b in self.banks.values() {
            add(std::os::fd::AsRawFd::as_raw_fd(&b.bell));
        }
        if let Some(d) = &self.devices {
            d.event_fds().for_each(add);
        }
        self.dozing = true;
    }

    /// Takes [`Rails::doze`] back.
    fn rouse(&mut self) {
        if std::mem::take(&mut self.dozing) {
            self.nodes.values().for_each(|n| n.pair.rouse());
        }
        for b in self.banks.values() {
            link::doorbell::drain(b.bell.as_fd());
        }
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
        if !changes.is_empty() {
            shared.borrow_mut().rails(|r| r.devices_changed(&changes));
        }
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
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut worked_at = 0;
    loop {
        let t = now();
        let Some(p) = shared.borrow_mut().poll_rails(t) else {
            return;
        };
        if p.worked {
            worked_at = t;
        }
        if p.worked || processors > 1 && t < worked_at + SPIN_NS {
            tokio::task::yield_now().await;
            continue;
        }
        if let Some(r) = &mut shared.borrow_mut().rails {
            r.doze(set.get_ref());
        }
        let p = shared.borrow_mut().poll_rails(now());
        if let Some(p) = p.filter(|p| !p.worked) {
            let next = Duration::from_nanos(p.next.saturating_sub(now()));
            tokio::select! {
                ready = set.readable() => {
                    if let Ok(mut ready) = ready {
                        ready.clear_ready();
                    }
                }
                () = kick.notified() => {}
                () = tokio::time::sleep(next) => {}
            }
        }
        let stale = shared.borrow_mut().rails(|r| {
            r.rouse();
            r.device_events()
        });
        for id in stale.into_iter().flatten() {
            let _ = tell.send(id);
        }
    }
}
