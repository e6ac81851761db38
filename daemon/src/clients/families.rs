//! All family tables that the daemon knows, and the sums of those that have ended.
//!
//! For the daemon a family ends when its last known process does, but it may come back: a parent that never said
//! hello forks a child that does. So what was read last is remembered by the identity of the memory file, and the sums
//! get only what has been added since, so that nothing is counted twice.
//!
//! The sums begin with the daemon: what is found in a table that is older is where its count begins. And they belong to
//! everybody, while each table is what its processes write: a reading that cannot be true is not taken in, but counted
//! ([`Totals::implausible`]), and no reading makes a sum smaller.

use crate::clients::family::{Family, Totals};
use crate::clients::limits::{Cgroup, Kept};
use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

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
    /// Once it has ended: for whom its table is kept until it was read once more.
    kept: Option<Kept>,
}

/// What a table said at one time.
pub struct Reading {
    pub ident: Ident,
    pub totals: Totals,
    /// When the reading began, or earlier.
    pub began: Duration,
    pub took: Duration,
}

/// What was read last of a family, and is in the sums.
struct Record {
    totals: Totals,
    /// When that reading began, and when it was taken in; before the first one, when the family came.
    began: Duration,
    taken: Duration,
    took: Duration,
    /// Older than this daemon, and not read yet: what it has done so far is not counted.
    older: bool,
    /// What tables of these processes have less than before. A process that moves to a table of its own takes what it
    /// counts along: that must be there before anything is counted as new. Shared by the tables of such a family.
    pending: Rc<RefCell<Totals>>,
}

impl Record {
    /// What a reading adds to the sums; `None`: it cannot be true.
    fn more(&mut self, r: &Reading, now: Duration) -> Option<Totals> {
        let less = self.totals.grown(&r.totals);
        let grown = r.totals.grown(&self.totals);
        let mut pending = self.pending.borrow_mut();
        let more = grown.grown(&pending);
        let time = now.saturating_sub(self.began);
        if less != less.movable() || !more.is_possible_in(time) {
            return None;
        }
        *pending = pending.grown(&grown);
        pending.add(&less);
        self.totals = r.totals;
        self.began = r.began;
        Some(more)
    }
}

/// A reading that took longer is made after the others.
const LONG: Duration = Duration::from_millis(10);

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
    records: HashMap<Ident, Record>,
    /// Idents of ended families, oldest first; one that came back may still be in it.
    order: VecDeque<Ident>,
    total: Totals,
    sums: BTreeMap<Arc<Account>, Sum>,
    clock: u64,
}

