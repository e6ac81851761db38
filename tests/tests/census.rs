//! `underpass ss` shows every TCP socket of every program under the shim: compared with `/proc` for
//! programs that came to their sockets in many ways. Each row has a reason that is true, and names
//! the other end.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;
use std::time::Duration;
use underpass_admin::Row;
use underpass_tests::harness::{paths, until, Daemon, Place, Program, Running, PATIENCE};

const PROGRAM: &str = "sockets.py";

/// A program that holds its sockets until it is dropped.
struct Holder {
    running: Running,
    port: u16,
}

fn start(words: &str, place: &Place) -> Result<Holder> {
    let mut running = Program::python(PROGRAM, place).words(words).spawn()?;
    let listens = ["serve", "echo", "sink", "churn"]
        .iter()
        .any(|w| words.starts_with(w));
    let port = match listens {
        true => running.line("port ", PATIENCE)?.parse()?,
        false => 0,
    };
    Ok(Holder { running, port })
}

impl Holder {
    fn ready(mut self) -> Result<Self> {
        self.running
            .line("ready", PATIENCE)
            .with_context(|| self.running.stderr())?;
        Ok(self)
    }

    fn pid(&self) -> u32 {
        self.running.pid()
    }

    fn child(&mut self) -> Result<u32> {
        Ok(self.running.line("child ", PATIENCE)?.parse()?)
    }
}

/// Inodes of the TCP sockets that a process holds, as `/proc` tells.
fn kernel(pid: u32) -> BTreeSet<u64> {
    let mut known = BTreeSet::new();
    for f in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{f}")).unwrap_or_default();
        let inode = |l: &str| l.split_whitespace().nth(9)?.parse::<u64>().ok();
        known.extend(text.lines().skip(1).filter_map(inode));
    }
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter();
    let links = fds
        .flatten()
        .flatten()
        .filter_map(|e| std::fs::read_link(e.path()).ok());
    let inode = |l: std::path::PathBuf| {
        let s = l.to_str()?.strip_prefix("socket:[")?;
        s.strip_suffix(']')?.parse().ok()
    };
    links
        .filter_map(inode)
        .filter(|i| known.contains(i))
        .collect()
}

fn of(rows: &[Row], pid: u32) -> BTreeSet<u64> {
    let shown = rows
        .iter()
        .filter(|r| !matches!(r.state.as_str(), "INIT" | "CLOSED"));
    shown
        .filter(|r| r.pids.contains(&pid))
        .map(|r| r.inode)
        .collect()
}

/// The rows of each process are its sockets, and each socket has one row.
fn same(d: &Daemon, pids: &[(&str, u32)]) -> Result<Vec<Row>> {
    let rows = d.ss()?;
    let mut wrong = String::new();
    for (what, pid) in pids {
        let (k, r) = (kernel(*pid), of(&rows, *pid));
        if k != r || k.is_empty() {
            writeln!(wrong, "{what} ({pid}): kernel {k:?}, rows {r:?}")?;
        }
    }
    let mut inodes = BTreeMap::new();
    rows.iter()
        .for_each(|r| *inodes.entry(r.inode).or_insert(0) += 1);
    ensure!(inodes.values().all(|n| *n == 1), "twice: {inodes:?}");
    ensure!(wrong.is_empty(), "{wrong}\n{}", d.picture());
    Ok(rows)
}

/// The rows of connections that a process holds: reason, peer's reason, process at the other end.
fn said(rows: &[Row], pid: u32) -> HashSet<(Option<Reason>, Option<Reason>, u32)> {
    let r = rows
        .iter()
        .filter(|r| r.state == "ACTIVE" && r.pids.contains(&pid));
    let code = Reason::from_code;
    r.map(|r| (code(r.reason), code(r.peer_reason), r.peer_pid))
        .collect()
}

fn one(here: Reason, there: Reason, peer: u32) -> HashSet<(Option<Reason>, Option<Reason>, u32)> {
    [(Some(here), Some(there), peer)].into()
}

