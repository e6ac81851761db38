//! Many tenants at one daemon: a process of another user, in another cgroup, does what it likes, and others are served.

mod common;
use common::*;
use lane::abi::CONTROL_BYTES;
use lane::proto::msg::{ToDaemon, ToShim};
use lane::proto::reason::Reason;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use underpass_admin::{Request, Response};
use underpassd::nodes::peers::msg::Msg;

/// Another tenant is served: programs get lanes, and tools answers.
fn served(d: &Daemon, pairs: usize) {
    for _ in 0..pairs {
        let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
        pair(&mut v, &mut w);
        assert!(matches!(d.ask(&Request::Ping), Response::Pong { .. }));
        assert!(!d.rows().is_empty());
    }
}

const NO_TENANT: &str = "no process of another user in a cgroup of its own can be made here";

/// A public daemon, with this configuration, that shows its counters.
struct Shown {
    daemon: Daemon,
    at: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Shown {
    fn start(more: &str) -> Shown {
        Shown::with_files(more, None)
    }

    /// `files`: so many descriptors it may have.
    fn with_files(more: &str, files: Option<u64>) -> Shown {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let text =
            format!("credits = 64\n[metrics]\nlisten = '{at}'\n[proof]\nbpf = false\n{more}");
        std::fs::write(&config, text).unwrap();
        let args = ["--config", config.to_str().unwrap()];
        let daemon = Daemon::public(dir.path(), &args, files);
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

    /// Programs that were cut because they broke the rules.
    fn hostile(&self) -> u64 {
        self.counter("underpass_refused_programs_total{reason=\"bad-peer\"}")
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
    let d = Daemon::public(tmp.path(), &["--no-bpf"], None);
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
        return skip(NO_TENANT);
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
        return skip(NO_TENANT);
    }
    let end = Instant::now() + PATIENCE;
    while shown.refusals("hellos") == 0 {
        assert!(Instant::now() < end, "the daemon is not full");
    }
    // Not even one that says nothing for a while has to go, while others have to: this tenant has fewest.
    let before = shown.refusals("hellos");
    let mut slow = Shim::silent(&d.dir);
    let end = Instant::now() + PATIENCE;
    while shown.refusals("hellos") == before {
        assert!(Instant::now() < end, "nobody makes way");
    }
    slow.greet();
    served(d, 5);
    assert!(all.iter().all(Stranger::lives));
}

/// There is no room for what a shim sends: that is not its fault, and it may try again.
#[test]
fn a_lost_descriptor_is_nobodys_fault() {
    let shown = Shown::start("");
    let d = &shown.daemon;
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    d.while_full(|| {
        a.register(i, &c);
        let (local, _, retry_ms) = a.declined(i);
        assert_eq!(local, Reason::Limit.code());
        assert!(retry_ms > 0);
    });
    a.register(i, &c);
    b.register(j, &s);
    offers(&mut a, &mut b);
    assert_eq!((shown.refusals("descriptors"), shown.hostile()), (1, 0));
}

/// Connections whose last close waits (SO_LINGER, and a peer that does not read).
fn lingering(l: &TcpListener) -> (TcpStream, TcpStream) {
    let mut c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let s = accept(l);
    rustix::net::sockopt::set_socket_send_buffer_size(&c, 1).unwrap();
    rustix::net::sockopt::set_socket_linger(&c, Some(Duration::from_secs(600))).unwrap();
    c.set_nonblocking(true).unwrap();
    while c.write(&[0; 4096]).is_ok() {}
    (c, s)
}

/// Two tenants send more descriptors than the daemon may have, none of which is closed soon.
#[test]
fn who_fills_the_daemon_stops_nobody() {
    const FILES: u64 = 1024;
    let shown = Shown::with_files("", Some(FILES));
    let d = &shown.daemon;
    let all: Vec<Dialer> = (0..2).filter_map(|_| Dialer::start(&d.dir)).collect();
    if all.len() < 2 {
        return skip(NO_TENANT);
    }
    let shims = |t: &Dialer| (0..8).map(|_| t.shim()).collect::<Vec<_>>();
    let shims: Vec<Shim> = all.iter().flat_map(shims).collect();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    raise_limit();
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&l, 1).unwrap();
    // (Stopped meanwhile, so that its copies are the last ones.)
    d.stop();
    let mut peers = Vec::new();
    for s in shims.iter().flat_map(|s| std::iter::repeat_n(s, 25)) {
        let four: Vec<_> = (0..4).map(|_| lingering(&l)).collect();
        let fds: Vec<BorrowedFd<'_>> = four.iter().map(|(c, _)| c.as_fd()).collect();
        // A message that this daemon does not know.
        say_bytes(&s.sock, &[99, 0, 4, 0, 1, 2, 3, 4], &fds);
        peers.extend(four.into_iter().map(|(_, s)| s));
    }
    assert!(peers.len() as u64 > FILES);
    d.resume();
    pair(&mut a, &mut b);
    served(d, 3);
    let used = std::fs::read_dir(format!("/proc/{}/fd", d.pid())).unwrap();
    let used = used.count() as u64;
    assert!(used < FILES - FILES / 8, "{used}");
    assert!(shown.refusals("descriptors") > 0);
    assert_eq!(shown.hostile(), 0);
    assert!(all.iter().all(|t| t.stranger.lives()));
}

/// One tenant sends more than a thousand descriptors whose closes wait for ten minutes. What another one sends is closed while
/// most of these wait for their turns, and its programs and tools are served.
#[test]
fn who_closes_slowly_waits_for_itself() {
    const MANY: usize = 3_000;
    let shown = Shown::start("");
    let d = &shown.daemon;
    let Some(tenant) = Dialer::start(&d.dir) else {
        return skip(NO_TENANT);
    };
    let shims: Vec<Shim> = (0..16).map(|_| tenant.shim()).collect();
    let other = Shim::new(&d.dir);
    raise_limit();
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&l, 1).unwrap();
    let all: Vec<_> = (0..MANY).map(|_| lingering(&l)).collect();
    // (Stopped meanwhile, so that its copies are the last ones.)
    d.stop();
    for ((c, _), s) in all.iter().zip(shims.iter().cycle()) {
        // A message that this daemon does not know.
        say_bytes(&s.sock, &[99, 0, 4, 0, 1, 2, 3, 4], &[c.as_fd()]);
    }
    let peers: Vec<TcpStream> = all.into_iter().map(|(_, s)| s).collect();
    d.resume();
    let held = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", d.pid())).unwrap();
        all.count()
    };
    let end = Instant::now() + PATIENCE;
    while held() < MANY / 2 {
        assert!(Instant::now() < end, "{} were read", held());
    }
    let before = held();
    let (reader, writer) = std::io::pipe().unwrap();
    say_bytes(&other.sock, &[99, 0, 4, 0, 1, 2, 3, 4], &[writer.as_fd()]);
    drop(writer);
    let mut p = [rustix::event::PollFd::new(
        &reader,
        rustix::event::PollFlags::IN,
    )];
    let wait = rustix::event::Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    assert_eq!(
        rustix::event::poll(&mut p, Some(&wait)),
        Ok(1),
        "it is not closed"
    );
    // A second of the one's closes is half of the threads.
    let left = held();
    assert!(left + 512 > before, "{before} before, {left} were left");
    served(d, 3);
    assert!(matches!(
        d.ask(&Request::Down {
            target: underpass_admin::Target::All
        }),
        Response::Told { .. }
    ));
    assert!(tenant.stranger.lives());
    drop(peers);
}

