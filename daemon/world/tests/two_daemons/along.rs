//! Captures of lanes, at either node and at any time, by a reader that is late now and then: what they show must be what
//! was sent, at its place, and nothing twice.

use super::app::byte;
use super::family::Shared;
use super::seen::{self, note};
use super::World;
use underpass_rdma::sim::Rng;

/// Captures at a time.
const MAX: usize = 6;

/// Is called with an end, a place in what it sends, how many bytes were lost before it, and bytes.
pub type Show<'a> = dyn FnMut(usize, u64, u64, &[u8]) + 'a;

/// Looks at the direction of this end first. Whether the lane goes on.
pub type Look = Box<dyn FnMut(usize, &mut Show<'_>) -> bool>;

pub struct Capture {
    entry: Shared,
    lane: Look,
    /// Where the next byte of this end and of the other one is expected, at least.
    next: [u64; 2],
}

impl World {
    /// Begins some, ends some, and looks.
    pub fn read_along(&self) {
        let mut rng = self.watcher.borrow_mut();
        if rng.one_in(10) {
            self.begin_capture(&mut rng);
        }
        let mut all = self.captures.borrow_mut();
        if !all.is_empty() && rng.one_in(300) {
            let n = rng.below(all.len() as u64) as usize;
            all.swap_remove(n);
        }
        if rng.one_in(3) {
            all.retain_mut(|c| c.look(rng.below(2) as usize));
        }
    }

    fn begin_capture(&self, rng: &mut Rng) {
        if self.captures.borrow().len() >= MAX {
            return;
        }
        let n = rng.below(2) as usize;
        let all = self.nodes[n].processes.borrow();
        let Some(p) = all.get(rng.below(all.len() as u64) as usize) else {
            return;
        };
        let Ok(p) = p.try_borrow() else { return };
        if p.ends.is_empty() {
            return;
        }
        let end = &p.ends[rng.below(p.ends.len() as u64) as usize];
        let Some(lane) = self.nodes[n].along(p.pid, end.name) else {
            return;
        };
        note("a capture");
        self.captures.borrow_mut().push(Capture {
            entry: end.entry.clone(),
            lane,
            next: [0; 2],
        });
    }
}

impl Capture {
    /// Whether it goes on.
    fn look(&mut self, first: usize) -> bool {
        let Ok(entry) = self.entry.try_borrow() else {
            return true; // it is within a call
        };
        let (app, next) = (&entry.app, &mut self.next);
        let mut shown = 0;
        let goes_on = (self.lane)(first, &mut |end, at, lost, bytes| {
            let salt = [app.salt, app.peer_salt][end];
            let ahead = at.checked_sub(next[end]);
            assert!(
                ahead.is_some_and(|n| lost <= n || next[end] == 0),
                "end {end}: {at} after {next:?}, lost {lost}"
            );
            for (at, b) in (at..).zip(bytes) {
                assert_eq!(*b, byte(salt, at), "byte {at} of end {end} is another one");
            }
            next[end] = at + bytes.len() as u64;
            shown += bytes.len() as u64;
        });
        seen::add("bytes shown by captures", shown);
        goes_on
    }
}
