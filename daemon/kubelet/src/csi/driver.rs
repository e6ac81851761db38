//! What the kubelet asks, and what it is answered.

use super::messages::{
    Bool, DriverInfo, Empty, NodeInfo, PluginInfo, Probed, Publish, RegistrationStatus, Unpublish,
};
use super::mounts::{Error, Mounts, Target};
use super::CsiConfig;
use crate::grpc::{unary, unknown, Answer, Answers};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use tokio::sync::Mutex;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::Status;

/// The driver's name, in pods' volumes and in the cluster's list of drivers.
pub const NAME: &str = "csi.underpass.io";
/// What the kubelet calls plugins of this kind.
const KIND: &str = "CSIPlugin";
/// Of CSI: what a driver must do was settled with it.
const VERSION: &str = "1.0.0";

/// Keys of a volume's context.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
const NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
const POD: &str = "csi.storage.k8s.io/pod.name";
const UID: &str = "csi.storage.k8s.io/pod.uid";

/// The driver of this node.
#[derive(Debug)]
pub struct Driver {
    kubelet: PathBuf,
    node: String,
    /// One at a time: two calls about one volume may cross.
    mounts: Mutex<Mounts>,
    registered: AtomicBool,
}

impl Driver {
    pub(crate) fn new(config: &CsiConfig, dir: PathBuf, node: String) -> Self {
        Driver {
            kubelet: config.kubelet.clone(),
            node,
            mounts: Mutex::new(Mounts {
                namespace: config.namespace.clone(),
                kubelet: config.kubelet.clone(),
                source: dir,
            }),
            registered: AtomicBool::new(false),
        }
    }

    /// Has the kubelet registered it? (Never unregistered: a kubelet that is restarted asks again.)
    pub fn is_registered(&self) -> bool {
        self.registered.load(Relaxed) // (orders nothing: it is only shown)
    }

    /// The driver's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.kubelet.join("plugins").join(NAME).join("csi.sock")
    }

    /// The one by which the kubelet finds it.
    pub(crate) fn registration(&self) -> PathBuf {
        let name = format!("{NAME}-reg.sock");
        self.kubelet.join("plugins_registry").join(name)
    }

    pub(crate) fn plugin_info(&self) -> PluginInfo {
        PluginInfo {
            kind: KIND.into(),
            name: NAME.into(),
            endpoint: self.socket().to_string_lossy().into_owned(),
            versions: vec![VERSION.into()],
        }
    }

    pub(crate) fn registration_status(&self, status: &RegistrationStatus) -> Empty {
        self.registered.store(status.registered, Relaxed); // (as above)
        match status.registered {
            true => tracing::info!("registered with the kubelet as the CSI driver {NAME}"),
            false => tracing::error!("the kubelet does not register {NAME}: {}", status.error),
        }
        Empty {}
    }

    pub(crate) fn driver_info() -> DriverInfo {
        DriverInfo {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    pub(crate) fn probe() -> Probed {
        Probed {
            ready: Some(Bool { value: true }),
        }
    }

    pub(crate) fn node_info(&self) -> Result<NodeInfo, Status> {
        match self.node.as_str() {
            "" => Err(Status::failed_precondition("the node's name is not known")),
            node => Ok(NodeInfo { node: node.into() }),
        }
    }

    pub(crate) async fn publish(&self, volume: Publish) -> Result<Empty, Status> {
        let said = |key| volume.context.get(key).map(String::as_str).unwrap_or("");
        if volume.volume.is_empty() {
            return Err(Status::invalid_argument("the volume has no id"));
        }
        if said(EPHEMERAL) != "true" {
            let why = format!("{NAME} has ephemeral volumes only: they are written inside a pod");
            return Err(Status::invalid_argument(why));
        }
        // The kubelet then has the runtime mount it so in each container. What is read-only at the target alone is not so in a
        // container: newer runtimes mount there as the pod says, and the shim is all pods'.
        if !volume.readonly {
            let why = "the volume is read-only: `csi: {driver: csi.underpass.io, readOnly: true}`";
            return Err(Status::invalid_argument(why));
        }
        match &volume.capability {
            Some(c) if c.block.is_some() => {
                return Err(Status::invalid_argument("it is no block device"));
            }
            Some(_) => {}
            None => return Err(Status::invalid_argument("the volume has no capability")),
        }
        let done = self.in_the_node(&volume.target, Mounts::publish).await;
        let (namespace, pod, uid) = (said(NAMESPACE), said(POD), said(UID));
        match done {
            Ok(()) => {
                tracing::debug!(namespace, pod, uid, "volume mounted");
                Ok(Empty {})
            }
            Err(e) => {
                // (The kubelet tries again, and shows it as an event of the pod.)
                tracing::warn!(namespace, pod, uid, "volume not mounted: {e}");
                Err(e.into())
            }
        }
    }

    pub(crate) async fn unpublish(&self, volume: Unpublish) -> Result<Empty, Status> {
        if volume.volume.is_empty() {
            return Err(Status::invalid_argument("the volume has no id"));
        }
        let done = self.in_the_node(&volume.target, Mounts::unpublish).await;
        if let Err(e) = &done {
            tracing::warn!(target = volume.target, "volume not unmounted: {e}");
        }
        done.map(|()| Empty {}).map_err(Status::from)
    }

    async fn in_the_node(
        &self,
        target: &str,
        act: fn(&Mounts, &Target) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mounts = self.mounts.lock().await;
        let target = mounts.target(target)?;
        mounts.in_the_node(move |m| act(m, &target)).await
    }
}

impl Answers for Driver {
    fn answer(self: Arc<Self>, call: Request<Body>) -> Answer {
        Box::pin(answer(self, call))
    }
}

/// Both sockets answer all calls.
async fn answer(driver: Arc<Driver>, call: Request<Body>) -> Response<Body> {
    let path = call.uri().path().to_owned();
    match path.as_str() {
        "/pluginregistration.Registration/GetInfo" => {
            unary(call, |_: Empty| async move { Ok(driver.plugin_info()) }).await
        }
        "/pluginregistration.Registration/NotifyRegistrationStatus" => {
            unary(call, |s| async move { Ok(driver.registration_status(&s)) }).await
        }
        "/csi.v1.Identity/GetPluginInfo" => {
            unary(call, |_: Empty| async { Ok(Driver::driver_info()) }).await
        }
        "/csi.v1.Identity/Probe" => unary(call, |_: Empty| async { Ok(Driver::probe()) }).await,
        // None of those that are optional.
        "/csi.v1.Identity/GetPluginCapabilities" | "/csi.v1.Node/NodeGetCapabilities" => {
            unary(call, |_: Empty| async { Ok(Empty {}) }).await
        }
        "/csi.v1.Node/NodeGetInfo" => {
            unary(call, |_: Empty| async move { driver.node_info() }).await
        }
        "/csi.v1.Node/NodePublishVolume" => {
            unary(call, |v| async move { driver.publish(v).await }).await
        }
        "/csi.v1.Node/NodeUnpublishVolume" => {
            unary(call, |v| async move { driver.unpublish(v).await }).await
        }
        _ => unknown(&path),
    }
}

impl From<Error> for Status {
    fn from(e: Error) -> Self {
        let why = e.to_string();
        match e {
            Error::Elsewhere(_) => Status::invalid_argument(why),
            // (The kubelet tries all of them again.)
            Error::Source(..) => Status::unavailable(why),
            Error::Namespace(..) | Error::Target(..) | Error::Thread(_) => Status::internal(why),
        }
    }
}
