//! The rails to another node, as the lanes' users see them: when there are none, what is kept for a node that is lost, and
//! what is shown of them.

use super::*;
use std::cell::Cell;
use underpass_admin::RailStats;
use underpass_rdma::verbs::DeviceEvent;
use underpassd::nodes::peers::msg::Msg;

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
    let impossible = Rc::new(Cell::new(true));
    let told = impossible.clone();
    s.w.verbs.set_lie(move |node, bytes| {
        if node == 0 && told.get() {
            bytes.truncate(1);
        }
    });
    for (seconds, works_then) in [(2, false), (4, true), (2, true)] {
        impossible.set(true);
        s.until("a violation", |s| s.shows(1, "rails 0"));
        impossible.set(!works_then);
        let ms = s.until("rails", |s| s.shows(1, "rails 2"));
        assert!(
            ms.abs_diff(seconds * 1000) < 150,
            "{ms} ms, not {seconds} s"
        );
        if works_then {
            s.until("a link", |s| s.shows(1, "up true"));
        }
    }
    impossible.set(false);
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

/// A node's daemon says the last number that an incarnation can have. Another daemon serves that node later, and begins with
/// the first: the two agree on one, and have links.
#[test]
fn no_number_is_a_nodes_for_good() {
    let s = Story::up(0);
    let last = (1 << 62) - 1;
    // (No number may be ahead by half of all.)
    let says = [1 << 61, last].map(|incarnation| Msg::Rails { incarnation });
    s.w.nodes[1].deliver(says.into(), &mut Rng(1));
    let shown = format!("incarnation {last}");
    s.until("that number", |s| s.shows(1, &shown));
    s.w.restart(0);
    let agreed = |s: &Story| (0..2).all(|n| s.shows(n, "incarnation 1, up true, agreed true"));
    s.until("a further incarnation", agreed);
    s.whole(0);
}

/// The last number has one after it: two nodes that both are there, and agree, go on from it when that incarnation ends.
#[test]
fn the_numbers_go_round() {
    for n in 0..2 {
        let s = Story::up(0);
        let last = (1 << 62) - 1;
        for node in &s.w.nodes {
            let says = [1 << 61, last].map(|incarnation| Msg::Rails { incarnation });
            node.deliver(says.into(), &mut Rng(1));
        }
        let both = |s: &Story, number: u64| {
            let shown = format!("incarnation {number}, up true, agreed true");
            (0..2).all(|n| s.shows(n, &shown))
        };
        s.until("the last number", |s| both(s, last));
        s.w.verbs.panic_at(n);
        s.until("the one after it", |s| both(s, 0));
        s.connect();
        s.whole(1000);
    }
}

/// A device reports that its port carries nothing any more, or that a queue pair has failed: lanes are off it at once, and
/// not only when something that was sent has been missed for too long.
#[test]
fn what_a_device_reports_counts_at_once() {
    for port in [true, false] {
        let s = Story::up(0);
        s.send(1, 1000);
        s.carry();
        s.recv_all(0);
        let links = |n: usize| {
            let d = s.w.nodes[n].daemon.borrow();
            let parts = d.core.rails.as_ref().unwrap().lock().counts();
            parts.iter().map(|p| p.links_failed).sum::<u64>()
        };
        s.w.set_wire(0, false);
        match port {
            true => s.w.verbs.report(1, 0, DeviceEvent::PortDown(1)),
            false => {
                let all = s.w.verbs.qps(1, 0);
                assert_eq!(all.len(), 2, "links of a rail");
                let failed = |qpn: &u32| s.w.verbs.report(1, 0, DeviceEvent::QpError(*qpn));
                all.iter().for_each(failed);
            }
        }
        assert_eq!(links(1), 0);
        s.carry();
        assert_eq!((links(0), links(1)), (2, 2), "{}", s.w.state());
        assert_eq!(s.shows(1, "rails 1"), port, "{}", s.rails_of(1));
        s.send(1, 1000);
        s.carry();
        s.recv_all(0);
        assert_eq!(s.got(), 2000);
        s.whole(0);
    }
}

/// The engine meets a defect, on either node and with bytes on its rings: that incarnation ends. What was sent arrives whole, over
/// TCP, and the rails come again with the next one.
#[test]
fn a_panic_ends_an_incarnation() {
    for n in 0..2 {
        let s = Story::up(0);
        s.send(1, 1000);
        s.carry();
        s.recv_all(0);
        s.send(1, 1000);
        assert_eq!(s.mode(), tx::mode::RING);
        s.w.verbs.panic_at(n);
        s.until("the end of it", |s| s.shows(n, "incarnation 2"));
        let agreed = |s: &Story| (0..2).all(|n| s.shows(n, "incarnation 2, up true, agreed true"));
        s.until("the next one", agreed);
        s.look(1).unwrap();
        s.send(1, 1000);
        assert_ne!(s.mode(), tx::mode::RING);
        s.carry();
        s.recv_all(0);
        assert_eq!(s.got(), 3000);
        // Both daemons serve, and a further connection has a lane.
        s.connect();
        s.whole(1000);
    }
}

