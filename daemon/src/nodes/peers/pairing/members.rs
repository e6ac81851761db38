//! Nodes that come and go, and addresses that change hands, while ends wait.

use super::table::Table;
use super::{Alive, EndKey, Out, Pairing, Shown};
use crate::nodes::peers::directory::Name;
use lane::proto::reason::Reason;

impl Pairing {
    /// A node has come.
    pub fn join(&mut self, node: Name) {
        let table = Table::new(self.directory.own(), node.clone());
        self.tables.insert(node, table);
    }

    /// A node is gone. Its channel has ended before.
    pub fn leave(&mut self, node: &Name) {
        self.tables.remove(node);
        self.refusals.remove(node);
    }

    /// The directory is another one: looks for ends elsewhere if they may be there now, and judges anew what was
    /// judged by the old one.
    pub fn reassign(&mut self, now: u64, alive: Alive, out: &mut Vec<Out>) {
        let mut moved: Vec<EndKey> = Vec::new();
        for (key, s) in &self.ends {
            let wrong = s.note.local == Reason::WrongNode.code();
            if wrong || self.scope(s) != s.scope {
                moved.push(*key);
            }
        }
        moved.sort_unstable();
        for key in moved {
            let Some(mut s) = self.take(key, out) else {
                continue;
            };
            (s.note, s.seen) = (Shown::default(), 0);
            self.place(s, now, alive, out);
        }
    }
}
