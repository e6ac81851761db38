//! The directory of the node that containers get to see, read-only: the shim, the tool, the sockets for both. What steers
//! the daemon is not in it.

use super::files::put;
use super::policy::{PodsConfig, LEFT, SHIM};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_admin::places;

/// Names in the directory.
const TOOL: &str = "underpass";
/// The tool's other name: it then behaves like the program of smc-tools.
const SMCSS: &str = "smcss";

/// Name of the plugin that the runtime starts itself: it is asked before the daemon's own, which then finds its work done.
const PLUGIN: &str = "98-underpass";

/// How long a daemon that is ending may still hold the directory.
const LEAVING: Duration = Duration::from_secs(1);

/// Does SELinux enforce its rules?
const ENFORCES: &str = "/sys/fs/selinux/enforce";

/// Why something is not in place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    Path(PathBuf, io::Error),
    #[error("{0} belongs to somebody else or others may write to it")]
    Insecure(PathBuf),
    #[error("{0} is not in {dir}, where the plugin looks", dir = LEFT)]
    Elsewhere(PathBuf),
    #[error("another daemon has {0}")]
    Taken(PathBuf),
    #[error("{0} lies on a file system from which nothing may be executed (noexec)")]
    NoExec(PathBuf),
    #[error("SELinux is enforced, and nothing labels the shim for containers")]
    Labels,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
    |e| Error::Path(path.to_owned(), e)
}

/// Makes the directory, which others may read, and locks it for this process: as long as what is returned is there.
pub fn make(dir: &Path) -> Result<OwnedFd, Error> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    let m = fs::symlink_metadata(dir).map_err(at(dir))?;
    let me = rustix::process::geteuid().as_raw();
    if !m.is_dir() || m.uid() != me || m.mode() & 0o022 != 0 {
        return Err(Error::Insecure(dir.to_owned()));
    }
    // (The umask may have made it narrower.)
    let fail = |e: Errno| Error::Path(dir.into(), e.into());
    rustix::fs::chmod(dir, Mode::from_raw_mode(0o755)).map_err(fail)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = rustix::fs::open(dir, flags, Mode::empty()).map_err(fail)?;
    match places::lock(&lock, LEAVING, || false).map_err(at(dir))? {
        true => Ok(lock),
        false => Err(Error::Taken(dir.into())),
    }
}

/// Copies shim and tool into it, if they are others than those that are there. By rename: programs that have the old ones
/// mapped keep them. By one thread of the process.
pub fn fill(config: &PodsConfig) -> Result<(), Error> {
    if let Err(e) = fill_tool(config) {
        tracing::warn!("containers have no tool: {e}"); // they do without
    }
    if let Err(e) = fill_plugin(config) {
        tracing::warn!("no plugin for when the daemon is away: {e}");
    }
    copy(&config.library, &config.dir.join(SHIM))
}

/// (The runtime starts it when it is started itself.)
fn fill_plugin(config: &PodsConfig) -> Result<(), Error> {
    if config.plugins.as_os_str().is_empty() {
        return Ok(());
    }
    if config.dir.parent() != Some(Path::new(LEFT)) {
        return Err(Error::Elsewhere(config.dir.clone()));
    }
    fs::create_dir_all(&config.plugins).map_err(at(&config.plugins))?;
    copy(&config.tool, &config.plugins.join(PLUGIN))
}

fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    if same(from, to).map_err(at(from))? {
        return Ok(());
    }
    put(to, |new| {
        // (A part of it must not be executable: the runtime starts what is, in its directory of plugins.)
        let mut file = fs::File::create_new(new)?;
        io::copy(&mut fs::File::open(from)?, &mut file)?;
        file.sync_all()?;
        file.set_permissions(fs::Permissions::from_mode(0o755))
    })
    .map_err(at(to))
}

fn fill_tool(config: &PodsConfig) -> Result<(), Error> {
    copy(&config.tool, &config.dir.join(TOOL))?;
    let link = config.dir.join(SMCSS);
    match fs::read_link(&link) {
        Ok(to) if to == Path::new(TOOL) => Ok(()),
        _ => put(&link, |new| std::os::unix::fs::symlink(TOOL, new)).map_err(at(&link)),
    }
}

