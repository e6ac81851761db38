//! Expedited ends (registered EAGER): which other ends are looked for, and what is done with those that are
//! found.

use super::Core;
use crate::clients::ids::ConnRef;
use crate::nodes::expedite::{Results, Sought, Task, ASKS, ENDS_MAX, TELL, TRIES, TRIES_ASKED};
use crate::nodes::peers::pairing::Asked;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// Looks for the other end of a connection that has been registered eagerly, if it still waits.
    pub fn start_search(&mut self, who: ConnRef) {
        if self.waiting.end(&who).is_none() || self.lookup.ends.len() >= ENDS_MAX {
            return;
        }
        self.lookup.ends.retain(|s| s.who != who);
        self.lookup.ends.push(Sought {
            who,
            tries: 0,
            asked: 0,
            told: 0,
        });
        self.lookup.wake.notify_one();
    }

    /// What is to be looked for now; `None`: nothing is left.
    pub fn next_search(&mut self) -> Option<Task> {
        let mut ends = Vec::new();
        let mut tell = Vec::new();
        self.lookup.ends.retain_mut(|s| {
            s.tries += 1;
            let end = self
                .waiting
                .end(&s.who)
                .filter(|_| s.tries <= TRIES && s.asked < ASKS);
            ends.extend(end.map(|e| (s.who, e.local, e.peer)));
            if end.is_some() && TELL.get(s.told).is_some_and(|t| s.tries >= *t) {
                tell.push(s.who);
            }
            end.is_some()
        });
        self.lookup.remote.retain_mut(|f| {
            f.tries += 1;
            f.tries <= if f.asked.register { TRIES } else { TRIES_ASKED }
        });
        let remote: Vec<Asked> = self.lookup.remote.iter().map(|f| f.asked).collect();
        for who in tell {
            if self.expedited_across(who) {
                let s = self.lookup.ends.iter_mut().find(|s| s.who == who);
                s.into_iter().for_each(|s| s.told += 1);
            }
        }
        (!ends.is_empty() || !remote.is_empty()).then(|| Task {
            ends,
            remote,
            families: self.snapshot(),
        })
    }

    /// Sends commands to the shims of the ends that a search has found, if nothing has been decided meanwhile: who registers
    /// after that waits for an end that has its answer.
    pub fn searched(&mut self, found: Results) {
        for (who, f) in found.ends {
            let waits = self.waiting.end(&who).is_some();
            if waits && self.command(f.client, f.conn, f.gen, f.op) {
                let s = self.lookup.ends.iter_mut().find(|s| s.who == who);
                s.into_iter().for_each(|s| s.asked += 1);
            }
        }
        for (asked, f) in found.remote {
            // Only one node asks about a connection, the one that the address of its peer belongs to.
            let at = self.lookup.remote.iter().position(|s| s.asked == asked);
            let Some(s) = at.map(|i| self.lookup.remote.swap_remove(i)) else {
                continue;
            };
            let ask = f.ask.filter(|a| asked.register && !s.is_answered(a));
            if let Some(f) = ask {
                self.command(f.client, f.conn, f.gen, f.op);
            }
            self.seen_for(&s.node, asked, f.reason);
        }
    }
}
