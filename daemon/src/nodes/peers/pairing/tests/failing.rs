//! Channels that break, answers that do not come, and more ends than there is room for.

use super::finding::ROUTES;
use super::*;

/// The channel breaks at every step: afterwards the ends find each other.
#[test]
fn a_broken_channel_loses_nothing() {
    for steps in 0..6 {
        let mut net = Net::new(2);
        net.lookup(1, who(1), server(B, A));
        net.lookup(0, who(0), client(A, B));
        for _ in 0..steps {
            let _ = net.deliver(1, 0) || net.deliver(0, 1);
        }
        net.part(0, 1);
        let done = [0, 1].map(|i| !net.nodes[i].paired.is_empty());
        net.join(0, 1);
        net.settle();
        match done {
            [false, false] => assert!(both_paired(&net), "{steps}"),
            // The responder had agreed, the initiator never heard of it and goes on waiting; the responder's
            // end is declined and registers again.
            [false, true] => {
                net.lookup(1, who(1), server(B, A));
                net.settle();
                assert_eq!(net.nodes[0].paired.len(), 1);
            }
            [true, true] => {}
            [true, false] => panic!("the initiator cannot know before the responder"),
        }
        assert!(net.is_clean());
    }
}

#[test]
fn a_make_without_answer_is_void() {
    let mut net = Net::new(2);
    net.lookup(1, who(1), server(B, A));
    net.lookup(0, who(0), client(A, B));
    net.deliver(1, 0);
    net.now += MAKE_NS;
    net.at(0, |p, now, alive, out| p.tick(now, alive, out));
    let t = Some(Reason::TimeoutDaemon);
    assert_eq!(net.shown(0, who(0)).unwrap().0, t);
    // The answer comes after all: the responder is told that there is no pair.
    net.deliver(0, 1);
    net.deliver(1, 0);
    assert!(net.nodes[0].paired.is_empty());
    assert!(matches!(net.wire[&(0, 1)].back(), Some(Msg::Fail { .. })));
}

#[test]
fn dead_ends_are_not_paired() {
    for dead in [0, 1] {
        let mut net = Net::new(2);
        net.lookup(dead, who(5), [client(A, B), server(B, A)][dead].clone());
        net.nodes[dead].dead.insert(who(5));
        net.lookup(
            1 - dead,
            who(1),
            [client(A, B), server(B, A)][1 - dead].clone(),
        );
        net.settle();
        assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
        net.at(1 - dead, |p, _, _, out| p.forget(who(1), out));
        net.settle();
        assert!(net.is_clean());
    }
}

#[test]
fn what_a_peer_may_make_us_keep_is_bounded() {
    let mut net = Net::new(2);
    let key = Key::new(&[1; 32]);
    let c = claim(&"b".into(), &key, &server(B, A), net.now);
    let b: Name = "b".into();
    net.at(0, |p, now, alive, out| {
        let mut say = |id| {
            let claim = c.clone();
            p.message(&b, Msg::Lookup { id, claim }, now, alive, out)
        };
        for id in 0..LOOKUPS_MAX as u64 {
            say(id).unwrap();
        }
        assert!(say(LOOKUPS_MAX as u64).is_err());
        assert_eq!(out.len(), 0, "and nothing is sent for it");
    });
    let t = &net.nodes[0].p.tables[&b];
    assert_eq!(
        (t.lookups.len(), t.by_proof.len(), t.by_tuple.len()),
        (LOOKUPS_MAX, 1, 1)
    );
    net.part(0, 1);
    net.join(0, 1);
    assert!(net.is_clean());
    net.at(0, |p, now, alive, out| {
        let claim = c.clone();
        p.message(&b, Msg::Lookup { id: 1, claim }, now, alive, out)
            .unwrap();
        let claim = c.clone();
        assert!(
            p.message(&b, Msg::Lookup { id: 1, claim }, now, alive, out)
                .is_err(),
            "twice"
        );
        for wrong in [
            Msg::Hint {
                lookup: 1,
                reason: 1,
            },
            Msg::Make {
                lookup: 1,
                make: 1,
                claim: c.clone(),
                refusal: 0,
            },
        ] {
            assert!(p.message(&b, wrong, now, alive, out).is_err());
        }
        // Messages about unknown numbers have no effect.
        for m in [
            Msg::LookupDone { id: 99 },
            Msg::Fail {
                make: 99,
                reason: 3,
            },
            Msg::Unknown,
        ] {
            p.message(&b, m, now, alive, out).unwrap();
        }
    });
}

