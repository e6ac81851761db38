//! A kubelet of the test's own at the other end of the sockets.

use super::messages::Asked;
use super::*;
use std::sync::Mutex;
use tokio::sync::mpsc;

/// Takes registrations.
struct Kubelet(Mutex<mpsc::UnboundedSender<Register>>);

impl Answers for Kubelet {
    fn answer(self: Arc<Self>, call: Request<Body>) -> Answer {
        Box::pin(async move {
            assert_eq!(call.uri().path(), "/v1beta1.Registration/Register");
            unary(call, |r: Register| async move {
                let _ = self.0.lock().unwrap().send(r);
                Ok(Empty {})
            })
            .await
        })
    }
}

fn kubelet(
    dir: &Path,
) -> (
    mpsc::UnboundedReceiver<Register>,
    tokio::task::JoinHandle<()>,
) {
    let (tell, told) = mpsc::unbounded_channel();
    let listener = grpc::listen(&dir.join("device-plugins/kubelet.sock")).unwrap();
    let who = Arc::new(Kubelet(Mutex::new(tell)));
    (told, tokio::spawn(grpc::serve(listener, who)))
}

async fn channel(socket: &Path) -> Grpc<tonic::transport::Channel> {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let mut grpc = Grpc::new(endpoint.connect().await.unwrap());
    grpc.ready().await.unwrap();
    grpc
}

fn options(dir: &Path) -> Options {
    Options {
        kubelet: dir.to_owned(),
        daemon: "underpass.io/devices".into(),
        rails: vec!["underpass.io/rail".into(), "rdma/hca".into()],
        files: "/dev".into(),
    }
}

fn healthy(d: &Devices) -> usize {
    d.devices.iter().filter(|d| d.health == "Healthy").count()
}

/// Each resource is told; after the kubelet's next start, which removes all sockets, again.
#[tokio::test]
async fn a_kubelet_is_restarted() {
    let t = tempfile::tempdir().unwrap();
    let (_tell, health) = watch::channel(true);
    let (mut told, serving) = kubelet(t.path());
    for p in plugins(&options(t.path()), &health) {
        tokio::spawn(offer(Arc::new(p)));
    }
    let mut names = Vec::new();
    for _ in 0..3 {
        let r = told.recv().await.unwrap();
        assert_eq!(r.version, "v1beta1");
        assert!(t.path().join("device-plugins").join(&r.endpoint).exists());
        names.push(r.resource);
    }
    names.sort();
    assert_eq!(
        names,
        ["rdma/hca", "underpass.io/devices", "underpass.io/rail"]
    );
    serving.abort();
    fs::remove_dir_all(t.path().join("device-plugins")).unwrap();
    let (mut told, _serving) = kubelet(t.path());
    let mut again: Vec<String> = Vec::new();
    for _ in 0..3 {
        again.push(told.recv().await.unwrap().resource);
    }
    again.sort();
    assert_eq!(again, names);
}

/// A node's rails come and go; who has got one is given nothing.
#[tokio::test]
async fn rails() {
    let t = tempfile::tempdir().unwrap();
    let (tell, health) = watch::channel(false);
    let all = plugins(&options(t.path()), &health);
    let rail = Arc::new(all.into_iter().nth(1).unwrap());
    let listener = grpc::listen(&rail.socket()).unwrap();
    tokio::spawn(grpc::serve(listener, rail.clone()));
    let mut grpc = channel(&rail.socket()).await;
    let path = PathAndQuery::from_static("/v1beta1.DevicePlugin/ListAndWatch");
    let codec = ProstCodec::<Empty, Devices>::default();
    let answer = grpc.server_streaming(tonic::Request::new(Empty {}), path, codec);
    let mut devices = answer.await.unwrap().into_inner();
    assert_eq!(healthy(&devices.message().await.unwrap().unwrap()), 0);
    tell.send(true).unwrap();
    assert_eq!(healthy(&devices.message().await.unwrap().unwrap()), PODS);
    tell.send(false).unwrap();
    assert_eq!(healthy(&devices.message().await.unwrap().unwrap()), 0);
    let asked = Allocate {
        containers: vec![Asked {
            devices: vec!["3".into()],
        }],
    };
    let given = rail.allocate(&asked).unwrap();
    assert_eq!(given.containers, [Given { files: Vec::new() }]);
}

/// The daemon's container is given the files of devices, and nothing else that lies there.
#[test]
fn files_of_devices() {
    let (_tell, health) = watch::channel(false);
    let daemon = &plugins(&options("/nowhere".as_ref()), &health)[0];
    assert_eq!(healthy(&daemon.devices()), 1);
    let asked = Allocate {
        containers: vec![Asked {
            devices: vec!["0".into()],
        }],
    };
    let given = daemon.allocate(&asked).unwrap().containers;
    let paths: Vec<&str> = given[0].files.iter().map(|f| &*f.host).collect();
    assert!(paths.contains(&"/dev/null"), "{paths:?}");
    assert!(
        !paths.contains(&"/dev/fd") && !paths.contains(&"/dev/shm"),
        "{paths:?}"
    );
    let f = &given[0].files[0];
    assert_eq!((&f.container, &*f.permissions), (&f.host, "rw"));
    assert_eq!(files("/nowhere".as_ref()).unwrap(), []);
}
