//! The switch protocol as an explicit-state model, explored exhaustively within small bounds.
//!
//! One direction of one lane: a sender, a receiver, the TCP stream, the ring, the shared words,
//! the two doorbells, and the daemon that offers the lane. Every action is one load or store of
//! shared memory or one system call, in the order in which `link::lane` makes them, so that the
//! two parties (and their deaths) interleave at every point where they can in life. The two
//! directions of a connection share nothing but the doorbells and the end, so one is enough;
//! `wake` models several sleepers on one link, `holders` several threads or processes on one end.
//!
//! Memory is sequentially consistent here. The code has a full fence wherever a store must be
//! visible before a later load (publish and look, revoke and look, wish and look), and release and
//! acquire elsewhere; that this suffices on weaker memory is what the loom tests in `link` check.
//!
//! A model that cannot fail proves nothing: [`Bug`] takes one precaution away at a time, and the
//! tests insist that the checker finds each.

pub mod holders;
pub mod lane;
mod receiver;
mod sender;
pub mod space;
pub mod state;
pub mod tcp;

use stateright::{Checker, Expectation, HasDiscoveries, Model};
use std::collections::HashMap;

/// A precaution left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The sender does not look at the receiver's word after a publish.
    NoLookAfterPublish,
    /// A ready receiver reads TCP without counting first.
    UnboundedRead,
    /// It counts, but does not look for the switch once more afterwards.
    NoLookAfterCount,
    /// A party goes to sleep without a second look.
    SleepWithoutLook,
    /// The publisher looks for sleepers before it publishes.
    LookBeforePublish,
    /// The head becomes visible before the data.
    HeadBeforeData,
    /// End of file is believed without another look at the ring.
    EofWithoutLook,
    /// The same while ready, where the switch may have come just before.
    ReadyEofWithoutLook,
    /// A switch up does not look whether readiness was taken back meanwhile.
    NoRetreat,
    /// Ready again before the sender has read the revocation.
    ReadyTooEarly,
    /// Receives go on while a revocation waits.
    ConsumeWhileRevoking,
    /// Bytes that come twice are not skipped.
    NoSkip,
    /// A send that met a revocation says that all is sent, though TCP refused it.
    NoTakeBack,
    /// Anything on TCP is a frame once the sender has announced one.
    TrustAnnouncement,
    /// The receiver wants to be told of space, but its cursor was not looked at again.
    WishWithoutLook,
    /// The reader does not look for a wish after it has consumed.
    NoLookForWish,
    /// One waiter's success takes back the wish of another.
    WishTakenBack,
    /// The switch does not wait for those who are inside a native call.
    NoDoor,
    /// The native caller counts itself in after it has looked at the door.
    CountAfterLook,
    /// A switch trusts its own count and does not ask the kernel.
    TrustCount,
    /// Who finds another's work on the doorbell does not pass it on.
    NoForward,
    /// The new ring's place is announced before the place is written.
    MoveBeforePlace,
    /// The sender moves on although the reader is still in the ring before.
    MoveTooEarly,
    /// Half a frame stays in the kernel, which calls the socket readable.
    HalfStays,
}

/// What came of an exploration.
pub struct Explored {
    pub states: usize,
    /// The name of a property that does not hold and the steps that show it.
    pub failure: Option<(String, String)>,
}

/// Looks for a circle of steps that happen by themselves: a party that spins for ever without
/// getting anywhere. Returns the number of states, and one of a circle if there is one.
pub fn circle(model: &lane::Lane) -> (usize, Option<String>) {
    let mut index = HashMap::new();
    let mut next: Vec<Vec<u32>> = Vec::new();
    let mut states = model.init_states();
    for s in &states {
        index.insert(s.clone(), index.len() as u32);
    }
    let mut at = 0;
    while at < states.len() {
        let state = states[at].clone();
        let (mut all, mut due) = (Vec::new(), Vec::new());
        model.actions(&state, &mut all);
        if state.fault.is_none() {
            state.due(&model.0, &mut due);
        }
        let mut steps = Vec::new();
        for act in all {
            let by_itself = due.contains(&act);
            let Some(n) = model.next_state(&state, act) else {
                // A step that changes nothing can be taken for ever.
                if by_itself {
                    return (states.len(), Some(format!("{act:?} of {state:?}")));
                }
                continue;
            };
            let fresh = index.len() as u32;
            let to = *index.entry(n.clone()).or_insert(fresh);
            if to == fresh {
                states.push(n);
            }
            if by_itself {
                steps.push(to);
            }
        }
        next.push(steps);
        at += 1;
    }
    // Depth first, without recursion. 0: not seen, 1: on the path, 2: done.
    let mut seen = vec![0u8; states.len()];
    for root in 0..states.len() {
        let mut path = vec![(root, 0)];
        while let Some((s, step)) = path.pop() {
            if step == 0 {
                if seen[s] != 0 {
                    continue;
                }
                seen[s] = 1;
            }
            match next[s].get(step) {
                None => seen[s] = 2,
                Some(&to) => {
                    path.push((s, step + 1));
                    match seen[to as usize] {
                        0 => path.push((to as usize, 0)),
                        1 => return (states.len(), Some(format!("{:?}", states[to as usize]))),
                        _ => {}
                    }
                }
            }
        }
    }
    (states.len(), None)
}

/// Explores all of `model`, or until a property fails.
pub fn explore<M>(model: M) -> Explored
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + Send + Sync + PartialEq + 'static,
    M::Action: Clone + std::fmt::Debug + Send + Sync + PartialEq + 'static,
{
    let checker = model
        .checker()
        .threads(1)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let failure = checker.model().properties().iter().find_map(|p| {
        let path = checker.discovery(p.name);
        match (&p.expectation, path) {
            (Expectation::Sometimes, Some(_)) => None,
            // Not reached; only what was explored to the end says that it cannot be.
            (Expectation::Sometimes, None) if checker.is_done() => {
                Some((p.name.to_owned(), "never happens".to_owned()))
            }
            (_, Some(path)) => {
                let steps: Vec<_> = path
                    .into_actions()
                    .iter()
                    .map(|a| format!("{a:?}"))
                    .collect();
                Some((p.name.to_owned(), steps.join("\n")))
            }
            (_, None) => None,
        }
    });
    Explored {
        states: checker.unique_state_count(),
        failure,
    }
}
