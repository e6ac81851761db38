//! Pods as API servers send them, and as the patch leaves them.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use underpass_pods::policy::{CONTAINERS, ENABLED};

#[derive(Default)]
struct Cluster(
    BTreeMap<&'static str, &'static str>,
    BTreeMap<&'static str, &'static str>,
);

impl Lookup for Cluster {
    fn namespace(&self, name: &str) -> Option<String> {
        self.0.get(name).map(|w| (*w).into())
    }

    fn handler(&self, class: &str) -> Option<String> {
        self.1.get(class).map(|h| (*h).into())
    }
}

/// The way of a pod: its review is asked for, and the patch applied as API servers do.
fn way(config: &PodsConfig, cluster: &Cluster, pod: &Value) -> (Value, Vec<String>) {
    let body = json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "shop", "operation": "CREATE", "userInfo": {"username": "u"},
            "object": pod, "oldObject": null, "dryRun": false,
        }
    });
    let answer = review(config, cluster, body.to_string().as_bytes()).unwrap();
    assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
    assert_eq!(answer["kind"], "AdmissionReview");
    let r = &answer["response"];
    assert_eq!(
        (&r["uid"], &r["allowed"]),
        (&json!("705ab4f5"), &json!(true))
    );
    let warnings = serde_json::from_value(r["warnings"].clone()).unwrap_or_default();
    let mut pod = pod.clone();
    if let Some(text) = r.get("patch") {
        assert_eq!(r["patchType"], "JSONPatch");
        let text: ByteString = serde_json::from_value(text.clone()).unwrap();
        let patch: json_patch::Patch = serde_json::from_slice(&text.0).unwrap();
        json_patch::patch(&mut pod, &patch).unwrap();
    }
    (pod, warnings)
}

fn patched(pod: &Value) -> (Value, Vec<String>) {
    way(&PodsConfig::default(), &Cluster::default(), pod)
}

/// With its answer, which is not the pod.
fn refused(pod: &Value) -> String {
    let (after, warnings) = patched(pod);
    assert_eq!(&after, pod);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    warnings[0].clone()
}

fn asking(spec: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "web-", "annotations": {ENABLED: "true"}},
        "spec": spec,
    })
}

const LIBRARY: &str = "/run/underpass/libunderpass.so";

#[test]
fn a_plain_pod() {
    let pod = asking(json!({"containers": [{"name": "web", "image": "web:1"}]}));
    let expected = asking(json!({
        "containers": [{
            "name": "web", "image": "web:1",
            "volumeMounts": [{"name": "underpass", "mountPath": "/run/underpass", "readOnly": true}],
            "env": [
                {"name": "LD_PRELOAD", "value": LIBRARY},
                {"name": "UNDERPASS_DIR", "value": "/run/underpass"},
                {"name": "ASAN_OPTIONS", "value": "verify_asan_link_order=0"},
            ],
        }],
        "volumes": [{"name": "underpass", "csi": {"driver": "csi.underpass.io", "readOnly": true}}],
    }));
    let (after, warnings) = patched(&pod);
    assert_eq!(after, expected);
    assert!(warnings.is_empty());
    // Asked a second time, and as a typed pod.
    assert_eq!(patched(&after), (after.clone(), Vec::new()));
    let typed: Pod = serde_json::from_value(after).unwrap();
    let csi = typed.spec.unwrap().volumes.unwrap()[0].csi.clone().unwrap();
    assert_eq!(csi.read_only, Some(true));
}

