//! What changed since the last look.
//!
//! Devices that we have open report changes by events. New devices, and changes of ports that we do not use, are
//! found by looking again.

use super::{SysDevice, Tree};
use crate::verbs::{DeviceId, Transport};
use std::collections::{BTreeMap, BTreeSet};

/// What [`Watch::look`] has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The device exists and can be opened.
    Added(SysDevice),
    /// The state, the GIDs, or anything else has changed.
    Changed(SysDevice),
    /// The device is gone, or is being removed: it must be closed now, because `rdma link del` waits for that.
    Removed(DeviceId),
}

/// Follows the devices that can be opened.
pub struct Watch {
    tree: Tree,
    known: BTreeMap<DeviceId, SysDevice>,
    /// Devices whose GIDs have to be read again.
    stale: BTreeSet<DeviceId>,
}

impl Watch {
    /// Knows no device yet: at the first look, all are new.
    pub fn new(tree: Tree) -> Self {
        Watch {
            tree,
            known: BTreeMap::new(),
            stale: BTreeSet::new(),
        }
    }

    /// The devices as of the last [`Watch::look`].
    pub fn devices(&self) -> impl Iterator<Item = &SysDevice> {
        self.known.values()
    }

    /// The device's GIDs may have changed: an event said so, or its interface's addresses changed.
    pub fn stale(&mut self, id: &DeviceId) {
        self.stale.insert(id.clone());
    }

    /// Looks again. Removals come first, so that a device that came back under its name is first removed, then added.
    /// GIDs, for which a thousand files have to be read, are read only if a device is new, has changed otherwise, or
    /// is stale.
    pub fn look(&mut self) -> Vec<Change> {
        let names = self.tree.names();
        let now: BTreeMap<DeviceId, SysDevice> = names
            .iter()
            .filter_map(|name| self.see(name))
            .map(|d| (d.id.clone(), d))
            .collect();
        self.stale.clear();
        let mut changes: Vec<Change> = self
            .known
            .keys()
            .filter(|id| !now.contains_key(id))
            .map(|id| Change::Removed(id.clone()))
            .collect();
        for (id, d) in &now {
            match self.known.get(id) {
                None => changes.push(Change::Added(d.clone())),
                Some(old) if old != d => changes.push(Change::Changed(d.clone())),
                Some(_) => {}
            }
        }
        self.known = now;
        changes
    }

    fn see(&self, name: &str) -> Option<SysDevice> {
        let mut seen = self.tree.glance(name).filter(|d| d.verbs.is_some())?;
        let old = self.known.get(&seen.id);
        if let Some(old) = old.filter(|d| !self.stale.contains(&d.id)) {
            // (For iWARP, `glance` reads the addresses of the interfaces.)
            let kept = seen.transport != Transport::Iwarp;
            for (p, o) in seen.ports.iter_mut().zip(&old.ports).filter(|_| kept) {
                p.gids.clone_from(&o.gids);
                p.netdev.clone_from(&o.netdev);
            }
            if seen == *old {
                return Some(seen);
            }
        }
        self.tree.device(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::sysfs::tests::{put, rxe};
    use crate::verbs::PortState;
    use std::fs;

    const GID: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";

    #[test]
    fn comes_changes_goes_and_comes_back() {
        let root = tempfile::tempdir().unwrap();
        let r = root.path();
        let mut watch = Watch::new(Tree::at(r));
        assert_eq!(watch.look(), []);

        rxe(r, "rxe0", "eth0", &[GID]);
        let changes = watch.look();
        let [Change::Added(first)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!(watch.look(), []);

        put(r, "class/infiniband/rxe0/ports/1/state", "1: DOWN");
        let changes = watch.look();
        let [Change::Changed(d)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!(d.ports[0].state, PortState::Down);
        assert_eq!(d.id, first.id);

        // It disappears first, and for a long time nothing else does.
        let verbs = r.join("class/infiniband_verbs/u-rxe0");
        fs::rename(&verbs, r.join("away")).unwrap();
        assert_eq!(watch.look(), [Change::Removed(first.id.clone())]);
        fs::rename(r.join("away"), &verbs).unwrap();
        assert!(matches!(&watch.look()[..], [Change::Added(d)] if d.id == first.id));

        // Another GID is noticed only after a call of `stale`.
        let other = "0000:0000:0000:0000:0000:ffff:0a09:0002";
        put(r, "class/infiniband/rxe0/ports/1/gids/0", other);
        assert_eq!(watch.look(), []);
        watch.stale(&first.id);
        let changes = watch.look();
        let [Change::Changed(d)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!(d.ports[0].gids[0].gid.to_string(), other);
        assert_eq!(watch.look(), []);

        // The same name and content, but another appearance. The old directory is kept aside, because a real file
        // system may reuse its inode number at once.
        let dir = r.join("class/infiniband/rxe0");
        fs::rename(&dir, r.join("aside")).unwrap();
        rxe(r, "rxe0", "eth0", &[GID]);
        let changes = watch.look();
        let [Change::Removed(old), Change::Added(new)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!(*old, first.id);
        assert_ne!(new.id, first.id);

        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(watch.look(), [Change::Removed(new.id.clone())]);
        assert_eq!(watch.devices().count(), 0);
    }
}
