//! What the kernel would have said is said: errors, ends and events after the other end reset, closed, shut
//! down or died. One program runs its cases bare and under the shim, and says the same.

use anyhow::{bail, ensure, Context, Result};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use underpass_tests::harness::{until, Daemon, Place, Program, SOON};
use underpassd::admin::Target;

const PROGRAM: &str = "answers.py";
/// For all cases of one mode.
const LIMIT: Duration = Duration::from_secs(240);

fn names() -> Result<Vec<String>> {
    let list = Program::python(PROGRAM, &Place::bare()).args(["list", "-"]);
    let all = list.check(SOON)?;
    Ok(all.split_whitespace().map(str::to_string).collect())
}

/// The cases that say `word` in their name; all, if the environment names none.
fn wanted() -> Result<Vec<String>> {
    let only = std::env::var("UNDERPASS_TEST_CASE").unwrap_or_default();
    let mut all = names()?;
    all.retain(|n| n.contains(&only));
    ensure!(!all.is_empty(), "no case {only:?}");
    Ok(all)
}

/// Runs the cases; `before` is called before each with its number, when both ends exchange messages, and
/// `down` when the end that is asked wants to be on its way down.
fn run(
    place: &Place,
    down: bool,
    before: impl Fn(usize) -> Result<()>,
    go_down: impl Fn() -> Result<()>,
) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let all = wanted()?;
    let how = if down { "down" } else { "up" };
    let mut p = Program::python(PROGRAM, place)
        .args(["run", &all.join(","), how])
        .arg(dir.path())
        .spawn()?;
    let file = |name: &str, n: usize| dir.path().join(format!("{name}-{n}"));
    let end = Instant::now() + LIMIT;
    for (n, name) in all.iter().enumerate() {
        let started = n == 0
            || until("the case before ends", SOON, || {
                said(&p.stdout()).len() >= n || p.has_ended()
            })
            .is_ok();
        ensure!(started, "{}: {}\n{}", all[n - 1], p.stdout(), p.stderr());
        before(n).with_context(|| format!("{name}\n{}{}", p.stdout(), p.stderr()))?;
        std::fs::write(file("warm", n), b"")?;
        if down {
            until(name, SOON, || file("down", n).exists() || p.has_ended())?;
            go_down()?;
            std::fs::write(file("went", n), b"")?;
        }
    }
    let out = p.wait(end.saturating_duration_since(Instant::now()))?;
    ensure!(
        out.stdout.contains("result ok"),
        "{}\n{}",
        out.stdout,
        out.stderr
    );
    Ok(said(&out.stdout))
}

fn said(out: &str) -> Vec<String> {
    let whole = &out[..out.rfind('\n').map_or(0, |n| n + 1)];
    let lines = whole.lines().filter(|l| l.contains(": "));
    lines.map(str::to_string).collect()
}

/// Bare, once for all modes.
fn bare() -> Result<&'static Vec<String>> {
    static SAID: OnceLock<Vec<String>> = OnceLock::new();
    if SAID.get().is_none() {
        let _ = SAID.set(run(&Place::bare(), false, |_| Ok(()), || Ok(()))?);
    }
    SAID.get().context("not run")
}

/// Under the shim: both ends are on their lane when each case begins.
fn as_bare(d: &Daemon, place: &Place, down: bool) -> Result<()> {
    let bare = bare()?;
    let both_up = |n: usize| {
        d.await_promoted(2)?;
        until("bytes on the lanes", SOON, || {
            d.stats()
                .is_ok_and(|s| s.lane_tx_bytes >= 1000 * (n as u64 + 1))
        })
    };
    let go_down = || d.down(Target::All).map(drop);
    let ours = run(place, down, both_up, go_down).with_context(|| d.picture())?;
    let mut wrong = String::new();
    for (b, o) in bare.iter().zip(&ours).filter(|(b, o)| b != o) {
        wrong += &format!("bare {b}\nshim {o}\n");
    }
    if !wrong.is_empty() || bare.len() != ours.len() {
        bail!("{wrong}{} and {} cases", bare.len(), ours.len());
    }
    // (Resets of our own are counted: a peer that died with unread bytes on its ring is one.)
    let s = d.stats()?;
    ensure!(s.promoted >= 2 * bare.len() as u64, "{}", d.picture());
    Ok(())
}

#[test]
fn by_default() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.place(), false)
}

#[test]
fn eager() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.eager(), false)
}

#[test]
fn in_rings_of_one_page() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("config");
    std::fs::write(&file, "ring_log2 = 12\nring_max_log2 = 12\n")?;
    let d = Daemon::with(&["--config", &file.to_string_lossy()])?;
    as_bare(&d, &d.eager(), false)
}

#[test]
fn on_the_way_down() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.eager(), true)
}