/// As a Deployment's pod comes to an API server of 1.33, with sidecar, init container and token.
#[test]
fn a_full_pod() {
    let token = json!({"name": "kube-api-access-x", "readOnly": true,
                       "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"});
    let pod = asking(json!({
        "volumes": [{"name": "kube-api-access-x", "projected": {"sources": []}}],
        "initContainers": [
            {"name": "migrate", "image": "m", "volumeMounts": [token]},
            {"name": "proxy", "image": "p", "restartPolicy": "Always", "volumeMounts": [token]},
        ],
        "containers": [{
            "name": "web", "image": "w", "volumeMounts": [token],
            "env": [
                {"name": "A", "value": "1"},
                {"name": "LD_PRELOAD", "value": "/lib/$(A).so"},
                {"name": "UNDERPASS_DIR"},
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "ASAN_OPTIONS", "value": "detect_leaks=0"},
            ],
        }],
        "securityContext": {"runAsNonRoot": true},
        "somethingNew": [1],
    }));
    let (empty, warnings) = patched(&pod);
    assert!(
        warnings[0].contains("sets UNDERPASS_DIR itself"),
        "{warnings:?}"
    );
    assert!(empty["spec"]["containers"] == pod["spec"]["containers"]);
    let mut pod = pod;
    pod["spec"]["containers"][0]["env"][2] =
        json!({"name": "UNDERPASS_DIR", "value": "/run/underpass"});
    let (after, warnings) = patched(&pod);
    assert!(warnings.is_empty());
    let spec = &after["spec"];
    let mount = json!({"name": "underpass", "mountPath": "/run/underpass", "readOnly": true});
    assert_eq!(spec["initContainers"][0], pod["spec"]["initContainers"][0]);
    assert_eq!(
        spec["initContainers"][1]["volumeMounts"],
        json!([token, mount])
    );
    assert_eq!(
        spec["initContainers"][1]["env"].as_array().unwrap().len(),
        3
    );
    let web = &spec["containers"][0];
    assert_eq!(web["volumeMounts"], json!([token, mount]));
    let mut env = pod["spec"]["containers"][0]["env"].clone();
    env[1]["value"] = format!("/lib/$(A).so:{LIBRARY}").into();
    env[4]["value"] = "detect_leaks=0:verify_asan_link_order=0".into();
    assert_eq!(web["env"], env);
    assert_eq!(spec["volumes"].as_array().unwrap().len(), 2);
    // Another webhook adds a container, and API servers ask again: it alone gets something.
    let mut later = after.clone();
    let new = json!({"name": "late", "image": "l"});
    later["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(new);
    let (again, _) = patched(&later);
    assert_eq!(again["spec"]["volumes"], later["spec"]["volumes"]);
    assert_eq!(
        again["spec"]["containers"][0],
        later["spec"]["containers"][0]
    );
    assert_eq!(
        again["spec"]["containers"][1]["volumeMounts"],
        json!([mount])
    );
}

#[test]
fn who_asks() {
    let pod = |annotations: Value| {
        json!({"metadata": {"name": "p", "annotations": annotations},
               "spec": {"containers": [{"name": "web"}], "initContainers": [{"name": "init"}]}})
    };
    let mut config = PodsConfig::default();
    let mut cluster = Cluster::default();
    let gets = |config: &PodsConfig, cluster: &Cluster, p: Value| {
        let (after, _) = way(config, cluster, &p);
        let has = |c: &Value| c.get("env").is_some();
        [
            &after["spec"]["containers"][0],
            &after["spec"]["initContainers"][0],
        ]
        .map(has)
    };
    let no = [false, false];
    assert_eq!(gets(&config, &cluster, pod(json!({}))), no);
    assert_eq!(gets(&config, &cluster, pod(Value::Null)), no);
    assert_eq!(
        gets(&config, &cluster, pod(json!({ENABLED: "true"}))),
        [true, false]
    );
    let smcr = json!({"network.alibabacloud.com/erdma-smcr": "true"});
    assert_eq!(gets(&config, &cluster, pod(smcr)), [true, false]);
    let named = json!({ENABLED: "true", CONTAINERS: "init"});
    assert_eq!(gets(&config, &cluster, pod(named)), [false, true]);
    cluster.0.insert("shop", "true");
    assert_eq!(gets(&config, &cluster, pod(json!({}))), [true, false]);
    assert_eq!(gets(&config, &cluster, pod(json!({ENABLED: "false"}))), no);
    let mirror = json!({MIRROR: "x"});
    assert_eq!(
        gets(&config, &cluster, pod(mirror)),
        no,
        "it is there already"
    );
    config.exclude = vec!["shop".into()];
    let (_, warnings) = way(&config, &cluster, &pod(json!({})));
    assert!(warnings.iter().all(|w| w.contains("excluded")) && warnings.len() == 2);
}

