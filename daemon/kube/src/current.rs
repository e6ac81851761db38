//! Is what a watch has told known to be what the API has now?
//!
//! A watch is silent while nothing changes, and just as silent while it is cut off; after an API server was restarted, it may
//! take half a minute until it is there again. Who decides about a pod then asks the API itself. So the client notes
//! when a watch was asked for, answered, and heard of last: API servers say at least once a minute that there is nothing new.

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::BodyExt;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tower::layer::layer_fn;
use tower::{BoxError, Service};

/// How long what has changed before a watch was there may take to come.
const SETTLING: Duration = Duration::from_secs(1);
/// A watch that was silent for so long is not believed to be there.
const SILENCE: Duration = Duration::from_secs(90);

/// A watch, as far as it is known how it fares.
#[derive(Debug)]
pub struct Watching {
    /// The path of its requests, and something that its query has.
    path: &'static str,
    query: &'static str,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    /// Its list was whole once.
    listed: bool,
    /// `None`: it is not there.
    opened: Option<Instant>,
    /// When something came last.
    told: Option<Instant>,
}

impl Times {
    fn is_current(&self, now: Instant) -> bool {
        let since = |t: Option<Instant>| t.map(|t| now.saturating_duration_since(t));
        self.listed
            && since(self.opened).is_some_and(|d| d >= SETTLING)
            && since(self.told).is_some_and(|d| d < SILENCE)
    }
}

impl Watching {
    /// One of all namespaces.
    pub fn namespaces() -> Watching {
        Watching::of("/api/v1/namespaces", "")
    }

    /// One of a node's pods.
    pub(crate) fn pods() -> Watching {
        Watching::of("/api/v1/pods", "fieldSelector=")
    }

    fn of(path: &'static str, query: &'static str) -> Watching {
        Watching {
            path,
            query,
            times: Mutex::default(),
        }
    }

    fn is(&self, uri: &Uri) -> bool {
        let asks = |q: &str| q.contains("watch=true") && q.contains(self.query);
        uri.path() == self.path && uri.query().is_some_and(asks)
    }

    /// What it tells of is known whole.
    pub fn listed(&self) {
        self.times.lock().listed = true;
    }

    /// Was it ever?
    pub fn is_listed(&self) -> bool {
        self.times.lock().listed
    }

    /// It was cut off, or has failed.
    pub fn broken(&self) {
        self.times.lock().opened = None;
    }

    fn opened(&self, now: Instant) {
        let mut t = self.times.lock();
        (t.opened, t.told) = (Some(now), Some(now));
    }

    fn tells(&self, now: Instant) {
        self.times.lock().told = Some(now);
    }

    /// Is everything known that has changed, but for what is on its way?
    pub fn is_current(&self) -> bool {
        self.times.lock().is_current(Instant::now())
    }

    /// As it is when it has been there for long.
    #[cfg(test)]
    pub(crate) fn settle(&self) {
        self.listed();
        let long_ago = Instant::now().checked_sub(SETTLING);
        self.times.lock().opened = long_ago;
        self.tells(Instant::now());
    }

    /// Was not heard of for long.
    #[cfg(test)]
    pub(crate) fn silent(&self) {
        self.times.lock().told = Instant::now().checked_sub(SILENCE);
    }
}

/// A client as pods have it, or as $KUBECONFIG says, which notes how these watches fare.
pub async fn client(watches: Vec<Arc<Watching>>) -> kube::Result<Client> {
    let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    let layer = layer_fn(|inner| noting(inner, watches.clone()));
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder.with_layer(&layer).build())
}

/// Requests go to `inner`.
pub(crate) fn noting<S>(inner: S, watches: Vec<Arc<Watching>>) -> Noting<S> {
    Noting { inner, watches }
}

/// Notes what becomes of requests for watches.
pub(crate) struct Noting<S> {
    inner: S,
    watches: Vec<Arc<Watching>>,
}

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

impl<S, B> Service<Request<Body>> for Noting<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Answer;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let watch = self.watches.iter().find(|w| w.is(request.uri())).cloned();
        // (Who asks again has none any more.)
        watch.iter().for_each(|w| w.broken());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let Some(watch) = watch.filter(|_| answer.status().is_success()) else {
                return Ok(answer.map(|body| body.map_err(Into::into).boxed_unsync()));
            };
            watch.opened(Instant::now());
            let note = move |frame| {
                watch.tells(Instant::now());
                frame
            };
            Ok(answer.map(|b| b.map_err(Into::into).map_frame(note).boxed_unsync()))
        })
    }
}
