//! The answer to an AdmissionReview: always yes, and a patch for a pod whose containers get the shim.

use crate::pod::{self, Lookup};
use k8s_openapi::api::core::v1::{self, EnvVar, Pod, PodSpec};
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{json, Value};
use underpass_admin::environ::ASAN;
use underpass_admin::places::DIR_ENV;
use underpass_kubelet::csi::NAME as DRIVER;
use underpass_nri::messages::{Adjustment, PodSandbox};
use underpass_pods::cluster::Cluster;
use underpass_pods::policy::{self, Decision, PodsConfig, WhyNot, PRELOAD};

/// Names of the volume: the first that the pod has no volume of.
const VOLUMES: [&str; 2] = ["underpass", "underpass-csi"];
/// A static pod, which the kubelet has made already: the API only shows it.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Longest warning, in bytes, and how many there are: API servers show no more.
const WARNING_MAX: usize = 250;
const WARNINGS: usize = 8;

/// Why a container that asked does not get it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error("{0}")]
    Policy(WhyNot),
    #[error("its {0} is not written in the pod (valueFrom)")]
    Elsewhere(&'static str),
    #[error("the pod has other volumes named {}", VOLUMES.join(" and "))]
    Volume,
    #[error("the pod is for nodes without the daemon")]
    Nodes,
}

impl Refusal {
    fn is_missed(&self) -> bool {
        !matches!(self, Refusal::Policy(why) if !why.is_missed())
    }
}

/// What is needed of an AdmissionReview.
#[derive(Deserialize)]
struct Review {
    #[serde(rename = "apiVersion", default)]
    version: String,
    request: Request,
}

#[derive(Deserialize)]
struct Request {
    uid: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    kind: Kind,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    object: Value,
}

#[derive(Default, Deserialize)]
struct Kind {
    #[serde(default)]
    kind: String,
}

/// Containers or volumes of a pod that is looked at: others wait meanwhile.
const LIST_MAX: usize = 256;

/// What becomes of a pod: operations of a JSON patch, and what its owner is told.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    /// None: the pod stays as it is.
    pub patch: Vec<Value>,
    /// About containers that do not get it.
    pub warnings: Vec<String>,
}

/// Answers an AdmissionReview with another one. Fails only if it is none; whatever else is wrong, the pod is created.
pub fn review(
    config: &PodsConfig,
    lookup: &dyn Lookup,
    body: &[u8],
) -> Result<Value, serde_json::Error> {
    let Review { version, request } = serde_json::from_slice(body)?;
    let is_pod = request.kind.kind == "Pod" && request.operation == "CREATE";
    let outcome = match is_pod {
        true => look_at(config, lookup, &request.namespace, request.object),
        false => Outcome::default(),
    };
    let mut response = json!({"uid": request.uid, "allowed": true});
    if !outcome.patch.is_empty() {
        let text = ByteString(serde_json::to_vec(&outcome.patch)?);
        response["patchType"] = "JSONPatch".into();
        response["patch"] = serde_json::to_value(text)?;
    }
    if !outcome.warnings.is_empty() {
        let all = outcome.warnings.iter().take(WARNINGS);
        response["warnings"] = all.map(|w| shortened(w)).collect();
    }
    Ok(json!({"apiVersion": version, "kind": "AdmissionReview", "response": response}))
}