#[test]
fn who_cannot_get_it() {
    let with = |c: Value| asking(json!({"containers": [c]}));
    let from = json!({"fieldRef": {"fieldPath": "metadata.name"}});
    for name in ["LD_PRELOAD", "UNDERPASS_DIR", "ASAN_OPTIONS"] {
        let env = json!([{"name": name, "valueFrom": from}]);
        let why = refused(&with(json!({"name": "web", "env": env})));
        assert!(
            why.contains("container web") && why.contains(&format!("its {name} is not written"))
        );
    }
    let twice = json!([{"name": "LD_PRELOAD", "value": "a"}, {"name": "LD_PRELOAD", "value": "b"}]);
    assert!(refused(&with(json!({"name": "web", "env": twice}))).contains("twice"));
    for at in [
        "/run/underpass",
        "run//underpass/x/",
        "/./var/run/underpass",
        "/a/../run/underpass",
    ] {
        let mounts = json!([{"name": "x", "mountPath": at}]);
        let why = refused(&with(json!({"name": "web", "volumeMounts": mounts})));
        assert!(why.contains("mounted at /run/underpass"), "{at}: {why}");
    }
    for (class, gets) in [
        ("nvidia", true),
        ("fast", true),
        ("kata", false),
        ("sandbox", false),
    ] {
        let cluster = Cluster(
            BTreeMap::new(),
            [("fast", "crun"), ("sandbox", "runsc")].into(),
        );
        let pod = asking(json!({"containers": [{"name": "web"}], "runtimeClassName": class}));
        let (after, _) = way(&PodsConfig::default(), &cluster, &pod);
        assert_eq!(after != pod, gets, "{class}");
    }
    for (more, gets) in [
        (json!({"os": {"name": "windows"}}), false),
        (json!({"os": {"name": "linux"}}), true),
        (
            json!({"nodeSelector": {"kubernetes.io/os": "windows"}}),
            false,
        ),
        (
            json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}),
            false,
        ),
        (
            json!({"nodeSelector": {"kubernetes.io/arch": "amd64", "x": "y"}}),
            true,
        ),
    ] {
        let mut pod = asking(json!({"containers": [{"name": "web"}]}));
        let spec = pod["spec"].as_object_mut().unwrap();
        spec.extend(more.as_object().unwrap().clone());
        assert_eq!(patched(&pod).0 != pod, gets, "{more}");
    }
}

#[test]
fn other_mounts_and_volumes() {
    let pod = asking(json!({
        "containers": [{"name": "web", "volumeMounts": [{"name": "r", "mountPath": "/run"}]}],
        "volumes": [{"name": "r", "emptyDir": {}}, {"name": "underpass", "emptyDir": {}}],
    }));
    let (after, _) = patched(&pod);
    let mount = json!({"name": "underpass-csi", "mountPath": "/.underpass", "readOnly": true});
    assert_eq!(after["spec"]["containers"][0]["volumeMounts"][1], mount);
    assert_eq!(after["spec"]["volumes"][2]["name"], "underpass-csi");
    assert_eq!(patched(&after).0, after);
    let mut full = pod.clone();
    let more = json!({"name": "underpass-csi", "emptyDir": {}});
    full["spec"]["volumes"].as_array_mut().unwrap().push(more);
    assert!(refused(&full).contains("other volumes named underpass"));
    // Somebody has written the volume, or the mount as well: the rest is added.
    let volume = json!({"name": "v", "csi": {"driver": "csi.underpass.io", "readOnly": true}});
    let mount = json!({"name": "v", "mountPath": "/run/underpass", "readOnly": true});
    for mounts in [json!([]), json!([mount])] {
        let pod = asking(
            json!({"containers": [{"name": "web", "volumeMounts": mounts}],
                                "volumes": [volume]}),
        );
        let (after, warnings) = patched(&pod);
        assert!(warnings.is_empty());
        assert_eq!(after["spec"]["volumes"], json!([volume]));
        assert_eq!(
            after["spec"]["containers"][0]["volumeMounts"],
            json!([mount])
        );
        assert_eq!(after["spec"]["containers"][0]["env"][0]["value"], LIBRARY);
    }
}

