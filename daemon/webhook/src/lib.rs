//! A mutating webhook, for clusters whose container runtimes have no NRI: pods that ask for the shim get, when they are
//! created, a volume of the CSI driver (crate `underpass_kubelet`) and the variables that a node's daemon would give their
//! containers by NRI. Who asks, and what it gets, is the same rule (crate `underpass_pods`).
//!
//! [`review`] answers the API server; [`server`] speaks HTTPS; [`keys`] makes what that needs, and [`rotate`] keeps it in a
//! Secret and tells the API server whom to trust; [`seen`] knows the cluster's namespaces. [`run`] is all of it.
//!
//! **What it cannot see**: variables that the image sets, or that come from a ConfigMap or a Secret as a whole (`envFrom`).
//! An LD_PRELOAD of theirs is replaced by the pod's, which is the shim alone. (By NRI, the shim comes behind it.)

#![warn(missing_docs, unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

pub mod keys;
mod pod;
pub mod review;
pub mod rotate;
pub mod seen;
pub mod server;

pub use pod::Lookup;

use serde::{Deserialize, Serialize};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{signal, SignalKind};
use underpass_pods::policy::PodsConfig;

/// How long it goes on after it was told to end: until no API server calls this pod any more.
const LEAVING: Duration = Duration::from_secs(5);

/// Where the webhook listens, and what is its own in the cluster.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebhookConfig {
    /// Address and port.
    pub listen: String,
    /// The namespace that service and Secret are in.
    pub namespace: String,
    /// The service by which the API server reaches it.
    pub service: String,
    /// The Secret that its key is kept in; all replicas have the same.
    pub secret: String,
    /// The MutatingWebhookConfiguration in which the API server is told whom to trust.
    pub configuration: String,
}

impl Default for WebhookConfig {
    fn default() -> Self {
        WebhookConfig {
            listen: "[::]:8443".into(),
            namespace: "underpass-system".into(),
            service: "underpass-webhook".into(),
            secret: "underpass-webhook".into(),
            configuration: "underpass-webhook".into(),
        }
    }
}

impl WebhookConfig {
    /// What the API server calls it: the name that its certificate has.
    pub fn host(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }
}

/// Why the webhook does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No socket, no thread.
    #[error("{0}: {1}")]
    Io(String, io::Error),
    /// This is not a pod that may use the API.
    #[error("Kubernetes API: {0}")]
    Api(#[from] kube::Error),
}

/// Serves until the process is told to end (SIGTERM, SIGINT). `pods`: who gets the shim, as in the daemons' configuration.
pub fn run(config: WebhookConfig, pods: PodsConfig) -> Result<(), Error> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::Io("runtime".into(), e))?;
    rt.block_on(async {
        // (In a container it is the first process, which signals without a handler do nothing to.)
        let signals = signal(SignalKind::terminate()).and_then(|t| {
            let i = signal(SignalKind::interrupt())?;
            Ok((t, i))
        });
        let (mut terminate, mut interrupt) = signals.map_err(|e| Error::Io("signals".into(), e))?;
        let listener = listen(&config.listen)
            .await
            .map_err(|e| Error::Io(config.listen.clone(), e))?;
        let tls = Arc::new(server::Tls::default());
        let seen = Arc::new(seen::Seen::default());
        let client = underpass_kube::client(vec![seen.watching()]).await?;
        let hook = Arc::new(server::Hook {
            pods,
            seen: seen.clone(),
        });
        tokio::select! {
            () = seen.follow(client.clone()) => {}
            () = rotate::for_ever(&client, &config, &tls) => {}
            () = server::serve(listener, tls.clone(), hook) => {}
            () = async {
                tokio::select! {
                    _ = terminate.recv() => tokio::time::sleep(LEAVING).await,
                    _ = interrupt.recv() => {}
                }
            } => {}
        }
        Ok(())
    })
}

/// (Where there is no IPv6, all of IPv4.)
async fn listen(at: &str) -> io::Result<TcpListener> {
    match (TcpListener::bind(at).await, at.parse::<SocketAddr>()) {
        (Err(_), Ok(a)) if a.is_ipv6() && a.ip().is_unspecified() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, a.port())).await
        }
        (listener, _) => listener,
    }
}
