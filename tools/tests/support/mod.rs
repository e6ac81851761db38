//! A stand-in for the daemon's admin socket, and the tool's binary with a clean environment.
#![allow(dead_code)] // each test file uses its part

pub mod pty;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use underpass_admin::{RailRow, Request, Response, Row, ADMIN_SOCK};

pub const TOOL: &str = env!("CARGO_BIN_EXE_underpass");

/// Answers requests in a directory of its own, and remembers them.
pub struct FakeDaemon {
    pub dir: tempfile::TempDir,
    seen: Arc<Mutex<Vec<String>>>,
}

impl FakeDaemon {
    pub fn new(answer: impl Fn(&Request) -> Response + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        serve(dir.path(), Arc::clone(&seen), answer);
        FakeDaemon { dir, seen }
    }

    /// Every request so far.
    pub fn received(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    /// The requests so far, as they came, without those that only ask whether it is there.
    pub fn requests(&self) -> Vec<String> {
        self.seen
            .lock()
            .unwrap()
            .iter()
            .filter(|r| !r.contains("ping") && !r.contains("keep"))
            .cloned()
            .collect()
    }

    /// The tool, made to use this daemon.
    pub fn tool(&self, args: &[&str]) -> Command {
        let mut c = tool(args);
        c.env("UNDERPASS_DIR", self.dir.path());
        c
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.tool(args).output().unwrap()
    }
}

pub fn serve(
    dir: &Path,
    seen: Arc<Mutex<Vec<String>>>,
    answer: impl Fn(&Request) -> Response + Send + 'static,
) {
    let listener = UnixListener::bind(dir.join(ADMIN_SOCK)).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            if BufReader::new(&stream).read_line(&mut line).is_err() || line.is_empty() {
                continue;
            }
            seen.lock().unwrap().push(line.trim().to_owned());
            let response = match serde_json::from_str(&line) {
                Ok(Request::Ping | Request::Keep) => pong(),
                Ok(r) => answer(&r),
                Err(e) => Response::Error {
                    message: e.to_string(),
                },
            };
            let mut text = serde_json::to_string(&response).unwrap();
            text.push('\n');
            let _ = stream.write_all(text.as_bytes());
        }
    });
}

pub fn pong() -> Response {
    Response::Pong {
        version: "0".into(),
        pid: std::process::id(),
        uptime_s: 1,
        proof: false,
    }
}

/// The tool without anything from the environment of the tests.
pub fn tool(args: &[&str]) -> Command {
    let mut c = Command::new(TOOL);
    for v in [
        "UNDERPASS",
        "UNDERPASS_DIR",
        "UNDERPASS_LIB",
        "LD_PRELOAD",
        "XDG_RUNTIME_DIR",
    ] {
        c.env_remove(v);
    }
    c.args(args);
    c
}

pub fn text(b: &[u8]) -> String {
    String::from_utf8(b.to_vec()).unwrap()
}

/// A shared object that can be preloaded anywhere without doing anything: the C library that this
/// test itself runs with.
pub fn harmless_library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .filter_map(|l| l.split_whitespace().nth(5))
        .find(|p| p.contains("libc.so"));
    PathBuf::from(path.expect("the test is linked to libc"))
}

/// Compares with a file beside the tests; `BLESS=1` writes it instead.
pub fn golden(name: &str, got: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, got).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(got, want, "{} (BLESS=1 rewrites it)", path.display());
}

/// What the rows have in common.
fn base() -> Row {
    Row {
        state: "ACTIVE".into(),
        uid: 1000,
        intf: "0000".into(),
        up: "none".into(),
        netns: 0xf000_0000,
        ..Row::default()
    }
}

/// One row of each kind that `ss` knows.
pub fn rows() -> Vec<Row> {
    let mut all = unconnected_rows();
    all.extend(lane_rows());
    all.extend(tcp_rows());
    all.extend(rail_rows());
    all.push(Row {
        state: "CLOSED".into(),
        inode: 4013,
        local: "10.0.0.1:82".into(),
        peer: "10.0.0.2:50001".into(),
        ..base()
    });
    all
}