#[test]
fn what_is_no_pod() {
    let config = PodsConfig::default();
    let cluster = Cluster::default();
    for body in ["", "{", "{}", r#"{"request": {}}"#, "[]"] {
        assert!(
            review(&config, &cluster, body.as_bytes()).is_err(),
            "{body}"
        );
    }
    let ask = |request: Value| {
        let body = json!({"apiVersion": "admission.k8s.io/v1", "request": request}).to_string();
        let answer = review(&config, &cluster, body.as_bytes()).unwrap();
        answer["response"].clone()
    };
    let yes = json!({"uid": "u", "allowed": true});
    let pod = asking(json!({"containers": [{"name": "web"}]}));
    let kind = json!({"kind": "Pod"});
    assert_eq!(ask(json!({"uid": "u"})), yes);
    for operation in ["UPDATE", "DELETE"] {
        let r = json!({"uid": "u", "kind": kind, "operation": operation, "object": pod});
        assert_eq!(ask(r), yes);
    }
    let other = json!({"uid": "u", "kind": {"kind": "Job"}, "operation": "CREATE", "object": pod});
    assert_eq!(ask(other), yes);
    for object in [json!(null), json!({"spec": {"containers": 1}}), json!([])] {
        let r = ask(json!({"uid": "u", "kind": kind, "operation": "CREATE", "object": object}));
        assert_eq!(r["allowed"], true);
        assert!(r.get("patch").is_none());
        assert!(r["warnings"][0]
            .as_str()
            .unwrap()
            .contains("cannot be read"));
    }
    let empty =
        json!({"uid": "u", "kind": kind, "operation": "CREATE", "object": {"metadata": {}}});
    assert_eq!(ask(empty), yes);
    assert_eq!(shortened(&"ä".repeat(200)).len(), WARNING_MAX);
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-c]", Just("underpass".into()), Just("v".into())]
}

fn env() -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        Just("LD_PRELOAD".to_owned()),
        Just("UNDERPASS_DIR".to_owned()),
        Just("ASAN_OPTIONS".to_owned()),
        "[A-C]".prop_map(String::from),
    ];
    let value = prop_oneof![
        Just(json!({})),
        "[a:/ ]{0,4}".prop_map(|v| json!({"value": v})),
        Just(json!({"value": LIBRARY})),
        Just(json!({"value": "/run/underpass"})),
        Just(json!({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})),
    ];
    (name, value).prop_map(|(name, mut v)| {
        v["name"] = name.into();
        v
    })
}

fn list(of: impl Strategy<Value = Value> + 'static) -> impl Strategy<Value = Option<Value>> {
    let some = proptest::collection::vec(of, 0..4).prop_map(|v| Some(Value::from(v)));
    prop_oneof![Just(None), Just(Some(Value::Null)), some]
}

/// (API servers refuse two of a name.)
fn once(of: &mut Value, list: &str, key: &str) {
    let mut names = Vec::new();
    if let Some(all) = of.get_mut(list).and_then(Value::as_array_mut) {
        all.retain(|v| {
            let new = !names.contains(&v[key]);
            names.push(v[key].clone());
            new
        });
    }
}

fn some_container() -> impl Strategy<Value = Value> {
    let at = prop_oneof![
        Just("/run/underpass"),
        Just("/run"),
        Just("/data"),
        Just("/.underpass"),
    ];
    let mount = (name(), at).prop_map(|(n, at)| json!({"name": n, "mountPath": at}));
    let restart = prop_oneof![Just(None), Just(Some("Always"))];
    (name(), list(env()), list(mount), restart).prop_map(|(name, env, mounts, restart)| {
        let mut c = json!({"name": name, "more": {"a": [null]}});
        for (key, value) in [("env", env), ("volumeMounts", mounts)] {
            if let Some(v) = value {
                c[key] = v;
            }
        }
        once(&mut c, "volumeMounts", "mountPath");
        if let Some(r) = restart {
            c["restartPolicy"] = r.into();
        }
        c
    })
}

