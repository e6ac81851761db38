//! The chart by itself: what helm says of it, whether its values are those of its schema and are explained, what the API server
//! says of what it makes, and whether the daemon's container has what the chart lists and nothing else.

use crate::cluster::{Cluster, FIRST};
use crate::node::COMMAND;
use crate::SYSTEM;
use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use underpass_tests::harness::paths::{self, Build};
use underpass_tests::harness::program::Output;

/// What people set, beside the defaults.
const VARIANTS: [&str; 5] = [
    "",
    "csi.enabled=true,webhook.enabled=true,paths.nri=,webhook.replicas=3",
    "devicePlugin.enabled=true,devicePlugin.rails={underpass.io/rail,rdma/hca,aliyun/erdma}",
    "rdmaResource=rdma/hca,nodes.enabled=false,metrics.public=true,metrics.perPod=pod,\
     metrics.podsMax=9,metrics.reasonsMax=0",
    "namespaces.include={shop},namespaces.exclude={kube-system,plain},image.tag=x,imagePullSecrets[0].name=pull,\
     podAnnotations.a=b,paths.plugins=",
];
/// Parts of pods as Kubernetes calls them, which the chart does not explain again.
const KUBERNETES: [&str; 9] = [
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "podAnnotations",
    "priorityClassName",
    "pullPolicy",
    "resources",
    "tolerations",
    "updateStrategy",
];
/// Numbers of the capabilities that the chart gives to a daemon without devices and CSI (linux/capability.h): BPF, PERFMON,
/// NET_ADMIN, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH.
const CAPABILITIES: [u32; 6] = [39, 38, 12, 21, 19, 2];

pub fn chart(c: &mut Cluster) -> Result<()> {
    values_are_the_schemas(c)?;
    values_are_explained(c)?;
    for values in VARIANTS {
        linted(c, values).with_context(|| values.to_owned())?;
        accepted(c, values).with_context(|| values.to_owned())?;
    }
    Ok(())
}

fn helm(c: &Cluster, args: &[&str]) -> Result<Output> {
    let helm = paths::target().join("helm/helm/helm");
    let program = c.node(FIRST.name).machine.program(helm).args(args);
    c.as_admin(program).run(COMMAND)
}

fn path() -> String {
    Build::This.chart().to_string_lossy().into_owned()
}

fn linted(c: &Cluster, values: &str) -> Result<()> {
    let said = helm(c, &["lint", "--strict", &path(), "--set", values])?.ok()?;
    ensure!(
        said.contains("1 chart(s) linted, 0 chart(s) failed"),
        "{said}"
    );
    Ok(())
}

/// The server would take every object, of a release that is not there yet.
fn accepted(c: &Cluster, values: &str) -> Result<()> {
    let words = [
        "template",
        "another",
        &path(),
        "-n",
        SYSTEM,
        "--set",
        values,
    ];
    let text = helm(
        c,
        &[&words[..], &["--validate", "--dry-run=server"]].concat(),
    )?
    .ok()?;
    let made = text.lines().filter(|l| l.starts_with("kind: ")).count();
    let kubectl = c
        .node(FIRST.name)
        .machine
        .program(crate::node::kubernetes("kubectl"));
    let apply = kubectl
        .words("apply --dry-run=server -f -")
        .stdin(text.as_bytes());
    let said = c.as_admin(apply).check(COMMAND)?;
    let taken = said.lines().filter(|l| l.ends_with("(server dry run)"));
    ensure!(made > 4 && taken.count() == made, "{made} made: {said}");
    Ok(())
}

fn schema() -> Result<Value> {
    let file = Build::This.chart().join("values.schema.json");
    Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?)
}

/// Each value by its path, and what the schema says of it.
fn leaves(whole: &Value, of: &Value, at: &str, all: &mut BTreeMap<String, Value>) -> Result<()> {
    if let Some(properties) = of["properties"].as_object() {
        for (name, of) in properties {
            let dot = if at.is_empty() { "" } else { "." };
            leaves(whole, of, &format!("{at}{dot}{name}"), all)?;
        }
        return Ok(());
    }
    let of = match of["$ref"].as_str() {
        Some(r) => whole
            .pointer(r.trim_start_matches('#'))
            .context("a definition")?,
        None => of,
    };
    all.insert(at.into(), of.clone());
    Ok(())
}