fn unconnected_rows() -> Vec<Row> {
    vec![
        Row {
            state: "INIT".into(),
            inode: 7,
            pid: 90,
            comm: "curl".into(),
            ..base()
        },
        Row {
            state: "LISTEN".into(),
            inode: 81,
            local: "0.0.0.0:6379".into(),
            pid: 100,
            comm: "redis-server".into(),
            ..base()
        },
    ]
}

/// Both ends of a lane on this node.
fn lane_rows() -> Vec<Row> {
    let lane = Row {
        mode: "SMCD".into(),
        up: "both".into(),
        link: 3,
        lane: 0x11,
        lane_tx_bytes: 5_000_000,
        lane_rx_bytes: 123,
        tcp_tx_bytes: 900,
        tcp_rx_bytes: 42,
        ..base()
    };
    vec![
        Row {
            inode: 4001,
            local: "127.0.0.1:6379".into(),
            peer: "127.0.0.1:40112".into(),
            pid: 100,
            comm: "redis-server".into(),
            role: "server".into(),
            tx_ring_bytes: 1 << 16,
            tx_epoch: 5,
            rx_epoch: 7,
            ..lane.clone()
        },
        Row {
            uid: 0,
            inode: 12345678,
            local: "127.0.0.1:40112".into(),
            peer: "127.0.0.1:6379".into(),
            pid: 200,
            comm: "redis-\u{1b}[2Jcli".into(),
            role: "client".into(),
            tx_ring_bytes: 1 << 18,
            tx_epoch: 7,
            rx_epoch: 5,
            lane_tx_bytes: 130,
            lane_rx_bytes: 4_900_000,
            up: "rx".into(),
            ..lane
        },
    ]
}

fn tcp_rows() -> Vec<Row> {
    vec![
        Row {
            inode: 4010,
            local: "[2001:db8:1111:2222:3333:4444:5555:6666]:443".into(),
            peer: "[fd00::1]:50000".into(),
            mode: "TCP 0x03010000".into(),
            reason: 0x0301_0000,
            pid: 101,
            comm: "nginx".into(),
            role: "server".into(),
            tcp_tx_bytes: 2048,
            ..base()
        },
        Row {
            inode: 4011,
            local: "10.0.0.1:80".into(),
            peer: "10.0.0.2:50000".into(),
            mode: "TCP 0x05000000/0x0a0000ff".into(),
            reason: 0x0500_0000,
            peer_reason: 0x0a00_00ff,
            pid: 101,
            comm: "nginx".into(),
            role: "server".into(),
            ..base()
        },
    ]
}

fn rail_rows() -> Vec<Row> {
    vec![
        Row {
            inode: 4012,
            local: "10.0.0.1:81".into(),
            peer: "192.168.100.200:50000".into(),
            intf: "0002".into(),
            mode: "SMCR".into(),
            link: 0x12,
            lane: 1,
            up: "both".into(),
            remote: true,
            rail: Some(RailRow {
                role: "server".into(), // of the nodes, not of the programs
                device: "mlx5_bond_0".into(),
                port: 1,
                link: 0x1a,
                gid: "fe80:0000:0000:0000:0a94:efff:fe33:4401".into(),
                peer_gid: "0000:0000:0000:0000:0000:ffff:c0a8:64c8".into(),
            }),
            role: "client".into(),
            pid: 300,
            comm: "psql".into(),
            ..base()
        },
        // Of which the daemon cannot say how it is carried.
        Row {
            inode: 4014,
            local: "10.0.0.1:83".into(),
            peer: "192.168.100.200:50002".into(),
            mode: "SMCR".into(),
            link: 0x12,
            lane: 2,
            up: "tx".into(),
            remote: true,
            role: "server".into(),
            pid: 301,
            comm: "postgres".into(),
            ..base()
        },
    ]
}
