//! Probes on TCP below a busy lane: they are sent, the application does not see them, and a connection that the
//! network has cut ends as it would end without the shim. Needs root.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::{c::both_ways, until, Daemon, Place, Pods, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

/// What the program says. `busy` is asked when it is at work, `cut` when it has been cut off; then it is not any more.
fn said(
    (place, how): (Place, &str),
    pods: &Pods,
    busy: impl Fn() -> Result<()>,
    cut: impl Fn() -> Result<()>,
) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let p = Program::python("probed.py", &place)
        .words(how)
        .arg(dir.path())
        .spawn()?;
    let busy = busy();
    std::fs::write(dir.path().join("asked"), b"")?;
    busy?;
    until("the program is cut", PATIENCE, || {
        dir.path().join("cut").exists()
    })?;
    let filter = |action: &str| {
        let within = Place::bare().netns(pods.a());
        let line = format!("-w {action} OUTPUT -o lo -p tcp -j DROP");
        Program::new("iptables", &within)
            .words(&line)
            .check(PATIENCE)
    };
    filter("-A")?;
    cut()?;
    if how == "asleep" {
        filter("-D")?;
        std::fs::write(dir.path().join("back"), b"")?;
    }
    let out = p.wait(LIMIT)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    Ok(out.stdout.lines().map(str::to_string).collect())
}

/// A daemon that wants a probe each second.
fn probing() -> Result<Daemon> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("config");
    std::fs::write(&file, "[lanes]\nprobe_s = 1\n")?;
    Daemon::with(&["--config", &file.to_string_lossy()])
}

/// So many ends send probes.
fn probed(pods: &Pods, ends: usize) -> Result<()> {
    until(&format!("probes of {ends} ends"), PATIENCE, || {
        let within = Place::bare().netns(pods.a());
        let ss = Program::new("ss", &within).words("-tnoH state established");
        ss.check(PATIENCE)
            .is_ok_and(|seen| seen.matches("timer:(keepalive").count() == ends)
    })
}

#[test]
fn root_a_cut_connection_ends() -> Result<()> {
    let (bare, nothing) = (Pods::new()?, || Ok(()));
    let place = Place::bare().netns(bare.a());
    let kernel = said((place, ""), &bare, nothing, nothing)?;
    ensure!(kernel.len() == 3, "{kernel:?}");

    let (d, pods) = (probing()?, Pods::new()?);
    let busy = || {
        d.await_promoted(2)?;
        probed(&pods, 2)
    };
    let place = d.place().netns(pods.a());
    let ours = said((place, ""), &pods, busy, nothing).with_context(|| d.picture())?;
    ensure!(kernel == ours, "bare {kernel:?}\nshim {ours:?}");
    d.assert_promoted(2, 1000)?;
    Ok(())
}

/// Who waits, and has nothing to send, is not told of the cut, nor ended by probes that are ours: it goes on when the
/// network does.
#[test]
fn root_a_sleeper_is_not_cut_off() -> Result<()> {
    let (bare, nothing) = (Pods::new()?, || Ok(()));
    let place = Place::bare().netns(bare.a());
    let kernel = said((place, "asleep"), &bare, nothing, nothing)?;

    let (d, pods) = (probing()?, Pods::new()?);
    let busy = || {
        d.await_promoted(4)?;
        probed(&pods, 4)
    };
    let cut = || {
        probed(&pods, 0)?;
        ensure!(d.promoted_now() == 4, "on TCP");
        Ok(())
    };
    let place = d.place().netns(pods.a());
    let ours = said((place, "asleep"), &pods, busy, cut).with_context(|| d.picture())?;
    ensure!(kernel == ours, "bare {kernel:?}\nshim {ours:?}");
    let s = d.assert_promoted(4, 1000)?;
    ensure!(s.downs == 0 && s.resets == 0, "{s:?}");
    Ok(())
}

/// Who shares the connection finds the application's options, and leaves them to the others.
#[test]
fn the_options_are_those_of_all_holders() -> Result<()> {
    both_ways("options_shared", &[], 4, 500)
}
