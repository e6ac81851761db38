//! The nodes of the cluster, and which addresses the API gives each of them.
//!
//! An address is a node's if the API has it among the node's own, or as that of a pod that runs there. What network
//! plugins have written of further interfaces into a pod's annotation counts only where nothing else says whose the
//! address is, since whoever makes pods may write it. An address of two nodes is nobody's.
//!
//! Memory: about 350 bytes for each pod of the cluster.

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::Arc;
use tokio::sync::watch;

/// Addresses of one pod or node that count.
const ADDRESSES_MAX: usize = 32;
/// Addresses of pods that are kept over a restart: those met last, so many at least and twice as many at most.
const KEPT: usize = 4096;

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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAt {
    /// The first is where its daemon is found.
    pub addresses: Vec<IpAddr>,
    /// When it was made there, in seconds since 1970. One that is removed and made again is another node.
    pub since: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub nodes: BTreeMap<String, NodeAt>,
    pub places: BTreeMap<IpAddr, Place>,
}

/// Where an address is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub node: String,
    /// The API says so, not only a pod's annotation.
    pub told: bool,
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
    /// Addresses of pods that are known from an earlier start alone.
    kept: HashMap<IpAddr, (Word, u32)>,
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
    met: Mutex<Met>,
    /// Where what is known now is kept for a later start, if anywhere.
    pub(super) file: Option<PathBuf>,
}

/// Addresses that connections of this node led to.
#[derive(Debug, Default)]
struct Met {
    lately: HashSet<IpAddr>,
    /// The last full set before that.
    before: HashSet<IpAddr>,
}

impl Met {
    fn add(&mut self, ip: IpAddr) {
        if self.lately.len() >= KEPT {
            self.before = std::mem::take(&mut self.lately);
        }
        self.lately.insert(ip);
    }
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
            self.forget(*ip);
        }
        self.pods.insert(uid.into(), Pod { node, addresses });
    }

    /// What is known from an earlier start counts until the API says anything else of the address.
    fn set_kept(&mut self, ip: IpAddr, place: &Place) {
        let word = if place.told {
            Word::Told
        } else {
            Word::Written
        };
        let node = self.number(&place.node);
        self.forget(ip);
        self.claim((ip, word, node));
        self.kept.insert(ip, (word, node));
    }

    fn forget(&mut self, ip: IpAddr) {
        if let Some((word, node)) = self.kept.remove(&ip) {
            self.withdraw((ip, word, node));
        }
    }

    /// The one node whose it is, and who says so.
    fn owner(&self, ip: IpAddr) -> Option<(Word, &Arc<str>)> {
        match self.whose(ip, Word::Told) {
            Claimed::By(n) => Some((Word::Told, n)),
            Claimed::Disputed => None,
            Claimed::Unsaid => match self.whose(ip, Word::Written) {
                Claimed::By(n) => Some((Word::Written, n)),
                _ => None,
            },
        }
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
    /// Knows this until the API says otherwise.
    pub(super) fn restore(&self, kept: &Kept) {
        self.set_nodes(&kept.nodes);
        self.change(|s| {
            for (ip, place) in &kept.places {
                s.set_kept(*ip, place);
            }
        });
        self.met.lock().before = kept.places.keys().copied().take(2 * KEPT).collect();
    }

    /// What a later start should know.
    pub(super) fn kept(&self) -> Kept {
        let met: Vec<IpAddr> = {
            let m = self.met.lock();
            m.lately.union(&m.before).copied().collect()
        };
        let state = self.state.read();
        let place = |ip: IpAddr| {
            let (word, node) = state.owner(ip)?;
            // (As a node's it is kept anyway.)
            let of_pod = !state.nodes.get(node)?.addresses.contains(&ip);
            of_pod.then(|| Place {
                node: node.to_string(),
                told: word == Word::Told,
            })
        };
        let places = met.into_iter().filter_map(|ip| Some((ip, place(ip)?)));
        let nodes = state.nodes.iter();
        Kept {
            nodes: nodes
                .map(|(name, n)| (name.to_string(), n.clone()))
                .collect(),
            places: places.collect(),
        }
    }

    /// A connection to this address was found at its node: a later start should know whose the address is.
    pub fn met(&self, ip: IpAddr) {
        self.met.lock().add(ip.to_canonical());
    }

    /// Whose address it is, if the API says so, and of one node only.
    pub fn owner(&self, ip: IpAddr) -> Option<Arc<str>> {
        let state = self.state.read();
        state.owner(ip.to_canonical()).map(|(_, n)| n.clone())
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
            let kept: Vec<IpAddr> = s.kept.keys().copied().collect();
            for ip in kept {
                s.forget(ip);
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
mod tests;
