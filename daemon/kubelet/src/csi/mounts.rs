//! Mounts the directory that containers see where the kubelet wants it, and unmounts it.
//!
//! The daemon's container has a mount namespace of its own. What is mounted there stays there, unless the volume's mount is
//! propagated to the node (`Bidirectional`), and Kubernetes allows that to privileged containers only, which the daemon's is
//! not. But it sees the node's processes, and may enter their mount namespaces (SYS_ADMIN, SYS_CHROOT): so the mount is made
//! in the namespace where it is to be seen, and nothing depends on how mounts are propagated.
//!
//! A process with several threads cannot enter a mount namespace, since they share their root and working directory; one
//! thread that has given these up (`CLONE_FS`) can. It never comes back: each call has a thread of its own, which ends.

use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, StatVfsMountFlags, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use tokio::sync::oneshot;

/// Mode of the directory that is mounted over; the kubelet's own are like that.
const MODE: u32 = 0o750;
/// Mounts on top of each other at one place that are taken off; there is one, or somebody plays with us.
const STACKED_MAX: usize = 16;

/// Why something could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("`{0}` is no place of a pod's CSI volume in the kubelet's directory")]
    Elsewhere(String),
    #[error("the directory that containers see, {0}: {1}")]
    Source(PathBuf, Errno),
    #[error("the node's mount namespace, {0}: {1}")]
    Namespace(PathBuf, Errno),
    #[error("{0}: {1}")]
    Target(PathBuf, Errno),
    #[error("no thread: {0}")]
    Thread(std::io::Error),
}

/// What to mount, and where.
#[derive(Clone, Debug)]
pub(crate) struct Mounts {
    /// The node's mount namespace.
    pub(crate) namespace: PathBuf,
    /// The kubelet's directory, and the one that is mounted, both as that namespace has them.
    pub(crate) kubelet: PathBuf,
    pub(crate) source: PathBuf,
}

/// A place below the kubelet's directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The directory that it is in, relative.
    dir: PathBuf,
    name: PathBuf,
}

impl Mounts {
    /// Checks a path that the kubelet names: `KUBELET/pods/UID/volumes/kubernetes.io~csi/VOLUME/mount`. (Whatever else the
    /// kubelet has in its directory, also other drivers' volumes that are no ephemeral ones, is none of ours.)
    pub(crate) fn target(&self, path: &str) -> Result<Target, Error> {
        let elsewhere = || Error::Elsewhere(path.to_owned());
        let below = path
            .strip_prefix(&*self.kubelet.to_string_lossy())
            .and_then(|r| r.strip_prefix('/'))
            .ok_or_else(elsewhere)?;
        let parts: Vec<&str> = below.split('/').collect();
        // (Not by `Path`, which skips `.` and empty names.)
        let plain = |p: &&str| {
            let all: Vec<_> = Path::new(p).components().collect();
            matches!(all[..], [Component::Normal(name)] if name == OsStr::new(p))
                && !p.contains('\0')
        };
        match parts[..] {
            ["pods", _, "volumes", "kubernetes.io~csi", _, _] if parts.iter().all(plain) => {
                let (dir, name) = below.rsplit_once('/').ok_or_else(elsewhere)?;
                Ok(Target {
                    dir: dir.into(),
                    name: name.into(),
                })
            }
            _ => Err(elsewhere()),
        }
    }

    /// Acts in the node's mount namespace.
    pub(crate) async fn in_the_node(
        &self,
        act: impl FnOnce(&Mounts) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let (done, is_done) = oneshot::channel();
        let mounts = self.clone();
        // (Not one of the runtime's blocking threads, which do other things afterwards.)
        let thread = std::thread::Builder::new().name("underpass-mount".into());
        let thread = thread.spawn(move || {
            let result = mounts.enter().and_then(|()| act(&mounts));
            let _ = done.send(result); // nobody waits if the daemon ends
        });
        thread.map_err(Error::Thread)?;
        is_done
            .await
            .unwrap_or_else(|_| Err(Error::Thread(std::io::ErrorKind::Interrupted.into())))
    }

