//! HTTPS: `POST /mutate` for API servers, `GET /healthz` and `/readyz` for the kubelet.
//!
//! Anybody in the cluster may connect. Nobody is let in for long, and nobody keeps others out: requests are read in bounded
//! memory and time, and where there are too many connections, the oldest makes way.

use crate::keys::Keys;
use crate::review::{review, up_to_namespace};
use crate::seen::{Fresh, Seen};
use crate::Lookup;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{HeaderValue, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use underpass_pods::policy::PodsConfig;

/// Most of a request: what an API server accepts for an object.
const BODY_MAX: usize = 3 << 20;
/// How long TLS's handshake may take, how long the headers (also of the next request on a connection), and how long the rest:
/// API servers wait for 2 s for all of it.
const HANDSHAKE: Duration = Duration::from_secs(5);
const HEADERS: Duration = Duration::from_secs(90);
const BODY: Duration = Duration::from_secs(2);
/// Requests that are read and answered at a time.
static TURNS: Semaphore = Semaphore::const_new(4);
/// Connections at a time.
const CONNECTIONS: usize = 256;
/// Pause after a connection that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);

/// With what it is served; may be replaced at any time. Connections keep what they have.
#[derive(Default)]
pub struct Tls(Mutex<Option<(Keys, TlsAcceptor)>>);

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadKeys {
    /// Not the form.
    #[error("{0}")]
    Pem(#[from] pem::Error),
    /// Not the content.
    #[error("{0}")]
    Tls(#[from] rustls::Error),
}

impl Tls {
    /// Serves with these from now on; were they others before?
    pub fn set(&self, keys: &Keys) -> Result<bool, BadKeys> {
        let is_same = |old: &(Keys, TlsAcceptor)| old.0 == *keys;
        if self.0.lock().as_ref().is_some_and(is_same) {
            return Ok(false);
        }
        let certificates = CertificateDer::pem_slice_iter(keys.certificate.as_bytes());
        let certificates = certificates.collect::<Result<_, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(keys.key.as_bytes())?;
        // (The process may have no provider of its own, or another.)
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?;
        *self.0.lock() = Some((keys.clone(), TlsAcceptor::from(Arc::new(config))));
        Ok(true)
    }

    /// Are there any?
    pub fn is_ready(&self) -> bool {
        self.0.lock().is_some()
    }

    fn acceptor(&self) -> Option<TlsAcceptor> {
        self.0.lock().as_ref().map(|t| t.1.clone())
    }
}

/// What answers are made of.
pub struct Hook {
    /// Who gets the shim.
    pub pods: PodsConfig,
    /// The cluster.
    pub seen: Arc<Seen>,
}

/// For ever.
pub async fn serve(listener: TcpListener, tls: Arc<Tls>, hook: Arc<Hook>) {
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::debug!("webhook: accept: {e}");
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        };
        // Until there is a certificate, nobody can be served.
        let Some(acceptor) = tls.acceptor() else {
            continue;
        };
        open.retain(|c| !c.is_finished());
        if open.len() >= CONNECTIONS {
            open.pop_front().inspect(AbortHandle::abort);
        }
        let task = tokio::spawn(connection(acceptor, stream, hook.clone()));
        open.push_back(task.abort_handle());
    }
}

async fn connection(acceptor: TlsAcceptor, stream: TcpStream, hook: Arc<Hook>) {
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(s)) => s,
        Ok(Err(e)) => return tracing::debug!("webhook: TLS: {e}"),
        Err(_) => return,
    };
    let serve = service_fn(move |request| {
        let hook = hook.clone();
        async move { Ok::<_, Infallible>(answer(&hook, request).await) }
    });
    let done = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .serve_connection(TokioIo::new(stream), serve)
        .await;
    if let Err(e) = done {
        tracing::debug!("webhook: HTTP: {e}");
    }
}

async fn answer(hook: &Hook, request: Request<Incoming>) -> Response<Full<Bytes>> {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
        (&Method::GET, "/readyz") if hook.seen.is_ready() => text(StatusCode::OK, "ok\n"),
        (&Method::GET, "/readyz") => text(
            StatusCode::SERVICE_UNAVAILABLE,
            "namespaces are not known yet\n",
        ),
        (&Method::POST, "/mutate") => mutate(hook, request).await,
        _ => text(StatusCode::NOT_FOUND, "/mutate, /healthz, /readyz\n"),
    }
}

async fn mutate(hook: &Hook, request: Request<Incoming>) -> Response<Full<Bytes>> {
    // (What a body becomes may be a hundred times as large.)
    let Ok(Ok(_turn)) = tokio::time::timeout(BODY, TURNS.acquire()).await else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "too many at a time\n");
    };
    let body = Limited::new(request.into_body(), BODY_MAX).collect();
    let body = match tokio::time::timeout(BODY, body).await {
        Ok(Ok(b)) => b.to_bytes(),
        Ok(Err(_)) => return text(StatusCode::PAYLOAD_TOO_LARGE, "too large, or cut off\n"),
        Err(_) => return text(StatusCode::REQUEST_TIMEOUT, "too slow\n"),
    };
    let fresh = fresh(hook, &body).await;
    let lookup: &dyn Lookup = match &fresh {
        Some(f) => f,
        None => &*hook.seen,
    };
    match review(&hook.pods, lookup, &body) {
        Ok(answer) => reply(
            StatusCode::OK,
            "application/json",
            answer.to_string().into_bytes(),
        ),
        Err(e) => {
            tracing::warn!("no AdmissionReview: {e}");
            text(StatusCode::BAD_REQUEST, "no AdmissionReview\n")
        }
    }
}

/// What counts instead of what was seen, if that may be behind and matters.
async fn fresh<'a>(hook: &'a Hook, body: &[u8]) -> Option<Fresh<'a>> {
    let ask = hook.seen.may_be_behind();
    let namespace = ask.then(|| up_to_namespace(&hook.pods, body)).flatten()?;
    hook.seen.look(&namespace).await
}

fn text(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    reply(status, "text/plain; charset=utf-8", text.into())
}

fn reply(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut r = Response::new(Full::from(body));
    *r.status_mut() = status;
    r.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    r
}

#[cfg(test)]
mod tests;
