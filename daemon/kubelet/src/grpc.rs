//! gRPC over sockets to which nobody but the kubelet can connect.

use crate::authority::Connection;
use futures_util::{Stream, StreamExt};
use prost::Message;
use std::convert::Infallible;
use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixListener;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::transport::Server;
use tonic::Status;
use tonic_prost::ProstCodec;

/// Longest call; the kubelet waits for two minutes.
const TIME: Duration = Duration::from_secs(60);
/// Largest message: names, paths and the attributes of one volume.
const MESSAGE_MAX: usize = 256 << 10;
/// Calls of a connection at a time.
const CALLS: usize = 32;
/// Pause after a connection that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);

/// Listens at a path, for root alone. A socket that an earlier daemon has left is replaced.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir)?;
    // It gets its name when its mode is right: `bind` makes it as the umask has it. (The kubelet skips names with a dot.)
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = dir.join(format!(".{name}.new"));
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    fs::rename(&new, path)?;
    Ok(listener)
}

/// A message without fields, or one of which none is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

/// Who answers calls.
pub(crate) trait Answers: Send + Sync + 'static {
    fn answer(self: Arc<Self>, call: Request<Body>) -> Answer;
}

pub(crate) type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// A call that nobody answers.
pub(crate) fn unknown(path: &str) -> Response<Body> {
    Status::unimplemented(format!("{path} is not offered")).into_http()
}

/// Until `end` comes: then no call is taken any more, and connections end with their calls.
pub(crate) async fn serve<A: Answers>(
    listener: UnixListener,
    who: Arc<A>,
    end: impl Future<Output = ()>,
) {
    let server = Server::builder()
        .timeout(TIME)
        .concurrency_limit_per_connection(CALLS);
    if let Err(e) = server
        .serve_with_incoming_shutdown(Service(who), connections(listener), end)
        .await
    {
        tracing::error!("the kubelet is not served any more: {e}");
    }
}

fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    futures_util::stream::unfold(listener, |listener| async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((Ok(Connection::new(stream)), listener)),
                Err(e) => tracing::debug!("kubelet: accept: {e}"),
            }
            tokio::time::sleep(AGAIN).await;
        }
    })
}

/// What tonic asks for each call.
struct Service<A>(Arc<A>);

impl<A> Clone for Service<A> {
    fn clone(&self) -> Self {
        Service(self.0.clone())
    }
}

impl<A: Answers> tonic::codegen::Service<Request<Body>> for Service<A> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: Request<Body>) -> Self::Future {
        let answer = self.0.clone().answer(call);
        Box::pin(async { Ok(answer.await) })
    }
}

/// One message, one answer.
pub(crate) async fn unary<A, B, F>(call: Request<Body>, act: impl FnOnce(A) -> F) -> Response<Body>
where
    A: Message + Default + Send + 'static,
    B: Message + Default + Send + 'static,
    F: Future<Output = Result<B, Status>> + Send + 'static,
{
    let mut grpc = Grpc::new(ProstCodec::<B, A>::default()).max_decoding_message_size(MESSAGE_MAX);
    grpc.unary(Unary(Some(act)), call).await
}

/// The function that answers, as tonic wants it.
struct Unary<F>(Option<F>);

impl<A, B, C, F> UnaryService<A> for Unary<F>
where
    F: FnOnce(A) -> C,
    C: Future<Output = Result<B, Status>> + Send + 'static,
{
    type Response = B;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<B>, Status>> + Send>>;

    fn call(&mut self, message: tonic::Request<A>) -> Self::Future {
        let Some(act) = self.0.take() else {
            return Box::pin(async { Err(Status::internal("called twice")) });
        };
        let answer = act(message.into_inner());
        Box::pin(async { answer.await.map(tonic::Response::new) })
    }
}

/// One message, and answers without an end.
pub(crate) async fn stream<A, B, S>(call: Request<Body>, answers: S) -> Response<Body>
where
    A: Message + Default + Send + 'static,
    B: Message + Default + Send + 'static,
    S: Stream<Item = B> + Send + 'static,
{
    let mut grpc = Grpc::new(ProstCodec::<B, A>::default()).max_decoding_message_size(MESSAGE_MAX);
    grpc.server_streaming(Streaming(Some(answers)), call).await
}

struct Streaming<S>(Option<S>);

impl<A, B, S> ServerStreamingService<A> for Streaming<S>
where
    B: Send + 'static,
    S: Stream<Item = B> + Send + 'static,
{
    type Response = B;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<B, Status>> + Send>>;
    type Future =
        Pin<Box<dyn Future<Output = Result<tonic::Response<Self::ResponseStream>, Status>> + Send>>;

    fn call(&mut self, _: tonic::Request<A>) -> Self::Future {
        let Some(answers) = self.0.take() else {
            return Box::pin(async { Err(Status::internal("called twice")) });
        };
        let answers: Self::ResponseStream = Box::pin(answers.map(Ok));
        Box::pin(async { Ok(tonic::Response::new(answers)) })
    }
}
