//! Rules: what they deny is on TCP at once and stays there, and what they do not deny any more is promoted again.

use anyhow::{bail, ensure, Context, Result};
use lane::proto::reason::Reason;
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use std::path::Path;
use std::time::Duration;
use underpass_admin::rules::{Action, Rule};
use underpass_admin::{Request, Response, Row, Target};
use underpass_tests::harness::peers::{Echo, EchoClient};
use underpass_tests::harness::{until, Daemon, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

/// Connections that exchange bytes all the time, until there is a file.
const CONNS: u32 = 3;
const ENDS: usize = 2 * CONNS as usize;

fn busy(d: &Daemon, stop: &Path) -> Result<(Echo, EchoClient)> {
    let echo = Echo::serve("threads", "127.0.0.1", &d.eager())?;
    let client = echo.client(&d.eager(), CONNS, 0, Some(stop))?;
    d.await_promoted(ENDS)?;
    Ok((echo, client))
}

fn told(d: &Daemon, r: Request) -> Result<u64> {
    match d.ask(&r)? {
        Response::Told { ends, later } => Ok(ends + later),
        other => bail!("{r:?} answered {other:?}"),
    }
}

fn rows_of(d: &Daemon, port: u16) -> Result<Vec<Row>> {
    let ends = |r: &Row| {
        let is = |a: &str| a.ends_with(&format!(":{port}"));
        r.state == "ACTIVE" && (is(&r.local) || is(&r.peer))
    };
    Ok(d.ss()?.into_iter().filter(ends).collect())
}

/// All ends are on TCP for this reason, and their bytes go there.
fn on_tcp(d: &Daemon, port: u16, reason: Reason, ends: usize) -> Result<()> {
    let are = || {
        let rows = rows_of(d, port).unwrap_or_default();
        let down = |r: &&Row| r.up == "none" && r.reason == reason.code();
        rows.iter().filter(down).count() >= ends && rows.len() >= ends
    };
    until("all ends are on TCP", PATIENCE, are).with_context(|| d.picture())?;
    let moved = || -> Result<(u64, u64)> {
        let rows = rows_of(d, port)?;
        let sum = |of: fn(&Row) -> u64| rows.iter().map(of).sum();
        Ok((sum(|r| r.lane_tx_bytes), sum(|r| r.tcp_tx_bytes)))
    };
    let (lanes, tcp) = moved()?;
    until("bytes go over TCP", PATIENCE, || {
        moved().is_ok_and(|m| m.1 > tcp + 100_000)
    })
    .with_context(|| d.picture())?;
    ensure!(moved()?.0 == lanes, "bytes on lanes: {}", d.picture());
    Ok(())
}

#[test]
fn denied_at_once_and_let_again() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let stop = dir.path().join("stop");
    let mut d = Daemon::start()?;
    let (echo, client) = busy(&d, &stop)?;
    let port = echo.port()?;
    let mut others = busy(&d, &stop)?;
    d.await_promoted(2 * ENDS)?;
    let rule = Rule {
        ports: vec![port],
        ..Rule::default()
    };
    let ends = told(&d, Request::Rule { rule: rule.clone() })?;
    ensure!(ends as usize == ENDS, "{ends} were told\n{}", d.picture());
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    ensure!(d.promoted_now() == ENDS, "others': {}", d.picture());
    // New ones, and `up`, find the rule.
    let late = echo.client(&d.eager(), CONNS, 0, Some(&stop))?;
    on_tcp(&d, port, Reason::Config, ENDS)?;
    d.up(Target::All)?;
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    // So does the next daemon, which finds lanes of before.
    d.restart()?;
    let Response::Rules { added, configured } = d.ask(&Request::Rules)? else {
        bail!("no rules");
    };
    ensure!(added == [rule] && configured.is_empty(), "{added:?}");
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    on_tcp(&d, port, Reason::Config, ENDS)?;
    // One that comes first lets them; then none is left.
    let rule = Rule {
        action: Action::Allow,
        programs: vec!["no-such-program".into()],
        ..Rule::default()
    };
    ensure!(told(&d, Request::Rule { rule })? as usize == ENDS);
    told(&d, Request::Unrule { number: 2 })?;
    // (A program that has not met this daemon yet asks it after half a minute.)
    let promoted = || d.promoted_now() == 3 * ENDS;
    until("all are promoted", LIMIT, promoted).with_context(|| d.picture())?;
    ensure!(!others.1.running.has_ended(), "others");
    std::fs::write(&stop, b"")?;
    for c in [client, late, others.1] {
        c.finish(LIMIT)?;
    }
    let gone = d.ask(&Request::Unrule { number: 2 });
    ensure!(gone.is_err_and(|e| e.to_string().contains("no rule 2")));
    Ok(())
}

#[test]
fn the_files_are_read_again() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let [stop, config] = ["stop", "underpassd.toml"].map(|n| dir.path().join(n));
    std::fs::write(&config, "")?;
    let mut d = Daemon::with(&["--config", &config.display().to_string()])?;
    let (echo, client) = busy(&d, &stop)?;
    let port = echo.port()?;
    let hangup = |d: &Daemon, text: &str, says: &str| -> Result<()> {
        std::fs::write(&config, text)?;
        let before = d.said().matches(says).count();
        kill(Pid::from_raw(d.pid()? as i32), Signal::SIGHUP)?;
        until(says, PATIENCE, || d.said().matches(says).count() > before).context(d.said())
    };
    let uid = nix::unistd::getuid();
    let deny = format!("[[rule]]\nuids = [{uid}]\nports = [{port}]\n");
    hangup(&d, &deny, "rules were read again")?;
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    // What cannot be read changes nothing.
    hangup(&d, "[[rule]]\nprots = [1]\n", "stays as it was")?;
    hangup(
        &d,
        "[[rule]]\naddresses = ['10.0.0.1/8']\n",
        "stays as it was",
    )?;
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    hangup(&d, &format!("credits = 3\n{deny}"), "takes a restart")?;
    hangup(&d, "", "rules were read again")?;
    d.await_promoted(ENDS)?;
    // Lanes that are older than the daemon, and are denied since.
    d.kill();
    std::fs::write(&config, &deny)?;
    d.restart()?;
    on_tcp(&d, port, Reason::Operator, ENDS)?;
    std::fs::write(&stop, b"")?;
    client.finish(LIMIT)?;
    Ok(())
}
