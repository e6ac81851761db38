//! Nodes and their addresses, as the API tells of them.

use super::*;
use proptest::prelude::*;

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn placed(node: &str, told: &[&str], written: &[&str]) -> Placed {
    Placed {
        node: node.into(),
        told: told.iter().map(|s| ip(s)).collect(),
        written: written.iter().map(|s| ip(s)).collect(),
    }
}

fn at(all: &[&str]) -> NodeAt {
    NodeAt {
        addresses: all.iter().map(|s| ip(s)).collect(),
        since: 1,
    }
}

fn two() -> Nodes {
    let n = Nodes::default();
    n.set_node("a", Some(&at(&["10.0.0.1", "fd00::1"])));
    n.set_node("b", Some(&at(&["10.0.0.2"])));
    n
}

fn owner(n: &Nodes, s: &str) -> String {
    n.owner(ip(s)).map_or(String::new(), |o| o.to_string())
}

#[test]
fn owners() {
    let n = two();
    n.set_pod("1", Some(&placed("a", &["10.1.0.5", "fd00:1::5"], &[])));
    n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &["192.168.0.6"])));
    for (at, whose) in [
        ("10.0.0.1", "a"),
        ("fd00::1", "a"),
        ("::ffff:10.0.0.2", "b"),
        ("10.1.0.5", "a"),
        ("fd00:1::5", "a"),
        ("10.1.0.6", "b"),
        ("192.168.0.6", "b"),
        ("10.1.0.7", ""),
    ] {
        assert_eq!(owner(&n, at), whose, "{at}");
    }
    assert_eq!(n.find("a"), Some(at(&["10.0.0.1", "fd00::1"])));
    assert_eq!(n.all().len(), 2);
    // The pod goes, another one gets its address on the other node.
    n.set_pod("1", None);
    assert_eq!(owner(&n, "10.1.0.5"), "");
    n.set_pod("3", Some(&placed("b", &["10.1.0.5"], &[])));
    assert_eq!(owner(&n, "10.1.0.5"), "b");
    // Without its node a pod's address is nobody's.
    n.set_node("b", None);
    assert_eq!(owner(&n, "10.1.0.5"), "");
    assert_eq!(n.find("b"), None);
    // (And nobody has to share with it.)
    n.set_pod("4", Some(&placed("a", &["10.1.0.5"], &[])));
    assert_eq!(owner(&n, "10.1.0.5"), "a");
}

#[test]
fn an_address_of_two_nodes_is_nobodys() {
    let n = two();
    n.set_pod("1", Some(&placed("a", &["10.1.0.5"], &[])));
    n.set_pod("2", Some(&placed("b", &["10.1.0.5", "10.0.0.1"], &[])));
    assert_eq!(owner(&n, "10.1.0.5"), "");
    assert_eq!(owner(&n, "10.0.0.1"), "");
    n.set_pod("2", None);
    assert_eq!(owner(&n, "10.1.0.5"), "a");
    assert_eq!(owner(&n, "10.0.0.1"), "a");
    // Two pods of one node may share it: they use the node's network.
    n.set_pod("4", Some(&placed("a", &["10.0.0.1"], &[])));
    n.set_pod("4", None);
    assert_eq!(owner(&n, "10.0.0.1"), "a");
}

#[test]
fn an_annotation_takes_nobodys_address() {
    let n = two();
    n.set_pod("1", Some(&placed("a", &["10.1.0.5"], &["192.168.0.5"])));
    let all = ["10.1.0.5", "10.0.0.1", "127.0.0.1", "224.0.0.1", "0.0.0.0"];
    n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &all)));
    assert_eq!(owner(&n, "10.1.0.5"), "a");
    assert_eq!(owner(&n, "10.0.0.1"), "a");
    assert_eq!(owner(&n, "127.0.0.1"), "");
    n.set_pod("2", Some(&placed("b", &["10.1.0.6"], &["192.168.0.5"])));
    assert_eq!(owner(&n, "192.168.0.5"), "");
    // A pod that never ran has no address.
    n.set_pod(
        "2",
        Some(&placed("b", &[], &["192.168.0.5", "192.168.0.9"])),
    );
    assert_eq!(owner(&n, "192.168.0.5"), "a");
    assert_eq!(owner(&n, "192.168.0.9"), "");
    // Whoever looks for an address is not led by it.
    assert_eq!(n.told(ip("192.168.0.5")), None);
    assert_eq!(n.told(ip("10.1.0.5")).as_deref(), Some("a"));
}

#[test]
fn only_what_is_different_is_a_change() {
    let n = two();
    let p = placed("a", &["10.1.0.5"], &["192.168.0.5", "127.0.0.1"]);
    n.set_pod("1", Some(&p));
    let changes = n.changes();
    let before = *changes.borrow();
    n.set_pod("1", Some(&p));
    let generation = n.generation();
    n.set_node("b", Some(&at(&["10.0.0.2"])));
    n.set_pod("9", None);
    n.set_pod("9", Some(&placed("a", &[], &[])));
    n.set_node("c", None);
    assert_eq!(*changes.borrow(), before);
    n.set_pod("1", Some(&placed("b", &["10.1.0.5"], &["192.168.0.5"])));
    assert_eq!(*changes.borrow(), before + 1);
    assert_eq!(owner(&n, "10.1.0.5"), "b");
    assert_eq!(n.generation(), generation);
    let again = NodeAt {
        since: 2,
        ..at(&["10.0.0.2"])
    };
    n.set_node("b", Some(&again));
    assert_eq!(n.generation(), generation + 1);
}

