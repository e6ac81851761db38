//! Ends that processes which have ended leave to other processes.

use super::{Core, RETRY_SOON_MS};
use crate::clients::client::Client;
use crate::lanes::groups::Out;
use crate::lanes::inherited::{Inheritance, Inherited};
use lane::proto::msg::op;
use lane::proto::reason::Reason;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    pub(crate) fn inherit(&mut self, all: Vec<Inherited>) {
        if !all.is_empty() {
            self.inherited.all.extend(all);
            self.inherited.news.notify_one();
        }
    }

    /// Decides which link groups within the node stay after the end of their client `p`, and returns them.
    pub(crate) fn hand_down(&mut self, p: &Client) -> Vec<u64> {
        let system = self.system.clone();
        let inheritance = Inheritance::of(p, &*system);
        let (mut all, mut rest) = (Vec::new(), Vec::new());
        for (at, who, other) in self.groups.local_lanes(p.id) {
            let left = inheritance.left(&who);
            let seen = left.and_then(|l| Some((l.family.view(who.conn)?.inode, l)));
            match seen {
                Some((inode, left)) => all.push(Inherited::local(who, at, &left, inode)),
                None => rest.push((at.0, other)),
            }
        }
        let kept: Vec<u64> = all.iter().map(|i| i.at.0).collect();
        for (_, other) in rest.into_iter().filter(|r| kept.contains(&r.0)) {
            self.command(other.client, other.conn, other.gen, op::GONE);
        }
        self.inherit(all);
        kept
    }

    /// Holders were looked up. `holders`: those of the first ends in the list, in its order.
    pub fn inherited_looked_at(&mut self, holders: &[Option<u32>]) {
        let all = std::mem::take(&mut self.inherited.all);
        let mut gone = Vec::new();
        for (n, mut i) in all.into_iter().enumerate() {
            let mut over = false;
            if let Some(holder) = holders.get(n) {
                i.holder = *holder;
                over = i.missed && holder.is_none();
                i.missed = holder.is_none();
            }
            let useful = match i.remote {
                true => self
                    .rails
                    .as_ref()
                    .is_some_and(|r| r.lock().is_inherited(i.at)),
                false => self.groups.survivor(i.who).is_some(),
            };
            match over || !useful {
                true => gone.push(i),
                false => self.inherited.all.push(i),
            }
        }
        let mut out = Out::default();
        for i in gone {
            let same = |o: &Inherited| !o.remote && o.at.0 == i.at.0;
            if i.remote {
                self.rails(|r| r.over(i.at));
            } else if !self.inherited.all.iter().any(same) {
                self.groups.over(i.at.0, i.who.client, &mut out);
            } else if let Some(other) = self.groups.survivor(i.who) {
                self.command(other.client, other.conn, other.gen, op::GONE);
            }
        }
        self.act(out, Reason::PeerGone, RETRY_SOON_MS);
        self.busy_changed();
    }
}