/// Is what containers are given there now, and can they use it? (A container whose mount has no source is not made; if the
/// dynamic linker cannot load the shim, it says so in every program.)
pub fn look(dir: &Path) -> Result<(), Error> {
    let shim = dir.join(SHIM);
    fs::metadata(&shim).map_err(at(&shim))?;
    let of = rustix::fs::statvfs(dir).map_err(|e| Error::Path(dir.into(), e.into()))?;
    if of.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(Error::NoExec(dir.to_owned()));
    }
    match fs::read(ENFORCES) {
        Ok(said) if said.starts_with(b"1") => Err(Error::Labels),
        _ => Ok(()),
    }
}

/// Have both files the same content? (`b` may not be there.)
fn same(a: &Path, b: &Path) -> io::Result<bool> {
    let mut a = fs::File::open(a)?;
    let Ok(mut b) = fs::File::open(b) else {
        return Ok(false);
    };
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut x, mut y) = (Vec::new(), Vec::new());
    a.read_to_end(&mut x)?;
    b.read_to_end(&mut y)?;
    Ok(x == y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_put_and_replaced() {
        let t = tempfile::tempdir().unwrap();
        let config = PodsConfig {
            dir: t.path().join("a/b"),
            library: t.path().join("lib"),
            tool: t.path().join("tool"),
            ..PodsConfig::default()
        };
        let lock = make(&config.dir).unwrap();
        assert!(matches!(make(&config.dir), Err(Error::Taken(_))));
        drop(lock);
        make(&config.dir).unwrap();
        assert!(fill(&config).unwrap_err().to_string().contains("/lib: "));
        fs::write(&config.library, "1").unwrap();
        fs::write(&config.tool, "t").unwrap();
        let inode = |name| fs::metadata(config.dir.join(name)).unwrap().ino();
        fill(&config).unwrap();
        let first = inode(SHIM);
        fill(&config).unwrap();
        assert_eq!(inode(SHIM), first, "the same is left alone");
        fs::write(&config.library, "2").unwrap();
        fs::write(config.dir.join("libunderpass.new"), "left over").unwrap();
        fill(&config).unwrap();
        assert_ne!(inode(SHIM), first, "running programs have the old one");
        assert_eq!(fs::read(config.dir.join(SHIM)).unwrap(), b"2");
        assert_eq!(fs::read(config.dir.join(SMCSS)).unwrap(), b"t");
        assert!(look(&config.dir).is_ok() && look(t.path()).is_err());
        let mode = |name| fs::metadata(config.dir.join(name)).unwrap().mode() & 0o7777;
        assert_eq!((mode(SHIM), mode(TOOL), mode(".")), (0o755, 0o755, 0o755));
    }

    #[test]
    fn the_plugin() {
        let t = tempfile::tempdir().unwrap();
        let mut config = PodsConfig {
            tool: t.path().join("tool"),
            plugins: t.path().join("opt/plugins"),
            ..PodsConfig::default()
        };
        let plugin = config.plugins.join(PLUGIN);
        assert!(fill_plugin(&config).is_err() && !plugin.exists());
        let left: Vec<_> = fs::read_dir(&config.plugins).unwrap().collect();
        assert!(left.is_empty(), "{left:?}: the runtime would start it");
        fs::write(&config.tool, "t").unwrap();
        fill_plugin(&config).unwrap();
        let m = fs::metadata(&plugin).unwrap();
        assert_eq!((m.mode() & 0o7777, m.len()), (0o755, 1));
        // It looks in one place only.
        config.dir = t.path().join("pods");
        assert!(matches!(fill_plugin(&config), Err(Error::Elsewhere(_))));
    }

    #[test]
    fn a_directory_that_others_may_write_to() {
        let t = tempfile::tempdir().unwrap();
        fs::set_permissions(t.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(make(t.path()), Err(Error::Insecure(_))));
        let link = t.path().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert!(matches!(make(&link), Err(Error::Insecure(_))));
    }
}
