//! Nodes that come and go, and addresses that are not known yet, as in a cluster.

use super::super::listing::Known;
use super::*;

impl Story {
    /// The directory of a node says this from now on.
    fn list(&self, n: usize, known: Known) {
        let mut d = self.w.nodes[n].daemon.borrow_mut();
        d.directory.known.set(known);
        let come = d.core.nodes_changed();
        let channel = d.channel.is_some();
        drop(d);
        assert!(come.is_empty() || !channel);
    }
}

/// A node is no peer any more: the lanes with it go down to TCP without a lost byte, and what was kept for it goes. It comes
/// back as a new one.
#[test]
fn a_node_goes_and_comes_again() {
    let s = Story::up(0);
    s.send(1, 1000);
    s.carry();
    s.recv_all(0);
    s.send(1, 1000);
    assert!(s.rails_of(0).contains("[n1: "), "{}", s.rails_of(0));
    let before = counts(&s);
    s.list(0, Known::Nothing);
    {
        let d = s.w.nodes[0].daemon.borrow();
        assert!(d.core.peers.as_ref().unwrap().names().is_empty());
    }
    // (Its channel is cut: the other node sees that it ends.)
    s.w.set_channel(false);
    for _ in 0..4 {
        s.keep();
        (0..2).for_each(|e| s.hear(e));
    }
    for e in [0, 1] {
        let _ = s.down(e);
        s.send(e, 10);
        s.serve_3s();
        s.recv_all(1 - e);
        (0..2).for_each(|e| s.hear(e));
    }
    s.recv_all(0);
    assert_eq!(s.got(), 2010, "{}", s.w.state());
    assert!(!s.engaged(), "{}", s.w.state());
    for e in 0..2 {
        s.w.conns.borrow()[0].ends[e].borrow_mut().excused = true;
        s.process(e).borrow_mut().abort(0);
    }
    s.serve_3s();
    assert!(!s.rails_of(0).contains("[n1: "), "{}", s.rails_of(0));
    assert!(counts(&s) >= before);
    s.list(0, Known::All);
    s.w.set_channel(true);
    for _ in 0..20 {
        s.keep();
    }
    assert!(s.rails_of(0).contains("up true"), "{}", s.rails_of(0));
    s.connect();
    tcp::mend();
    s.set_totals(1000);
    s.w.end();
    let all = s.w.conns.borrow();
    let errors = [0, 1].map(|e: usize| all[1].ends[e].borrow().app.error);
    assert_eq!(errors, [None; 2]);
}

/// Bytes that the node's rails have carried, as the tools show them.
fn counts(s: &Story) -> u64 {
    let d = s.w.nodes[0].daemon.borrow();
    let parts = d.core.rails.as_ref().unwrap().lock().counts();
    parts.iter().map(|p| p.messages_received).sum()
}

/// The pod at the other end is so new that this node, or the other one, does not know yet where its address belongs: the
/// connection gets its lane as soon as it does, and not before.
#[test]
fn an_address_becomes_known() {
    for late in [&[0][..], &[1], &[0, 1]] {
        let s = Story::before();
        late.iter().for_each(|n| s.list(*n, Known::Name));
        s.w.open([PLENTY, PLENTY]);
        let lanes = || {
            let all = s.w.conns.borrow();
            let has = |e: usize| all.last().unwrap().ends[e].borrow().lane.is_some();
            [0, 1].map(has)
        };
        let turn = || {
            (0..2).for_each(|e| s.register(e));
            s.carry();
        };
        (0..50).for_each(|_| turn());
        assert_eq!(lanes(), [false; 2], "{late:?}");
        late.iter().for_each(|n| s.list(*n, Known::All));
        (0..50).for_each(|_| turn());
        assert_eq!(lanes(), [true; 2], "{late:?}{}", s.w.state());
        s.whole(1000);
    }
}
