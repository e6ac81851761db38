//! The admin socket: what the tool is told, and who is told what.

mod common;
use common::*;
use lane::abi::CONTROL_BYTES;
use lane::family::flag;
use lane::proto::msg::{op, ToShim, ALL};
use lane::proto::reason::Reason;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use underpass_admin::{Request, Response, Target};

/// Marks a lane as the shims would when both directions are up.
fn promoted(s: &Shim, l: Lane) {
    let c = s.conn(l.conn);
    c.group.store(l.group, Relaxed);
    c.lane.store(l.lane, Relaxed);
    c.side.store(u32::from(l.side), Relaxed);
    c.tx.mode.store(lane::half::tx::mode::RING, Relaxed);
    c.rx.mode.store(lane::half::rx::mode::RING, Relaxed);
    c.flags.fetch_or(flag::LANE | flag::PROMOTED, Relaxed);
}

fn command(s: &mut Shim) -> (u32, u32) {
    s.until("a command", |m| match *m {
        ToShim::Command { conn, op, .. } => Some((conn, op)),
        _ => None,
    })
}

#[test]
fn rows_show_mode_and_both_reasons() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    promoted(&a, x);
    promoted(&b, y);
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.conn(i).reason.store(Reason::Young.code(), Relaxed);
    b.conn(j).reason.store(Reason::Operator.code(), Relaxed);
    let young = a.enter(&c, true);
    a.conn(young).flags.store(0, Relaxed); // not named yet
    let rows = d.rows();
    assert_eq!(rows.len(), 4, "{rows:#?}");
    let lanes: Vec<_> = rows.iter().filter(|r| r.mode == "SMCD").collect();
    assert_eq!(lanes.len(), 2);
    assert!(lanes
        .iter()
        .all(|r| r.up == "both" && r.link == x.group && r.state == "ACTIVE"));
    assert_eq!(
        (&lanes[0].local, &lanes[0].peer),
        (&lanes[1].peer, &lanes[1].local)
    );
    let r = rows
        .iter()
        .find(|r| r.local == c.local_addr().unwrap().to_string())
        .unwrap();
    assert_eq!(r.mode, "TCP 0x0a000001/0x0a000008");
    assert_eq!(
        (r.pid, r.role.as_str(), r.intf.as_str()),
        (std::process::id(), "client", "0000")
    );
    assert_eq!(r.inode, rustix::fs::fstat(&c).unwrap().st_ino);
    let r = rows
        .iter()
        .find(|r| r.local == s.local_addr().unwrap().to_string())
        .unwrap();
    assert_eq!(r.mode, "TCP 0x0a000008/0x0a000001");
}

/// The flag is the shim's word; what it leads to, nobody here knows as long as there are no rails.
#[test]
fn a_lane_to_another_node_is_smcr() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, s) = tcp();
    let (c2, _s2) = tcp();
    let (c3, _s3) = tcp();
    let mode = |a: &Shim, conn: u32, flags: u32, up: bool| {
        let e = a.conn(conn);
        e.group.store(9, Relaxed);
        e.lane.store(3, Relaxed);
        if up {
            e.tx.mode.store(lane::half::tx::mode::RING, Relaxed);
        }
        e.flags.fetch_or(flags, Relaxed);
    };
    let remote = a.enter(&c, true);
    // The other side of the same lane number: not its other end, as it would be on one node.
    let here = a.enter(&c2, true);
    a.conn(here).side.store(1, Relaxed);
    let down = a.enter(&c3, true);
    mode(&a, remote, flag::LANE | flag::REMOTE, true);
    mode(&a, here, flag::LANE, true);
    mode(&a, down, flag::LANE | flag::REMOTE, false);
    a.conn(here).reason.store(Reason::Young.code(), Relaxed);
    let rows = d.rows();
    let row = |s: &std::net::TcpStream| {
        let local = s.local_addr().unwrap().to_string();
        rows.iter().find(|r| r.local == local).unwrap()
    };
    let r = row(&c);
    assert_eq!((&*r.mode, &*r.up, r.remote), ("SMCR", "tx", true));
    assert_eq!((r.peer_reason, r.link, r.lane), (0, 9, 3));
    assert_eq!(r.rail, None);
    assert_eq!((&*row(&c2).mode, row(&c2).remote), ("SMCD", false));
    let r = row(&c3);
    assert_eq!((&*r.mode, r.remote), ("TCP 0x0a00001b/0x0a00001b", true));
    // A flag without a lane means nothing.
    a.conn(remote).flags.fetch_and(!flag::LANE, Relaxed);
    let rows = d.rows();
    let local = c.local_addr().unwrap().to_string();
    let r = rows.iter().find(|r| r.local == local).unwrap();
    assert_eq!((&*r.up, r.remote), ("none", false));
    assert_eq!(d.stats().rails, []);
    drop(s);
}

