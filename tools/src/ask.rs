//! `underpass stats`, `reasons`, `log`, `down` and `up`: each asks the daemon one question and prints the answer.

use crate::cli;
use crate::client::{ask, unexpected};
use crate::out::{self, bytes, clean, Failure, Outcome};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::{RailStats, Request, Response, Stats, Target};

pub fn stats(dir: Option<PathBuf>, o: &cli::Json) -> Outcome {
    let stats = counters(dir)?;
    match o.json {
        true => out::print_json(&stats)?,
        false => out::print(&stats_table(&stats))?,
    }
    Ok(ExitCode::SUCCESS)
}

pub fn counters(dir: Option<PathBuf>) -> Result<Box<Stats>, Failure> {
    match ask(dir, &Request::Stats)? {
        Response::Stats { stats } => Ok(stats),
        other => Err(unexpected(&other)),
    }
}

fn stats_table(s: &Stats) -> String {
    let proof = if s.proof {
        "BPF (works across network namespaces)"
    } else {
        "addresses and byte positions"
    };
    let mut t = String::new();
    let mut section = |title: &str, lines: &[(&str, String)]| {
        t.push_str(title);
        t.push('\n');
        for (name, value) in lines {
            t.push_str(&format!("  {name:<34} {value:>14}\n"));
        }
    };
    section(
        &format!(
            "underpassd {}, pid {}, up {}, proof by {proof}",
            clean(&s.version),
            s.pid,
            duration(s.uptime_s)
        ),
        &[],
    );
    section(
        "Now",
        &[
            ("clients (processes with the shim)", s.clients.to_string()),
            ("link groups", s.links.to_string()),
            ("lanes", s.lanes.to_string()),
            ("shared memory", bytes(s.memory_bytes)),
        ],
    );
    section(
        "Connections, so far",
        &[
            ("registered", s.registered.to_string()),
            ("paired", s.paired.to_string()),
            ("paired with other nodes", s.paired_across.to_string()),
            ("taken over", s.taken_over.to_string()),
            ("declined", s.declined.to_string()),
            ("control messages", s.datagrams.to_string()),
            ("promoted", s.promoted.to_string()),
            ("reset by the shim", s.resets.to_string()),
            ("ended by a peer's death", s.deaths.to_string()),
        ],
    );
    section(
        "Directions, so far",
        &[
            ("switched up", s.ups.to_string()),
            ("switched down", s.downs.to_string()),
            ("bytes sent on rings", bytes(s.lane_tx_bytes)),
            ("bytes received from rings", bytes(s.lane_rx_bytes)),
            ("doorbells rung", s.rings.to_string()),
            ("sleeps", s.sleeps.to_string()),
        ],
    );
    for r in &s.rails {
        rail(r, &mut section);
    }
    t
}

/// One port of one RDMA device.
fn rail(r: &RailStats, section: &mut impl FnMut(&str, &[(&str, String)])) {
    let mut names = Vec::new();
    let mut up: Vec<String> = Vec::new();
    for l in &r.links {
        let to = match l.node.is_empty() {
            true => String::new(),
            false => format!(" to {}", clean(&l.node)),
        };
        names.push(format!("links up{to}"));
        up.push(l.up.to_string());
        names.push(format!("lanes{to}"));
        up.push(l.lanes.to_string());
    }
    if r.links.is_empty() {
        names.push("links up".into());
        up.push("0".into());
    }
    let links = names.iter().map(String::as_str).zip(up);
    let counters = [
        ("RDMA writes", r.writes.to_string()),
        ("bytes written", bytes(r.bytes)),
        ("messages sent", r.messages_sent.to_string()),
        ("messages received", r.messages_received.to_string()),
        ("links failed", r.links_failed.to_string()),
    ];
    let lines: Vec<_> = links.chain(counters).collect();
    let title = format!("Rail {} port {}, so far", clean(&r.device), r.port);
    section(&title, &lines);
}

/// Seconds as a duration for people to read.
pub fn duration(s: u64) -> String {
    match (s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, m, s) => format!("{m} min {s} s"),
        (0, h, m, _) => format!("{h} h {m} min"),
        (d, h, ..) => format!("{d} d {h} h"),
    }
}

pub fn reasons(o: &cli::Json) -> Outcome {
    let table = lane::proto::reason::TABLE
        .iter()
        .map(|i| crate::ss::Said::of(i.reason.code()));
    if o.json {
        out::print_json(&table.map(|s| s.json()).collect::<Value>())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut t = format!("{:<10} {:<20} Meaning, and what to do\n", "Code", "Name");
    for s in table {
        t.push_str(&format!("0x{:08x} {:<20} {}\n", s.code, s.name, s.text));
        t.push_str(&format!("{:31} -> {}\n", "", s.advice));
    }
    out::print(&t)?;
    Ok(ExitCode::SUCCESS)
}

pub fn log(dir: Option<PathBuf>, o: &cli::Json) -> Outcome {
    match ask(dir, &Request::Log)? {
        Response::Log { lines } if o.json => out::print_json(&lines)?,
        Response::Log { lines } => {
            out::print(&lines.iter().map(|l| clean(l) + "\n").collect::<String>())?
        }
        other => return Err(unexpected(&other)),
    }
    Ok(ExitCode::SUCCESS)
}

fn target(o: &cli::Steer) -> Target {
    match o {
        cli::Steer { pid: Some(p), .. } => Target::Pid(*p),
        cli::Steer { inode: Some(i), .. } => Target::Inode(*i),
        cli::Steer {
            local: Some(l),
            peer: Some(p),
            ..
        } => Target::Pair {
            local: l.clone(),
            peer: p.clone(),
        },
        _ => Target::All,
    }
}

/// `down`, or `up`.
pub fn steer(dir: Option<PathBuf>, o: &cli::Steer, down: bool) -> Outcome {
    let target = target(o);
    let request = if down {
        Request::Down { target }
    } else {
        Request::Up { target }
    };
    let (ends, later) = match ask(dir, &request)? {
        Response::Told { ends, later } => (ends, later),
        other => return Err(unexpected(&other)),
    };
    if ends + later == 0 && !o.all {
        return Err(Failure::new("no connection matches (see `underpass ss`)"));
    }
    let what = if down {
        "told to go down to TCP"
    } else {
        "told that they may be promoted again"
    };
    out::print(&told(ends, later, what))?;
    Ok(ExitCode::SUCCESS)
}

/// How many ends were told something, for people.
pub fn told(ends: u64, later: u64, what: &str) -> String {
    let s = if ends == 1 { "" } else { "s" };
    let rest = match later {
        0 => String::new(),
        n => format!("; {n} will be when their programs next use a socket"),
    };
    format!("{ends} connection end{s} {what}{rest}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        for (s, want) in [
            (0, "0 s"),
            (59, "59 s"),
            (61, "1 min 1 s"),
            (3600, "1 h 0 min"),
            (200_000, "2 d 7 h"),
        ] {
            assert_eq!(duration(s), want);
        }
    }
}
