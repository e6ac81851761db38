//! containerd from Debian 13 and from what becomes Debian 14, unpacked by `tools/install-deps.sh`: where they are, how they are configured,
//! and images of this system's programs.

use super::paths;
use anyhow::{ensure, Context, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Image that a sandbox is made of.
pub const PAUSE: &str = "underpass.test/pause:1";

/// Which containerd.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Version {
    /// 1.7, for all kubelets.
    One,
    /// 2.x, for kubelets from 1.26 on.
    Two,
}

impl Version {
    /// Where its programs are.
    pub fn bin(self) -> PathBuf {
        let name = match self {
            Version::One => "containerd",
            Version::Two => "containerd2",
        };
        paths::target().join(name).join("usr/bin")
    }

    /// `PATH` for it: its own programs, runc and what they call.
    pub fn path(self) -> String {
        let path = std::env::var("PATH").unwrap_or_default();
        format!("{}:/usr/sbin:/sbin:{path}", self.bin().display())
    }
}

/// Directories and sockets of one containerd.
pub struct Places<'a> {
    /// What it keeps, and what it has while it runs.
    pub root: &'a str,
    pub state: &'a str,
    /// Directory of configurations of the pods' network.
    pub cni: &'a str,
    pub nri: &'a str,
    /// Plugins that it starts itself, and their configurations.
    pub plugins: [&'a str; 2],
}

/// A configuration file in which NRI is on: in 2.x it is so without a word.
pub fn config(version: Version, p: &Places) -> String {
    let Places {
        root,
        state,
        cni,
        nri,
        plugins: [plugins, plugins_conf],
    } = p;
    let (number, kubernetes, enabled) = match version {
        Version::One => (
            2,
            format!(
                r#"[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{cni}""#
            ),
            "disable = false",
        ),
        Version::Two => (
            3,
            format!(
                r#"[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{cni}""#
            ),
            "",
        ),
    };
    format!(
        r#"version = {number}
root = "{root}"
state = "{state}"
[grpc]
address = "{state}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
{kubernetes}
[plugins."io.containerd.nri.v1.nri"]
{enabled}
socket_path = "{nri}"
plugin_path = "{plugins}"
plugin_config_path = "{plugins_conf}"
"#
    )
}

/// Runs a program to its end, which must be success. What it wrote.
pub fn run(program: impl AsRef<Path>, args: &[&str]) -> Result<String> {
    let program = program.as_ref();
    let out = Command::new(program).args(args).output();
    let out = out.with_context(|| program.display().to_string())?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    ensure!(
        out.status.success(),
        "{} {args:?}: {text}{}",
        program.display(),
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(text)
}

/// Copies programs of this system into the root of an image, with what they are linked to, and what every image has.
pub fn fill(root: &Path, programs: &[&str]) -> Result<()> {
    add(root, programs)?;
    common(root)
}

/// Copies programs or libraries of this system, with what they are linked to.
pub fn add(root: &Path, programs: &[&str]) -> Result<()> {
    let mut files: BTreeSet<String> = programs.iter().map(|p| (*p).into()).collect();
    for p in programs {
        let libraries = run("ldd", &[p])?;
        let words = libraries.split_whitespace();
        files.extend(words.filter(|w| w.starts_with('/')).map(String::from));
    }
    for f in &files {
        let to = root.join(&f[1..]);
        std::fs::create_dir_all(to.parent().context("a path")?)?;
        std::fs::copy(f, &to).with_context(|| f.clone())?;
    }
    Ok(())
}

/// What every image has.
pub fn common(root: &Path) -> Result<()> {
    for d in ["tmp", "etc", "proc", "sys", "dev", "run", "var"] {
        std::fs::create_dir_all(root.join(d))?;
    }
    std::os::unix::fs::symlink("/run", root.join("var/run"))?;
    std::fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n")?;
    Ok(())
}

/// Adds `asks-musl`, a program for musl, with the loader that starts it.
pub fn fill_musl(root: &Path) -> Result<()> {
    asks(root, "asks-musl", &[])?;
    let loader = root.join("lib/ld-musl-x86_64.so.1");
    std::fs::create_dir_all(root.join("lib"))?;
    std::fs::copy("/lib/ld-musl-x86_64.so.1", &loader).context("musl's loader")?;
    Ok(())
}

/// Adds `asks-static`, a program that has no libraries.
pub fn fill_static(root: &Path) -> Result<()> {
    asks(root, "asks-static", &["-static"])
}

fn asks(root: &Path, name: &str, how: &[&str]) -> Result<()> {
    let to = root.join("usr/bin");
    std::fs::create_dir_all(&to)?;
    let (to, source) = (to.join(name), paths::script("asks.c"));
    let words = [
        "-O1",
        "-o",
        &to.to_string_lossy(),
        &source.to_string_lossy(),
    ];
    run("musl-gcc", &[&words, how].concat())?;
    Ok(())
}

/// An image of one layer, in the form of `docker save`.
pub fn image(root: &Path, name: &str, entry: &[&str], tar: &Path) -> Result<()> {
    image_with(root, name, entry, &[], tar)
}

/// The same that sets variables besides `PATH`.
pub fn image_with(
    root: &Path,
    name: &str,
    entry: &[&str],
    variables: &[String],
    tar: &Path,
) -> Result<()> {
    let mut all = vec!["PATH=/usr/bin:/bin".to_owned()];
    all.extend_from_slice(variables);
    let at = tempfile::tempdir_in(root.parent().context("a path")?)?;
    let hex = |bytes: &[u8]| {
        Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    let layer = at.path().join("layer.tar");
    let (root, layer) = (root.to_string_lossy(), layer.to_string_lossy().into_owned());
    let whose = ["--sort=name", "--owner=0", "--group=0"];
    let of = ["-C", &root, "-cf", &layer, "."];
    run("tar", &[&whose[..], &of].concat())?;
    let digest = hex(&std::fs::read(&layer)?);
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": { "Entrypoint": entry, "Env": all },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    let config = serde_json::to_vec(&config)?;
    let config_name = format!("{}.json", hex(&config));
    std::fs::write(at.path().join(&config_name), &config)?;
    let manifest = serde_json::json!([{
        "Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"],
    }]);
    std::fs::write(
        at.path().join("manifest.json"),
        serde_json::to_vec(&manifest)?,
    )?;
    let (from, to) = (at.path().to_string_lossy(), tar.to_string_lossy());
    let parts = ["manifest.json", &config_name, "layer.tar"];
    run("tar", &[&["-C", &from, "-cf", &to], &parts[..]].concat())?;
    Ok(())
}
