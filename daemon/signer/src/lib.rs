//! Signs the certificates of a Kubernetes cluster's nodes.
//!
//! A node's daemon asks by a `CertificateSigningRequest` whose signer is [`SIGNER`]. Who asks is known from the API server,
//! which writes the account and, for a token that is bound to a pod (projected into it), the pod into the request. The
//! certificate is for the node on which the API says that pod runs, and for no other ([`judge`]).
//!
//! The CA is kept in a Secret, the certificates by which others know it in a ConfigMap. It is replaced in time: the next one
//! is made known before it signs ([`authority`]). Several of these programs may run: the Secret's version decides.

#![warn(unreachable_pub)]
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

mod authority;
pub mod judge;
mod keep;

use authority::Kept;
use futures_util::StreamExt;
use judge::Asker;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::ByteString;
use kube::api::PostParams;
use kube::runtime::watcher::{self, watcher};
use kube::runtime::WatchStreamExt;
use kube::{Api, Client, ResourceExt};
use std::pin::pin;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::signal::unix::{signal, SignalKind};
use underpass_certificates::{Authority, Request};
pub use underpass_kube::SIGNER;

/// How long a node's certificate lasts.
const LIFE: time::Duration = time::Duration::hours(24);
/// How often the CA is looked after.
const TICK: Duration = Duration::from_secs(300);
/// Pause after something has failed.
const AGAIN: Duration = Duration::from_secs(5);

/// Where things are in the API.
#[derive(Clone, Debug)]
pub struct Options {
    /// Namespace of all that follows; empty: this pod's.
    pub namespace: String,
    /// Secret in which the CA is kept.
    pub secret: String,
    /// ConfigMap with the certificates of CAs to trust, as `ca.crt`.
    pub config_map: String,
    /// Service account of the nodes' daemons.
    pub account: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("Kubernetes API: {0}")]
    Api(#[from] kube::Error),
    #[error("{0}")]
    Certificate(#[from] underpass_certificates::Error),
    #[error("Kubernetes API: {0}")]
    Config(#[from] kube::config::InferConfigError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Signs, for ever. `Err`: it could not begin.
pub fn run(options: Options) -> Result<(), Error> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    rt.block_on(async {
        let client = Client::try_default().await?;
        let mut options = options;
        if options.namespace.is_empty() {
            options.namespace = client.default_namespace().to_owned();
        }
        // (In a container it is the first process, which signals without a handler do nothing to. Another signer may have
        // begun, with another CA.)
        let mut term = signal(SignalKind::terminate())?;
        tokio::select! {
            () = Signer { client, options }.serve() => {}
            _ = term.recv() => tracing::info!("told to stop"),
        }
        Ok(())
    })
}

struct Signer {
    client: Client,
    options: Options,
}

impl Signer {
    async fn serve(self) {
        loop {
            let kept = match keep::tend(&self.client, &self.options, now()).await {
                Ok(kept) => kept,
                Err(e) => {
                    tracing::error!("CA: {e}");
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            };
            if let Err(e) = self.sign_for(&kept, TICK).await {
                tracing::error!("{e}");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    /// Signs what is asked for by this CA, for this time.
    async fn sign_for(&self, kept: &Kept, time: Duration) -> Result<(), Error> {
        let authority = Authority::load(&kept.current.cert, &kept.current.key)?;
        let all: Api<CertificateSigningRequest> = Api::all(self.client.clone());
        let config = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
        // (A watch begins with a list: what has failed is tried again with the next one.)
        let mut requests = pin!(watcher(all, config).default_backoff().applied_objects());
        let until = tokio::time::Instant::now() + time;
        while let Ok(next) = tokio::time::timeout_at(until, requests.next()).await {
            match next {
                None => break,
                Some(Err(e)) => tracing::warn!("Kubernetes API, requests: {e}"),
                Some(Ok(request)) => {
                    let name = request.name_any();
                    if let Err(e) = self.answer(&authority, request).await {
                        tracing::warn!("request {name}: {e}");
                    }
                }
            }
        }
        Ok(())
    }

    async fn answer(
        &self,
        authority: &Authority,
        mut request: CertificateSigningRequest,
    ) -> Result<(), Error> {
        if judge::is_answered(&request) {
            return Ok(());
        }
        let name = request.name_any();
        if !judge::is_ours(&request, &self.options) {
            // (Another release's nodes have a signer of their own.)
            tracing::debug!("request {name}: not of our daemons' account");
            return Ok(());
        }
        let verdict = match Asker::of(&request) {
            Ok(asker) => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.options.namespace);
                let pod = pods.get_opt(&asker.pod).await?;
                judge::judge(&request, &asker, pod.as_ref(), &self.options.account)
            }
            Err(why) => Err(why),
        };
        let (type_, reason, message) = match &verdict {
            Ok((node, _)) => ("Approved", "PodRunsThere", format!("for node {node}")),
            Err(why) => ("Denied", "NotThisNode", why.clone()),
        };
        match &verdict {
            Ok((node, _)) => tracing::info!("request {name}: signed for node {node}"),
            Err(why) => tracing::warn!("request {name}: denied: {why}"),
        }
        let requests: Api<CertificateSigningRequest> = Api::all(self.client.clone());
        let status = request.status.get_or_insert_default();
        let condition = CertificateSigningRequestCondition {
            type_: type_.into(),
            status: "True".into(),
            reason: Some(reason.into()),
            message: Some(message),
            ..CertificateSigningRequestCondition::default()
        };
        if !judge::is_approved(status) {
            status.conditions.get_or_insert_default().push(condition);
            request = requests
                .replace_subresource("approval", &name, &PostParams::default(), &request)
                .await?;
        }
        if let Ok((node, key)) = verdict {
            self.issue(&requests, request, authority, (node, key))
                .await?;
        }
        Ok(())
    }

    async fn issue(
        &self,
        requests: &Api<CertificateSigningRequest>,
        mut request: CertificateSigningRequest,
        authority: &Authority,
        (node, key): (String, Request),
    ) -> Result<(), Error> {
        let cert = authority.sign(key, &node, LIFE, now())?;
        let name = request.name_any();
        request.status.get_or_insert_default().certificate = Some(ByteString(cert.into_bytes()));
        requests
            .replace_status(&name, &PostParams::default(), &request)
            .await?;
        Ok(())
    }
}

fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}
