//! The kubelet's calls, over real sockets; mounts in a mount namespace of the test's own.

use super::messages::{
    Capability, DriverInfo, Empty, NodeInfo, PluginInfo, Probed, Publish, RegistrationStatus,
    Unpublish,
};
use super::mounts::{Error, Mounts};
use super::*;
use prost::Message;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// A node: a process with a mount namespace of its own, from which mounts do not come out. Within, they are shared, as on
/// nodes with systemd.
struct Node(Child);

impl Node {
    /// `None`: this test may not make one.
    fn start() -> Option<Node> {
        let child = Command::new("unshare")
            .args([
                "-m",
                "--propagation",
                "private",
                "sh",
                "-c",
                "mount --make-rshared /; echo; exec cat",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = child.ok()?;
        let mut line = [0];
        let made = child.stdout.as_mut()?.read(&mut line).ok()? == 1;
        let node = Node(child);
        if !made {
            crate::skip::skip("no mount namespace can be made here");
        }
        made.then_some(node)
    }

    fn namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/mnt", self.0.id()).into()
    }

    /// A path as the node sees it.
    fn at(&self, path: &Path) -> PathBuf {
        format!("/proc/{}/root{}", self.0.id(), path.display()).into()
    }

    /// Options of what is mounted there, one line each.
    fn mounted(&self, path: &Path) -> Vec<String> {
        let all = fs::read_to_string(format!("/proc/{}/mountinfo", self.0.id())).unwrap();
        let at = |l: &&str| l.split(' ').nth(4) == path.to_str();
        all.lines().filter(at).map(str::to_owned).collect()
    }

    fn run(&self, command: &str) {
        let id = self.0.id().to_string();
        let mut inside = Command::new("nsenter");
        inside.args(["-m", "-t", &id, "sh", "-ec", command]);
        assert!(inside.status().unwrap().success(), "{command}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn config(dir: &Path, namespace: PathBuf) -> CsiConfig {
    CsiConfig {
        kubelet: dir.join("kubelet"),
        namespace,
    }
}

fn here() -> PathBuf {
    "/proc/self/ns/mnt".into()
}

struct Kubelet(Channel);

impl Kubelet {
    async fn connect(path: &Path) -> Kubelet {
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap();
        Kubelet(endpoint.connect().await.unwrap())
    }

    async fn call<A, B>(&self, path: &'static str, argument: A) -> Result<B, Status>
    where
        A: Message + Default + 'static,
        B: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<A, B>::default();
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(tonic::Request::new(argument), path, codec);
        answer.await.map(tonic::Response::into_inner)
    }
}

fn volume(target: &Path) -> Publish {
    Publish {
        volume: "csi-1".into(),
        target: target.to_str().unwrap().into(),
        capability: Some(Capability {
            block: None,
            mount: Some(Empty {}),
        }),
        readonly: true,
        context: BTreeMap::from([("csi.storage.k8s.io/ephemeral".into(), "true".into())]),
    }
}

fn unpublish(target: &Path) -> Unpublish {
    Unpublish {
        volume: "csi-1".into(),
        target: target.to_str().unwrap().into(),
    }
}

/// Where the kubelet wants a pod's volume. It makes the directory that this is in.
fn target(kubelet: &Path, pod: &str) -> PathBuf {
    let dir = kubelet.join(format!("pods/{pod}/volumes/kubernetes.io~csi/underpass"));
    fs::create_dir_all(&dir).unwrap();
    dir.join("mount")
}

#[tokio::test]
async fn who_the_driver_is() {
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), here());
    let registration = config
        .kubelet
        .join("plugins_registry/csi.underpass.io-reg.sock");
    fs::create_dir_all(registration.parent().unwrap()).unwrap();
    // An earlier daemon has left its socket.
    drop(std::os::unix::net::UnixListener::bind(&registration).unwrap());
    let driver = start(&config, t.path().join("pods"), "node-1".into()).unwrap();
    let m = fs::metadata(&registration).unwrap();
    assert!(m.file_type().is_socket());
    assert_eq!(m.permissions().mode() & 0o777, 0o600);
    let k = Kubelet::connect(&registration).await;
    let info: PluginInfo = k
        .call("/pluginregistration.Registration/GetInfo", Empty {})
        .await
        .unwrap();
    let endpoint = config.kubelet.join("plugins/csi.underpass.io/csi.sock");
    let expected = PluginInfo {
        kind: "CSIPlugin".into(),
        name: "csi.underpass.io".into(),
        endpoint: endpoint.to_str().unwrap().into(),
        versions: vec!["1.0.0".into()],
    };
    assert_eq!(info, expected);
    let own = Kubelet::connect(&endpoint).await;
    let info: DriverInfo = own
        .call("/csi.v1.Identity/GetPluginInfo", Empty {})
        .await
        .unwrap();
    assert_eq!(info.name, expected.name);
    let probed: Probed = own.call("/csi.v1.Identity/Probe", Empty {}).await.unwrap();
    assert!(probed.ready.unwrap().value);
    let node: NodeInfo = own
        .call("/csi.v1.Node/NodeGetInfo", Empty {})
        .await
        .unwrap();
    assert_eq!(node.node, "node-1");
    for path in [
        "/csi.v1.Identity/GetPluginCapabilities",
        "/csi.v1.Node/NodeGetCapabilities",
    ] {
        own.call::<_, Empty>(path, Empty {}).await.unwrap();
    }
    let not = own
        .call::<_, Empty>("/csi.v1.Controller/CreateVolume", Empty {})
        .await;
    assert_eq!(not.unwrap_err().code(), Code::Unimplemented);
    assert!(!driver.is_registered());
    let path = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let status = |registered| RegistrationStatus {
        registered,
        error: "why".into(),
    };
    k.call::<_, Empty>(path, status(true)).await.unwrap();
    assert!(driver.is_registered());
    k.call::<_, Empty>(path, status(false)).await.unwrap();
    assert!(!driver.is_registered());
}

/// What a kubelet of 1.20 sends, byte by byte: it names the socket's path as the server.
#[tokio::test]
async fn an_old_kubelet() {
    use crate::authority::tests::{call, hello};
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), here());
    let driver = start(&config, t.path().join("pods"), "node-1".into()).unwrap();
    let mut s = UnixStream::connect(driver.socket()).unwrap();
    s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    s.write_all(&hello()).unwrap();
    let get = "/csi.v1.Node/NodeGetInfo";
    s.write_all(&call(get, 1, true)).unwrap();
    s.write_all(&call(get, 3, false)).unwrap();
    let mut answered = Vec::new();
    while answered.len() < 2 {
        let mut header = [0; 9];
        s.read_exact(&mut header).unwrap();
        let size = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; size as usize];
        s.read_exact(&mut payload).unwrap();
        assert!(!matches!(header[3], 3 | 7), "refused: {payload:?}");
        if header[3] == 0 && !payload.is_empty() {
            assert!(payload.ends_with(b"node-1"));
            answered.push(header[8]);
        }
    }
    assert_eq!(answered, [1, 3]);
}

