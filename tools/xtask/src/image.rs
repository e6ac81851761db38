//! `make image`: `target/underpass/image.tar`, an OCI image of the daemon as an image layout, which
//! `ctr images import` and others read. It is made of what was built and of packages of Debian 12; no container runtime
//! takes part.
//!
//! An image's three documents are short and fixed, so they are written here: crates for them would be compiled before
//! every other step of CI. The layer is not compressed, so that its digest does not depend on a compressor's version.

use crate::package::{self, VERSION};
use crate::Tree;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name that `underpass:VERSION` stands for in Kubernetes, Docker and nerdctl.
const NAME: &str = "docker.io/library/underpass";

/// What the image has of Debian's packages: libraries, the list of RDMA drivers, licences, and what scanners look for.
const DEBIAN: [&str; 10] = [
    "lib",
    "lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/os-release",
    "etc/os-release",
    "etc/debian_version",
    "etc/libibverbs.d",
    "usr/share/doc",
    "usr/share/common-licenses",
    "var/lib/dpkg/status.d",
];

/// Of these libraries: character sets, of which only UTF-8 is used.
const USELESS: [&str; 1] = ["usr/lib/x86_64-linux-gnu/gconv"];

/// Where a runtime and the daemon put something.
const EMPTY: [&str; 6] = ["dev", "proc", "run", "sys", "tmp", "var/lib/underpass"];

/// Small files. (Files and DNS are parts of the C library itself.)
const WRITTEN: [(&str, &str); 3] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\n",
    ),
];

/// Where the dynamic linker looks.
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

