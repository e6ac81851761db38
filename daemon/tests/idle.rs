//! A daemon that leaves when it is idle, and who keeps it.

mod common;
use common::*;
use rustix::fs::FlockOperation;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use underpass_admin::{Request, Response};

/// Longer than the daemons here stay idle.
const IDLE: Duration = Duration::from_millis(2500);

fn leaving() -> Daemon {
    Daemon::start(&["--no-bpf", "--idle-exit", "1"])
}

fn answers(d: &Daemon) -> bool {
    ask_at(&d.dir, &Request::Ping).is_some()
}

/// A process that asks the daemon to stay, becomes another program, and has no connection.
fn keeper(d: &Daemon) -> Child {
    let script = "import os,socket,sys\n\
        s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(b'{\"op\":\"keep\"}\\n')\n\
        print(s.makefile().readline(), end='', flush=True)\n\
        os.execvp('sleep', ['sleep', '100'])\n";
    let mut child = Command::new("python3")
        .args(["-c", script])
        .arg(d.dir.join("admin.sock"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let r: Response = serde_json::from_str(&line).unwrap();
    assert!(matches!(r, Response::Pong { .. }), "{r:?}");
    child
}

fn end(mut c: Child) {
    c.kill().unwrap();
    c.wait().unwrap();
}

#[test]
fn it_stays_for_a_process_that_asked_it_to() {
    let mut d = leaving();
    let (a, b) = (keeper(&d), keeper(&d));
    std::thread::sleep(IDLE);
    assert!(answers(&d), "two keep it");
    end(a);
    std::thread::sleep(IDLE);
    assert!(answers(&d), "one keeps it");
    end(b);
    assert!(d.wait().success());
}

/// A child of such a process that has ended: only its environment tells.
#[test]
fn it_stays_for_programs_under_the_shim_that_have_not_spoken_yet() {
    let mut d = leaving();
    let program = |dir: &std::path::Path, lib: &str| {
        Command::new("sleep")
            .arg("100")
            .env("LD_PRELOAD", lib)
            .env("UNDERPASS_DIR", dir)
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    // The loader complains about a library that is not there, and goes on.
    let ours = program(&d.dir, "/nonexistent/libunderpass.so");
    let others = [
        program(&d.dir.join("other"), "/nonexistent/libunderpass.so"),
        program(&d.dir, "/nonexistent/libother.so"),
    ];
    std::thread::sleep(IDLE);
    assert!(answers(&d));
    end(ours);
    assert!(d.wait().success(), "nobody else keeps it");
    others.into_iter().for_each(end);
}

/// Whoever finds the daemon leaving starts another one, which waits for the first to be gone.
#[test]
fn a_successor_waits_for_the_one_that_leaves() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    drop(Daemon::start_in(&dir, &["--no-bpf"]));
    for s in ["control.sock", "admin.sock"] {
        std::fs::remove_file(dir.join(s)).unwrap();
    }
    // As a daemon does that has removed its sockets, and not ended yet.
    let lock = std::fs::File::open(dir.join("lock")).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    let mut next = Daemon::spawn(&dir, &["--no-bpf"]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(next.try_wait().unwrap().is_none(), "it waits");
    assert!(!dir.join("admin.sock").exists(), "and does not serve");
    drop(lock);
    let end = std::time::Instant::now() + PATIENCE;
    while ask_at(&dir, &Request::Ping).is_none() {
        assert!(std::time::Instant::now() < end, "it does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
    next.kill().unwrap();
    next.wait().unwrap();
}

/// Nothing that a step has half done, when it panicked, keeps the daemon for good.
#[test]
fn a_panic_keeps_no_daemon() {
    const SAYS: &[u8] = b"test-panic\n";
    for tool in [false, true] {
        let mut d = leaving();
        let hostile = Shim::new(&d.dir);
        if tool {
            let mut asks = UnixStream::connect(d.dir.join("admin.sock")).unwrap();
            asks.write_all(SAYS).unwrap();
            let _ = asks.read(&mut [0]); // its end, or an error
        } else {
            say_bytes(&hostile.sock, SAYS, &[]);
            while hear(&hostile.sock).is_some() {}
        }
        assert!(answers(&d));
        drop(hostile);
        assert!(d.wait().success());
    }
}
