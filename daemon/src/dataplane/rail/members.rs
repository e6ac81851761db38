//! Peer nodes that come and go while the daemon runs.

use super::incarnation::{after, Node};
use super::Rails;
use crate::nodes::peers::directory::Name;
use underpass_rdma::verbs::Provider;

/// Nodes that are gone whose incarnations are remembered.
const FORMER_MAX: usize = 4096;

impl<V: Provider> Rails<V> {
    /// Lanes to this node can be made from now on. (One that was given up may be back before it was forgotten.)
    pub fn node_came(&mut self, name: &Name) {
        self.notify();
        if let Some(n) = self.nodes.get_mut(name) {
            n.gone = false;
            return;
        }
        let mut node = Node::new(self.numbers, self.own < *name, &self.system);
        if let Some(at) = self.former.iter().position(|f| f.0 == *name) {
            let former = self.former.remove(at);
            node.incarnation = former.map_or(1, |f| after(f.1));
        }
        self.numbers += 1;
        self.nodes.insert(name.clone(), node);
        self.add_ports(name);
        self.list();
    }

    /// This node is nobody to make lanes with any more: those that there are go down to TCP.
    pub fn node_left(&mut self, name: &Name) {
        self.notify();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        n.gone = true;
        let incarnation = n.incarnation;
        self.renew(name, after(incarnation));
    }

    /// Forgets nodes that are gone, once nothing of them is left.
    pub(super) fn forget_gone(&mut self) {
        let left = |name: &Name| {
            let group = self.groups.values().any(|g| g.node == *name);
            group || self.lanes.values().any(|l| l.node == *name)
        };
        let done = |n: &Node<V>| n.lanes.is_empty() && n.clients.is_empty() && n.making.is_empty();
        let all = self.nodes.iter();
        let all = all.filter(|(name, n)| n.gone && done(n) && !left(name));
        let all: Vec<Name> = all.map(|(name, _)| name.clone()).collect();
        for name in &all {
            if let Some(mut n) = self.nodes.remove(name) {
                if self.former.len() == FORMER_MAX {
                    self.former.pop_front();
                }
                self.former.push_back((name.clone(), n.incarnation));
                n.keep_counts();
                for (port, stats) in n.past {
                    super::show::add(&mut self.departed, port, stats);
                }
            }
        }
        if !all.is_empty() {
            self.list();
        }
    }

    fn list(&mut self) {
        self.names = self.nodes.keys().cloned().collect();
    }
}
