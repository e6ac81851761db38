//! Messages of the kubelet's device plugins, as far as they are used; all other fields are skipped. Field numbers are those of
//! `pkg/apis/deviceplugin/v1beta1/api.proto` of k8s.io/kubelet.

pub use crate::grpc::Empty;
use prost::Message;

/// A plugin tells the kubelet of itself.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Register {
    /// `v1beta1`.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Name of the plugin's socket in the kubelet's directory.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// What pods ask for.
    #[prost(string, tag = "3")]
    pub resource: String,
}

/// All devices of a plugin.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Devices {
    /// In any order.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// One of them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// By which the kubelet names it.
    #[prost(string, tag = "1")]
    pub id: String,
    /// `Healthy` or `Unhealthy`.
    #[prost(string, tag = "2")]
    pub health: String,
}

/// Devices are given to containers.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Allocate {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Asked>,
}

/// What a container gets.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Asked {
    /// Ids of devices.
    #[prost(string, repeated, tag = "1")]
    pub devices: Vec<String>,
}

/// What the runtime is to do for them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Allocated {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Given>,
}

/// What a container is given.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Given {
    /// Files of devices.
    #[prost(message, repeated, tag = "3")]
    pub files: Vec<File>,
}

/// The file of a device.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct File {
    /// Its path in the container.
    #[prost(string, tag = "1")]
    pub container: String,
    /// Its path on the node.
    #[prost(string, tag = "2")]
    pub host: String,
    /// Of `r`, `w`, `m`.
    #[prost(string, tag = "3")]
    pub permissions: String,
}
