//! The set of descriptors that wake the data plane: what is in it, and what each of them means.

use super::Rails;
use lane::notify::doorbell::Drained;
use lane::num;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use underpass_rdma::verbs::{CompletionQueue, Provider};

/// How often engines are polled without work, for what depends on time only.
const IDLE_NS: u64 = 100_000_000;
/// Result of a poll.
pub struct Polled {
    pub worked: bool,
    /// There is more to do at once.
    pub more: bool,
    /// When to poll again if nothing happens until then.
    pub next: u64,
}

impl<V: Provider> Rails<V> {
    /// Does what is due in all engines and for all lanes.
    pub fn poll(&mut self, now: u64) -> Polled {
        let names = self.names.clone();
        let mut worked = false;
        for name in &*names {
            worked |= self.poll_node(name, now);
        }
        if worked {
            self.busy_until = now + 1_000_000_000;
            self.tend_at = self.tend_at.min(now + super::takeover::LATE_NS);
        }
        let mut next = self.tend(now).unwrap_or(u64::MAX);
        let quiet = if now < self.busy_until { 0 } else { IDLE_NS };
        let mut more = false;
        for n in self.nodes.values() {
            next = next.min(n.pair.next_timer_ns(quiet));
            more |= n.pair.unfinished();
        }
        more |= next <= now;
        Polled { worked, more, next }
    }

    /// From now on this set wakes the data plane.
    pub fn wait_in(&mut self, set: &Arc<OwnedFd>) {
        self.set = Some(set.clone());
        self.wake.iter().for_each(|k| add(set, k.as_raw_fd(), WAKE));
        self.watch_devices();
    }

    /// Counts the data plane asleep, and arms everything that may wake it. True if any of this is new: then it
    /// must poll once more before it sleeps.
    pub fn fall_asleep(&mut self) -> bool {
        let Some(set) = &self.set else { return false };
        let mut news = false;
        for n in self.nodes.values_mut() {
            let node = u64::from(n.number);
            news |= n.pair.arm(|group, cq| {
                if let Some(fd) = cq.fd() {
                    add(set, fd, QUEUE | node << 32 | u64::from(group));
                }
            });
            if !self.armed {
                n.pair.fall_asleep();
            }
        }
        !std::mem::replace(&mut self.armed, true) || news
    }

    /// Adds the events of devices that may have been opened. (A descriptor leaves the set when its device is
    /// closed.) Called once a second, because it may fail.
    pub fn watch_devices(&self) {
        if let (Some(set), Some(d)) = (&self.set, &self.devices) {
            d.event_fds().for_each(|fd| add(set, fd, DEVICE));
        }
    }

    /// Takes [`Rails::fall_asleep`] back.
    pub fn wake_up(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.nodes.values().for_each(|n| n.pair.wake_up());
        }
    }

    /// Handles the events that have woken the data plane. `stay`: it stays counted as asleep.
    pub fn woken(&mut self, ready: &[epoll::Event], stay: bool) -> Woken {
        let mut woken = Woken::default();
        if !stay {
            self.wake_up();
        }
        let Some(set) = self.set.clone() else {
            return woken;
        };
        for e in ready {
            let data = e.data.u64();
            let (node, low) = ((data >> 32) as u32 & 0xff_ffff, num::low32(data));
            match data & KIND {
                QUEUE => {
                    let of = self.nodes.values_mut().find(|n| n.number == node);
                    of.into_iter().for_each(|n| n.pair.notified(low, stay));
                }
                BELL => {
                    // Numbers of this daemon's link groups differ in their lower half.
                    let of = self
                        .groups
                        .iter()
                        .find(|(group, _)| num::low32(**group) == low);
                    let Some((_, b)) = of else { continue };
                    if lane::notify::doorbell::drain(b.bell.as_fd()) == Drained::Gone {
                        // The hung-up doorbell would wake us for ever; what happens to the link group is learned in
                        // other ways.
                        let _ = epoll::delete(&*set, &b.bell);
                    }
                }
                ALARM => woken.alarm = true,
                WAKE => drain(self.wake.as_deref()),
                _ => woken.device = true,
            }
        }
        woken
    }
}

/// Events that are left to the caller.
#[derive(Default)]
pub struct Woken {
    pub device: bool,
    pub alarm: bool,
}

/// What an entry of the set stands for: the highest byte of its data.
const KIND: u64 = 0xff << 56;
const QUEUE: u64 = 1 << 56;
const BELL: u64 = 2 << 56;
const DEVICE: u64 = 3 << 56;
pub(crate) const ALARM: u64 = 4 << 56;
const WAKE: u64 = 5 << 56;

pub(crate) fn drain(fd: Option<&OwnedFd>) {
    fd.map(|fd| rustix::io::read(fd, &mut [0u8; 8]));
}

pub(crate) fn add(set: &OwnedFd, fd: RawFd, data: u64) {
    // SAFETY: of a link group, queue or device that the caller holds; used for this call only.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match epoll::add(set, fd, EventData::new_u64(data), EventFlags::IN) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => tracing::warn!("cannot wait for a device or link: {e}"),
    }
}

/// Adds the doorbell of a link group, which stays in the set as long as the link group.
pub(super) fn watch_bell(set: &OwnedFd, bell: BorrowedFd<'_>, group: u64) {
    add(set, bell.as_raw_fd(), BELL | u64::from(num::low32(group)));
}
