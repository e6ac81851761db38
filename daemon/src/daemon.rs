//! The daemon as a whole: its directory, its sockets, its end.

use crate::admin;
use crate::admin::gate::Gate;
use crate::clients::adopt;
use crate::clients::idle;
use crate::config::Config;
use crate::core::{Core, Shared};
use crate::dataplane::rail::Rails;
use crate::dataplane::thread::Thread;
use crate::metrics::{gather, http};
use crate::nodes::peers::directory::{ClusterDirectory, Directory, PORT};
use crate::os::fds;
use crate::os::held;
use crate::os::panics::{self, Part};
use crate::os::system::Machine;
use crate::pods::runtime;
use crate::rules::Rules;
use crate::tasks::channels;
use crate::tasks::lookups;
use crate::tasks::readings;
use crate::tasks::server;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{signal, Signal, SignalKind};
use underpass_admin::certificate::valid_name;
use underpass_admin::{places, ADMIN_SOCK, CONTROL_SOCK};
use underpass_ibv::Ibv;
use underpass_kube::{Certificates, Learnt, Nodes, Others, Teller};
use underpass_pods::{left, place};

/// Helpers of this daemon's own looks and of the tools' requests, each of which may hang for a while. (What has to do with a
/// program's descriptors has threads of its own: `os::pool`.)
const HELPERS: usize = 1024;
const SWEEP: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    Path(PathBuf, std::io::Error),
    #[error("another daemon runs in {0}")]
    Running(PathBuf),
    #[error("{0} belongs to somebody else or others may write to it")]
    Insecure(PathBuf),
    #[error("cannot listen for peers at {0}: {1}")]
    Peers(String, std::io::Error),
    #[error("cannot show metrics at {0}: {1}")]
    Metrics(String, std::io::Error),
    #[error("cannot start the data plane: {0}")]
    DataPlane(std::io::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

fn at(path: &Path) -> impl Fn(Errno) -> Error + '_ {
    |e| Error::Path(path.to_owned(), e.into())
}

/// Makes the runtime directory if need be, and locks it for this process.
fn take_dir(dir: &Path, public: bool) -> Result<OwnedFd, Error> {
    let mode = Mode::from_raw_mode(if public { 0o755 } else { 0o700 });
    if let Some(parent) = dir.parent() {
        std::fs::create_dir_all(parent).map_err(|e| Error::Path(parent.to_owned(), e))?;
    }
    match rustix::fs::mkdir(dir, mode) {
        // mkdir's mode is subject to the umask.
        Ok(()) => rustix::fs::chmod(dir, mode).map_err(at(dir))?,
        Err(Errno::EXIST) => {}
        Err(e) => return Err(at(dir)(e)),
    }
    // In a directory like /tmp somebody else may have been here first.
    let s = rustix::fs::lstat(dir).map_err(at(dir))?;
    let is_dir = rustix::fs::FileType::from_raw_mode(s.st_mode).is_dir();
    if !is_dir || s.st_uid != rustix::process::geteuid().as_raw() || s.st_mode & 0o022 != 0 {
        return Err(Error::Insecure(dir.to_owned()));
    }
    let path = dir.join("lock");
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(at(&path))?;
    // (Without a socket, the holder is about to exit, or is a new daemon that has not made its sockets yet.)
    let stays = || dir.join(ADMIN_SOCK).exists();
    match places::lock(&lock, LEAVING, stays).map_err(|e| Error::Path(path, e))? {
        true => Ok(lock),
        false => Err(Error::Running(dir.to_owned())),
    }
}

/// How the daemon is started.
pub struct Options {
    pub dir: PathBuf,
    pub config: Config,
    /// The file that it was read from.
    pub file: Option<PathBuf>,
    /// Exit after this time without shims and lanes.
    pub idle_exit: Option<Duration>,
}

/// How long a daemon that is leaving (its sockets are gone) may still hold the directory.
const LEAVING: Duration = Duration::from_secs(5);

/// Runs the daemon until it is told to stop, or idle for long enough.
pub fn run(options: Options) -> Result<(), Error> {
    let public = rustix::process::geteuid().is_root();
    let lock = take_dir(&options.dir, public)?;
    fds::raise_limit();
    panics::install();
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(HELPERS)
        .on_thread_start(|| panics::enter(Part::Helper)) // helpers only: this thread is there already
        .build()?;
    let local = tokio::task::LocalSet::new();
    let done = local.block_on(&rt, serve(&options, public, &lock));
    // The tasks hold descriptors that only helpers may close.
    rt.block_on(async { drop(local) });
    rt.shutdown_background(); // does not wait for helpers that hang in a close
    done
}