#[test]
fn rows_are_the_sockets_in_proc() -> Result<()> {
    use Reason::*;
    let d = Daemon::start()?;
    let shim = d.place();
    let server = start("serve 5", &shim)?;
    let idle = start(&format!("connect {} 3", server.port), &shim)?.ready()?;
    let exec = start(&format!("exec {}", server.port), &shim)?.ready()?;
    let mut give = start(&format!("give {}", server.port), &shim)?;
    let receiver = give.child()?;
    let give = give.ready()?;
    let server = server.ready()?;
    let stranger = start("serve 4", &Place::bare())?;
    let mut fork = start(&format!("fork {}", stranger.port), &shim)?;
    let child = fork.child()?;
    let fork = fork.ready()?;
    let off = start(&format!("connect {} 1", stranger.port), &shim.clone().off())?.ready()?;
    let last = start(&format!("connect {} 1", stranger.port), &shim)?.ready()?;
    let stranger = stranger.ready()?;
    // Nobody accepts any more.
    let queued = start(&format!("connect {} 2", server.port), &shim)?.ready()?;
    let outside = start(&format!("connect {} 1", server.port), &Place::bare())?.ready()?;
    let rows = same(
        &d,
        &[
            ("server", server.pid()),
            ("idle", idle.pid()),
            ("exec", exec.pid()),
            ("receiver", receiver),
            ("parent", fork.pid()),
            ("child", child),
            ("off", off.pid()),
            ("last", last.pid()),
            ("queued", queued.pid()),
        ],
    )?;
    for pid in [stranger.pid(), outside.pid()] {
        ensure!(of(&rows, pid).is_empty(), "a program without the shim");
    }
    ensure!(of(&rows, give.pid()).is_empty(), "given away");
    for (what, pid, wanted) in [
        ("idle", idle.pid(), one(Young, Young, server.pid())),
        ("exec", exec.pid(), one(Young, Young, server.pid())),
        ("receiver", receiver, one(Young, Young, server.pid())),
        ("parent", fork.pid(), one(Young, PeerNoShim, stranger.pid())),
        ("child", child, one(Young, PeerNoShim, stranger.pid())),
        ("off", off.pid(), one(Config, PeerNoShim, stranger.pid())),
        ("last", last.pid(), one(Young, PeerNoShim, stranger.pid())),
        ("queued", queued.pid(), one(Young, NotAccepted, 0)),
    ] {
        let got = said(&rows, pid);
        ensure!(
            got == wanted,
            "{what}: {got:?}, not {wanted:?}\n{}",
            d.picture()
        );
    }
    // What both hold is one row with both.
    let shared = rows
        .iter()
        .filter(|r| r.pids.contains(&child) && r.pids.contains(&fork.pid()));
    ensure!(shared.count() == 1);
    Ok(())
}

/// A connection that one process writes and another one reads (as rsync's client does) leaves its lane for
/// good, and says why.
#[test]
fn what_two_processes_use_is_shared() -> Result<()> {
    let d = Daemon::start()?;
    let echo = start("echo", &d.place())?.ready()?;
    let mut writer = start(&format!("split {}", echo.port), &d.place())?;
    let reader = writer.child()?;
    let writer = writer.ready()?;
    until("it says that it is shared", PATIENCE, || {
        let rows = d.ss().unwrap_or_default();
        let mut both = rows
            .iter()
            .filter(|r| r.pids.contains(&reader) && r.pids.contains(&writer.pid()));
        both.any(|r| r.reason == Reason::Shared.code() && r.up != "both")
    })
    .with_context(|| d.picture())?;
    d.assert_promoted(2, 1000)?;
    Ok(())
}

/// Programs that show titles have written over the environment that says where their daemon is; sshd
/// executes itself with the connection besides.
#[test]
fn programs_with_titles_have_rows() -> Result<()> {
    use Reason::*;
    let d = Daemon::start()?;
    let server = start("serve 2", &d.place())?;
    let mut parent = start(&format!("title {}", server.port), &d.place())?;
    let child = parent.child()?;
    let (parent, server) = (parent.ready()?, server.ready()?);
    let env = std::fs::read(format!("/proc/{child}/environ"))?;
    ensure!(env.iter().all(|b| *b == 0), "the environment is there");
    let rows = same(
        &d,
        &[
            ("server", server.pid()),
            ("parent", parent.pid()),
            ("child", child),
        ],
    )?;
    let got = said(&rows, child);
    ensure!(
        got == one(Young, Young, server.pid()),
        "{got:?}\n{}",
        d.picture()
    );
    let out = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words(&format!("check --json --pid {}", parent.pid()))
        .env("UNDERPASS_LIB", paths::shim())
        .check(PATIENCE)?;
    let all: Vec<serde_json::Value> = serde_json::from_str(&out)?;
    ensure!(
        all.len() == 2 && all.iter().all(|p| p["fine"] == true),
        "{out}"
    );
    Ok(())
}

