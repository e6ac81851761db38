//! Memory that is charged to programs because of lanes, or to this daemon: not so much that a memory cgroup gets full.

use super::Core;
use crate::clients::ids::ClientId;
use crate::clients::limits::Limit;
use crate::lanes::groups::Size;
use crate::os::memory_room::{Granted, Room, Rooms};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use underpass_rdma::verbs::Provider;

/// Of a lane, besides its ring: the pages of the words that it uses, some of which others use as well.
const WORDS: u64 = 6 * 4096;

/// The memory cgroups of the programs, and of this daemon.
pub(super) struct Memory {
    pub(super) rooms: Rooms,
    own: Own,
}

impl Memory {
    pub(super) fn here() -> Memory {
        let mut rooms = Rooms::here();
        let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = Own::of(rooms.of(&cgroups));
        Memory { rooms, own }
    }
}

/// The memory cgroup of this daemon. What other nodes write to is charged to it, and at once, because devices hold it.
struct Own {
    room: Rc<Room>,
    granted: Cell<u64>,
}

impl Own {
    fn of(room: Rc<Room>) -> Own {
        let granted = Cell::new(0);
        Own { room, granted }
    }

    fn takes(&self, bytes: u64, now: Duration) -> bool {
        let ever = self.granted.get();
        let granted = Granted {
            held: u64::MAX, // (it has other memory as well)
            ever,
            untouched: || 0,
        };
        let fits = self.room.has(bytes, now, granted);
        if fits {
            self.granted.set(ever.wrapping_add(bytes));
        }
        fits
    }
}

impl<V: Provider> Core<V> {
    fn takes(&self, id: ClientId, bytes: u64) -> bool {
        let now = self.now();
        if id.is_remote() {
            let fits = self.memory.own.takes(bytes, now);
            if !fits {
                self.remote_cgroup.refused(Limit::Room);
            }
            return fits;
        }
        let Some(p) = self.clients.get(&id) else {
            return true;
        };
        let payer = p.cgroup();
        // (Whoever has no limit may be of the same tenant: what he has not touched harms nobody.)
        let counts = |c| self.is_limited(c);
        let granted = Granted {
            held: payer.memory_taken(),
            ever: payer.memory_granted(),
            untouched: || self.groups.untouched(payer, counts),
        };
        let fits = p.room.has(bytes, now, granted);
        if !fits {
            payer.refused(Limit::Room);
        }
        fits
    }

    fn is_limited(&self, id: ClientId) -> bool {
        let p = self.clients.get(&id);
        p.is_some_and(|p| p.room.is_limited(self.now()))
    }

    /// How much memory the area of this process opposite that one gets at a time, and what another lane may take.
    fn needs(&self, id: ClientId, other: ClientId) -> (Size, u64) {
        let size = match id.is_remote() || other.is_remote() {
            true => Size::Remote,
            false if self.is_limited(id) => Size::Small(self.config.ring_log2.into()),
            false => Size::Whole,
        };
        let ring = (1_u64 << self.config.ring_log2) + WORDS;
        (size, self.groups.lacks(id, other, size).unwrap_or(ring))
    }

    /// Is there memory for another lane of these two? (One of them may stand for another node: then it is this daemon's.)
    /// How much memory their areas get at a time, or which of them has none.
    pub(super) fn may_have_lane(&self, ends: [ClientId; 2]) -> Result<[Size; 2], usize> {
        let needs = [self.needs(ends[0], ends[1]), self.needs(ends[1], ends[0])];
        let tenant = |id: &ClientId| self.clients.get(id).map(|p| p.cgroup());
        let (a, b) = (tenant(&ends[0]), tenant(&ends[1]));
        let both = a.zip(b).is_some_and(|(a, b)| Arc::ptr_eq(a, b));
        for at in 0..2 {
            // One tenant that has both ends must have room for both.
            let beside = match needs[1 - at] {
                (Size::Small(_), bytes) if both => bytes,
                _ => 0,
            };
            if !self.takes(ends[at], needs[at].1 + beside) {
                return Err(at);
            }
        }
        Ok(needs.map(|n| n.0))
    }

    /// Is there memory for more of this link group? If not, the process goes on without, and asks again.
    pub(super) fn may_grow(&mut self, id: ClientId, (group, side): (u64, u8)) -> bool {
        let Some(bytes) = self.groups.would_grow(id, group, side) else {
            return true;
        };
        let fits = self.takes(id, bytes);
        if !fits {
            self.groups.starve(group, side);
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What was granted and does not show yet counts; after a second it shows.
    #[test]
    fn the_daemons_own_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let used = |n: u64| {
            let file = dir.path().join("memory.current");
            std::fs::write(file, format!("{}\n", n * MIB)).unwrap();
        };
        let max = dir.path().join("memory.max");
        std::fs::write(&max, format!("{}\n", 64 * MIB)).unwrap(); // 8 of that are left
        used(48);
        let own = Own::of(Rooms::at(dir.path()).of("0::/\n"));
        let takes = |ms| own.takes(4 * MIB, Duration::from_millis(ms));
        assert!(takes(0) && takes(200) && !takes(400));
        used(56);
        assert!(!takes(2000));
        used(52);
        assert!(takes(4000) && !takes(4200));
        std::fs::write(max, "max\n").unwrap();
        assert!(takes(4400));
    }
}