/// What the tools count of the rails never becomes less, also when an incarnation ends.
#[test]
fn counters_of_rails_never_fall() {
    let s = Story::up(0);
    for _ in 0..3 {
        assert_eq!(s.send(1, 1000), 1000);
        s.carry();
        s.recv_all(0);
        s.keep();
    }
    let sums = || {
        let d = s.w.nodes[1].daemon.borrow();
        let parts = d.core.rails.as_ref().unwrap().lock().counts();
        let sum = |of: fn(&RailStats) -> u64| parts.iter().map(of).sum::<u64>();
        [
            sum(|p| p.bytes),
            sum(|p| p.messages_sent),
            sum(|p| p.messages_received),
        ]
    };
    let before = sums();
    assert!(before.iter().all(|n| *n > 0), "{before:?}");
    s.w.restart(0);
    s.until("an incarnation", |s| s.shows(1, "incarnation 2"));
    let after = sums();
    let fell = before.iter().zip(after).any(|(b, a)| a < *b);
    assert!(!fell, "{before:?}, then {after:?}");
}

/// The tools say over which link a connection goes, and which of the nodes adds the links: exactly one does.
#[test]
fn a_row_names_link_and_role() {
    let s = Story::up(0);
    let [first, second] = [0, 1].map(|e: usize| {
        let (pid, node) = (s.process(e).borrow().pid, &s.w.nodes[e]);
        let (at, conn, gen) = s.as_it_is(e, |e, _, _, _| (e.lane.unwrap(), e.index as u32, e.gen));
        let who = node.name_of(pid, conn, gen);
        let d = node.daemon.borrow();
        let plane = d.core.rails.as_ref().unwrap().lock();
        let other = (at.0, at.1 + 1);
        let mut rows = plane.rows(&[(other, who), (at, who), (at, who)]);
        let [last, row, none] = [(); 3].map(|()| rows.pop().unwrap());
        assert!(none.is_none() && last == row);
        row.expect("a lane")
    });
    assert_eq!((&*first.role, &*second.role), ("server", "client"));
    assert_eq!((first.link, &first.device), (second.link, &second.device));
    assert_eq!(
        (&first.gid, &first.peer_gid),
        (&second.peer_gid, &second.gid)
    );
}

/// With nothing to do the data plane sleeps, and what has woken it does not do so for ever: neither bytes and doorbells nor
/// the doorbell of a process that has ended. It looks after its lanes by itself fifty times a second as long as there is
/// something now and then (links that work are asked), and a few times otherwise.
#[test]
fn a_data_plane_with_nothing_to_do_sleeps() {
    for alone in [false, true] {
        let mut all = (0..).map(Story::of);
        let s = all.find(|s| s.w.nodes[1].is_alone() == alone).unwrap();
        s.connect();
        assert!(s.ready(0) && s.ready(1));
        s.carry();
        (0..2).for_each(|e| s.try_up(e));
        for _ in 0..3 {
            s.carry();
            (0..2).for_each(|e| assert_eq!(s.send(e, 100), 100));
            s.carry();
            (0..2).for_each(|e| s.recv_all(e));
        }
        assert_eq!(s.got(), 300);
        let sleeps = |soon: bool| {
            s.rest(3_000);
            let ns = s.w.nodes[1].sleeps().expect("asleep");
            assert_eq!(ns <= 20 * MS, soon, "{ns} ns");
        };
        sleeps(true);
        s.w.conns.borrow()[0].ends[0].borrow_mut().excused = true;
        s.kill(1);
        sleeps(true);
        s.w.set_channel(false);
        s.cut_and_noticed();
        sleeps(false);
    }
}

/// A node has no lane left for a connection: the other node's process is told so at once, whichever of the two begins, and
/// does not wait until the time for making a lane is over.
#[test]
fn no_lane_is_left_at_the_other_node() {
    for n in 0..2 {
        let s = Story::before();
        s.w.nodes[n].limits.borrow_mut().lanes = Some(0);
        s.w.restart(n);
        s.hear(n);
        s.w.nodes[n].connect(&s.w.runtime, &mut s.process(n).borrow_mut());
        s.until("rails", |s| (0..2).all(|n| s.shows(n, "up true")));
        s.w.open([PLENTY, PLENTY]);
        let declined = |e: usize| s.process(e).borrow().declined.clone();
        let ms = s.until("both are declined", |s| {
            (0..2).for_each(|e| s.register(e));
            (0..2).all(|e| !declined(e).is_empty())
        });
        assert!(ms < 1_000, "{ms} ms");
        let once = |r: Reason| std::collections::BTreeMap::from([(r.code(), 1)]);
        assert_eq!(declined(n), once(Reason::Limit));
        assert_eq!(declined(1 - n), once(Reason::PeerDeclined));
        s.whole(1000);
    }
}
