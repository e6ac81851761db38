//! `underpass check --measure` and `--serve` against each other, against services that are something else, and against
//! bytes that nobody should send. The library is a stand-in without hooks, so no connection gets a lane, whatever the
//! daemon says.

mod support;

use nix::sys::socket::{bind, connect, socket, AddressFamily, SockFlag, SockType, SockaddrIn};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};
use support::{harmless_library, text, FakeDaemon};
use underpass_admin::{Request, Response, Row};

const LENGTH: usize = 16;
const LIMIT: Duration = Duration::from_secs(30);

/// A daemon that says of every connection that it is on a lane, up to a number of questions.
fn says_lane(questions: usize) -> FakeDaemon {
    let row = |up: bool| {
        Some(Row {
            state: "ACTIVE".into(),
            mode: if up { "SMCD" } else { "TCP" }.into(),
            reason: if up { 0 } else { 0x0301_0000 },
            up: "both".into(),
            ..Row::default()
        })
    };
    let asked = std::cell::Cell::new(0);
    FakeDaemon::new(move |r| match r {
        Request::Check { .. } => {
            asked.set(asked.get() + 1);
            let up = asked.get() <= questions;
            Response::Check {
                local: row(up),
                peer: row(up),
                verdict: String::new(),
                across: None,
            }
        }
        r => Response::Error {
            message: format!("unexpected {r:?}"),
        },
    })
}

struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(d: &FakeDaemon, more: &[&str]) -> Server {
    let mut child = d
        .tool(&[&["check", "--serve", "127.0.0.1:0"], more].concat())
        .env("UNDERPASS_LIB", harmless_library())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = child.stdout.take().unwrap();
    let mut server = Server { child, port: 0 };
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let port = line.strip_prefix("listening on 127.0.0.1:").unwrap();
    server.port = port.trim().parse().unwrap();
    server
}

fn measure(d: &FakeDaemon, port: u16, more: &[&str]) -> Output {
    let port = port.to_string();
    let line = [
        "check",
        "--measure",
        "127.0.0.1",
        &port,
        "--rounds",
        "1",
        "-t",
        "0.05",
    ];
    d.tool(&[&line, more].concat())
        .env("UNDERPASS_LIB", harmless_library())
        .output()
        .unwrap()
}

/// A greeting as a client of this version sends it.
fn hello(path: u8) -> [u8; LENGTH] {
    let mut m = [0; LENGTH];
    m[..8].copy_from_slice(b"UPmeter\0");
    (m[8], m[9]) = (1, path);
    m
}

/// What the other side says until it closes, which it has to do in time.
fn until_closed(mut s: &TcpStream) -> Vec<u8> {
    s.set_read_timeout(Some(LIMIT)).unwrap();
    let mut got = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match s.read(&mut buffer) {
            Ok(0) => return got,
            Ok(n) => got.extend(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return got,
            Err(e) => panic!("it is still open: {e}"),
        }
    }
}

#[test]
fn without_a_lane_there_are_only_figures_of_tcp() {
    let d = says_lane(0);
    let mut server = serve(&d, &["--once"]);
    let out = measure(&d, server.port, &["-j", "--wait", "1"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    let v: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["reached"], false);
    assert!(v["lane"]["figures"].is_null() && v["ratio"].is_null() && v["why_not"].is_null());
    assert_eq!(v["check"]["there"]["reason"]["name"], "peer-no-shim");
    let tcp = &v["tcp"]["figures"];
    assert!(tcp["round_trip_us"]["median"].as_f64() > Some(0.0), "{v:#}");
    assert!(tcp["from_server"]["gbit_s"].as_f64() > Some(0.0), "{v:#}");
    let end = Instant::now() + LIMIT;
    while server.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "it was to serve once");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

/// The kernel is believed, not the daemon.
#[test]
fn what_tcp_has_carried_is_no_figure_of_a_lane() {
    let d = says_lane(usize::MAX);
    let server = serve(&d, &[]);
    let out = measure(&d, server.port, &["-j"]);
    let v: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), &v["reached"]), (Some(1), &false.into()));
    assert!(
        v["lane"]["figures"].is_null() && v["ratio"].is_null(),
        "{v:#}"
    );
    let why = v["why_not"].as_str().unwrap();
    assert!(why.contains("went by TCP although"), "{why}");
    let out = measure(&d, server.port, &[]);
    let said = text(&out.stdout);
    assert!(
        said.contains("lane       none\n") && said.contains("went by TCP"),
        "{said}"
    );
}

#[test]
fn a_service_that_is_something_else() {
    let answers: [&'static [u8]; 4] = [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"",
        b"220 short\r\n",
        b"UPmeter\0\x01\x01\0\0\0\0\0\0",
    ];
    for answer in answers {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = l.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for mut s in l.incoming().flatten() {
                let _ = s.read(&mut [0; 64]);
                let _ = s.write_all(answer);
            }
        });
        let out = measure(&says_lane(0), port, &[]);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        let expected = format!("no `underpass check --serve` answers at 127.0.0.1 port {port}");
        assert!(said.contains(&expected), "{answer:?}: {said}");
        assert!(out.stdout.is_empty());
    }
}

#[test]
fn a_server_of_another_version() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut s, _) = l.accept().unwrap();
        let mut m = hello(16);
        m[8] = 9;
        s.read_exact(&mut [0; LENGTH]).unwrap();
        s.write_all(&m).unwrap();
        let _ = s.read(&mut [0; 1]);
    });
    let out = measure(&says_lane(0), port, &[]);
    let said = text(&out.stderr);
    assert!(said.contains("of another version"), "{said}");
    assert_eq!(out.status.code(), Some(2));
}

