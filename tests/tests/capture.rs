//! `underpass capture`: what a lane carries, as packets. tshark reassembles what the application has sent; what comes too
//! late is missing, and nothing else is there instead; nobody sees other people's bytes; the connection never notices.

#[path = "../../daemon/tests/common/skip.rs"]
mod skip;

use anyhow::{ensure, Context, Result};
use nix::sys::signal::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use underpass_admin::{Row, Target};
use underpass_tests::harness::tshark::{compare, followed, hash_of_last, packets, Load, Packet};
use underpass_tests::harness::{paths, until, Daemon, Place, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(120);
/// A connection whose client waits before it goes on.
struct Talk {
    server: Running,
    client: Running,
    ends: [String; 2],
    gate: PathBuf,
    dir: tempfile::TempDir,
}

/// Both ends have ended well.
struct Finished {
    hashes: [String; 2],
    /// With what was captured.
    _dir: tempfile::TempDir,
}

impl Talk {
    fn start(d: &Daemon, host: &str, load: &Load, uid: Option<u32>) -> Result<Talk> {
        let dir = tempfile::tempdir()?;
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777))?;
        let gate = dir.path().join("gate");
        let program = |words: &str| {
            let p = Program::python("captured.py", &d.eager()).words(words);
            match uid {
                Some(uid) => p.user(uid).spawn(),
                None => p.spawn(),
            }
        };
        let name = gate.to_str().context("path")?;
        let mut server = program(&load.serve(host, name))?;
        let port = server.line("port ", PATIENCE)?;
        let mut client = program(&load.connect(host, &port, name))?;
        let local = client.line("local ", PATIENCE)?;
        let up = |d: &Daemon| {
            let rows = d.ss().unwrap_or_default();
            let ours = |r: &&Row| r.mode == "SMCD" && r.local.ends_with(&format!(":{local}"));
            rows.iter().find(ours).is_some_and(|r| r.up == "both")
        };
        until("the connection is on its lane", PATIENCE, || up(d)).with_context(|| d.picture())?;
        let address = |port: &str| match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        Ok(Talk {
            server,
            client,
            ends: [address(&local), address(&port)],
            gate,
            dir,
        })
    }

    fn tool(&self, d: &Daemon, more: &[&str]) -> Program {
        Program::new(paths::bin("underpass"), &Place::bare())
            .arg("--dir")
            .arg(d.dir())
            .arg("capture")
            .args(&self.ends)
            .args(more)
    }

    /// Begins a capture, and returns when it sees both directions.
    fn capture(&self, d: &Daemon) -> Result<(Running, PathBuf)> {
        let file = self.dir.path().join("lane.pcapng");
        let name = file.to_str().context("path")?;
        let tool = self.tool(d, &["-w", name]).spawn()?;
        until("both directions are captured", PATIENCE, || {
            tool.stderr().contains("SMCD in both directions")
        })
        .with_context(|| tool.stderr())?;
        Ok((tool, file))
    }

    fn go(&self) -> Result<()> {
        Ok(std::fs::write(&self.gate, b"")?)
    }

    /// The hashes of what client and server say they have sent.
    fn finish(self) -> Result<Finished> {
        let said = |out: &str, mark: &str| {
            let line = out
                .lines()
                .find_map(|l| l.strip_prefix(mark).map(str::to_owned));
            line.with_context(|| format!("no {mark:?} in {out}"))
        };
        let c = self.client.wait(LIMIT)?.ok()?;
        let s = self.server.wait(LIMIT)?.ok()?;
        Ok(Finished {
            hashes: [said(&c, "sent ")?, said(&s, "sent ")?],
            _dir: self.dir,
        })
    }
}

fn port_of(address: &str) -> &str {
    address.rsplit(':').next().unwrap_or_default()
}

fn has_proof(d: &Daemon) -> Result<bool> {
    Ok(d.stats()?.proof)
}

