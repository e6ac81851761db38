//! The image of `make image`, in containerd.

use super::containerd::Containerd;
use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::node::Lan;
use underpass_tests::harness::{paths, until, PATIENCE};

const IMAGE: &str = concat!("docker.io/library/underpass:", env!("CARGO_PKG_VERSION"));

/// Where libibverbs looks for drivers, and for which.
const DRIVERS: &str = "usr/lib/x86_64-linux-gnu/libibverbs";
const WANTED: &str = "etc/libibverbs.d";

fn imported() -> Result<Containerd> {
    let c = Containerd::start()?;
    let tar = paths::target().join("underpass/image.tar");
    let tar = tar.to_string_lossy();
    c.ctr(&[
        "images",
        "import",
        "--local",
        "--snapshotter",
        "native",
        &tar,
    ])?;
    Ok(c)
}

#[test]
fn root_programs_of_the_image_run() -> Result<()> {
    let c = imported()?;
    ensure!(c.ctr(&["images", "ls", "-q"])?.trim() == IMAGE);
    for program in [
        "underpassd",
        "underpass",
        "/usr/lib/underpass/underpass-static",
    ] {
        let said = c.run(IMAGE, &[], &[program, "--version"])?;
        let version = concat!(" ", env!("CARGO_PKG_VERSION"), "\n");
        ensure!(
            said.stdout.ends_with(version) && said.stderr.is_empty(),
            "{said:?}"
        );
    }
    let help = c.run(IMAGE, &[], &["underpassd", "--help"])?.ok()?;
    ensure!(help.contains("--config <FILE>"), "{help}");
    // A configuration that is none: the daemon says so and ends.
    let wrong = c.run(IMAGE, &[], &["underpassd", "--config", "/etc/passwd"])?;
    ensure!(
        wrong.status.code() == Some(1) && wrong.stderr.contains("/etc/passwd"),
        "{wrong:?}"
    );
    Ok(())
}

/// The names of all drivers that libibverbs would load, each with its file.
fn drivers(root: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for wanted in std::fs::read_dir(root.join(WANTED))? {
        let path = wanted?.path();
        let text = std::fs::read_to_string(&path)?;
        let name = text.trim().strip_prefix("driver ").context("no driver")?;
        let prefix = format!("lib{name}-rdmav");
        let files = std::fs::read_dir(root.join(DRIVERS))?.flatten();
        let mut files = files.map(|f| f.file_name().to_string_lossy().into_owned());
        let file = files.find(|f| f.starts_with(&prefix));
        all.push(format!("/{DRIVERS}/{}", file.context(prefix)?));
    }
    Ok(all)
}

/// libibverbs looks for drivers only where there are devices. So the dynamic linker loads all of them, with whatever they
/// are linked to, before a program starts; it complains about one that it cannot load.
#[test]
fn root_rdma_drivers_load() -> Result<()> {
    let c = imported()?;
    let root = c.dir().join("mounted");
    std::fs::create_dir(&root)?;
    let at = root.to_string_lossy().into_owned();
    c.ctr(&["images", "mount", "--snapshotter", "native", IMAGE, &at])?;
    let drivers = drivers(&root);
    c.ctr(&["images", "unmount", "--snapshotter", "native", "--rm", &at])?;
    let drivers = drivers?;
    for needed in ["mlx5", "rxe", "siw", "erdma", "irdma", "efa"] {
        let of = format!("lib{needed}-rdmav");
        ensure!(
            drivers.iter().any(|d| d.contains(&of)),
            "no driver {needed}"
        );
    }
    let load = |libraries: &str| {
        let preload = format!("LD_PRELOAD=libibverbs.so.1 librdmacm.so.1 {libraries}");
        let now = ["--env", "LD_BIND_NOW=1", "--env", &preload];
        c.run(IMAGE, &now, &["underpassd", "--version"])
    };
    let said = load(&drivers.join(" "))?;
    ensure!(said.status.success() && said.stderr.is_empty(), "{said:?}");
    let said = load(&format!("/{DRIVERS}/libnone.so"))?;
    ensure!(said.stderr.contains("libnone.so"), "{said:?}");
    Ok(())
}

/// The image's own command, with a configuration of two nodes: the daemon loads libibverbs, and its tool reaches it.
#[test]
fn root_the_daemon_serves_in_its_container() -> Result<()> {
    let c = imported()?;
    let lan = Lan::new()?; // for its certificates
    lan.make("node a.example")?;
    let etc = c.dir().join("etc");
    std::fs::create_dir(&etc)?;
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        ("a.example.crt", "node.crt"),
        ("a.example.key", "node.key"),
    ] {
        std::fs::create_dir_all(etc.join("tls"))?;
        std::fs::copy(lan.file(from), etc.join("tls").join(to))?;
    }
    std::fs::write(
        etc.join("underpassd.toml"),
        "[node]\nname = 'a.example'\naddresses = ['192.0.2.1']\n\
         [[peer]]\nname = 'b.example'\ncontrol = '192.0.2.2:7471'\naddresses = ['192.0.2.2']\n",
    )?;
    let mount = format!(
        "type=bind,src={},dst=/etc/underpass,options=rbind:ro",
        etc.display()
    );
    let options = ["run", "--snapshotter", "native", "--mount", &mount];
    let mut daemon = c
        .program(&[&options[..], &[IMAGE, "daemon"]].concat())
        .spawn()?;
    let ask = || {
        let args = ["tasks", "exec", "--exec-id", "peers", "daemon"];
        c.ctr(&[&args[..], &["/usr/bin/underpass", "peers"]].concat())
    };
    let known = || ask().is_ok_and(|text| text.contains("b.example")) || daemon.has_ended();
    until("the daemon knows the other node", PATIENCE, known)?;
    let peers = ask().with_context(|| daemon.stderr())?;
    ensure!(peers.contains("node a.example"), "{peers}");
    let tasks = c.ctr(&["tasks", "ls"])?;
    let pid = tasks.lines().find_map(|l| l.strip_prefix("daemon "));
    let pid = pid.and_then(|l| l.split_whitespace().next());
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.context(tasks.clone())?))?;
    ensure!(
        maps.contains("/usr/lib/x86_64-linux-gnu/libibverbs.so.1"),
        "libibverbs is not loaded: {}",
        daemon.stderr()
    );
    c.ctr(&["tasks", "kill", "-s", "SIGTERM", "daemon"])?;
    daemon.wait(Duration::from_secs(20))?.ok()?;
    Ok(())
}
