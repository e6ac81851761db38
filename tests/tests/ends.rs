//! Ends of connections that leave their lanes: what the kernel tells of them is what it tells without one.

use anyhow::{ensure, Context, Result};
use nix::sys::signal::Signal;
use std::time::Duration;
use underpass_tests::harness::c::{both_ways, compile};
use underpass_tests::harness::{Daemon, Place, Program};

/// Far more than any of them takes.
const LIMIT: Duration = Duration::from_secs(60);

/// By its process's end, of a peer that has read everything, after this end has left the lane.
#[test]
fn a_process_that_has_read_everything_ends_cleanly() -> Result<()> {
    both_ways("ends_clean", &[], 24, 2_000)
}

/// By its process's end right behind its last bytes, while this end is leaving.
#[test]
fn an_exit_beside_a_way_down_is_no_reset() -> Result<()> {
    both_ways("exiting", &["300"], 600, 300_000)
}

/// By a shutdown of both directions, while this end is leaving.
#[test]
fn a_shutdown_beside_a_way_down_is_no_reset() -> Result<()> {
    both_ways("deaf", &["300"], 600, 300_000)
}

/// By a shutdown beside a peer that is stopped, while another thread reads.
#[test]
fn a_shutdown_beside_a_reader_is_no_early_end() -> Result<()> {
    both_ways("shutting", &["reads", "40"], 40, 40_000)
}

/// While another thread gives its number to a new connection.
#[test]
fn a_shutdown_keeps_to_its_connection() -> Result<()> {
    both_ways("shutting", &["reused", "20"], 20, 20_000)
}

/// While another thread makes it leave its lane, whose place is the next connection's then.
#[test]
fn a_shutdown_keeps_to_its_lane() -> Result<()> {
    both_ways("held", &["place"], 10, 10_000)
}

/// The same of a close, which is a reset here.
#[test]
fn a_close_keeps_to_its_lane() -> Result<()> {
    both_ways("held", &["close"], 12, 3_000)
}

/// It waits for a peer that does nothing, and its own process does not run in that time.
#[test]
fn who_does_not_run_does_not_wait() -> Result<()> {
    both_ways("held", &["leaves"], 2, 3_000)?;
    both_ways("held", &["shuts"], 2, 3_000)
}

/// A connection is to be reset, and its number is the next one's meanwhile.
#[test]
fn a_reset_keeps_to_its_connection() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("held");
    compile("held", &program)?;
    let run = |place: &Place| -> Result<()> {
        let out = Program::new(&program, place).arg("reset").run(LIMIT)?;
        let ok = out.stdout.contains("result ok");
        ensure!(ok, "{} {}", out.stdout, out.stderr);
        Ok(())
    };
    run(&Place::bare()).context("bare")?;
    let d = Daemon::start()?;
    d.expect_resets(); // (of the first one)
    run(&d.eager()).with_context(|| d.picture())?;
    let s = d.stats()?;
    let ok = s.promoted == 4 && s.lane_tx_bytes > 500 && s.resets == 1;
    ensure!(ok, "{}", d.picture());
    Ok(())
}

/// After their peer's death.
#[test]
fn hints_of_the_rest() -> Result<()> {
    both_ways("hints", &["5"], 40, 30_000)
}

/// Of more than TCP has room for.
#[test]
fn a_shutdown_of_a_full_ring_is_quick() -> Result<()> {
    both_ways("shutting", &["full", "6"], 6, 600_000)
}

/// Many, without a daemon that would act.
#[test]
fn shutdowns_do_not_wait_for_a_stopped_daemon_one_after_the_other() -> Result<()> {
    beside_a_stopped_daemon(["many", "10"], None)
}

/// A daemon that has much else to do does not run for some time.
#[test]
fn shutdowns_wait_for_a_daemon_that_is_late() -> Result<()> {
    beside_a_stopped_daemon(["late", "10"], Some(Duration::from_millis(400)))
}

/// A daemon that was late for one of them may be a little late for the next.
#[test]
fn shutdowns_wait_for_a_daemon_that_was_late_once() -> Result<()> {
    beside_a_stopped_daemon(["once", "10"], Some(Duration::from_millis(50)))
}

/// `stopped`: for so long, or until the program ends.
fn beside_a_stopped_daemon(args: [&str; 2], stopped: Option<Duration>) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("shutting");
    compile("shutting", &program)?;
    let d = Daemon::start()?;
    let mut p = Program::new(&program, &d.eager()).args(args).spawn()?;
    p.line("ready", LIMIT)?;
    d.freeze()?;
    p.signal(Signal::SIGUSR1)?;
    if args[0] == "once" {
        p.line("first", LIMIT)?;
    }
    if let Some(stopped) = stopped {
        std::thread::sleep(stopped);
        d.thaw()?;
    }
    let out = p.wait(LIMIT)?;
    d.thaw()?;
    ensure!(
        out.stdout.contains("result ok"),
        "{} {}",
        out.stdout,
        out.stderr
    );
    d.assert_promoted(10, 10_000)?;
    Ok(())
}

/// A number is closed or replaced, or the connection shut down, while another thread sends or receives by it.
#[test]
fn in_the_middle_of_calls() -> Result<()> {
    both_ways("racing", &["25"], 150, 50_000_000)
}

/// Its number is free, for whatever gets it meanwhile.
#[test]
fn a_close_that_lingers() -> Result<()> {
    both_ways("lingering", &[], 2, 2)
}

/// By a shutdown or a close, of a connection that is handed on with everything unread: whoever gets it finds it all.
#[test]
fn what_is_unread_at_the_end_goes_along() -> Result<()> {
    both_ways("handed", &[], 48, 1_000_000)
}

/// A reset that nobody was told of goes along with the connection.
#[test]
fn resets_that_wait() -> Result<()> {
    both_ways("kept", &[], 100, 200)
}
