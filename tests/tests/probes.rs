//! Probes on TCP below a busy lane: they are sent, the application does not see them, and a connection that the
//! network has cut ends as it would end without the shim. Needs root.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::{c::both_ways, until, Daemon, Place, Pods, Program, SOON};

const LIMIT: Duration = Duration::from_secs(60);

/// What the program says. `busy` is asked when it is at work.
fn said(place: Place, pods: &Pods, busy: impl Fn() -> Result<()>) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let p = Program::python("probed.py", &place)
        .arg(dir.path())
        .spawn()?;
    let busy = busy();
    std::fs::write(dir.path().join("asked"), b"")?;
    busy?;
    until("the program is cut", SOON, || {
        dir.path().join("cut").exists()
    })?;
    let within = Place::bare().netns(pods.a());
    let filter = Program::new("iptables", &within).words("-w -A OUTPUT -o lo -p tcp -j DROP");
    filter.check(SOON)?;
    let out = p.wait(LIMIT)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    Ok(out.stdout.lines().map(str::to_string).collect())
}

#[test]
fn root_a_cut_connection_ends() -> Result<()> {
    let bare = Pods::new()?;
    let kernel = said(Place::bare().netns(bare.a()), &bare, || Ok(()))?;
    ensure!(kernel.len() == 3, "{kernel:?}");

    let dir = tempfile::tempdir()?;
    let file = dir.path().join("config");
    std::fs::write(&file, "[lanes]\nprobe_s = 1\n")?;
    let d = Daemon::with(&["--config", &file.to_string_lossy()])?;
    let pods = Pods::new()?;
    let within = Place::bare().netns(pods.a());
    let probed = || {
        d.await_promoted(2)?;
        until("probes of both ends", SOON, || {
            let ss = Program::new("ss", &within).words("-tnoH state established");
            let seen = ss.check(SOON).unwrap_or_default();
            seen.matches("timer:(keepalive").count() == 2
        })
    };
    let ours = said(d.place().netns(pods.a()), &pods, probed).with_context(|| d.picture())?;
    ensure!(kernel == ours, "bare {kernel:?}\nshim {ours:?}");
    d.assert_promoted(2, 1000)?;
    Ok(())
}

/// Who shares the connection finds the application's options, and leaves them to the others.
#[test]
fn the_options_are_those_of_all_holders() -> Result<()> {
    both_ways("options_shared", &[], 4, 500)
}
