//! API servers, and others, as clients.

use super::*;
use rustls::pki_types::ServerName;
use serde_json::{json, Value};
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::client::TlsStream;
use tokio_rustls::TlsConnector;

const HOST: &str = "hook.up.svc";

fn keys(old: Option<&Keys>) -> Keys {
    Keys::make(HOST, time::OffsetDateTime::now_utc(), old).unwrap()
}

async fn started() -> (std::net::SocketAddr, Arc<Tls>) {
    started_with(Arc::default()).await
}

async fn started_with(seen: Arc<Seen>) -> (std::net::SocketAddr, Arc<Tls>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let tls = Arc::new(Tls::default());
    let hook = Arc::new(Hook {
        pods: PodsConfig::default(),
        seen,
    });
    tokio::spawn(serve(listener, tls.clone(), hook));
    (at, tls)
}

/// As an API server that trusts a bundle.
async fn connect(at: std::net::SocketAddr, bundle: &str) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    for c in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(c.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(at).await?;
    let name = ServerName::try_from(HOST).unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

async fn ask(stream: &mut TlsStream<TcpStream>, head: &str, body: &[u8]) -> String {
    let head = format!(
        "{head}\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let _ = stream.write_all(body).await; // it may have been refused meanwhile
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let n = stream.read(&mut piece).await.unwrap();
        answer.extend_from_slice(&piece[..n]);
        let text = String::from_utf8_lossy(&answer);
        let whole = text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            let length = head
                .lines()
                .find_map(|l| l.strip_prefix("content-length: "));
            length.is_some_and(|l| body.len() >= l.parse::<usize>().unwrap())
        });
        if n == 0 || whole {
            return text.into_owned();
        }
    }
}

#[tokio::test]
async fn an_api_server_asks() {
    let (at, tls) = started().await;
    assert!(
        connect(at, "").await.is_err(),
        "there is no certificate yet"
    );
    let keys = keys(None);
    assert!(!tls.is_ready() && tls.set(&keys).unwrap() && tls.is_ready());
    assert!(!tls.set(&keys).unwrap(), "the same");
    assert!(connect(at, "").await.is_err(), "it trusts nobody");
    let mut s = connect(at, &keys.bundle).await.unwrap();
    let pod = json!({"metadata": {"annotations": {"underpass.io/enabled": "true"}},
                     "spec": {"containers": [{"name": "web"}]}});
    let request = json!({"uid": "u", "kind": {"kind": "Pod"}, "operation": "CREATE",
                         "namespace": "shop", "object": pod});
    let body = json!({"apiVersion": "admission.k8s.io/v1", "request": request}).to_string();
    // Twice on one connection.
    for _ in 0..2 {
        let answer = ask(&mut s, "POST /mutate?timeout=2s HTTP/1.1", body.as_bytes()).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200") && head.contains("application/json"),
            "{head}"
        );
        let answer: Value = serde_json::from_str(body).unwrap();
        assert_eq!(answer["response"]["uid"], "u");
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
    }
    for (head, expected) in [
        ("GET /healthz HTTP/1.1", "200"),
        ("GET /readyz HTTP/1.1", "503"),
        ("GET /mutate HTTP/1.1", "404"),
        ("POST / HTTP/1.1", "404"),
        ("POST /mutate HTTP/1.1", "400"),
    ] {
        let answer = ask(&mut s, head, b"").await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {expected}")),
            "{head}: {answer}"
        );
    }
    let answer = ask(&mut s, "POST /mutate HTTP/1.1", &vec![b' '; BODY_MAX + 1]).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

