//! containerd from Debian 13 with runc of this system, without Kubernetes' part of it, told what to do by its `ctr`.
//! Everything lies in one directory and ends with it.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use underpass_tests::harness::{paths, until, Output, Place, Program, Running, PATIENCE};

/// The namespace of images and containers, after which their cgroup is called, too.
const NAMESPACE: &str = "underpass-packaging";

pub struct Containerd {
    dir: TempDir,
    running: Option<Running>,
}

impl Containerd {
    pub fn start() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("upimage-").tempdir()?;
        let at = dir.path().display();
        let config = dir.path().join("config.toml");
        std::fs::write(
            &config,
            format!(
                r#"version = 2
root = "{at}/root"
state = "{at}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
address = "{at}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{at}/opt"
"#
            ),
        )?;
        let path = std::env::var("PATH").unwrap_or_default();
        let running = Program::new(bin("containerd"), &Place::bare())
            .arg("--config")
            .arg(config)
            .env(
                "PATH",
                format!("{}:/usr/sbin:/sbin:{path}", bin("").display()),
            )
            .spawn()?;
        let c = Containerd {
            dir,
            running: Some(running),
        };
        let answers = || c.ctr(&["version"]).is_ok();
        until("containerd answers", PATIENCE, answers).with_context(|| c.said())?;
        Ok(c)
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// What it wrote, for errors.
    pub fn said(&self) -> String {
        self.running
            .as_ref()
            .map_or_else(String::new, Running::stderr)
    }

    pub fn program(&self, args: &[&str]) -> Program {
        Program::new(bin("ctr"), &Place::bare())
            .arg("--address")
            .arg(self.dir.path().join("containerd.sock"))
            .args(["-n", NAMESPACE])
            .args(args)
    }

    /// Runs `ctr`, which must succeed.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        self.program(args).check(Duration::from_secs(60))
    }

    /// What a program in a container of its own did. `more`: options of `ctr run`.
    pub fn run(&self, image: &str, more: &[&str], command: &[&str]) -> Result<Output> {
        let options = ["run", "--rm", "--snapshotter", "native"];
        self.program(&[&options, more, &[image, "one"], command].concat())
            .run(Duration::from_secs(60))
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // Its shims, which are its containers' parents, outlive it otherwise.
        for task in self.ctr(&["tasks", "ls", "-q"]).unwrap_or_default().lines() {
            let _ = self.ctr(&["tasks", "rm", "-f", task]);
        }
        drop(self.running.take());
        let roots = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten();
        for root in roots.flatten().map(|e| e.path()) {
            let ours = root.join(NAMESPACE);
            let inside = std::fs::read_dir(&ours).into_iter().flatten().flatten();
            for group in inside.filter(|g| g.path().is_dir()) {
                let _ = std::fs::remove_dir(group.path());
            }
            let _ = std::fs::remove_dir(&ours);
        }
    }
}

/// Where containerd is: see `tools/install-deps.sh`.
fn bin(name: &str) -> PathBuf {
    paths::target().join("containerd/usr/bin").join(name)
}
