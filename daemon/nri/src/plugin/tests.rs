//! A runtime at the other end of a pipe.

use super::*;
use crate::messages::{KeyValue, Mount};
use std::cell::RefCell;
use std::time::Duration;
use tokio::io::{duplex, DuplexStream};

#[derive(Default)]
struct Seen {
    events: RefCell<Vec<String>>,
}

impl Seen {
    fn say(&self, what: String) {
        self.events.borrow_mut().push(what);
    }
}

impl Plugin for Seen {
    fn configured(&mut self, runtime: &Configure) {
        self.say(format!("{} {}", runtime.runtime, runtime.version));
    }

    fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        self.say(format!("{} {}", pods.len(), containers.len()));
    }

    fn create(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        self.say(format!("create {} {:?}", pod.name, container.env));
        (pod.annotations.get("a").map(String::as_str) == Some("b")).then(|| Adjustment {
            mounts: vec![Mount {
                destination: "/there".into(),
                ..Mount::default()
            }],
            env: vec![KeyValue {
                key: "K".into(),
                value: "v".into(),
            }],
        })
    }

    fn pod_made(&mut self, pod: PodSandbox) {
        self.say(format!("made {}", pod.name));
    }

    fn pod_gone(&mut self, pod: &PodSandbox) {
        self.say(format!("gone {}", pod.name));
    }

    fn container_stopped(&mut self, container: &Container) {
        self.say(format!("stopped {}", container.name));
    }

    fn container_gone(&mut self, container: &Container) {
        self.say(format!("gone {}", container.name));
    }
}

/// The runtime's end.
struct Runtime {
    stream: DuplexStream,
    received: Received,
    calls: u32,
}

impl Runtime {
    fn at(stream: DuplexStream) -> Self {
        Runtime {
            stream,
            received: Received::default(),
            calls: 1,
        }
    }

    async fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(f) = self.received.next_frame().unwrap() {
                return Some(f);
            }
            if self.stream.read_buf(&mut self.received.raw).await.ok()? == 0 {
                return None;
            }
        }
    }

    async fn send(&mut self, frame: Frame) {
        let mut out = BytesMut::new();
        frames::put(&mut out, &frame);
        self.stream.write_all(&out).await.unwrap();
    }

    async fn registered(&mut self, status: Option<Status>) {
        let asked = self.frame().await.unwrap();
        assert_eq!(
            (asked.connection, asked.kind),
            (frames::RUNTIME, frames::REQUEST)
        );
        let call = Request::decode(asked.payload.clone()).unwrap();
        assert_eq!(
            (call.service.as_str(), call.method.as_str()),
            (super::RUNTIME, "RegisterPlugin")
        );
        let said = RegisterPlugin::decode(call.payload).unwrap();
        assert_eq!(
            (said.name.as_str(), said.index.as_str()),
            ("underpass", "90")
        );
        let answer = Response {
            status,
            payload: Bytes::new(),
        };
        self.send(Frame {
            kind: frames::RESPONSE,
            payload: answer.encode_to_vec().into(),
            ..asked
        })
        .await;
    }

    async fn call(&mut self, method: &str, argument: &impl Message) -> Response {
        self.call_with(method, argument.encode_to_vec().into())
            .await
    }

    async fn call_with(&mut self, method: &str, payload: Bytes) -> Response {
        self.calls += 2;
        let request = Request {
            service: PLUGIN.into(),
            method: method.into(),
            payload,
        };
        self.send(Frame {
            connection: frames::PLUGIN,
            call: self.calls,
            kind: frames::REQUEST,
            payload: request.encode_to_vec().into(),
        })
        .await;
        let answer = self.frame().await.unwrap();
        let of = (answer.connection, answer.call, answer.kind);
        assert_eq!(of, (frames::PLUGIN, self.calls, frames::RESPONSE));
        Response::decode(answer.payload).unwrap()
    }
}

/// Runs a plugin against what `runtime` does; what the plugin has seen, and how its conversation ended.
async fn with<F: AsyncFnOnce(&mut Runtime)>(runtime: F) -> (Vec<String>, Result<(), Error>) {
    let (ours, theirs) = duplex(1 << 16);
    let mut seen = Seen::default();
    let mut rt = Runtime::at(theirs);
    let talk = async {
        runtime(&mut rt).await;
        drop(rt);
    };
    let serve = serve(ours, ("underpass", "90"), &mut seen);
    let both = async { tokio::join!(serve, talk).0 };
    let ended = tokio::time::timeout(Duration::from_secs(10), both)
        .await
        .unwrap();
    (seen.events.into_inner(), ended)
}

fn pod(name: &str) -> PodSandbox {
    PodSandbox {
        name: name.into(),
        ..PodSandbox::default()
    }
}

