//! Expedited ends: a search on the other node.

use super::*;

fn expedited(net: &mut Net, i: usize, who: ConnRef) -> usize {
    let told = net.at(i, |p, _, _, out| p.expedited(&who, out));
    net.settle();
    told
}

#[test]
fn an_end_in_a_expedited_is_told_where_its_other_end_may_be() {
    let mut net = Net::new(3);
    net.lookup(0, who(1), client("10.1.0.5:1000", "10.2.0.7:80"));
    assert_eq!(
        expedited(&mut net, 0, who(1)),
        1,
        "the node that has the address"
    );
    let asked = |local: &str, certain| -> (Name, Asked) {
        let (local, peer) = (local.parse().unwrap(), "10.1.0.5:1000".parse().unwrap());
        let asked = Asked {
            local,
            peer,
            certain,
            register: true,
        };
        ("a".into(), asked)
    };
    assert_eq!(net.nodes[1].asked, [asked("10.2.0.7:80", true)]);
    assert_eq!(net.nodes[2].asked, []);
    // To a service's address, which is translated on the way.
    net.lookup(0, who(1), client("10.1.0.5:1000", "192.0.2.9:80"));
    assert_eq!(expedited(&mut net, 0, who(1)), 2);
    for n in [1, 2] {
        assert_eq!(
            net.nodes[n].asked.last(),
            Some(&asked("192.0.2.9:80", false))
        );
    }
    // Nobody is asked about an end that does not wait, or over a channel that is down.
    let none = ConnRef { gen: 7, ..who(1) };
    assert_eq!(expedited(&mut net, 0, none), 0);
    net.part(0, 1);
    net.part(0, 2);
    assert_eq!(expedited(&mut net, 0, who(1)), 0);
}

#[test]
fn a_node_may_ask_about_connections_to_itself_only() {
    let mut net = Net::new(3);
    let ask = |net: &mut Net, local: &str, peer: &str| {
        let msg = Msg::Expedited {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
        };
        let b = net.nodes[1].name.clone();
        net.at(0, |p, now, alive, out| p.message(&b, msg, now, alive, out))
            .unwrap();
        (net.nodes[0].asked.len(), net.nodes[0].p.counts("b").1)
    };
    assert_eq!(ask(&mut net, "10.1.0.5:80", "10.3.0.1:9"), (0, 1), "c's");
    assert_eq!(ask(&mut net, "10.1.0.5:80", "10.1.0.1:9"), (0, 2), "ours");
    assert_eq!(
        ask(&mut net, "10.1.0.5:80", "192.0.2.1:9"),
        (0, 2),
        "nobody's"
    );
    assert_eq!(
        ask(&mut net, "10.3.0.5:80", "10.2.0.1:9"),
        (0, 2),
        "not here"
    );
    assert_eq!(ask(&mut net, "[::ffff:10.1.0.5]:80", "10.2.0.1:9"), (1, 2));
    assert_eq!(
        net.nodes[0].asked[0].1.local,
        "10.1.0.5:80".parse().unwrap()
    );
}

#[test]
fn what_was_seen_is_shown_until_more_is_known() {
    let mut net = Net::new(3);
    let ours = client("10.1.0.5:1000", "10.2.0.7:80");
    net.lookup(0, who(1), ours.clone());
    let seen = |net: &mut Net, from: usize, peer: &str| {
        let msg = Msg::Seen {
            local: "10.2.0.7:80".parse().unwrap(),
            peer: peer.parse().unwrap(),
            reason: Reason::PeerNoShim.code(),
        };
        let from = net.nodes[from].name.clone();
        net.at(0, |p, now, alive, out| {
            p.message(&from, msg, now, alive, out)
        })
        .unwrap();
        net.shown(0, who(1)).unwrap()
    };
    let nothing = (Some(Reason::None), Some(Reason::None));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1001"), nothing, "another one");
    assert_eq!(
        seen(&mut net, 2, "10.1.0.5:1000"),
        nothing,
        "not c's to say"
    );
    let known = (Some(Reason::None), Some(Reason::PeerNoShim));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1000"), known);
    // Another connection in its place begins anew.
    net.lookup(0, who(1), ours);
    assert_eq!(net.shown(0, who(1)), Some(nothing));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1000"), known);
    // The other end registers, but has no record: that is about this very connection, so it is shown instead.
    net.lookup(1, who(2), end("10.2.0.7:80", "10.1.0.5:1000", None));
    net.settle();
    let (_, peer) = net.shown(0, who(1)).unwrap();
    assert_eq!(peer, Some(Reason::Unproven));
}

/// Whoever waits asks why, less and less often, until there is an answer.
#[test]
fn who_waits_asks() {
    let mut net = Net::new(3);
    let ours = client("10.1.0.5:1000", "10.2.0.7:80");
    net.lookup(0, who(1), ours);
    let tick = |net: &mut Net, seconds: u64| {
        net.now += seconds * S;
        net.at(0, |p, now, alive, out| p.tick(now, alive, out));
        net.settle();
        net.nodes[1].asked.len()
    };
    assert_eq!(tick(&mut net, 1), 0, "most find their other end at once");
    assert_eq!(tick(&mut net, 1), 1);
    let (from, asked) = net.nodes[1].asked[0].clone();
    assert!(&*from == "a" && asked.certain && !asked.register);
    assert_eq!(asked.local, "10.2.0.7:80".parse().unwrap());
    assert_eq!(tick(&mut net, 3), 1);
    assert_eq!(tick(&mut net, 1), 2);
    assert_eq!(net.nodes[2].asked, [], "nobody else");
    let msg = Msg::Seen {
        local: asked.local,
        peer: asked.peer,
        reason: Reason::PeerNoShim.code(),
    };
    let b = net.nodes[1].name.clone();
    net.at(0, |p, now, alive, out| p.message(&b, msg, now, alive, out))
        .unwrap();
    let known = (Some(Reason::None), Some(Reason::PeerNoShim));
    assert_eq!(net.shown(0, who(1)), Some(known));
    assert_eq!(tick(&mut net, 1000), 2, "it is known");
    // Without an answer, not for ever; and not all at once.
    let all = u32::try_from(2 * 16).unwrap();
    for n in 2..2 + all {
        net.lookup(0, who(n), client(&format!("10.1.0.5:{n}"), "10.2.0.7:80"));
    }
    assert_eq!(tick(&mut net, 3), 2 + 16);
    assert_eq!(tick(&mut net, 0), 2 + 32);
    assert_eq!(tick(&mut net, 0), 2 + 32);
    let so_far = (0..100).map(|_| tick(&mut net, 1000)).last();
    assert_eq!(so_far, Some(2 + 32 * 6));
}
