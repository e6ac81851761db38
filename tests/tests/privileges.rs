//! Children that give up their descriptors, or their user, lose what they have inherited of their parent's
//! connections, whose bytes stay on their lanes; what they keep goes on. As root, for the user changes.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::{c, peers::Pair, Daemon};

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