#[test]
fn tshark_reassembles_what_was_sent() -> Result<()> {
    let d = Daemon::start()?;
    let load = Load {
        rounds: 800,
        chunk: 4 << 10,
        reply: 1000,
        pause_ms: 4,
    };
    for host in ["127.0.0.1", "::1"] {
        let t = Talk::start(&d, host, &load, None)?;
        let (tool, file) = t.capture(&d)?;
        t.go()?;
        let ends = t.ends.clone();
        let done = t.finish().with_context(|| tool.stderr())?;
        let said = tool.wait(LIMIT)?;
        ensure!(said.status.success(), "{said:?}");
        let whole = said.stderr.contains("no gaps") && said.stderr.contains("has ended");
        ensure!(whole, "{}", said.stderr);
        let streams = followed(&file, port_of(&ends[0]))?;
        // Before these the capture has what was sent while the connection was waiting.
        let sizes = [800 * (4 << 10), 800 * 1000];
        for ((stream, size), sent) in streams.iter().zip(sizes).zip(&done.hashes) {
            let seen = hash_of_last(stream, size)?;
            ensure!(seen == *sent, "{seen} {sent} {}", said.stderr);
        }
        let all = packets(&file)?;
        ensure!(
            all[0].comment.contains("Reconstructed"),
            "{}",
            all[0].comment
        );
        for end in &ends {
            compare(&all, port_of(end), has_proof(&d)?)?;
        }
    }
    let stats = d.stats()?;
    ensure!(stats.lane_tx_bytes > 2 * 800 * (4 << 10), "{stats:?}");
    Ok(())
}