/// A connection whose other end is a program without a shim: known, not guessed.
#[test]
fn a_peer_without_a_shim_is_told_apart() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let mut stranger = std::process::Command::new("bash")
        .args(["-c", &format!("exec 3<>/dev/tcp/127.0.0.1/{port}; read x")])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let s = accept(&l);
    a.enter(&s, false);
    // Another one, held by a process that has something of the shim's name loaded, but which the
    // daemon has never heard of; nor has it of who started it, for that one is gone.
    let lib = tempfile::Builder::new()
        .prefix("libunderpass")
        .tempfile()
        .unwrap();
    std::fs::write(lib.path(), [0; 4096]).unwrap();
    let script = "import mmap,os,socket,sys\n\
        if os.fork(): os._exit(0)\n\
        f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ)\n\
        s=socket.create_connection(('127.0.0.1',int(sys.argv[2])))\n\
        sys.stdin.readline()\n";
    let mut shy = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(lib.path())
        .arg(port.to_string())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let c = accept(&l);
    a.enter(&c, false);
    let pipe = shy.stdin.take();
    shy.wait().unwrap();
    let rows = d.rows();
    let of = |x: &std::net::TcpStream| {
        let peer = x.peer_addr().unwrap().to_string();
        rows.iter().find(|r| r.peer == peer).unwrap().peer_reason
    };
    assert_eq!(of(&s), Reason::PeerNoShim.code());
    // It may belong to another daemon.
    assert_eq!(of(&c), Reason::Unreachable.code());
    drop(pipe); // it waits for this
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn down_and_up() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    promoted(&a, x);
    promoted(&b, y);
    let row = d.rows().into_iter().find(|r| r.role == "client").unwrap();
    // One connection, named by either end: both ends are told.
    for target in [
        Target::Inode(row.inode),
        Target::Pair {
            local: row.local.clone(),
            peer: row.peer.clone(),
        },
        Target::Pair {
            local: row.peer.clone(),
            peer: row.local.clone(),
        },
    ] {
        assert_eq!(
            d.ask(&Request::Down {
                target: target.clone()
            }),
            Response::Told { ends: 2, later: 0 }
        );
        assert_eq!(command(&mut a), (x.conn, op::DOWN));
        assert_eq!(command(&mut b), (y.conn, op::DOWN));
        assert_eq!(
            d.ask(&Request::Up { target }),
            Response::Told { ends: 2, later: 0 }
        );
        assert_eq!((command(&mut a).1, command(&mut b).1), (op::UP, op::UP));
    }
    for target in [Target::All, Target::Pid(std::process::id())] {
        assert_eq!(
            d.ask(&Request::Down { target }),
            Response::Told { ends: 2, later: 0 }
        );
        assert_eq!(
            (command(&mut a), command(&mut b)),
            ((ALL, op::DOWN), (ALL, op::DOWN))
        );
    }
    for target in [
        Target::Pid(1),
        Target::Inode(1),
        Target::Pair {
            local: "127.0.0.1:1".into(),
            peer: "127.0.0.1:2".into(),
        },
    ] {
        assert_eq!(
            d.ask(&Request::Down { target }),
            Response::Told { ends: 0, later: 0 }
        );
    }
    let bad = Target::Pair {
        local: "here".into(),
        peer: "there".into(),
    };
    assert!(matches!(
        d.ask(&Request::Down { target: bad }),
        Response::Error { .. }
    ));
}

#[test]
fn check_explains() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let (local, peer) = (
        c.local_addr().unwrap().to_string(),
        c.peer_addr().unwrap().to_string(),
    );
    let ask = || match d.ask(&Request::Check {
        local: local.clone(),
        peer: peer.clone(),
    }) {
        Response::Check {
            local,
            peer,
            verdict,
            ..
        } => (local, peer, verdict),
        r => panic!("{r:?}"),
    };
    assert!(ask().0.is_none());
    let i = a.enter(&c, true);
    a.conn(i).reason.store(Reason::Waiting.code(), Relaxed);
    a.conn(i).flags.fetch_or(flag::REGISTERED, Relaxed);
    a.register(i, &c);
    let (l, p, v) = ask();
    assert!(l.is_some() && p.is_none() && v.contains("waiting"), "{v}");
    let j = b.enter(&s, false);
    b.conn(j).reason.store(Reason::Bypassed.code(), Relaxed);
    let (_, p, v) = ask();
    assert!(p.is_some() && v.contains("bypassed"), "{v}");
    a.register(i, &c);
    b.register(j, &s);
    let (x, y) = offers(&mut a, &mut b);
    promoted(&a, x);
    promoted(&b, y);
    assert!(ask().2.contains("accelerated"));
}

