//! Lives and deaths: of shims' processes, of control connections, of the daemon itself.

mod common;
use common::*;
use lane::proto::msg::{ToDaemon, ToShim};
use lane::proto::reason::Reason;
use rustix::process::Signal;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use underpass_admin::Request;

/// A shim in a process of its own: this test program, run again with a role. It pairs a connection
/// with ours, and then does as it is told.
struct Other {
    child: Child,
    stdin: ChildStdin,
    port: u16,
}

impl Other {
    fn start(d: &Daemon) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "role", "--nocapture", "--test-threads=1"])
            .env("UNDERPASSD_TEST_ROLE", &d.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let port = loop {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the role ended");
            if let Some((_, p)) = line.trim_end().split_once("port ") {
                break p.parse().unwrap();
            }
        };
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        Other { child, stdin, port }
    }

    /// A connection to it, promoted.
    fn pair(&self, a: &mut Shim) -> (std::net::TcpStream, Lane) {
        let c = std::net::TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let i = a.enter(&c, true);
        a.register(i, &c);
        let l = a.offer();
        (c, l)
    }

    fn tell(&mut self, word: &str) {
        writeln!(self.stdin, "{word}").unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: what [`Other`] runs.
#[test]
fn role() {
    let Some(dir) = std::env::var_os("UNDERPASSD_TEST_ROLE") else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut b = Shim::new(&dir);
    println!("port {}", l.local_addr().unwrap().port());
    let (s, _) = l.accept().unwrap();
    let j = b.enter(&s, false);
    b.register(j, &s);
    b.offer();
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            // Another process inherits everything, the control connection included.
            "inherit" => {
                let mut c = Command::new("sleep");
                for fd in [&b.sock, &b.table_fd] {
                    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
                }
                c.arg("30")
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null());
                let mut child = c.spawn().unwrap();
                println!("pid {}", child.id());
                std::thread::spawn(move || child.wait());
            }
            "hang up" => {
                b.sock = rustix::net::socket(
                    rustix::net::AddressFamily::UNIX,
                    rustix::net::SocketType::STREAM,
                    None,
                )
                .unwrap()
            }
            "again" => {
                b.reconnect(&dir);
                while b.step().is_some() {}
            }
            // Another program in the same process, which says hello with a table of its own.
            "exec" => {
                use std::os::unix::process::CommandExt;
                let e = Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "role", "--nocapture", "--test-threads=1"])
                    .exec();
                panic!("{e}");
            }
            w => panic!("{w}"),
        }
    }
}

fn gone(a: &mut Shim, l: Lane) {
    a.until("the other's end", |m| match *m {
        ToShim::PeerGone { group, side } => {
            assert_eq!((group, side), (l.group, l.side));
            Some(())
        }
        _ => None,
    });
}

#[test]
fn a_dead_process_takes_its_groups_along() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let mut o = Other::start(&d);
    let (_c, l) = o.pair(&mut a);
    assert_eq!(d.stats().lanes, 1);
    // Its control connection lives on in another process: only the pidfd tells.
    o.tell("inherit");
    std::thread::sleep(std::time::Duration::from_millis(300));
    o.child.kill().unwrap();
    gone(&mut a, l);
    let s = d.until("the end of the lane", |s| s.lanes == 0);
    assert_eq!((s.links, s.memory_bytes), (0, 0));
}

#[test]
fn a_lost_control_connection_leaves_lanes_alone() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let mut o = Other::start(&d);
    let (_c, l) = o.pair(&mut a);
    o.tell("hang up");
    d.until("one client", |s| s.clients == 1);
    let s = d.stats();
    assert_eq!((s.links, s.lanes), (1, 1), "the lane runs on");
    // It comes back as the same client: its messages about the lane count.
    o.tell("again");
    d.until("two clients", |s| s.clients == 2);
    assert_eq!(d.stats().links, 1);
    o.child.kill().unwrap();
    gone(&mut a, l);
    d.until("nothing", |s| s.links == 0 && s.lanes == 0);
}

#[test]
fn another_program_in_the_same_process_has_no_groups() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let mut o = Other::start(&d);
    let (_c, l) = o.pair(&mut a);
    o.tell("exec");
    gone(&mut a, l);
    let s = d.until("its successor", |s| s.clients == 2);
    assert_eq!((s.links, s.lanes), (0, 0));
}

/// What was lost with a control connection comes with the next one: the other client's file, and that it has ours.
#[test]
fn what_was_lost_comes_again() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    let want = ToDaemon::WantChunk {
        group: y.group,
        side: y.side,
    };
    b.say(want, &[]);
    let ready = |m: &ToShim| matches!(m, ToShim::ChunkReady { chunk: 2, .. }).then_some(());
    b.until("the chunk", |m| {
        matches!(m, ToShim::Chunk { chunk: 2, .. }).then_some(())
    });
    a.until("the peer's chunk", |m| {
        matches!(m, ToShim::PeerChunk { chunk: 2, .. }).then_some(())
    });
    b.until("ready", ready);
    b.reconnect(&d.dir);
    b.until("the other's file", |m| match m {
        ToShim::PeerChunk {
            group, chunk: 0, ..
        } => (*group == x.group).then_some(()),
        _ => None,
    });
    b.until("ready, again", ready);
    pair(&mut a, &mut b);
    assert_eq!(d.stats().links, 1);
}