/// The lane is much faster than anybody can read along.
#[test]
fn what_came_too_late_is_missing_and_nothing_else_is_there() -> Result<()> {
    let d = Daemon::start()?;
    let load = Load {
        rounds: 400,
        chunk: 1 << 20,
        reply: 0,
        pause_ms: 0,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    let (tool, file) = t.capture(&d)?;
    t.go()?;
    let port = port_of(&t.ends[0]).to_owned();
    let _done = t.finish().with_context(|| tool.stderr())?;
    let said = tool.wait(LIMIT)?;
    let all = packets(&file)?;
    let seen = compare(&all, &port, has_proof(&d)?)?;
    ensure!(seen > 1 << 20, "{seen} bytes: {}", said.stderr);
    let sent: Vec<&Packet> = all.iter().filter(|p| p.from == port).collect();
    let follows = |w: &&[&Packet]| w[1].seq == w[0].seq.wrapping_add(w[0].bytes.len() as u32);
    let jumps = sent.windows(2).filter(|w| !follows(w));
    let marked = all
        .iter()
        .filter(|p| p.comment.contains("are missing"))
        .count();
    ensure!(jumps.count() == marked, "{marked} marked: {}", said.stderr);
    ensure!(said.stderr.contains("gap"), "{}", said.stderr);
    println!("{seen} of {} bytes: {}", 400 << 20, said.stderr);
    Ok(())
}

/// Bytes on TCP between two times on the lane are a gap of their length.
#[test]
fn what_goes_over_tcp_is_a_gap() -> Result<()> {
    let d = Daemon::start()?;
    let load = Load {
        rounds: 600,
        chunk: 4096,
        reply: 8,
        pause_ms: 5,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    let (tool, file) = t.capture(&d)?;
    t.go()?;
    let said = |what: &str| until(what, PATIENCE, || tool.stderr().contains(what));
    std::thread::sleep(Duration::from_millis(300));
    ensure!(d.down(Target::All)? == 2);
    said("on TCP")?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(d.up(Target::All)? == 2);
    until("it is up again", PATIENCE, || {
        tool.stderr().matches("SMCD in both directions").count() == 2
    })?;
    let ends = t.ends.clone();
    let _done = t.finish()?;
    let said = tool.wait(LIMIT)?;
    let all = packets(&file)?;
    for end in &ends {
        compare(&all, port_of(end), has_proof(&d)?)?;
    }
    let gaps: Vec<&str> = all
        .iter()
        .map(|p| p.comment.as_str())
        .filter(|c| c.contains("missing"))
        .collect();
    let tcp = gaps.iter().all(|c| c.contains("they went over TCP"));
    ensure!(gaps.len() == 2 && tcp, "{gaps:?} {}", said.stderr);
    Ok(())
}

/// It takes nothing and is not waited for: the connection goes on, and the daemon keeps little for it.
#[test]
fn a_stopped_tool_holds_nobody_up() -> Result<()> {
    let d = Daemon::start()?;
    let load = Load {
        rounds: 1500,
        chunk: 256 << 10,
        reply: 8,
        pause_ms: 1,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    let (tool, file) = t.capture(&d)?;
    tool.signal(Signal::SIGSTOP)?;
    let stopped = Instant::now();
    let before = memory(d.pid()?)?;
    t.go()?;
    let port = port_of(&t.ends[0]).to_owned();
    let (mut most, mut t) = (0, t);
    while !t.client.has_ended() {
        most = most.max(memory(d.pid()?)?);
        std::thread::sleep(Duration::from_millis(20));
    }
    let long = stopped.elapsed() > Duration::from_secs(9);
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.wait(LIMIT)?;
    let _done = t.finish()?;
    ensure!(most < before + (32 << 10), "{before} KiB, then {most} KiB");
    // (After 10 s the daemon has no patience any more.)
    let broke_off = long && ended.stderr.contains("broke off");
    let right = ended.status.success() && ended.stderr.contains("gap");
    ensure!(right || broke_off, "{ended:?}");
    let all = packets(&file)?;
    ensure!(compare(&all, &port, has_proof(&d)?)? > 0);
    Ok(())
}

/// Resident memory in KiB.
fn memory(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let n = line
        .and_then(|l| l.split_whitespace().next())
        .context("VmRSS")?;
    Ok(n.parse()?)
}

/// A pipe, a limit of bytes, and one of time.
#[test]
fn it_ends_where_it_is_told_to() -> Result<()> {
    let d = Daemon::start()?;
    let load = Load {
        rounds: 2500,
        chunk: 1000 * 8,
        reply: 8,
        pause_ms: 5,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    t.go()?;
    let file = tempfile::NamedTempFile::new()?;
    let name = file.path().to_str().context("path")?;
    let said = t.tool(&d, &["-w", name, "-n", "20001"]).run(LIMIT)?;
    ensure!(
        said.status.success() && said.stderr.contains("enough bytes"),
        "{said:?}"
    );
    let n: usize = packets(file.path())?.iter().map(|p| p.bytes.len()).sum();
    ensure!(n == 20001, "{n}");
    let said = t.tool(&d, &["-w", name, "--seconds", "1"]).run(LIMIT)?;
    ensure!(
        said.status.success() && said.stderr.contains("the time is over"),
        "{said:?}"
    );
    let tool = t.tool(&d, &["-w", name]).spawn()?;
    until("it captures", PATIENCE, || tool.stderr().contains("SMCD"))?;
    tool.signal(Signal::SIGINT)?;
    let said = tool.wait(LIMIT)?;
    ensure!(
        said.status.success() && said.stderr.contains("stopped"),
        "{said:?}"
    );
    let inode = d
        .ss()?
        .iter()
        .find(|r| r.state == "ACTIVE")
        .context("row")?
        .inode;
    let line = format!(
        "{} --dir {} capture --inode {inode} -n 100 | tshark -r - -T fields -e tcp.len",
        paths::bin("underpass").display(),
        d.dir().display()
    );
    let out = Command::new("sh").arg("-c").arg(line).output()?;
    let sum: u32 = String::from_utf8(out.stdout)?
        .lines()
        .filter_map(|l| l.parse::<u32>().ok())
        .sum();
    ensure!(sum == 100, "{sum} {}", String::from_utf8_lossy(&out.stderr));
    t.finish()?;
    Ok(())
}

/// A daemon that users may ask. `None`: this is not root, who starts programs as them.
fn for_all_users() -> Result<Option<Daemon>> {
    if !nix::unistd::geteuid().is_root() {
        skip::skip("needs root");
        return Ok(None);
    }
    let d = Daemon::start()?;
    std::fs::set_permissions(d.dir(), PermissionsExt::from_mode(0o755))?;
    Ok(Some(d))
}

#[test]
fn nobody_sees_other_peoples_bytes() -> Result<()> {
    let Some(d) = for_all_users()? else {
        return Ok(());
    };
    let load = Load {
        rounds: 300,
        chunk: 800,
        reply: 8,
        pause_ms: 20,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, Some(12345))?;
    let roots = Talk::start(&d, "127.0.0.1", &load, None)?;
    t.go()?;
    roots.go()?;
    let file = tempfile::NamedTempFile::new()?;
    let name = file.path().to_str().context("path")?;
    let few = ["-w", "-", "-n", "100"];
    for (uid, may) in [(12345, true), (12346, false)] {
        let out = t.tool(&d, &few).user(uid).run(LIMIT)?;
        ensure!(
            out.status.success() == may,
            "{uid}: {:?} {}",
            out.status,
            out.stderr
        );
        ensure!(
            may || out.stdout.is_empty() && out.stderr.contains("must be yours"),
            "{}",
            out.stderr
        );
        let out = roots.tool(&d, &few).user(uid).run(LIMIT)?;
        ensure!(
            !out.status.success() && out.stdout.is_empty(),
            "{uid}: {}",
            out.stderr
        );
    }
    let out = t.tool(&d, &["-w", name, "-n", "100"]).run(LIMIT)?;
    ensure!(out.status.success(), "root: {out:?}");
    Ok(())
}

/// A capture is over when who asked for it has lost the right to it: an end does as ssh-agent does, and lets nobody look into
/// it. The connection goes on.
#[test]
fn it_ends_when_the_right_to_it_is_lost() -> Result<()> {
    let Some(d) = for_all_users()? else {
        return Ok(());
    };
    let load = Load {
        rounds: 3,
        chunk: 800,
        reply: 8,
        pause_ms: 0,
    };
    let user = 12345;
    let t = Talk::start(&d, "127.0.0.1", &load, Some(user))?;
    let file = t.dir.path().join("lane.pcapng");
    let name = file.to_str().context("path")?;
    let tool = t.tool(&d, &["-w", name]).user(user).spawn()?;
    let size = || std::fs::metadata(&file).map_or(0, |m| m.len());
    until("bytes are captured", PATIENCE, || size() > 10_000).with_context(|| tool.stderr())?;
    std::fs::write(t.gate.with_extension("dark"), b"")?;
    let done = t.gate.with_extension("done");
    until("it lets nobody look", PATIENCE, || done.exists())?;
    let said = tool.wait(LIMIT)?;
    ensure!(
        said.stderr.contains("not see its bytes any more"),
        "{said:?}"
    );
    let again = t.tool(&d, &["-w", name, "-n", "100"]).user(user);
    let again = again.run(LIMIT)?;
    ensure!(
        !again.status.success() && again.stderr.contains("must be yours"),
        "{again:?}"
    );
    // (Root's goes on.)
    let root = t.tool(&d, &["-w", "-", "-n", "100"]).run(LIMIT)?;
    ensure!(root.status.success(), "root: {root:?}");
    t.go()?;
    t.finish()?;
    Ok(())
}

/// The daemon ends in the middle. The lane goes on; the capture breaks off, says so, and has written what it saw. The next
/// daemon has no part in that lane, and says so, too; of a new connection it serves captures.
#[test]
fn a_daemon_that_ends_takes_its_captures_along() -> Result<()> {
    let mut d = Daemon::start()?;
    let load = Load {
        rounds: 200,
        chunk: 800,
        reply: 8,
        pause_ms: 4,
    };
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    let proof = has_proof(&d)?;
    let (tool, file) = t.capture(&d)?;
    let size = || std::fs::metadata(&file).map_or(0, |m| m.len());
    until("bytes are captured", PATIENCE, || size() > 10_000).with_context(|| tool.stderr())?;
    d.kill();
    let said = tool.wait(LIMIT)?;
    let clear = said.stderr.contains("broke off") && said.stderr.contains("begin another one");
    ensure!(clear && said.status.code() == Some(1), "{said:?}");
    let ends = t.ends.clone();
    let all = packets(&file)?;
    for end in &ends {
        ensure!(compare(&all, port_of(end), proof)? > 1000, "{said:?}");
    }
    d.restart()?;
    let both = |up: &str| {
        let rows = d.ss().unwrap_or_default();
        let is = |r: &&Row| r.state == "ACTIVE" && r.up == up;
        rows.iter().filter(is).count() == 2
    };
    until("the new daemon has the connection", PATIENCE, || {
        both("both")
    })
    .with_context(|| d.picture())?;
    // (First the programs have to come back to it.)
    until("it says why not", PATIENCE, || {
        let said = t.tool(&d, &["-w", "-", "--seconds", "1"]).run(LIMIT);
        said.is_ok_and(|s| {
            s.stderr.contains("older than this daemon") && s.status.code() == Some(1)
        })
    })?;
    t.go()?;
    t.finish()?;
    let t = Talk::start(&d, "127.0.0.1", &load, None)?;
    let (tool, file) = t.capture(&d)?;
    let ends = t.ends.clone();
    t.go()?;
    let _done = t.finish().with_context(|| tool.stderr())?;
    let said = tool.wait(LIMIT)?;
    ensure!(said.stderr.contains("no gaps"), "{said:?}");
    let all = packets(&file)?;
    for end in &ends {
        ensure!(compare(&all, port_of(end), proof)? > 0, "{said:?}");
    }
    Ok(())
}
