//! Which transitions an end's halves and words have made.

use super::World;
use lane::abi::{takeover, tx as phase};
use lane::half::{rx, tx};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// How often a transition is seen.
#[derive(Clone, Copy, PartialEq)]
pub enum How {
    /// In each run of some hundred cases.
    Often,
    /// In each run of many thousand.
    Rarely,
    /// It may be. (What is so in both columns has a case of its own: `taken_over_twice`,
    /// `a_slot_after_its_daemon`, `a_slot_after_its_end`, `up_after_the_end`.)
    Maybe,
}
use How::{Maybe as M, Often as O, Rarely as R};

/// On one node: what changes, from what, to what, and how often that is seen where anything happens,
/// and where ends leave beside a daemon. There are no others. (A look is made at each system call, each publish and each
/// act, so that one may be two steps of one act. A sender that goes to `None` has a new use of its lane.)
#[rustfmt::skip]
pub const KNOWN: [(&str, &str, &str, [How; 2]); 59] = [
    ("receives", "Last", "Skip", [R, O]),
    ("receives", "Last", "Tcp", [M, R]),
    ("receives", "Prefix", "Last", [M, M]),
    ("receives", "Prefix", "Revoking", [R, M]),
    ("receives", "Prefix", "Ring", [O, M]),
    ("receives", "Prefix", "Skip", [M, M]),
    ("receives", "Prefix", "Tcp", [R, M]),
    ("receives", "Ready", "Last", [R, O]),
    ("receives", "Ready", "Prefix", [O, R]),
    ("receives", "Ready", "Revoking", [O, O]),
    ("receives", "Ready", "Ring", [O, O]),
    ("receives", "Ready", "Skip", [M, M]),
    ("receives", "Ready", "Tcp", [O, O]),
    ("receives", "Revoking", "Last", [M, O]),
    ("receives", "Revoking", "Prefix", [R, M]),
    ("receives", "Revoking", "Ring", [M, O]),
    ("receives", "Revoking", "Skip", [R, O]),
    ("receives", "Revoking", "Tcp", [O, O]),
    ("receives", "Ring", "Last", [R, R]),
    ("receives", "Ring", "Revoking", [O, O]),
    ("receives", "Ring", "Skip", [O, O]),
    ("receives", "Ring", "Tcp", [O, R]),
    ("receives", "Skip", "Tcp", [O, O]),
    ("receives", "Tcp", "Ready", [O, O]),
    ("sends", "Drain", "Tcp", [O, O]),
    ("sends", "Ring", "Drain", [O, O]),
    ("sends", "Ring", "Tcp", [O, O]),
    ("sends", "Switch", "Ring", [O, O]),
    ("sends", "Switch", "Tcp", [R, M]),
    ("sends", "Tcp", "Switch", [O, O]),
    ("state", "Broken", "None", [M, M]),
    ("state", "Broken", "Up", [M, M]),
    ("state", "Down", "Ended", [R, R]),
    ("state", "Down", "None", [R, O]),
    ("state", "Down", "Up", [R, M]),
    ("state", "Downing", "Broken", [R, O]),
    ("state", "Downing", "Down", [O, O]),
    ("state", "Downing", "None", [M, M]),
    ("state", "Downing", "Resumed", [O, O]),
    ("state", "Ended", "None", [M, M]),
    ("state", "Ended", "Up", [M, M]),
    ("state", "None", "Up", [O, O]),
    ("state", "Resumed", "None", [O, O]),
    ("state", "Resumed", "Up", [O, R]),
    ("state", "Up", "Broken", [O, O]),
    ("state", "Up", "Downing", [O, O]),
    ("state", "Up", "None", [R, M]),
    ("state", "Up", "Resumed", [O, O]),
    ("takeover", "Done", "None", [M, M]), // (a claim that came to nothing, in the next epoch)
    ("takeover", "Done", "Taken", [M, M]),
    ("takeover", "Down", "Done", [R, O]),
    ("takeover", "Down", "Taken", [M, M]),
    ("takeover", "None", "Taken", [R, O]),
    ("takeover", "Plain", "Done", [R, O]),
    ("takeover", "Plain", "Taken", [M, M]),
    ("takeover", "Taken", "Done", [M, R]),
    ("takeover", "Taken", "Down", [R, O]),
    ("takeover", "Taken", "None", [M, R]),
    ("takeover", "Taken", "Plain", [R, O]),
];

/// What an end's halves and words say. (`None`: not looked at yet.)
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct At {
    sends: Option<tx::mode::Mode>,
    receives: Option<rx::mode::Mode>,
    state: Option<phase::Phase>,
    taken: Option<takeover::Phase>,
}

/// A kind of state, where it was, where it is: how often.
pub type Moves = BTreeMap<(&'static str, String, String), u64>;

impl World {
    /// Notes what has changed since the last look.
    pub(super) fn see_moves(&self) {
        if self.across.get() || self.hostile.get() {
            return;
        }
        for e in 0..2 {
            let (h, m) = (&self.host[e], self.memory(e));
            let now = At {
                sends: tx::mode::Mode::of(h.tx.mode.load(Relaxed)),
                receives: rx::mode::Mode::of(h.rx.mode.load(Relaxed)),
                state: phase::Phase::of(m.own_tx().state.load(Relaxed).phase()),
                taken: takeover::Phase::of(m.daemon().takeover.load(Relaxed).phase()),
            };
            let was = self.at[e].replace(now);
            self.moved("sends", was.sends, now.sends);
            self.moved("receives", was.receives, now.receives);
            self.moved("state", was.state, now.state);
            self.moved("takeover", was.taken, now.taken);
        }
    }

    fn moved<T: std::fmt::Debug + PartialEq>(
        &self,
        what: &'static str,
        was: Option<T>,
        now: Option<T>,
    ) {
        if let (Some(was), Some(now)) = (was, now) {
            if was != now {
                let key = (what, format!("{was:?}"), format!("{now:?}"));
                *self.moves.borrow_mut().entry(key).or_default() += 1;
            }
        }
    }

    /// What is seen next is no change.
    pub(super) fn forget_modes(&self, e: usize) {
        self.at[e].set(At::default());
    }
}

/// Are those there that must be? `which`: the column of [`KNOWN`]. `many`: of many thousand
/// cases.
pub fn insist(moves: &Moves, which: Option<usize>, many: bool) {
    let is = |k: &&(&str, &str, &str, [How; 2]), key: &(&str, String, String)| {
        (k.0, k.1, k.2) == (key.0, &*key.1, &*key.2)
    };
    let due = |how: [How; 2]| match which.map(|n| how[n]) {
        Some(How::Often) => true,
        Some(How::Rarely) => many,
        Some(How::Maybe) | None => false,
    };
    let unknown = moves.keys().find(|m| !KNOWN.iter().any(|k| is(&k, m)));
    assert_eq!(unknown, None, "a transition that nobody knows");
    let seen = |k: &&(&str, &str, &str, [How; 2])| moves.keys().any(|m| is(k, m));
    let missing = KNOWN.iter().find(|k| due(k.3) && !seen(k));
    let missing = missing.map(|k| (k.0, k.1, k.2));
    assert_eq!(missing, None, "a transition that was never seen");
}
