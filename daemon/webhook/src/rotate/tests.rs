//! An API server with one Secret and one configuration.

use super::*;
use http_body_util::BodyExt;
use hyper::{Method, Request, Response};
use kube::client::Body;
use parking_lot::Mutex;
use std::convert::Infallible;
use time::Duration as Time;

#[derive(Debug)]
struct Cluster {
    secret: Option<Value>,
    hooks: Value,
    version: u64,
    /// Writes of either.
    written: [usize; 2],
    /// May the Secret be written?
    allowed: bool,
    /// What somebody else writes to it as soon as the API server has been told something.
    faster: Option<Keys>,
}

type Shared = Arc<Mutex<Cluster>>;

fn cluster() -> Shared {
    let hook = |name: &str, service: &str| {
        json!({"name": name, "clientConfig": {"service": {"name": service, "namespace": "up"}},
               "admissionReviewVersions": ["v1"], "sideEffects": "None"})
    };
    Arc::new(Mutex::new(Cluster {
        secret: None,
        hooks: json!({"metadata": {"name": "hooks"},
                      "webhooks": [hook("a.b.c", "hook"), hook("x.y.z", "other")]}),
        version: 0,
        written: [0; 2],
        allowed: true,
        faster: None,
    }))
}

fn config() -> WebhookConfig {
    WebhookConfig {
        namespace: "up".into(),
        service: "hook".into(),
        secret: "keys".into(),
        configuration: "hooks".into(),
        ..WebhookConfig::default()
    }
}

impl Cluster {
    fn failure(code: u16) -> (u16, Value) {
        let reason = match code {
            404 => "NotFound",
            409 => "Conflict",
            _ => "Forbidden",
        };
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                            "message": "no", "reason": reason, "code": code, "metadata": {}});
        (code, status)
    }

    fn write(&mut self, mut new: Value) -> (u16, Value) {
        if !self.allowed {
            return Self::failure(403);
        }
        self.version += 1;
        self.written[0] += 1;
        new["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.secret = Some(new.clone());
        (200, new)
    }

    fn answer(&mut self, method: &Method, path: &str, body: Value) -> (u16, Value) {
        let version = |s: &Value| s["metadata"]["resourceVersion"].clone();
        match (method.as_str(), path) {
            ("GET", "/api/v1/namespaces/up/secrets/keys") => {
                self.secret.clone().map_or(Self::failure(404), |s| (200, s))
            }
            ("POST", "/api/v1/namespaces/up/secrets") => match self.secret {
                Some(_) => Self::failure(409),
                None => self.write(body),
            },
            ("PUT", "/api/v1/namespaces/up/secrets/keys") => match &self.secret {
                Some(s) if version(s) == version(&body) => self.write(body),
                _ => Self::failure(409),
            },
            (_, p) if p.ends_with("/mutatingwebhookconfigurations/hooks") => {
                if method == Method::PATCH {
                    self.written[1] += 1;
                    if let Some(keys) = self.faster.take() {
                        let data = serde_json::to_value(keys.to_data()).unwrap();
                        self.write(json!({"metadata": {"name": "keys"}, "data": data}));
                    }
                    // (A strategic merge: lists are merged by name.)
                    for new in body["webhooks"].as_array().unwrap() {
                        let all = self.hooks["webhooks"].as_array_mut().unwrap();
                        let old = all.iter_mut().find(|h| h["name"] == new["name"]).unwrap();
                        old["clientConfig"]["caBundle"] = new["clientConfig"]["caBundle"].clone();
                    }
                }
                (200, self.hooks.clone())
            }
            other => panic!("{other:?}"),
        }
    }
}

fn client(cluster: &Shared) -> Client {
    let cluster = cluster.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let cluster = cluster.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            // (So that others come in between.)
            tokio::task::yield_now().await;
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let (code, answer) = cluster.lock().answer(&parts.method, parts.uri.path(), body);
            let answer = Body::from(answer.to_string().into_bytes());
            Ok::<_, Infallible>(Response::builder().status(code).body(answer).unwrap())
        }
    });
    Client::new(service, "up")
}

fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

