//! The two sockets at which tools ask, and how many connections tools may have there.
//!
//! Each of them (a user in a tenant, or a pod) has a few turns: what it asks beyond them waits for its own answers only. If
//! there are as many connections as there may be, the oldest one of the tenant that has most makes way, so that nobody is
//! kept out by others. Root on the node, who may do anything here, is not counted.

use crate::clients::places::{Place, Places};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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

/// Those who ask at a socket.
pub(crate) struct Callers {
    gate: Gate,
    places: Rc<Places>,
    turns: RefCell<HashMap<String, Weak<Semaphore>>>,
}

impl Callers {
    pub(crate) fn new(gate: Gate) -> Rc<Callers> {
        Rc::new(Callers {
            gate,
            places: Places::new(PLACES),
            turns: RefCell::default(),
        })
    }

    /// A place for a connection of this tenant; and must another one make way for it? `None`: the tenant has as many as
    /// it may have.
    pub(crate) fn take(&self, tenant: &str) -> Option<(Place, bool)> {
        let may = self.places.of(tenant) < self.gate.places_of_one();
        may.then(|| self.places.enter(tenant))
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

#[cfg(test)]
mod tests {
    use super::*;

    async fn must_leave(p: &Place) -> bool {
        tokio::select! {
            biased;
            () = p.has_to_leave() => true,
            () = tokio::task::yield_now() => false,
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_has_most_makes_way() {
        let places = Callers::new(Gate::Node);
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
        assert_eq!((places.places.of("a"), places.places.of("b")), (1, 2));
        assert!(!take("c").1, "there is room");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_pod_has_few_and_keeps_no_other_out() {
        let places = Callers::new(Gate::Pods);
        let ours: Vec<_> = (0..PLACES_OF_POD).map(|_| places.take("a")).collect();
        assert!(ours.iter().all(Option::is_some) && places.take("a").is_none());
        assert!(places.take("b").is_some(), "another pod has its own");
        drop(ours);
        assert!(places.take("a").is_some() && places.places.of("b") == 0);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_tenant_waits_for_its_own_turns() {
        let places = Callers::new(Gate::Node);
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
