//! The Container Storage Interface (CSI), a driver's node side, for ephemeral volumes only: the directory that containers see,
//! mounted where a pod has a volume `csi: {driver: csi.underpass.io}`. For nodes whose container runtime has no NRI. Such a
//! volume is allowed to pods that must not have a `hostPath`.
//!
//! The kubelet finds the driver by a socket in its directory of plugins, is told there where the driver listens
//! (`driver`, `messages`), and calls it before it makes a pod's containers and after they are gone
//! (`mounts`). Nothing is kept: what is mounted is what counts, also for the next daemon.
//!
//! Source: `csi.proto` of github.com/container-storage-interface/spec, version 1; `pkg/apis/pluginregistration/v1/api.proto`
//! of k8s.io/kubelet.

mod driver;
pub mod messages;
mod mounts;

use crate::grpc;
use serde::{Deserialize, Serialize};
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use driver::{Driver, NAME};

/// The daemon as a CSI driver.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct CsiConfig {
    /// The kubelet's directory (its `--root-dir`), mostly `/var/lib/kubelet`; empty: the daemon is no CSI driver.
    pub kubelet: PathBuf,
    /// The mount namespace of the node, in which kubelet and container runtime see what is mounted.
    pub namespace: PathBuf,
}

impl Default for CsiConfig {
    fn default() -> Self {
        CsiConfig {
            kubelet: PathBuf::new(),
            namespace: "/proc/1/ns/mnt".into(),
        }
    }
}

/// Starts the thread that serves the kubelet; it ends with the process. `dir`: the directory that containers see, as the
/// node's mount namespace has it. `node`: this node's name. Fails if the kubelet's directory cannot be written to.
pub fn start(config: &CsiConfig, dir: PathBuf, node: String) -> io::Result<Arc<Driver>> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let driver = Arc::new(Driver::new(config, dir, node));
    let sockets = {
        let _inside = rt.enter(); // (tokio's sockets belong to a runtime)
                                  // The driver's own first: the kubelet calls it as soon as it sees the other.
        [driver.socket(), driver.registration()]
            .map(|path| grpc::listen(&path).map_err(|e| at(&path, &e)))
    };
    let [own, registration] = sockets;
    let (own, registration) = (own?, registration?);
    let serving = driver.clone();
    let thread = std::thread::Builder::new().name("underpass-csi".into());
    thread.spawn(move || {
        rt.block_on(async {
            tokio::join!(
                grpc::serve(own, serving.clone(), pending()),
                grpc::serve(registration, serving.clone(), pending())
            )
        });
    })?;
    Ok(driver)
}

fn at(path: &std::path::Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests;
