//! `underpass check --measure`: round trip and throughput over TCP and over the lane, to `underpass check --serve`.
//!
//! Both connections exist all the time, and the tests alternate, so that what else happens on the machines meets both.
//! Which way the bytes went is not believed, but counted: the kernel says how many of a socket's bytes its TCP has
//! carried, and those of a lane are not among them.

mod figures;

use super::probe::{Connection, Probes, Shown, What};
use super::report::Finding;
use super::{ask, watch, MEASURE_WAIT_S, ON_TCP};
use crate::cli;
use crate::out::{self, Failure, Outcome};
use figures::{Figures, Report};
use std::process::ExitCode;
use underpass_probe::wire::Path;

/// Bytes of each send of the throughput tests.
const BLOCK: u32 = 128 << 10;
/// Time of the round trips between two questions to the daemon: it is their use that promotes the connection.
const WARM_MS: u32 = 50;
/// Share of a test's bytes, in percent, that may have gone another way than the test is named after: acknowledgements
/// that are still to come, probes, frames.
const ASTRAY_PERCENT: u64 = 2;

/// A connection, and what it has shown.
struct Way {
    path: Path,
    connection: Connection,
    figures: Figures,
}

impl Way {
    fn open(to: (&str, u16), path: Path, probes: &Probes) -> Result<Self, Failure> {
        let args = ["measure", to.0, &to.1.to_string(), path.name()];
        Ok(Way {
            path,
            connection: Connection::open(probes, &args, path == Path::Lane)?,
            figures: Figures::default(),
        })
    }

    fn round(&mut self, ms: u32) -> Result<(), Failure> {
        let ping = self.test(&format!("ping {ms}"))?;
        let up = self.test(&format!("up {ms} {BLOCK}"))?;
        let down = self.test(&format!("down {ms} {BLOCK}"))?;
        let f = &mut self.figures;
        if let What::Ping { min, median, p99 } = ping.what {
            f.round_trips.push([median, p99, min]);
        }
        for (shown, all) in [(up, &mut f.up), (down, &mut f.down)] {
            if let What::Bytes { bytes, ns } = shown.what {
                all.push((bytes, ns));
            }
        }
        Ok(())
    }

    fn test(&mut self, test: &str) -> Result<Shown, Failure> {
        let shown = self.connection.test(test)?;
        let f = &mut self.figures;
        f.bytes += shown.moved;
        f.kernel_bytes += shown.kernel;
        f.astray |= astray(self.path, shown);
        Ok(shown)
    }
}

/// Have bytes of this test gone the other way?
fn astray(path: Path, s: Shown) -> bool {
    let other = match path {
        Path::Tcp => s.moved.saturating_sub(s.kernel),
        Path::Lane => s.kernel,
    };
    other > s.moved / 100 * ASTRAY_PERCENT
}

pub fn run(to: (&str, u16), o: &cli::Check, probes: &Probes) -> Outcome {
    let ms = u32::try_from(o.time.as_millis()).unwrap_or(u32::MAX);
    let mut tcp = Way::open(to, Path::Tcp, probes)?;
    let mut lane = Way::open(to, Path::Lane, probes)?;
    let use_it = |c: &mut Connection| c.test(&format!("ping {WARM_MS}")).map(|_| ());
    let wait = o.wait.unwrap_or(MEASURE_WAIT_S);
    let mut found = watch(&mut lane.connection, &probes.dir, wait, use_it)?;
    if found.promoted() {
        // The first bytes make rings grow, and switch what has not switched.
        for test in [
            format!("up {WARM_MS} {BLOCK}"),
            format!("down {WARM_MS} {BLOCK}"),
        ] {
            tcp.connection.test(&test)?;
            lane.connection.test(&test)?;
        }
    }
    let on_lane = found.promoted();
    for _ in 0..o.rounds {
        tcp.round(ms)?;
        if on_lane {
            lane.round(ms)?;
        }
    }
    if on_lane {
        found = ask(&lane.connection, &probes.dir);
    }
    let report = report(to, o, (tcp, lane), found, on_lane)?;
    match o.json {
        true => out::print_json(&report.json())?,
        false => out::print(&report.text())?,
    }
    Ok(match report.reached() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(ON_TCP),
    })
}

fn report(
    to: (&str, u16),
    o: &cli::Check,
    (tcp, lane): (Way, Way),
    found: Finding,
    on_lane: bool,
) -> Result<Report, Failure> {
    if tcp.figures.astray {
        return Err(Failure::new(
            "the kernel's TCP has not carried all bytes of the connection that was to stay on TCP",
        ));
    }
    Ok(Report {
        host: to.0.into(),
        port: to.1,
        rounds: o.rounds,
        time: o.time,
        tcp_ends: [tcp.connection.local.clone(), tcp.connection.peer.clone()],
        tcp: tcp.figures,
        lane: on_lane.then_some(lane.figures),
        found,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_belongs_to_the_way_that_the_bytes_went() {
        let s = |moved, kernel| Shown {
            what: What::Bytes { bytes: 1, ns: 1 },
            moved,
            kernel,
        };
        assert!(!astray(Path::Tcp, s(1000, 1016)) && !astray(Path::Tcp, s(1000, 990)));
        assert!(astray(Path::Tcp, s(1000, 500)) && astray(Path::Tcp, s(1000, 0)));
        assert!(!astray(Path::Lane, s(1000, 16)) && astray(Path::Lane, s(1000, 30)));
        assert!(astray(Path::Lane, s(1000, 1000)));
    }
}
