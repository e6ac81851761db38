//! What monitoring is shown: a real daemon, asked over HTTP; its answers read by Prometheus' own parser.

mod common;
use common::*;
use lane::proto::reason::Reason;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A daemon that shows metrics, and where.
struct Shown {
    daemon: Daemon,
    at: SocketAddr,
    _config: tempfile::TempDir,
}

impl Shown {
    fn start(more: &str) -> Shown {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        Shown::at(at, more)
    }

    fn at(at: SocketAddr, more: &str) -> Shown {
        let tmp = tempfile::tempdir().unwrap();
        let config = tmp.path().join("config.toml");
        let text = format!("credits = 3\n[metrics]\nlisten = '{at}'\nper_pod = 'pod'\n{more}");
        std::fs::write(&config, text).unwrap();
        let args = ["--no-bpf", "--config", config.to_str().unwrap()];
        let daemon = Daemon::start_in(&tmp.path().join("run"), &args);
        let _config = tmp;
        Shown {
            daemon,
            at,
            _config,
        }
    }

    fn connect(&self) -> TcpStream {
        let s = TcpStream::connect(self.at).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        s
    }

    /// Status, head and body of an answer.
    fn get(&self, path: &str, accept: &str) -> (u16, String, String) {
        let mut s = self.connect();
        write!(
            s,
            "GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n"
        )
        .unwrap();
        let mut all = String::new();
        s.read_to_string(&mut all).unwrap();
        let (head, body) = all.split_once("\r\n\r\n").expect(&all);
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_lowercase(), body.to_owned())
    }

    fn probe(&self, path: &str) -> (u16, String) {
        let (status, _, body) = self.get(path, "*/*");
        (status, body)
    }

    fn metrics(&self) -> String {
        std::thread::sleep(Duration::from_millis(600)); // the same is shown for 500 ms
        let (status, head, body) = self.get("/metrics", "*/*");
        assert_eq!(status, 200, "{body}");
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        body
    }

    /// Waits until a series has a value that fits.
    fn until(&self, series: &str, fits: impl Fn(f64) -> bool) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let all = self.metrics();
            if value(&all, series).is_some_and(&fits) {
                return all;
            }
            assert!(Instant::now() < end, "{series} in {all}");
        }
    }
}

fn value(all: &str, series: &str) -> Option<f64> {
    let of = |l: &str| l.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    all.lines().find_map(of)
}

/// Debian's promtool, which `tools/install-deps.sh` has unpacked.
fn promtool() -> Command {
    let daemon = Path::new(env!("CARGO_BIN_EXE_underpassd"));
    let target = daemon.ancestors().nth(2).unwrap();
    let tool = target.join("prometheus/usr/bin/promtool");
    assert!(tool.exists(), "run `make deps`: no {}", tool.display());
    Command::new(tool)
}

fn check(all: &str) {
    let mut tool = promtool()
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = tool.stdin.take().unwrap();
    to.write_all(all.as_bytes()).unwrap();
    drop(to);
    let out = tool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success() && said.trim().is_empty(),
        "{said}\n{all}"
    );
}

