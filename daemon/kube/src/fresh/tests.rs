//! An API server that is asked while watches are behind, and their state as the client notes it.

use super::*;
use crate::current::{noting, Watching};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use kube::api::WatchParams;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;

type Frame = http_body::Frame<Bytes>;

/// What the server has been asked, and what it sends to the watch that is open.
#[derive(Default)]
struct Server {
    asked: Vec<String>,
    watch: Option<tokio::sync::mpsc::UnboundedSender<Frame>>,
}

fn client(server: &Arc<Mutex<Server>>, watches: Vec<Arc<Watching>>) -> Client {
    let server = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = server.clone();
        async move {
            let mut s = server.lock();
            let uri = request.uri();
            s.asked.push(uri.path().into());
            let watch = uri.query().is_some_and(|q| q.contains("watch=true"));
            let (status, answer) = match uri.path() {
                "/api/v1/namespaces" if watch => {
                    let (to, frames) = tokio::sync::mpsc::unbounded_channel();
                    s.watch = Some(to);
                    let frames = futures_util::stream::unfold(frames, |mut f| async move {
                        let next = f.recv().await?;
                        Some((Ok::<_, Infallible>(next), f))
                    });
                    let body = StreamBody::new(frames).boxed_unsync();
                    return Ok::<_, Infallible>(Response::new(body));
                }
                "/api/v1/namespaces/shop" => {
                    let meta =
                        json!({"name": "shop", "annotations": {"underpass.io/enabled": "false"}});
                    (
                        200,
                        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": meta}),
                    )
                }
                "/api/v1/namespaces/shop/pods/web-0" => {
                    let spec = json!({"containers": [], "initContainers": [{"name": "first"}]});
                    (
                        200,
                        json!({"metadata": {"name": "web-0", "uid": "u"}, "spec": spec}),
                    )
                }
                _ => {
                    let gone = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
                    (404, gone)
                }
            };
            let body = Full::from(answer.to_string()).boxed_unsync();
            let mut answer = Response::new(body);
            *answer.status_mut() = http::StatusCode::from_u16(status).unwrap();
            Ok(answer)
        }
    });
    Client::new(noting(service, watches), "default")
}

/// The answers change what was learnt, for the one who asked, and come in time or not at all.
#[tokio::test(flavor = "current_thread")]
async fn what_the_api_says_now() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c");
    let old = r#"{"namespaces": {"shop": "true", "gone": "true", "other": "true"}}"#;
    std::fs::write(&file, old).unwrap();
    let learnt = Arc::new(Learnt::kept_in(file));
    let server = Arc::default();
    let client = client(&server, Vec::new());
    let (asker, mut asked) = mpsc::channel(QUESTIONS);
    learnt.ask_by(asker);
    let l = learnt.clone();
    let asks = tokio::task::spawn_blocking(move || {
        let soon = || Instant::now() + Duration::from_secs(20);
        let word = |name: &str| {
            let mut fresh = Fresh::default();
            l.look_at_namespace(name, soon(), &mut fresh);
            l.with_fresh(&fresh, |c| c.namespaces.get(name).cloned())
        };
        assert_eq!(word("shop").as_deref(), Some("false"));
        assert_eq!(word("gone"), None);
        let init = |uid: &str| {
            let mut fresh = Fresh::default();
            l.look_at_pod(("shop", "web-0", uid), soon(), &mut fresh);
            l.with_fresh(&fresh, |c| c.is_init(uid, "first"))
        };
        assert!(init("u") && !init("of another one"));
        // What was learnt is as it was.
        assert_eq!(l.with(|c| c.namespaces["shop"].clone()), "true");
        // A watch that is there has it all.
        l.namespaces.settle();
        l.pods.settle();
        assert_eq!(word("shop").as_deref(), Some("true"));
        assert!(!init("new") && l.awaits("new"));
    });
    tokio::select! {
        () = answer(client, &mut asked) => unreachable!(),
        done = asks => done.unwrap(),
    }
    let n = server.lock().asked.len();
    assert_eq!(n, 4, "{:?}", server.lock().asked);
    drop(asked);
    let mut fresh = Fresh::default();
    learnt.namespaces.broken();
    learnt.look_at_namespace("shop", Instant::now(), &mut fresh);
    assert_eq!(fresh, Fresh::default(), "nobody answers");
}

/// A watch is current from a while after it was answered until it is cut off, or is asked for again, or is silent.
#[tokio::test(flavor = "current_thread")]
async fn how_a_watch_fares() {
    let server = Arc::default();
    let watching = Arc::new(Watching::namespaces());
    let client = client(&server, vec![watching.clone()]);
    let all: Api<Namespace> = Api::all(client.clone());
    let params = WatchParams::default();
    assert!(!watching.is_current());
    watching.settle();
    assert!(watching.is_current());
    // One is asked for: none is there before it is answered, and then what has changed before has to come.
    let mut events = all.watch(&params, "1").await.unwrap().boxed();
    assert!(!watching.is_current());
    watching.settle();
    watching.silent();
    assert!(!watching.is_current(), "nothing was heard for long");
    let mark = json!({"type": "BOOKMARK", "object": {"kind": "Namespace", "apiVersion": "v1",
                      "metadata": {"resourceVersion": "2"}}});
    let send = server.lock().watch.clone().unwrap();
    send.send(Frame::data(format!("{mark}\n").into())).unwrap();
    events.try_next().await.unwrap().unwrap();
    assert!(watching.is_current(), "heard of again");
    // Other requests say nothing of it.
    namespace(&client, "shop").await.unwrap();
    assert!(watching.is_current());
    watching.broken();
    assert!(!watching.is_current());
}
