//! Who pays for the pages of a ring. A page of the sender's file that nobody has written yet is made by whoever touches it,
//! also by a reader through a mapping that it may only read, and is charged to that one's memory cgroup. A sender that
//! announces bytes which it has never written would so have its reader pay for its rings.
//!
//! So a ring is read as a file at first, which makes no pages. Once the cursor has been all round it, an honest sender has
//! written all of it; no page can go away again (the file is sealed against holes). The receiver makes sure that its pages
//! are there ([`Port::is_backed`]), and from then on reads the mapping. If they are not, or if that could not be seen (the
//! sender has made pages elsewhere in the file at that instant), it goes on reading the file, and looks again after twice
//! as many rounds each time: a look may cost it a page.

use super::RxState;
use crate::abi::{Cursor, Loc};
use crate::half::mem::Memory;
use crate::half::Port;
use crate::num;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// What is known of the pages of the ring in use. Zero: nothing is. Used under the direction's lock only.
#[derive(Default)]
#[repr(transparent)]
pub(super) struct Proof(AtomicU32);

const PAGE: u32 = 4096;
/// All pages of the ring are there.
const BACKED: u32 = 1;
/// How often that was not seen, on this lane. (The higher bits: the cursor, but for its upper half, from which on it is
/// looked at again.)
const FAILURE: u32 = 2;
const FAILURES: u32 = 31 * FAILURE;
/// Most bytes between two looks: half of what can be told from what lies behind.
const MOST: u64 = 1 << 30;

impl Proof {
    #[inline(always)]
    pub(super) fn is_backed(&self) -> bool {
        self.0.load(Relaxed) & BACKED != 0
    }

    /// Another use of the lane.
    pub(super) fn forget(&self) {
        self.0.store(0, Relaxed);
    }

    /// Another ring, that is read from `cursor` on. `known`: its pages are there.
    pub(super) fn begin(&self, cursor: Cursor, loc: Option<Loc>, known: bool) {
        let failures = self.0.load(Relaxed) & FAILURES;
        let size = loc.map_or(0, |l| l.bytes() as u64);
        self.0
            .store(from(cursor, size) | failures | u32::from(known), Relaxed);
    }

    /// Is it to be looked at?
    fn is_due(&self, cursor: Cursor) -> bool {
        let at = self.0.load(Relaxed) & !(PAGE - 1);
        let passed = num::low32(cursor.get()).wrapping_sub(at);
        !self.is_backed() && passed < u32::MAX / 2
    }

    fn store(&self, cursor: Cursor, loc: Loc, backed: bool) {
        let was = self.0.load(Relaxed);
        if backed {
            return self.0.store(was | BACKED, Relaxed);
        }
        let failures = (was & FAILURES) / FAILURE;
        let next = (failures + 1).min(FAILURES / FAILURE);
        let bytes = (loc.bytes() as u64).saturating_mul(1 << next).min(MOST);
        self.0
            .store(from(cursor, bytes) | (next * FAILURE), Relaxed);
    }
}

/// The lower half of the cursor so many bytes from here, at the next page.
fn from(cursor: Cursor, bytes: u64) -> u32 {
    let at = cursor.get().wrapping_add(bytes);
    num::low32(at.wrapping_add(u64::from(PAGE) - 1)) & !(PAGE - 1)
}

impl RxState {
    /// Copies out of a ring whose pages may not be there. False: it has to be copied from the mapping.
    ///
    /// # Safety
    /// As [`crate::half::mem::copy_out`].
    #[cold]
    pub(super) unsafe fn copy_unproven(
        port: &impl Port,
        loc: Loc,
        at: Cursor,
        dst: *mut u8,
        len: usize,
    ) -> bool {
        let Some([head, tail]) = loc.pieces(at, len) else {
            return false;
        };
        let first = head.len();
        port.read_ring(loc.chunk, head, dst)
            // SAFETY: within the `len` bytes, of which the first piece has taken its part.
            && (tail.is_empty() || port.read_ring(loc.chunk, tail, unsafe { dst.add(first) }))
    }

    /// After a take up to `cursor`: looks whether the ring in use, if it was read all round, has all of its pages.
    #[cold]
    pub(super) fn prove(&self, m: &Memory, port: &impl Port, cursor: Cursor) {
        if !self.proof.is_due(cursor) {
            return;
        }
        let loc = self.loc.load(Relaxed).loc();
        if let Some((loc, ring)) = loc.and_then(|l| Some((l, m.peer.ring(l)?))) {
            self.proof
                .store(cursor, loc, port.is_backed(loc.chunk, ring));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn due_after_a_round_and_then_twice_as_late() {
        let loc = Loc {
            chunk: 1,
            page: 0,
            log2: 16,
        };
        // (Before, and beyond, the cursor's lower half is full.)
        for start in [0, 100, 5 << 32, u64::from(u32::MAX) - 1000] {
            let p = Proof::default();
            let at = |n: u64| Cursor::new(start + n);
            let round = 1u64 << 16;
            p.begin(at(0), Some(loc), false);
            assert!(!p.is_due(at(0)) && !p.is_due(at(round - 1)));
            assert!(p.is_due(at(round + 4096)) && !p.is_backed());
            p.store(at(round), loc, false);
            assert!(!p.is_due(at(3 * round - 1)) && p.is_due(at(3 * round + 4096)));
            p.store(at(3 * round), loc, false);
            assert!(!p.is_due(at(7 * round - 1)) && p.is_due(at(7 * round + 4096)));
            for _ in 0..40 {
                p.store(at(0), loc, false);
            }
            assert!(!p.is_due(at(MOST - 1)) && p.is_due(at(MOST + 4096)));
            // Another ring begins anew, but what failed is not forgotten.
            p.begin(at(0), Some(loc), false);
            assert!(!p.is_due(at(round - 1)) && p.is_due(at(round + 4096)));
            p.store(at(round), loc, false);
            assert!(!p.is_due(at(MOST)));
            p.store(at(0), loc, true);
            assert!(p.is_backed() && !p.is_due(at(MOST + 4096)));
            p.begin(at(0), Some(loc), false);
            assert!(!p.is_backed());
            p.begin(at(0), Some(loc), true);
            assert!(p.is_backed());
            p.forget();
            p.begin(at(0), Some(loc), false);
            p.store(at(round), loc, false);
            assert!(p.is_due(at(3 * round + 4096)));
        }
    }
}