/// The watch of namespaces is not there, as after a restart of the API server: the namespace is asked for, if it decides.
#[tokio::test]
async fn a_namespace_is_asked_for_while_its_watch_is_cut_off() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let all = asked.clone();
    let api = tower::service_fn(move |request: Request<kube::client::Body>| {
        let path = request.uri().path().to_owned();
        let (status, annotations) = match path.as_str() {
            "/api/v1/namespaces/shop" => (200, json!({"underpass.io/enabled": "true"})),
            "/api/v1/namespaces/plain" => (200, json!({})),
            _ => (500, json!({})),
        };
        all.lock().push(path);
        let text = json!({"apiVersion": "v1", "kind": "Namespace",
                          "metadata": {"name": "x", "annotations": annotations}})
        .to_string();
        let mut answer = Response::new(Full::from(text));
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        async { Ok::<_, Infallible>(answer) }
    });
    let seen = Arc::new(Seen::default());
    seen.ask_by(kube::Client::new(api, "default"));
    let (at, tls) = started_with(seen).await;
    let keys = keys(None);
    tls.set(&keys).unwrap();
    let mut s = connect(at, &keys.bundle).await.unwrap();
    let mut patched = async |namespace: &str, annotations: Value| {
        let pod = json!({"metadata": {"annotations": annotations},
                         "spec": {"containers": [{"name": "web"}]}});
        let request = json!({"uid": "u", "kind": {"kind": "Pod"}, "operation": "CREATE",
                             "namespace": namespace, "object": pod});
        let body = json!({"apiVersion": "admission.k8s.io/v1", "request": request}).to_string();
        let answer = ask(&mut s, "POST /mutate HTTP/1.1", body.as_bytes()).await;
        assert!(answer.contains("\"allowed\":true"), "{answer}");
        answer.contains("JSONPatch")
    };
    assert!(patched("shop", json!({})).await && !patched("plain", json!({})).await);
    assert!(!patched("shop", json!({"underpass.io/enabled": "false"})).await);
    assert!(patched("plain", json!({"underpass.io/enabled": "true"})).await);
    assert!(!patched("away", Value::Null).await);
    let of = |n: &&str| format!("/api/v1/namespaces/{n}");
    let expected: Vec<String> = ["shop", "plain", "away"].iter().map(of).collect();
    assert_eq!(*asked.lock(), expected);
}

#[tokio::test]
async fn keys_are_replaced() {
    let (at, tls) = started().await;
    let first = keys(None);
    let second = keys(Some(&first));
    tls.set(&first).unwrap();
    let mut old = connect(at, &second.bundle).await.unwrap();
    tls.set(&second).unwrap();
    assert!(ask(&mut old, "GET /healthz HTTP/1.1", b"")
        .await
        .contains("200"));
    connect(at, &second.bundle).await.unwrap();
    assert!(connect(at, &first.bundle).await.is_err());
    // What cannot be served with changes nothing.
    let mixed = Keys {
        key: first.key.clone(),
        ..second.clone()
    };
    assert!(matches!(tls.set(&mixed), Err(BadKeys::Tls(_))));
    let broken = Keys {
        key: "x".into(),
        ..second.clone()
    };
    assert!(matches!(tls.set(&broken), Err(BadKeys::Pem(_))));
    connect(at, &second.bundle).await.unwrap();
}

#[tokio::test]
async fn the_oldest_makes_way() {
    let (at, tls) = started().await;
    let keys = keys(None);
    tls.set(&keys).unwrap();
    let mut first = connect(at, &keys.bundle).await.unwrap();
    // Others that say nothing.
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS {
        silent.push(TcpStream::connect(at).await.unwrap());
    }
    let mut last = connect(at, &keys.bundle).await.unwrap();
    assert!(ask(&mut last, "GET /healthz HTTP/1.1", b"")
        .await
        .contains("200"));
    let mut byte = [0];
    let ended = tokio::time::timeout(HANDSHAKE, first.read(&mut byte)).await;
    assert!(!matches!(ended.unwrap(), Ok(n) if n > 0));
}

#[tokio::test]
async fn a_request_that_stays_away() {
    let (at, tls) = started().await;
    let keys = keys(None);
    tls.set(&keys).unwrap();
    let mut s = connect(at, &keys.bundle).await.unwrap();
    let head = "POST /mutate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc";
    s.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    let read = tokio::time::timeout(BODY * 2, s.read_exact(&mut answer)).await;
    read.unwrap().unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
}
