//! This node's certificate: asked for by a `CertificateSigningRequest`, renewed in time, and kept in files where the daemon
//! reads it.

use super::{Certificates, Nodes, CA_FILE, SIGNER, USAGES};
use futures_util::StreamExt;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::ByteString;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::wait::await_condition;
use kube::runtime::watcher::{self, watcher};
use kube::runtime::WatchStreamExt;
use kube::{Api, Client, ResourceExt};
use std::fs;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use underpass_admin::certificate::{facts_of_all, facts_of_pem, is_older, Facts};
use underpass_certificates::Request;
use underpass_pods::files::put_text;

/// How long an answer is waited for.
const ANSWER: Duration = Duration::from_secs(60);
/// Pause before another try: at first, and the longest.
const AGAIN: Duration = Duration::from_secs(2);
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// How often the certificate's end is looked at.
const LOOK: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("Kubernetes API: {0}")]
    Api(#[from] kube::Error),
    #[error("Kubernetes API: {0}")]
    Wait(#[from] kube::runtime::wait::Error),
    #[error("{0}")]
    Certificate(#[from] underpass_certificates::Error),
    #[error("no answer within {} s: does the signer run?", ANSWER.as_secs())]
    NoAnswer,
    #[error("refused: {0}")]
    Refused(String),
    #[error("the request was removed")]
    Gone,
    #[error("the answer is signed by nobody who is trusted, or not valid now: does this node's clock go right?")]
    Useless,
    #[error("the answer is no certificate")]
    NoCertificate,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// For ever: sees to it that there is a certificate of `node` that the others trust.
pub(super) async fn keep(client: Client, node: &str, to: &Certificates, nodes: Option<&Nodes>) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let config = watcher::Config::default().fields(&format!("metadata.name={}", to.config_map));
    let mut published = pin!(watcher(maps, config).default_backoff().applied_objects());
    let mut trusted = fs::read_to_string(&to.ca).unwrap_or_default();
    let (mut pause, mut next) = (AGAIN, tokio::time::Instant::now());
    let mut asked = None;
    let since = || nodes.and_then(|n| n.find(node)).map_or(0, |n| n.since);
    loop {
        tokio::select! {
            map = published.next() => match map {
                Some(Ok(map)) => match take_in(&map, to, &mut trusted) {
                    Ok(true) => next = tokio::time::Instant::now(),
                    Ok(false) => {}
                    Err(e) => tracing::error!("{}: {e}", to.ca.display()),
                },
                Some(Err(e)) => tracing::warn!("Kubernetes API, {}: {e}", to.config_map),
                None => return,
            },
            () = tokio::time::sleep_until(next) => {
                next += match renew(&client, (node, since()), to, &trusted, &mut asked).await {
                    Ok(()) => {
                        pause = AGAIN;
                        LOOK
                    }
                    Err(e) => {
                        tracing::error!("no certificate for node {node}: {e}");
                        pause = (pause * 2).min(AGAIN_MAX);
                        pause
                    }
                };
                next = next.max(tokio::time::Instant::now());
            }
        }
    }
}

/// Whom to trust; `true`: that is something else than before.
fn take_in(map: &ConfigMap, to: &Certificates, trusted: &mut String) -> Result<bool, Error> {
    let text = map.data.as_ref().and_then(|d| d.get(CA_FILE));
    let Some(text) = text.filter(|t| *t != trusted && !facts_of_all(t).is_empty()) else {
        return Ok(false);
    };
    put(&to.ca, text, 0o644)?;
    trusted.clone_from(text);
    Ok(true)
}

/// Is it of this node, of somebody who is trusted, and for long enough? A third of its life is left for trying.
fn lasts(f: &Facts, node: &str, trusted: &str, now: i64) -> bool {
    f.names.iter().any(|n| n == node)
        && now >= f.not_before
        && now < f.not_after - f.life_s() / 3
        && facts_of_all(trusted)
            .iter()
            .any(|ca| ca.subject == f.issuer)
}

/// A request without an answer, and its key.
struct Asked {
    name: String,
    key: String,
}

/// Asks for a certificate if it is time, and goes on waiting for one that was asked for before.
async fn renew(
    client: &Client,
    (node, since): (&str, i64),
    to: &Certificates,
    trusted: &str,
    asked: &mut Option<Asked>,
) -> Result<(), Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
    let have = fs::read_to_string(&to.cert).ok();
    let have = have.and_then(|text| facts_of_pem(&text));
    let fits = have.is_some_and(|f| lasts(&f, node, trusted, now) && !is_older(&f, since));
    if trusted.is_empty() || (fits && to.key.exists()) {
        return Ok(()); // (nobody is trusted yet: the signer has not begun)
    }
    let a = match asked.take() {
        Some(a) => a,
        None => ask(client, node).await?,
    };
    let a = asked.insert(a);
    let cert = wait(client, &a.name).await;
    if matches!(cert, Err(Error::NoAnswer | Error::Api(_) | Error::Wait(_))) {
        return cert.map(drop); // it may still be answered
    }
    let key = std::mem::take(&mut a.key);
    *asked = None;
    let cert = cert?;
    let facts = facts_of_pem(&cert).ok_or(Error::NoCertificate)?;
    if !lasts(&facts, node, trusted, now) {
        return Err(Error::Useless);
    }
    // The key first: whoever finds a certificate finds its key.
    put(&to.key, &key, 0o600)?;
    put(&to.cert, &cert, 0o644)?;
    tracing::info!("a certificate for node {node}");
    Ok(())
}

async fn ask(client: &Client, node: &str) -> Result<Asked, Error> {
    let (request, key) = Request::make(node)?;
    let all: Api<CertificateSigningRequest> = Api::all(client.clone());
    let request = CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some("underpass-".into()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.into_bytes()),
            signer_name: SIGNER.into(),
            usages: Some(USAGES.map(Into::into).into()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let made = all.create(&PostParams::default(), &request).await?;
    let name = made.name_any();
    Ok(Asked { name, key })
}

async fn wait(client: &Client, name: &str) -> Result<String, Error> {
    let all: Api<CertificateSigningRequest> = Api::all(client.clone());
    let answered = |r: Option<&CertificateSigningRequest>| r.is_none_or(|r| answer(r).is_some());
    let waited = tokio::time::timeout(ANSWER, await_condition(all, name, answered)).await;
    let request = waited.map_err(|_| Error::NoAnswer)??;
    let request = request.ok_or(Error::Gone)?;
    answer(&request).unwrap_or(Err(Error::NoAnswer))
}

fn answer(r: &CertificateSigningRequest) -> Option<Result<String, Error>> {
    let status = r.status.as_ref()?;
    let mut all = status.conditions.iter().flatten();
    if let Some(c) = all.find(|c| matches!(c.type_.as_str(), "Denied" | "Failed")) {
        let why = c.message.clone().unwrap_or_default();
        return Some(Err(Error::Refused(why)));
    }
    let cert = status.certificate.as_ref().filter(|c| !c.0.is_empty())?;
    Some(String::from_utf8(cert.0.clone()).map_err(|_| Error::NoCertificate))
}

/// Replaces a file, at once and whole, and makes its directory if need be.
fn put(to: &Path, text: &str, mode: u32) -> io::Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
    put_text(to, text.as_bytes(), mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn fact(names: &[&str], issuer: &str, from: i64, to: i64) -> Facts {
        Facts {
            subject: "s".into(),
            issuer: issuer.into(),
            ca: false,
            public_key: Vec::new(),
            names: names.iter().map(|n| (*n).to_owned()).collect(),
            not_before: from,
            not_after: to,
        }
    }

    #[test]
    fn when_a_certificate_is_renewed() {
        let now = time::OffsetDateTime::now_utc();
        let life = time::Duration::days(9);
        let ca = underpass_certificates::ca("one", life, now).unwrap().cert;
        let issuer = facts_of_pem(&ca).unwrap().subject;
        let f = fact(&["a"], &issuer, 0, 90);
        assert!(lasts(&f, "a", &ca, 0) && lasts(&f, "a", &ca, 59));
        assert!(!lasts(&f, "a", &ca, 60) && !lasts(&f, "a", &ca, 91));
        assert!(!lasts(&f, "a", &ca, -1));
        assert!(!lasts(&f, "b", &ca, 1));
        // The node was made again at this second: the certificate is of a former one.
        assert!(!is_older(&f, 0) && !is_older(&f, 3660) && is_older(&f, 3661));
        // The CA was replaced, and the old one is not trusted any more.
        let other = underpass_certificates::ca("two", life, now).unwrap().cert;
        assert!(!lasts(&f, "a", &other, 1));
        assert!(lasts(&f, "a", &(other + &ca), 1));
    }

    #[test]
    fn what_is_published_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let to = Certificates {
            config_map: "ca".into(),
            ca: dir.path().join("tls/ca.crt"),
            cert: dir.path().join("tls/node.crt"),
            key: dir.path().join("tls/node.key"),
        };
        let now = time::OffsetDateTime::now_utc();
        let ca = underpass_certificates::ca("one", time::Duration::days(9), now).unwrap();
        let map = |text: &str| ConfigMap {
            data: Some([(CA_FILE.to_owned(), text.to_owned())].into()),
            ..ConfigMap::default()
        };
        let mut trusted = String::new();
        assert!(!take_in(&ConfigMap::default(), &to, &mut trusted).unwrap());
        assert!(!take_in(&map("nothing"), &to, &mut trusted).unwrap());
        assert!(take_in(&map(&ca.cert), &to, &mut trusted).unwrap());
        assert!(!take_in(&map(&ca.cert), &to, &mut trusted).unwrap());
        // What cannot be read does not replace what can.
        assert!(!take_in(&map(""), &to, &mut trusted).unwrap());
        assert_eq!(fs::read_to_string(&to.ca).unwrap(), ca.cert);
        put(&to.key, &ca.key, 0o600).unwrap();
        put(&to.key, &ca.key, 0o600).unwrap();
        let mode = fs::metadata(&to.key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
