//! The nodes of the cluster, and which addresses the API gives each of them.
//!
//! An address is a node's if the API has it among the node's own, or as that of a pod that runs there. What network
//! plugins have written of further interfaces into a pod's annotation counts only where nothing else says whose the
//! address is, since whoever makes pods may write it. An address of two nodes is nobody's.
//!
//! Memory: about 350 bytes for each pod of the cluster.

use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::Arc;
use tokio::sync::watch;

/// Addresses of one pod or node that count.
const ADDRESSES_MAX: usize = 32;

/// What a pod has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Placed {
    /// The node it runs on.
    pub node: String,
    /// Addresses that its kubelet tells.
    pub told: Vec<IpAddr>,
    /// Those that stand in its annotation.
    pub written: Vec<IpAddr>,
}

/// A node as the API has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAt {
    /// The first is where its daemon is found.
    pub addresses: Vec<IpAddr>,
    /// When it was made there, in seconds since 1970. One that is removed and made again is another node.
    pub since: i64,
}

/// How certain it is that an address is a node's. The smaller ones count first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Word {
    Told,
    Written,
}

/// A pod as it is kept.
#[derive(Debug)]
struct Pod {
    node: u32,
    addresses: Box<[(Word, IpAddr)]>,
}

#[derive(Debug, Default)]
struct State {
    /// The nodes that there are.
    nodes: BTreeMap<Arc<str>, NodeAt>,
    /// Numbers of all nodes that were ever spoken of, and their names by number.
    numbers: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
    /// By uid.
    pods: HashMap<Box<str>, Pod>,
    /// How many have an address: by address, word, and number of the node.
    claims: BTreeMap<(IpAddr, Word, u32), u32>,
}

/// The nodes, as one thread learns them and others ask.
#[derive(Debug, Default)]
pub struct Nodes {
    state: RwLock<State>,
    changes: watch::Sender<u64>,
    /// How often nodes have changed.
    generation: AtomicU64,
}

/// Can an address be anybody's in particular?
fn counts(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(a) => a.is_link_local() || a.is_broadcast(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    };
    !(link_local || ip.is_loopback() || ip.is_unspecified() || ip.is_multicast())
}

/// Those of an object that count.
pub(super) fn usable(all: &[IpAddr]) -> impl Iterator<Item = IpAddr> + '_ {
    let all = all.iter().map(IpAddr::to_canonical).filter(counts);
    all.take(ADDRESSES_MAX)
}

impl State {
    fn number(&mut self, node: &str) -> u32 {
        if let Some(n) = self.numbers.get(node) {
            return *n;
        }
        let name: Arc<str> = node.into();
        let n = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        self.names.push(name.clone());
        self.numbers.insert(name, n);
        n
    }

    fn claim(&mut self, at: (IpAddr, Word, u32)) {
        *self.claims.entry(at).or_default() += 1;
    }

    fn withdraw(&mut self, at: (IpAddr, Word, u32)) {
        if let Some(n) = self.claims.get_mut(&at) {
            *n -= 1;
            if *n == 0 {
                self.claims.remove(&at);
            }
        }
    }

    fn set_node(&mut self, name: &str, node: Option<&NodeAt>) {
        let number = self.number(name);
        for ip in self.nodes.remove(name).unwrap_or_default().addresses {
            self.withdraw((ip, Word::Told, number));
        }
        let Some(node) = node else { return };
        for ip in &node.addresses {
            self.claim((*ip, Word::Told, number));
        }
        self.nodes.insert(name.into(), node.clone());
    }

    fn set_pod(&mut self, uid: &str, placed: Option<&Placed>) {
        if let Some(old) = self.pods.remove(uid) {
            for (word, ip) in old.addresses {
                self.withdraw((ip, word, old.node));
            }
        }
        let Some(p) = placed else { return };
        let addresses: Box<[_]> = p.words().collect();
        if addresses.is_empty() {
            return;
        }
        let node = self.number(&p.node);
        for (word, ip) in &addresses {
            self.claim((*ip, *word, node));
        }
        self.pods.insert(uid.into(), Pod { node, addresses });
    }