/// Nothing is there to be seen of those that have ended, or have been closed.
#[test]
fn what_has_ended_has_no_row() -> Result<()> {
    let d = Daemon::start()?;
    let server = start("serve 2", &d.place())?;
    let idle = start(&format!("connect {} 2", server.port), &d.place())?.ready()?;
    let server = server.ready()?;
    same(&d, &[("server", server.pid()), ("idle", idle.pid())])?;
    let pid = idle.pid();
    drop(idle);
    until("the client's rows are gone", PATIENCE, || {
        d.ss().is_ok_and(|rows| of(&rows, pid).is_empty())
    })?;
    let rows = same(&d, &[("server", server.pid())])?;
    let said = said(&rows, server.pid());
    let closing = said
        .iter()
        .all(|s| s.0 == Some(Reason::NotEstablished) && s.2 == 0);
    ensure!(said.len() == 1 && closing, "half closed: {said:?}");
    Ok(())
}

#[test]
fn waiting_says_for_whom() -> Result<()> {
    use Reason::*;
    let d = Daemon::start()?;
    // Under the shim; it has read nothing and never will.
    let server = start("serve 1", &d.place())?;
    let stranger = start("echo", &Place::bare())?.ready()?;
    let eager = start(&format!("connect {} 1", server.port), &d.eager())?.ready()?;
    let server = server.ready()?;
    let used = start(&format!("talk {} 1", stranger.port), &d.place())?.ready()?;
    // A search of the daemon for the eager one's other end may still be under way.
    until("both wait", PATIENCE, || {
        let Ok(rows) = d.ss() else { return false };
        said(&rows, eager.pid()) == one(Waiting, Young, server.pid())
            && said(&rows, used.pid()) == one(Waiting, PeerNoShim, stranger.pid())
    })
    .with_context(|| d.picture())?;
    same(
        &d,
        &[
            ("eager", eager.pid()),
            ("used", used.pid()),
            ("server", server.pid()),
        ],
    )?;
    let text = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words("ss -e")
        .check(Duration::from_secs(20))?;
    let name = format!("other end: python3.11 (pid {})", server.pid());
    ensure!(text.contains(&name), "{text}");
    Ok(())
}

/// A reason that has stopped being true is not shown any more, though its program does nothing.
#[test]
fn reasons_do_not_outlive_their_cause() -> Result<()> {
    let mut d = Daemon::absent()?;
    let echo = start("echo", &Place::bare())?.ready()?;
    let again = d.dir().join("again");
    let mut late = start(
        &format!("late {} {}", echo.port, again.display()),
        &d.place(),
    )?;
    late.running.line("talked", PATIENCE)?;
    d.restart()?;
    std::fs::write(&again, "")?;
    let late = late.ready()?;
    // The first connection found no daemon. There is one now.
    until("the old reason is gone", PATIENCE, || {
        d.ss().is_ok_and(|rows| {
            let said: HashSet<_> = said(&rows, late.pid()).into_iter().map(|s| s.0).collect();
            said == [Some(Reason::Waiting), Some(Reason::Idle)].into()
        })
    })
    .with_context(|| d.picture())?;
    same(&d, &[("late", late.pid())])?;
    Ok(())
}

/// A promoted connection has both its ends' names and no reason; when it was told to go down, and up
/// again, and rests, it says so.
#[test]
fn lanes_at_rest_are_ready() -> Result<()> {
    let d = Daemon::start()?;
    let echo = start("echo", &d.eager())?.ready()?;
    let talk = start(&format!("talk {} 2", echo.port), &d.eager())?.ready()?;
    d.await_promoted(4)?;
    let rows = same(&d, &[("echo", echo.pid()), ("talk", talk.pid())])?;
    let talks = rows
        .iter()
        .filter(|r| r.state == "ACTIVE" && r.pids.contains(&talk.pid()));
    for r in talks {
        ensure!(r.mode == "SMCD" && r.peer_pid == echo.pid(), "{r:?}");
    }
    Ok(())
}

/// Its inode is not all that tells a runtime directory: a later one may have the same. The daemons of a directory keep a
/// number in it, and programs know it.
#[test]
fn a_directory_that_got_an_inode_is_another_one() -> Result<()> {
    let mut d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    let way = t.path().join("way");
    std::os::unix::fs::symlink(d.dir(), &way)?;
    let mut server = Program::python(PROGRAM, &d.place())
        .env("UNDERPASS_DIR", &way)
        .words("echo")
        .spawn()?;
    let port = server.line("port ", PATIENCE)?;
    // It hears the daemon when its connection is used.
    let talk = start(&format!("talk {port} 1"), &Place::bare())?.ready()?;
    d.kill();
    // Its environment leads here no more.
    std::fs::remove_file(&way)?;
    d.restart()?;
    same(&d, &[("server", server.pid())])?;
    d.kill();
    let lock = d.dir().join("lock");
    let mut number = std::fs::read(&lock)?;
    ensure!(number.len() == 4, "{number:?}");
    number[0] ^= 1;
    std::fs::write(&lock, number)?;
    d.restart()?;
    ensure!(of(&d.ss()?, server.pid()).is_empty(), "{}", d.picture());
    drop(talk);
    Ok(())
}