#[tokio::test]
async fn what_is_refused() {
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), here());
    let driver = Driver::new(&config, t.path().join("pods"), String::new());
    let code = |r: Result<Empty, Status>| r.unwrap_err().code();
    let good = target(&config.kubelet, "u1");
    let mut lasting = volume(&good);
    lasting.context.clear();
    assert_eq!(code(driver.publish(lasting).await), Code::InvalidArgument);
    let mut block = volume(&good);
    block.capability.as_mut().unwrap().block = Some(Empty {});
    assert_eq!(code(driver.publish(block).await), Code::InvalidArgument);
    let none = Publish {
        capability: None,
        ..volume(&good)
    };
    assert_eq!(code(driver.publish(none).await), Code::InvalidArgument);
    let writable = Publish {
        readonly: false,
        ..volume(&good)
    };
    assert_eq!(code(driver.publish(writable).await), Code::InvalidArgument);
    let k = config.kubelet.display();
    for bad in [
        "/etc".to_owned(),
        String::new(),
        format!("{k}"),
        format!("{k}2/pods/u/volumes/kubernetes.io~csi/v/mount"),
        format!("{k}/pods/u/volumes/kubernetes.io~csi/v"),
        format!("{k}/pods/u/volumes/kubernetes.io~csi/v/mount/x"),
        format!("{k}/pods/u/volumes/kubernetes.io~csi/v/.."),
        format!("{k}/pods/../volumes/kubernetes.io~csi/v/mount"),
        format!("{k}/pods/./volumes/kubernetes.io~csi/v/mount"),
        format!("{k}/pods//volumes/kubernetes.io~csi/v/mount"),
        format!("{k}/pods/u/volumes/kubernetes.io~secret/v/mount"),
        format!("{k}/plugins/u/volumes/kubernetes.io~csi/v/mount"),
        format!("{k}/pods/u/volumes/kubernetes.io~csi/v/mo\0unt"),
    ] {
        let v = Publish {
            target: bad.clone(),
            ..volume(&good)
        };
        assert_eq!(
            code(driver.publish(v).await),
            Code::InvalidArgument,
            "{bad}"
        );
        let v = Unpublish {
            target: bad.clone(),
            ..unpublish(&good)
        };
        assert_eq!(
            code(driver.unpublish(v).await),
            Code::InvalidArgument,
            "{bad}"
        );
    }
    assert_eq!(
        driver.node_info().unwrap_err().code(),
        Code::FailedPrecondition
    );
    let away = driver.publish(volume(&good)).await;
    assert_eq!(
        code(away),
        Code::Unavailable,
        "the directory is not there yet"
    );
    let source = t.path().join("others");
    fs::create_dir(&source).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o775)).unwrap();
    let theirs = Driver::new(&config, source.clone(), String::new());
    let said = theirs.publish(volume(&good)).await.unwrap_err();
    assert!(said.message().contains("not permitted"), "{said}");
    let no = CsiConfig {
        namespace: t.path().join("none"),
        ..config.clone()
    };
    let driver = Driver::new(&no, t.path().join("pods"), String::new());
    assert_eq!(code(driver.publish(volume(&good)).await), Code::Internal);
}