fn trusted(cluster: &Shared) -> ByteString {
    let hook = cluster.lock().hooks["webhooks"][0]["clientConfig"]["caBundle"].clone();
    serde_json::from_value(hook).unwrap()
}

#[tokio::test]
async fn made_kept_and_renewed() {
    let cluster = cluster();
    let client = client(&cluster);
    let (first, told) = round(&client, &config(), now()).await.unwrap();
    assert!(told && first.is_usable("hook.up.svc", now()));
    assert_eq!(trusted(&cluster).0, first.bundle.as_bytes());
    let other = cluster.lock().hooks["webhooks"][1]["clientConfig"].clone();
    assert!(other.get("caBundle").is_none(), "it is not ours");
    // What is as it should be is left alone.
    for _ in 0..2 {
        let again = round(&client, &config(), now()).await.unwrap();
        assert_eq!(again, (first.clone(), false));
        assert_eq!(cluster.lock().written, [1, 1]);
    }
    // Somebody takes the trust away.
    cluster.lock().hooks["webhooks"][0]["clientConfig"]["caBundle"] = Value::Null;
    assert_eq!(
        round(&client, &config(), now()).await.unwrap(),
        (first.clone(), true)
    );
    assert_eq!(trusted(&cluster).0, first.bundle.as_bytes());
    // The Secret keeps what else it has.
    cluster.lock().secret.as_mut().unwrap()["metadata"]["labels"] = json!({"a": "b"});
    let (second, told) = round(&client, &config(), now() + Time::days(61))
        .await
        .unwrap();
    assert!(told && second != first && second.bundle.ends_with(&first.bundle));
    assert_eq!(
        cluster.lock().secret.as_ref().unwrap()["metadata"]["labels"]["a"],
        "b"
    );
    // It is emptied; then there is something else in it.
    for data in [
        Value::Null,
        json!({"tls.crt": "eA==", "tls.key": "eA==", "ca.crt": "eA=="}),
    ] {
        cluster.lock().secret.as_mut().unwrap()["data"] = data;
        let (third, told) = round(&client, &config(), now()).await.unwrap();
        assert!(told && third.is_usable("hook.up.svc", now()));
    }
}

#[tokio::test]
async fn the_secret_cannot_be_written() {
    let cluster = cluster();
    let client = client(&cluster);
    cluster.lock().allowed = false;
    let e = round(&client, &config(), now()).await.unwrap_err();
    assert!(e.to_string().contains("writing the Secret"), "{e}");
    cluster.lock().allowed = true;
    let (keys, _) = round(&client, &config(), now()).await.unwrap();
    cluster.lock().allowed = false;
    let late = round(&client, &config(), now() + Time::days(80))
        .await
        .unwrap();
    assert_eq!(late, (keys, false), "they do for now");
    assert!(round(&client, &config(), now() + Time::days(91))
        .await
        .is_err());
}

#[tokio::test]
async fn replicas_do_not_fight() {
    let cluster = cluster();
    let config = config();
    let clients: Vec<Client> = (0..8).map(|_| client(&cluster)).collect();
    let mut before = None;
    for (n, days) in [0, 61].into_iter().enumerate() {
        let then = now() + Time::days(days);
        let all = clients.iter().map(|c| round(c, &config, then));
        let all = futures_util::future::join_all(all).await;
        let keys: Vec<Keys> = all.into_iter().map(|k| k.unwrap().0).collect();
        assert!(keys.iter().all(|k| *k == keys[0]), "all have the same");
        assert_ne!(before.replace(keys[0].clone()), Some(keys[0].clone()));
        assert_eq!(trusted(&cluster).0, keys[0].bundle.as_bytes());
        assert_eq!(
            cluster.lock().written[0],
            n + 1,
            "one of them has written it"
        );
    }
}

#[tokio::test]
async fn another_renews_them_meanwhile() {
    let cluster = cluster();
    let theirs = Keys::make("hook.up.svc", now(), None).unwrap();
    cluster.lock().faster = Some(theirs.clone());
    let (keys, told) = round(&client(&cluster), &config(), now()).await.unwrap();
    assert!(told && keys == theirs);
    assert_eq!(trusted(&cluster).0, theirs.bundle.as_bytes());
    assert_eq!(cluster.lock().written, [2, 2]);
}