#[test]
fn an_end_that_waits_dies_with_its_connection() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    a.credit();
    drop(a);
    d.until("one client", |s| s.clients == 1);
    b.register(j, &s);
    b.credit();
    assert_eq!(d.stats().paired, 0);
}

#[test]
fn what_was_missed_is_told_later() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let mut o = Other::start(&d);
    let (_c, l) = o.pair(&mut a);
    a.sock = dial(&d.dir); // without a hello
    d.until("one client", |s| s.clients == 1);
    o.child.kill().unwrap();
    d.until("no link group", |s| s.links == 0);
    a.greet();
    gone(&mut a, l);
}

#[test]
fn a_group_in_the_making_ends_with_a_connection() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    b.helpful = false;
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    b.register(j, &s);
    b.until("the link group", |m| {
        matches!(m, ToShim::GroupNew { .. }).then_some(())
    });
    drop(b.sock.try_clone());
    b.sock = dial(&d.dir);
    a.until("its end", |m| {
        matches!(m, ToShim::PeerGone { .. }).then_some(())
    });
    let (reason, _, retry) = a.declined(i);
    assert_eq!(reason, Reason::PeerGone.code());
    assert!(retry > 0);
    d.until("nothing", |s| s.links == 0 && s.lanes == 0);
}

#[test]
fn killed_and_started_again() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let mut d = Daemon::start_in(&dir, &["--no-bpf"]);
    let (mut a, mut b) = (Shim::new(&dir), Shim::new(&dir));
    let (x, _) = pair(&mut a, &mut b);
    let c = a.conn(0);
    c.flags.fetch_or(
        lane::family::flag::LANE,
        std::sync::atomic::Ordering::Relaxed,
    );
    c.group.store(x.group, std::sync::atomic::Ordering::Relaxed);
    d.kill();
    // What both have mapped is theirs, daemon or not.
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    assert!(d.rows().is_empty());
    a.reconnect(&dir);
    b.reconnect(&dir);
    let rows = d.rows();
    assert_eq!(rows.len(), 2, "the view is complete again");
    assert!(
        rows.iter().any(|r| r.link == x.group),
        "old link groups are shown"
    );
    a.say(
        ToDaemon::LaneDone {
            group: x.group,
            side: x.side,
            lane: x.lane,
        },
        &[],
    );
    let (y, _) = pair(&mut a, &mut b);
    assert_ne!(y.group, x.group, "never in an inherited area");
}

#[test]
fn one_daemon_per_directory() {
    let mut d = Daemon::plain();
    let mut second = Daemon::spawn(&d.dir, &["--no-bpf"]);
    assert!(!second.wait().unwrap().success());
    // The first is not disturbed, and leaves cleanly.
    Shim::new(&d.dir);
    d.signal(Signal::TERM);
    assert!(d.wait().success());
    assert!(!d.dir.join("control.sock").exists() && !d.dir.join("admin.sock").exists());
    // Left-over sockets of a killed one are replaced.
    let dir = d.dir.clone();
    let mut d = Daemon::start_in(&dir, &["--no-bpf"]);
    d.kill();
    assert!(dir.join("control.sock").exists());
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    Shim::new(&d.dir);
}

#[test]
fn a_directory_of_somebody_else_is_not_used() {
    if !root_or_skip("a directory of somebody else") {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(12345), None).unwrap();
    assert!(!Daemon::spawn(&dir, &["--no-bpf"]).wait().unwrap().success());
    let group = tmp.path().join("link");
    std::os::unix::fs::symlink("/tmp", &group).unwrap();
    assert!(!Daemon::spawn(&group, &["--no-bpf"])
        .wait()
        .unwrap()
        .success());
}

#[test]
fn leaves_when_idle() {
    let mut d = Daemon::start(&["--no-bpf", "--idle-exit", "1"]);
    let a = Shim::new(&d.dir);
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(
        ask_at(&d.dir, &Request::Ping).is_some(),
        "not while somebody is connected"
    );
    drop(a);
    // This process lives on, but nothing of it uses the daemon. A client ends with its process, so
    // the daemon must not wait for that.
    assert!(d.wait().success());
}

#[test]
fn a_shim_that_does_not_read_is_no_burden() {
    let d = Daemon::start(&["--no-bpf"]);
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    let i = a.enter(&c, true);
    // Every registration is answered by two messages; nothing is read.
    for _ in 0..16 {
        a.register_at(i, &c, 5, 5);
    }
    for _ in 0..20_000 {
        a.say(ToDaemon::Forget { conn: 9, gen: 9 }, &[]);
    }
    let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut v, &mut w);
}

/// A journal or a file would keep the escape sequences.
#[test]
fn a_log_that_is_no_terminal_has_no_colours() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    let log = std::fs::File::create(&path).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_underpassd"))
        .args(["--no-bpf", "--idle-exit", "0", "--dir"])
        .arg(tmp.path().join("run"))
        .env_remove("NO_COLOR")
        .env("TERM", "xterm-256color")
        .stderr(log)
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("serves") && !text.contains('\u{1b}'),
        "{text:?}"
    );
}
