//! Connections that a program started by theirs gets as well (system, popen, posix_spawn, fork with exec): on TCP as long
//! as it may use them, and on lanes again when it has ended.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::time::Duration;
use underpass_admin::Row;
use underpass_tests::harness::peers::{result, Echo};
use underpass_tests::harness::{c, until, Daemon, Place, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);
const CONNS: usize = 5;

struct Lent {
    _server: Echo,
    client: Running,
    dir: tempfile::TempDir,
    started: usize,
}

impl Lent {
    fn start(place: &Place, hows: &[&str]) -> Result<Self> {
        let server = Echo::serve("threads", "127.0.0.1", place)?;
        let dir = tempfile::tempdir()?;
        let client = Program::python("lent.py", place)
            .args(["127.0.0.1", &server.port()?.to_string(), &CONNS.to_string()])
            .arg(dir.path().join("end"))
            .args(hows)
            .spawn()?;
        Ok(Lent {
            _server: server,
            client,
            dir,
            started: 0,
        })
    }

    fn next(&mut self, says: &str) -> Result<()> {
        let go = format!("end.{}", self.started);
        std::fs::write(self.dir.path().join(go), b"")?;
        self.started += 1;
        self.client.line(says, PATIENCE)?;
        Ok(())
    }

    /// Every byte came back.
    fn finish(self) -> Result<u64> {
        std::fs::write(self.dir.path().join("end"), b"")?;
        let out = self.client.wait(LIMIT)?;
        ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
        let r = result(&out.stdout)?;
        ensure!(r["wrong"] == serde_json::json!([]), "{r}");
        r["rounds"].as_u64().context("rounds")
    }
}

fn on_lanes(d: &Daemon) -> bool {
    let up = |r: &&Row| r.up == "both";
    d.ss().unwrap_or_default().iter().filter(up).count() == 2 * CONNS
}

const HOWS: [&str; 5] = ["system", "popen", "spawn", "dup", "fork"];

#[test]
fn lanes_again_when_the_program_has_ended() -> Result<()> {
    let mut bare = Lent::start(&Place::bare(), &HOWS)?;
    for _ in HOWS {
        bare.next("ended")?;
    }
    bare.finish()?;
    let d = Daemon::start()?;
    for place in [d.place(), d.eager()] {
        let mut l = Lent::start(&place, &HOWS)?;
        for how in HOWS {
            until("they are on lanes", PATIENCE, || on_lanes(&d))
                .with_context(|| format!("before {how}\n{}", d.picture()))?;
            l.next("ended")?;
        }
        until("they are on lanes at the end", PATIENCE, || on_lanes(&d))
            .with_context(|| d.picture())?;
        l.finish().with_context(|| d.picture())?;
    }
    ensure!(d.stats()?.resets == 0, "{}", d.picture());
    d.assert_promoted(2 * 2 * CONNS as u64, 10_000).map(|_| ())
}

/// Who may still use them is found, and they stay on TCP for so long.
#[test]
fn tcp_while_the_program_goes_on() -> Result<()> {
    let d = Daemon::start()?;
    let mut l = Lent::start(&d.place(), &["stays"])?;
    until("they are on lanes", PATIENCE, || on_lanes(&d)).with_context(|| d.picture())?;
    l.next("began")?;
    until("it says who has them", PATIENCE, || {
        let held = |r: &&Row| r.role == "client" && r.reason == Reason::HeldElsewhere.code();
        d.ss().unwrap_or_default().iter().filter(held).count() == CONNS
    })
    .with_context(|| d.picture())?;
    let rows = d.ss()?;
    ensure!(rows.iter().all(|r| r.up != "both"), "{}", d.picture());
    std::fs::write(l.dir.path().join("end.child"), b"")?;
    until("they are on lanes again", PATIENCE, || on_lanes(&d)).with_context(|| d.picture())?;
    l.finish().with_context(|| d.picture())?;
    ensure!(d.stats()?.resets == 0, "{}", d.picture());
    Ok(())
}

/// By whichever call it is spawned, it finds what is on its parent's ring.
#[test]
fn spawned_programs_have_every_byte() -> Result<()> {
    c::both_ways("spawned", &["without"], 4, 100)?;
    c::both_ways_with("pidfd_spawn", "spawned", &["with"], 8, 200)
}

/// What has left for a program is not on a lane again before that program exists, however long that takes.
#[test]
fn on_tcp_until_there_is_a_child() -> Result<()> {
    c::both_ways_with("slow_spawn", "early", &[], 2, 4)
}

/// `resets`: so many of its connections are reset, because a peer does nothing for as long as it gets.
fn with_stopped_peers(what: &str, ends: u64, resets: u64) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("renumbered");
    c::compile("renumbered", &program)?;
    let run = |place: &Place, daemon: u32| -> Result<()> {
        let args = [what.to_string(), daemon.to_string()];
        let out = Program::new(&program, place).args(args).run(LIMIT)?;
        let ok = out.status.success() && out.stdout.contains("result ok");
        ensure!(ok, "{}: {}\n{}", out.status, out.stdout, out.stderr);
        Ok(())
    };
    run(&Place::bare(), 0).context("bare")?;
    let d = Daemon::start()?;
    if resets > 0 {
        d.expect_resets();
    }
    let done = run(&d.eager(), d.pid()?);
    d.thaw()?;
    done.with_context(|| d.picture())?;
    let s = d.stats()?;
    let as_expected = s.promoted >= ends && s.resets == resets;
    ensure!(as_expected, "{}", d.picture());
    Ok(())
}

/// The number by which a connection leaves is closed meanwhile: what has it next is let alone.
#[test]
fn numbers_are_closed_while_connections_leave() -> Result<()> {
    with_stopped_peers("numbers", 2, 1)
}

/// A connection that a thread lends is not late because another one's is.
#[test]
fn each_connection_has_its_own_time() -> Result<()> {
    with_stopped_peers("times", 4, 1)
}
