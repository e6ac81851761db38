//! The daemon's side of a remote link group: the process's area, which is only read here; the daemon's own area, which
//! peers' devices write; and the memory for incoming rings in the latter.

use lane::abi::{
    Control, Loc, CHUNKS, CONTROL_BYTES, LANES_PER_COUNTER, RING_LOG2_MAX, RING_LOG2_MIN,
};
use lane::half::{Area, Memory as LaneMemory};
use lane::notify;
use lane::num;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use underpass_rdma::engine::ClientMemory;
use underpass_rdma::verbs::{Mapping, Memory};

/// The words at the beginning of an area's first chunk.
fn control(m: &Mapping) -> Option<NonNull<Control>> {
    (m.len() >= CONTROL_BYTES).then(|| m.addr().cast())
}

/// What both clients of a link group have mapped, as this daemon sees it.
#[derive(Default)]
pub(super) struct Areas {
    own: Area,
    app: Area,
    /// The mappings of both, by chunk.
    maps: Mutex<[Vec<Arc<Mapping>>; 2]>,
}

impl Areas {
    fn map(&self, own: bool, n: usize) -> Option<Arc<Mapping>> {
        let maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        maps[usize::from(own)].get(n).cloned()
    }

    /// Memory of a lane as a takeover of its sending direction uses it.
    pub(super) fn for_takeover(&self, slot: u32) -> Option<LaneMemory<'_>> {
        LaneMemory::new(&self.app, &self.own, slot).map(|m| m.across(true).for_takeover())
    }
}

/// The areas of a link group, and which memory of ours is in use.
#[derive(Default)]
pub(super) struct DaemonArea {
    areas: Arc<Areas>,
    rings: Rings,
}

impl DaemonArea {
    /// Maps the first file of our area or the process's: chunks 0 and 1. Returns chunk 1.
    pub(super) fn enter_first(
        &mut self,
        own: bool,
        fd: &OwnedFd,
        bytes: u64,
    ) -> Option<Arc<Mapping>> {
        let control = CONTROL_BYTES as u64;
        let data = bytes.checked_sub(control)?;
        self.enter_part(own, 0, fd, (0, control))?;
        self.enter_part(own, 1, fd, (control, data))
    }

    /// Maps a further chunk of our area or the process's. `None`: it is there already, or cannot be one.
    pub(super) fn enter(
        &mut self,
        own: bool,
        n: u32,
        fd: &OwnedFd,
        bytes: u64,
    ) -> Option<Arc<Mapping>> {
        self.enter_part(own, n, fd, (0, bytes))
    }

    fn enter_part(
        &mut self,
        own: bool,
        n: u32,
        fd: &OwnedFd,
        (at, bytes): (u64, u64),
    ) -> Option<Arc<Mapping>> {
        let area = match own {
            true => &self.areas.own,
            false => &self.areas.app,
        };
        let mut maps = self
            .areas
            .maps
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let maps = &mut maps[usize::from(own)];
        let (n, len) = (n as usize, usize::try_from(bytes).ok()?);
        if maps.len() != n || n >= CHUNKS || n == 0 && len < CONTROL_BYTES {
            return None; // they come in order
        }
        let map = Arc::new(Mapping::of(fd, at, len, own).ok()?);
        // SAFETY: mapped for `len` bytes, page-aligned, and kept in `maps` as long as the area.
        unsafe {
            match n {
                0 => area.set_control(map.addr().as_ptr().cast()),
                n => area.set_chunk(n, map.addr().as_ptr(), len),
            }
        }
        maps.push(map.clone());
        Some(map)
    }

    /// The control words, once both are mapped.
    pub(super) fn words(&self) -> Option<ClientMemory> {
        let (app, own) = (self.areas.map(false, 0)?, self.areas.map(true, 0)?);
        let (a, o) = (control(&app)?, control(&own)?);
        // SAFETY: both are `CONTROL_BYTES` long, and live as long as what is kept here.
        Some(unsafe { ClientMemory::new(a, o, Arc::new((app, own))) })
    }

    pub(super) fn own_chunk(&self, n: u32) -> Option<Arc<Mapping>> {
        self.areas.map(true, n as usize)
    }

    pub(super) fn areas(&self) -> Arc<Areas> {
        self.areas.clone()
    }

    /// The process has mapped this chunk of ours: rings may lie in it.
    pub(super) fn ready(&mut self, n: u32) {
        let bytes = self.areas.own.chunk_len(n as usize);
        self.rings.chunk(n, bytes);
    }

    pub(super) fn place(&mut self, log2: u32) -> Option<Loc> {
        self.rings.alloc(log2)
    }

    pub(super) fn free(&mut self, at: Loc) {
        self.rings.free(at);
    }

