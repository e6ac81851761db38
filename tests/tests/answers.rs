//! What the kernel would have said is said: errors, ends and events after the other end reset, closed, shut
//! down or died. One program runs its cases bare and under the shim, and says the same.

use anyhow::{bail, ensure, Context, Result};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use underpass_admin::Target;
use underpass_tests::harness::{until, Daemon, Place, Pods, Program, PATIENCE};

const PROGRAM: &str = "answers.py";
/// For all cases of one mode.
const LIMIT: Duration = Duration::from_secs(240);

#[derive(Clone, Copy, PartialEq)]
enum Cases {
    Up,
    /// The end that is asked wants to be on its way down.
    Down,
    /// No packet arrives any more.
    Eaten,
}

fn names(cases: Cases) -> Result<Vec<String>> {
    let which = if cases == Cases::Eaten {
        "eaten"
    } else {
        "all"
    };
    let list = Program::python(PROGRAM, &Place::bare()).args(["list", which, "-"]);
    let all = list.check(PATIENCE)?;
    Ok(all.split_whitespace().map(str::to_string).collect())
}

/// The cases that say `word` in their name; all, if the environment names none.
fn wanted(cases: Cases) -> Result<Vec<String>> {
    let only = std::env::var("UNDERPASS_TEST_CASE").unwrap_or_default();
    let mut all = names(cases)?;
    all.retain(|n| n.contains(&only));
    ensure!(!all.is_empty(), "no case {only:?}");
    Ok(all)
}

/// Runs the cases; `before` is called before each with its number, when both ends exchange messages, and
/// `begin` when they have stopped and it begins.
fn run(
    place: &Place,
    cases: Cases,
    before: impl Fn(usize) -> Result<()>,
    begin: impl Fn() -> Result<()>,
) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let all = wanted(cases)?;
    let how = if cases == Cases::Up { "up" } else { "down" };
    let mut p = Program::python(PROGRAM, place)
        .args(["run", &all.join(","), how])
        .arg(dir.path())
        .spawn()?;
    let file = |name: &str, n: usize| dir.path().join(format!("{name}-{n}"));
    let end = Instant::now() + LIMIT;
    for (n, name) in all.iter().enumerate() {
        let started = n == 0
            || until("the case before ends", PATIENCE, || {
                said(&p.stdout()).len() >= n || p.has_ended()
            })
            .is_ok();
        ensure!(started, "{}: {}\n{}", all[n - 1], p.stdout(), p.stderr());
        before(n).with_context(|| format!("{name}\n{}{}", p.stdout(), p.stderr()))?;
        std::fs::write(file("warm", n), b"")?;
        if cases != Cases::Up {
            until(name, PATIENCE, || file("down", n).exists() || p.has_ended())?;
            begin()?;
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
fn bare(cases: Cases) -> Result<&'static Vec<String>> {
    static ALL: OnceLock<Vec<String>> = OnceLock::new();
    static EATEN: OnceLock<Vec<String>> = OnceLock::new();
    let (said, cases) = match cases {
        Cases::Eaten => (&EATEN, Cases::Eaten),
        _ => (&ALL, Cases::Up),
    };
    if said.get().is_none() {
        let _ = said.set(run(&Place::bare(), cases, |_| Ok(()), || Ok(()))?);
    }
    said.get().context("not run")
}

/// Under the shim: both ends are on their lane when each case begins.
fn as_bare(d: &Daemon, place: &Place, cases: Cases) -> Result<()> {
    let go_down = || match cases {
        Cases::Down => d.down(Target::All).map(drop),
        _ => Ok(()),
    };
    compare(d, place, cases, |_| Ok(()), go_down)
}

fn compare(
    d: &Daemon,
    place: &Place,
    cases: Cases,
    before: impl Fn(usize) -> Result<()>,
    begin: impl Fn() -> Result<()>,
) -> Result<()> {
    let bare = bare(cases)?;
    let both_up = |n: usize| {
        before(n)?;
        d.await_promoted(2)?;
        until("bytes on the lanes", PATIENCE, || {
            d.stats()
                .is_ok_and(|s| s.lane_tx_bytes >= 1000 * (n as u64 + 1))
        })
    };
    let ours = run(place, cases, both_up, begin).with_context(|| d.picture())?;
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
    as_bare(&d, &d.place(), Cases::Up)
}

#[test]
fn eager() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.eager(), Cases::Up)
}

#[test]
fn in_rings_of_one_page() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("config");
    std::fs::write(&file, "ring_log2 = 12\nring_max_log2 = 12\n")?;
    let d = Daemon::with(&["--config", &file.to_string_lossy()])?;
    as_bare(&d, &d.eager(), Cases::Up)
}

#[test]
fn on_the_way_down() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.eager(), Cases::Down)
}

/// From the beginning of each case on, a packet filter eats what TCP has to say: a FIN or a reset reaches
/// nobody. What is said is the same.
fn eaten(place: impl Fn(&Daemon) -> Place) -> Result<()> {
    let d = Daemon::start()?;
    let pods = Pods::new()?;
    let within = Place::bare().netns(pods.a());
    let filter = |op: &str| {
        let rule = format!("-w {op} OUTPUT -o lo -p tcp -j DROP");
        let iptables = Program::new("iptables", &within).words(&rule);
        iptables.check(PATIENCE).map(drop)
    };
    let open = |n: usize| if n > 0 { filter("-D") } else { Ok(()) };
    compare(&d, &place(&d).netns(pods.a()), Cases::Eaten, open, || {
        filter("-A")
    })
}

#[test]
fn root_eaten_by_default() -> Result<()> {
    eaten(Daemon::place)
}

#[test]
fn root_eaten_eager() -> Result<()> {
    eaten(Daemon::eager)
}