#[tokio::test]
async fn a_conversation() {
    let (seen, ended) = with(async |r| {
        r.registered(None).await;
        let configure = Configure {
            runtime: "containerd".into(),
            version: "1".into(),
            ..Configure::default()
        };
        let said = r.call("Configure", &configure).await;
        let events = Configured::decode(said.payload).unwrap().events;
        assert_eq!(events, 0b110_0000_1101);
        let more = |more| Synchronize {
            pods: vec![pod("p")],
            more,
            ..Synchronize::default()
        };
        for m in [true, false, false] {
            let said = r.call("Synchronize", &more(m)).await;
            assert_eq!(Synchronized::decode(said.payload).unwrap().more, m);
        }
        let mut wants = pod("q");
        let container = Container {
            name: "c".into(),
            env: vec!["E=1".into()],
            ..Container::default()
        };
        for wanted in [false, true] {
            let create = CreateContainer {
                pod: Some(wants.clone()),
                container: Some(container.clone()),
            };
            let said = r.call("CreateContainer", &create).await;
            let said = ContainerCreated::decode(said.payload).unwrap();
            assert_eq!(said.adjust.is_some(), wanted);
            wants.annotations.insert("a".into(), "b".into());
        }
        let change = |event| StateChange {
            event,
            pod: Some(pod("s")),
            container: Some(container.clone()),
        };
        for event in 0..16 {
            assert_eq!(
                r.call("StateChange", &change(event)).await,
                Response::default()
            );
        }
        let about = About {
            pod: Some(pod("t")),
            container: Some(container.clone()),
        };
        for method in [
            "RunPodSandbox",
            "RemovePodSandbox",
            "StopContainer",
            "RemoveContainer",
            "Shutdown",
        ] {
            assert_eq!(r.call(method, &about).await, Response::default());
        }
    })
    .await;
    ended.unwrap();
    let expected = [
        "containerd 1",
        "2 0",
        "1 0",
        "create q [\"E=1\"]",
        "create q [\"E=1\"]",
        "made s",
        "gone s",
        "stopped c",
        "gone c",
        "made t",
        "gone t",
        "stopped c",
        "gone c",
    ];
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn what_the_plugin_does_not_know() {
    let (seen, ended) = with(async |r| {
        r.registered(None).await;
        let said = r.call("Fly", &About::default()).await;
        assert_eq!(said.status.unwrap().code, UNIMPLEMENTED);
        let said = r.call_with("Configure", Bytes::from_static(&[0xff])).await;
        assert_eq!(said, Response::default(), "it would fail the container");
        // Messages that are no calls of the plugin get no answer.
        for (connection, kind) in [
            (frames::PLUGIN, 3),
            (frames::RUNTIME, frames::REQUEST),
            (7, 1),
        ] {
            r.send(Frame {
                connection,
                call: 3,
                kind,
                payload: Bytes::new(),
            })
            .await;
        }
        r.call("Shutdown", &About::default()).await;
    })
    .await;
    ended.unwrap();
    assert_eq!(seen, [""; 0]);
}

#[tokio::test]
async fn a_runtime_that_refuses() {
    let (_, ended) = with(async |r| {
        let no = Status {
            code: 2,
            message: "not today".into(),
        };
        r.registered(Some(no)).await;
    })
    .await;
    assert_eq!(
        ended.unwrap_err().to_string(),
        "the runtime refuses the plugin: not today"
    );
}

/// It has taken the plugin, and then says nothing any more, or not all. One that has said all may be silent.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_say_what_there_is() {
    for (says, silent) in [(&[][..], true), (&[true], true), (&[true, false], false)] {
        let (ours, theirs) = duplex(1 << 16);
        let (mut seen, began) = (Seen::default(), Instant::now());
        let talk = async {
            let mut rt = Runtime::at(theirs);
            rt.registered(None).await;
            rt.call("Configure", &Configure::default()).await;
            for more in says {
                let part = Synchronize {
                    more: *more,
                    ..Synchronize::default()
                };
                rt.call("Synchronize", &part).await;
            }
            tokio::time::sleep(3 * SILENCE).await;
        };
        let serve = async {
            let ended = serve(ours, ("underpass", "90"), &mut seen).await;
            (ended, began.elapsed().as_secs() / SILENCE.as_secs())
        };
        let (ended, after) = tokio::join!(serve, talk).0;
        assert_eq!(matches!(ended, Err(Error::Silent)), silent, "{ended:?}");
        assert_eq!(after, if silent { 1 } else { 3 });
    }
}

#[tokio::test]
async fn nonsense_ends_it() {
    let (_, ended) = with(async |r| {
        r.stream.write_all(&[0xff; 64]).await.unwrap();
    })
    .await;
    assert!(matches!(ended, Err(Error::TooLong(_))));
}
