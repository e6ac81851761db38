//! What `/proc` says of a process. It is read by number, so that a caller who must be certain asks for the start time
//! before and after. Nothing here reads files that can be made to block (`cmdline`, `maps`).

use lane::num;
use rustix::io::Errno;
use rustix::process::Pid;
use std::path::{Path, PathBuf};

/// Start time in clock ticks since boot.
pub fn start_time(pid: u32) -> Option<u64> {
    stat(format!("/proc/{pid}").as_ref(), 19)?.parse().ok()
}

/// Has it ended, and only its parent has not heard of it yet?
pub fn is_zombie(pid: u32) -> bool {
    start_time(pid).is_some() && living(pid).is_none()
}

/// A thread of the kernel's: no program at all.
pub fn is_kernels(pid: u32) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    let flags = stat(format!("/proc/{pid}").as_ref(), 6).and_then(|f| f.parse::<u64>().ok());
    flags.is_some_and(|f| f & PF_KTHREAD != 0)
}

/// The process that a number of a process or thread belongs to.
pub fn of_thread(id: u32) -> Option<u32> {
    status(id, "Tgid:")?.first().copied()
}

/// The numbers in a line of `status` of a process or thread.
pub fn status(id: u32, name: &str) -> Option<Vec<u32>> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let numbers = line.split_ascii_whitespace().map(|n| n.parse().ok());
    numbers.collect()
}

/// What `stat` of a process or thread has after its name, the `n`th field from there.
pub fn stat(of: &Path, n: usize) -> Option<String> {
    let s = std::fs::read_to_string(of.join("stat")).ok()?;
    // The name stands in parentheses and may contain anything.
    let field = s.rsplit_once(')')?.1.split_ascii_whitespace().nth(n)?;
    Some(field.to_owned())
}

/// Where `/proc` shows what a process has: in its own directory, but in that of one of its threads where the first
/// one has ended before the others. `None`: all have.
pub fn living(pid: u32) -> Option<PathBuf> {
    let lives = |of: &PathBuf| stat(of, 0).is_some_and(|s| !matches!(s.as_str(), "Z" | "X"));
    let own = PathBuf::from(format!("/proc/{pid}"));
    if lives(&own) {
        return Some(own);
    }
    let threads = std::fs::read_dir(own.join("task")).ok()?.flatten();
    threads.map(|t| t.path()).find(lives)
}

/// Do its limits leave no room for lanes?
pub fn is_cramped(pid: u32) -> bool {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let soft = |name: &str| {
        let mut lines = limits.lines();
        let words = lines.find_map(|l| l.strip_prefix(name));
        words?.split_whitespace().next()?.parse::<u64>().ok() // (or "unlimited")
    };
    let mut room = lane::os::ROOM.into_iter();
    room.any(|(_, name, least)| soft(name).is_some_and(|n| n < least))
}

/// The present time in the unit of [`start_time`].
pub fn now_ticks() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let hz = rustix::param::clock_ticks_per_second();
    num::natural(t.tv_sec) * hz + num::natural(t.tv_nsec) * hz / 1_000_000_000
}

/// Every process that we see.
pub fn all() -> impl Iterator<Item = u32> {
    let proc = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    proc.filter_map(|d| d.file_name().to_str()?.parse().ok())
}

/// Does it live, although `/proc` may not show it to us?
pub fn is_hidden(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|p| rustix::process::test_kill_process(p) == Err(Errno::PERM))
}

/// Is there no process beyond those?
pub fn in_first_pid_namespace() -> bool {
    const PROC_PID_INIT_INO: u64 = 0xeffffffc;
    rustix::fs::stat("/proc/self/ns/pid").is_ok_and(|s| s.st_ino == PROC_PID_INIT_INO)
}

/// Inodes of the sockets that a process holds. For helpers only: a process may have a million.
pub fn sockets(pid: u32) -> Vec<u64> {
    visible_sockets(pid).unwrap_or_default()
}

/// The same, one for each descriptor; `None`: we may not look.
pub fn visible_sockets(pid: u32) -> Option<Vec<u64>> {
    let all = descriptors(pid)?;
    Some(all.into_iter().map(|(_, inode)| inode).collect())
}

