//! This build beside the previous one (`make previous`, which builds that first): programs with the shim of either, on the
//! daemon of either, and a daemon replaced by the other's under them. What both are is in `VERSION` and `MIN_VERSION` of
//! their contracts; that the two fit is asserted, because nothing else here would be worth much.

use anyhow::{ensure, Context, Result};
use std::collections::BTreeMap;
use std::time::Duration;
use underpass_admin::Target;
use underpass_tests::harness::departures::{Matrix, CELLS, LIMIT};
use underpass_tests::harness::paths::Build::{self, Previous, This};
use underpass_tests::harness::peers::Transfer;
use underpass_tests::harness::{until, Daemon, Place, Program, PATIENCE};

/// Whose shims the server and the client have.
const PAIRS: [(Build, Build); 4] = [
    (This, This),
    (This, Previous),
    (Previous, This),
    (Previous, Previous),
];

/// Bytes of all transfers together that show that they go on.
const ON: u64 = 64 << 20;

/// A transfer between each pair of builds.
struct Load(Vec<Transfer>);

impl Load {
    /// All of it is on lanes when this returns.
    fn start(d: &Daemon) -> Result<Load> {
        let before = d.stats()?.promoted;
        let start = |(server, client): (Build, Build)| {
            Transfer::start(&d.eager().of(server), &d.eager().of(client), "127.0.0.1")
        };
        let load = Load(PAIRS.map(start).into_iter().collect::<Result<_>>()?);
        let ends = 2 * PAIRS.len() as u64;
        until("all transfers are promoted", PATIENCE, || {
            d.stats().is_ok_and(|s| s.promoted >= before + ends)
        })
        .with_context(|| d.picture())?;
        load.goes_on(d)?;
        Ok(load)
    }

    /// Each goes on, over lanes, and all lanes can be left and taken again.
    fn goes_on(&self, d: &Daemon) -> Result<()> {
        self.is_on_lanes(d)?;
        d.down(Target::All)?;
        until("all are on TCP", PATIENCE, || d.promoted_now() == 0).with_context(|| d.picture())?;
        let each = ON / PAIRS.len() as u64;
        let on = self.0.iter().try_for_each(|t| t.await_sent(each));
        on.with_context(|| d.picture())?;
        d.up(Target::All)?;
        self.is_on_lanes(d)
    }

    /// Each sends on its lane, both ways. (What fills its ring goes down for a while and up again.)
    fn is_on_lanes(&self, d: &Daemon) -> Result<()> {
        let sent = || -> BTreeMap<String, u64> {
            let rows = d.ss().unwrap_or_default().into_iter();
            let rows = rows.filter(|r| r.state == "ACTIVE");
            rows.map(|r| (r.local, r.lane_tx_bytes)).collect()
        };
        let before = sent();
        ensure!(before.len() >= 2 * self.0.len(), "{}", d.picture());
        until("all send on lanes", PATIENCE, || {
            let now = sent();
            before
                .iter()
                .all(|(end, n)| now.get(end).is_some_and(|now| *now > n + (1 << 20)))
        })
        .with_context(|| d.picture())
    }

    /// Every byte has arrived.
    fn finish(self) -> Result<()> {
        for t in self.0 {
            let moved = t.finish(Duration::from_secs(60))?;
            ensure!(moved.forth > 0 && moved.back > 0, "{moved:?}");
        }
        Ok(())
    }
}

/// There are two builds, not one under two names. (The shim may be the same in both.)
fn differ() -> Result<()> {
    let [a, b] = [This, Previous].map(|b| std::fs::read(b.bin("underpassd")));
    ensure!(a? != b?, "the previous daemon is this one");
    Ok(())
}

fn replaced(first: Build, second: Build) -> Result<()> {
    differ()?;
    let mut d = Daemon::absent()?;
    d.replace(first)?;
    let load = Load::start(&d)?;
    d.replace(second)?;
    until("all are known again", PATIENCE, || {
        d.ss().is_ok_and(|r| r.len() == 2 * PAIRS.len())
    })?;
    load.goes_on(&d)?;
    let later = Load::start(&d)?;
    let both = Load([load.0, later.0].into_iter().flatten().collect());
    // And back.
    d.replace(first)?;
    until("all are known again", PATIENCE, || {
        d.ss().is_ok_and(|r| r.len() == 4 * PAIRS.len())
    })?;
    both.goes_on(&d)?;
    let s = d.stats()?;
    ensure!(s.resets == 0, "{}", d.picture());
    both.finish()
}

#[test]
fn a_daemon_is_replaced_by_the_newer() -> Result<()> {
    replaced(Previous, This)
}

#[test]
fn a_daemon_is_replaced_by_the_older() -> Result<()> {
    replaced(This, Previous)
}

/// Every way to leave a lane, as without the shim; but beside peers of these kinds, and with such bytes unread, of which the
/// previous version loses something.
fn departures(daemon: Build, shim: Build, but: &[&str]) -> Result<()> {
    let matrix = Matrix::compile()?;
    let run = |place: Place| {
        let filters = but.iter().map(|kind| format!("!/{kind}/"));
        let p = Program::new(matrix.program(), &place);
        p.args(filters).run(LIMIT)
    };
    let bare = run(Place::bare())?;
    let cells = bare.stdout.lines().count() as u64;
    ensure!(cells > CELLS / 2, "{}", bare.stderr);
    let mut d = Daemon::absent()?;
    d.replace(daemon)?;
    let ours = run(d.eager().of(shim))?;
    let told = format!("{}\n{}\n{}", ours.stderr, ours.stdout, d.picture());
    ensure!(bare.status.success() && ours.status.success(), "{told}");
    let lost = matrix.lost(false, cells, [&bare.stdout, &ours.stdout])?;
    let s = d.stats()?;
    ensure!(lost == 0 && s.resets == 0, "{lost} {told}");
    ensure!(s.promoted >= 2 * cells && s.taken_over > 200, "{told}");
    Ok(())
}

#[test]
fn departures_with_the_older_shim() -> Result<()> {
    departures(This, Previous, &["killed", "both", "ours", "unread-mixed"])
}

#[test]
fn departures_with_the_older_daemon() -> Result<()> {
    departures(Previous, This, &["killed", "unread-mixed"])
}

/// Each tool asks each daemon.
#[test]
fn tools_of_both() -> Result<()> {
    for daemon in [This, Previous] {
        let mut d = Daemon::absent()?;
        d.replace(daemon)?;
        let load = Load::start(&d)?;
        for tool in [This, Previous] {
            for line in ["ss -ej", "stats -j", "log"] {
                let p = Program::new(tool.bin("underpass"), &Place::bare());
                let p = p.words(line).env("UNDERPASS_DIR", d.dir());
                let out = p.run(PATIENCE)?;
                ensure!(out.status.success(), "{line}: {}", out.stderr);
                ensure!(
                    line != "ss -ej" || out.stdout.contains("SMCD"),
                    "{}",
                    out.stdout
                );
            }
        }
        load.finish()?;
    }
    Ok(())
}