async fn serve(options: &Options, public: bool, lock: &OwnedFd) -> Result<(), Error> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let hangup = signal(SignalKind::hangup())?;
    let proof = crate::pairing::bpf::open(&options.config.proof);
    let node = Sockets::make(&options.dir, public)?;
    let pods = Pods::make(&options.config);
    let cluster = ask_cluster(&options.config);
    let core: Shared = Rc::new(RefCell::new(Core::new(
        options.config.clone(),
        directory(&options.config, &cluster),
        proof,
        Arc::new(Machine),
        Ibv::new().ok(),
    )));
    tracing::info!(
        "underpassd {} serves {} ({} proof)",
        env!("CARGO_PKG_VERSION"),
        options.dir.display(),
        if core.borrow().proof.active() {
            "with BPF"
        } else {
            "without"
        },
    );
    core.borrow_mut().homes = adopt::identities(&options.dir, lock, &options.config.pods.dir);
    core.borrow_mut().dir = Some(options.dir.clone());
    core.borrow_mut().rules.keep_in(&options.dir);
    tokio::task::spawn_local(rules(core.clone(), options.file.clone(), hangup));
    tokio::task::spawn_local(lookups::adopt(core.clone()));
    core.borrow_mut().leaves = options.idle_exit.is_some();
    tokio::task::spawn_local(lookups::search(core.clone()));
    tokio::task::spawn_local(lookups::look_at_inherited(core.clone()));
    tokio::task::spawn_local(lookups::look_for_holders(core.clone()));
    tokio::task::spawn_local(lookups::look_for_unseen_closes(core.clone()));
    let (control, admin) = (node.control, node.admin);
    tokio::task::spawn_local(admin::server::serve(core.clone(), admin, Gate::Node));
    let _pods = pods.and_then(|p| p.serve(&core, &options.config, cluster));
    serve_peers(&core, &options.config)?;
    let _dataplane = serve_rails(&core)?;
    serve_metrics(&core, options)?;
    tokio::select! {
        r = server::serve(core.clone(), control) => r?,
        () = sweep(&core) => {}
        () = idle(&core, options) => tracing::info!("idle, leaving"),
        _ = term.recv() => tracing::info!("told to stop"),
        _ = int.recv() => tracing::info!("told to stop"),
    }
    channels::stop(&core).await;
    // Lanes within this node go on without the daemon. New shims find no socket.
    remove_sockets(&options.dir);
    Ok(())
}

/// For ever: connections that are older than the daemon follow its rules, and all those of its file when that is read again (SIGHUP).
async fn rules(core: Shared, file: Option<PathBuf>, mut hangup: Signal) {
    let mut before = Rules::default();
    loop {
        admin::server::follow_rules(&core, &before).await;
        if hangup.recv().await.is_none() {
            return;
        }
        before = core.borrow().rules.clone();
        let Some(path) = file.clone() else { continue };
        // (A file may take its time.)
        let read = move || Config::load(&path).and_then(|c| c.check().map(|()| c));
        match tokio::task::spawn_blocking(read).await {
            Ok(Ok(new)) => take_rules(&core, new),
            Ok(Err(e)) => tracing::error!("the configuration stays as it was: {e}"),
            Err(e) => tracing::error!("the configuration stays as it was: {e}"),
        }
    }
}

fn take_rules(core: &Shared, new: Config) {
    let mut c = core.borrow_mut();
    c.rules.configure(&new.rules());
    let config = &mut c.config;
    (config.exclude, config.rule) = (new.exclude.clone(), new.rule.clone());
    // (The command line may have changed some.)
    let same = Config {
        ring_log2: config.ring_log2,
        ring_max_log2: config.ring_max_log2,
        proof: config.proof.clone(),
        ..new
    };
    tracing::info!("rules were read again");
    if same != *config {
        tracing::warn!("what else has changed in the configuration takes a restart");
    }
}

fn remove_sockets(dir: &Path) {
    for name in [CONTROL_SOCK, ADMIN_SOCK] {
        let _ = rustix::fs::unlink(dir.join(name));
    }
}

/// The sockets in a directory: for shims, and for the tool.
struct Sockets {
    control: OwnedFd,
    admin: UnixListener,
}

impl Sockets {
    /// `public`: everybody may connect.
    fn make(dir: &Path, public: bool) -> Result<Sockets, Error> {
        let (control, admin) = (dir.join(CONTROL_SOCK), dir.join(ADMIN_SOCK));
        let sockets = Sockets {
            control: server::listen(&control).map_err(at(&control))?,
            admin: admin::server::listen(&admin).map_err(|e| Error::Path(admin.clone(), e))?,
        };
        let mode = Mode::from_raw_mode(if public { 0o666 } else { 0o600 });
        for p in [&control, &admin] {
            rustix::fs::chmod(p, mode).map_err(at(p))?;
        }
        Ok(sockets)
    }
}