#[test]
fn ping_stats_log() {
    let d = Daemon::plain();
    let Response::Pong {
        pid,
        proof,
        version,
        ..
    } = d.ask(&Request::Ping)
    else {
        panic!()
    };
    assert_eq!(
        (pid, proof, version.as_str()),
        (d.pid(), false, env!("CARGO_PKG_VERSION"))
    );
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, _) = pair(&mut a, &mut b);
    // Memory is what has been touched, not what is reserved.
    let s = d.stats();
    assert!(
        s.memory_bytes > 0 && s.memory_bytes < 1 << 20,
        "{}",
        s.memory_bytes
    );
    a.sides[&(x.group, x.side)].own[&0]
        .1
        .byte(CONTROL_BYTES + (1 << 20))
        .store(1, Relaxed);
    assert!(d.stats().memory_bytes > s.memory_bytes);
    let log = d.log();
    for word in ["connected", "registered 127.0.0.1", "paired 127.0.0.1"] {
        assert!(log.iter().any(|l| l.contains(word)), "{word} in {log:#?}");
    }
}

/// What ended processes did stays in the sums, once.
#[test]
fn statistics_of_families() {
    let d = Daemon::plain();
    let a = Shim::new(&d.dir);
    a.stats().promoted.store(7, Relaxed);
    assert_eq!(d.stats().promoted, 7);
    drop(a);
    d.until("no client", |s| s.clients == 0);
    assert_eq!(d.stats().promoted, 7);
}

#[test]
fn nonsense_is_answered_or_dropped() {
    let d = Daemon::plain();
    for bad in ["{}\n", "nonsense\n", "{\"op\":\"selfdestruct\"}\n", "\n"] {
        let mut s = UnixStream::connect(d.dir.join("admin.sock")).unwrap();
        s.write_all(bad.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(s).read_line(&mut line).unwrap();
        let r: Response = serde_json::from_str(&line).unwrap();
        assert!(matches!(r, Response::Error { .. }), "{r:?}");
    }
    // A line without end is cut off, and nobody waits for it.
    let mut s = UnixStream::connect(d.dir.join("admin.sock")).unwrap();
    let _ = s.write_all(&vec![b'x'; 200 << 10]);
    assert!(matches!(d.ask(&Request::Ping), Response::Pong { .. }));
    let mut all = Vec::new();
    let _ = s.read_to_end(&mut all);
}

/// What operators say while a program has no connection is not lost.
#[test]
fn an_order_waits_for_a_program() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    rustix::net::shutdown(&a.sock, rustix::net::Shutdown::Both).unwrap();
    d.until("no connection", |s| s.clients == 0);
    let target = Target::All;
    let none = Response::Told { ends: 0, later: 0 };
    assert_eq!(d.ask(&Request::Down { target }), none, "it has no sockets");
    a.reconnect(&d.dir);
    assert_eq!(command(&mut a), (ALL, op::DOWN));
}

/// A tool in another network namespace sees that namespace only.
#[test]
fn a_namespace_sees_its_own() {
    if !root_or_skip("the view from a network namespace") {
        return;
    }
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    let i = a.enter(&c, true);
    assert_eq!(d.rows().len(), 1);
    let inode = rustix::fs::fstat(&c).unwrap().st_ino;
    let here = (
        d.rows(),
        d.ask(&Request::Down {
            target: Target::Inode(inode),
        }),
    );
    assert_eq!(
        (here.0.len(), here.1),
        (1, Response::Told { ends: 1, later: 0 })
    );
    assert_eq!(command(&mut a), (i, op::DOWN));
    let out = inside_new_netns(
        &d,
        &[
            Request::Ss,
            Request::Down {
                target: Target::Inode(inode),
            },
            Request::Log,
        ],
    );
    assert_eq!(out[0], Response::Ss { rows: vec![] });
    assert_eq!(out[1], Response::Told { ends: 0, later: 0 });
    assert_eq!(out[2], Response::Log { lines: vec![] });
}

/// The namespace of a process is that of its first thread: so another process has to ask.
fn inside_new_netns(d: &Daemon, requests: &[Request]) -> Vec<Response> {
    let script = "import socket,sys\n\
        for line in sys.stdin:\n\
        \x20s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(line.encode())\n\
        \x20print(s.makefile().readline(), end='')\n";
    let mut child = std::process::Command::new("unshare")
        .args(["-n", "python3", "-c", script])
        .arg(d.dir.join("admin.sock"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for r in requests {
        writeln!(stdin, "{}", serde_json::to_string(r).unwrap()).unwrap();
    }
    drop(stdin);
    let out = child.wait_with_output().unwrap();
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

/// Another user may look, but not touch.
#[test]
fn another_user_cannot_send_down() {
    if !root_or_skip("another user's commands") {
        return;
    }
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    a.enter(&c, true);
    let dir = d.dir.parent().unwrap();
    std::fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = "import socket,sys,os\n\
        os.setuid(12345)\n\
        s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode()+b'\\n')\n\
        print(s.makefile().readline(), end='')\n";
    for target in [
        Target::All,
        Target::Inode(rustix::fs::fstat(&c).unwrap().st_ino),
    ] {
        let out = std::process::Command::new("python3")
            .args(["-c", script])
            .arg(d.dir.join("admin.sock"))
            .arg(serde_json::to_string(&Request::Down { target }).unwrap())
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(
            serde_json::from_str::<Response>(&text).unwrap(),
            Response::Told { ends: 0, later: 0 }
        );
    }
}
