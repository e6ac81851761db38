//! Places for connections, by tenant: of those that have not said hello, and of those that ask. While there is room, nobody is
//! refused. When there is none, the oldest one of the tenant that has most makes way: whoever keeps many keeps nobody else out.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use tokio::sync::Notify;

/// All of them.
pub(crate) struct Places {
    most: usize,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    all: usize,
    /// By their numbers, which rise with time. No tenant without any.
    of: HashMap<Rc<str>, BTreeMap<u64, Rc<Notify>>>,
}

/// A connection's place, until it is dropped.
pub(crate) struct Place {
    all: Rc<Places>,
    tenant: Rc<str>,
    number: u64,
    leave: Rc<Notify>,
}

impl Places {
    /// `most`: so many there are.
    pub(crate) fn new(most: usize) -> Rc<Places> {
        Rc::new(Places {
            most: most.max(1),
            state: RefCell::default(),
        })
    }

    /// Somebody has connected. `true`: another one has to leave for it.
    pub(crate) fn enter(self: &Rc<Self>, tenant: &str) -> (Place, bool) {
        let mut s = self.state.borrow_mut();
        let full = s.all >= self.most;
        if full {
            s.make_way(tenant);
        }
        let number = s.next;
        s.next += 1;
        s.all += 1;
        let tenant = match s.of.get_key_value(tenant) {
            Some((known, _)) => known.clone(),
            None => Rc::from(tenant),
        };
        let leave = Rc::new(Notify::new());
        let own = s.of.entry(tenant.clone()).or_default();
        own.insert(number, leave.clone());
        drop(s);
        let place = Place {
            all: self.clone(),
            tenant,
            number,
            leave,
        };
        (place, full)
    }

    /// How many this tenant has.
    pub(crate) fn of(&self, tenant: &str) -> usize {
        self.state.borrow().of.get(tenant).map_or(0, BTreeMap::len)
    }
}

impl State {
    /// The oldest one of the tenant that has most is told to leave. If several have as many, it is the newcomer's own, or the
    /// oldest of theirs.
    fn make_way(&mut self, newcomer: &str) {
        let most = self
            .of
            .iter()
            .max_by_key(|(t, all)| (all.len(), &***t == newcomer, Reverse(all.keys().next())));
        let Some(tenant) = most.map(|(t, _)| t.clone()) else {
            return;
        };
        let oldest = self.of.get(&tenant).and_then(|all| all.keys().next());
        if let Some(n) = oldest.copied() {
            if let Some(leave) = self.remove(&tenant, n) {
                leave.notify_one();
            }
        }
    }

    fn remove(&mut self, tenant: &str, number: u64) -> Option<Rc<Notify>> {
        let own = self.of.get_mut(tenant)?;
        let leave = own.remove(&number)?;
        if own.is_empty() {
            self.of.remove(tenant);
        }
        self.all -= 1;
        Some(leave)
    }
}

impl Place {
    /// Returns when it has to make way.
    pub(crate) async fn has_to_leave(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all
            .state
            .borrow_mut()
            .remove(&self.tenant, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(n: &Place) -> bool {
        use std::future::Future;
        let mut told = std::pin::pin!(n.has_to_leave());
        let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
        told.as_mut().poll(&mut nobody).is_ready()
    }

    #[test]
    fn who_has_most_makes_way() {
        let all = Places::new(10);
        let come = |tenant: &str| all.enter(tenant);
        let first: Vec<_> = (0..10).map(|_| come("a")).collect();
        assert!(first.iter().all(|(_, full)| !full));
        let (b, full) = come("b");
        assert!(full && leaves(&first[0].0) && !leaves(&first[1].0) && !leaves(&b));
        // It has room until it has as many; then it is its own turn.
        let more: Vec<_> = (0..4).map(|_| come("b").0).collect();
        assert_eq!((all.of("a"), all.of("b")), (5, 5));
        let last = come("b").0;
        assert!(leaves(&b) && !leaves(&last));
        assert_eq!((all.of("a"), all.of("b")), (5, 5));
        // One that has left gives no place back twice.
        drop(b);
        assert_eq!(all.state.borrow().all, 10);
        drop((first, more, last));
        assert!(all.state.borrow().of.is_empty() && all.state.borrow().all == 0);
    }

    #[test]
    fn many_tenants_keep_nobody_out() {
        let all = Places::new(8);
        let first: Vec<_> = (0..8).map(|n| all.enter(&format!("{n}")).0).collect();
        let (b, full) = all.enter("b");
        assert!(full && !leaves(&b));
        assert_eq!(first.iter().filter(|n| leaves(n)).count(), 1);
    }
}