/// The directory that containers see, with its sockets. Whatever is wrong with it, the node's programs are served, and the
/// container runtime's questions answered.
struct Pods {
    made: Result<(OwnedFd, Sockets), String>,
}

/// The sockets of a directory go with this.
struct PodsDir {
    dir: PathBuf,
    _lock: OwnedFd,
}

impl Drop for PodsDir {
    fn drop(&mut self) {
        remove_sockets(&self.dir);
    }
}

impl Pods {
    /// `None`: this daemon does not look after containers.
    fn make(config: &Config) -> Option<Pods> {
        let pods = &config.pods;
        if pods.nri.as_os_str().is_empty() {
            left::withdraw(pods, false);
            if config.csi.kubelet.as_os_str().is_empty() {
                return None;
            }
        }
        let made = place::make(&pods.dir)
            .map_err(|e| e.to_string())
            .and_then(|lock| {
                let sockets = Sockets::make(&pods.dir, true).map_err(|e| e.to_string())?;
                Ok((lock, sockets))
            });
        Some(Pods { made })
    }

    /// Serves the directory, and begins to speak with the containers' runtime.
    fn serve(self, core: &Shared, config: &Config, cluster: Cluster) -> Option<PodsDir> {
        let pods = &config.pods;
        let (made, dir) = match self.made {
            Err(e) => (Err(e), None),
            Ok((lock, sockets)) => {
                let admin = admin::server::serve(core.clone(), sockets.admin, Gate::Pods);
                tokio::task::spawn_local(admin);
                tokio::task::spawn_local(server::serve(core.clone(), sockets.control));
                let dir = PodsDir {
                    dir: pods.dir.clone(),
                    _lock: lock,
                };
                (Ok(()), Some(dir))
            }
        };
        let known = core.borrow().pods.clone();
        let Cluster { learnt, teller, .. } = cluster;
        if config.kubernetes.api {
            known.ask_also(learnt.clone());
        }
        if !config.csi.kubelet.as_os_str().is_empty() {
            serve_kubelet(core, config, made.is_ok());
        }
        let begun = match pods.nri.as_os_str().is_empty() {
            true => made.map_err(std::io::Error::other),
            false => runtime::start(pods.clone(), known, made, learnt, teller),
        };
        if let Err(e) = begun {
            tracing::error!("no container gets the shim: {e}");
        }
        dir
    }
}

/// Serves the kubelet as a CSI driver. Whatever is wrong with what it mounts: pods whose volumes are mounted have to end.
/// `made`: the directory is this daemon's.
fn serve_kubelet(core: &Shared, config: &Config, made: bool) {
    let config = config.clone();
    let core = core.clone();
    tokio::task::spawn_local(async move {
        let pods = config.pods.clone();
        // (For a runtime with NRI, the thread that speaks with that fills it.)
        let fill = move || match made && pods.nri.as_os_str().is_empty() {
            true => place::fill(&pods).and_then(|()| place::look(&pods.dir)),
            false => Ok(()),
        };
        match tokio::task::spawn_blocking(fill).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::error!("pods have no use of their CSI volumes: {e}"),
            Err(e) => tracing::error!("pods have no use of their CSI volumes: {e}"),
        }
        let mut said = String::new();
        loop {
            let (dir, node) = (config.pods.dir.clone(), config.kubernetes.node());
            match underpass_kubelet::csi::start(&config.csi, dir, node) {
                Ok(driver) => return core.borrow_mut().csi = Some(driver),
                Err(e) if e.to_string() == said => {}
                Err(e) => {
                    tracing::error!("no pod gets the shim by a CSI volume: {e}; trying again");
                    said = e.to_string();
                }
            }
            tokio::time::sleep(SWEEP).await;
        }
    });
}

/// What the Kubernetes API says, from now on or, if it is not to be asked, at no time.
struct Cluster {
    learnt: Arc<Learnt>,
    teller: Option<Teller>,
    nodes: Option<Arc<Nodes>>,
}

/// Beside the pods' directory: what is known of other nodes, for a start while the API is away.
const NODES: &str = "nodes.json";

fn ask_cluster(config: &Config) -> Cluster {
    let file = config.pods.dir.with_file_name(left::CLUSTER);
    let (k, tls) = (&config.kubernetes, &config.tls);
    if !k.api {
        left::withdraw(&config.pods, true);
    }
    let learnt = Arc::new(Learnt::kept_in(file));
    let kept = config.pods.dir.with_file_name(NODES);
    if !k.nodes {
        let _ = std::fs::remove_file(&kept); // mostly there is none
    }
    let nodes = k.nodes.then(|| Arc::new(Nodes::kept_in(kept)));
    let certificates = (!k.ca.is_empty()).then(|| Certificates {
        config_map: k.ca.clone(),
        ca: tls.ca.clone(),
        cert: tls.cert.clone(),
        key: tls.key.clone(),
    });
    let others = Others {
        nodes: nodes.clone(),
        certificates,
    };
    let start = || {
        let teller = underpass_kube::start(k.node(), learnt.clone(), others);
        let said = |e| tracing::error!("the Kubernetes API is not asked: {e}");
        teller.map_err(said).ok()
    };
    let teller = k.api.then(start).flatten();
    Cluster {
        learnt,
        teller,
        nodes,
    }
}