#[test]
fn counters_outlive_what_they_count() {
    let d = Shown::start("");
    check(&d.metrics());
    let (mut a, mut b) = (Shim::new(&d.daemon.dir), Shim::new(&d.daemon.dir));
    pair(&mut a, &mut b);
    a.stats().lane_tx.store(100, Relaxed);
    a.stats().promoted.store(2, Relaxed);
    b.stats().count_reset(false);
    b.table().count_down(lane::family::Cause::Full);
    let (c, _s) = tcp();
    let conn = a.enter(&c, true);
    a.conn(conn).reason.store(Reason::Operator.code(), Relaxed);
    let declined = a.enter(&c, true);
    a.register_at(declined, &c, 1 << 20, 0);
    a.declined(declined);
    let operator = "underpass_connections{mode=\"TCP\",reason=\"operator\"}";
    let all = d.until(operator, |n| n == 1.0);
    check(&all);
    for (series, expected) in [
        ("underpass_lane_bytes_total{direction=\"sent\"}", 100.0),
        ("underpass_promotions_total", 2.0),
        ("underpass_resets_total", 1.0),
        ("underpass_switches_total{to=\"tcp\"}", 1.0),
        ("underpass_switches_to_tcp_total{cause=\"ring-full\"}", 1.0),
        ("underpass_switches_to_tcp_total{cause=\"peer\"}", 0.0),
        ("underpass_processes", 2.0),
        ("underpass_registrations_total", 3.0),
        ("underpass_pairings_total{where=\"node\"}", 1.0),
        ("underpass_promotion_seconds_count", 2.0),
        ("underpass_promotion_seconds_bucket{le=\"+Inf\"}", 2.0),
        (
            "underpass_pod_promotions_total{namespace=\"\",pod=\"\"}",
            2.0,
        ),
        (
            "underpass_pod_connections{namespace=\"\",pod=\"\",mode=\"TCP\"}",
            3.0,
        ),
        ("underpass_pods_shown", 1.0),
    ] {
        let found = value(&all, series);
        assert!(
            found == Some(expected),
            "{series}: {found:?} instead of {expected}\n{all}"
        );
    }
    assert!(all.contains("underpass_declines_total{reason="), "{all}");
    // A shim that says less than before, and the end of both.
    a.stats().lane_tx.store(40, Relaxed);
    let sent = "underpass_lane_bytes_total{direction=\"sent\"}";
    assert_eq!(value(&d.metrics(), sent), Some(100.0));
    drop((a, b));
    let all = d.until("underpass_processes", |n| n == 0.0);
    for series in [
        sent,
        "underpass_pod_lane_bytes_total{namespace=\"\",pod=\"\",direction=\"sent\"}",
    ] {
        assert_eq!(value(&all, series), Some(100.0), "{series} in {all}");
    }
    assert_eq!(value(&all, "underpass_resets_total"), Some(1.0));
}

/// What one program writes into its table does not hide what another one does.
#[test]
fn a_program_that_lies_about_itself() {
    let d = Shown::start("");
    let (liar, honest) = (Shim::new(&d.daemon.dir), Shim::new(&d.daemon.dir));
    let resets = "underpass_resets_total";
    assert_eq!(value(&d.metrics(), resets), Some(0.0));
    let promoted = "underpass_promotions_total";
    for (n, lie) in (1..).zip([u64::MAX, 1 << 60, 0, u64::MAX / 2]) {
        liar.stats().promoted.store(lie, Relaxed);
        liar.stats().lane_tx.store(lie, Relaxed);
        honest.stats().count_reset(false);
        honest.stats().promoted.fetch_add(1, Relaxed);
        let all = d.metrics();
        let shown = [resets, promoted].map(|s| value(&all, s));
        assert_eq!(shown, [Some(f64::from(n)); 2]);
    }
    let all = d.metrics();
    for impossible in [
        "underpass_implausible_reports_total",
        "underpass_pod_implausible_reports_total{namespace=\"\",pod=\"\"}",
    ] {
        assert!(
            value(&all, impossible) >= Some(3.0),
            "{impossible} in {all}"
        );
    }
    check(&all);
}

/// Most limits refuse without declining an end; and most faults are seen before there is an end.
#[test]
fn what_is_refused() {
    let d = Shown::start("[limits]\nprocesses = 2\nlanes = 3\n");
    let (mut a, mut b) = (Shim::new(&d.daemon.dir), Shim::new(&d.daemon.dir));
    let limits = |l: &str| format!("underpass_limit_refusals_total{{limit=\"{l}\"}}");
    let programs = |r: &str| format!("underpass_refused_programs_total{{reason=\"{r}\"}}");
    let shown = [limits("processes"), limits("lanes"), programs("limit")];
    let rest = [programs("sync"), programs("bad-peer")];
    let all = d.metrics();
    for series in shown.iter().chain(&rest) {
        assert_eq!(value(&all, series), Some(0.0), "{series} in {all}");
    }
    // A process and a lane too many.
    let c = Shim::silent(&d.daemon.dir);
    say(&c.sock, &hello(), &[&c.table_fd]);
    hear(&c.sock).expect("a refusal");
    pair(&mut a, &mut b);
    let (x, y) = tcp();
    let (i, j) = (a.enter(&x, true), b.enter(&y, false));
    a.register(i, &x);
    a.credit();
    b.register(j, &y);
    a.declined(i);
    let all = d.metrics();
    for series in &shown {
        assert_eq!(value(&all, series), Some(1.0), "{series} in {all}");
    }
    // A hello without a table, and a second hello.
    let c = Shim::silent(&d.daemon.dir);
    say(&c.sock, &hello(), &[]);
    hear(&c.sock).expect("a refusal");
    say(&a.sock, &hello(), &[&a.table_fd]);
    for series in &rest {
        d.until(series, |n| n == 1.0);
    }
}