    /// The one node of which this is said, of those that there are.
    fn whose(&self, ip: IpAddr, word: Word) -> Claimed<'_> {
        let all = self.claims.range((ip, word, 0)..=(ip, word, u32::MAX));
        let name = |n: u32| self.names.get(usize::try_from(n).ok()?);
        let all = all.filter_map(|((_, _, n), _)| name(*n));
        let mut there = all.filter(|n| self.nodes.contains_key(*n));
        match (there.next(), there.next()) {
            (None, _) => Claimed::Unsaid,
            (Some(n), None) => Claimed::By(n),
            (Some(_), Some(_)) => Claimed::Disputed,
        }
    }
}

/// Who says that an address is his.
enum Claimed<'a> {
    Unsaid,
    By(&'a Arc<str>),
    Disputed,
}

impl Placed {
    /// Its addresses. What is written counts only of pods that run: these have one that is told.
    fn words(&self) -> impl Iterator<Item = (Word, IpAddr)> + '_ {
        let told = usable(&self.told).map(|ip| (Word::Told, ip));
        let written = usable(&self.written).map(|ip| (Word::Written, ip));
        told.chain(written.filter(|_| !self.told.is_empty()))
    }
}

impl Nodes {
    /// Whose address it is, if the API says so, and of one node only.
    pub fn owner(&self, ip: IpAddr) -> Option<Arc<str>> {
        let (state, ip) = (self.state.read(), ip.to_canonical());
        match state.whose(ip, Word::Told) {
            Claimed::By(n) => Some(n.clone()),
            Claimed::Disputed => None,
            Claimed::Unsaid => match state.whose(ip, Word::Written) {
                Claimed::By(n) => Some(n.clone()),
                _ => None,
            },
        }
    }

    /// The same without what is only written.
    pub fn told(&self, ip: IpAddr) -> Option<Arc<str>> {
        match self.state.read().whose(ip.to_canonical(), Word::Told) {
            Claimed::By(n) => Some(n.clone()),
            _ => None,
        }
    }

    pub fn find(&self, name: &str) -> Option<NodeAt> {
        self.state.read().nodes.get(name).cloned()
    }

    pub fn all(&self) -> Vec<(Arc<str>, NodeAt)> {
        let state = self.state.read();
        let nodes = state.nodes.iter();
        nodes.map(|(name, n)| (name.clone(), n.clone())).collect()
    }

    /// A number that changes with every change of nodes.
    pub fn generation(&self) -> u64 {
        self.generation.load(Acquire) // pairs with `change_nodes`
    }