/// The same, with the descriptors.
pub fn descriptors(pid: u32) -> Option<Vec<(u32, u64)>> {
    let own = PathBuf::from(format!("/proc/{pid}"));
    let shown = descriptors_at(&own);
    if let Some((all, true)) = shown {
        return Some(all);
    }
    // (`stat` costs as much as all of this, so that only who shows nothing is asked whether it lives.)
    let shown = match living(pid) {
        None => return Some(Vec::new()),
        Some(of) if of == own => shown,
        Some(of) => descriptors_at(&of),
    };
    shown.map(|(all, _)| all)
}

/// The same of a process's or thread's directory, and whether there is a descriptor of any kind.
fn descriptors_at(of: &Path) -> Option<(Vec<(u32, u64)>, bool)> {
    let denied = |e: &std::io::Error| e.kind() == std::io::ErrorKind::PermissionDenied;
    let fds = match std::fs::read_dir(of.join("fd")) {
        Ok(fds) => fds.flatten(),
        Err(e) if denied(&e) => return None,
        Err(_) => return Some((Vec::new(), false)), // it has ended
    };
    let (mut all, mut shows) = (Vec::new(), false);
    for e in fds {
        shows = true;
        match socket(&e.path()) {
            // (Root without SYS_PTRACE reads their numbers, and not what they are.)
            Err(e) if denied(&e) => return None,
            Err(_) | Ok(None) => {}
            Ok(Some(inode)) => all.extend(number(&e).map(|fd| (fd, inode))),
        }
    }
    Some((all, shows))
}

fn number(e: &std::fs::DirEntry) -> Option<u32> {
    e.file_name().to_str()?.parse().ok()
}

/// Inode of the socket that a process has at this descriptor.
pub fn socket_at(pid: u32, fd: u32) -> Option<u64> {
    socket(&living(pid)?.join(format!("fd/{fd}"))).ok()?
}

/// `None`: it is something else.
fn socket(entry: &Path) -> std::io::Result<Option<u64>> {
    let link = std::fs::read_link(entry)?;
    let inode = |s: &str| s.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    Ok(link.to_str().and_then(inode))
}

/// Inode of the network namespace.
pub fn netns(pid: u32) -> Option<u64> {
    namespace(pid, "net")
}

/// Inode of our own network namespace.
pub fn own_netns() -> Option<u64> {
    own_namespace("net")
}

/// Inode of a namespace by the name that it has in `/proc/PID/ns`.
pub fn namespace(pid: u32, kind: &str) -> Option<u64> {
    namespace_at(&living(pid)?.join("ns").join(kind))
}

/// The same of our own.
pub fn own_namespace(kind: &str) -> Option<u64> {
    namespace_at(&Path::new("/proc/self/ns").join(kind))
}

fn namespace_at(path: &Path) -> Option<u64> {
    rustix::fs::stat(path).ok().map(|s| s.st_ino)
}

/// The process that started it, or took it over.
pub fn parent(pid: u32) -> Option<u32> {
    status(pid, "PPid:")?.first().copied().filter(|p| *p > 1)
}

/// Its real user.
pub fn uid(pid: u32) -> Option<u32> {
    status(pid, "Uid:")?.first().copied()
}

/// Name of the program.
pub fn comm(pid: u32) -> Option<String> {
    let b = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let s: String = String::from_utf8_lossy(&b)
        .trim_end()
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    Some(s)
}

/// All that `/proc/PID/cgroup` says.
pub fn cgroups(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
}

/// Of that, the cgroup that limits are counted for. It stands for the container or pod: the memory controller's where hierarchies
/// are many, else the unified one; cut below the first that is one party's, which may make as many below it as it likes: a
/// pod, a user's slice, a scope, a service or a container.
pub fn cgroup_key(text: &str) -> String {
    let mut unified = "";
    let mut memory = None;
    for line in text.lines() {
        let mut f = line.splitn(3, ':');
        let (Some(id), Some(ctl), Some(path)) = (f.next(), f.next(), f.next()) else {
            continue;
        };
        if ctl.split(',').any(|c| c == "memory") {
            memory = Some(path);
        } else if id == "0" {
            unified = path;
        }
    }
    let path = memory.unwrap_or(unified);
    let mut key = String::new();
    let mut above = "";
    for part in path.split('/').filter(|p| !p.is_empty()) {
        key.push('/');
        key.push_str(part);
        if is_pod(part) || is_user(part) || is_unit(part) || is_container(part, above) {
            break;
        }
        above = part;
    }
    if key.is_empty() {
        key.push('/');
    }
    key
}

