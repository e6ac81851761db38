//! Which ends find each other, and which do not.

use super::*;

/// Addresses as the two ends have them: direct, DNAT, SNAT, both, masqueraded private addresses.
pub(super) const ROUTES: [[&str; 4]; 6] = [
    [A, B, B, A],
    [A, "10.96.0.1:443", B, A],
    [A, B, B, "192.0.2.7:4000"],
    [A, "10.96.0.1:443", B, "192.0.2.7:4000"],
    [A, "10.96.0.1:443", B, "10.1.0.99:4000"],
    ["172.17.0.2:5", B, B, "10.1.0.99:4000"],
];

#[test]
fn either_end_first_and_through_translation() {
    for [al, ap, bl, bp] in ROUTES {
        for first in [0, 1] {
            for client_at in [0, 1] {
                let mut net = Net::new(3);
                let (c, s) = (client(al, ap), server(bl, bp));
                let mut ends = [c, s];
                if client_at == 1 {
                    // The other way round: the connection was made from b.
                    ends = [
                        end(al, ap, Some((200, 100, Role::Passive))),
                        end(bl, bp, Some((100, 200, Role::Active))),
                    ];
                }
                for i in [first, 1 - first] {
                    net.lookup(i, who(i as u32), ends[i].clone());
                    net.settle();
                }
                assert!(both_paired(&net), "{al} {ap} {bl} {bp} first {first}");
                assert!(net.is_clean());
            }
        }
    }
}

#[test]
fn crossing_messages_pair_once() {
    let mut net = Net::new(2);
    net.lookup(0, who(0), client(A, B));
    net.lookup(1, who(1), server(B, A));
    net.settle();
    assert!(both_paired(&net) && net.is_clean());
}

/// Each node learns from a pairing whether the other one could make lanes.
#[test]
fn whether_the_other_node_has_rails() {
    for able in [0, 1] {
        let mut net = Net::new(2);
        let [a, b] = [0, 1].map(|i: usize| net.nodes[i].name.clone());
        let other = [&b, &a][able];
        net.nodes[able].p.set_refusal(other, 0);
        let has = |net: &Net| [net.nodes[0].p.has_rails(&b), net.nodes[1].p.has_rails(&a)];
        assert_eq!(has(&net), [false; 2]);
        net.lookup(0, who(0), client(A, B));
        net.lookup(1, who(1), server(B, A));
        net.settle();
        assert_eq!(has(&net), [able == 1, able == 0]);
    }
}

#[test]
fn ends_of_this_node_are_nobodys_business() {
    let mut net = Net::new(2);
    net.lookup(0, who(0), client(A, "10.1.0.2:80"));
    net.lookup(0, who(1), client("127.0.0.1:5", "127.0.0.1:6"));
    net.lookup(0, who(2), client("172.17.0.2:5", "172.17.0.2:6"));
    assert!(net.wire.is_empty());
    // (Until it is known that the first is what it seems: `translated`.)
    let keys: Vec<_> = net.nodes[0].p.ends.keys().copied().collect();
    assert_eq!(keys, [(ClientId(1), 0)]);
    net.at(0, |p, now, alive, out| {
        p.translated(who(0), None, now, alive, out)
    });
    assert!(net.is_clean() && net.wire.is_empty());
}

/// A Lookup with the wrong numbers, at the right addresses: the real end comes later and is found.
#[test]
fn a_forged_lookup_disturbs_nobody() {
    for forger in [0, 1] {
        let mut net = Net::new(2);
        let real = [client(A, B), server(B, A)];
        let mut forged = real[forger].clone();
        forged.record = Some(Record {
            snd: 7,
            ..forged.record.unwrap()
        });
        let mut bare = real[forger].clone();
        bare.record = None;
        net.lookup(forger, who(8), forged);
        net.lookup(forger, who(9), bare);
        net.settle();
        net.lookup(1 - forger, who(0), real[1 - forger].clone());
        net.settle();
        assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
        net.lookup(forger, who(1), real[forger].clone());
        net.settle();
        assert!(both_paired(&net));
        assert_eq!(net.nodes[forger].paired[0].who, who(1));
    }
}

#[test]
fn who_speaks_for_anothers_address_is_refused() {
    // c says that it has a's end, and even knows the numbers.
    let mut net = Net::new(3);
    net.lookup(1, who(0), server(B, "192.0.2.9:1000"));
    net.lookup(2, who(1), client(A, "10.96.0.1:80"));
    net.settle();
    assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
    let wrong = Some(Reason::WrongNode);
    assert_eq!(net.shown(2, who(1)), Some((wrong, wrong)));
    assert!(net.nodes[1].p.counts("c").1 > 0);
    // The real one comes.
    net.lookup(0, who(2), client(A, "10.96.0.1:80"));
    net.settle();
    assert!(both_paired(&net));
}

