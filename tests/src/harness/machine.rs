//! A machine of its own as far as files and the network go: programs that write to `/etc`, `/run`, `/var/lib` and `/opt`
//! run as they do anywhere, and nothing of it is seen outside or left behind. Processes and cgroups are this system's.

use super::{until, Place, Program, PATIENCE};
use anyhow::{Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

use super::program::Running;

/// Makes the machine, as the first process in its namespaces: `$1` is its directory, `$2` its address.
const MAKE: &str = r#"
set -e
mount --make-rprivate /
for d in etc var/lib run opt; do mkdir -p "$1/$d"; done
mkdir "$1/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/work" /etc
for d in var/lib run opt; do mkdir -p "/$d"; mount --bind "$1/$d" "/$d"; done
mkdir -p /run/lock
ip link set lo up
ip link add eth0 type veth peer name cable
ip link set cable up
ip address add "$2/24" dev eth0
ip link set eth0 up
ip route add default dev eth0
echo made
exec sleep infinity
"#;

pub struct Machine {
    holder: Running,
    dir: TempDir,
    /// Cgroups (below the root of each hierarchy) that go with the machine.
    cgroup: String,
}

impl Machine {
    /// `address`: of its interface eth0; `cgroup`: what its programs make and leave under the roots of cgroup hierarchies.
    pub fn start(address: &str, cgroup: &str) -> Result<Machine> {
        let dir = tempfile::Builder::new().prefix("upmachine-").tempdir()?;
        let mut holder = Program::new("unshare", &Place::bare())
            .args(["--mount", "--net", "sh", "-c", MAKE, "sh"])
            .arg(dir.path())
            .arg(address)
            .spawn()?;
        holder.line("made", PATIENCE).context("a machine")?;
        Ok(Machine {
            holder,
            dir,
            cgroup: cgroup.into(),
        })
    }

    /// Of the process that holds its namespaces.
    pub fn pid(&self) -> u32 {
        self.holder.pid()
    }

    /// A program that runs on it.
    pub fn program(&self, program: impl AsRef<OsStr>) -> Program {
        Program::new("nsenter", &Place::bare())
            .args(["--target", &self.holder.pid().to_string()])
            .args(["--mount", "--net", "--"])
            .arg(program)
    }

    /// The machine's file, as it is seen from outside. `path` begins with `/etc`, `/var/lib`, `/run` or `/opt`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path.trim_start_matches('/'))
    }

    /// Lays a cable between the interfaces eth0 of two machines. Once per machine.
    pub fn connect(&self, other: &Machine) -> Result<()> {
        let wire = "ip link add wire type veth peer name wire netns";
        let wire = format!("{wire} {}", other.holder.pid());
        for (m, first) in [(self, wire.as_str()), (other, "true")] {
            let line = format!(
                "{first}; ip link add bridge type bridge; \
                 for i in cable wire; do ip link set $i master bridge; ip link set $i up; done; ip link set bridge up"
            );
            m.program("sh").args(["-ec", &line]).check(PATIENCE)?;
        }
        Ok(())
    }

    /// Writes a file of the machine.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let to = self.path(path);
        std::fs::create_dir_all(to.parent().context("a path")?)?;
        std::fs::write(&to, text).with_context(|| path.to_owned())
    }

    /// Processes on it, and those in its cgroups.
    fn processes(&self) -> Vec<Pid> {
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let Some(own) = namespace(&self.holder.pid().to_string()) else {
            return Vec::new();
        };
        let below = format!(":/{}/", self.cgroup);
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let all = all.filter_map(|e| e.file_name().into_string().ok());
        all.filter(|pid| {
            let groups = || std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
            namespace(pid).is_some_and(|n| n == own) || groups().is_ok_and(|g| g.contains(&below))
        })
        .filter_map(|pid| Some(Pid::from_raw(pid.parse().ok()?)))
        .collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // What still runs is not asked: the holder is the last one, since the others are found by it.
        let holder = Pid::from_raw(self.holder.pid() as i32);
        let gone = until("the machine's programs are gone", PATIENCE, || {
            let mut others = self.processes();
            others.retain(|p| *p != holder);
            for p in &others {
                let _ = kill(*p, Signal::SIGKILL);
            }
            others.is_empty()
        });
        if let Err(e) = gone {
            eprintln!("{e:#}");
        }
        self.holder.kill();
        remove_cgroups(&self.cgroup);
    }
}

/// Makes cgroups of this name below the root of every hierarchy.
pub fn make_cgroups(name: &str) -> Result<()> {
    let top = Path::new("/sys/fs/cgroup");
    let mut roots = vec![top.to_path_buf()];
    if !top.join("cgroup.controllers").exists() {
        // Version 1: a hierarchy in each directory. (Some have two names.)
        let all = std::fs::read_dir(top)?.flatten();
        roots = all
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .map(|e| e.path())
            .collect();
    }
    for r in roots {
        std::fs::create_dir_all(r.join(name)).with_context(|| r.display().to_string())?;
    }
    Ok(())
}

/// Removes the (empty) cgroups of this name below the root of every hierarchy.
pub fn remove_cgroups(name: &str) {
    let roots = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten();
    let roots = roots.flatten().map(|e| e.path());
    for root in roots.chain([PathBuf::from("/sys/fs/cgroup")]) {
        remove_tree(&root.join(name));
    }
}

fn remove_tree(cgroup: &Path) {
    let below = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    for b in below.filter(|b| b.file_type().is_ok_and(|t| t.is_dir())) {
        remove_tree(&b.path());
    }
    let _ = std::fs::remove_dir(cgroup);
}
