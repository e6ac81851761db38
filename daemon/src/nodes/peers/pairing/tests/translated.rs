//! Ends whose addresses their own node translates.

use super::*;

/// What the core looks up, `seconds` later.
fn looks(net: &mut Net, i: usize, seconds: u64) -> Vec<ConnRef> {
    net.now += seconds * S;
    let due = net.at(i, |p, now, _, _| p.untranslated(now));
    due.into_iter().map(|d| d.0).collect()
}

fn told(net: &mut Net, i: usize, who: ConnRef, there: Option<(&str, &str)>) {
    let there = there.map(|(l, p)| (l.parse().unwrap(), p.parse().unwrap()));
    net.at(i, |p, now, alive, out| {
        p.translated(who, there, now, alive, out)
    });
    net.settle();
}

const SERVICE: &str = "10.96.0.9:80";

/// A service's address is no node's. The node of the pod behind it is asked, with the address that it knows, and heard.
#[test]
fn the_node_behind_a_service_is_asked() {
    let mut net = Net::new(3);
    net.lookup(0, who(1), client(A, SERVICE));
    let here = |net: &Net| net.shown(0, who(1)).unwrap();
    assert_eq!(here(&net).0, Some(Reason::UnknownNode));
    assert_eq!(looks(&mut net, 0, 0), [], "most are paired at once");
    assert_eq!(looks(&mut net, 0, 1), [who(1)]);
    assert_eq!(looks(&mut net, 0, 100), [], "once");
    told(&mut net, 0, who(1), Some((B, "10.1.0.77:4000")));
    assert_eq!(here(&net), (Some(Reason::None), Some(Reason::None)));
    net.at(0, |p, now, alive, out| p.tick(now, alive, out));
    net.settle();
    let (from, asked) = net.nodes[1].asked[0].clone();
    assert_eq!(&*from, "a");
    assert_eq!(asked.local, B.parse().unwrap());
    assert_eq!(asked.peer, "10.1.0.77:4000".parse().unwrap());
    assert_eq!(net.nodes[2].asked, []);
    let msg = Msg::Seen {
        local: asked.local,
        peer: asked.peer,
        reason: Reason::PeerNoShim.code(),
    };
    let b = net.nodes[1].name.clone();
    net.at(0, |p, now, alive, out| p.message(&b, msg, now, alive, out))
        .unwrap();
    assert_eq!(here(&net), (Some(Reason::None), Some(Reason::PeerNoShim)));
    net.at(0, |p, _, _, out| p.remove(ClientId(1), 1, out));
    net.settle();
    assert!(net.is_clean());
}

/// Behind a node's port, the client has the node's own address: its end is looked for where it really is. Either end first.
#[test]
fn a_client_behind_the_nodes_own_address_is_found() {
    for (i, j) in [(0, 1), (1, 0)] {
        for server_first in [true, false] {
            let mut net = Net::new(3);
            let [mine, port, pod, theirs] = [
                format!("10.{}.0.1:30080", j + 1),
                format!("10.{}.0.1:999", j + 1),
                format!("10.{}.0.7:80", j + 1),
                format!("10.{}.0.5:1000", i + 1),
            ];
            let ends = [
                (i, who(1), client(&theirs, &mine)),
                (j, who(2), server(&pod, &port)),
            ];
            let order = if server_first { [1, 0] } else { [0, 1] };
            for k in order {
                let (n, w, e) = ends[k].clone();
                net.lookup(n, w, e);
                net.settle();
            }
            assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
            assert_eq!(looks(&mut net, j, 1), [who(2)]);
            told(&mut net, j, who(2), Some((&theirs, &mine)));
            assert_eq!(
                (net.nodes[i].paired.len(), net.nodes[j].paired.len()),
                (1, 1)
            );
            assert!(net.is_clean());
        }
    }
}

/// What is this node's own, and not translated, is not kept; nor is what connects to its own address, or by the loopback interface.
#[test]
fn who_is_on_this_node_is_forgotten() {
    let mut net = Net::new(2);
    for (n, peer) in (1..).zip(["10.1.0.9:80", "10.1.0.1:80", "127.0.0.1:80"]) {
        net.lookup(0, who(n), client(A, peer));
    }
    assert_eq!(looks(&mut net, 0, 1), [who(1)]);
    told(&mut net, 0, who(1), None);
    assert!(net.is_clean());
    // It has closed, and another connection has its place.
    net.lookup(0, who(1), client(A, SERVICE));
    assert_eq!(looks(&mut net, 0, 1), [who(1)]);
    let before = ConnRef { gen: 0, ..who(1) };
    told(&mut net, 0, before, Some((B, A)));
    assert_eq!(net.shown(0, who(1)).unwrap().0, Some(Reason::UnknownNode));
}
