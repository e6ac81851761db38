//! A kubelet of the test's own at the other end of the sockets.

use super::messages::Asked;
use super::*;
use std::collections::BTreeSet;
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
    let listener = grpc::listen(&dir.join("kubelet.sock")).unwrap();
    let who = Arc::new(Kubelet(Mutex::new(tell)));
    (
        told,
        tokio::spawn(grpc::serve(listener, who, std::future::pending())),
    )
}

async fn channel(socket: &Path) -> Grpc<tonic::transport::Channel> {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let mut grpc = Grpc::new(endpoint.connect().await.unwrap());
    grpc.ready().await.unwrap();
    grpc
}

fn options(dir: &Path) -> Options {
    Options {
        dir: dir.join("plugins"),
        daemon: "underpass.io/devices".into(),
        rails: vec!["underpass.io/rail".into(), "rdma/hca".into()],
        dev: dir.join("dev"),
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
    let (mut told, serving) = kubelet(&t.path().join("plugins"));
    for p in plugins(&options(t.path()), &health) {
        tokio::spawn(offer(Arc::new(p)));
    }
    let names = ["rdma/hca", "underpass.io/devices", "underpass.io/rail"];
    let mut told_of = BTreeSet::new();
    while told_of.len() < 3 {
        let r = told.recv().await.unwrap();
        assert_eq!(r.version, "v1beta1");
        assert!(t.path().join("plugins").join(&r.endpoint).exists());
        told_of.insert(r.resource);
    }
    assert!(told_of.iter().eq(&names), "{told_of:?}");
    serving.abort();
    fs::remove_dir_all(t.path().join("plugins")).unwrap();
    let (mut told, _serving) = kubelet(&t.path().join("plugins"));
    told_of.clear();
    while told_of.len() < 3 {
        told_of.insert(told.recv().await.unwrap().resource);
    }
}

/// A node's rails come and go; who has got one is given nothing.
#[tokio::test]
async fn rails() {
    let t = tempfile::tempdir().unwrap();
    let (tell, health) = watch::channel(false);
    let all = plugins(&options(t.path()), &health);
    let rail = Arc::new(all.into_iter().nth(1).unwrap());
    let listener = grpc::listen(&rail.socket()).unwrap();
    tokio::spawn(grpc::serve(listener, rail.clone(), std::future::pending()));
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

/// The daemon's container is given what verbs need, and nothing else that lies there.
#[test]
fn files_of_devices() {
    let t = tempfile::tempdir().unwrap();
    let (_tell, health) = watch::channel(false);
    let daemon = &plugins(&options(t.path()), &health)[0];
    let ids = || -> Vec<String> { daemon.devices().devices.into_iter().map(|d| d.id).collect() };
    assert_eq!(
        (healthy(&daemon.devices()), ids()),
        (1, vec!["devices".to_owned()])
    );
    let dir = t.path().join("dev/infiniband");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("uverbs7"), "a file").unwrap();
    let device = |name: &str| {
        let kind = rustix::fs::FileType::CharacterDevice;
        let null = rustix::fs::makedev(1, 3);
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, dir.join(name), kind, mode, null)
    };
    for name in ["umad0", "uverbs0", "rdma_cm"] {
        if let Err(e) = device(name) {
            return crate::skip::skip(&format!("no device can be made here: {e}"));
        }
    }
    assert_eq!(ids(), ["devices-rdma_cm-uverbs0"]);
    let asked = Allocate {
        containers: vec![Asked { devices: ids() }],
    };
    let given = daemon.allocate(&asked).unwrap().containers;
    let paths: Vec<&str> = given[0].files.iter().map(|f| &*f.host).collect();
    assert_eq!(
        paths,
        ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]
    );
    let f = &given[0].files[0];
    assert_eq!((&f.container, &*f.permissions), (&f.host, "rw"));
}

/// Another plugin of the same name ends, and the kubelet ends our call in its stead: we are told to it anew. The old socket's
/// connections end.
#[tokio::test]
async fn the_kubelet_ends_the_call() {
    let t = tempfile::tempdir().unwrap();
    let (_tell, health) = watch::channel(true);
    let (mut told, _serving) = kubelet(&t.path().join("plugins"));
    let rail = Arc::new(plugins(&options(t.path()), &health).remove(1));
    tokio::spawn(offer(rail.clone()));
    told.recv().await.unwrap();
    let call = Asking::new(rail.clone());
    // (It is asked for: time goes by.)
    assert!(tokio::time::timeout(3 * TIME, told.recv()).await.is_err());
    drop(call);
    told.recv().await.unwrap();
}