/// It ends such connections without a word, and serves the next.
#[test]
fn bytes_that_no_client_sends() {
    let d = says_lane(0);
    let server = serve(&d, &[]);
    let open = || TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let mut bad = vec![
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
        vec![0; 1 << 16],
        vec![0xff; 1 << 16],
        hello(0).to_vec(),
        hello(3).to_vec(),
    ];
    for at in [0, 8, 10, 15] {
        let mut m = hello(1);
        m[at] ^= 0x80;
        bad.push(m.to_vec());
    }
    for bytes in bad {
        let mut s = open();
        let _ = s.write_all(&bytes);
        assert_eq!(until_closed(&s), b"", "{:?}", &bytes[..16]);
    }
    // A greeting that never ends: it is not waited for.
    let mut s = open();
    s.write_all(&hello(1)[..15]).unwrap();
    assert_eq!(until_closed(&s), b"");
    // After a greeting: requests out of bounds, and noise.
    let request = |kind: u8, block: u32, ms: u32| {
        let mut m = [0u8; LENGTH];
        m[0] = kind;
        m[4..8].copy_from_slice(&block.to_le_bytes());
        m[8..12].copy_from_slice(&ms.to_le_bytes());
        m
    };
    for m in [
        request(0, 0, 1),
        request(1, 0, u32::MAX),
        request(2, 1, 1),
        request(3, u32::MAX, 1),
        [0xa5; LENGTH],
    ] {
        let mut s = open();
        s.write_all(&hello(1)).unwrap();
        s.read_exact(&mut [0; LENGTH]).unwrap();
        s.write_all(&m).unwrap();
        assert_eq!(until_closed(&s), b"", "{m:?}");
    }
    let out = measure(&d, server.port, &["--wait", "1"]);
    assert!(
        text(&out.stdout).contains("round trip"),
        "{}",
        text(&out.stderr)
    );
}

/// A client from this address, and what it is answered. `greets`: it says what it wants, as it should.
fn client(from: [u8; 4], port: u16, greets: bool) -> (TcpStream, [u8; LENGTH]) {
    let flags = (SockType::Stream, SockFlag::SOCK_CLOEXEC);
    let s = socket(AddressFamily::Inet, flags.0, flags.1, None).unwrap();
    let of = |ip: [u8; 4], port| SockaddrIn::from(SocketAddrV4::new(ip.into(), port));
    bind(s.as_raw_fd(), &of(from, 0)).unwrap();
    connect(s.as_raw_fd(), &of([127, 0, 0, 1], port)).unwrap();
    let mut s = TcpStream::from(s);
    s.set_read_timeout(Some(LIMIT)).unwrap();
    if greets {
        s.write_all(&hello(1)).unwrap();
    }
    let mut answer = [0; LENGTH];
    s.read_exact(&mut answer).unwrap();
    (s, answer)
}

/// Of one address, and of all.
#[test]
fn it_takes_so_many_clients_and_no_more() {
    let d = says_lane(0);
    let server = serve(&d, &[]);
    let eight = |from| -> Vec<TcpStream> {
        let all = (0..8).map(|n| (n, client(from, server.port, true)));
        let ready = |(n, (s, answer))| {
            assert_eq!(answer, hello(16), "client {n} of {from:?}");
            s
        };
        all.map(ready).collect()
    };
    let here = eight([127, 0, 0, 1]);
    // Whoever knocks again and again has no place meanwhile.
    let knocks: Vec<_> = (0..20)
        .map(|_| client([127, 0, 0, 1], server.port, false))
        .collect();
    assert!(
        knocks.iter().all(|(_, answer)| *answer == hello(17)),
        "they are too many"
    );
    let out = measure(&d, server.port, &[]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2));
    assert!(said.contains("as many of this address"), "{said}");
    let there = eight([127, 0, 0, 2]);
    drop(knocks);
    for from in [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 3]] {
        let (one_more, answer) = client(from, server.port, true);
        assert_eq!(answer, hello(17), "it is busy");
        assert_eq!(until_closed(&one_more), b"");
    }
    drop(here);
    let end = Instant::now() + LIMIT;
    while measure(&d, server.port, &["--wait", "1"]).status.code() != Some(1) {
        assert!(Instant::now() < end, "nobody is there any more");
    }
    // The other ones' places are theirs as before.
    assert_eq!(client([127, 0, 0, 2], server.port, true).1, hello(17));
    drop(there);
}

/// Only where it was told to.
#[test]
fn it_listens_at_one_address() {
    let d = says_lane(0);
    let server = serve(&d, &[]);
    assert!(TcpStream::connect(("127.0.0.2", server.port)).is_err());
    let taken = d
        .tool(&["check", "--serve", &format!("127.0.0.1:{}", server.port)])
        .env("UNDERPASS_LIB", harmless_library())
        .output()
        .unwrap();
    assert_eq!(taken.status.code(), Some(2));
    assert!(text(&taken.stderr).contains("cannot listen on port"));
}

/// The server goes away in the middle: the client says so.
#[test]
fn a_server_that_goes_away() {
    let d = says_lane(0);
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut all = Vec::new();
        for mut s in l.incoming().flatten() {
            s.read_exact(&mut [0; LENGTH]).unwrap();
            s.write_all(&hello(16)).unwrap();
            all.push(s);
            if all.len() == 2 {
                all.clear();
            }
        }
    });
    let out = measure(&d, port, &[]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("the measurement broke off"), "{said}");
}