#[tokio::test]
async fn a_volume_in_the_node_s_namespace() {
    let Some(node) = Node::start() else { return };
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), node.namespace());
    let dir = t.path().join("pods");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("shim"), "1").unwrap();
    let at = target(&config.kubelet, "u1");
    let driver = Driver::new(&config, dir.clone(), "n".into());
    for _ in 0..2 {
        driver.publish(volume(&at)).await.unwrap();
        let [line] = &node.mounted(&at)[..] else {
            panic!("{:?}", node.mounted(&at));
        };
        assert!(line.contains(" ro,nosuid,nodev"), "{line}");
        assert!(!line.contains("noexec"), "{line}");
        assert!(
            line.contains(" master:"),
            "{line}: nothing comes out of a container"
        );
    }
    let shim = node.at(&at.join("shim"));
    assert_eq!(fs::read(&shim).unwrap(), b"1");
    assert!(fs::write(&shim, "2").is_err(), "it is read-only there");
    fs::write(dir.join("shim"), "3").unwrap();
    assert_eq!(fs::read(&shim).unwrap(), b"3");
    assert!(
        !at.join("shim").exists(),
        "this namespace has no part in it"
    );
    // The next daemon knows nothing, and need not.
    let driver = Driver::new(&config, dir.clone(), "n".into());
    driver.publish(volume(&at)).await.unwrap();
    assert_eq!(node.mounted(&at).len(), 1);
    for _ in 0..2 {
        driver.unpublish(unpublish(&at)).await.unwrap();
        assert!(node.mounted(&at).is_empty() && !at.exists());
    }
    fs::remove_dir_all(at.parent().unwrap()).unwrap();
    driver.unpublish(unpublish(&at)).await.unwrap();
    let away = driver.publish(volume(&at)).await.unwrap_err();
    assert_eq!(
        away.code(),
        Code::Internal,
        "the kubelet makes what it is in"
    );
}

