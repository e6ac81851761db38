//! Messages of CSI and of the kubelet's registration, as far as a driver of ephemeral volumes needs them; all other fields
//! are skipped. Field numbers are those of the published `.proto` files (see the crate).

pub use crate::grpc::Empty;
use prost::Message;
use std::collections::BTreeMap;

/// What the kubelet is told of a plugin.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginInfo {
    /// `CSIPlugin`.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The driver's.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The path of its socket, as the kubelet sees it.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// Of CSI.
    #[prost(string, repeated, tag = "4")]
    pub versions: Vec<String>,
}

/// What has become of the registration.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    /// Has the kubelet registered the plugin?
    #[prost(bool, tag = "1")]
    pub registered: bool,
    /// Why not.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Who the driver is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DriverInfo {
    /// As in volumes that name it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Of the driver.
    #[prost(string, tag = "2")]
    pub version: String,
}

/// Does the driver work?
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Probed {
    /// `google.protobuf.BoolValue`.
    #[prost(message, optional, tag = "1")]
    pub ready: Option<Bool>,
}

/// `google.protobuf.BoolValue`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Bool {
    /// What it says.
    #[prost(bool, tag = "1")]
    pub value: bool,
}

/// The node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeInfo {
    /// How the driver knows it.
    #[prost(string, tag = "1")]
    pub node: String,
}

/// A volume is to be mounted for a pod.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Publish {
    /// The kubelet makes one up for an ephemeral volume.
    #[prost(string, tag = "1")]
    pub volume: String,
    /// Where, as the kubelet sees it.
    #[prost(string, tag = "4")]
    pub target: String,
    /// As what.
    #[prost(message, optional, tag = "5")]
    pub capability: Option<Capability>,
    /// Not to be written to.
    #[prost(bool, tag = "6")]
    pub readonly: bool,
    /// Attributes of the volume, and who the pod is.
    #[prost(btree_map = "string, string", tag = "8")]
    pub context: BTreeMap<String, String>,
}

/// How a volume is used.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Capability {
    /// As a block device.
    #[prost(message, optional, tag = "1")]
    pub block: Option<Empty>,
    /// As a file system.
    #[prost(message, optional, tag = "2")]
    pub mount: Option<Empty>,
}

/// A volume is not needed any more.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Unpublish {
    /// As in [`Publish`].
    #[prost(string, tag = "1")]
    pub volume: String,
    /// As in [`Publish`].
    #[prost(string, tag = "2")]
    pub target: String,
}
