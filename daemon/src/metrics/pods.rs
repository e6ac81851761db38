//! Series by pod or namespace, as many as the operator wants and no more.
//!
//! What is counted goes to the series that its pod has when it is read: so all series only grow, also when a pod gets
//! series of its own later, or leaves them to another one.

use crate::clients::families::Account;
use crate::clients::family::Totals;
use crate::config::{MetricsConfig, PerPod};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the series of a pod are shown after its last program has ended: longer than any scrape interval, so that what it
/// did last is seen.
const STAYS: Duration = Duration::from_secs(600);

/// Namespace and pod, as labels.
pub(super) type Label = (String, String);

pub(super) fn other() -> Label {
    ("other".into(), "other".into())
}

struct Shown {
    totals: Totals,
    /// When it was last of this node.
    seen: Instant,
}

pub(super) struct Pods {
    per_pod: PerPod,
    most: usize,
    shown: BTreeMap<Label, Shown>,
    other: Option<Totals>,
    /// What was read last of each pod.
    read: HashMap<Arc<Account>, Totals>,
}

impl Pods {
    pub(super) fn new(config: &MetricsConfig) -> Pods {
        Pods {
            per_pod: config.per_pod,
            most: config.pods_max,
            shown: BTreeMap::new(),
            other: None,
            read: HashMap::new(),
        }
    }

    /// The label of a pod that has series of its own, or could have. `None`: there are no such series.
    fn label(&self, namespace: &str, pod: &str) -> Option<Label> {
        match self.per_pod {
            PerPod::None => None,
            PerPod::Namespace => Some((namespace.to_owned(), String::new())),
            PerPod::Pod => Some((namespace.to_owned(), pod.to_owned())),
        }
    }

    /// The label under which a pod that is here now is shown.
    pub(super) fn place(&mut self, namespace: &str, pod: &str, now: Instant) -> Option<Label> {
        let label = self.label(namespace, pod)?;
        if label == other() {
            return Some(label); // somebody has a pod of this name
        }
        if let Some(s) = self.shown.get_mut(&label) {
            s.seen = now;
            return Some(label);
        }
        if self.shown.len() >= self.most {
            return Some(other());
        }
        let totals = Totals::default();
        self.shown
            .insert(label.clone(), Shown { totals, seen: now });
        Some(label)
    }

    /// Takes in what all pods have done.
    pub(super) fn add(&mut self, all: &[(Arc<Account>, Totals, bool)], now: Instant) {
        // (Nobody may have asked for longer than that.)
        for (account, ..) in all.iter().filter(|a| a.2) {
            let label = self.label(&account.namespace, &account.pod);
            if let Some(s) = label.and_then(|l| self.shown.get_mut(&l)) {
                s.seen = now;
            }
        }
        self.shown.retain(|_, s| now.duration_since(s.seen) < STAYS);
        for (account, totals, lives) in all {
            let before = self.read.get(account).copied().unwrap_or_default();
            let more = totals.grown(&before);
            self.read.insert(account.clone(), before.highest(totals));
            let has_news = *lives || more != Totals::default();
            if !has_news {
                continue;
            }
            let Some(label) = self.place(&account.namespace, &account.pod, now) else {
                continue;
            };
            match self.shown.get_mut(&label) {
                Some(s) => s.totals.add(&more),
                None => self.other.get_or_insert_default().add(&more),
            }
        }
        let present: HashSet<_> = all.iter().map(|a| &a.0).collect();
        self.read.retain(|a, _| present.contains(a));
    }

    pub(super) fn sums(&self) -> impl Iterator<Item = (Label, &Totals)> {
        let own = self.shown.iter().map(|(l, s)| (l.clone(), &s.totals));
        own.chain(self.other.iter().map(|t| (other(), t)))
    }

    /// Pods with series of their own now.
    pub(super) fn len(&self) -> usize {
        self.shown.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(pod: &str) -> Arc<Account> {
        Arc::new(Account {
            namespace: "shop".into(),
            pod: pod.into(),
        })
    }

    fn read(pod: &str, promoted: u64, lives: bool) -> (Arc<Account>, Totals, bool) {
        let t = Totals {
            promoted,
            ..Totals::default()
        };
        (account(pod), t, lives)
    }

    fn shown(p: &Pods) -> Vec<(String, u64)> {
        p.sums().map(|(l, t)| (l.1, t.promoted)).collect()
    }

    fn pods(per_pod: PerPod) -> Pods {
        Pods::new(&MetricsConfig {
            per_pod,
            pods_max: 2,
            ..MetricsConfig::default()
        })
    }

    #[test]
    fn as_many_series_as_there_may_be() {
        let mut p = pods(PerPod::Pod);
        let t = Instant::now();
        let at = |s| t + Duration::from_secs(s);
        let s = |p: &str, n| (p.to_owned(), n);
        p.add(
            &[read("a", 1, true), read("b", 2, true), read("c", 4, true)],
            at(0),
        );
        assert_eq!(shown(&p), [s("a", 1), s("b", 2), s("other", 4)]);
        assert_eq!(p.place("shop", "c", at(0)), Some(other()));
        // One ends; its series stay for a while, and nothing that was counted moves.
        let late = [read("a", 3, false), read("b", 2, true), read("c", 5, true)];
        p.add(&late, at(1));
        p.add(&late, at(599));
        assert_eq!(shown(&p), [s("a", 3), s("b", 2), s("other", 5)]);
        p.add(
            &[read("a", 3, false), read("b", 2, true), read("c", 9, true)],
            at(602),
        );
        assert_eq!(shown(&p), [s("b", 2), s("c", 4), s("other", 5)]);
        // Nobody has asked for a long time: who is still there keeps its series.
        p.add(&[read("b", 2, true), read("c", 10, true)], at(9_000));
        assert_eq!(shown(&p), [s("b", 2), s("c", 5), s("other", 5)]);
        assert_eq!(p.place("other", "other", at(9_000)), Some(other()));
        // A table that says less than before.
        p.add(&[read("b", 1, true), read("c", 10, true)], at(9_001));
        p.add(&[read("b", 4, true), read("c", 10, true)], at(9_002));
        assert_eq!(shown(&p), [s("b", 4), s("c", 5), s("other", 5)]);
    }

    #[test]
    fn by_namespace_and_not_at_all() {
        let mut p = pods(PerPod::Namespace);
        p.add(&[read("a", 1, true), read("b", 2, true)], Instant::now());
        let sums: Vec<_> = p.sums().map(|(l, t)| (l, t.promoted)).collect();
        assert_eq!(sums, [(("shop".into(), String::new()), 3)]);
        let mut p = pods(PerPod::None);
        p.add(&[read("a", 1, true)], Instant::now());
        assert_eq!(
            (p.sums().count(), p.place("shop", "a", Instant::now())),
            (0, None)
        );
    }
}
