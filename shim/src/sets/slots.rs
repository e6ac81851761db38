//! The link groups of a set: a slot for each, as many as the process can have. Slots come in pages that are mapped when the
//! first of them is used, and stay with the set's place in the table: who looks without the lock never meets one that is gone.

use super::*;
use crate::state::groups;
use core::sync::atomic::AtomicU16;

/// Slots of a page, and pages of a set.
const PAGE: usize = 64;
const PAGES: usize = groups::LINK_GROUPS / PAGE;

/// A link group in a set.
pub struct Slot {
    /// The link group (index + 1; 0: the slot is free).
    group: AtomicU32,
    /// A bit for each publish counter with registrations. For each of these: the value last seen, and the first registration.
    pub counters: AtomicU32,
    pub seen: [AtomicU32; COUNTERS],
    pub chain: [AtomicU32; COUNTERS],
}

impl Slot {
    pub fn group(&self) -> Option<&'static LinkGroup> {
        // Acquire: pairs with `bind`.
        match self.group.load(Acquire) {
            0 => None,
            n => groups::by_index(n as usize - 1),
        }
    }

    /// The counters with registrations.
    #[inline(always)]
    pub fn each_counter(&self) -> impl Iterator<Item = usize> {
        bits(self.counters.load(Relaxed).into())
    }
}

/// Zeroed memory is a page of free slots.
pub struct Page {
    /// Which slots are used. Changed under the set's lock.
    used: AtomicU64,
    /// Slots whose doorbell is masked in the inner set: see `epoll::sleep`.
    pub muted: AtomicU64,
    slots: [Slot; PAGE],
}

impl Page {
    /// The used slots of the page, with their numbers in it.
    #[inline(always)]
    pub fn each(&self) -> impl Iterator<Item = (usize, &Slot)> {
        // Acquire: a slot's counters are cleared before its bit is set (`bind`).
        bits(self.used.load(Acquire)).map(|n| (n, &self.slots[n % PAGE]))
    }

    /// The slot by its number in the page.
    pub fn slot(&self, n: usize) -> &Slot {
        &self.slots[n % PAGE]
    }
}

/// What a set knows of its link groups.
pub struct Slots {
    pages: [AtomicPtr<Page>; PAGES],
    /// For each link group of the process: its slot here, plus 1 (0: none). Set lock held.
    place: [AtomicU16; groups::LINK_GROUPS],
}

/// The numbers of the bits that are set.
#[inline(always)]
fn bits(mut of: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = (of != 0).then(|| of.trailing_zeros() as usize)?;
        of &= of - 1;
        Some(bit)
    })
}

impl Slots {
    /// The pages that were ever used, in order, with the number of their first slot.
    #[inline(always)]
    pub fn pages(&self) -> impl Iterator<Item = (usize, &'static Page)> + '_ {
        let all = self.pages.iter().enumerate();
        // SAFETY: a mapping of a page's size, never unmapped; all fields are atomics.
        let page = |p: *mut Page| unsafe { p.as_ref() };
        // Acquire: pairs with `page_for`. (They are mapped one after the other.)
        all.map_while(move |(n, p)| Some((n * PAGE, page(p.load(Acquire))?)))
    }

    /// The used slots, with their numbers.
    #[inline(always)]
    pub fn each(&self) -> impl Iterator<Item = (usize, &'static Slot)> + '_ {
        let all = self.pages();
        all.flat_map(|(first, page)| page.each().map(move |(n, s)| (first + n, s)))
    }

    /// A slot that is or was used.
    pub fn at(&self, k: usize) -> Option<&'static Slot> {
        // SAFETY: as in `pages`.
        let page = unsafe { self.pages.get(k / PAGE)?.load(Acquire).as_ref() }?;
        Some(page.slot(k))
    }

    /// If there is a single one, the first: that one.
    pub fn only(&self) -> Option<&'static Slot> {
        let mut all = self.each();
        let first = all.next()?.1;
        all.next().is_none().then_some(first)
    }

    /// The link group's slot. Set lock held.
    pub fn of(&self, group: &LinkGroup) -> Option<usize> {
        let at = self.place.get(groups::index(group))?.load(Relaxed);
        usize::from(at).checked_sub(1)
    }

    /// A page with a free slot, and the number of its first slot. Set lock held.
    fn page_for(&self) -> Option<(usize, &'static Page)> {
        let is_free = |p: &&Page| p.used.load(Relaxed) != u64::MAX;
        if let Some(found) = self.pages().find(|(_, p)| is_free(p)) {
            return Some(found);
        }
        let unmapped = |p: &AtomicPtr<Page>| p.load(Relaxed).is_null();
        let n = self.pages.iter().position(unmapped)?;
        let p = sys::map_private(core::mem::size_of::<Page>()).ok()?;
        self.pages[n].store(p.cast(), Release);
        self.pages().find(|(first, _)| *first == n * PAGE)
    }

    /// Gives the link group a slot; it has none. `None`: no memory. Set lock held.
    pub fn add(&self, group: &LinkGroup) -> Option<usize> {
        let (first, page) = self.page_for()?;
        let n = page.used.load(Relaxed).trailing_ones() as usize;
        let (slot, bit, index) = (page.slot(n), 1 << n, groups::index(group));
        let place = u16::try_from(first + n + 1).ok()?;
        page.muted.fetch_and(!bit, Relaxed);
        slot.counters.store(0, Relaxed);
        slot.group.store(num::small(index) + 1, Release);
        self.place.get(index)?.store(place, Relaxed);
        page.used.fetch_or(bit, Release);
        Some(first + n)
    }

    /// Takes the link group's slot away. Set lock held.
    pub fn remove(&self, group: &LinkGroup) {
        let Some(k) = self.of(group) else {
            return;
        };
        if let Some((_, page)) = self.pages().nth(k / PAGE) {
            let slot = page.slot(k);
            slot.group.store(0, Release);
            slot.counters.store(0, Relaxed);
            page.used.fetch_and(!(1 << (k % PAGE)), Relaxed);
        }
        self.place[groups::index(group)].store(0, Relaxed);
    }

    /// Frees all slots. Nobody else uses the set now.
    pub fn clear(&self) {
        for (_, page) in self.pages() {
            page.used.store(0, Relaxed);
            page.muted.store(0, Relaxed);
            for s in &page.slots {
                s.group.store(0, Relaxed);
                s.counters.store(0, Relaxed);
            }
        }
        self.place.iter().for_each(|p| p.store(0, Relaxed));
    }
}

/// A bit for each slot of a set.
#[derive(Clone, Copy, Default)]
pub struct Marks([u64; PAGES]);

impl Marks {
    pub fn set(&mut self, k: usize) {
        self.0[k / PAGE % PAGES] |= 1 << (k % PAGE);
    }

    pub fn has(&self, k: usize) -> bool {
        self.0[k / PAGE % PAGES] & 1 << (k % PAGE) != 0
    }
}
