//! Children that give up their descriptors, or their user, lose what they have inherited of their parent's
//! connections, whose bytes stay on their lanes; what they keep goes on. As root, for the user changes.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use underpass_tests::harness::{
    c, paths, peers::Pair, until, Daemon, Place, Program, Running, PATIENCE,
};

const LIMIT: Duration = Duration::from_secs(90);
const PROGRAM: &str = "privileges.py";

/// Bare and on lanes. Returns the daemon's view afterwards.
fn both(case: &str) -> Result<Daemon> {
    Pair::bare(PROGRAM, case)?.finish(LIMIT).context("bare")?;
    let d = Daemon::start()?;
    let p = Pair::promoted(PROGRAM, case, &d)?;
    p.finish(LIMIT).with_context(|| d.picture())?;
    Ok(d)
}

/// The parent's connection is on its lane all the time.
fn stays_up(case: &str) -> Result<()> {
    let d = both(case)?;
    let s = d.stats()?;
    ensure!(
        s.downs == 0 && s.resets == 0,
        "{case}: {s:?}\n{}",
        d.picture()
    );
    d.assert_promoted(2, 20_000)?;
    Ok(())
}

macro_rules! given_up {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            stays_up(stringify!($name))
        }
    )*};
}

given_up! {
    none_first name_first number_first thread_first chroot_first
    name_last number_last thread_last chroot_last
}

/// A child goes on with a connection of its parent's, which was on a lane: the same bytes, without a reset.
#[test]
fn what_is_kept_goes_on() -> Result<()> {
    for case in [
        "name_keeps",
        "number_early",
        "chroot_early",
        "thread_early",
        "name_with",
        "none_with",
    ] {
        let d = both(case).context(case)?;
        ensure!(d.stats()?.resets == 0, "{case}: {}", d.picture());
        d.assert_promoted(2, 1000)?;
    }
    Ok(())
}

/// A child's own connection is on its lane when its user changes, and stays there; the daemon shows both ends.
#[test]
fn what_is_its_own_stays_on_the_lane() -> Result<()> {
    for case in [
        "none_own",
        "name_own",
        "number_own",
        "chroot_own",
        "thread_own",
    ] {
        let looked = |mut p: Pair, d: Option<&Daemon>| -> Result<()> {
            p.await_mark("kept")?;
            if let Some(d) = d {
                ensure!(d.promoted_now() == 2, "{}", d.picture());
            }
            p.mark("looked")?;
            p.finish(LIMIT)
        };
        looked(Pair::bare(PROGRAM, case)?, None).context("bare")?;
        let d = Daemon::start()?;
        let p = Pair::promoted(PROGRAM, case, &d)?;
        looked(p, Some(&d)).with_context(|| format!("{case}\n{}", d.picture()))?;
        let s = d.assert_promoted(4, 400_000)?;
        ensure!(s.ups == 4, "{case}: {s:?}"); // nothing came back to its lane
    }
    Ok(())
}

/// Workers with another user than the listener's owner are promoted like others.
#[test]
fn workers() -> Result<()> {
    let d = both("name_listen")?;
    // 34 ends; on a busy machine some are through before their lane is there.
    d.assert_promoted(12, 100_000)?;
    Ok(())
}

/// Killed in the middle: the parent goes on.
#[test]
fn killed_on_the_way() -> Result<()> {
    for case in ["name_killed", "number_killed"] {
        let d = both(case)?;
        ensure!(d.stats()?.resets == 0, "{case}: {}", d.picture());
        d.assert_promoted(2, 50_000)?;
    }
    Ok(())
}

/// A user's own daemon may not look at the descriptors of a process that has made itself undumpable. One whose parent
/// ends, and which goes on with the connection only when the daemon has looked for it twice: the table says that it
/// has one.
#[test]
fn inherited_by_who_may_not_be_looked_at() -> Result<()> {
    orphaned(&Place::bare(), || Ok(())).context("bare")?;

    let dir = tempfile::tempdir()?;
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY))?;
    let d = Program::new(paths::bin("underpassd"), &Place::bare()).user(NOBODY);
    let _d = d.arg("--dir").arg(dir.path()).spawn()?;
    let stats = || -> Result<Value> {
        let p = Program::new(paths::bin("underpass"), &Place::bare()).user(NOBODY);
        let p = p.env("UNDERPASS_DIR", dir.path()).words("stats -j");
        Ok(serde_json::from_str(&p.check(PATIENCE)?)?)
    };
    until("the daemon answers", PATIENCE, || stats().is_ok())?;
    let promoted = || {
        until("promoted", PATIENCE, || {
            stats().is_ok_and(|s| s["promoted"] == 2)
        })
    };
    orphaned(&Place::shim(dir.path()).eager(), promoted)?;
    let s = stats()?;
    ensure!(
        s["resets"] == 0 && s["lane_rx_bytes"].as_u64() > Some(20_000),
        "{s}"
    );
    Ok(())
}

const NOBODY: u32 = 65_534;

fn orphaned(place: &Place, promoted: impl Fn() -> Result<()>) -> Result<()> {
    let t = tempfile::tempdir()?;
    std::fs::set_permissions(t.path(), Permissions::from_mode(0o755))?;
    let [fork, enough] = ["fork", "enough"].map(|f| t.path().join(f));
    let program = || Program::python("children.py", place).user(NOBODY);
    let server = program().args(["serve", "127.0.0.1"]).arg(&fork);
    let mut server = server.arg("late").spawn()?;
    let port = server.line("port ", PATIENCE)?;
    let client = program().args(["connect", "127.0.0.1", &port]).arg(&enough);
    let client = client.spawn()?;
    until("bytes come back", PATIENCE, || got(&client) > 20_000)?;
    promoted()?;
    File::create(&fork)?;
    until("the parent has ended", PATIENCE, || server.has_ended())?;
    let before = got(&client);
    until("the child goes on", PATIENCE, || {
        got(&client) > before + 200_000
    })?;
    File::create(&enough)?;
    let out = client.wait(LIMIT)?;
    ensure!(out.stdout.contains("result eof"), "{}", out.stdout);
    Ok(())
}

/// Bytes that have come back.
fn got(client: &Running) -> u64 {
    let said = client.stdout();
    let mut lines = said.lines().rev();
    let n = lines.find_map(|l| l.strip_prefix("got ")?.parse().ok());
    n.unwrap_or(0)
}

/// Children with threads that open and close connections, fork, and change their user, all at once.
#[test]
fn with_threads() -> Result<()> {
    c::both_ways("moving", &[], 4, 1000)
}

/// What a child makes next is not taken for the connection that it has closed under a call of its own.
#[test]
fn closed_under_a_call() -> Result<()> {
    c::both_ways("cleared", &["thread"], 2, 500_000)?;
    // Both directions: all are 3.9 MB.
    c::both_ways("cleared", &["handler"], 4, 2_400_000)
}
