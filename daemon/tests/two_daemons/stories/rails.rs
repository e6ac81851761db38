//! The rails to another node, as the lanes' users see them: when there are none, what is kept for a node that is lost, and
//! what is shown of them.

use super::*;
use std::cell::Cell;

impl Story {
    /// Time passes until this is so; how many ms that takes.
    fn until(&self, what: &str, is: impl Fn(&Story) -> bool) -> u64 {
        for ms in 0..20_000 {
            if is(self) {
                return ms;
            }
            self.w.pass(MS);
            (0..2).for_each(|n| self.serve(n));
        }
        panic!("not within 20 s: {what}{}", self.w.state());
    }

    /// So many ms pass.
    fn rest(&self, ms: u64) {
        for _ in 0..ms {
            self.w.pass(MS);
            (0..2).for_each(|n| self.serve(n));
        }
    }

    fn shows(&self, n: usize, what: &str) -> bool {
        self.rails_of(n).contains(what)
    }
}

/// A peer that breaks the protocol has no rails for two seconds, and for twice as long each time that it does so before a
/// link works again: it must not keep its neighbour busy with incarnation after incarnation.
#[test]
fn a_peer_that_breaks_the_protocol_waits_for_its_rails() {
    let s = Story::before();
    let lies = Rc::new(Cell::new(true));
    let told = lies.clone();
    s.w.verbs.set_lie(move |node, bytes| {
        if node == 0 && told.get() {
            bytes.truncate(1);
        }
    });
    for (seconds, works_then) in [(2, false), (4, true), (2, true)] {
        lies.set(true);
        s.until("a violation", |s| s.shows(1, "rails 0"));
        lies.set(!works_then);
        let ms = s.until("rails", |s| s.shows(1, "rails 2"));
        assert!(
            ms.abs_diff(seconds * 1000) < 150,
            "{ms} ms, not {seconds} s"
        );
        if works_then {
            s.until("a link", |s| s.shows(1, "up true"));
        }
    }
    lies.set(false);
    s.connect();
    s.whole(1000);
}

/// A node is lost: what is kept for its sake goes after twenty seconds, and not before, also if no connection uses it.
#[test]
fn what_is_kept_for_a_lost_node_goes() {
    for used in [true, false] {
        let s = if used { Story::up(0) } else { Story::new() };
        if !used {
            (0..2).for_each(|e| s.process(e).borrow_mut().abort(0));
            s.until("lanes go", |s| s.shows(1, " 0 in the engine"));
        }
        let kept = |s: &Story| {
            s.hear(1);
            let process = s.process(1);
            let p = process.borrow();
            p.groups.values().all(|g| !g.gone) && !p.groups.is_empty()
        };
        s.w.set_channel(false);
        let since = s.w.now.get();
        s.cut_and_noticed();
        s.rest(19_500 - (s.w.now.get() - since) / MS);
        assert!(kept(&s), "{}", s.w.state());
        s.rest(1_000);
        assert!(!kept(&s), "{}", s.w.state());
        assert!(s.shows(1, "incarnation 2"), "{}", s.rails_of(1));
    }
}