    /// Announces what was stored in our words of a lane. Returns whether the doorbell must be rung.
    pub(super) fn publish(&self, slot: u32) -> bool {
        match (self.areas.own.control(), self.areas.app.control()) {
            (Some(o), Some(a)) => {
                notify::publish(&o.seq[slot as usize / LANES_PER_COUNTER].0, &a.sleepers.0)
            }
            _ => false,
        }
    }
}

/// Memory for rings: new rings are taken from a chunk's front; a ring that is given back is used again for a ring
/// of the same size.
#[derive(Default)]
pub(super) struct Rings {
    /// Chunk number, its pages, and its next free page.
    chunks: Vec<(u32, u32, u32)>,
    free: [Vec<Loc>; (RING_LOG2_MAX - RING_LOG2_MIN + 1) as usize],
}

impl Rings {
    pub(super) fn chunk(&mut self, n: u32, bytes: usize) {
        if n > 0 && self.chunks.iter().all(|c| c.0 != n) {
            self.chunks.push((n, num::small(bytes / 4096), 0));
        }
    }

    pub(super) fn alloc(&mut self, log2: u32) -> Option<Loc> {
        let class = log2.checked_sub(RING_LOG2_MIN)? as usize;
        if let Some(loc) = self.free.get_mut(class)?.pop() {
            return Some(loc);
        }
        let pages = 1u32 << (log2 - 12);
        let (chunk, _, next) = self
            .chunks
            .iter_mut()
            .find(|(_, all, next)| all - *next >= pages)?;
        let loc = Loc {
            chunk: *chunk,
            page: *next,
            log2,
        };
        *next += pages;
        Some(loc)
    }

    pub(super) fn free(&mut self, at: Loc) {
        if let Some(of) = self.free.get_mut((at.log2 - RING_LOG2_MIN) as usize) {
            of.push(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_do_not_overlap_and_come_again() {
        let mut r = Rings::default();
        assert_eq!(r.alloc(16), None, "no chunk yet");
        r.chunk(1, 1 << 20);
        r.chunk(1, 1 << 20);
        let a: Vec<Loc> = (0..16).map(|_| r.alloc(16).unwrap()).collect();
        let mut pages: Vec<u32> = a.iter().map(|l| l.page).collect();
        pages.dedup();
        assert_eq!(pages, (0..16).map(|i| i * 16).collect::<Vec<_>>());
        assert_eq!(r.alloc(12), None, "the chunk is full");
        r.free(a[3]);
        assert_eq!(r.alloc(17), None, "another size");
        assert_eq!(r.alloc(16), Some(a[3]));
        r.chunk(2, 1 << 20);
        assert_eq!(r.alloc(20).map(|l| (l.chunk, l.page)), Some((2, 0)));
        assert_eq!(r.alloc(30), None);
        assert_eq!(r.alloc(3), None);
    }

    /// The two sides of a link group see each other's words; only ours can be written here.
    #[test]
    fn maps_are_shared() {
        use lane::abi::Cursor;
        use std::sync::atomic::Ordering::Relaxed;
        const BYTES: usize = CONTROL_BYTES + 8192;
        let file = crate::os::memfd::make("t", BYTES).unwrap();
        let mut s = DaemonArea::default();
        assert!(s.enter(true, 2, &file, 4096).is_none(), "out of order");
        let small = CONTROL_BYTES as u64;
        assert!(s.enter_first(true, &file, small - 4096).is_none(), "small");
        s.enter_first(true, &file, BYTES as u64).unwrap();
        assert!(s.words().is_none());
        let other = crate::os::memfd::make("t", BYTES).unwrap();
        rustix::io::pwrite(&other, b"ring", CONTROL_BYTES as u64 + 4096).unwrap();
        let chunk = s.enter_first(false, &other, BYTES as u64).unwrap();
        let mut first = [0; 4];
        assert!(chunk.len() == 8192 && chunk.read(4096, &mut first) && &first == b"ring");
        assert!(s.words().is_some());
        let app = Mapping::of(&other, 0, CONTROL_BYTES, true).unwrap();
        // SAFETY: mapped, of that size, all atomics.
        let words = unsafe { control(&app).unwrap().as_ref() };
        words.heads[7].store(Cursor::new(42), Relaxed);
        words.sleepers.0.store(1, Relaxed);
        assert_eq!(
            s.areas().for_takeover(7).unwrap().own_head().load(Relaxed),
            Cursor::new(42)
        );
        let own = Mapping::of(&file, 0, CONTROL_BYTES, true).unwrap();
        // SAFETY: as above.
        let own = unsafe { control(&own).unwrap().as_ref() };
        let told = || own.seq[7 / LANES_PER_COUNTER].0.load(Relaxed);
        assert_eq!(told(), 0);
        assert!(s.publish(7), "it sleeps");
        assert_eq!(told(), 1);
        words.sleepers.0.store(0, Relaxed);
        assert!(!s.publish(7), "it is awake");
        assert_eq!(told(), 2);
    }
}