#[test]
fn a_program_whose_first_thread_has_ended_has_rows() -> Result<()> {
    use Reason::*;
    let d = Daemon::start()?;
    let server = start("serve 1", &d.place())?;
    let leader = start(&format!("leader {}", server.port), &d.place())?.ready()?;
    let server = server.ready()?;
    let rows = d.ss()?;
    let got = said(&rows, leader.pid());
    ensure!(
        got == one(Young, Young, server.pid()),
        "{got:?}\n{}",
        d.picture()
    );
    let out = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words(&format!("check --json --pid {}", leader.pid()))
        .check(PATIENCE)?;
    let all: Vec<serde_json::Value> = serde_json::from_str(&out)?;
    ensure!(all.len() == 1 && all[0]["fine"] == true, "{out}");
    Ok(())
}

/// Numbers 0 to 2 belong to the C library's streams, which no hook sees.
#[test]
fn standard_streams_are_named() -> Result<()> {
    let d = Daemon::start()?;
    let echo = start("echo", &d.place())?.ready()?;
    let client = start(&format!("standard {}", echo.port), &d.place())?.ready()?;
    let rows = same(&d, &[("client", client.pid()), ("echo", echo.pid())])?;
    let here: Vec<_> = said(&rows, client.pid()).into_iter().map(|s| s.0).collect();
    ensure!(
        here == [Some(Reason::Standard)],
        "{here:?}\n{}",
        d.picture()
    );
    Ok(())
}

/// A connection that only one end sends on has a reason for the other direction.
#[test]
fn one_direction_has_a_reason() -> Result<()> {
    let d = Daemon::start()?;
    let sink = start("sink", &d.place())?;
    let pour = start(&format!("pour {}", sink.port), &d.place())?.ready()?;
    let (mut rows, ready) = (Vec::new(), Reason::Ready.code());
    until("one direction is on the ring", PATIENCE, || {
        rows = d.ss().unwrap_or_default();
        let of = |pid, up: &str| {
            let mut all = rows.iter().filter(|r| r.pid == pid && r.mode == "SMCD");
            all.any(|r| r.up == up && (r.reason, r.peer_reason) == (ready, ready))
        };
        of(pour.pid(), "tx") && of(sink.pid(), "rx")
    })
    .with_context(|| d.picture())?;
    let out = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words("ss -e -j")
        .check(Duration::from_secs(20))?;
    let all: Vec<serde_json::Value> = serde_json::from_str(&out)?;
    let named = |r: &&serde_json::Value| {
        r["up"] == "tx" && r["reason"]["name"] == "ready" && r["peer_reason"]["name"] == "ready"
    };
    ensure!(all.iter().filter(named).count() == 1, "{out}");
    Ok(())
}

/// One end leaves the lane while the other one's program sleeps, and says nothing.
#[test]
fn a_lane_that_one_end_has_left_is_none() -> Result<()> {
    let d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    let file = t.path().join("give");
    let mut part = Program::python(PROGRAM, &d.place())
        .words(&format!("part {}", file.display()))
        .spawn()?;
    d.await_promoted(2).with_context(|| part.stderr())?;
    std::fs::write(&file, "")?;
    let receiver: u32 = part.line("child ", PATIENCE)?.parse()?;
    part.line("ready", PATIENCE)?;
    until("both ends are on TCP", PATIENCE, || {
        let rows = d.ss().unwrap_or_default();
        let of = |pid, peer| {
            let mut all = rows
                .iter()
                .filter(|r| r.state == "ACTIVE" && r.pids == [pid]);
            all.any(|r| r.up == "none" && r.reason != 0 && r.peer_pid == peer)
        };
        of(part.pid(), receiver) && of(receiver, part.pid())
    })
    .with_context(|| d.picture())
}

/// What is just made, closed, or held by a process that ends, is not taken for something that its shim has not seen.
#[test]
fn what_comes_and_goes_is_tracked() -> Result<()> {
    let d = Daemon::start()?;
    let churn = start("churn", &d.place())?.ready()?;
    let (mut seen, mut bad) = (0, 0);
    for _ in 0..40 {
        let rows = d.ss()?;
        seen += rows.iter().filter(|r| r.state == "ACTIVE").count();
        let untracked = |r: &&Row| r.reason == Reason::Untracked.code();
        bad += rows.iter().filter(untracked).count();
    }
    // A thread may have lost its processor for long, just before its shim entered a new one.
    ensure!(seen > 400 && bad < 10, "{bad} of {seen}");
    drop(churn);
    Ok(())
}
