//! Images of the pods that `kinds` makes: this system's programs, and what its own images do not have.

use crate::cluster::SHELL;
use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};
use underpass_tests::harness::containerd::{self, run};
use underpass_tests::harness::paths;
use underpass_tests::harness::web::noise;

/// nginx and Redis, and their clients.
pub const WEB: &str = "underpass.test/web:1";
pub const PYTHON: &str = "underpass.test/python:1";
/// It sets `LD_PRELOAD` itself.
pub const PRELOADS: &str = "underpass.test/preloads:1";
/// Its only C library is musl.
pub const MUSL: &str = "underpass.test/musl:1";
/// It has no library.
pub const STATIC: &str = "underpass.test/static:1";

/// Of the file that nginx serves.
pub const FILE_BYTES: usize = 8 << 20;
/// The library that one of the images preloads.
pub const WRAPS: &str = "/usr/lib/wraps_connect.so";

/// A web server as a container runs it that may write to /tmp only.
const NGINX: &str = "daemon off; worker_processes 1; pid /tmp/pid; error_log stderr;
events { worker_connections 256; }
http {
  access_log off; sendfile on; keepalive_requests 1000000000; default_type text/plain;
  client_body_temp_path /tmp/t1; proxy_temp_path /tmp/t2; fastcgi_temp_path /tmp/t3;
  uwsgi_temp_path /tmp/t4; scgi_temp_path /tmp/t5;
  server { listen 8080; listen [::]:8080; root /srv; }
}
";

/// What nginx serves as `file`.
pub fn file() -> Vec<u8> {
    noise(FILE_BYTES)
}

/// Puts what an image has below its root.
type Fill = fn(&Path) -> Result<()>;

/// Makes them all below `at`, as files that a runtime imports.
pub fn make(at: &Path) -> Result<Vec<PathBuf>> {
    let preload = [format!("LD_PRELOAD={WRAPS}")];
    let all: [(&str, Fill, &[String]); 5] = [
        (WEB, web, &[]),
        (PYTHON, python, &[]),
        (PRELOADS, preloads, &preload),
        (MUSL, musl, &[]),
        (STATIC, alone, &[]),
    ];
    let each = all.into_iter().enumerate();
    each.map(|(n, (name, fill, variables))| {
        let root = at.join(format!("kind{n}"));
        std::fs::create_dir(&root)?;
        fill(&root).with_context(|| name.to_owned())?;
        let tar = at.join(format!("kind{n}.tar"));
        containerd::image_with(&root, name, &["/bin/sleep", "1000000"], variables, &tar)?;
        Ok(tar)
    })
    .collect()
}

fn web(root: &Path) -> Result<()> {
    let programs = [
        "/usr/sbin/nginx",
        "/usr/bin/curl",
        "/usr/bin/redis-server",
        "/usr/bin/redis-cli",
        "/usr/bin/redis-benchmark",
    ];
    containerd::fill(root, &[&SHELL[..], &programs].concat())?;
    std::fs::write(root.join("etc/nginx.conf"), NGINX)?;
    std::fs::create_dir(root.join("srv"))?;
    std::fs::write(root.join("srv/small"), "x".repeat(612))?;
    Ok(std::fs::write(root.join("srv/file"), file())?)
}

/// Debian's Python with what a job needs of its library.
fn python(root: &Path) -> Result<()> {
    const LIBRARY: &str = "usr/lib/python3.11";
    containerd::fill(root, &[&SHELL[..], &[paths::PYTHON]].concat())?;
    let without = ["test", "__pycache__", "config-*", "lib-dynload", "idlelib"];
    let without = without.map(|w| format!("--exclude={w}"));
    let tar = root.join("library.tar");
    let to = tar.to_string_lossy();
    let without: Vec<&str> = without.iter().map(String::as_str).collect();
    run(
        "tar",
        &[&["-C", "/", "-cf", &to], &without[..], &[LIBRARY]].concat(),
    )?;
    run("tar", &["-C", &root.to_string_lossy(), "-xf", &to])?;
    std::fs::remove_file(&tar)?;
    let modules = std::fs::read_dir(Path::new("/").join(LIBRARY).join("lib-dynload"))?;
    let modules = modules.flatten().map(|e| e.path());
    let modules: Vec<String> = modules
        .filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy();
            ["_multiprocessing.", "_hashlib.", "_posixshmem."]
                .iter()
                .any(|w| name.starts_with(w))
        })
        .map(|p| p.to_string_lossy().into_owned())
        .collect();
    ensure!(!modules.is_empty(), "Python's modules are elsewhere");
    // (With the libraries that these need.)
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    containerd::add(root, &modules)?;
    std::fs::create_dir_all(root.join("srv"))?;
    for f in ["job.py", "flow.py"] {
        std::fs::copy(paths::script(f), root.join("srv").join(f))?;
    }
    Ok(())
}

fn preloads(root: &Path) -> Result<()> {
    let programs = ["/usr/bin/redis-cli"];
    containerd::fill(root, &[&SHELL[..], &programs].concat())?;
    let to = root.join(&WRAPS[1..]);
    std::fs::create_dir_all(to.parent().context("a path")?)?;
    let source = paths::script("wraps_connect.c");
    let (to, source) = (to.to_string_lossy(), source.to_string_lossy());
    run("gcc", &["-O1", "-shared", "-fPIC", "-o", &to, &source])?;
    Ok(())
}

fn musl(root: &Path) -> Result<()> {
    containerd::common(root)?;
    containerd::fill_musl(root)
}

fn alone(root: &Path) -> Result<()> {
    containerd::common(root)?;
    containerd::fill_static(root)
}
