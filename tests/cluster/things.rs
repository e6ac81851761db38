//! Descriptions of what the tests make in the cluster.

use crate::cluster::IMAGE;
use anyhow::{Context, Result};
use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use serde_json::{json, Value};

/// Who may make which pods: everybody those of the *restricted* Pod Security profile (Kubernetes 1.20 has policies for that),
/// the system's namespaces any.
pub const POLICIES: &str = r#"
apiVersion: policy/v1beta1
kind: PodSecurityPolicy
metadata:
  name: restricted
  annotations:
    seccomp.security.alpha.kubernetes.io/allowedProfileNames: runtime/default
spec:
  privileged: false
  allowPrivilegeEscalation: false
  requiredDropCapabilities: [ALL]
  volumes: [configMap, csi, downwardAPI, emptyDir, ephemeral, persistentVolumeClaim, projected, secret]
  hostNetwork: false
  hostIPC: false
  hostPID: false
  runAsUser: {rule: MustRunAsNonRoot}
  seLinux: {rule: RunAsAny}
  supplementalGroups: {rule: MustRunAs, ranges: [{min: 1, max: 65535}]}
  fsGroup: {rule: MustRunAs, ranges: [{min: 1, max: 65535}]}
---
apiVersion: policy/v1beta1
kind: PodSecurityPolicy
metadata: {name: any, annotations: {seccomp.security.alpha.kubernetes.io/allowedProfileNames: "*"}}
spec:
  privileged: true
  allowPrivilegeEscalation: true
  allowedCapabilities: ["*"]
  volumes: ["*"]
  hostNetwork: true
  hostPorts: [{min: 0, max: 65535}]
  hostIPC: true
  hostPID: true
  runAsUser: {rule: RunAsAny}
  seLinux: {rule: RunAsAny}
  supplementalGroups: {rule: RunAsAny}
  fsGroup: {rule: RunAsAny}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: restricted}
