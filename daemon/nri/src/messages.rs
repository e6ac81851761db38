//! Messages of ttrpc and of NRI, as far as a plugin that adds mounts and variables needs them; all other fields are
//! skipped. Field numbers are those of the published `.proto` files (see the crate).

use prost::Message;
use std::collections::BTreeMap;

/// A call of ttrpc.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// Full name of the service.
    #[prost(string, tag = "1")]
    pub service: String,
    /// Name of its method.
    #[prost(string, tag = "2")]
    pub method: String,
    /// The method's argument.
    #[prost(bytes = "bytes", tag = "3")]
    pub payload: bytes::Bytes,
}

/// The answer to a call of ttrpc.
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    /// Absent: the call succeeded.
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    /// The method's result.
    #[prost(bytes = "bytes", tag = "2")]
    pub payload: bytes::Bytes,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// A code of gRPC; 0: success.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// For people.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// Code of gRPC for a method that does not exist here.
pub const UNIMPLEMENTED: i32 = 12;

/// What a plugin says of itself.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterPlugin {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Two digits: plugins are called in ascending order.
    #[prost(string, tag = "2")]
    pub index: String,
}

/// What the runtime says of itself.
#[derive(Clone, PartialEq, Message)]
pub struct Configure {
    /// `containerd` or `cri-o`.
    #[prost(string, tag = "2")]
    pub runtime: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub version: String,
    /// Milliseconds that it waits for an answer; 0: it does not say.
    #[prost(int64, tag = "5")]
    pub request_timeout: i64,
}

/// Events that a plugin wants to be told: bit `n - 1` for [`event`] `n`.
#[derive(Clone, PartialEq, Message)]
pub struct Configured {
    /// The bits.
    #[prost(int32, tag = "2")]
    pub events: i32,
}

/// Numbers of events.
pub mod event {
    /// A pod's sandbox has been made.
    pub const RUN_POD_SANDBOX: i32 = 1;
    /// A pod is gone.
    pub const REMOVE_POD_SANDBOX: i32 = 3;
    /// A container is about to be made.
    pub const CREATE_CONTAINER: i32 = 4;
    /// A container is gone.
    pub const REMOVE_CONTAINER: i32 = 11;
    /// Its processes have ended, or are about to.
    pub const STOP_CONTAINER: i32 = 10;
}

/// All pods and containers that the runtime has, possibly in several messages.
#[derive(Clone, PartialEq, Message)]
pub struct Synchronize {
    /// Pods.
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<PodSandbox>,
    /// Their containers.
    #[prost(message, repeated, tag = "2")]
    pub containers: Vec<Container>,
    /// Is this not all yet?
    #[prost(bool, tag = "3")]
    pub more: bool,
}

/// The answer to it.
#[derive(Clone, PartialEq, Message)]
pub struct Synchronized {
    /// As in the call: the plugin takes several messages.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

/// A container is about to be made.
#[derive(Clone, PartialEq, Message)]
pub struct CreateContainer {
    /// Its pod.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    /// As pod and image have it, and plugins before this one.
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
}

/// The answer to it.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerCreated {
    /// What is to be different; absent: nothing.
    #[prost(message, optional, tag = "1")]
    pub adjust: Option<Adjustment>,
}

/// Something has happened to a pod or to a container.
#[derive(Clone, PartialEq, Message)]
pub struct StateChange {
    /// A number of [`event`].
    #[prost(int32, tag = "1")]
    pub event: i32,
    /// The pod.
    #[prost(message, optional, tag = "2")]
    pub pod: Option<PodSandbox>,
    /// The container, if it is about one.
    #[prost(message, optional, tag = "3")]
    pub container: Option<Container>,
}

/// The argument of methods about one pod or container (newer runtimes have them in place of [`StateChange`]).
#[derive(Clone, PartialEq, Message)]
pub struct About {
    /// The pod.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    /// The container, if it is about one.
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
}

/// A pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandbox {
    /// Of the sandbox, as the runtime has it.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Of the pod.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Of the pod, as the cluster has it.
    #[prost(string, tag = "3")]
    pub uid: String,
    /// Kubernetes' namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// The pod's.
    #[prost(btree_map = "string, string", tag = "6")]
    pub annotations: BTreeMap<String, String>,
    /// What runs its containers; empty: the default.
    #[prost(string, tag = "7")]
    pub handler: String,
}

/// A container.
#[derive(Clone, PartialEq, Message)]
pub struct Container {
    /// 64 hexadecimal digits, also in the name of its cgroup.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`PodSandbox::id`].
    #[prost(string, tag = "2")]
    pub pod: String,
    /// In its pod.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Variables, `NAME=value`.
    #[prost(string, repeated, tag = "8")]
    pub env: Vec<String>,
    /// Mounts.
    #[prost(message, repeated, tag = "9")]
    pub mounts: Vec<Mount>,
}

/// A mount of a container.
#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    /// Where the container has it.
    #[prost(string, tag = "1")]
    pub destination: String,
    /// `bind`, or a file system.
    #[prost(string, tag = "2")]
    pub kind: String,
    /// Where the node has it.
    #[prost(string, tag = "3")]
    pub source: String,
    /// As for `mount(8)`.
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// What is to be different in a container.
#[derive(Clone, PartialEq, Message)]
pub struct Adjustment {
    /// More mounts.
    #[prost(message, repeated, tag = "3")]
    pub mounts: Vec<Mount>,
    /// Variables to set; a name with `-` before it removes one.
    #[prost(message, repeated, tag = "4")]
    pub env: Vec<KeyValue>,
}

/// A variable.
#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value.
    #[prost(string, tag = "2")]
    pub value: String,
}
