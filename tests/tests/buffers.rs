//! Sizes of buffers that were asked for bound what a lane takes unread as they bound TCP: about so much, and who
//! closes with bytes unread is noticed by who has more to send.

use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::{c, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(60);

fn said(program: &Path, place: &Place) -> Result<Vec<String>> {
    let out = Program::new(program, place).run(LIMIT)?;
    ensure!(
        out.status.success() && out.stdout.contains("result ok"),
        "{}: {}{}",
        out.status,
        out.stdout,
        out.stderr
    );
    let lines = out.stdout.lines().filter(|l| !l.starts_with("result"));
    Ok(lines.map(String::from).collect())
}

/// Equal, or about so much: within a factor of four, of what is more than a few pages.
fn alike(bare: &str, ours: &str) -> Result<bool> {
    if !bare.starts_with("~ ") {
        return Ok(bare == ours);
    }
    let (what, b) = bare.rsplit_once(' ').context("a number")?;
    let (same, o) = ours.rsplit_once(' ').context("a number")?;
    let (b, o) = (b.parse::<u64>()? + 8192, o.parse::<u64>()? + 8192);
    Ok(what == same && b <= 4 * o && o <= 4 * b)
}

fn as_bare(d: &Daemon, place: &Place) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("buffers");
    c::compile("buffers", &program)?;
    let bare = said(&program, &Place::bare()).context("bare")?;
    let ours = said(&program, place).with_context(|| d.picture())?;
    let mut wrong = String::new();
    for (b, o) in bare.iter().zip(&ours) {
        if !alike(b, o)? {
            wrong += &format!("bare {b}\nshim {o}\n");
        }
    }
    ensure!(wrong.is_empty() && bare.len() == ours.len(), "{wrong}");
    // Each case waits for its lane; most of what it takes is on it.
    let taken = ours.iter().filter(|l| l.contains(" taken "));
    let taken: Vec<u64> = taken
        .map(|l| Ok(l.rsplit(' ').next().context("a number")?.parse()?))
        .collect::<Result<_>>()?;
    d.assert_promoted(2 * taken.len() as u64, taken.iter().sum())?;
    Ok(())
}

#[test]
fn sizes_by_default() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.place())
}

#[test]
fn sizes_eager() -> Result<()> {
    let d = Daemon::start()?;
    as_bare(&d, &d.eager())
}

/// Who has waited for the end of `connect` may rely on the send buffer all the same.
#[test]
fn a_message_after_connect_is_taken_whole() -> Result<()> {
    c::both_ways("whole", &[], 16, 50_000)
}

/// Who sends again after a refusal has a queue that may be full: it gets what the kernel would have had room for.
#[test]
fn queues_of_servers() -> Result<()> {
    c::both_ways("queues", &[], 2, 200_000)
}

/// Who only tries once more before it waits for room has none: it stays on its lane, as slow as the reader is.
#[test]
fn tries_before_a_wait() -> Result<()> {
    c::in_small_rings("tries", &[], 2, 300_000)
}

/// What a send that may not wait takes beyond a ring of 1 MiB, it takes on the lane; and all of it leaves with the
/// connection.
#[test]
fn sends_as_large_as_the_kernels_buffer() -> Result<()> {
    c::both_ways("whole_sends", &[], 2, 2_000_000)
}
