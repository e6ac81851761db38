//! Who gets the shim, and what it gets.

use super::*;

fn pod(annotations: &[(&str, &str)]) -> PodSandbox {
    PodSandbox {
        namespace: "shop".into(),
        name: "web-0".into(),
        annotations: annotations
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect(),
        ..PodSandbox::default()
    }
}

fn container(env: &[&str]) -> Container {
    Container {
        name: "web".into(),
        env: env.iter().map(|e| (*e).into()).collect(),
        ..Container::default()
    }
}

fn of(config: &PodsConfig, annotations: &[(&str, &str)], c: &Container) -> Decision {
    decide(config, &Cluster::default(), &pod(annotations), c, &Ok(()))
}

fn env(d: &Decision) -> Vec<(String, String)> {
    let Decision::Inject(a) = d else {
        panic!("{d:?}");
    };
    let all = a.env.iter();
    all.map(|e| (e.key.clone(), e.value.clone())).collect()
}

#[test]
fn who_asks() {
    let mut config = PodsConfig::default();
    let plain = container(&[]);
    let asks = |c: &PodsConfig, a: &[(&str, &str)]| of(c, a, &plain) != Decision::Unasked;
    assert!(!asks(&config, &[]));
    assert!(asks(&config, &[(ENABLED, "true")]));
    assert!(!asks(&config, &[(ENABLED, "false")]));
    let smcr = "network.alibabacloud.com/erdma-smcr";
    assert!(asks(&config, &[(smcr, "true")]));
    assert!(!asks(&config, &[(smcr, "false")]));
    assert!(
        !asks(&config, &[(smcr, "true"), (ENABLED, "false")]),
        "the pod's own word"
    );
    config.include = vec!["shop".into()];
    assert!(asks(&config, &[]) && !asks(&config, &[(ENABLED, "false")]));
    let not = |c: &PodsConfig, a: &[(&str, &str)], why| {
        assert_eq!(of(c, a, &plain), Decision::Not(why));
    };
    not(&config, &[(ENABLED, "yes")], WhyNot::Unreadable);
    not(&config, &[(CONTAINERS, "web2, db")], WhyNot::NotNamed);
    assert!(matches!(
        of(&config, &[(CONTAINERS, "db, web")], &plain),
        Decision::Inject(_)
    ));
    config.exclude = vec!["shop".into()];
    not(&config, &[(ENABLED, "true")], WhyNot::Excluded);
    assert!(!asks(&config, &[(ENABLED, "false")]), "it did not ask");
}

#[test]
fn what_the_cluster_says() {
    let mut config = PodsConfig::default();
    let mut cluster = Cluster::default();
    let web = container(&[]);
    let of = |config: &PodsConfig, cluster: &Cluster, a: &[(&str, &str)]| {
        let mut p = pod(a);
        p.uid = "u1".into();
        decide(config, cluster, &p, &web, &Ok(()))
    };
    let gets = |d: &Decision| matches!(d, Decision::Inject(_));
    cluster.namespaces.insert("shop".into(), "true".into());
    assert!(gets(&of(&config, &cluster, &[])));
    let unasked = of(&config, &cluster, &[(ENABLED, "false")]);
    assert_eq!(unasked, Decision::Unasked, "the pod's own word wins");
    cluster.namespaces.insert("shop".into(), "false".into());
    assert_eq!(of(&config, &cluster, &[]), Decision::Unasked);
    assert!(gets(&of(&config, &cluster, &[(ENABLED, "true")])));
    let smcr = ("network.alibabacloud.com/erdma-smcr", "true");
    assert!(gets(&of(&config, &cluster, &[smcr])), "also the pod's word");
    config.include = vec!["shop".into()];
    let own = of(&config, &cluster, &[]);
    assert_eq!(
        own,
        Decision::Unasked,
        "the namespace's word before the configuration's"
    );
    cluster.namespaces.insert("shop".into(), "on".into());
    let not = of(&config, &cluster, &[]);
    assert_eq!(not, Decision::Not(WhyNot::UnreadableNamespace));
    cluster.namespaces.clear();
    assert!(gets(&of(&config, &cluster, &[])));
    // Init containers get it if they are named.
    cluster.init.insert("u1".into(), vec!["web".into()]);
    assert_eq!(of(&config, &cluster, &[]), Decision::Not(WhyNot::Init));
    assert!(gets(&of(&config, &cluster, &[(CONTAINERS, "web")])));
    assert!(!WhyNot::Init.is_missed() && WhyNot::Taken.is_missed());
}

#[test]
fn what_it_gets() {
    let config = PodsConfig::default();
    let yes = [(ENABLED, "true")];
    let d = of(&config, &yes, &container(&["PATH=/bin"]));
    let pair = |k: &str, v: &str| (k.to_owned(), v.to_owned());
    let dir = pair("UNDERPASS_DIR", "/run/underpass");
    let ours = pair("LD_PRELOAD", "/run/underpass/libunderpass.so");
    let asan = pair("ASAN_OPTIONS", "verify_asan_link_order=0");
    assert_eq!(env(&d), [ours.clone(), dir.clone(), asan.clone()]);
    let Decision::Inject(a) = d else {
        unreachable!()
    };
    let m = &a.mounts[0];
    assert_eq!(a.mounts.len(), 1);
    assert_eq!(
        (
            m.destination.as_str(),
            m.source.as_str(),
            m.options.join(",")
        ),
        (
            "/run/underpass",
            "/var/lib/underpass/pods",
            "bind,ro,nosuid,nodev".into()
        )
    );
    // What image or pod preload stays before it.
    let c = container(&["LD_PRELOAD=/a.so /b.so", "ASAN_OPTIONS=detect_leaks=0"]);
    let merged = "/a.so:/b.so:/run/underpass/libunderpass.so";
    let removed = pair("-LD_PRELOAD", "");
    let expected = [
        removed.clone(),
        pair("LD_PRELOAD", merged),
        dir.clone(),
        pair("-ASAN_OPTIONS", ""),
        pair("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"),
    ];
    assert_eq!(env(&of(&config, &yes, &c)), expected);
    let d = of(&config, &yes, &container(&["LD_PRELOAD="]));
    assert_eq!(env(&d), [removed, ours, dir.clone(), asan.clone()]);
    // Who has written it there by hand gets the directory.
    let own = "LD_PRELOAD=/a.so:/run/underpass/libunderpass.so";
    let d = of(
        &config,
        &yes,
        &container(&[own, "UNDERPASS_DIR=/run/underpass"]),
    );
    assert_eq!(env(&d), [asan]);
}

