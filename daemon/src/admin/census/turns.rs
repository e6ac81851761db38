//! In which order processes are looked at. A tenant may have many, each of which takes as long as a look may: they must
//! not take the time for those of others.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A tenant's processes that are not looked at yet, and what it has taken so far.
#[derive(Default)]
struct Tenant {
    /// Those that the daemon knows come first, in case the time is too short for all.
    left: VecDeque<u32>,
    under_way: usize,
    spent: Duration,
}

/// All tenants, by name.
#[derive(Default)]
pub(super) struct Turns(BTreeMap<String, Tenant>);

impl Turns {
    /// `all`: processes with their tenants, and whether the daemon knows them.
    pub(super) fn new(all: impl IntoIterator<Item = (u32, String, bool)>) -> Turns {
        let mut turns = Turns::default();
        for (pid, tenant, known) in all {
            let left = &mut turns.0.entry(tenant).or_default().left;
            match known {
                true => left.push_front(pid),
                false => left.push_back(pid),
            }
        }
        turns
    }

    /// The process to be looked at next, with its tenant: the one of whom fewest are looked at; among those, of whom it took
    /// least.
    pub(super) fn next(&mut self) -> Option<(u32, String)> {
        let left = self.0.iter_mut().filter(|t| !t.1.left.is_empty());
        let (name, tenant) = left.min_by_key(|t| (t.1.under_way, t.1.spent))?;
        let pid = tenant.left.pop_front()?;
        tenant.under_way += 1;
        Some((pid, name.clone()))
    }

    /// A look at a process of this tenant took so long.
    pub(super) fn done(&mut self, tenant: &str, took: Duration) {
        if let Some(t) = self.0.get_mut(tenant) {
            t.under_way = t.under_way.saturating_sub(1);
            t.spent += took;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four looks at a time; those at "slow" take a second each, the others a millisecond.
    #[test]
    fn the_slow_ones_wait_for_themselves() {
        let slow = (0..1000).map(|p| (p, "slow".to_owned(), true));
        let quick = (1000..1100).map(|p| (p, format!("quick {}", p % 3), p % 2 == 0));
        let mut turns = Turns::new(slow.chain(quick));
        let mut under_way: Vec<(u64, String)> = Vec::new();
        let (mut now, mut seen, mut began) = (0, 0, 0);
        while seen < 100 && now < 4000 {
            while under_way.len() < 4 {
                let (pid, tenant) = turns.next().unwrap();
                began += u32::from(pid < 1000);
                let ms = if pid < 1000 { 1000 } else { 1 };
                under_way.push((now + ms, tenant));
            }
            let first = (0..4).min_by_key(|i| under_way[*i].0).unwrap();
            let (end, tenant) = under_way.swap_remove(first);
            now = end;
            seen += u32::from(tenant != "slow");
            turns.done(
                &tenant,
                Duration::from_millis(if tenant == "slow" { 1000 } else { 1 }),
            );
        }
        assert_eq!(seen, 100);
        assert!(now < 1000 && began <= 4, "{now} ms, {began} slow ones");
    }

    #[test]
    fn known_ones_first() {
        let all = [
            (1, "a", false),
            (2, "a", true),
            (3, "b", false),
            (4, "b", true),
        ];
        let mut turns = Turns::new(all.map(|(p, t, k)| (p, t.to_owned(), k)));
        let order: Vec<u32> = std::iter::from_fn(|| turns.next().map(|n| n.0)).collect();
        // (`b` has its turn after `a`, which is looked at.)
        assert_eq!(order, [2, 4, 1, 3]);
    }
}