    /// Moves this thread there. If it is there already, which a daemon without a container is, nothing needs to be allowed.
    fn enter(&self) -> Result<(), Error> {
        let fail = |e| Error::Namespace(self.namespace.clone(), e);
        // SAFETY: it unshares no descriptors; and this thread alone uses its root and its working directory from here to its
        // end, which nothing else has a part in.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.map_err(fail)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let there = rustix::fs::open(&self.namespace, flags, Mode::empty()).map_err(fail)?;
        let here =
            rustix::fs::open("/proc/thread-self/ns/mnt", flags, Mode::empty()).map_err(fail)?;
        if identity(&there).map_err(fail)? == identity(&here).map_err(fail)? {
            return Ok(());
        }
        rustix::thread::move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Mount))
            .map_err(fail)
    }

    /// Opens the directory that a target is in. The kubelet's own directory may be a symbolic link; below it there are none.
    fn parent(&self, target: &Target) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let kubelet = rustix::fs::open(&self.kubelet, flags, Mode::empty())?;
        below(&kubelet, &target.dir)
    }

    /// Mounts it. Already mounted is as good.
    pub(crate) fn publish(&self, target: &Target) -> Result<(), Error> {
        let fail = |e| Error::Target(target.dir.join(&target.name), e);
        let source = self
            .source()
            .map_err(|e| Error::Source(self.source.clone(), e))?;
        let parent = self.parent(target).map_err(fail)?;
        match rustix::fs::mkdirat(&parent, &target.name, Mode::from_raw_mode(MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(fail(e)),
        }
        let place = below(&parent, &target.name).map_err(fail)?;
        if is_mounted(&place).map_err(fail)? {
            if is_ours(&source, &place).map_err(fail)? {
                return Ok(());
            }
            // (Such as the directory of an installation that was removed since.)
            drop(place);
            unmount(&parent, &target.name).map_err(fail)?;
            return self.mount(&source, &parent, target).map_err(fail);
        }
        drop(place);
        self.mount(&source, &parent, target).map_err(fail)
    }

    fn source(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let dir = rustix::fs::open(&self.source, flags, Mode::empty())?;
        // Programs load what is in it: nobody but us may write there.
        let stat = rustix::fs::fstat(&dir)?;
        let others = Mode::WGRP | Mode::WOTH;
        let own = stat.st_uid == rustix::process::geteuid().as_raw();
        match own && !Mode::from_raw_mode(stat.st_mode).intersects(others) {
            true => Ok(dir),
            false => Err(Errno::PERM),
        }
    }

    fn mount(&self, source: &OwnedFd, parent: &OwnedFd, target: &Target) -> Result<(), Errno> {
        // (Without what is mounted below it: nothing should be.)
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = rustix::mount::open_tree(source, "", flags)?;
        narrow(&tree)?;
        let place = below(parent, &target.name)?;
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(&tree, "", &place, "", flags)
    }

    /// Unmounts it and removes the directory, as far as they are there.
    pub(crate) fn unpublish(&self, target: &Target) -> Result<(), Error> {
        let fail = |e| Error::Target(target.dir.join(&target.name), e);
        let parent = match self.parent(target) {
            Err(Errno::NOENT) => return Ok(()),
            other => other.map_err(fail)?,
        };
        unmount(&parent, &target.name).map_err(fail)?;
        match rustix::fs::unlinkat(&parent, &target.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(fail(e)),
        }
    }
}

/// Opens what is below a directory: no `..`, no symbolic link, and not what another process puts there on the way.
fn below(dir: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        // (AGAIN: something was renamed meanwhile.)
        match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn identity(fd: &OwnedFd) -> Result<(u64, u64), Errno> {
    let s = rustix::fs::fstat(fd)?;
    Ok((s.st_dev, s.st_ino))
}

/// Is it the root of a mount?
fn is_mounted(place: &OwnedFd) -> Result<bool, Errno> {
    let s = rustix::fs::statx(place, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok(s.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Is the source mounted there, as [`narrow`] makes it?
fn is_ours(source: &OwnedFd, place: &OwnedFd) -> Result<bool, Errno> {
    let flags = rustix::fs::fstatvfs(place)?.f_flag;
    let all = StatVfsMountFlags::RDONLY | StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
    Ok(identity(source)? == identity(place)? && flags.contains(all))
}

/// Takes off all that is mounted there, also while it is used: containers keep what they have.
fn unmount(parent: &OwnedFd, name: &Path) -> Result<(), Errno> {
    // (By its name in the working directory, which is this thread's own: `umount` takes no descriptor.)
    rustix::process::fchdir(parent)?;
    for _ in 0..STACKED_MAX {
        match below(parent, name) {
            Ok(place) if is_mounted(&place)? => drop(place),
            Ok(_) | Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e),
        }
        match rustix::mount::unmount(name, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // (INVAL: it is gone meanwhile.)
            Ok(()) | Err(Errno::INVAL) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Errno::BUSY)
}

/// Read-only, no devices, no set-user-ID programs; but programs may map libraries from it. What is mounted in it on the node
/// is seen there, and not the other way round.
fn narrow(tree: &OwnedFd) -> Result<(), Errno> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: libc::MS_SLAVE,
        userns_fd: 0,
    };
    // SAFETY: the path is a C string, the structure is as large as is said, and both outlive the call, which writes to
    // neither.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