impl Families {
    /// A process with this table. Pairs with [`Families::leave`]. `older`: the table was there before this daemon.
    pub fn join(
        &mut self,
        ident: Ident,
        table: Foreign,
        (now, older): (Duration, bool),
    ) -> Arc<Family> {
        self.records.entry(ident).or_insert_with(|| Record {
            totals: Totals::default(),
            began: now,
            taken: now,
            took: Duration::ZERO,
            older,
            pending: Rc::default(),
        });
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
                    kept: None,
                }
            })
        });
        kin.members += 1;
        kin.kept = None;
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
        let pending = self.records.get(&before).map(|r| r.pending.clone());
        if let Some((r, pending)) = self.records.get_mut(&ident).zip(pending) {
            r.pending = pending;
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

    /// `tenant`: for whom the table is kept if nobody is left in the family. Beyond what is kept for one, tables are given up
    /// at once, and what was done since they were read is in no sum.
    pub fn leave(&mut self, ident: Ident, tenant: Option<&Arc<Cgroup>>) {
        let Some(kin) = self.known.get_mut(&ident) else {
            return;
        };
        kin.members -= 1;
        if kin.members == 0 {
            if let Some(mut kin) = self.known.remove(&ident) {
                let kept = tenant.map(Cgroup::keep);
                let full = matches!(kept, Some(None));
                kin.kept = kept.flatten();
                self.fading.insert(ident, kin);
                if full {
                    self.drop_fading(ident);
                }
            }
        }
    }

    pub fn get(&self, ident: Ident) -> Option<&Arc<Family>> {
        self.known.get(&ident).map(|k| &k.family)
    }

    /// Families whose tables have to be read for the sums, in this order: first those that are read quickly, then those
    /// that were not read for the longest time. (So a table that others follow is read before they are.)
    pub fn readable(&self) -> Vec<Arc<Family>> {
        let all = self.known.values().chain(self.fading.values());
        self.in_order(all)
    }

    pub fn fading(&self) -> Vec<Arc<Family>> {
        self.in_order(self.fading.values())
    }

    fn in_order<'a>(&self, all: impl Iterator<Item = &'a Kin>) -> Vec<Arc<Family>> {
        let place = |f: &Arc<Family>| {
            let r = self.records.get(&f.ident);
            r.map(|r| (r.took > LONG, r.taken))
        };
        let mut all: Vec<_> = all.map(|k| k.family.clone()).collect();
        all.sort_by_cached_key(place);
        all
    }

    /// Has its count begun?
    pub fn is_counted(&self, ident: Ident) -> bool {
        self.records.get(&ident).is_some_and(|r| !r.older)
    }

    /// What a family had done when it was met. Nothing of it counts if the family is older than this daemon.
    pub fn found(&mut self, ident: Ident, totals: Totals) {
        if let Some(r) = self.records.get_mut(&ident).filter(|r| r.older) {
            r.totals = totals;
            r.older = false;
        }
    }

    /// A family of [`Families::readable`] was read. (If it was read for the last time meanwhile, that counts.) `false`:
    /// another reading was taken in after this one had begun, so it is not known which of the two is newer.
    pub fn was_read(&mut self, reading: &Reading, now: Duration) -> bool {
        let ident = reading.ident;
        let kin = self.known.get(&ident).or_else(|| self.fading.get(&ident));
        let Some((kin, record)) = kin.zip(self.records.get_mut(&ident)) else {
            return true;
        };
        if reading.began < record.taken {
            return false;
        }
        record.taken = now;
        record.took = reading.took;
        if std::mem::take(&mut record.older) {
            (record.totals, record.began) = (reading.totals, reading.began);
            return true;
        }
        let more = record.more(reading, now).unwrap_or(Totals {
            implausible: 1,
            ..Totals::default()
        });
        self.total.add(&more);
        let sum = self.sums.entry(kin.account.clone()).or_default();
        sum.totals.add(&more);
        true
    }

    /// A family of [`Families::fading`] was read for the last time.
    pub fn faded(&mut self, reading: &Reading, now: Duration) {
        let ident = reading.ident;
        // It may have come back meanwhile.
        if self.fading.contains_key(&ident) && self.was_read(reading, now) {
            self.drop_fading(ident);
        }
    }

    fn drop_fading(&mut self, ident: Ident) {
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
                .map(|i| self.records.remove(&i));
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

    fn at(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn join(f: &mut Families, i: u64) -> Arc<Family> {
        f.join(id(i), table(), (at(0), false))
    }

    fn promoted(n: u64) -> Totals {
        Totals {
            promoted: n,
            ..Totals::default()
        }
    }

    /// Read at this second.
    fn reading(i: u64, totals: Totals, s: u64) -> Reading {
        Reading {
            ident: id(i),
            totals,
            began: at(s),
            took: Duration::ZERO,
        }
    }

    /// Of one tenant so many are kept, of others more; none of it keeps a process out.
    #[test]
    fn the_ended_are_kept_up_to_a_limit() {
        let tenant = crate::clients::limits::for_tests(1, 1);
        let other = crate::clients::limits::for_tests(1, 1);
        let mut f = Families::default();
        for n in 0..100 {
            join(&mut f, n);
            f.leave(id(n), Some(&tenant));
        }
        assert_eq!(f.fading.len(), 40, "four for each process that it may have");
        join(&mut f, 200);
        f.leave(id(200), Some(&other));
        assert_eq!(f.fading.len(), 41);
        assert!(tenant.enter().is_some());
        fade(&mut f, 1);
        join(&mut f, 201);
        f.leave(id(201), Some(&tenant));
        assert_eq!(f.fading.len(), 1);
    }

    fn fade(f: &mut Families, n: u64) {
        for x in f.fading() {
            f.faded(&reading(x.ident.ino, promoted(n), 99), at(99));
        }
    }

    #[test]
    fn a_family_that_comes_back_is_not_counted_twice() {
        let mut f = Families::default();
        let a = join(&mut f, 1);
        join(&mut f, 1);
        f.leave(id(1), None);
        assert_eq!(
            (f.readable().len(), f.fading().len()),
            (1, 0),
            "one is left"
        );
        f.leave(id(1), None);
        assert_eq!((f.readable().len(), f.fading().len()), (1, 1));
        assert!(Arc::ptr_eq(&a, &join(&mut f, 1)), "back at once");
        assert_eq!((f.readable().len(), f.fading().len()), (1, 0));
        f.leave(id(1), None);
        fade(&mut f, 7);
        assert_eq!((f.readable().len(), f.total().promoted), (0, 7));
        join(&mut f, 1);
        assert_eq!(
            (f.readable().len(), f.total().promoted),
            (1, 7),
            "back later"
        );
        f.leave(id(1), None);
        fade(&mut f, 9);
        assert_eq!(f.total().promoted, 9);
    }

    #[test]
    fn what_is_no_longer_remembered_stays_in_the_sum() {
        let mut f = Families::default();
        for i in 0..REMEMBERED as u64 + 10 {
            join(&mut f, i);
            f.leave(id(i), None);
            fade(&mut f, 1);
        }
        assert_eq!(f.records.len(), REMEMBERED);
        assert_eq!(f.total().promoted, REMEMBERED as u64 + 10);
    }

    #[test]
    fn sums_by_pod_outlive_their_families() {
        let mut f = Families::default();
        let read = |f: &mut Families, i, n| {
            f.was_read(&reading(i, promoted(n), 99), at(99));
        };
        join(&mut f, 1);
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
        f.leave(id(1), None);
        fade(&mut f, 5);
        assert_eq!(sums(&f), expected(false));
        read(&mut f, 1, 4); // by somebody who began before it was read for the last time
        assert_eq!((f.total().promoted, sums(&f)), (5, expected(false)));
    }

    /// A process takes what it counts to a table of its own: nothing is counted twice, whichever is read first.
    #[test]
    fn what_goes_to_another_table_counts_once() {
        let mut f = Families::default();
        join(&mut f, 2);
        f.was_read(&reading(2, promoted(9), 1), at(1));
        join(&mut f, 3);
        f.follows(id(3), id(2));
        let order: Vec<u64> = f.readable().iter().map(|x| x.ident.ino).collect();
        assert_eq!(order.len(), 2);
        f.was_read(&reading(2, promoted(6), 2), at(2));
        assert_eq!(f.total().promoted, 9);
        f.was_read(&reading(3, promoted(4), 2), at(2));
        assert_eq!((f.total().promoted, f.total().implausible), (10, 0));
        f.was_read(&reading(2, promoted(7), 3), at(3));
        assert_eq!(f.total().promoted, 11);
    }

    #[test]
    fn what_was_before_the_daemon_is_not_counted() {
        let mut f = Families::default();
        f.join(id(1), table(), (at(0), true));
        assert!(!f.is_counted(id(1)));
        f.found(id(1), promoted(1 << 40));
        assert!(f.is_counted(id(1)));
        f.found(id(1), promoted(0));
        f.was_read(&reading(1, promoted((1 << 40) + 2), 1), at(1));
        // Or it is read before it was found.
        f.join(id(2), table(), (at(0), true));
        f.was_read(&reading(2, promoted(5), 1), at(1));
        f.found(id(2), promoted(0));
        f.was_read(&reading(2, promoted(6), 2), at(2));
        f.join(id(3), table(), (at(0), false));
        f.found(id(3), promoted(5));
        f.was_read(&reading(3, promoted(5), 2), at(2));
        assert_eq!((f.total().promoted, f.total().implausible), (8, 0));
    }

    /// One who writes anything into its table, and one whose resets must be seen.
    #[test]
    fn a_liar_does_not_hide_what_others_do() {
        let mut f = Families::default();
        let resets = |resets| Totals {
            resets,
            ..Totals::default()
        };
        join(&mut f, 1);
        join(&mut f, 2);
        let impossible = [u64::MAX, 0, u64::MAX / 2, 1 << 40, 3, 1, u64::MAX - 1, 4];
        let (mut before, mut now) = (0, 0);
        for (n, lie) in (1..).zip(impossible) {
            now = n;
            f.was_read(&reading(1, resets(lie), n), at(n));
            f.was_read(&reading(2, resets(n), n), at(n));
            let all = f.total().resets;
            assert!(all > before && all < 100, "{all} after {before}");
            before = all;
        }
        assert_eq!((before, f.total().implausible), (now + 4, 5));
        // Bytes may become less, but the sum does not, and one family's are not paid by another.
        let bytes = |lane_tx| Totals {
            lane_tx,
            ..Totals::default()
        };
        for (n, lie) in [(1, 1 << 30), (2, 0), (3, u64::MAX)] {
            let r = |i, b, resets| {
                let totals = Totals { resets, ..bytes(b) };
                reading(i, totals, now + n)
            };
            f.was_read(&r(1, lie, 4), at(now + n));
            f.was_read(&r(2, n, now), at(now + n));
            assert_eq!(f.total().lane_tx, (1 << 30) + n);
        }
        assert_eq!(f.by_pod()[0].1, f.total());
    }

    /// Two who read at the same time: it is not known who saw more.
    #[test]
    fn readings_that_overlap() {
        let mut f = Families::default();
        join(&mut f, 1);
        assert!(f.was_read(&reading(1, promoted(5), 1), at(3)));
        assert!(!f.was_read(&reading(1, promoted(4), 2), at(4)));
        f.leave(id(1), None);
        f.faded(&reading(1, promoted(4), 2), at(4));
        assert_eq!(f.fading().len(), 1, "once more");
        f.faded(&reading(1, promoted(6), 5), at(5));
        assert_eq!((f.fading().len(), f.total().promoted), (0, 6));
        assert_eq!(f.total().implausible, 0);
    }
}