fn taken(at: &str) -> Container {
    let mut c = container(&[]);
    c.mounts.push(Mount {
        destination: at.into(),
        source: "/elsewhere".into(),
        ..Mount::default()
    });
    c
}

#[test]
fn where_it_is_mounted() {
    let config = PodsConfig::default();
    let yes = [(ENABLED, "true")];
    for (mount, expected) in [
        ("/data", Some("/run/underpass")),
        ("/", Some("/run/underpass")),
        ("/run2", Some("/run/underpass")),
        ("/run/underpass2", Some("/run/underpass")),
        ("/run/lock", Some("/run/underpass")),
        ("/var/lib", Some("/run/underpass")),
        ("/run", Some("/.underpass")),
        ("/run/", Some("/.underpass")),
        ("/var/run", Some("/.underpass")),
        ("/run/underpass", None),
        ("/run/underpass/", None),
        ("/var/run/underpass/x", None),
        ("/.underpass", None),
    ] {
        let at = match of(&config, &yes, &taken(mount)) {
            Decision::Inject(a) => {
                let at = a.mounts[0].destination.clone();
                let all = a.env.iter().map(|e| e.value.clone());
                let values: Vec<String> = all.collect();
                assert_eq!(values[..2], [format!("{at}/libunderpass.so"), at.clone()]);
                Some(at)
            }
            Decision::Not(WhyNot::Taken) => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(at.as_deref(), expected, "{mount}");
    }
}

#[test]
fn who_cannot_get_it() {
    let config = PodsConfig::default();
    let yes = [(ENABLED, "true")];
    let no = Err("no space left".to_owned());
    let d = decide(
        &config,
        &Cluster::default(),
        &pod(&yes),
        &container(&[]),
        &no,
    );
    let Decision::Not(why) = d else {
        panic!("{d:?}");
    };
    assert!(why.to_string().ends_with(": no space left"));
    let not = |c: &Container, why| assert_eq!(of(&config, &yes, c), Decision::Not(why));
    let twice = container(&["LD_PRELOAD=/a.so", "LD_PRELOAD=/b.so"]);
    not(&twice, WhyNot::Twice);
    not(&container(&["UNDERPASS_DIR=/x"]), WhyNot::Elsewhere);
    for (handler, gets) in [("", true), ("runc", true), ("kata", false)] {
        let mut p = pod(&yes);
        p.handler = handler.into();
        let d = decide(&config, &Cluster::default(), &p, &container(&[]), &Ok(()));
        assert_eq!(matches!(d, Decision::Inject(_)), gets, "{handler}");
    }
}

#[test]
fn who_has_it() {
    let (config, none) = (PodsConfig::default(), Cluster::default());
    let yes = [(ENABLED, "true")];
    let mut c = container(&[]);
    assert_eq!(
        look_back(&config, &none, &pod(&yes), &c),
        Decision::Not(WhyNot::Before)
    );
    let Decision::Inject(a) = of(&config, &yes, &c) else {
        panic!();
    };
    c.mounts = a.mounts;
    c.env = a
        .env
        .iter()
        .map(|e| format!("{}={}", e.key, e.value))
        .collect();
    assert_eq!(of(&config, &yes, &c), Decision::Has, "asked a second time");
    let mut other = config.clone();
    other.exclude = vec!["shop".into()];
    for config in [&config, &other] {
        for annotations in [&yes[..], &[]] {
            assert_eq!(
                look_back(config, &none, &pod(annotations), &c),
                Decision::Has
            );
        }
    }
    assert_eq!(
        look_back(&config, &none, &pod(&[]), &container(&[])),
        Decision::Unasked
    );
}

#[test]
fn who_has_it_from_the_kubelet() {
    let config = PodsConfig::default();
    let yes = [(ENABLED, "true")];
    let at = MOUNTED_AT[0];
    let source = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/underpass/mount";
    let (dir, preload) = (
        format!("{DIR_ENV}={at}"),
        format!("{PRELOAD}={}", library(at)),
    );
    let with = |source: &str, env: &[&str]| {
        let mut c = taken(at);
        c.mounts[0].source = source.into();
        c.env = container(env).env;
        of(&config, &yes, &c)
    };
    assert_eq!(with(source, &[&preload, &dir]), Decision::Has);
    let taken = Decision::Not(WhyNot::Taken);
    assert_eq!(with(source, &[&preload]), taken);
    assert_eq!(with(source, &[&dir]), taken);
    assert_eq!(with("/elsewhere", &[&preload, &dir]), taken);
    // The directory alone is there: it gets what is missing.
    let Decision::Inject(a) = with("/var/lib/underpass/pods", &[&dir]) else {
        panic!();
    };
    assert!(a.mounts.is_empty());
    assert_eq!(a.env[0].key, PRELOAD);
}
