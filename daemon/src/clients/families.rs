//! All family tables that the daemon knows, and the sums of those that have ended.
//!
//! For the daemon a family ends when its last known process does, but it may come back: a parent that never said
//! hello forks a child that does. So what was read last is remembered by the identity of the memory file, and the sums
//! get only what has been added since, so that nothing is counted twice.

use crate::clients::family::{Family, Totals};
use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// Most ended families that are remembered one by one; older ones are only in the sums.
const REMEMBERED: usize = 4096;
/// Most pods whose sums are kept apart. (The oldest that has no family makes way.)
const ACCOUNTS: usize = 4096;

/// The pod whose processes a family's are; both empty: none that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Account {
    pub namespace: String,
    pub pod: String,
}

struct Kin {
    family: Arc<Family>,
    /// Clients, and processes found in `/proc`, that belong to it.
    members: usize,
    account: Arc<Account>,
    /// `/proc/PID/cgroup` of its first client, while its pod is not known.
    cgroup: Option<String>,
}

/// What the families of one pod have done.
#[derive(Default)]
struct Sum {
    totals: Totals,
    /// Families that are known or fading.
    families: usize,
    /// When the last one was gone, by a clock of such events.
    left: u64,
}

#[derive(Default)]
pub struct Families {
    known: HashMap<Ident, Kin>,
    /// Ended, and not yet read for the last time (that may take a while, so it is done elsewhere).
    fading: HashMap<Ident, Kin>,
    /// What was read last of each family, and is in the sums.
    last: HashMap<Ident, Totals>,
    /// Idents of ended families, oldest first; one that came back may still be in it.
    order: VecDeque<Ident>,
    total: Totals,
    sums: BTreeMap<Arc<Account>, Sum>,
    clock: u64,
}

impl Families {
    /// A process with this table. Pairs with [`Families::leave`].
    pub fn join(&mut self, ident: Ident, table: Foreign) -> Arc<Family> {
        let (fading, sums) = (&mut self.fading, &mut self.sums);
        let kin = self.known.entry(ident).or_insert_with(|| {
            fading.remove(&ident).unwrap_or_else(|| {
                let account = Arc::<Account>::default();
                sums.entry(account.clone()).or_default().families += 1;
                Kin {
                    family: Arc::new(Family::new(ident, table)),
                    members: 0,
                    account,
                    cgroup: None,
                }
            })
        });
        kin.members += 1;
        kin.family.clone()
    }

    /// Says in which cgroup a family's process is, so that its pod can be found.
    pub fn came_from(&mut self, ident: Ident, cgroup: &str) {
        if let Some(kin) = self.known.get_mut(&ident) {
            if *kin.account == Account::default() && kin.cgroup.is_none() {
                kin.cgroup = Some(cgroup.to_owned());
            }
        }
    }

    /// A process has gone from one table to another: that is the same pod's.
    pub fn follows(&mut self, ident: Ident, before: Ident) {
        let Some((account, cgroup)) = self
            .known
            .get(&before)
            .map(|k| (k.account.clone(), k.cgroup.clone()))
        else {
            return;
        };
        if let Some(kin) = self.known.get_mut(&ident) {
            let was = std::mem::replace(&mut kin.account, account.clone());
            kin.cgroup = cgroup;
            self.moved(&was, account);
        }
    }

    /// A family counts for another pod from now on.
    fn moved(&mut self, from: &Account, to: Arc<Account>) {
        if let Some(s) = self.sums.get_mut(from) {
            s.families = s.families.saturating_sub(1);
        }
        self.sums.entry(to).or_default().families += 1;
    }

    /// Finds the pods of families by their cgroups. What a family did before its pod was known stays where it was counted.
    pub fn place(&mut self, pod: impl Fn(&str) -> Option<Account>) {
        let mut moved = Vec::new();
        for kin in self.known.values_mut().chain(self.fading.values_mut()) {
            let Some(account) = kin.cgroup.as_deref().and_then(&pod) else {
                continue;
            };
            kin.cgroup = None;
            let account = match self.sums.get_key_value(&account) {
                Some((known, _)) => known.clone(),
                None => Arc::new(account),
            };
            let before = std::mem::replace(&mut kin.account, account.clone());
            moved.push((before, account));
        }
        for (before, account) in moved {
            self.moved(&before, account);
        }
    }

    pub fn leave(&mut self, ident: Ident) {
        let Some(kin) = self.known.get_mut(&ident) else {
            return;
        };
        kin.members -= 1;
        if kin.members == 0 {
            if let Some(kin) = self.known.remove(&ident) {
                self.fading.insert(ident, kin);
            }
        }
    }

    pub fn get(&self, ident: Ident) -> Option<&Arc<Family>> {
        self.known.get(&ident).map(|k| &k.family)
    }

