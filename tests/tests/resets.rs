//! Peers that reset the connection, or die with bytes unread, while either direction is on a lane, on TCP or in
//! between: what had come is told, then ECONNRESET, never an end at once.

use anyhow::Result;
use underpass_tests::harness::c::{both_ways, in_small_rings};
use underpass_tests::harness::lines::{same_lines, same_lines_at_once, Part};
use underpass_tests::harness::Daemon;

#[test]
fn a_reset_is_told_after_what_had_come() -> Result<()> {
    both_ways("resets", &["1", "60"], 60, 100_000)
}

/// Much of what had come is on TCP, behind the frame, when the error is known.
#[test]
fn in_small_rings_too() -> Result<()> {
    in_small_rings("resets", &["25", "10"], 10, 50_000)
}

/// What a send has put on TCP behind a way down is there, though nothing before it was acknowledged.
#[test]
fn sent_behind_a_way_down() -> Result<()> {
    in_small_rings("resets", &["11", "60", "behind"], 60, 50_000)
}

/// Who dies or closes, with bytes unread there or here: polls, sets and calls say at once what they say bare, without
/// the daemon's help. (With STEP=7, 17,776 of its 31,104 cases.)
#[test]
fn a_death_is_told_before_the_last_bytes() -> Result<()> {
    let step: usize = std::env::var("STEP").map_or(Ok(101), |s| s.parse())?;
    let small = ["--ring-log2", "12", "--ring-max-log2", "12"];
    let daemons = [
        Daemon::start()?,
        Daemon::start()?,
        Daemon::start()?,
        Daemon::with(&small)?,
    ];
    let parts = daemons.iter().enumerate().map(|(k, d)| {
        Ok(Part {
            place: d.eager(),
            args: d.pid()?.to_string(),
            cases: format!("{} {}", k * step / daemons.len(), step),
        })
    });
    same_lines("deaths", parts.collect::<Result<_>>()?)?;
    for d in &daemons {
        d.assert_promoted(100, 100_000)?;
    }
    Ok(())
}

/// A process that exits rings the doorbell just before its kernel resets the connection: whoever sleeps in a poll looks
/// while the reset comes in, and is told all of it.
#[test]
fn a_sleeper_is_told_a_reset_whole() -> Result<()> {
    let d = Daemon::start()?;
    // Case 1,944 is a poll for input after a SHUT_WR. The cases repeat after 31,104.
    let cases = (0..30).flat_map(|k| [0, 4].map(|how| 1_000_000 + 1_944 + how + k * 31_104));
    let part = Part {
        place: d.eager(),
        args: d.pid()?.to_string(),
        cases: cases.map(|n| n.to_string()).collect::<Vec<_>>().join(" "),
    };
    same_lines_at_once("deaths", vec![part])?;
    d.assert_promoted(100, 10_000).map(drop)
}

/// Who closes with unread bytes of a send that is still under way has had all of them: the send is whole, and the next one
/// is told.
#[test]
fn a_send_that_a_close_cuts_off_is_whole() -> Result<()> {
    both_ways("cut_off", &["400"], 100, 100_000)?;
    in_small_rings("cut_off", &["400"], 100, 100_000)
}
