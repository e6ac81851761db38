//! The package of `make deb`, in a copy of this system.

use super::root::Root;
use anyhow::{ensure, Context, Result};
use underpass_tests::harness::{paths, until, Running, PATIENCE};

const UNIT: &str = "underpassd.service";
const WANTED: &str = "/etc/systemd/system/multi-user.target.wants/underpassd.service";

fn with_package() -> Result<Root> {
    let root = Root::new()?;
    let deb = concat!(
        "underpass/underpass_",
        env!("CARGO_PKG_VERSION"),
        "_amd64.deb"
    );
    let deb = paths::target().join(deb);
    let bytes = std::fs::read(&deb).with_context(|| deb.display().to_string())?;
    root.put(&bytes, "/tmp/underpass.deb")?;
    root.sh("dpkg -i /tmp/underpass.deb")?;
    Ok(root)
}

/// What systemctl was told last: to read the unit, which is new or gone, and this.
fn told(root: &Root, wanted: &str) -> Result<()> {
    let text = root.sh("cat /run/told && rm /run/told")?;
    let of_unit = |l: &&str| l.ends_with(UNIT) && !l.contains(" is-");
    let lines: Vec<&str> = text.lines().filter(of_unit).collect();
    ensure!(lines == [&format!("{wanted} {UNIT}")], "{text}");
    ensure!(text.contains("daemon-reload"), "{text}");
    Ok(())
}

fn serves(root: &Root) -> Result<String> {
    let answers = || {
        root.run("underpass stats")
            .is_ok_and(|o| o.status.success())
    };
    until("the daemon answers", PATIENCE, answers)
        .with_context(|| root.sh("cat /run/told /run/said").unwrap_or_default())?;
    root.sh("cat /run/pid")
}

/// Redis and a client of it that counts, under the shim; how far it has come.
struct Load {
    server: Running,
    client: Running,
}

impl Load {
    fn start(root: &Root) -> Result<Load> {
        let server = root
            .program("exec underpass run redis-server --port 7000 --save '' --dir /tmp")
            .spawn()?;
        let ready = || server.stdout().contains("Ready to accept");
        until("redis is ready", PATIENCE, ready)?;
        let client = root
            .program("exec underpass run --eager redis-cli -p 7000 -r -1 -i 0.001 incr n")
            .spawn()?;
        Ok(Load { server, client })
    }

    /// Whole lines only: the client writes in blocks. They must be 1, 2, 3, ...
    fn count(&mut self) -> Result<usize> {
        ensure!(!self.client.has_ended(), "{}", self.client.stderr());
        ensure!(!self.server.has_ended(), "{}", self.server.stdout());
        let text = self.client.stdout();
        let whole = &text[..text.rfind('\n').map_or(0, |n| n + 1)];
        let lines: Vec<&str> = whole.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            ensure!(**line == (n + 1).to_string(), "{line} after {n}");
        }
        Ok(lines.len())
    }

    fn goes_on(&mut self) -> Result<()> {
        let before = self.count()?;
        until("the client goes on", PATIENCE, || {
            self.count().is_ok_and(|n| n > before + 400)
        })
    }
}

/// Both ends of the connection are on the ring, as this daemon sees it.
fn on_the_ring(root: &Root) -> Result<()> {
    let mut seen = String::new();
    until("two ends on the ring", PATIENCE, || {
        seen = root.sh("underpass ss").unwrap_or_default();
        seen.lines()
            .filter(|l| l.contains(":7000") && l.ends_with("SMCD"))
            .count()
            == 2
    })
    .with_context(|| seen.clone())
}

#[test]
fn root_the_package_has_what_it_should() -> Result<()> {
    let root = with_package()?;
    ensure!(root.sh("dpkg -V underpass")?.is_empty());
    let list = root.sh("dpkg -L underpass")?;
    for file in [
        "/usr/bin/underpass",
        "/usr/bin/underpassd",
        "/usr/lib/underpass/libunderpass.so",
        "/usr/lib/underpass/underpass-static",
        "/usr/lib/systemd/system/underpassd.service",
        "/etc/underpass/underpassd.toml",
        "/usr/share/man/man1/underpass-run.1.gz",
        "/usr/share/zsh/vendor-completions/_underpass",
        "/usr/share/fish/vendor_completions.d/underpass.fish",
        "/usr/share/doc/underpass/copyright",
    ] {
        ensure!(list.lines().any(|l| l == file), "no {file} in:\n{list}");
    }
    let page = root.sh("zcat /usr/share/man/man8/underpassd.8.gz")?;
    ensure!(
        page.contains(r"\-\-idle\-exit") && page.contains(".SH FILES"),
        "{page}"
    );
    let complete = ". /usr/share/bash-completion/completions/underpass; complete -p underpass";
    let complete = root.sh(&format!("bash -c '{complete}'"))?;
    ensure!(complete.contains("-F _underpass"), "{complete}");
    let reads = root.sh("cat /etc/underpass/underpassd.toml")?;
    ensure!(reads == std::fs::read_to_string(paths::root().join("deploy/underpassd.toml"))?);
    Ok(())
}

#[test]
fn root_installed_upgraded_and_purged() -> Result<()> {
    let root = with_package()?;
    let first = serves(&root)?;
    told(&root, "--quiet --system start")?;
    root.sh(&format!("test -L {WANTED}"))?;
    ensure!(root
        .sh("underpass run --verify sleep 1 2>&1")?
        .contains("1 of 1 carry the library"));

    let mut load = Load::start(&root)?;
    on_the_ring(&root)?;
    load.goes_on()?;
    // An upgrade keeps what the administrator has written, replaces the daemon, and disturbs nobody.
    root.sh("echo '# ours' >>/etc/underpass/underpassd.toml")?;
    root.sh("dpkg -i /tmp/underpass.deb")?;
    let second = serves(&root)?;
    ensure!(first != second, "the daemon is the same");
    told(&root, "--quiet --system restart")?;
    root.sh("grep -q '# ours' /etc/underpass/underpassd.toml")?;
    on_the_ring(&root)?;
    load.goes_on()?;

    // Without the package they go on as well; nothing of it is left when they have ended.
    root.sh("dpkg -r underpass")?;
    told(&root, "stop")?;
    load.goes_on()?;
    root.sh("test -e /etc/underpass/underpassd.toml")?;
    drop(load);
    root.sh("dpkg -P underpass")?;
    let left =
        root.sh("ls -d /run/underpass /sys/fs/bpf/underpass /var/lib/underpass 2>/dev/null; true")?;
    ensure!(left.is_empty(), "{left}");
    let changes = root.changes()?;
    let left: Vec<&String> = changes.iter().filter(|c| c.contains("underpass")).collect();
    ensure!(left.is_empty() && !changes.is_empty(), "{left:?}");
    Ok(())
}