#[test]
fn both_forms_and_nothing_else() {
    let d = Shown::start("");
    let wants = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
    let (status, head, body) = d.get("/metrics", wants);
    assert_eq!(status, 200);
    assert!(
        head.contains("application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    assert!(body.ends_with("# EOF\n") && body.contains("# TYPE underpass_promotions counter\n"));
    for path in ["/", "/metrics/", "/../etc/passwd"] {
        assert_eq!(d.probe(path).0, 404, "{path}");
    }
    let mut s = d.connect();
    s.write_all(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        .unwrap();
    let mut all = String::new();
    s.read_to_string(&mut all).unwrap();
    assert!(all.starts_with("HTTP/1.1 405"), "{all}");
    // A head without end.
    let mut s = d.connect();
    let _ = s.write_all(&vec![b'x'; 1 << 20]);
    let _ = s.read_to_end(&mut Vec::new());
    assert_eq!(d.probe("/healthz"), (200, "ok\n".into()));
}

/// Those who come and say nothing keep nobody out.
#[test]
fn silent_scrapers_make_way() {
    let d = Shown::start("");
    let mut silent: Vec<_> = (0..200).map(|_| d.connect()).collect();
    let began = Instant::now();
    assert_eq!(d.probe("/healthz").0, 200);
    assert_eq!(d.get("/metrics", "*/*").0, 200);
    assert!(began.elapsed() < Duration::from_secs(5));
    let fds = value(&d.metrics(), "process_open_fds").unwrap();
    assert!(fds < 100.0, "{fds} descriptors");
    let mut first = silent.remove(0);
    assert!(matches!(first.read(&mut [0]), Ok(0) | Err(_)), "it was cut");
}

#[test]
fn readiness_tells_what_is_missing() {
    let d = Shown::start("");
    assert_eq!(d.probe("/readyz"), (200, "ok\n".into()));
    let control = d.daemon.dir.join("control.sock");
    std::fs::rename(&control, control.with_extension("away")).unwrap();
    std::fs::write(&control, "").unwrap();
    let (status, why) = d.probe("/readyz");
    assert!(status == 503 && why.contains("control socket"), "{why}");
    assert_eq!(d.probe("/healthz").0, 200);
    let t = tempfile::tempdir().unwrap();
    let t = t.path().display();
    let d = Shown::start(&format!("[pods]\nnri = '{t}/nri.sock'\ndir = '{t}/pods'\n"));
    let (status, why) = d.probe("/readyz");
    assert!(status == 503 && why.contains("container runtime"), "{why}");
    let all = d.metrics();
    assert_eq!(value(&all, "underpass_runtime_registered"), Some(0.0));
    assert_eq!(
        value(&all, "underpass_injections_total{result=\"refused\"}"),
        Some(0.0)
    );
    assert_eq!(
        value(&all, "underpass_injection_seconds_count"),
        Some(0.0),
        "nobody has asked"
    );
    check(&all);
}

/// The daemon does not wait for the address; it is shown there as soon as that is possible.
#[test]
fn an_address_that_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let d = Shown::at(taken.local_addr().unwrap(), "");
    assert_eq!(d.daemon.stats().clients, 0, "it serves");
    drop(taken);
    let end = Instant::now() + PATIENCE;
    while TcpStream::connect(d.at).is_err() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(d.probe("/healthz").0, 200);
}

/// The core's thread alone is stopped, as a debugger does it.
#[test]
fn a_core_that_hangs_is_not_healthy() {
    let d = Shown::start("");
    let core = d.daemon.pid() as i32;
    let null = std::ptr::null_mut::<libc::c_void>();
    let trace = |request| {
        // SAFETY: these requests use no address.
        let r = unsafe { libc::ptrace(request, core, null, null) };
        assert_eq!(r, 0, "{}", std::io::Error::last_os_error());
    };
    assert_eq!(d.probe("/healthz").0, 200);
    trace(libc::PTRACE_SEIZE);
    trace(libc::PTRACE_INTERRUPT);
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(core, std::ptr::null_mut(), libc::__WALL) };
    let began = Instant::now();
    let (status, why) = d.probe("/healthz");
    assert!(status == 503 && why.contains("core"), "{status} {why}");
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&began.elapsed()));
    assert_eq!(d.probe("/readyz").0, 503);
    trace(libc::PTRACE_DETACH);
    let end = Instant::now() + PATIENCE;
    while d.probe("/healthz").0 != 200 {
        assert!(Instant::now() < end);
    }
}
