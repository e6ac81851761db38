//! Device plugins: what the scheduler knows of a node's rails, and how the daemon's own container gets RDMA devices.
//!
//! A container that is not privileged can open a device only if the runtime allows it, and the runtime does what the kubelet
//! says for a resource that the pod asks for. The first resource ([`Options::daemon`]) is for the daemon's pod: one piece of
//! it, with the files in `/dev/infiniband` that verbs need. It is there also on nodes without any, since a DaemonSet has one form
//! for all nodes. The others ([`Options::rails`]) stand for nothing that a container could use: a node has some while it has a
//! rail, so that pods which ask for one are put where rails are.
//!
//! The kubelet forgets its plugins when it is started, and removes their sockets; and when another plugin with the same name
//! ends, some kubelets end the newer one's call in its stead (kubernetes issue 121994). So a plugin is told to it anew when
//! the sockets are others, and when the kubelet does not ask for its devices (any more).

pub mod messages;

use crate::grpc::{self, stream, unary, unknown, Answer, Answers};
use futures_util::Stream;
use messages::{Allocate, Allocated, Device, Devices, Empty, File, Given, Register};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::Request;
use tonic::transport::Endpoint;
use tonic::Status;
use tonic_prost::ProstCodec;

/// Of the kubelet's interface.
const VERSION: &str = "v1beta1";
/// How often the kubelet's sockets are looked at.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 2000 });
/// How often rails are looked at: a port has many files.
const RAILS: Duration = Duration::from_secs(10);
/// Longest wait for the kubelet's answer, and then for its call.
const TIME: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });
/// How many pods of a node may ask for one of [`Options::rails`]: more than a kubelet runs.
const PODS: usize = 1000;

/// What is offered.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kubelet's directory of device plugins: `/var/lib/kubelet/device-plugins`, whatever its `--root-dir` is.
    pub dir: PathBuf,
    /// Name of the resource that gives the daemon's container its devices; empty: none.
    pub daemon: String,
    /// Names of resources that a node has while it has a rail.
    pub rails: Vec<String>,
    /// Where this process sees the node's `/dev`.
    pub dev: PathBuf,
}

