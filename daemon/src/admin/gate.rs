//! The two sockets at which tools ask, and how many connections pods may have at theirs.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// Connections that tools in pods may have, all together and those of one pod.
const PLACES: usize = 256;
const PLACES_OF_POD: usize = 4;

/// Who may ask at a socket, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gate {
    /// The tools of this node.
    Node,
    /// Those in pods: each pod sees its own connections.
    Pods,
}

/// Connections that tools have, all and by pod.
#[derive(Default)]
pub(crate) struct Places {
    all: Cell<usize>,
    pods: RefCell<HashMap<String, usize>>,
    left: tokio::sync::Notify,
}

/// A connection.
pub(crate) struct Here(Rc<Places>);

impl Here {
    pub(crate) fn enter(places: &Rc<Places>) -> Here {
        places.all.set(places.all.get() + 1);
        Here(places.clone())
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.0.all.set(self.0.all.get().saturating_sub(1));
        self.0.left.notify_waiters();
    }
}

/// A connection of a pod.
pub(crate) struct Place(Rc<Places>, String);

impl Places {
    /// Returns when another connection may be accepted.
    pub(crate) async fn room(&self) {
        while self.all.get() >= PLACES {
            self.left.notified().await;
        }
    }

    /// `None`: the pod has as many as it may have.
    pub(crate) fn take(self: &Rc<Self>, pod: &str) -> Option<Place> {
        let mut pods = self.pods.borrow_mut();
        let n = pods.entry(pod.to_owned()).or_default();
        if *n >= PLACES_OF_POD {
            return None;
        }
        *n += 1;
        Some(Place(self.clone(), pod.to_owned()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut pods = self.0.pods.borrow_mut();
        match pods.get_mut(&self.1) {
            Some(n) if *n > 1 => *n -= 1,
            _ => drop(pods.remove(&self.1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn so_many_and_no_more() {
        let places = Rc::new(Places::default());
        let all: Vec<_> = (0..PLACES).map(|_| Here::enter(&places)).collect();
        let ours: Vec<_> = (0..PLACES_OF_POD).map(|_| places.take("a")).collect();
        assert!(ours.iter().all(Option::is_some) && places.take("a").is_none());
        assert!(places.take("b").is_some(), "another pod has its own");
        drop(ours);
        assert!(places.take("a").is_some() && places.pods.borrow().is_empty());
        tokio::select! {
            biased;
            () = places.room() => panic!("there is none"),
            () = tokio::task::yield_now() => {}
        }
        drop(all);
        places.room().await;
    }
}
