//! A copy of this system that can be changed: an overlay of its root directory, with namespaces of its own for mounts,
//! network and processes. What is written stays in memory and is gone with it.

use anyhow::{Context, Result};
use std::time::Duration;
use tempfile::TempDir;
use underpass_tests::harness::{until, Output, Place, Program, Running, PATIENCE};

/// `/run` is that of a system that systemd runs, and a `systemctl` that starts the daemon as its unit says: there is no
/// systemd to ask. What it is told is in `/run/told`.
const SETUP: &str = r#"
set -e
mount -t tmpfs -o mode=755 none "$1"
cd "$1"
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work none root
cd root
mount -t proc none proc
mount -t sysfs none sys
mount -t bpf none sys/fs/bpf
mount --rbind /dev dev
mount -t tmpfs -o mode=755 none run
mount -t tmpfs none tmp
mkdir -p run/systemd/system
rm -f usr/sbin/policy-rc.d
cat >usr/local/bin/systemctl <<'END'
#!/bin/sh
case "$1" in --root=*) exec /usr/bin/systemctl "$@" ;; esac # only files change
echo "$@" >>/run/told
unit=/usr/lib/systemd/system/underpassd.service
stop() {
  kill "$(cat /run/pid)"
  while [ -e "/proc/$(cat /run/pid)/exe" ]; do sleep 0.05; done
  rm /run/pid
}
start() {
  mkdir -p /run/underpass /var/lib/underpass
  setsid $(sed -n 's/^ExecStart=//p' $unit) >>/run/said 2>&1 </dev/null &
  echo $! >/run/pid
}
case "$*" in
  *is-enabled*) [ ! -e /etc/systemd/system/multi-user.target.wants/underpassd.service ] || echo enabled ;;
  *is-active*) [ -e /run/pid ] ;;
  *restart*) stop; start ;;
  *start*) start ;;
  *stop*) stop; rm -r /run/underpass ;;
esac
END
chmod 755 usr/local/bin/systemctl
ip link set lo up
echo ready
exec chroot . sleep infinity
"#;

pub struct Root {
    dir: TempDir,
    /// Kills all processes in it when it ends.
    holder: Running,
    /// Its first process.
    first: String,
}

impl Root {
    pub fn new() -> Result<Root> {
        let dir = tempfile::Builder::new().prefix("uproot-").tempdir()?;
        let mut holder = Program::new("unshare", &Place::bare())
            .words("--mount --net --pid --fork --kill-child sh -c")
            .args([SETUP, "setup"])
            .arg(dir.path())
            .spawn()?;
        holder.line("ready", PATIENCE)?;
        let pid = holder.pid();
        let mut first = String::new();
        until("it has a process", PATIENCE, || {
            let children = format!("/proc/{pid}/task/{pid}/children");
            first = std::fs::read_to_string(children).unwrap_or_default();
            let root = std::fs::read_link(format!("/proc/{}/root", first.trim()));
            root.is_ok_and(|r| r.as_os_str() != "/")
        })?;
        let first = first.trim().into();
        Ok(Root { dir, holder, first })
    }

    /// A command line of a shell in it.
    pub fn program(&self, line: &str) -> Program {
        Program::new("nsenter", &Place::bare())
            .args(["--target", &self.first])
            .words("--mount --net --pid --root --wd sh -c")
            .arg(line)
    }

    pub fn run(&self, line: &str) -> Result<Output> {
        self.program(line).run(Duration::from_secs(60))
    }

    /// The same; it must succeed. What it wrote.
    pub fn sh(&self, line: &str) -> Result<String> {
        let out = self.run(line)?;
        let errors = out.stderr.clone();
        out.ok().with_context(|| format!("{line}: {errors}"))
    }

    /// Which files have been changed or made since it was made.
    pub fn changes(&self) -> Result<Vec<String>> {
        let upper = self.dir.path().join("upper");
        let text = Program::new("nsenter", &Place::bare())
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .words("--mount find")
            .arg(upper)
            .check(PATIENCE)?;
        Ok(text.lines().map(String::from).collect())
    }

    /// Copies a small file into it.
    pub fn put(&self, bytes: &[u8], to: &str) -> Result<()> {
        let cat = self.program(&format!("cat >{to}")).stdin(bytes);
        cat.check(PATIENCE).map(drop)
    }
}