    /// Families whose tables have to be read for the sums.
    pub fn readable(&self) -> Vec<Arc<Family>> {
        let all = self.known.values().chain(self.fading.values());
        all.map(|k| k.family.clone()).collect()
    }

    pub fn fading(&self) -> Vec<Arc<Family>> {
        self.fading.values().map(|k| k.family.clone()).collect()
    }

    /// A family of [`Families::readable`] was read. (If it was read for the last time meanwhile, that counts.)
    pub fn was_read(&mut self, ident: Ident, totals: Totals) {
        let kin = self.known.get(&ident).or_else(|| self.fading.get(&ident));
        let Some(account) = kin.map(|k| k.account.clone()) else {
            return;
        };
        let before = self.last.insert(ident, totals).unwrap_or_default();
        let more = totals.since(&before);
        self.total.add(&more);
        self.sums.entry(account).or_default().totals.add(&more);
    }

    /// A family of [`Families::fading`] was read for the last time.
    pub fn faded(&mut self, ident: Ident, totals: Totals) {
        if !self.fading.contains_key(&ident) {
            return; // it came back meanwhile
        }
        self.was_read(ident, totals);
        if let Some(kin) = self.fading.remove(&ident) {
            self.clock += 1;
            if let Some(s) = self.sums.get_mut(&kin.account) {
                s.families = s.families.saturating_sub(1);
                s.left = self.clock;
            }
        }
        self.order.push_back(ident);
        while self.order.len() > REMEMBERED {
            let old = self.order.pop_front();
            old.filter(|i| !self.known.contains_key(i) && !self.fading.contains_key(i))
                .map(|i| self.last.remove(&i));
        }
        self.forget_accounts();
    }

    fn forget_accounts(&mut self) {
        while self.sums.len() > ACCOUNTS {
            let ended = self.sums.iter().filter(|(_, s)| s.families == 0);
            let Some(oldest) = ended.min_by_key(|(_, s)| s.left).map(|(a, _)| a.clone()) else {
                return;
            };
            self.sums.remove(&oldest);
        }
    }

    /// What all families have done, ended ones included, as far as they were read.
    pub fn total(&self) -> Totals {
        self.total
    }

    /// The same by pod, and whether the pod has a family now.
    pub fn by_pod(&self) -> Vec<(Arc<Account>, Totals, bool)> {
        let all = self.sums.iter();
        all.map(|(a, s)| (a.clone(), s.totals, s.families > 0))
            .collect()
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
        assert_eq!((f.readable().len(), f.total().promoted), (0, 7));
        f.join(id(1), table());
        assert_eq!(
            (f.readable().len(), f.total().promoted),
            (1, 7),
            "back later"
        );
        f.leave(id(1));
        fade(&mut f, 9);
        assert_eq!(f.total().promoted, 9);
    }

    #[test]
    fn what_is_no_longer_remembered_stays_in_the_sum() {
        let mut f = Families::default();
        for i in 0..REMEMBERED as u64 + 10 {
            f.join(id(i), table());
            f.leave(id(i));
            fade(&mut f, 1);
        }
        assert_eq!(f.last.len(), REMEMBERED);
        assert_eq!(f.total().promoted, REMEMBERED as u64 + 10);
    }

    #[test]
    fn sums_by_pod_outlive_their_families() {
        let mut f = Families::default();
        let read = |f: &mut Families, i, promoted| {
            let t = Totals {
                promoted,
                ..Totals::default()
            };
            f.was_read(id(i), t);
        };
        f.join(id(1), table());
        f.came_from(id(1), "/pod-a");
        f.came_from(id(1), "/other");
        read(&mut f, 1, 2); // the runtime has not told of the pod yet
        f.place(|_| None);
        f.place(|cgroup| {
            cgroup.strip_prefix("/pod-").map(|p| Account {
                namespace: "shop".into(),
                pod: p.into(),
            })
        });
        read(&mut f, 1, 5);
        let sums = |f: &Families| -> Vec<_> {
            let all = f.by_pod().into_iter();
            all.map(|(a, t, lives)| (a.pod.clone(), t.promoted, lives))
                .collect()
        };
        let expected = |lives| vec![(String::new(), 2, false), ("a".to_owned(), 3, lives)];
        assert_eq!(sums(&f), expected(true));
        f.leave(id(1));
        fade(&mut f, 5);
        assert_eq!(sums(&f), expected(false));
        read(&mut f, 1, 4); // by somebody who began before it was read for the last time
        assert_eq!((f.total().promoted, sums(&f)), (5, expected(false)));
        // Another table may have got what this one had: the sum over both is right.
        f.join(id(2), table());
        read(&mut f, 2, 9);
        f.join(id(3), table());
        read(&mut f, 2, 6);
        read(&mut f, 3, 4);
        assert_eq!(f.total().promoted, 15);
    }
}