/// A defect that a program's message meets costs that program its connection, and a tool's request that request.
#[test]
fn a_panic_ends_one_connection() {
    const SAYS: &[u8] = b"test-panic";
    let shown = Shown::start("");
    let d = &shown.daemon;
    let panics = |part: &str| shown.counter(&format!("underpass_panics_total{{part=\"{part}\"}}"));
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut a, &mut b);
    let programs = d.stats().clients;
    for n in 1..4 {
        let hostile = Shim::new(&d.dir);
        say_bytes(&hostile.sock, SAYS, &[]);
        while let Some(m) = hear(&hostile.sock) {
            assert!(!matches!(m.0, ToShim::Refused { .. }));
        }
        assert_eq!(panics("program"), n);
    }
    let mut tool = std::os::unix::net::UnixStream::connect(d.dir.join("admin.sock")).unwrap();
    tool.write_all(SAYS).unwrap();
    tool.write_all(b"\n").unwrap();
    let mut answer = Vec::new();
    let read = tool.read_to_end(&mut answer);
    assert!(read.is_err() || answer.is_empty(), "{answer:?}");
    assert_eq!((panics("program"), panics("tool")), (3, 1));
    // The others' connections go on, and what is counted is right.
    pair(&mut a, &mut b);
    served(d, 3);
    let s = d.until("those to be gone", |s| s.clients == programs);
    assert_eq!(s.clients, programs);
}