#[tokio::test]
async fn something_else_is_mounted_there() {
    let Some(node) = Node::start() else { return };
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), node.namespace());
    let dir = t.path().join("pods");
    fs::create_dir(&dir).unwrap();
    let at = target(&config.kubelet, "u1");
    fs::create_dir(&at).unwrap();
    let path = at.display();
    // Of a directory that was removed since, and ours, but not read-only.
    node.run(&format!(
        "mkdir {0}/old; mount --bind {0}/old {path}",
        t.path().display()
    ));
    let driver = Driver::new(&config, dir.clone(), "n".into());
    driver.publish(volume(&at)).await.unwrap();
    assert_eq!(
        fs::metadata(node.at(&at)).unwrap().ino(),
        fs::metadata(&dir).unwrap().ino()
    );
    driver.unpublish(unpublish(&at)).await.unwrap();
    fs::create_dir(&at).unwrap();
    node.run(&format!("mount --bind {} {path}", dir.display()));
    driver.publish(volume(&at)).await.unwrap();
    let lines = node.mounted(&at);
    assert!(lines.len() == 1 && lines[0].contains(" ro,"), "{lines:?}");
    // Mounted over once more, and in use.
    node.run(&format!(
        "mount --bind {} {path}; (cd {path}; sleep 5) >/dev/null 2>&1 &",
        dir.display()
    ));
    driver.unpublish(unpublish(&at)).await.unwrap();
    assert!(node.mounted(&at).is_empty() && !at.exists());
    // What is in a directory that was never mounted over is not removed.
    fs::create_dir_all(at.join("x")).unwrap();
    let not = driver.unpublish(unpublish(&at)).await.unwrap_err();
    assert_eq!(not.code(), Code::Internal);
    assert!(at.join("x").exists());
}

#[tokio::test]
async fn links_lead_nowhere() {
    let Some(node) = Node::start() else { return };
    let t = tempfile::tempdir().unwrap();
    let config = config(t.path(), node.namespace());
    let dir = t.path().join("pods");
    fs::create_dir(&dir).unwrap();
    let driver = Driver::new(&config, dir, "n".into());
    let outside = t.path().join("outside");
    fs::create_dir_all(outside.join("mount")).unwrap();
    let at = target(&config.kubelet, "u1");
    std::os::unix::fs::symlink(outside.join("mount"), &at).unwrap();
    let pods = config.kubelet.join("pods/u2/volumes/kubernetes.io~csi");
    fs::create_dir_all(&pods).unwrap();
    std::os::unix::fs::symlink(&outside, pods.join("v")).unwrap();
    // On the way, and within the kubelet's directory.
    let inner = target(&config.kubelet, "u4");
    std::os::unix::fs::symlink("u4", config.kubelet.join("pods/u5")).unwrap();
    let way = config
        .kubelet
        .join("pods/u5")
        .join(inner.strip_prefix(config.kubelet.join("pods/u4")).unwrap());
    for at in [at, pods.join("v/mount"), way] {
        let not = driver.publish(volume(&at)).await.unwrap_err();
        assert_eq!(not.code(), Code::Internal, "{not}");
        assert!(driver.unpublish(unpublish(&at)).await.is_err());
    }
    assert!(node.mounted(&outside.join("mount")).is_empty() && !inner.exists());
    assert!(outside.join("mount").exists());
    // The kubelet's own directory may be elsewhere.
    let link = t.path().join("link");
    std::os::unix::fs::symlink(&config.kubelet, &link).unwrap();
    let at = target(&config.kubelet, "u3");
    let linked = CsiConfig {
        kubelet: link.clone(),
        ..config.clone()
    };
    let driver = Driver::new(&linked, t.path().join("pods"), "n".into());
    driver.publish(volume(&target(&link, "u3"))).await.unwrap();
    assert_eq!(node.mounted(&at).len(), 1);
}

/// Without a container, the daemon is in the node's namespace already.
#[tokio::test]
async fn the_daemon_s_own_namespace() {
    let t = tempfile::tempdir().unwrap();
    let mounts = Mounts {
        namespace: here(),
        kubelet: t.path().join("kubelet"),
        source: t.path().into(),
    };
    let act = |m: &Mounts| {
        assert!(m.source.exists());
        std::env::current_dir().map(drop).map_err(Error::Thread)
    };
    mounts.in_the_node(act).await.unwrap();
}
