//! The node's cgroup v2 hierarchy.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Sockets of which cgroups a program sees that is attached here.
#[derive(Debug)]
pub(crate) struct Root {
    pub dir: OwnedFd,
    /// It is the whole hierarchy's root, or one that an administrator has named.
    pub whole: bool,
}

/// The root of the cgroup v2 hierarchy, which covers every socket of the node. A daemon in a container is often in a cgroup
/// namespace of its own: what is mounted there covers its own sockets alone. Where the node is a container itself, the
/// cgroup of its first process is the node. The daemon's own cgroup is taken if there is no more to get.
pub(crate) fn root(configured: Option<&Path>) -> Result<Root, Errno> {
    if let Some(p) = configured {
        let dir = open(p)?;
        return Ok(Root { dir, whole: true });
    }
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts_in(&text);
    let mut opened = mounts.iter().filter_map(|m| open(&m.0).ok());
    if let Some(dir) = opened.find(is_whole) {
        return Ok(Root { dir, whole: true });
    }
    let dir = match as_init(mounted) {
        Ok(dir) => dir,
        Err(_) => {
            let own = mounts.iter().find(|m| m.1).map(|m| open(&m.0));
            own.unwrap_or_else(mounted)?
        }
    };
    let whole = is_whole(&dir);
    if !whole {
        tracing::warn!(
            "the node's cgroups are not seen from here: only connections of some can be proven"
        );
    }
    Ok(Root { dir, whole })
}

/// How much memory the cgroup of this process may use; `None`: as much as there is, or nobody says.
pub(crate) fn own_memory_max() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = |l: &str| l.strip_prefix("0::/").map(str::to_owned);
    let own = text.lines().find_map(own)?;
    let top = Path::new("/sys/fs/cgroup");
    // (In a cgroup namespace, what is mounted there is its own cgroup.)
    let file = top.join(own).join("memory.max");
    std::fs::read_to_string(file).ok()?.trim().parse().ok() // or "max"
}

fn open(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Is it the hierarchy's root? That alone has no type (cgroups(7)).
fn is_whole(dir: &OwnedFd) -> bool {
    const CGROUP2: i64 = 0x6367_7270;
    if rustix::fs::fstatfs(dir).is_ok_and(|s| s.f_type != CGROUP2) {
        return false; // something is mounted over it
    }
    let flags = rustix::fs::AtFlags::empty();
    rustix::fs::statat(dir, "cgroup.type", flags).is_err_and(|e| e == Errno::NOENT)
}

/// Mounts the hierarchy, as the thread's cgroup namespace has it, where no other process sees it.
fn mounted() -> Result<OwnedFd, Errno> {
    use rustix::mount::{
        fsconfig_create, fsmount, fsopen, FsMountFlags, FsOpenFlags, MountAttrFlags,
    };
    let fs = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&fs)?;
    let mount = fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&mount, ".", flags, Mode::empty())
}

/// Does something in the cgroup namespace of the process with number 1, on a thread that ends with it.
fn as_init<T: Send>(act: fn() -> Result<T, Errno>) -> Result<T, Errno> {
    use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let there = rustix::fs::open("/proc/1/ns/cgroup", flags, Mode::empty())?;
    std::thread::scope(|s| {
        let entered = s.spawn(|| {
            move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::ControlGroup))?;
            act()
        });
        entered.join().unwrap_or(Err(Errno::IO))
    })
}

/// Where cgroup v2 is mounted, and whether it begins where this process's cgroup namespace does, from the text of
/// `/proc/self/mountinfo`.
fn mounts_in(text: &str) -> Vec<(PathBuf, bool)> {
    let mount = |l: &str| {
        let (mount, fs) = l.split_once(" - ")?;
        let mut f = mount.split(' ').skip(3);
        let (root, point) = (f.next()?, f.next()?);
        let point = point.replace("\\040", " ").into();
        fs.starts_with("cgroup2 ").then_some((point, root == "/"))
    };
    text.lines().filter_map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn finds_the_hierarchy() {
        let text = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            38 31 0:41 /../.. /x rw,relatime - cgroup2 cgroup2 rw\n\
            38 31 0:41 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        let [x, unified] = ["/x", "/sys/fs/cgroup/unified"].map(PathBuf::from);
        assert_eq!(mounts_in(text), [(x, false), (unified, true)]);
        assert_eq!(mounts_in("38 31 0:41 / /c rw - cgroup cgroup rw"), []);
    }

    /// As in a container: a cgroup, and its namespace, of its own. With the node's hierarchy mounted, and without it.
    #[test]
    fn from_within_a_container() {
        const WITHIN: &str = "UNDERPASS_WITHIN_A_CGROUP";
        if std::env::var_os(WITHIN).is_some() {
            let own = mounted().unwrap();
            assert!(!is_whole(&own), "there is nothing to test");
            let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            assert_eq!(
                mounts_in(&text).is_empty(),
                std::env::var(WITHIN).unwrap() == "bare"
            );
            let root = root(None).unwrap();
            assert!(root.whole && is_whole(&root.dir));
            return;
        }
        let Some(all) = mounted().ok().filter(is_whole) else {
            return crate::skip::skip("the node's cgroups cannot be had here");
        };
        let dir = format!("underpass-test-{}", std::process::id());
        rustix::fs::mkdirat(&all, &*dir, Mode::RWXU).unwrap();
        let (pid, fd) = (std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&all));
        let group = format!("/proc/{pid}/fd/{fd}/{dir}");
        let me = std::env::current_exe().unwrap();
        let name = "os::cgroup2::tests::from_within_a_container";
        let mut ran = Vec::new();
        let mut ways = vec![("mounted", "true")];
        match as_init(|| Ok(())) {
            Ok(()) => ways.push(("bare", "umount -a -t cgroup2")),
            Err(e) => {
                eprintln!("not without the node's mounts: process 1 cannot be looked at: {e}")
            }
        }
        for (name_of, unmount) in ways {
            let script = format!(
                "echo $$ >{group}/cgroup.procs && exec unshare --cgroup --mount sh -c \
                 '{unmount} && exec \"$0\" --exact {name}' {}",
                me.display()
            );
            let mut inside = Command::new("sh");
            inside.args(["-c", &script]).env(WITHIN, name_of);
            ran.push(inside.output().unwrap());
        }
        rustix::fs::unlinkat(&all, &*dir, rustix::fs::AtFlags::REMOVEDIR).unwrap();
        for o in ran {
            let said = String::from_utf8_lossy(&o.stdout);
            assert!(o.status.success() && said.contains("1 passed"), "{o:?}");
        }
    }
}
