//! Many tenants at one daemon: a process of another user, in another cgroup, does what it likes, and others are served.

mod common;
use common::*;
use std::ffi::CString;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};
use underpass_admin::{Request, Response};

/// Where a control socket is, for processes that may make system calls only.
#[derive(Clone, Copy)]
struct At(libc::sockaddr_un);

impl At {
    fn of(dir: &Path) -> At {
        let path = dir.join("control.sock");
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: all-zero is a valid address.
        let mut a: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        a.sun_family = libc::AF_UNIX as u16;
        for (to, from) in a.sun_path.iter_mut().zip(path.as_bytes()) {
            *to = *from as _;
        }
        At(a)
    }

    /// Connects, and makes only system calls; -1: that did not work.
    fn connect(&self) -> i32 {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        let len = std::mem::size_of_val(&self.0) as u32;
        // SAFETY: the address lives, with its length.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, kind, 0);
            if fd >= 0 && libc::connect(fd, (&raw const self.0).cast(), len) != 0 {
                libc::close(fd);
                return -1;
            }
            fd
        }
    }
}

/// Another tenant is served: programs get lanes, and tools answers.
fn served(d: &Daemon, pairs: usize) {
    for _ in 0..pairs {
        let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
        pair(&mut v, &mut w);
        assert!(matches!(d.ask(&Request::Ping), Response::Pong { .. }));
        assert!(!d.rows().is_empty());
    }
}

fn skip() {
    eprintln!(
        "\n*** SKIP: no process of another user in a cgroup of its own can be made here ***\n"
    );
}

/// A public daemon, with this configuration, that shows its counters.
struct Shown {
    daemon: Daemon,
    at: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Shown {
    fn start(more: &str) -> Shown {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let text = format!("[metrics]\nlisten = '{at}'\n[proof]\nbpf = false\n{more}");
        std::fs::write(&config, text).unwrap();
        let daemon = Daemon::public(dir.path(), &["--config", config.to_str().unwrap()]);
        Shown {
            daemon,
            at,
            _dir: dir,
        }
    }

    /// What a counter has come to; 0: it is not shown.
    fn counter(&self, series: &str) -> u64 {
        std::thread::sleep(Duration::from_millis(600)); // the same is shown for 500 ms
        let mut s = TcpStream::connect(self.at).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        s.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n")
            .unwrap();
        let mut all = String::new();
        s.read_to_string(&mut all).unwrap();
        let of = |l: &str| {
            l.strip_prefix(series)?
                .strip_prefix(' ')?
                .trim()
                .parse()
                .ok()
        };
        all.lines().find_map(of).unwrap_or(0)
    }

    fn refusals(&self, limit: &str) -> u64 {
        self.counter(&format!(
            "underpass_limit_refusals_total{{limit=\"{limit}\"}}"
        ))
    }
}

/// They do nothing but connect and close, on all processors.
#[test]
fn who_connects_in_a_loop_stops_nobody() {
    let tmp = tempfile::tempdir().unwrap();
    let d = Daemon::public(tmp.path(), &["--no-bpf"]);
    let at = At::of(&d.dir);
    let loops = || {
        Stranger::start(move || {
            let fd = at.connect();
            if fd >= 0 {
                // SAFETY: just made.
                unsafe { libc::close(fd) };
            }
        })
    };
    let all: Vec<Stranger> = (0..4).filter_map(|_| loops()).collect();
    if all.len() < 4 {
        return skip();
    }
    served(&d, 5);
    assert!(all.iter().all(Stranger::lives));
}

/// Connections that say nothing, of one tenant: more than there is room for.
#[test]
fn silence_keeps_nobody_out() {
    let shown = Shown::start("");
    let d = &shown.daemon;
    let at = At::of(&d.dir);
    // Each keeps a thousand, and makes new ones in place of those that were cut.
    let many = || {
        let (mut all, mut n) = ([-1; 1000], 0);
        Stranger::start(move || {
            let i = n % all.len();
            // SAFETY: one of ours, or none.
            unsafe { libc::close(all[i]) };
            all[i] = at.connect();
            n += 1;
        })
    };
    let all: Vec<Stranger> = (0..6).filter_map(|_| many()).collect();
    if all.len() < 6 {
        return skip();
    }
    let end = Instant::now() + PATIENCE;
    while shown.refusals("hellos") == 0 {
        assert!(Instant::now() < end, "the daemon is not full");
    }
    let silent = Shim::silent(&d.dir);
    served(d, 5);
    // Not even one that says nothing for a while is cut: this tenant has fewest.
    let mut slow = silent;
    slow.greet();
    assert!(all.iter().all(Stranger::lives));
}