/// The other nodes; `None`: this daemon works alone.
fn directory(config: &Config, cluster: &Cluster) -> Option<Rc<dyn Directory>> {
    if let Some(nodes) = &cluster.nodes {
        let (own, port) = (config.kubernetes.node(), config.control_port().ok()?);
        if !valid_name(&own) {
            // (Some clusters name their nodes by address, and no certificate carries that as a name.)
            tracing::error!("no lanes to other nodes: node name `{own}` is no DNS name");
            return None;
        }
        let signed = !config.kubernetes.ca.is_empty();
        let d = ClusterDirectory::new(own.as_str().into(), nodes.clone(), port, signed);
        return Some(Rc::new(d));
    }
    let named = config.directory().ok().flatten()?; // checked when it was loaded
    Some(Rc::new(named))
}

/// Listens for the other nodes' daemons, and dials them, if there may be any.
fn serve_peers(core: &Shared, config: &Config) -> Result<(), Error> {
    if core.borrow().peers.is_none() {
        return Ok(());
    }
    let node = &config.node;
    let at = match node.control.as_str() {
        "" => format!("port {PORT}"),
        a => a.into(),
    };
    let sock = channels::listen(node).map_err(|e| Error::Peers(at, e))?;
    tokio::task::spawn_local(channels::run(core.clone(), config.tls.clone(), sock));
    tokio::task::spawn_local(lookups::look_for_translated(core.clone()));
    Ok(())
}

/// Starts the data plane, if there are devices for it.
fn serve_rails(core: &Shared) -> Result<Option<Thread>, Error> {
    let Some(plane) = core.borrow().rails.clone() else {
        return Ok(None);
    };
    if !plane.lock().has_devices() {
        core.borrow_mut().rails(Rails::tell_refusals);
        return Ok(None);
    }
    let (tell, stale) = tokio::sync::mpsc::unbounded_channel();
    tokio::task::spawn_local(lookups::watch_devices(core.clone(), stale));
    tokio::task::spawn_local(lookups::take_in(core.clone(), plane.clone()));
    let thread = Thread::start(&plane, tell).map_err(Error::DataPlane)?;
    Ok(Some(thread))
}

/// Starts the thread that shows metrics, if it is wanted.
fn serve_metrics(core: &Shared, options: &Options) -> Result<(), Error> {
    let config = &options.config.metrics;
    if config.listen.is_empty() {
        return Ok(());
    }
    let fail = |e| Error::Metrics(config.listen.clone(), e);
    let control = http::ControlSocket::at(&options.dir.join(CONTROL_SOCK)).map_err(fail)?;
    let (asks, asked) = tokio::sync::mpsc::channel(http::ASKS);
    http::start(config, control, asks).map_err(fail)?;
    tokio::task::spawn_local(gather::serve(core.clone(), asked));
    Ok(())
}

async fn sweep(core: &Shared) {
    loop {
        tokio::time::sleep(SWEEP).await;
        while core.borrow_mut().sweep() {
            tokio::task::yield_now().await;
        }
        // (Nobody waits for it: all helpers may be busy for long.)
        drop(tokio::task::spawn_blocking(held::count));
        lookups::look_at_unprovable(core).await;
        lookups::prune_recovered(core).await;
        readings::fade(core).await;
    }
}

/// Returns when there has been nothing to do for `limit`.
async fn idle(core: &Shared, options: &Options) {
    let Some(limit) = options.idle_exit else {
        return std::future::pending().await;
    };
    loop {
        let (since, now) = {
            let c = core.borrow();
            (c.idle_since, c.now())
        };
        let idle = since.map_or(Duration::ZERO, |t| now.saturating_sub(t));
        if since.is_some() && idle >= limit {
            let dir = options.dir.clone();
            let used = tokio::task::spawn_blocking(move || idle::any(&dir)).await;
            if used.unwrap_or(false) {
                core.borrow_mut().not_idle();
            } else if core.borrow().idle_since == since {
                return; // from here to the removal of the sockets nothing else runs
            }
            continue;
        }
        let left = limit.saturating_sub(idle);
        tokio::time::sleep(left.max(Duration::from_millis(50))).await;
    }
}