/// The namespace whose word decides about the pod that is being created, because it says nothing itself.
pub(crate) fn up_to_namespace(config: &PodsConfig, body: &[u8]) -> Option<String> {
    let Review { request, .. } = serde_json::from_slice(body).ok()?;
    let said = request.object.pointer("/metadata/annotations").cloned();
    let pod = PodSandbox {
        annotations: said
            .and_then(|a| serde_json::from_value(a).ok())
            .unwrap_or_default(),
        ..PodSandbox::default()
    };
    let is_pod = request.kind.kind == "Pod" && request.operation == "CREATE";
    (is_pod && policy::is_up_to_namespace(config, &pod)).then_some(request.namespace)
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(WARNING_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn look_at(config: &PodsConfig, lookup: &dyn Lookup, namespace: &str, object: Value) -> Outcome {
    match serde_json::from_value::<Pod>(object) {
        Ok(pod) => outcome(config, lookup, namespace, &pod),
        Err(e) => {
            tracing::warn!(namespace, "a pod that cannot be read: {e}");
            Outcome {
                warnings: vec![format!("underpass: the pod cannot be read: {e}")],
                ..Outcome::default()
            }
        }
    }
}

/// Decides about a pod that is being created in a namespace.
pub fn outcome(config: &PodsConfig, lookup: &dyn Lookup, namespace: &str, pod: &Pod) -> Outcome {
    let mut outcome = Outcome::default();
    let Some(spec) = &pod.spec else {
        return outcome;
    };
    let is_mirror = |a: &std::collections::BTreeMap<_, _>| a.contains_key(MIRROR);
    if pod.metadata.annotations.as_ref().is_some_and(is_mirror) {
        return outcome;
    }
    let lists = [
        spec.containers.len(),
        spec.init_containers.as_ref().map_or(0, Vec::len),
        spec.volumes.as_ref().map_or(0, Vec::len),
    ];
    if lists.iter().any(|n| *n > LIST_MAX) {
        let why = format!("underpass: more than {LIST_MAX} containers or volumes: left alone");
        outcome.warnings.push(why);
        return outcome;
    }
    let (sandbox, cluster) = pod::sandbox(pod, spec, namespace, lookup);
    let volume = match pod::volume(spec) {
        Some(name) => Some(name),
        None => VOLUMES.into_iter().find(|name| is_free(spec, name)),
    };
    let mut is_mounted = false;
    let mut operations = Vec::new();
    for (list, containers) in [
        ("initContainers", spec.init_containers.as_deref()),
        ("containers", Some(&spec.containers[..])),
    ] {
        for (n, c) in containers.unwrap_or_default().iter().enumerate() {
            match decide(config, &cluster, &sandbox, spec, c, volume) {
                Ok(None) => {}
                Ok(Some((adjustment, volume))) => {
                    let at = format!("/spec/{list}/{n}");
                    is_mounted |= !adjustment.mounts.is_empty();
                    operations.extend(operations_of(&at, c, &adjustment, volume));
                }
                Err(why) if why.is_missed() => refuse(&mut outcome, &sandbox, &c.name, &why),
                Err(_) => {}
            }
        }
    }
    if is_mounted && pod::volume(spec).is_none() {
        let new = json!({"name": volume, "csi": {"driver": DRIVER, "readOnly": true}});
        let there = spec.volumes.is_some();
        outcome
            .patch
            .extend(append("/spec/volumes", there, vec![new]));
    }
    outcome.patch.extend(operations);
    if !outcome.patch.is_empty() {
        tracing::debug!(namespace, pod = sandbox.name, "injected");
    }
    outcome
}

fn refuse(outcome: &mut Outcome, pod: &PodSandbox, container: &str, why: &Refusal) {
    tracing::warn!(
        namespace = pod.namespace,
        pod = pod.name,
        container,
        "asked for the shim and does not get it: {why}"
    );
    let told = format!("container {container} asked for Underpass and does not get it: {why}");
    outcome.warnings.push(told);
}

/// (Who mounts a volume that is not there may get it from another webhook.)
fn is_free(spec: &PodSpec, name: &str) -> bool {
    let containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let mut mounted = containers.flat_map(|c| c.volume_mounts.iter().flatten());
    let mut volumes = spec.volumes.iter().flatten();
    volumes.all(|v| v.name != name) && mounted.all(|m| m.name != name)
}

/// What a container gets, and by which volume. (What is on the nodes is not known here; their daemons see to that.)
fn decide<'a>(
    config: &PodsConfig,
    cluster: &Cluster,
    sandbox: &PodSandbox,
    spec: &PodSpec,
    c: &v1::Container,
    volume: Option<&'a str>,
) -> Result<Option<(Adjustment, &'a str)>, Refusal> {
    let container = pod::container(config, spec, c);
    let adjustment = match policy::decide(config, cluster, sandbox, &container, &Ok(())) {
        Decision::Unasked | Decision::Has => return Ok(None),
        Decision::Not(why) => return Err(Refusal::Policy(why)),
        Decision::Inject(a) => a,
    };
    for name in [PRELOAD, DIR_ENV, ASAN] {
        if named(c, name).any(|(_, e)| e.value_from.is_some()) {
            return Err(Refusal::Elsewhere(name));
        }
    }
    if pod::is_for_other_nodes(spec) {
        return Err(Refusal::Nodes);
    }
    let volume = volume.ok_or(Refusal::Volume)?;
    Ok(Some((adjustment, volume)))
}

/// A container's variables of a name, with their places.
fn named<'a>(c: &'a v1::Container, name: &'a str) -> impl Iterator<Item = (usize, &'a EnvVar)> {
    let all = c.env.iter().flatten().enumerate();
    all.filter(move |(_, e)| e.name == name)
}

/// The operations for one container, at its place in the pod.
fn operations_of(at: &str, c: &v1::Container, adjustment: &Adjustment, volume: &str) -> Vec<Value> {
    // (Without propagation, as by NRI: what is in the directory is seen without it, and a runtime refuses to make a container
    // with it if the node's mounts are private.)
    let mounts = adjustment
        .mounts
        .iter()
        .map(|m| json!({"name": volume, "mountPath": m.destination, "readOnly": true}));
    let there = c.volume_mounts.is_some();
    let mut all = append(&format!("{at}/volumeMounts"), there, mounts.collect());
    let mut new = Vec::new();
    // (`-NAME` removes one before it is set: an operation on its value does both.)
    for set in adjustment.env.iter().filter(|e| !e.key.starts_with('-')) {
        // In its place: variables may name those before them.
        match named(c, &set.key).last() {
            Some((n, _)) => all.push(
                json!({"op": "add", "path": format!("{at}/env/{n}/value"), "value": set.value}),
            ),
            None => new.push(json!({"name": set.key, "value": set.value})),
        }
    }
    all.extend(append(&format!("{at}/env"), c.env.is_some(), new));
    all
}

/// Operations that append to a list, or make it.
fn append(path: &str, there: bool, values: Vec<Value>) -> Vec<Value> {
    match (values.is_empty(), there) {
        (true, _) => Vec::new(),
        (false, false) => vec![json!({"op": "add", "path": path, "value": values})],
        (false, true) => {
            let each = values.into_iter();
            each.map(|v| json!({"op": "add", "path": format!("{path}/-"), "value": v}))
                .collect()
        }
    }
}

#[cfg(test)]
mod tests;