pub fn make(tree: &Tree) -> Result<(), String> {
    let at = tree.target.join("image");
    let root = at.join("root");
    fill(tree, &at.join("debian"), &root)?;
    complete(&root)?;

    let mut layout = Layout::at(&at.join("layout"))?;
    let layer = at.join("layer.tar");
    package::tar(&root, &layer)?;
    let layer = layout.blob(LAYER, &layer)?;
    let config = layout.text(CONFIG, &config(&layer.digest))?;
    let manifest = layout.text(MANIFEST, &manifest(&config, &layer))?;
    let index = index(&manifest);
    package::write(&layout.dir.join("index.json"), index, 0o644)?;
    let version = r#"{"imageLayoutVersion": "1.0.0"}"#;
    package::write(&layout.dir.join("oci-layout"), version, 0o644)?;

    let tar = tree.target.join("underpass/image.tar");
    let new = tar.with_extension("new");
    package::tar(&layout.dir, &new)?;
    fs::rename(&new, &tar).map_err(|e| format!("{}: {e}", tar.display()))?;
    println!(
        "{}: {NAME}:{VERSION}, sha256:{}, layer of {:.1} MiB",
        tar.display(),
        manifest.digest,
        layer.size as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// The root directory of its containers.
fn fill(tree: &Tree, debian: &Path, root: &Path) -> Result<(), String> {
    package::stage(tree, root)?;
    let mut cp = Command::new("cp");
    cp.args(["-a", "--parents"]).args(DEBIAN).arg(root);
    package::run(cp.current_dir(debian))
        .map_err(|e| format!("{e} (tools/install-deps.sh image unpacks Debian's packages)"))?;
    for useless in USELESS {
        let dir = root.join(useless);
        fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    for (name, text) in WRITTEN {
        package::write(&root.join(name), text, 0o644)?;
    }
    let licence = root.join("usr/share/doc/underpass/copyright");
    package::copy(&tree.root.join("LICENSE"), &licence, 0o644)?;
    for empty in EMPTY {
        let dir = root.join(empty);
        fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    Ok(())
}

/// Is everything there that programs and libraries are linked to? This system's files do not count.
fn complete(root: &Path) -> Result<(), String> {
    let path = LIBRARIES.map(|l| root.join(l).display().to_string());
    let linker = || {
        let mut c = Command::new(root.join("lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"));
        c.args(["--inhibit-cache", "--library-path", &path.join(":")]);
        c
    };
    let programs = ["usr/bin/underpassd", "usr/bin/underpass"].map(|p| root.join(p));
    let mut all: Vec<PathBuf> = programs.to_vec();
    for dir in LIBRARIES
        .iter()
        .chain(&["usr/lib/x86_64-linux-gnu/libibverbs", "usr/lib/underpass"])
    {
        let dir = root.join(dir);
        let files = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let names = files.flatten().map(|f| f.path());
        all.extend(names.filter(|p| p.to_string_lossy().contains(".so")));
    }
    let inside = root.display().to_string();
    for file in all {
        let list = package::says(linker().arg("--list").arg(&file))?;
        let mut found = list.lines().filter_map(|l| l.split(" => ").nth(1));
        if let Some(other) = found.find(|p| !p.starts_with(&inside)) {
            return Err(format!("{}: the image lacks {other}", file.display()));
        }
    }
    // (A C library that is too old for what was built here would say so.)
    for program in programs {
        package::says(linker().arg(program).arg("--version"))?;
    }
    Ok(())
}

/// A file of the layout, as others name it.
struct Blob {
    kind: &'static str,
    digest: String,
    size: u64,
}

impl Blob {
    /// Its descriptor, with `more` members.
    fn json(&self, more: &str) -> String {
        let Blob { kind, digest, size } = self;
        format!(r#"{{"mediaType": "{kind}", "digest": "sha256:{digest}", "size": {size}{more}}}"#)
    }
}

struct Layout {
    dir: PathBuf,
}

impl Layout {
    fn at(dir: &Path) -> Result<Self, String> {
        package::anew(dir)?;
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).map_err(|e| format!("{}: {e}", blobs.display()))?;
        Ok(Layout { dir: dir.into() })
    }

    /// Moves a file into it.
    fn blob(&mut self, kind: &'static str, file: &Path) -> Result<Blob, String> {
        let fail = |e| format!("{}: {e}", file.display());
        let sum = package::says(Command::new("sha256sum").arg(file))?;
        let digest = sum.split(' ').next().unwrap_or_default().to_string();
        let size = fs::metadata(file).map_err(fail)?.len();
        fs::rename(file, self.dir.join("blobs/sha256").join(&digest)).map_err(fail)?;
        Ok(Blob { kind, digest, size })
    }

    fn text(&mut self, kind: &'static str, text: &str) -> Result<Blob, String> {
        let file = self.dir.join("new");
        package::write(&file, text, 0o644)?;
        self.blob(kind, &file)
    }
}

/// What a runtime does with the image. Arguments of a container replace `Cmd`.
fn config(layer: &str) -> String {
    let licence = env!("CARGO_PKG_LICENSE");
    format!(
        r#"{{"created": "1970-01-01T00:00:00Z", "architecture": "amd64", "os": "linux", "config": {{
"Env": ["PATH=/usr/bin"], "WorkingDir": "/",
"Entrypoint": ["/usr/bin/underpassd"], "Cmd": ["--config", "/etc/underpass/underpassd.toml"],
"Labels": {{"org.opencontainers.image.title": "underpass", "org.opencontainers.image.version": "{VERSION}",
"org.opencontainers.image.licenses": "{licence}"}}}},
"rootfs": {{"type": "layers", "diff_ids": ["sha256:{layer}"]}},
"history": [{{"created": "1970-01-01T00:00:00Z", "created_by": "make image"}}]}}"#
    )
}

fn manifest(config: &Blob, layer: &Blob) -> String {
    format!(
        r#"{{"schemaVersion": 2, "mediaType": "{MANIFEST}", "config": {}, "layers": [{}]}}"#,
        config.json(""),
        layer.json("")
    )
}

fn index(manifest: &Blob) -> String {
    let more = format!(
        r#", "platform": {{"architecture": "amd64", "os": "linux"}}, "annotations": {{
"io.containerd.image.name": "{NAME}:{VERSION}", "org.opencontainers.image.ref.name": "{VERSION}"}}"#
    );
    format!(
        r#"{{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [{}]}}"#,
        manifest.json(&more)
    )
}
