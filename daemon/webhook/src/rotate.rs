//! Keeps the keys in a Secret, renews them, and tells the API server whom to trust.
//!
//! Any replica may renew them: the Secret is written only as the version that was read, and whoever comes second takes what
//! is there. So is a Secret that somebody has emptied: it is filled again.

use crate::keys::Keys;
use crate::server::Tls;
use crate::WebhookConfig;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::ByteString;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::Client;
use serde_json::{json, Value};
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;

/// How often it looks whether all is as it should be.
const ROUND: Duration = Duration::from_secs(60);
/// The same where it was not.
const AGAIN: Duration = Duration::from_secs(5);
/// Until API servers have heard of a new CA.
const SETTLE: Duration = Duration::from_secs(10);
/// Times that others may have been faster, in one round.
const TRIES: usize = 5;

/// What did not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API, or what it lets us do.
    #[error("Kubernetes API, {0}: {1}")]
    Api(&'static str, kube::Error),
    /// A certificate.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] underpass_certificates::Error),
    /// The Secret changes all the time.
    #[error("the Secret is written by somebody else again and again")]
    Contended,
}

/// For ever: what is served is what the Secret has.
pub async fn for_ever(client: &Client, config: &WebhookConfig, tls: &Arc<Tls>) {
    let mut said = String::new();
    loop {
        let why = match round(client, config, OffsetDateTime::now_utc()).await {
            Ok((keys, told)) => {
                // (A first certificate need not wait: there is no other to be used meanwhile.)
                if told && tls.is_ready() {
                    tokio::time::sleep(SETTLE).await;
                }
                match tls.set(&keys) {
                    Ok(true) => tracing::info!("serving with a new certificate"),
                    Ok(false) => {}
                    Err(e) => tracing::error!("the Secret's key: {e}"),
                }
                String::new()
            }
            Err(e) => e.to_string(),
        };
        if why != said && !why.is_empty() {
            tracing::error!("{why}; trying again");
        }
        tokio::time::sleep(if why.is_empty() { ROUND } else { AGAIN }).await;
        said = why;
    }
}

/// Reads the keys, makes new ones if it is time, and sees to it that the API server trusts them. Was it told something new?
pub async fn round(
    client: &Client,
    config: &WebhookConfig,
    now: OffsetDateTime,
) -> Result<(Keys, bool), Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &config.namespace);
    let mut told = false;
    for _ in 0..TRIES {
        let Some(keys) = current(&secrets, config, now).await? else {
            continue; // somebody else was faster
        };
        told |= tell(client, config, &keys.bundle).await?;
        // (Somebody may have renewed them since they were read; then the API server was told something old.)
        let again = secrets.get_opt(&config.secret).await;
        let again = again.map_err(|e| Error::Api("reading the Secret", e))?;
        if again.and_then(|s| Keys::from_data(&s.data?)).as_ref() == Some(&keys) {
            return Ok((keys, told));
        }
    }
    Err(Error::Contended)
}

/// The Secret's keys, or new ones that are in it now; `None`: it was written meanwhile.
async fn current(
    secrets: &Api<Secret>,
    config: &WebhookConfig,
    now: OffsetDateTime,
) -> Result<Option<Keys>, Error> {
    let secret = secrets.get_opt(&config.secret).await;
    let secret = secret.map_err(|e| Error::Api("reading the Secret", e))?;
    let host = config.host();
    let old = secret
        .as_ref()
        .and_then(|s| Keys::from_data(s.data.as_ref()?));
    let usable = old.clone().filter(|k| k.is_usable(&host, now));
    if let Some(keys) = usable.clone().filter(|k| !k.is_due(now)) {
        return Ok(Some(keys));
    }
    let keys = Keys::make(&host, now, old.as_ref())?;
    let written = write(secrets, config, secret, &keys).await;
    match (written, usable) {
        (Ok(()), _) => {
            tracing::info!("made a new certificate");
            Ok(Some(keys))
        }
        (Err(kube::Error::Api(s)), _) if s.code == 409 => Ok(None),
        // The old ones do for now.
        (Err(e), Some(old)) => {
            tracing::warn!("Kubernetes API, writing the Secret: {e}");
            Ok(Some(old))
        }
        (Err(e), None) => Err(Error::Api("writing the Secret", e)),
    }
}

/// Replaces the Secret as it was read (it has its version in it), or makes it.
async fn write(
    secrets: &Api<Secret>,
    config: &WebhookConfig,
    secret: Option<Secret>,
    keys: &Keys,
) -> kube::Result<()> {
    let data = Some(keys.to_data());
    let how = PostParams::default();
    match secret {
        Some(mut s) => {
            s.data = data;
            secrets.replace(&config.secret, &how, &s).await?;
        }
        None => {
            let metadata = ObjectMeta {
                name: Some(config.secret.clone()),
                ..ObjectMeta::default()
            };
            let new = Secret {
                metadata,
                data,
                ..Secret::default()
            };
            secrets.create(&how, &new).await?;
        }
    }
    Ok(())
}

/// Tells the API server whom to trust, if that is something new.
async fn tell(client: &Client, config: &WebhookConfig, bundle: &str) -> Result<bool, Error> {
    let all: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let found = all.get(&config.configuration).await;
    let found = found.map_err(|e| Error::Api("reading the webhook's configuration", e))?;
    let hooks = found.webhooks.unwrap_or_default();
    let bundle = ByteString(bundle.as_bytes().to_vec());
    let others: Vec<Value> = hooks
        .iter()
        .filter(|h| is_ours(config, h) && h.client_config.ca_bundle.as_ref() != Some(&bundle))
        .map(|h| json!({"name": h.name, "clientConfig": {"caBundle": bundle}}))
        .collect();
    if others.is_empty() {
        return Ok(false);
    }
    let patch = Patch::Strategic(json!({"webhooks": others}));
    let how = PatchParams::default();
    let done = all.patch(&config.configuration, &how, &patch).await;
    done.map_err(|e| Error::Api("writing the webhook's configuration", e))?;
    Ok(true)
}

fn is_ours(config: &WebhookConfig, hook: &MutatingWebhook) -> bool {
    let service = hook.client_config.service.as_ref();
    service.is_some_and(|s| s.name == config.service && s.namespace == config.namespace)
}

#[cfg(test)]
mod tests;