rules: [{apiGroups: [policy], resources: [podsecuritypolicies], resourceNames: [restricted], verbs: [use]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: any}
rules: [{apiGroups: [policy], resources: [podsecuritypolicies], resourceNames: [any], verbs: [use]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: restricted}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: restricted}
subjects:
  - {apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:shop"}
  - {apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:plain"}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: any}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: any}
subjects:
  - {apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:underpass-system"}
  - {apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:machines"}
"#;

/// A deployment of one pod with one container, `main`.
pub struct Workload {
    pub namespace: &'static str,
    pub name: &'static str,
    pub annotations: Vec<(&'static str, &'static str)>,
    pub command: String,
    /// Instead, of images without a shell: program and arguments.
    pub program: Vec<String>,
    pub image: &'static str,
    pub env: Vec<(&'static str, String)>,
    /// Command of an init container, `before`.
    pub before: Option<&'static str>,
    /// Where an empty volume is mounted, besides /tmp.
    pub volume: Option<&'static str>,
    pub host_network: bool,
    /// The node to run on.
    pub node: Option<&'static str>,
    /// A resource of which the container asks for one.
    pub resource: Option<&'static str>,
}

impl Workload {
    pub fn new(name: &'static str, command: impl Into<String>) -> Self {
        Workload {
            namespace: "shop",
            name,
            annotations: Vec::new(),
            command: command.into(),
            program: Vec::new(),
            image: IMAGE,
            env: vec![("UNDERPASS", "eager".into())],
            before: None,
            volume: None,
            host_network: false,
            node: None,
            resource: None,
        }
    }

    pub fn annotated(mut self, name: &'static str, value: &'static str) -> Self {
        self.annotations.push((name, value));
        self
    }

    /// Of another image.
    pub fn of(mut self, image: &'static str) -> Self {
        self.image = image;
        self
    }

    pub fn within(mut self, namespace: &'static str) -> Self {
        self.namespace = namespace;
        self
    }

    fn container(&self, name: &str, command: &str) -> Value {
        let env = self.env.iter();
        let env: Vec<Value> = env.map(|(k, v)| json!({"name": k, "value": v})).collect();
        let mut mounts = vec![json!({"name": "tmp", "mountPath": "/tmp"})];
        if let Some(at) = self.volume {
            mounts.push(json!({"name": "more", "mountPath": at}));
        }
        let command = match self.program.is_empty() {
            true => vec!["sh".to_owned(), "-c".into(), command.into()],
            false => self.program.clone(),
        };
        json!({
            "name": name, "image": self.image, "imagePullPolicy": "Never",
            "command": command, "env": env, "volumeMounts": mounts,
            "resources": {"limits": self.resource.map(|r| json!({r: "1"}))},
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
        })
    }

    /// In a form that the *restricted* profile accepts, but for what was asked for.
    pub fn text(&self) -> String {
        let annotations: serde_json::Map<String, Value> = self
            .annotations
            .iter()
            .map(|(k, v)| ((*k).into(), json!(v)))
            .collect();
        let before: Vec<Value> = self
            .before
            .iter()
            .map(|c| self.container("before", c))
            .collect();
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": {"app": self.name}},
                "template": {
                    "metadata": {"labels": {"app": self.name}, "annotations": annotations},
                    "spec": {
                        "automountServiceAccountToken": false,
                        "enableServiceLinks": false,
                        "terminationGracePeriodSeconds": 0,
                        "hostNetwork": self.host_network,
                        "nodeSelector": self.node.map(|n| json!({"kubernetes.io/hostname": n})),
                        "securityContext": {
                            "runAsNonRoot": true, "runAsUser": 10001, "fsGroup": 10001,
                            "supplementalGroups": [10001],
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "initContainers": before,
                        "containers": [self.container("main", &self.command)],
                        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "more", "emptyDir": {}}],
                    },
                },
            },
        })
        .to_string()
    }
}

/// A service with a fixed address for the pods of a workload.
pub fn service(namespace: &str, name: &str, address: &str, port: u16) -> String {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "clusterIP": address, "ports": [{"port": port}]},
    })
    .to_string()
}

/// A Redis server that keeps nothing.
pub const REDIS: &str =
    "exec redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no --dir /tmp";

/// A client that counts on one connection, and stops if a number is not the next one.
pub fn counts(address: &str) -> String {
    format!(
        "redis-cli -h {address} del $HOSTNAME >/dev/null; redis-cli -h {address} -r 10000000 -i 0.01 incr $HOSTNAME | \
         {{ n=1; while read -r r; do [ \"$r\" = \"$n\" ] || {{ echo \"$n: $r\"; exit 1; }}; n=$((n + 1)); \
         echo $n >/tmp/counted; done; }}"
    )
}

/// A workload's connections, of all rows that the tool printed as JSON.
pub fn rows_of(said: &str, workload: &str) -> Result<Vec<Value>> {
    let all: Vec<Value> = serde_json::from_str(said).with_context(|| said.to_owned())?;
    let pod = format!("{workload}-");
    let of = |r: &Value| {
        let at = r["at"]["pod"].as_str();
        at.is_some_and(|p| p.starts_with(&pod)) && r["state"] == "ACTIVE"
    };
    Ok(all.into_iter().filter(of).collect())
}

/// Are there any, and are all of them in this mode?
pub fn are_on(rows: &[Value], mode: &str) -> bool {
    let on = |r: &Value| r["mode"].as_str().is_some_and(|m| m.starts_with(mode));
    !rows.is_empty() && rows.iter().all(on)
}

/// A request for a certificate as nodes make them.
pub fn certificate_request(name: &str, pem: &str) -> String {
    json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": STANDARD.encode(pem), "signerName": "underpass.io/node",
            "usages": ["digital signature", "server auth", "client auth"],
        },
    })
    .to_string()
}