/// A private address is believed only where our own kernel sees an address of that node.
#[test]
fn an_unlisted_address_needs_a_listed_peer() {
    let mut net = Net::new(2);
    net.lookup(0, who(0), client("172.17.0.2:5", B));
    net.lookup(1, who(1), server(B, "192.0.2.7:4000"));
    net.settle();
    assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
    assert_eq!(net.shown(1, who(1)).unwrap().0, Some(Reason::WrongNode));
}

/// An initiator that lies is refused by the responder, too.
#[test]
fn the_responder_judges_as_well() {
    let mut net = Net::new(3);
    let mut own = server(B, A);
    own.counts.received = 5;
    net.lookup(1, who(1), own);
    let Some(Msg::Lookup { id, .. }) = net.wire.get_mut(&(1, 0)).unwrap().pop_front() else {
        panic!()
    };
    let key = Key::new(&[1; 32]);
    let good = claim(&"a".into(), &key, &client(A, B), net.now);
    let spoil: [fn(&mut Claim); 6] = [
        |c| c.proof = None,
        |c| c.proof = Some([0; 32]),
        |c| c.local = "10.3.0.1:1000".parse().unwrap(),
        |c| c.local = "10.2.0.9:1000".parse().unwrap(),
        |c| c.age_ms += 90_000,
        |c| c.received = 1000,
    ];
    let make = |claim: Claim| Msg::Make {
        lookup: id,
        make: 5,
        claim,
        refusal: 0,
    };
    for (n, f) in spoil.into_iter().enumerate() {
        let mut c = good.clone();
        f(&mut c);
        net.at(1, |p, now, alive, out| {
            p.message(&"a".into(), make(c), now, alive, out).unwrap();
            assert!(
                matches!(&out[..], [Out::Send(_, Msg::Fail { make: 5, .. })]),
                "{n} {out:?}"
            );
        });
    }
    net.at(1, |p, now, alive, out| {
        p.message(&"a".into(), make(good), now, alive, out).unwrap()
    });
    assert_eq!(net.nodes[1].paired.len(), 1);
    assert!(matches!(
        net.wire[&(1, 0)].back(),
        Some(Msg::Made { make: 5, .. })
    ));
}

#[test]
fn what_does_not_go_together_is_no_pair() {
    let t = |f: fn(&mut End)| {
        let mut net = Net::new(2);
        let (mut c, mut s) = (client(A, B), server(B, A));
        (c.counts.received, c.counts.sent, s.counts.sent) = (9, 9, 9);
        f(&mut s);
        net.lookup(0, who(0), c);
        net.lookup(1, who(1), s);
        net.settle();
        let none = net.nodes.iter().all(|n| n.paired.is_empty());
        (none, net.shown(0, who(0)), net.shown(1, who(1)))
    };
    let unproven = Some(Reason::Unproven);
    let waiting = Some(Reason::None);
    // Both active; a whole wrap of the sequence number clock apart; impossible counts.
    let (none, a, b) = t(|e| e.record.as_mut().unwrap().role = Role::Active);
    assert!(none && a.unwrap().0 == unproven && b.unwrap().1 == unproven);
    let (none, ..) = t(|e| e.record.as_mut().unwrap().at_ns -= 275 * S);
    assert!(none);
    // Each has received more than the other ever sent, whichever was looked at first.
    let (none, ..) = t(|e| (e.counts.sent, e.counts.received) = (8, 10));
    assert!(none);
    let (none, ..) = t(|_| ());
    assert!(!none, "nothing is wrong");
    // Without a record on one end: both are told which end lacks it.
    let (none, a, b) = t(|e| e.record = None);
    assert!(none);
    assert_eq!(a, Some((waiting, unproven)));
    assert_eq!(b, Some((unproven, waiting)));
}

#[test]
fn without_records_both_are_unproven() {
    let mut net = Net::new(2);
    net.lookup(0, who(0), end(A, B, None));
    net.lookup(1, who(1), end(B, A, None));
    net.settle();
    let u = Some(Reason::Unproven);
    assert_eq!(net.shown(0, who(0)), Some((u, u)));
    assert_eq!(net.shown(1, who(1)), Some((u, u)));
}

#[test]
fn reasons_of_those_who_wait() {
    let mut net = Net::new(2);
    net.lookup(0, who(0), client(A, B));
    net.lookup(0, who(1), client(A, "192.0.2.1:80"));
    net.settle();
    let none = Some(Reason::None);
    assert_eq!(net.shown(0, who(0)), Some((none, none)));
    assert_eq!(net.shown(0, who(1)).unwrap().0, Some(Reason::UnknownNode));
    net.part(0, 1);
    assert_eq!(net.shown(0, who(0)).unwrap().0, Some(Reason::PeerDaemon));
    net.at(0, |p, now, alive, out| {
        p.channel_down(&"b".into(), Reason::VersionMismatch, now, alive, out)
    });
    assert_eq!(
        net.shown(0, who(0)).unwrap().0,
        Some(Reason::VersionMismatch)
    );
}
