//! Explores models: every state within their bounds, and circles of steps that happen by themselves.

use stateright::{Checker, Expectation, HasDiscoveries, Model};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

/// A model whose steps are of two kinds: those that happen sooner or later, and the others.
pub trait Due: Model {
    /// The steps that happen by themselves.
    fn due(&self, s: &Self::State, out: &mut Vec<Self::Action>);
}

/// What came of an exploration.
pub struct Explored {
    pub states: usize,
    /// Steps from one state to another.
    pub steps: usize,
    /// The name of a property that does not hold and the steps that show it.
    pub failure: Option<(String, String)>,
}

/// Explores all of `model`, or until a property fails.
pub fn explore<M>(model: M) -> Explored
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + Send + Sync + PartialEq + 'static,
    M::Action: Clone + Debug + Send + Sync + PartialEq + 'static,
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
        steps: checker.state_count(),
        failure,
    }
}

/// Insists that every property of the model holds.
pub fn holds(what: &str, e: Explored) {
    eprintln!("{what}: {} states, {} steps", e.states, e.steps);
    if let Some((name, steps)) = e.failure {
        panic!("{what}: \"{name}\" does not hold:\n{steps}");
    }
}

/// Insists that one of the properties `by` fails without the precaution that `bug` takes away.
#[track_caller]
pub fn caught(bug: impl Debug, e: Explored, by: &[&str]) {
    let Some((name, steps)) = e.failure else {
        panic!("{bug:?} went unnoticed in {} states", e.states)
    };
    eprintln!(
        "{bug:?}: \"{name}\" after {} steps, {} states",
        steps.lines().count(),
        e.states
    );
    if std::env::var_os("MODEL_STEPS").is_some() {
        eprintln!("{steps}");
    }
    assert!(
        by.contains(&name.as_str()),
        "{bug:?} was caught by \"{name}\":\n{steps}"
    );
}

/// Looks for a circle of steps that happen by themselves: ends or daemons that are busy for ever without
/// getting anywhere. Returns the number of states, and one of a circle if there is one.
pub fn circle<M>(model: &M) -> (usize, Option<String>)
where
    M: Due,
    M::State: Clone + Debug + Eq + Hash,
    M::Action: Clone + Debug + PartialEq,
{
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
        model.due(&state, &mut due);
        let mut steps = Vec::new();
        for act in all {
            let by_itself = due.contains(&act);
            let Some(n) = model.next_state(&state, act.clone()) else {
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
    let circle = on_a_circle(&next).map(|i| format!("{:?}", states[i]));
    (states.len(), circle)
}

/// A node of the graph that leads back to itself.
fn on_a_circle(next: &[Vec<u32>]) -> Option<usize> {
    // Depth first, without recursion. 0: not seen, 1: on the path, 2: done.
    let mut seen = vec![0u8; next.len()];
    for root in 0..next.len() {
        let mut path = vec![(root, 0)];
        while let Some((s, step)) = path.pop() {
            if step == 0 {
                if seen[s] != 0 {
                    continue;
                }
                seen[s] = 1;
            }
            let Some(&to) = next[s].get(step) else {
                seen[s] = 2;
                continue;
            };
            path.push((s, step + 1));
            match seen[to as usize] {
                0 => path.push((to as usize, 0)),
                1 => return Some(to as usize),
                _ => {}
            }
        }
    }
    None
}