/// All values, as far as the schema tells them apart.
fn given(values: &Value, known: &BTreeMap<String, Value>, at: &str, all: &mut Vec<String>) {
    let inner = values.as_object().filter(|_| !known.contains_key(at));
    let Some(inner) = inner else {
        return all.push(at.into());
    };
    for (name, v) in inner {
        let dot = if at.is_empty() { "" } else { "." };
        given(v, known, &format!("{at}{dot}{name}"), all);
    }
}

/// Each default is in the schema, each value of it has a default, and what is of another kind is refused, by its name.
fn values_are_the_schemas(c: &Cluster) -> Result<()> {
    let schema = schema()?;
    let mut known = BTreeMap::new();
    leaves(&schema, &schema, "", &mut known)?;
    // (Helm's own, which all charts have.)
    known.remove("global").context("global")?;
    let words = [
        "get",
        "values",
        "underpass",
        "-n",
        SYSTEM,
        "--all",
        "-o",
        "json",
    ];
    let values: Value = serde_json::from_str(&helm(c, &words)?.ok()?)?;
    let mut all = Vec::new();
    given(&values, &known, "", &mut all);
    all.sort();
    let names: Vec<&String> = known.keys().collect();
    ensure!(all.iter().collect::<Vec<_>>() == names, "{all:?} {names:?}");
    let wrong = |of: &Value| match of["type"].as_str() {
        Some("string") => "7",
        _ => "\"of another kind\"",
    };
    let set: Vec<String> = known
        .iter()
        .map(|(k, of)| format!("{k}={}", wrong(of)))
        .collect();
    let mut words = vec!["lint".to_owned(), path()];
    words.extend(
        set.iter()
            .flat_map(|s| ["--set-json".to_owned(), s.clone()]),
    );
    let said = helm(c, &words.iter().map(String::as_str).collect::<Vec<_>>())?;
    ensure!(!said.status.success(), "{said:?}");
    let refused = |k: &&String| !said.stdout.contains(&format!("- {k}: "));
    let taken: Vec<&&String> = names.iter().filter(|k| refused(k)).collect();
    ensure!(taken.is_empty(), "not refused: {taken:?} {said:?}");
    let more = helm(c, &["lint", &path(), "--set", "signer.colour=red"])?;
    ensure!(
        !more.status.success() && more.stdout.contains("colour"),
        "{more:?}"
    );
    Ok(())
}

/// Above each value that is the chart's own there is a comment, or above what it is part of.
fn values_are_explained(_: &Cluster) -> Result<()> {
    let text = std::fs::read_to_string(Build::This.chart().join("values.yaml"))?;
    // Indentation of the keys above, and whether they are explained.
    let (mut above, mut comment, mut seen) = (Vec::<(usize, bool)>::new(), false, 0);
    for line in text.lines() {
        let inner = line.trim_start();
        let indent = line.len() - inner.len();
        let key = inner.split_once(':').map(|(k, _)| k);
        let key = key.filter(|_| !inner.starts_with(['#', '-']));
        let Some(key) = key else {
            comment = inner.starts_with('#');
            continue;
        };
        above.retain(|(i, _)| *i < indent);
        let comments = std::mem::take(&mut comment) || above.last().is_some_and(|a| a.1);
        let said = comments || KUBERNETES.contains(&key);
        above.push((indent, said));
        seen += 1;
        let has_parts = inner.ends_with(':');
        ensure!(said || has_parts, "values.yaml does not explain {key}");
    }
    ensure!(seen > 40, "{seen} values");
    Ok(())
}

/// The daemon's process has what the chart lists, and nothing else.
pub fn least_privilege(c: &mut Cluster) -> Result<()> {
    let node = c.node(FIRST.name);
    let pid = node.pid_of(&c.daemon_container(FIRST.name)?)?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<String> {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        Ok(line.context("a field")?.trim().to_owned())
    };
    let listed = CAPABILITIES.iter().fold(0u64, |all, n| all | 1 << n);
    for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
        let has = u64::from_str_radix(&field(set)?, 16)?;
        ensure!(has == listed, "{set} {has:x}, not {listed:x}");
    }
    // A filter, and nothing that a program could gain.
    ensure!(
        field("Seccomp:")? == "2" && field("NoNewPrivs:")? == "1",
        "{status}"
    );
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let root = mounts.lines().find(|l| l.split(' ').nth(4) == Some("/"));
    let options = root.and_then(|l| l.split(' ').nth(5)).context("a root")?;
    ensure!(options.split(',').any(|o| o == "ro"), "{options}");
    Ok(())
}