/// More ends than the peer keeps lookups for take turns; none waits for ever.
#[test]
fn more_ends_than_room() {
    let mut net = Net::new(2);
    net.part(0, 1);
    net.up.insert((0, 1));
    for (x, y) in [(0, "b"), (1, "a")] {
        net.at(x, |p, now, alive, out| {
            p.channel_up(&y.into(), Key::new(&[1; 32]), 4, now, alive, out)
        });
    }
    let server_n = |n: u32| {
        end(
            B,
            &format!("10.1.0.1:{}", 1000 + n),
            Some((n, n + 500, Role::Passive)),
        )
    };
    for n in 0..10 {
        net.lookup(1, who(n), server_n(n));
    }
    net.settle();
    assert_eq!(net.nodes[0].p.tables[&Name::from("b")].lookups.len(), 4);
    // The other end of the last.
    let c = end("10.1.0.1:1009", B, Some((509, 9, Role::Active)));
    net.lookup(0, who(0), c);
    for _ in 0..3 {
        net.settle();
        net.now += TURN_NS;
        net.at(1, |p, now, alive, out| p.tick(now, alive, out));
        assert!(net.nodes[1].p.tables[&Name::from("a")].sent.len() <= 4);
    }
    net.settle();
    assert!(both_paired(&net), "{:?}", net.nodes[1].paired);
}

/// Ends that are gone are found in steps, and a client's own without a look at those of others.
#[test]
fn a_sweep_takes_steps() {
    let mut net = Net::new(2);
    net.part(0, 1);
    let many = 3 * SWEEP_STEP as u32;
    for n in 0..many {
        net.lookup(0, who(n), client(A, B));
    }
    let looked = std::cell::Cell::new(0);
    let mut steps = 0;
    loop {
        looked.set(0);
        let p = &mut net.nodes[0].p;
        let alive = |w: &ConnRef| {
            looked.set(looked.get() + 1);
            w.conn % 2 == 0
        };
        let more = p.sweep(&alive, &mut Vec::new());
        assert!(looked.get() <= SWEEP_STEP);
        steps += 1;
        if !more {
            break;
        }
    }
    assert!(steps >= 3, "{steps}");
    assert_eq!(net.nodes[0].p.ends.len() as u32, many / 2);
    let other = ConnRef {
        client: ClientId(2),
        ..who(1)
    };
    net.lookup(0, other, client(A, B));
    net.at(0, |p, _, _, out| p.forget_client(ClientId(1), out));
    assert_eq!(net.nodes[0].p.ends.len(), 1);
}

/// Those that wait for a turn keep their order, whichever of them go.
#[test]
fn who_waits_for_a_turn_keeps_it() {
    use super::super::table::Parked;
    let mut p = Parked::default();
    let key = |n| (ClientId(1), n);
    (0..6).for_each(|n| p.push_back(key(n)));
    p.remove(&key(0));
    p.remove(&key(3));
    p.push_back(key(1)); // once more: it comes last
    let order: Vec<u32> = std::iter::from_fn(|| p.pop_front()).map(|k| k.1).collect();
    assert_eq!(order, [2, 4, 5, 1]);
    assert!(p.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever happens in whatever order: an end is paired at most once and only with its own
    /// other end, and nothing is left when all ends are gone.
    #[test]
    fn any_order(steps in proptest::collection::vec((0u8..8, 0u32..4, 0usize..6), 0..60)) {
        let mut net = Net::new(2);
        let ends = |n: u32, i: usize| {
            let [al, ap, bl, bp] = ROUTES[n as usize % ROUTES.len()];
            match i {
                0 => end(al, ap, Some((n, n + 9, Role::Active))),
                _ => end(bl, bp, Some((n + 9, n, Role::Passive))),
            }
        };
        for (what, n, i) in steps {
            let node = i % 2;
            match what {
                0 | 1 => net.lookup(node, who(n), ends(n, node)),
                2 => net.at(node, |p, _, _, out| p.forget(who(n), out)),
                3 if net.up.is_empty() => net.join(0, 1),
                3 if i == 0 => net.part(0, 1),
                4 => {
                    net.now += (i as u64) * S;
                    net.at(node, |p, now, alive, out| p.tick(now, alive, out));
                }
                _ => { net.deliver(node, 1 - node); }
            }
        }
        if net.up.is_empty() { net.join(0, 1); }
        net.settle();
        for p in &net.nodes[0].paired {
            // The initiator's number names the pair on both nodes.
            let other = net.nodes[1].paired.iter().find(|q| q.pair == p.pair);
            prop_assert_eq!(other.map(|q| q.who), Some(p.who));
        }
        // If both ends of a connection still waited, a pair would have been missed.
        for n in 0..4 {
            let waits = |i: usize| net.nodes[i].p.ends.contains_key(&(ClientId(1), n));
            prop_assert!(!(waits(0) && waits(1)), "connection {} was not found", n);
        }
        for i in [0, 1] {
            for n in 0..4 { net.at(i, |p, _, _, out| p.forget(who(n), out)); }
        }
        net.settle();
        prop_assert!(net.is_clean());
    }
}
