//! What somebody without rights, or with those of a container only, does to the daemon of root at its admin socket, while
//! others ask it, too. Counts are asserted, never times.

mod common;
use common::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use underpass_admin::rules::Rule;
use underpass_admin::{Request, Response};

/// A daemon that every user can reach.
fn public() -> Daemon {
    let d = Daemon::plain();
    let dir = d.dir.parent().unwrap();
    std::fs::set_permissions(dir, PermissionsExt::from_mode(0o755)).unwrap();
    d
}

/// A Python program that goes on when its standard input ends, and tells line by line how far it is.
struct Attacker {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Attacker {
    fn start(script: &str, d: &Daemon, args: &[&str]) -> Attacker {
        let mut child = Command::new("python3")
            .args(["-c", script])
            .arg(d.dir.join("admin.sock"))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Attacker { child, said }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets it go on, until it has ended; the rest that it says.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap();
        rest.trim_end().to_owned()
    }
}

/// Asks as this user; the answer's text.
fn ask_as(uid: u32, d: &Daemon, request: &Request) -> String {
    let script = "import os,socket,sys\n\
        os.setuid(int(sys.argv[2]))\n\
        s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.argv[3].encode()+b'\\n')\n\
        print(s.makefile().readline(), end='')\n";
    let request = serde_json::to_string(request).unwrap();
    Attacker::start(script, d, &[&uid.to_string(), &request]).end()
}

fn rows_as(uid: u32, d: &Daemon) -> usize {
    match serde_json::from_str(&ask_as(uid, d, &Request::Ss)).unwrap() {
        Response::Ss { rows } => rows.len(),
        r => panic!("{r:?}"),
    }
}

/// Most memory that the daemon has had, in KiB.
fn peak_kib(d: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", d.pid())).unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Lets `n` connections wait for their answers, of so many users.
const ASK_SLOWLY: &str = "import os,socket,sys\n\
    all=[]\n\
    n,users,text=int(sys.argv[2]),int(sys.argv[3]),sys.argv[4].encode()\n\
    for i in range(n):\n\
    \x20os.seteuid(60000+i%users)\n\
    \x20s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n\
    \x20s.setblocking(False)\n\
    \x20s.send(text)\n\
    \x20os.seteuid(0)\n\
    \x20all.append(s)\n\
    print('asked',flush=True)\n\
    sys.stdin.read()\n\
    cut=0\n\
    for s in all:\n\
    \x20try:\n\
    \x20\x20while len(s.recv(1<<20)): pass\n\
    \x20\x20cut+=1\n\
    \x20except ConnectionError: cut+=1\n\
    \x20except BlockingIOError: pass\n\
    print(cut)\n";

/// Connections that are in the table of a shim and open in this process.
fn connections(a: &mut Shim, pairs: usize) -> Vec<std::net::TcpStream> {
    let mut all = Vec::new();
    for _ in 0..pairs {
        let (c, s) = tcp();
        a.enter(&c, true);
        a.enter(&s, false);
        all.extend([c, s]);
    }
    all
}

/// Three hundred who ask for many rows and do not read them: the daemon keeps a few versions of the rows, and a piece of
/// text for each, and everybody else is answered in full.
#[test]
fn slow_readers_cost_little() {
    if !root_or_skip("slow readers of many users") {
        return;
    }
    let files = rustix::process::Resource::Nofile;
    let mut limit = rustix::process::getrlimit(files);
    limit.current = limit.maximum;
    rustix::process::setrlimit(files, limit).unwrap();
    let d = public();
    let mut a = Shim::new(&d.dir);
    let all = connections(&mut a, 500);
    assert_eq!(d.rows().len(), all.len());
    let before = peak_kib(&d);
    let mut slow = Attacker::start(ASK_SLOWLY, &d, &["300", "300", "{\"op\":\"ss\"}\n"]);
    assert_eq!(slow.line(), "asked");
    for _ in 0..2 {
        // (Without the patience of the tool: how long it takes depends on the machine.)
        assert!(ask_as(0, &d, &Request::Ping).contains("pong"));
        assert_eq!(rows_as(0, &d), all.len());
        assert_eq!(rows_as(12345, &d), all.len());
    }
    let grown = peak_kib(&d) - before;
    assert!(grown < 64 << 10, "{grown} KiB for those who do not read");
    slow.end();
}

/// A thousand connections that say nothing: the oldest ones make way, and whoever asks is answered.
#[test]
fn silent_callers_make_way() {
    if !root_or_skip("many connections of another user") {
        return;
    }
    let d = public();
    let mut silent = Attacker::start(ASK_SLOWLY, &d, &["1000", "1", ""]);
    assert_eq!(silent.line(), "asked");
    for uid in [12345, 12346] {
        let text = ask_as(uid, &d, &Request::Ping);
        assert!(text.contains("pong"), "{text}");
        assert_eq!(rows_as(uid, &d), 0);
    }
    assert!(matches!(d.ask(&Request::Ping), Response::Pong { .. }));
    let cut: usize = silent.end().parse().unwrap();
    assert!(cut >= 1000 - 256, "{cut} made way");
}

/// Root of a container (which has a network namespace of its own) connects and ends; its number goes to a process of the
/// host's root; and its parent, which has the socket, asks.
#[test]
fn a_reused_number_is_nobody() {
    if !root_or_skip("the reuse of a process's number") {
        return;
    }
    let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
    if underpassd::os::sockopt::peer_pidfd(std::os::fd::AsFd::as_fd(&a)).is_err() {
        return skip("this kernel does not tell who connected but by number");
    }
    let d = public();
    let script = "import ctypes,os,socket,sys\n\
        libc=ctypes.CDLL(None)\n\
        s=socket.socket(socket.AF_UNIX)\n\
        p=os.fork()\n\
        if p==0:\n\
        \x20assert libc.unshare(0x40000000)==0\n\
        \x20s.connect(sys.argv[1]); os._exit(0)\n\
        os.waitpid(p,0)\n\
        for i in range(1000):\n\
        \x20open('/proc/sys/kernel/ns_last_pid','w').write(str(p-1))\n\
        \x20q=os.fork()\n\
        \x20if q==0:\n\
        \x20\x20sys.stdin.read(); os._exit(0)\n\
        \x20if q==p: break\n\
        \x20os.kill(q,9); os.waitpid(q,0)\n\
        print('reused' if q==p else 'not', flush=True)\n\
        s.sendall(sys.argv[2].encode()+b'\\n')\n\
        print(s.makefile().readline().strip(), flush=True)\n\
        os.waitpid(q,0)\n";
    let request = serde_json::to_string(&Request::Pods).unwrap();
    // While it is stopped, nobody looks who has connected.
    d.stop();
    let mut attacker = Attacker::start(script, &d, &[&request]);
    let reused = attacker.line();
    d.resume();
    assert_eq!(reused, "reused");
    let answer: Response = serde_json::from_str(&attacker.line()).unwrap();
    assert!(
        matches!(&answer, Response::Error { message } if message.contains("who is asking")),
        "{answer:?}"
    );
    attacker.end();
    // Root on the node is answered.
    assert!(matches!(d.ask(&Request::Pods), Response::Pods { .. }));
}

/// In the node's network, but in another namespace of processes or users, root is anybody.
#[test]
fn root_in_a_container_with_the_nodes_network_is_not_the_nodes() {
    if !root_or_skip("root in other namespaces") {
        return;
    }
    let d = public();
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    a.enter(&c, true);
    let target = underpass_admin::Target::Inode(rustix::fs::fstat(&c).unwrap().st_ino);
    let down = Request::Down { target };
    for kind in [&["--pid", "--fork"][..], &["--user"]] {
        let at = &d.dir.join("admin.sock");
        let pods = ask_in(kind, at, &Request::Pods);
        assert!(matches!(pods, Response::Error { .. }), "{kind:?} {pods:?}");
        let told = ask_in(kind, at, &down);
        assert_eq!(told, Response::Told { ends: 0, later: 0 }, "{kind:?}");
    }
    assert_eq!(d.ask(&down), Response::Told { ends: 1, later: 0 });
}

/// Asks from other namespaces.
fn ask_in(unshare: &[&str], at: &Path, request: &Request) -> Response {
    let script = "import socket,sys\n\
        s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.stdin.readline().encode())\n\
        print(s.makefile().readline(), end='')\n";
    let mut child = Command::new("unshare")
        .args(unshare)
        .args(["python3", "-c", script])
        .arg(at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let line = serde_json::to_string(request).unwrap() + "\n";
    child
        .stdin
        .take()
        .unwrap()
        .write_all(line.as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Users of the node neither see rules nor change them, however they ask.
#[test]
fn rules_are_roots() {
    if !root_or_skip("another user") {
        return;
    }
    let d = public();
    let deny_all = || Request::Rule {
        rule: Rule::default(),
    };
    let rules = || match d.ask(&Request::Rules) {
        Response::Rules { added, .. } => added.len(),
        r => panic!("{r:?}"),
    };
    for request in [Request::Rules, deny_all(), Request::Unrule { number: 1 }] {
        let text = ask_as(12345, &d, &request);
        assert!(text.contains("rules are root's"), "{text}");
        assert_eq!(rules(), 0);
    }
    d.ask(&deny_all());
    assert_eq!(rules(), 1);
    let text = ask_as(12345, &d, &Request::Unrule { number: 1 });
    assert!(text.contains("rules are root's"), "{text}");
    assert_eq!(rules(), 1);
}
