//! All family tables that the daemon knows, and the sums of those that have ended.
//!
//! For the daemon a family ends when its last known process does, but it may come back: a parent that never said
//! hello forks a child that does. So the totals of ended families are remembered by the identity of their memory
//! file, and taken out of the sums when a family comes back, so that nothing is counted twice.

use crate::clients::family::{Family, Totals};
use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most ended families that are remembered one by one; older ones are only in the sum.
const REMEMBERED: usize = 4096;

struct Kin {
    family: Arc<Family>,
    /// Clients, and processes found in `/proc`, that belong to it.
    members: usize,
}

#[derive(Default)]
pub struct Families {
    known: HashMap<Ident, Kin>,
    /// Ended, and not yet read for the last time (that may take a while, so it is done elsewhere).
    fading: HashMap<Ident, Arc<Family>>,
    gone: HashMap<Ident, Totals>,
    /// Idents of `gone`, oldest first; one that came back may still be in it.
    order: VecDeque<Ident>,
    /// Sums of what is no longer in `gone`.
    older: Totals,
}

impl Families {
    /// A process with this table. Pairs with [`Families::leave`].
    pub fn join(&mut self, ident: Ident, table: Foreign) -> Arc<Family> {
        let (fading, gone) = (&mut self.fading, &mut self.gone);
        let kin = self.known.entry(ident).or_insert_with(|| {
            gone.remove(&ident);
            let back = fading.remove(&ident);
            Kin {
                family: back.unwrap_or_else(|| Arc::new(Family::new(ident, table))),
                members: 0,
            }
        });
        kin.members += 1;
        kin.family.clone()
    }

    pub fn leave(&mut self, ident: Ident) {
        let Some(kin) = self.known.get_mut(&ident) else {
            return;
        };
        kin.members -= 1;
        if kin.members == 0 {
            if let Some(kin) = self.known.remove(&ident) {
                self.fading.insert(ident, kin.family);
            }
        }
    }

    pub fn get(&self, ident: Ident) -> Option<&Arc<Family>> {
        self.known.get(&ident).map(|k| &k.family)
    }

    /// Families whose tables have to be read for the sums.
    pub fn readable(&self) -> Vec<Arc<Family>> {
        let known = self.known.values().map(|k| &k.family);
        known.chain(self.fading.values()).cloned().collect()
    }

    /// The last totals of families that are not [`Families::readable`] any more.
    pub fn ended(&self) -> Totals {
        let mut sum = self.older;
        self.gone.values().for_each(|t| sum.add(t));
        sum
    }

    pub fn fading(&self) -> Vec<Arc<Family>> {
        self.fading.values().cloned().collect()
    }

    /// A family of [`Families::fading`] was read for the last time.
    pub fn faded(&mut self, ident: Ident, totals: Totals) {
        if self.fading.remove(&ident).is_none() {
            return; // it came back meanwhile
        }
        self.gone.insert(ident, totals);
        self.order.push_back(ident);
        while self.order.len() > REMEMBERED {
            let old = self.order.pop_front().and_then(|i| self.gone.remove(&i));
            old.iter().for_each(|t| self.older.add(t));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Foreign {
        Foreign::new(crate::os::memfd::make("t", lane::family::TABLE_BYTES).unwrap())
    }

    fn id(ino: u64) -> Ident {
        Ident { dev: 1, ino }
    }

    fn fade(f: &mut Families, promoted: u64) {
        for x in f.fading() {
            let t = Totals {
                promoted,
                ..Totals::default()
            };
            f.faded(x.ident, t);
        }
    }

    #[test]
    fn a_family_that_comes_back_is_not_counted_twice() {
        let mut f = Families::default();
        let a = f.join(id(1), table());
        f.join(id(1), table());
        f.leave(id(1));
        assert_eq!(
            (f.readable().len(), f.fading().len()),
            (1, 0),
            "one is left"
        );
        f.leave(id(1));
        assert_eq!((f.readable().len(), f.fading().len()), (1, 1));
        assert!(Arc::ptr_eq(&a, &f.join(id(1), table())), "back at once");
        assert_eq!((f.readable().len(), f.fading().len()), (1, 0));
        f.leave(id(1));
        fade(&mut f, 7);
        assert_eq!((f.readable().len(), f.ended().promoted), (0, 7));
        f.join(id(1), table());
        assert_eq!(
            (f.readable().len(), f.ended().promoted),
            (1, 0),
            "back later"
        );
        f.leave(id(1));
        fade(&mut f, 9);
        assert_eq!(f.ended().promoted, 9);
    }

    #[test]
    fn what_is_no_longer_remembered_stays_in_the_sum() {
        let mut f = Families::default();
        for i in 0..REMEMBERED as u64 + 10 {
            f.join(id(i), table());
            f.leave(id(i));
            fade(&mut f, 1);
        }
        assert_eq!(f.gone.len(), REMEMBERED);
        assert_eq!(f.ended().promoted, REMEMBERED as u64 + 10);
    }
}