proptest! {
    /// Whatever came before, what counts is what pods have now; and a list leaves nothing else.
    #[test]
    fn only_what_is_there_counts(
        steps in prop::collection::vec((0u8..6, 0u8..3, 0u8..8, 0u8..8, any::<bool>()), 0..40)
    ) {
        let nodes: BTreeMap<String, NodeAt> = (0..3u8)
            .map(|n| (format!("n{n}"), at(&[&format!("10.9.0.{n}")])))
            .collect();
        let (one, listed) = (Nodes::default(), Nodes::default());
        one.set_nodes(&nodes);
        listed.set_nodes(&nodes);
        let mut pods = BTreeMap::new();
        for (uid, node, told, written, is) in steps {
            let p = Placed {
                node: format!("n{node}"),
                told: vec![IpAddr::from([10, 1, 0, told])],
                written: vec![IpAddr::from([10, 1, 0, written])],
            };
            one.set_pod(&uid.to_string(), is.then_some(&p));
            match is {
                true => pods.insert(uid.to_string(), p),
                false => pods.remove(&uid.to_string()),
            };
            pods.iter().for_each(|(uid, p)| listed.set_pod(uid, Some(p)));
            let there = pods.keys().map(|uid: &String| uid.as_str().into()).collect();
            listed.keep_pods(&there);
            for last in 0..8 {
                let at: IpAddr = IpAddr::from([10, 1, 0, last]);
                prop_assert_eq!(one.owner(at), listed.owner(at));
                let told: std::collections::BTreeSet<&str> = pods
                    .values()
                    .filter(|p| p.told.contains(&at))
                    .map(|p| p.node.as_str())
                    .collect();
                if let Some(n) = told.first() {
                    let owner = one.owner(at);
                    prop_assert_eq!(owner.as_deref(), (told.len() == 1).then_some(*n));
                }
            }
        }
    }
}

#[test]
fn kept_until_the_api_says_otherwise() {
    let t = tempfile::tempdir().unwrap();
    let file = t.path().join("nodes.json");
    let n = Nodes::kept_in(file.clone());
    n.set_nodes(&BTreeMap::from([("a".into(), at(&["10.0.0.1"]))]));
    n.set_node("b", Some(&at(&["10.0.0.2"])));
    n.set_pod("1", Some(&placed("b", &["10.1.0.6"], &["192.168.0.6"])));
    n.set_pod("2", Some(&placed("b", &["10.1.0.7"], &[])));
    // Of pods only what was met.
    for at in ["10.1.0.6", "192.168.0.6", "10.0.0.2", "192.0.2.1"] {
        n.met(ip(at));
    }
    std::fs::write(&file, serde_json::to_vec(&n.kept()).unwrap()).unwrap();

    let n = Nodes::kept_in(file.clone());
    let known = |n: &Nodes, all: [&str; 4]| all.map(|ip| owner(n, ip)).join(" ");
    let all = ["10.0.0.2", "10.1.0.6", "192.168.0.6", "10.1.0.7"];
    assert_eq!(known(&n, all), "b b b ");
    assert_eq!(n.told(ip("10.1.0.6")).as_deref(), Some("b"));
    assert_eq!(n.told(ip("192.168.0.6")), None);
    assert_eq!(n.find("a"), Some(at(&["10.0.0.1"])));
    // (Nothing was met since; it is kept nevertheless.)
    assert_eq!(n.kept().places.len(), 2);
    // The API is there: what it does not say does not count.
    n.set_nodes(&BTreeMap::from([
        ("a".into(), at(&["10.0.0.1"])),
        ("b".into(), at(&["10.0.0.3"])),
    ]));
    n.set_pod("3", Some(&placed("a", &["10.1.0.6"], &[])));
    assert_eq!(known(&n, all), " a b ", "said of one, not yet of the other");
    n.keep_pods(&HashSet::from(["3".into()]));
    assert_eq!(known(&n, all), " a  ");
    assert_eq!(n.kept().places.len(), 1);

    std::fs::write(&file, "{").unwrap();
    assert!(Nodes::kept_in(file).all().is_empty());
}

#[test]
fn no_more_addresses_are_kept_than_these() {
    let n = two();
    for k in 0..3 * KEPT {
        let at = std::net::Ipv4Addr::from(0x0a01_0000 + u32::try_from(k).unwrap());
        n.set_pod(&k.to_string(), Some(&placed("a", &[&at.to_string()], &[])));
        n.met(at.into());
    }
    let kept = n.kept().places;
    assert!((KEPT..=2 * KEPT).contains(&kept.len()), "{}", kept.len());
    assert!(kept.contains_key(&ip("10.1.47.255")), "asked for last");
}