/// The same for what another node says, before its hello and after it: only that channel ends. Lanes within the node are as they
/// were, and that node may come again.
#[test]
fn a_panic_ends_one_channel() {
    const SAYS: &[u8] = b"test-panic";
    let nodes = Nodes::new();
    let shown = Shown::start(&nodes.config());
    let d = &shown.daemon;
    let panics = || shown.counter("underpass_panics_total{part=\"node\"}");
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut a, &mut b);
    let before = d.stats();
    for n in 1..4 {
        let mut early = nodes.dial();
        early.say_bytes(SAYS);
        assert!(early.hear().is_none(), "it is met with silence");
        assert_eq!(panics(), 2 * n - 1);
        let mut late = nodes.dial();
        late.hello(n);
        assert!(late.until(|m| matches!(m, Msg::Hello { .. })));
        late.say_bytes(SAYS);
        assert!(late.until(|m| matches!(m, Msg::Close { .. })), "it is told");
        assert_eq!(panics(), 2 * n);
    }
    // The others' lanes go on, and what is counted is right.
    let now = d.stats();
    assert_eq!(
        (now.clients, now.lanes, now.links),
        (before.clients, before.lanes, before.links)
    );
    pair(&mut a, &mut b);
    served(d, 3);
    let mut again = nodes.dial();
    again.hello(9);
    assert!(again.until(|m| matches!(m, Msg::Hello { .. })));
}

fn raise_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Ends whose other ends never come.
#[test]
fn ends_that_wait_are_counted() {
    const MOST: u32 = 20;
    let shown = Shown::start(&format!("[limits]\nwaiting = {MOST}\n"));
    let d = &shown.daemon;
    let Some(tenant) = Dialer::start(&d.dir) else {
        return skip(NO_TENANT);
    };
    let (mut one, mut other) = (tenant.shim(), tenant.shim());
    let mut all = Vec::new();
    for _ in 0..MOST + 10 {
        let (c, s) = tcp();
        let i = one.enter(&c, true);
        one.register(i, &c);
        all.push((c, s));
    }
    for _ in 0..10 {
        let (local, retry_ms) = one.until("a refusal", |m| match *m {
            ToShim::Decline {
                local, retry_ms, ..
            } => Some((local, retry_ms)),
            _ => None,
        });
        assert_eq!(local, Reason::Limit.code());
        assert!(retry_ms > 0);
    }
    assert_eq!(shown.refusals("waiting"), 10);
    served(d, 3); // another tenant has its own
                  // Each that does not wait any more gives its place back.
    for conn in 0..MOST + 10 {
        let gen = one.gen(conn);
        one.say(ToDaemon::Forget { conn, gen }, &[]);
    }
    for conn in 0..MOST {
        one.register(conn, &all[conn as usize].0);
    }
    let j = other.enter(&all[0].1, false);
    other.register(j, &all[0].1);
    offers(&mut one, &mut other);
    assert_eq!(shown.refusals("waiting"), 10);
}