/// `user-<uid>.slice`, as systemd names them.
fn is_user(part: &str) -> bool {
    let id = part
        .strip_prefix("user-")
        .and_then(|p| p.strip_suffix(".slice"));
    id.is_some_and(|id| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()))
}

/// What systemd runs: all of it may be delegated.
fn is_unit(part: &str) -> bool {
    let ends = |e: &str| part.strip_suffix(e).is_some_and(|name| !name.is_empty());
    ends(".scope") || ends(".service")
}

/// A container's, whose name ends with a number of 64 digits, or of LXC.
fn is_container(part: &str, above: &str) -> bool {
    let hex = part.bytes().rev().take_while(u8::is_ascii_hexdigit).count();
    hex >= 64 || part.starts_with("lxc.payload.") || above == "lxc"
}

/// `pod<uid>` or `kubepods-burstable-pod<uid>.slice`, as the kubelet names them.
fn is_pod(part: &str) -> bool {
    let name = part.strip_suffix(".slice").unwrap_or(part);
    let id = match name.rsplit_once("-pod") {
        Some((_, id)) => id,
        None => match name.strip_prefix("pod") {
            Some(id) => id,
            None => return false,
        },
    };
    id.len() >= 32
        && id
            .chars()
            .all(|c| c.is_ascii_hexdigit() || c == '-' || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_is_readable() {
        let me = std::process::id();
        assert!(start_time(me).unwrap() <= now_ticks());
        assert_eq!(netns(me), own_netns());
        assert!(!comm(me).unwrap().is_empty());
        assert!(cgroup_key(&cgroups(me).unwrap()).starts_with('/'));
    }

    /// Root may list another user's descriptors, but without SYS_PTRACE not see what they are.
    #[test]
    fn what_may_not_be_looked_at() {
        use rustix::thread::{capabilities, set_capabilities, CapabilitySet};
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            return; // there is nobody else to be looked at
        }
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .uid(65_534)
            .spawn()
            .unwrap();
        let before = capabilities(None).unwrap();
        let mut less = before;
        less.effective.remove(CapabilitySet::SYS_PTRACE);
        set_capabilities(None, less).unwrap(); // this thread's
        let seen = descriptors(child.id());
        set_capabilities(None, before).unwrap();
        let with = descriptors(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(seen, None);
        assert!(with.is_some() || !before.effective.contains(CapabilitySet::SYS_PTRACE));
    }

    #[test]
    fn cgroup_keys() {
        assert_eq!(cgroup_key("0::/\n"), "/");
        assert_eq!(cgroup_key("0::/user.slice/a\n"), "/user.slice/a");
        assert_eq!(cgroup_key("4:memory:/m/x\n0::/u\n"), "/m/x");
        let uid = "0123abcd_0123_0123_0123_0123456789ab";
        assert_eq!(
            cgroup_key(&format!(
                "0::/kubepods.slice/kubepods-pod{uid}.slice/cri-x.scope"
            )),
            format!("/kubepods.slice/kubepods-pod{uid}.slice")
        );
        let uid = uid.replace('_', "-");
        assert_eq!(
            cgroup_key(&format!("5:memory:/kubepods/pod{uid}/c1")),
            format!("/kubepods/pod{uid}")
        );
        assert_eq!(cgroup_key("0::/podman/x"), "/podman/x");
        let user = "/user.slice/user-1000.slice";
        assert_eq!(
            cgroup_key(&format!("0::{user}/user@1000.service/a/b")),
            user
        );
        assert_eq!(cgroup_key("0::/user-x.slice/b"), "/user-x.slice/b");
        // What somebody could make below what is its own is no other party.
        let id = "0123456789abcdef".repeat(4);
        for own in [
            "/system.slice/a.service",
            &format!("/system.slice/docker-{id}.scope"),
            &format!("/machine.slice/libpod-{id}.scope"),
            &format!("/docker/{id}"),
            "/lxc.payload.a",
            "/lxc/a",
        ] {
            assert_eq!(cgroup_key(&format!("0::{own}")), own);
            assert_eq!(cgroup_key(&format!("0::{own}/b/c.scope")), own);
        }
        let short = &id[1..];
        let below = format!("/docker/{short}/a");
        assert_eq!(cgroup_key(&format!("0::{below}")), below);
        assert_eq!(cgroup_key("nonsense"), "/");
    }
}