/// Serves the kubelet until the process ends. `has_rail`: has this node a rail now?
pub fn run(options: &Options, has_rail: impl Fn() -> bool) -> io::Result<()> {
    let mut names: Vec<&String> = options.rails.iter().chain([&options.daemon]).collect();
    names.sort();
    if names.windows(2).any(|n| n[0] == n[1]) {
        let why = "each resource has a name of its own"; // (two plugins of one name would drive each other out)
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    rt.block_on(async {
        let (tell, health) = watch::channel(has_rail());
        for plugin in plugins(options, &health) {
            tokio::spawn(offer(Arc::new(plugin)));
        }
        loop {
            tokio::time::sleep(RAILS).await;
            let now = has_rail();
            if tell.send_if_modified(|was| std::mem::replace(was, now) != now) {
                let state = if now { "has a rail" } else { "has no rail" };
                tracing::info!("this node {state}");
            }
        }
    })
}

fn plugins(o: &Options, health: &watch::Receiver<bool>) -> Vec<Plugin> {
    let daemon = (!o.daemon.is_empty()).then(|| (&o.daemon, Kind::Files(o.dev.clone())));
    let rails = o.rails.iter().map(|n| (n, Kind::Rail(health.clone())));
    let all = daemon.into_iter().chain(rails);
    all.map(|(resource, kind)| Plugin {
        resource: resource.clone(),
        kind,
        dir: o.dir.clone(),
        asked: watch::channel(0).0,
    })
    .collect()
}

enum Kind {
    /// Devices for verbs, below this `/dev`.
    Files(PathBuf),
    /// Nothing, while there is a rail.
    Rail(watch::Receiver<bool>),
}

struct Plugin {
    resource: String,
    kind: Kind,
    /// The kubelet's directory of such plugins.
    dir: PathBuf,
    /// How many calls ask for its devices now.
    asked: watch::Sender<usize>,
}

/// One call that asks for a plugin's devices.
struct Asking(Arc<Plugin>);

impl Asking {
    fn new(plugin: Arc<Plugin>) -> Self {
        plugin.asked.send_modify(|n| *n += 1);
        Asking(plugin)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asked.send_modify(|n| *n -= 1);
    }
}

/// Tells the kubelet of a plugin, and again whenever it has forgotten it.
async fn offer(plugin: Arc<Plugin>) {
    let kubelet = plugin.dir.join("kubelet.sock");
    let mut said = String::new();
    loop {
        let listener = match grpc::listen(&plugin.socket()) {
            Ok(l) => l,
            Err(e) => {
                complain(&mut said, &plugin.resource, &e.to_string());
                tokio::time::sleep(LOOK).await;
                continue;
            }
        };
        let (end, ended) = watch::channel(());
        let until = async move {
            let mut ended = ended;
            let _ = ended.changed().await; // (an error: `end` is dropped)
        };
        tokio::spawn(grpc::serve(listener, plugin.clone(), until));
        let sockets =
            || [&plugin.socket(), &kubelet].map(|p| fs::metadata(p).ok().map(|m| m.ino()));
        let known = sockets();
        match plugin.register(&kubelet).await {
            Ok(()) => {
                said.clear();
                tracing::info!(resource = plugin.resource, "registered with the kubelet");
                // The kubelet calls back after it has answered, and then for as long as it knows the plugin.
                tokio::time::sleep(TIME).await;
                while sockets() == known && *plugin.asked.borrow() > 0 {
                    tokio::time::sleep(LOOK).await;
                }
                tracing::info!(resource = plugin.resource, "the kubelet has forgotten it");
            }
            Err(e) => {
                complain(&mut said, &plugin.resource, &e);
                tokio::time::sleep(LOOK).await;
            }
        }
        drop(end);
    }
}

/// Each trouble is told once.
fn complain(said: &mut String, resource: &str, e: &str) {
    if said != e {
        tracing::warn!(resource, "not registered with the kubelet: {e}");
        *said = e.to_owned();
    }
}

impl Plugin {
    /// The name of its socket: of characters that a file may have.
    fn endpoint(&self) -> String {
        let plain = |c: char| if c == '/' { '_' } else { c };
        let name: String = self.resource.chars().map(plain).collect();
        format!("underpass-{name}.sock")
    }

    fn socket(&self) -> PathBuf {
        self.dir.join(self.endpoint())
    }

    async fn register(&self, kubelet: &Path) -> Result<(), String> {
        let request = Register {
            version: VERSION.into(),
            endpoint: self.endpoint(),
            resource: self.resource.clone(),
        };
        let told = async {
            let endpoint = Endpoint::from_shared(format!("unix:{}", kubelet.display()));
            let channel = endpoint?.connect().await?;
            let mut grpc = Grpc::new(channel);
            grpc.ready().await?;
            let path = PathAndQuery::from_static("/v1beta1.Registration/Register");
            let codec = ProstCodec::<Register, Empty>::default();
            grpc.unary(tonic::Request::new(request), path, codec)
                .await?;
            Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
        };
        match tokio::time::timeout(TIME, told).await {
            Ok(told) => told.map_err(|e| whole(&*e)),
            Err(_) => Err("it does not answer".into()),
        }
    }

    fn devices(&self) -> Devices {
        let (ids, healthy) = match &self.kind {
            // Named by its files: the kubelet keeps what it has given to a pod, and gives nothing that is not there any more.
            Kind::Files(dev) => {
                let files = files(dev).unwrap_or_default();
                let names = files.iter().filter_map(|f| f.host.rsplit('/').next());
                let names = ["devices"].into_iter().chain(names);
                (vec![names.collect::<Vec<_>>().join("-")], true)
            }
            Kind::Rail(has) => ((0..PODS).map(|n| n.to_string()).collect(), *has.borrow()),
        };
        let health = if healthy { "Healthy" } else { "Unhealthy" };
        let device = |id| Device {
            id,
            health: health.into(),
        };
        Devices {
            devices: ids.into_iter().map(device).collect(),
        }
    }

    /// The devices now, and after each change.
    fn watch(self: Arc<Self>) -> impl Stream<Item = Devices> {
        let changes = match &self.kind {
            Kind::Files(_) => None,
            Kind::Rail(has) => Some(has.clone()),
        };
        let first = (Asking::new(self), changes, true);
        futures_util::stream::unfold(first, |(asking, mut changes, first)| async move {
            if !first {
                match &mut changes {
                    Some(c) => c.changed().await.ok()?,
                    None => std::future::pending().await,
                }
            }
            Some((asking.0.devices(), (asking, changes, false)))
        })
    }

    fn allocate(&self, asked: &Allocate) -> Result<Allocated, Status> {
        let files = match &self.kind {
            Kind::Rail(_) => Vec::new(),
            Kind::Files(dev) => files(dev).map_err(|e| {
                Status::unavailable(format!("{}: {e}", dev.display())) // (the kubelet shows it)
            })?,
        };
        tracing::info!(
            resource = self.resource,
            files = files.len(),
            "given to a pod"
        );
        let given = |_| Given {
            files: files.clone(),
        };
        let containers = asked.containers.iter().map(given).collect();
        Ok(Allocated { containers })
    }
}

/// An error with its causes: tonic's own words are "transport error".
fn whole(e: &dyn std::error::Error) -> String {
    let mut said = e.to_string();
    let mut cause = e.source();
    while let Some(c) = cause {
        said = format!("{said}: {c}");
        cause = c.source();
    }
    said
}

/// The devices that verbs and RDMA-CM need, with their names on the node; none if there are none. (Not those for management
/// datagrams: whoever has those may speak to the fabric.)
fn files(dev: &Path) -> io::Result<Vec<File>> {
    let all = match fs::read_dir(dev.join("infiniband")) {
        Ok(all) => all,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut files = Vec::new();
    for entry in all {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let wanted = name.starts_with("uverbs") || name == "rdma_cm";
        if wanted && entry.file_type()?.is_char_device() {
            let path = format!("/dev/infiniband/{name}");
            files.push(File {
                container: path.clone(),
                host: path,
                permissions: "rw".into(),
            });
        }
    }
    files.sort_by(|a, b| a.host.cmp(&b.host));
    Ok(files)
}

impl Answers for Plugin {
    fn answer(self: Arc<Self>, call: Request<Body>) -> Answer {
        Box::pin(async move {
            let path = call.uri().path().to_owned();
            match path.as_str() {
                // None of the options.
                "/v1beta1.DevicePlugin/GetDevicePluginOptions"
                | "/v1beta1.DevicePlugin/PreStartContainer" => {
                    unary(call, |_: Empty| async { Ok(Empty {}) }).await
                }
                "/v1beta1.DevicePlugin/ListAndWatch" => {
                    stream::<Empty, _, _>(call, self.watch()).await
                }
                "/v1beta1.DevicePlugin/Allocate" => {
                    unary(call, |a: Allocate| async move { self.allocate(&a) }).await
                }
                _ => unknown(&path),
            }
        })
    }
}

#[cfg(test)]
mod tests;