fn some_pod() -> impl Strategy<Value = Value> {
    let source = prop_oneof![
        Just(json!({"emptyDir": {}})),
        Just(json!({"csi": {"driver": "csi.underpass.io"}})),
        Just(json!({"csi": {"driver": "other"}})),
    ];
    let volume = (name(), source).prop_map(|(n, mut v)| {
        v["name"] = n.into();
        v
    });
    let containers = proptest::collection::vec(some_container(), 0..4);
    let named = prop_oneof![Just(None), name().prop_map(Some)];
    (containers, list(some_container()), list(volume), named).prop_map(
        |(containers, init, volumes, named)| {
            let mut pod = asking(json!({"containers": containers, "other": 1}));
            for (key, value) in [("initContainers", init), ("volumes", volumes)] {
                if let Some(v) = value {
                    pod["spec"][key] = v;
                }
            }
            once(&mut pod["spec"], "volumes", "name");
            if let Some(n) = named {
                pod["metadata"]["annotations"][CONTAINERS] = n.into();
            }
            pod
        },
    )
}

/// Takes away what is ours, and what may be added: so that what is left is everything else.
fn everything_else(pod: &Value, before: &Value) -> Value {
    let mut pod = pod.clone();
    let shorten = |list: &mut Value, before: &Value| {
        let n = before.as_array().map_or(0, Vec::len);
        if let Some(l) = list.as_array_mut() {
            l.truncate(n);
        }
        if list.as_array().is_some_and(Vec::is_empty) {
            *list = Value::Null;
        }
    };
    shorten(&mut pod["spec"]["volumes"], &before["spec"]["volumes"]);
    for kind in ["containers", "initContainers"] {
        let Some(all) = pod["spec"][kind].as_array_mut() else {
            continue;
        };
        for (n, c) in all.iter_mut().enumerate() {
            let before = &before["spec"][kind][n];
            shorten(&mut c["volumeMounts"], &before["volumeMounts"]);
            shorten(&mut c["env"], &before["env"]);
            for e in c["env"].as_array_mut().into_iter().flatten() {
                let ours = ["LD_PRELOAD", "UNDERPASS_DIR", "ASAN_OPTIONS"];
                if ours.iter().any(|o| e["name"] == *o) {
                    e["value"] = Value::Null;
                }
            }
        }
    }
    pod
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everything_else_stays(pod in some_pod()) {
        let (after, warnings) = patched(&pod);
        prop_assert_eq!(everything_else(&after, &pod), everything_else(&pod, &pod));
        // What was preloaded still is, in the same order, before the shim; and what a variable of ours is, is all of it.
        for kind in ["containers", "initContainers"] {
            let all = after["spec"][kind].as_array().cloned().unwrap_or_default();
            for (n, c) in all.iter().enumerate() {
                let old = &pod["spec"][kind][n];
                if c == old {
                    continue;
                }
                let value = |c: &Value, name: &str| {
                    let env = c["env"].as_array().cloned().unwrap_or_default();
                    let of: Vec<_> = env.iter().filter(|e| e["name"] == name).cloned().collect();
                    of.last().and_then(|e| e["value"].as_str().map(str::to_owned)).unwrap_or_default()
                };
                let at = value(c, "UNDERPASS_DIR");
                prop_assert!(at == "/run/underpass" || at == "/.underpass");
                let (was, is) = (value(old, "LD_PRELOAD"), value(c, "LD_PRELOAD"));
                let library = format!("{at}/libunderpass.so");
                let list = |s: &str| -> Vec<String> {
                    let all = s.split([':', ' ']).filter(|l| !l.is_empty());
                    all.map(str::to_owned).collect()
                };
                let (was, is) = (list(&was), list(&is));
                prop_assert!(is.starts_with(&was) && is.contains(&library));
                let mounts = c["volumeMounts"].as_array().unwrap();
                let mount = mounts.iter().find(|m| m["mountPath"] == at.as_str()).unwrap();
                let volumes = after["spec"]["volumes"].as_array().unwrap();
                let volume = volumes.iter().find(|v| v["name"] == mount["name"]).unwrap();
                prop_assert_eq!(&volume["csi"]["driver"], "csi.underpass.io");
            }
        }
        // Asked again, nothing is added.
        prop_assert_eq!(patched(&after), (after, warnings));
    }

    #[test]
    fn whatever_comes(text in "[\\[\\]{}:,\"a-z0-9 ]{0,64}", object in any::<Vec<u8>>()) {
        let _ = review(&PodsConfig::default(), &Cluster::default(), text.as_bytes());
        let _ = review(&PodsConfig::default(), &Cluster::default(), &object);
    }
}
