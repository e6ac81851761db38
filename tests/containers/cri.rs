//! A client of the container runtime interface (CRI, `runtime.v1`), as the kubelet is one: the few calls and fields that
//! pods need. Field numbers are those of `api.proto` of k8s.io/cri-api.

use anyhow::{Context, Result};
use prost::Message;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};

/// Longest call: a container starts, or a program in it ends.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, PartialEq, Message)]
pub struct RunPod {
    #[prost(message, optional, tag = "1")]
    pub config: Option<PodConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodMetadata>,
    #[prost(string, tag = "2")]
    pub hostname: String,
    #[prost(string, tag = "3")]
    pub logs: String,
    #[prost(btree_map = "string, string", tag = "7")]
    pub annotations: BTreeMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPod>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxPod {
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub security: Option<PodSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodSecurity {
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<Namespaces>,
}

/// 0: the pod's own; 2: the node's.
#[derive(Clone, PartialEq, Message)]
pub struct Namespaces {
    #[prost(int32, tag = "1")]
    pub network: i32,
    #[prost(int32, tag = "2")]
    pub pid: i32,
    #[prost(int32, tag = "3")]
    pub ipc: i32,
}

/// The answers that name what was made.
#[derive(Clone, PartialEq, Message)]
pub struct Id {
    #[prost(string, tag = "1")]
    pub id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct CreateContainer {
    #[prost(string, tag = "1")]
    pub pod: String,
    #[prost(message, optional, tag = "2")]
    pub config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub pod_config: Option<PodConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<Id>,
    #[prost(message, optional, tag = "2")]
    pub image: Option<Id>,
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub env: Vec<Variable>,
    #[prost(message, repeated, tag = "7")]
    pub mounts: Vec<ContainerMount>,
    #[prost(string, tag = "11")]
    pub log: String,
    #[prost(message, optional, tag = "15")]
    pub linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Variable {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerMount {
    #[prost(string, tag = "1")]
    pub container: String,
    #[prost(string, tag = "2")]
    pub host: String,
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    pub security: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerSecurity {
    #[prost(message, optional, tag = "1")]
    pub capabilities: Option<Capabilities>,
    #[prost(message, optional, tag = "3")]
    pub namespaces: Option<Namespaces>,
    #[prost(message, optional, tag = "5")]
    pub user: Option<Int64>,
    #[prost(bool, tag = "7")]
    pub read_only_root: bool,
    #[prost(bool, tag = "11")]
    pub no_new_privileges: bool,
    /// 0: the runtime's default.
    #[prost(message, optional, tag = "15")]
    pub seccomp: Option<Profile>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Capabilities {
    #[prost(string, repeated, tag = "2")]
    pub drop: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Int64 {
    #[prost(int64, tag = "1")]
    pub value: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Profile {
    #[prost(int32, tag = "1")]
    pub kind: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Exec {
    #[prost(string, tag = "1")]
    pub container: String,
    #[prost(string, repeated, tag = "2")]
    pub command: Vec<String>,
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Said {
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodStatus {
    #[prost(message, optional, tag = "1")]
    pub status: Option<PodFacts>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodFacts {
    #[prost(message, optional, tag = "5")]
    pub network: Option<Id>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Conditions {
    #[prost(message, optional, tag = "1")]
    pub status: Option<RuntimeStatus>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    pub conditions: Vec<Condition>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Condition {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(bool, tag = "2")]
    pub is: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct Nothing {}

/// A connection to the runtime.
pub struct Cri {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

impl Cri {
    /// To its socket. (Connects with the first call, and again when the runtime was restarted.)
    pub fn at(socket: &Path) -> Result<Cri> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let at = Endpoint::from_shared(format!("unix:{}", socket.display()))?;
        let channel = runtime.block_on(async { at.connect_lazy() });
        Ok(Cri { runtime, channel })
    }

    pub fn call<A, B>(&self, method: &str, argument: A) -> Result<B>
    where
        A: Message + Send + Sync + 'static,
        B: Message + Default + Send + Sync + 'static,
    {
        let path: PathAndQuery = format!("/runtime.v1.RuntimeService/{method}").parse()?;
        let call = async {
            let mut grpc = Grpc::new(self.channel.clone());
            grpc.ready().await?;
            let codec = tonic_prost::ProstCodec::<A, B>::default();
            let said = grpc
                .unary(tonic::Request::new(argument), path, codec)
                .await?;
            anyhow::Ok(said.into_inner())
        };
        let timed = async { tokio::time::timeout(LIMIT, call).await };
        self.runtime
            .block_on(timed)
            .context("no answer")?
            .with_context(|| method.to_owned())
    }
}