/// Whose memory cgroup is nearly full gets no lanes, and no more of those it has; others do.
#[test]
fn a_full_memory_cgroup_gets_no_lanes() {
    let shown = Shown::start("");
    let d = &shown.daemon;
    let Some(tenant) = Dialer::start(&d.dir) else {
        return skip(NO_TENANT);
    };
    let (mut one, mut other) = (tenant.shim(), Shim::new(&d.dir));
    let (lane, _) = pair(&mut one, &mut other);
    // (What the limit leaves for everything but lanes is more than all of this.)
    tenant.stranger.limit(Some(3 << 20));
    std::thread::sleep(Duration::from_millis(200)); // it is read ten times a second
    let ends: Vec<_> = (0..3).map(|_| tcp()).collect();
    for (c, s) in &ends {
        let (i, j) = (one.enter(c, true), other.enter(s, false));
        one.register(i, c);
        other.register(j, s);
        let (own, peer) = (Reason::Memory.code(), Reason::PeerDeclined.code());
        let (local, remote, retry_ms) = one.declined(i);
        assert_eq!((local, remote), (own, peer));
        assert!(retry_ms > 0);
        assert_eq!(other.declined(j).0, peer);
    }
    let (group, side) = (lane.group, lane.side);
    one.say(ToDaemon::WantChunk { group, side }, &[]);
    served(d, 3);
    assert_eq!(shown.refusals("room"), 4);
    tenant.stranger.limit(None);
    std::thread::sleep(Duration::from_millis(200));
    one.say(ToDaemon::WantChunk { group, side }, &[]);
    one.until("a chunk", |m| {
        matches!(m, ToShim::Chunk { .. }).then_some(())
    });
    pair(&mut one, &mut other);
    assert_eq!((shown.refusals("room"), shown.hostile()), (4, 0));
}

/// A tenant whose memory is limited gets little at a time, and more only if there is room when all of it is used; the other
/// end of its lanes gets what it would get anyway.
#[test]
fn a_limited_tenant_gets_little_at_a_time() {
    let shown = Shown::start("");
    let d = &shown.daemon;
    let Some(tenant) = Dialer::start(&d.dir) else {
        return skip("no memory cgroup can be made");
    };
    tenant.stranger.limit(Some(1 << 30));
    let (mut one, mut other) = (tenant.shim(), Shim::new(&d.dir));
    let (lane, peers) = pair(&mut one, &mut other);
    let (group, side) = (lane.group, lane.side);
    let first = |s: &Shim, side| s.sides[&(group, side)].own[&0].1.bytes();
    let small = CONTROL_BYTES + (256 << 10);
    assert_eq!(first(&one, side), small);
    assert!(first(&other, peers.side) >= small);
    // Beside what it uses and what is left for everything else there is room for one chunk, and not for two.
    let (kept, chunk, more) = (4 << 20, 4 << 20, 1 << 20);
    let used = tenant.stranger.used() + small as u64;
    tenant.stranger.limit(Some(kept + used + chunk + more));
    std::thread::sleep(Duration::from_millis(200)); // it is read ten times a second
    one.say(ToDaemon::WantChunk { group, side }, &[]);
    let bytes = one.until("a chunk", |m| match m {
        ToShim::Chunk { bytes, .. } => Some(*bytes),
        _ => None,
    });
    assert_eq!(bytes, chunk);
    one_is_shared(&mut one, &mut other);
    // It has touched nothing of that, however often somebody looks.
    for n in 1..=3 {
        std::thread::sleep(Duration::from_millis(600));
        one.say(ToDaemon::WantChunk { group, side }, &[]);
        served(d, 1);
        assert_eq!(shown.refusals("room"), n);
    }
    tenant.stranger.limit(Some(1 << 30));
    std::thread::sleep(Duration::from_millis(200));
    one.say(ToDaemon::WantChunk { group, side }, &[]);
    one.until("another", |m| {
        matches!(m, ToShim::Chunk { chunk: 3, .. }).then_some(())
    });
    assert_eq!((shown.refusals("room"), shown.hostile()), (3, 0));
}

/// A chunk of the first has been mapped by both.
fn one_is_shared(one: &mut Shim, other: &mut Shim) {
    other.until("it", |m| {
        matches!(m, ToShim::PeerChunk { chunk: 2, .. }).then_some(())
    });
    one.until("it is mapped", |m| {
        matches!(m, ToShim::ChunkReady { .. }).then_some(())
    });
}