    /// A number that changes with every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.state.write());
        self.changes.send_modify(|n| *n += 1);
    }

    fn change_nodes(&self, f: impl FnOnce(&mut State)) {
        self.change(|s| {
            f(s);
            self.generation.fetch_add(1, Release); // whoever sees it sees the nodes
        });
    }

    /// Replaces all nodes.
    pub(super) fn set_nodes(&self, all: &BTreeMap<String, NodeAt>) {
        self.change_nodes(|s| {
            let old: Vec<Arc<str>> = s.nodes.keys().cloned().collect();
            for name in old.iter().filter(|n| !all.contains_key(&***n)) {
                s.set_node(name, None);
            }
            for (name, node) in all {
                s.set_node(name, Some(node));
            }
        });
    }

    /// `None`: the node is gone. A kubelet tells its node's state again and again: what is as it was is no change.
    pub(super) fn set_node(&self, name: &str, node: Option<&NodeAt>) {
        let same = self.state.read().nodes.get(name) == node;
        if !same {
            self.change_nodes(|s| s.set_node(name, node));
        }
    }

    /// Forgets all other pods.
    pub(super) fn keep_pods(&self, there: &HashSet<Box<str>>) {
        self.change(|s| {
            let gone = s.pods.keys().filter(|uid| !there.contains(&**uid));
            let gone: Vec<Box<str>> = gone.cloned().collect();
            for uid in gone {
                s.set_pod(&uid, None);
            }
        });
    }

    /// `None`: the pod has no address any more. (Most changes of pods are about something else.)
    pub(super) fn set_pod(&self, uid: &str, placed: Option<&Placed>) {
        if !self.has(uid, placed) {
            self.change(|s| s.set_pod(uid, placed));
        }
    }

    fn has(&self, uid: &str, placed: Option<&Placed>) -> bool {
        let s = self.state.read();
        let wanted = placed.map(|p| (p.node.as_str(), p.words().collect::<Vec<_>>()));
        let wanted = wanted.filter(|(_, all)| !all.is_empty());
        let name = |n: u32| s.names.get(usize::try_from(n).unwrap_or(usize::MAX));
        match (s.pods.get(uid), wanted) {
            (None, None) => true,
            (Some(is), Some((node, all))) => {
                name(is.node).is_some_and(|n| **n == *node) && *is.addresses == *all
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn placed(node: &str, told: &[&str], written: &[&str]) -> Placed {
        Placed {
            node: node.into(),
            told: told.iter().map(|s| ip(s)).collect(),
            written: written.iter().map(|s| ip(s)).collect(),
        }
    }

    fn at(all: &[&str]) -> NodeAt {
        NodeAt {
            addresses: all.iter().map(|s| ip(s)).collect(),
            since: 1,
        }
    }

    fn two() -> Nodes {
        let n = Nodes::default();
        n.set_node("a", Some(&at(&["10.0.0.1", "fd00::1"])));
        n.set_node("b", Some(&at(&["10.0.0.2"])));
        n
    }

    fn owner(n: &Nodes, s: &str) -> String {
        n.owner(ip(s)).map_or(String::new(), |o| o.to_string())
    }

    #[test]
    fn owners() {
        let n = two();
        n.set_pod("1", Some(&placed("a", &["10.1.0.5", "fd00:1::5"], &[])));
        n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &["192.168.0.6"])));
        for (at, whose) in [
            ("10.0.0.1", "a"),
            ("fd00::1", "a"),
            ("::ffff:10.0.0.2", "b"),
            ("10.1.0.5", "a"),
            ("fd00:1::5", "a"),
            ("10.1.0.6", "b"),
            ("192.168.0.6", "b"),
            ("10.1.0.7", ""),
        ] {
            assert_eq!(owner(&n, at), whose, "{at}");
        }
        assert_eq!(n.find("a"), Some(at(&["10.0.0.1", "fd00::1"])));
        assert_eq!(n.all().len(), 2);
        // The pod goes, another one gets its address on the other node.
        n.set_pod("1", None);
        assert_eq!(owner(&n, "10.1.0.5"), "");
        n.set_pod("3", Some(&placed("b", &["10.1.0.5"], &[])));
        assert_eq!(owner(&n, "10.1.0.5"), "b");
        // Without its node a pod's address is nobody's.
        n.set_node("b", None);
        assert_eq!(owner(&n, "10.1.0.5"), "");
        assert_eq!(n.find("b"), None);
        // (And nobody has to share with it.)
        n.set_pod("4", Some(&placed("a", &["10.1.0.5"], &[])));
        assert_eq!(owner(&n, "10.1.0.5"), "a");
    }

    #[test]
    fn an_address_of_two_nodes_is_nobodys() {
        let n = two();
        n.set_pod("1", Some(&placed("a", &["10.1.0.5"], &[])));
        n.set_pod("2", Some(&placed("b", &["10.1.0.5", "10.0.0.1"], &[])));
        assert_eq!(owner(&n, "10.1.0.5"), "");
        assert_eq!(owner(&n, "10.0.0.1"), "");
        n.set_pod("2", None);
        assert_eq!(owner(&n, "10.1.0.5"), "a");
        assert_eq!(owner(&n, "10.0.0.1"), "a");
        // Two pods of one node may share it: they use the node's network.
        n.set_pod("4", Some(&placed("a", &["10.0.0.1"], &[])));
        n.set_pod("4", None);
        assert_eq!(owner(&n, "10.0.0.1"), "a");
    }

    #[test]
    fn an_annotation_takes_nobodys_address() {
        let n = two();
        n.set_pod("1", Some(&placed("a", &["10.1.0.5"], &["192.168.0.5"])));
        let all = ["10.1.0.5", "10.0.0.1", "127.0.0.1", "224.0.0.1", "0.0.0.0"];
        n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &all)));
        assert_eq!(owner(&n, "10.1.0.5"), "a");
        assert_eq!(owner(&n, "10.0.0.1"), "a");
        assert_eq!(owner(&n, "127.0.0.1"), "");
        n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &["192.168.0.5"])));
        assert_eq!(owner(&n, "192.168.0.5"), "");
        // A pod that never ran has no address.
        n.set_pod(
            "2",
            Some(&placed("b", &[], &["192.168.0.5", "192.168.0.9"])),
        );
        assert_eq!(owner(&n, "192.168.0.5"), "a");
        assert_eq!(owner(&n, "192.168.0.9"), "");
        // Whoever looks for an address is not led by it.
        assert_eq!(n.told(ip("192.168.0.5")), None);
        assert_eq!(n.told(ip("10.1.0.5")).as_deref(), Some("a"));
    }

    #[test]
    fn only_what_is_different_is_a_change() {
        let n = two();
        let p = placed("a", &["10.1.0.5"], &["192.168.0.5", "127.0.0.1"]);
        n.set_pod("1", Some(&p));
        let changes = n.changes();
        let before = *changes.borrow();
        n.set_pod("1", Some(&p));
        let generation = n.generation();
        n.set_node("b", Some(&at(&["10.0.0.2"])));
        n.set_pod("9", None);
        n.set_pod("9", Some(&placed("a", &[], &[])));
        n.set_node("c", None);
        assert_eq!(*changes.borrow(), before);
        n.set_pod("1", Some(&placed("b", &["10.1.0.5"], &["192.168.0.5"])));
        assert_eq!(*changes.borrow(), before + 1);
        assert_eq!(owner(&n, "10.1.0.5"), "b");
        assert_eq!(n.generation(), generation);
        let again = NodeAt {
            since: 2,
            ..at(&["10.0.0.2"])
        };
        n.set_node("b", Some(&again));
        assert_eq!(n.generation(), generation + 1);
    }

    proptest! {
        /// Whatever came before, what counts is what pods have now; and a list leaves nothing else.
        #[test]
        fn only_what_is_there_counts(
            steps in prop::collection::vec((0u8..6, 0u8..3, 0u8..8, 0u8..8, any::<bool>()), 0..40)
        ) {
            let nodes: BTreeMap<String, NodeAt> = (0..3u8)
                .map(|n| (format!("n{n}"), at(&[&format!("10.9.0.{n}")])))
                .collect();
            let (one, listed) = (Nodes::default(), Nodes::default());
            one.set_nodes(&nodes);
            listed.set_nodes(&nodes);
            let mut pods = BTreeMap::new();
            for (uid, node, told, written, is) in steps {
                let p = Placed {
                    node: format!("n{node}"),
                    told: vec![IpAddr::from([10, 1, 0, told])],
                    written: vec![IpAddr::from([10, 1, 0, written])],
                };
                one.set_pod(&uid.to_string(), is.then_some(&p));
                match is {
                    true => pods.insert(uid.to_string(), p),
                    false => pods.remove(&uid.to_string()),
                };
                pods.iter().for_each(|(uid, p)| listed.set_pod(uid, Some(p)));
                let there = pods.keys().map(|uid: &String| uid.as_str().into()).collect();
                listed.keep_pods(&there);
                for last in 0..8 {
                    let at: IpAddr = IpAddr::from([10, 1, 0, last]);
                    prop_assert_eq!(one.owner(at), listed.owner(at));
                    let told: std::collections::BTreeSet<&str> = pods
                        .values()
                        .filter(|p| p.told.contains(&at))
                        .map(|p| p.node.as_str())
                        .collect();
                    if let Some(n) = told.first() {
                        let owner = one.owner(at);
                        prop_assert_eq!(owner.as_deref(), (told.len() == 1).then_some(*n));
                    }
                }
            }
        }
    }
}
