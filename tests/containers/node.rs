//! A node: containerd 1.7 or 2.x with runc and the CNI plugins of this system, an image that is made of this system's
//! programs, and a daemon that containerd asks about containers. Everything lies in one directory and ends with it.

use super::cri::{self, Cri, Id, Nothing, Said};
use anyhow::{bail, ensure, Context, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use underpass_admin::{PodRow, Request, Response};
use underpass_tests::harness::containerd::{self, image, run, Version, PAUSE};
use underpass_tests::harness::machine::remove_cgroups;
use underpass_tests::harness::{paths, until, Daemon, Place, Program, Running};

/// The network of the pods, which exists while the tests run.
const BRIDGE: &str = "upod0";
const SUBNET: &str = "10.214.77.0/24";
/// The cgroup of all pods.
const CGROUP: &str = "underpass-test";
const IMAGE: &str = "underpass.test/programs:1";
/// Where a plugin that the runtime starts looks for what the daemon has left.
const LEFT: &str = "/var/lib/underpass";
/// The longest that containerd takes to be ready.
const READY: Duration = Duration::from_secs(30);

/// Programs of the image, each with the libraries that it is linked to.
const PROGRAMS: [&str; 12] = [
    "/bin/sh",
    "/bin/sleep",
    "/bin/cat",
    "/bin/ls",
    "/bin/touch",
    "/usr/bin/env",
    "/usr/bin/head",
    "/usr/bin/sha256sum",
    "/usr/bin/redis-server",
    "/usr/bin/redis-cli",
    "/usr/bin/redis-benchmark",
    "/usr/bin/true",
];

pub struct Node {
    pub daemon: Daemon,
    pub cri: Cri,
    version: Version,
    dir: TempDir,
    containerd: Option<Running>,
    pods: Vec<String>,
}

/// A pod that runs.
#[derive(Clone)]
pub struct Pod {
    pub id: String,
    /// Of its first container.
    pub container: String,
    pub address: String,
}

/// What a pod is to be.
#[derive(Clone, Default)]
pub struct Wish {
    pub name: &'static str,
    pub annotations: Vec<(&'static str, &'static str)>,
    pub env: Vec<(&'static str, &'static str)>,
    pub command: Vec<String>,
    /// Those at `/run` and `/var/run` are read-only.
    pub mounts: Vec<(&'static str, PathBuf)>,
    pub host_network: bool,
    /// As the *restricted* Pod Security profile wants it, with a root file system that is read-only.
    pub restricted: bool,
}

impl Node {
    pub fn start(version: Version) -> Result<Node> {
        let dir = tempfile::Builder::new().prefix("upnode-").tempdir()?;
        let at = dir.path();
        configure(version, at)?;
        let mut node = Node {
            cri: Cri::at(&at.join("state/containerd.sock"))?,
            daemon: daemon(at)?,
            version,
            dir,
            containerd: None,
            pods: Vec::new(),
        };
        node.restart_containerd()?;
        node.import()?;
        Ok(node)
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts it, or kills it and starts another one, until that has asked the daemon: containers go on meanwhile.
    pub fn restart_containerd(&mut self) -> Result<()> {
        let before = self.registrations();
        self.replace_containerd()?;
        let asked = || self.registrations() > before;
        until("containerd asks the daemon", READY, asked).with_context(|| self.picture())
    }

    /// The same, to another version, which takes over what there is, its configuration too.
    pub fn upgrade_containerd(&mut self, version: Version) -> Result<()> {
        self.version = version;
        self.restart_containerd()
    }

    /// The same as a restart, while there is no daemon.
    pub fn replace_containerd(&mut self) -> Result<()> {
        if let Some(mut c) = self.containerd.take() {
            c.kill();
        }
        let started = Program::new(self.version.bin().join("containerd"), &Place::bare())
            .arg("--config")
            .arg(self.dir.path().join("config.toml"))
            .env("PATH", self.version.path())
            .spawn()?;
        self.containerd = Some(started);
        let ready = until("containerd is ready", READY, || self.is_ready());
        ready.with_context(|| self.picture())
    }

    /// Puts the plugin where the runtime starts it when it is started the next time. (It looks in one place only, which here is
    /// the node's directory.)
    pub fn put_plugin(&self) -> Result<PathBuf> {
        let at = self.dir.path().display();
        let tool = paths::bin("underpass-static");
        let text = format!(
            "#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs none /var/lib && mkdir {LEFT} && \
             mount --bind {at} {LEFT} && exec {}'\n",
            tool.display()
        );
        let plugin = self.dir.path().join("plugins/98-underpass");
        std::fs::write(&plugin, text)?;
        std::fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        Ok(plugin)
    }

    /// How often this daemon has been registered with a runtime.
    pub fn registrations(&self) -> usize {
        self.daemon.said().matches("registered with").count()
    }

    fn is_ready(&self) -> bool {
        let said: Result<cri::Conditions> = self.cri.call("Status", Nothing {});
        said.is_ok_and(|c| {
            let all = c.status.unwrap_or_default().conditions;
            !all.is_empty() && all.iter().all(|c| c.is)
        })
    }

    /// What is known, for errors.
    pub fn picture(&self) -> String {
        let log = self
            .containerd
            .as_ref()
            .map_or_else(String::new, Running::stderr);
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n");
        let mut text = format!(
            "{}\n{}\ncontainerd:\n{last}\n",
            self.daemon.picture(),
            self.daemon.said()
        );
        let logs = std::fs::read_dir(self.dir.path().join("logs"))
            .into_iter()
            .flatten();
        for l in logs
            .flatten()
            .filter(|l| l.file_name().to_string_lossy().ends_with(".log"))
        {
            let said = std::fs::read_to_string(l.path()).unwrap_or_default();
            let said: String = said.chars().take(2000).collect();
            text.push_str(&format!("{}:\n{said}\n", l.path().display()));
        }
        text
    }

    fn ctr(&self, args: &[&str]) -> Result<String> {
        let socket = self.dir.path().join("state/containerd.sock");
        let socket = socket.to_string_lossy();
        let all = [&["--address", &socket, "-n", "k8s.io"], args].concat();
        run(self.version.bin().join("ctr"), &all)
    }

    /// Makes the images of this system's programs.
    fn import(&self) -> Result<()> {
        let root = self.dir.path().join("image/root");
        fill(&root)?;
        for (name, entry) in [(IMAGE, "/bin/sleep"), (PAUSE, "/bin/sleep")] {
            let tar = self.dir.path().join("image/image.tar");
            image(&root, name, &[entry, "1000000"], &tar)?;
            self.ctr(&["images", "import", "--local", &tar.to_string_lossy()])
                .or_else(|_| self.ctr(&["images", "import", &tar.to_string_lossy()]))?;
        }
        Ok(())
    }

    /// Makes a pod with one container and starts it.
    pub fn pod(&mut self, wish: &Wish) -> Result<Pod> {
        let config = self.pod_config(wish);
        let made: Id = self.cri.call(
            "RunPodSandbox",
            cri::RunPod {
                config: Some(config.clone()),
            },
        )?;
        self.pods.push(made.id.clone());
        let container = self.container(&made.id, wish, "main")?;
        let status: cri::PodStatus = self.cri.call("PodSandboxStatus", made.clone())?;
        let network = status.status.unwrap_or_default().network;
        Ok(Pod {
            address: network.map_or_else(String::new, |n| n.id),
            id: made.id,
            container,
        })
    }

    /// Another container of a pod.
    pub fn container(&self, pod: &str, wish: &Wish, name: &str) -> Result<String> {
        let container: Id = self.cri.call(
            "CreateContainer",
            cri::CreateContainer {
                pod: pod.into(),
                config: Some(container_config(wish, name)),
                pod_config: Some(self.pod_config(wish)),
            },
        )?;
        let _: Nothing = self.cri.call("StartContainer", container.clone())?;
        Ok(container.id)
    }

    fn pod_config(&self, wish: &Wish) -> cri::PodConfig {
        let uid = format!("0123abcd-0000-0000-0000-{:012}", self.pods.len());
        let annotations = wish.annotations.iter();
        cri::PodConfig {
            metadata: Some(cri::PodMetadata {
                name: wish.name.into(),
                uid: uid.clone(),
                namespace: "shop".into(),
            }),
            // (The node's network comes with the node's name.)
            hostname: match wish.host_network {
                true => String::new(),
                false => wish.name.into(),
            },
            logs: self.dir.path().join("logs").to_string_lossy().into_owned(),
            annotations: annotations
                .map(|(k, v)| ((*k).into(), (*v).into()))
                .collect(),
            linux: Some(cri::LinuxPod {
                cgroup_parent: format!("/{CGROUP}/pod{uid}"),
                security: Some(cri::PodSecurity {
                    namespaces: Some(namespaces(wish)),
                }),
            }),
        }
    }

    /// Runs a program in a container to its end.
    pub fn exec(&self, container: &str, command: &[&str]) -> Result<Said> {
        self.cri.call(
            "ExecSync",
            cri::Exec {
                container: container.into(),
                command: command.iter().map(|w| (*w).into()).collect(),
                timeout: 30,
            },
        )
    }

    /// The same; it must succeed. What it wrote.
    pub fn says(&self, container: &str, command: &[&str]) -> Result<String> {
        let said = self.exec(container, command)?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let errors = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(
            said.status == 0,
            "{command:?}: {} {text}{errors}",
            said.status
        );
        ensure!(errors.is_empty(), "{command:?} complains: {errors}");
        Ok(text)
    }

    pub fn remove(&mut self, pod: &str) -> Result<()> {
        let id = || Id { id: pod.into() };
        // (As the kubelet does it: a container that ends by itself at this moment may make it fail.)
        let mut stopped = self.cri.call::<_, Nothing>("StopPodSandbox", id());
        for _ in 0..3 {
            if stopped.is_err() {
                std::thread::sleep(Duration::from_millis(500));
                stopped = self.cri.call("StopPodSandbox", id());
            }
        }
        stopped?;
        let _: Nothing = self.cri.call("RemovePodSandbox", id())?;
        self.pods.retain(|p| p != pod);
        Ok(())
    }

    pub fn remove_all(&mut self) -> Result<()> {
        let all = self.pods.clone();
        all.iter().try_for_each(|p| self.remove(p))
    }

    /// What the daemon says of a pod's containers.
    pub fn rows(&self, pod: &str) -> Result<Vec<PodRow>> {
        match self.daemon.ask(&Request::Pods)? {
            Response::Pods { rows, .. } => {
                Ok(rows.into_iter().filter(|r| r.at.pod == pod).collect())
            }
            other => bail!("pods answered {other:?}"),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(e) = self.remove_all() {
            eprintln!("pods are left: {e:#}");
        }
        drop(self.containerd.take());
        let _ = run("ip", &["link", "delete", BRIDGE]);
        // The runtime leaves the pods' cgroups.
        remove_cgroups(CGROUP);
        // Mounts of containers that were not removed.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let here = self.dir.path().to_string_lossy().into_owned();
        let points = mounts.lines().rev().filter_map(|l| l.split(' ').nth(1));
        for m in points.filter(|m| m.starts_with(&here)) {
            let _ = run("umount", &["-l", m]);
        }
    }
}

fn daemon(at: &Path) -> Result<Daemon> {
    let text = format!(
        "[pods]\nnri = '{0}/nri.sock'\ndir = '{0}/pods'\nplugins = '{0}/plugins'\nlibrary = '{1}'\ntool = '{2}'\n",
        at.display(),
        paths::shim().display(),
        paths::bin("underpass-static").display(),
    );
    let config = at.join("underpassd.toml");
    std::fs::write(&config, text)?;
    // (The pods' directory must be reachable for everybody.)
    std::fs::set_permissions(at, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Daemon::with(&["--config", &config.to_string_lossy()])
}

fn namespaces(wish: &Wish) -> cri::Namespaces {
    cri::Namespaces {
        network: if wish.host_network { 2 } else { 0 },
        pid: 1,
        ipc: 0,
    }
}

fn container_config(wish: &Wish, name: &str) -> cri::ContainerConfig {
    let restricted = cri::ContainerSecurity {
        capabilities: Some(cri::Capabilities {
            drop: vec!["ALL".into()],
        }),
        user: Some(cri::Int64 { value: 10_001 }),
        read_only_root: true,
        no_new_privileges: true,
        seccomp: Some(cri::Profile { kind: 0 }),
        namespaces: Some(namespaces(wish)),
    };
    let plain = cri::ContainerSecurity {
        namespaces: Some(namespaces(wish)),
        ..cri::ContainerSecurity::default()
    };
    let variable = |(key, value): &(&str, &str)| cri::Variable {
        key: (*key).into(),
        value: (*value).into(),
    };
    let mount = |(to, from): &(&str, PathBuf)| cri::ContainerMount {
        container: (*to).into(),
        host: from.to_string_lossy().into_owned(),
        read_only: to.ends_with("/run"),
    };
    cri::ContainerConfig {
        metadata: Some(Id { id: name.into() }),
        image: Some(Id { id: IMAGE.into() }),
        command: wish.command.clone(),
        env: wish.env.iter().map(variable).collect(),
        mounts: wish.mounts.iter().map(mount).collect(),
        log: format!("{}-{name}.log", wish.name),
        linux: Some(cri::LinuxContainer {
            security: Some(if wish.restricted { restricted } else { plain }),
        }),
    }
}

/// Files of containerd and of the network of its pods.
fn configure(version: Version, at: &Path) -> Result<()> {
    let at_text = at.display();
    for d in ["cni", "logs", "image", "plugins", "plugins.conf"] {
        std::fs::create_dir_all(at.join(d))?;
    }
    let part = |name: &str| at.join(name).to_string_lossy().into_owned();
    let [root, state, cni, nri, plugins, plugins_conf] = [
        "root",
        "state",
        "cni",
        "nri.sock",
        "plugins",
        "plugins.conf",
    ]
    .map(part);
    let places = containerd::Places {
        root: &root,
        state: &state,
        cni: &cni,
        nri: &nri,
        plugins: [&plugins, &plugins_conf],
    };
    std::fs::write(at.join("config.toml"), containerd::config(version, &places))?;
    std::fs::write(
        at.join("cni/10-pods.conflist"),
        format!(
            r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [{{"type": "bridge", "bridge": "{BRIDGE}",
"isGateway": true, "ipam": {{"type": "host-local", "dataDir": "{at_text}/addresses",
"ranges": [[{{"subnet": "{SUBNET}"}}]]}}}}]}}"#
        ),
    )?;
    Ok(())
}

/// The programs of the image: this system's, one for musl, and one that has no libraries.
fn fill(root: &Path) -> Result<()> {
    containerd::fill(root, &PROGRAMS)?;
    containerd::fill_musl(root)?;
    containerd::fill_static(root)
}
