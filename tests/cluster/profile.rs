//! The *restricted* Pod Security profile, looked for in a pod's final description: what Kubernetes since 1.23 asks at admission,
//! and 1.20 cannot. (<https://kubernetes.io/docs/concepts/security/pod-security-standards/>, version 1.29)

use anyhow::{ensure, Result};
use serde_json::{json, Value};

/// Kinds of volumes that are allowed.
const VOLUMES: [&str; 8] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

fn list(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_array().into_iter().flatten()
}

/// What the profile does not allow in this pod.
pub fn against(spec: &Value) -> Vec<String> {
    let mut all = Vec::new();
    for name in ["hostNetwork", "hostPID", "hostIPC"] {
        if spec[name] == true {
            all.push(name.into());
        }
    }
    for v in list(&spec["volumes"]) {
        let kinds = v.as_object().into_iter().flat_map(|o| o.keys());
        let other = kinds.filter(|k| *k != "name" && !VOLUMES.contains(&k.as_str()));
        all.extend(other.map(|k| format!("a volume of kind {k}")));
    }
    let pod = &spec["securityContext"];
    if list(&pod["sysctls"]).next().is_some() {
        all.push("sysctls".into());
    }
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for c in list(&spec[kind]) {
            let wrong = against_container(pod, c);
            all.extend(wrong.map(|w| format!("{}: {w}", c["name"])));
        }
    }
    all
}

fn against_container<'a>(pod: &'a Value, c: &'a Value) -> impl Iterator<Item = &'static str> + 'a {
    let own = &c["securityContext"];
    // The container's word before the pod's.
    let word = |name: &str| {
        if own[name].is_null() {
            &pod[name]
        } else {
            &own[name]
        }
    };
    let capabilities = &own["capabilities"];
    let seccomp = word("seccompProfile")["type"].as_str().unwrap_or_default();
    let selinux = &word("seLinuxOptions");
    let rules = [
        ("privileged", own["privileged"] != true),
        (
            "may gain privileges",
            own["allowPrivilegeEscalation"] == false,
        ),
        (
            "may be root",
            word("runAsNonRoot") == true && word("runAsUser") != 0,
        ),
        (
            "seccomp",
            ["RuntimeDefault", "Localhost"].contains(&seccomp),
        ),
        (
            "SELinux",
            selinux["user"].is_null() && selinux["role"].is_null(),
        ),
        (
            "keeps capabilities",
            list(&capabilities["drop"]).any(|d| d == "ALL"),
        ),
        (
            "adds capabilities",
            list(&capabilities["add"]).all(|a| a == "NET_BIND_SERVICE"),
        ),
        (
            "/proc",
            ["null", "\"Default\""].contains(&own["procMount"].to_string().as_str()),
        ),
        (
            "a port of the host",
            list(&c["ports"]).all(|p| p["hostPort"].is_null()),
        ),
    ];
    rules
        .into_iter()
        .filter(|(_, fine)| !fine)
        .map(|(what, _)| what)
}

/// The pods of a list are as the profile wants them; and would not be with anything that people give pods for RDMA.
pub fn all_are_restricted(pods: &Value) -> Result<()> {
    let mut seen = 0;
    for p in list(&pods["items"]) {
        let spec = &p["spec"];
        let wrong = against(spec);
        ensure!(wrong.is_empty(), "{}: {wrong:?}", p["metadata"]["name"]);
        let changes: [(&str, Value); 6] = [
            (
                "/volumes/0",
                json!({"name": "x", "hostPath": {"path": "/dev/infiniband"}}),
            ),
            ("/containers/0/securityContext/privileged", json!(true)),
            (
                "/containers/0/securityContext/capabilities",
                json!({"add": ["IPC_LOCK"], "drop": ["ALL"]}),
            ),
            ("/hostNetwork", json!(true)),
            ("/securityContext/runAsNonRoot", json!(false)),
            ("/securityContext/seccompProfile", Value::Null),
        ];
        for (at, to) in changes {
            let mut other = spec.clone();
            let (of, name) = at.rsplit_once('/').unwrap_or_default();
            let within = match of {
                "" => Some(&mut other),
                of => other.pointer_mut(of),
            };
            match (within, name.parse::<usize>()) {
                (Some(w), Ok(n)) => w[n] = to,
                (Some(w), Err(_)) => w[name] = to,
                (None, _) => anyhow::bail!("no {of} in {spec}"),
            }
            ensure!(!against(&other).is_empty(), "{at} is not seen");
        }
        seen += 1;
    }
    ensure!(seen > 0, "no pods");
    Ok(())
}
