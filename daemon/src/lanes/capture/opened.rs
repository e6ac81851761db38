//! The memory of a lane, opened to read along.

use super::{Ledger, Surroundings};
use crate::clients::family::Family;
use crate::clients::ids::ConnRef;
use crate::lanes::groups::LaneFiles;
use crate::os::memfd;
use lane::abi::{Cursor, Loc, CONTROL_BYTES};
use lane::half::{Area, Memory};
use std::cell::Cell;
use std::sync::Arc;
use underpass_rdma::verbs::{Mapping, Memory as _};

/// Both areas: the control words are mapped, and rings are read as files, because a page that its writer has never
/// touched would be charged to this daemon.
pub(crate) struct OpenLane {
    files: LaneFiles,
    words: [Area; 2],
    /// A ring lies in a file that is not known here.
    grown: Cell<bool>,
    /// What `words` points to.
    _maps: [Mapping; 2],
}

/// One direction of it.
pub(crate) struct Sender<'a> {
    pub lane: &'a OpenLane,
    pub side: usize,
    pub family: &'a Arc<Family>,
}

impl OpenLane {
    /// `None`: no memory.
    pub(crate) fn new(files: LaneFiles) -> Option<OpenLane> {
        let map = |side: usize| {
            let (fd, bytes) = files.areas[side].first()?;
            let enough = *bytes >= CONTROL_BYTES as u64;
            Mapping::of(fd, 0, CONTROL_BYTES, false)
                .ok()
                .filter(|_| enough)
        };
        let maps = [map(0)?, map(1)?];
        let words = [Area::new(), Area::new()];
        for (area, map) in words.iter().zip(&maps) {
            // SAFETY: `CONTROL_BYTES` long, page-aligned, and kept beside the area. (Nothing here writes to it.)
            unsafe { area.set_control(map.addr().as_ptr().cast()) };
        }
        Some(OpenLane {
            files,
            words,
            grown: Cell::new(false),
            _maps: maps,
        })
    }

    pub(crate) fn files(&self) -> &LaneFiles {
        &self.files
    }

    /// The same lane, whose areas may have grown.
    pub(crate) fn grow(&mut self, files: LaneFiles) {
        self.files = files;
        self.grown.set(false);
    }

    /// Does a ring lie in a file that is not known here?
    pub(crate) fn has_grown(&self) -> bool {
        self.grown.get()
    }

    /// The words of the direction whose sender is at this side.
    pub(crate) fn memory(&self, side: usize) -> Option<Memory<'_>> {
        let (own, peer) = (self.words.get(side)?, self.words.get(1 - side)?);
        let m = Memory::new(own, peer, self.files.at.1)?;
        Some(m.across(self.files.remote))
    }

    /// Copies what lies at cursor `at` of a ring of this side. `false`: no such ring is known.
    fn read(&self, side: usize, ring: Loc, at: Cursor, to: &mut [u8]) -> bool {
        // The first file has chunks 0 and 1, each other one a chunk.
        let number = (ring.chunk as usize).checked_sub(1);
        let file = number.and_then(|n| self.files.areas.get(side)?.get(n));
        let Some((fd, bytes)) = file else {
            self.grown.set(true);
            return false;
        };
        let begin = if ring.chunk == 1 { CONTROL_BYTES } else { 0 };
        let len = bytes.checked_sub(begin as u64).map(lane::num::size);
        let Some(pieces) = ring.pieces(at, to.len()) else {
            return false;
        };
        if !len.is_some_and(|l| ring.fits(l)) {
            return false;
        }
        let mut done = 0;
        for p in pieces {
            let part = &mut to[done..done + p.len()];
            if memfd::read_at(fd, part, (begin + p.start) as u64) != Ok(p.len()) {
                return false;
            }
            done += p.len();
        }
        done == to.len()
    }
}

impl Sender<'_> {
    fn end(&self) -> ConnRef {
        self.lane.files.ends[self.side]
    }
}

impl Surroundings for Sender<'_> {
    fn read(&self, ring: Loc, at: Cursor, to: &mut [u8]) -> bool {
        self.lane.read(self.side, ring, at, to)
    }

    fn ledger(&self) -> Option<Ledger> {
        let end = self.end();
        let view = self.family.view(end.conn).filter(|v| v.gen == end.gen)?;
        Some(Ledger {
            lane: view.lane_tx,
            tcp: view.tcp_tx,
            again: view.again,
            ups: view.ups,
            before: view.tx_before,
        })
    }
}
