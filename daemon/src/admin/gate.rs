//! The two sockets at which tools ask, and how many connections tools may have there.
//!
//! Each of them (a user in a tenant, or a pod) has a few turns: what it asks beyond them waits for its own answers only. If
//! there are as many connections as there may be, the oldest one of the tenant that has most makes way, so that nobody is
//! kept out by others. Root on the node, who may do anything here, is not counted.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Connections that tools may have at a socket.
const PLACES: usize = 256;
/// Requests of a tenant that are answered at a time.
const TURNS: usize = 4;
/// Connections of a pod.
const PLACES_OF_POD: usize = 4;

/// Who may ask at a socket, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gate {
    /// The tools of this node.
    Node,
    /// Those in pods: each pod sees its own connections.
    Pods,
}

impl Gate {
    /// Connections that one tenant may have. (Of the node's users, each program under `underpass run` asks, however many
    /// are started at a time: none of them may be refused.)
    fn places_of_one(self) -> usize {
        match self {
            Gate::Node => PLACES,
            Gate::Pods => PLACES_OF_POD,
        }
    }
}

/// A connection that is counted.
struct Counted {
    tenant: String,
    leave: Arc<Notify>,
}

/// Connections that tools have at a socket.
pub(crate) struct Places {
    gate: Gate,
    /// In the order in which they came.
    all: RefCell<BTreeMap<u64, Counted>>,
    next: Cell<u64>,
    turns: RefCell<HashMap<String, Weak<Semaphore>>>,
}

/// A connection's place, until it is dropped.
pub(crate) struct Place {
    of: Rc<Places>,
    number: u64,
    leave: Arc<Notify>,
}

impl Places {
    pub(crate) fn new(gate: Gate) -> Rc<Places> {
        Rc::new(Places {
            gate,
            all: RefCell::default(),
            next: Cell::new(0),
            turns: RefCell::default(),
        })
    }

    /// A place for a connection of this tenant; and must another one make way for it? `None`: the tenant has as many as
    /// it may have.
    pub(crate) fn take(self: &Rc<Self>, tenant: &str) -> Option<(Place, bool)> {
        let mut all = self.all.borrow_mut();
        let mut count: HashMap<&str, usize> = HashMap::new();
        for c in all.values() {
            *count.entry(&c.tenant).or_default() += 1;
        }
        let own = count.get(tenant).copied().unwrap_or(0);
        if own >= self.gate.places_of_one() {
            return None;
        }
        let full = all.len() >= PLACES;
        if full {
            let most = count.values().copied().max();
            let mut oldest = all
                .iter()
                .filter(|c| count.get(&*c.1.tenant) == most.as_ref());
            let number = oldest.next().map(|c| *c.0);
            let left = number.and_then(|n| all.remove(&n));
            // (One permit is kept for it, should it not be waiting yet.)
            left.iter().for_each(|c| c.leave.notify_one());
        }
        let number = self.next.get();
        self.next.set(number + 1);
        let leave = Arc::new(Notify::new());
        let counted = Counted {
            tenant: tenant.to_owned(),
            leave: leave.clone(),
        };
        all.insert(number, counted);
        let place = Place {
            of: self.clone(),
            number,
            leave,
        };
        Some((place, full))
    }

    /// Waits for one of the tenant's turns, which lasts until what is returned is dropped.
    pub(crate) async fn turn(&self, tenant: &str) -> Option<OwnedSemaphorePermit> {
        let turns = {
            let mut all = self.turns.borrow_mut();
            let known = all.get(tenant).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                all.retain(|_, t| t.strong_count() > 0);
                let turns = Arc::new(Semaphore::new(TURNS));
                all.insert(tenant.to_owned(), Arc::downgrade(&turns));
                turns
            })
        };
        turns.acquire_owned().await.ok()
    }
}

impl Place {
    /// Returns when the connection must make way.
    pub(crate) async fn left(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.all.borrow_mut().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn must_leave(p: &Place) -> bool {
        tokio::select! {
            biased;
            () = p.left() => true,
            () = tokio::task::yield_now() => false,
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_has_most_makes_way() {
        let places = Places::new(Gate::Node);
        let take = |t: &str| places.take(t).unwrap();
        let first = take("b").0;
        let many: Vec<_> = (1..PLACES).map(|_| take("a")).collect();
        assert!(many.iter().all(|m| !m.1));
        let (second, made_way) = take("b");
        assert!(made_way && must_leave(&many[0].0).await && !must_leave(&many[1].0).await);
        let (_own, made_way) = take("a");
        assert!(made_way && must_leave(&many[1].0).await);
        assert!(!must_leave(&first).await && !must_leave(&second).await);
        drop(many);
        assert_eq!(places.all.borrow().len(), 3);
        assert!(!take("c").1, "there is room");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_pod_has_few_and_keeps_no_other_out() {
        let places = Places::new(Gate::Pods);
        let ours: Vec<_> = (0..PLACES_OF_POD).map(|_| places.take("a")).collect();
        assert!(ours.iter().all(Option::is_some) && places.take("a").is_none());
        assert!(places.take("b").is_some(), "another pod has its own");
        drop(ours);
        assert!(places.take("a").is_some() && places.all.borrow().is_empty());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_tenant_waits_for_its_own_turns() {
        let places = Places::new(Gate::Node);
        let mut ours = Vec::new();
        for _ in 0..TURNS {
            ours.push(places.turn("a").await.unwrap());
        }
        let turn = |tenant| {
            let places = places.clone();
            async move {
                tokio::select! {
                    biased;
                    t = places.turn(tenant) => t.is_some(),
                    () = tokio::task::yield_now() => false,
                }
            }
        };
        assert!(!turn("a").await && turn("b").await);
        ours.pop();
        assert!(turn("a").await);
        drop(ours);
        assert!(turn("c").await);
        assert_eq!(places.turns.borrow().len(), 1, "nobody else waits");
    }
}
