//! The BPF proof, with real namespaces, real NAT and real forgeries. Needs root.

mod common;
use common::*;
use lane::proto::reason::Reason;
use rustix::fs::{Mode, OFlags};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;

/// A network namespace that exists as long as this value, entered by threads of the test.
struct Netns {
    name: String,
    fd: OwnedFd,
}

fn run(line: &str) {
    let mut words = line.split_ascii_whitespace();
    let out = Command::new(words.next().unwrap())
        .args(words)
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{line}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

impl Netns {
    fn new(tag: &str) -> Netns {
        let name = format!("upd{}{tag}", std::process::id());
        run(&format!("ip netns add {name}"));
        let fd =
            rustix::fs::open(format!("/run/netns/{name}"), OFlags::CLOEXEC, Mode::empty()).unwrap();
        run(&format!("ip -n {name} link set lo up"));
        Netns { name, fd }
    }

    fn ip(&self, line: &str) {
        run(&format!("ip -n {} {line}", self.name));
    }

    /// Runs `f` inside. The sockets it makes stay there.
    fn inside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|s| {
            let t = s.spawn(|| {
                let kind = rustix::thread::ThreadNameSpaceType::NETWORK;
                rustix::thread::move_into_thread_name_spaces(self.fd.as_fd(), kind)
                    .map(|()| f())
                    .unwrap()
            });
            t.join().unwrap()
        })
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .status();
    }
}

/// Pins of our own, removed at the end.
struct Pins {
    config: tempfile::NamedTempFile,
    dir: String,
}

impl Pins {
    fn new(tag: &str) -> Pins {
        let dir = format!("/sys/fs/bpf/underpass-test-{}-{tag}", std::process::id());
        let config = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            config.path(),
            format!("credits = {CREDITS}\n[proof]\npin = '{dir}'\n"),
        )
        .unwrap();
        Pins { config, dir }
    }

    fn daemon(&self) -> Daemon {
        let d = Daemon::start(&["--config", self.config.path().to_str().unwrap()]);
        assert!(d.stats().proof, "root has no BPF proof here");
        d
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Two namespaces joined by a veth pair: 10.77.0.1 and 10.77.0.2.
fn joined(tag: &str) -> (Netns, Netns) {
    let (a, b) = (
        Netns::new(&format!("{tag}a")),
        Netns::new(&format!("{tag}b")),
    );
    a.ip(&format!(
        "link add up0 type veth peer name up0 netns {}",
        b.name
    ));
    for (n, ip) in [(&a, 1), (&b, 2)] {
        n.ip(&format!("addr add 10.77.0.{ip}/24 dev up0"));
        n.ip(&format!("addr add fd77::{ip}/64 dev up0 nodad"));
        n.ip("link set up0 up");
    }
    (a, b)
}

fn listen(n: &Netns, at: &str) -> TcpListener {
    n.inside(|| TcpListener::bind(at).unwrap())
}

fn dial_tcp(n: &Netns, to: SocketAddr) -> TcpStream {
    n.inside(|| TcpStream::connect_timeout(&to, PATIENCE).unwrap())
}

fn both(a: &Netns, b: &Netns, at: &str) -> (TcpStream, TcpStream) {
    let l = listen(b, at);
    let c = dial_tcp(a, l.local_addr().unwrap());
    (c, l.accept().unwrap().0)
}

fn waiting(s: &mut Shim) {
    // A credit comes back when the registration has been looked at; nothing else may have come.
    s.credit();
}

/// Both ends register, the client first, and get a lane.
fn paired(d: &Daemon, c: &TcpStream, s: &TcpStream) {
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (i, j) = (a.enter(c, true), b.enter(s, false));
    a.register(i, c);
    b.register(j, s);
    offers(&mut a, &mut b);
}

#[test]
fn one_namespace_with_records() {
    if !root_or_skip("the BPF proof") {
        return;
    }
    let pins = Pins::new("one");
    let d = pins.daemon();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    pair(&mut a, &mut b);
}

#[test]
fn across_namespaces_and_over_ipv6() {
    if !root_or_skip("the BPF proof across namespaces") {
        return;
    }
    let pins = Pins::new("two");
    let d = pins.daemon();
    let (n1, n2) = joined("two");
    for at in ["10.77.0.2:0", "[fd77::2]:0"] {
        let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
        let (c, s) = both(&n1, &n2, at);
        let (i, j) = (a.enter(&c, true), b.enter(&s, false));
        b.register(j, &s);
        waiting(&mut b);
        a.register(i, &c);
        offers(&mut a, &mut b);
    }
}

#[test]
fn through_nat_of_both_addresses() {
    if !root_or_skip("the BPF proof through NAT") {
        return;
    }
    let pins = Pins::new("nat");
    let d = pins.daemon();
    let (n1, n2) = joined("nat");
    n1.ip("addr add 10.77.0.9/24 dev up0");
    n1.ip("route add 10.96.0.0/16 dev up0");
    n1.inside(|| {
        run("nft add table ip n");
        run("nft add chain ip n out { type nat hook output priority -100 ; }");
        run("nft add rule ip n out ip daddr 10.96.0.1 tcp dport 443 dnat to 10.77.0.2:8080");
        run("nft add chain ip n post { type nat hook postrouting priority 100 ; }");
        run("nft add rule ip n post oifname up0 tcp dport 8080 snat to 10.77.0.9");
    });
    let l = listen(&n2, "10.77.0.2:8080");
    let c = dial_tcp(&n1, "10.96.0.1:443".parse().unwrap());
    let (s, from) = l.accept().unwrap();
    assert_eq!(
        from.ip().to_string(),
        "10.77.0.9",
        "both addresses are translated"
    );
    assert_ne!(c.local_addr().unwrap().ip(), from.ip());
    paired(&d, &c, &s);
}

/// The same addresses and ports in a namespace of the forger's own.
#[test]
fn a_forged_mirror_is_not_paired() {
    if !root_or_skip("the forged mirror") {
        return;
    }
    let pins = Pins::new("forge");
    let (n1, n2) = joined("forge");
    let forger = Netns::new("forgef");
    forger.ip("addr add 10.77.0.1/32 dev lo");
    forger.ip("addr add 10.77.0.2/32 dev lo");
    for proof in [true, false] {
        let d = if proof {
            pins.daemon()
        } else {
            Daemon::plain()
        };
        let (c, s) = both(&n1, &n2, "10.77.0.2:0");
        let (from, to) = (c.local_addr().unwrap(), c.peer_addr().unwrap());
        let fake = forger.inside(|| {
            let l = TcpListener::bind(to).unwrap();
            let c = socket_from(from);
            rustix::net::connect(&c, &to).unwrap();
            (TcpStream::from(c), l.accept().unwrap().0)
        });
        assert_eq!(
            (fake.1.local_addr().unwrap(), fake.1.peer_addr().unwrap()),
            (to, from)
        );
        let (mut a, mut b, mut f) = (Shim::new(&d.dir), Shim::new(&d.dir), Shim::new(&d.dir));
        let (i, j, k) = (
            a.enter(&c, true),
            b.enter(&s, false),
            f.enter(&fake.1, false),
        );
        f.register(k, &fake.1);
        waiting(&mut f);
        a.register(i, &c);
        if proof {
            // The record tells them apart: the real one is found although the forger was first.
            waiting(&mut a);
            b.register(j, &s);
            offers(&mut a, &mut b);
        } else {
            let (reason, _, retry) = a.declined(i);
            assert_eq!(reason, Reason::Unproven.code());
            assert!(retry > 0, "the forger must not keep it away for good");
            assert_eq!(f.declined(k).0, Reason::Unproven.code());
        }
    }
}

fn socket_from(local: SocketAddr) -> OwnedFd {
    use rustix::net::*;
    let s = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    bind(&s, &local).unwrap();
    s
}

fn sequence(s: &impl AsFd, queue: i32) -> u32 {
    option(s, TCP_REPAIR_QUEUE, queue);
    let mut v = 0u32;
    let mut len = 4;
    // SAFETY: valid out pointers of four bytes.
    let r = unsafe {
        let fd = s.as_fd().as_raw_fd();
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            TCP_QUEUE_SEQ,
            (&raw mut v).cast(),
            &mut len,
        )
    };
    assert_eq!(r, 0, "{}", std::io::Error::last_os_error());
    v
}

fn option(s: &impl AsFd, name: i32, value: i32) {
    // SAFETY: a valid pointer to four bytes.
    let r = unsafe {
        let fd = s.as_fd().as_raw_fd();
        libc::setsockopt(fd, libc::IPPROTO_TCP, name, (&raw const value).cast(), 4)
    };
    assert_eq!(r, 0, "option {name}: {}", std::io::Error::last_os_error());
}

const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const TCP_QUEUE_SEQ: i32 = 21;
const RECV_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;

/// A forger who knows the sequence numbers sets them by hand, in his own namespace. He plays the
/// server first, then the client.
#[test]
fn sequence_numbers_set_by_hand_prove_nothing() {
    if !root_or_skip("the repaired socket") {
        return;
    }
    let pins = Pins::new("repair");
    let d = pins.daemon();
    let (n1, n2) = joined("repair");
    let forger = Netns::new("repairf");
    forger.ip("addr add 10.77.0.1/32 dev lo");
    forger.ip("addr add 10.77.0.2/32 dev lo");
    for plays_client in [false, true] {
        let (c, s) = both(&n1, &n2, "10.77.0.2:0");
        let victim = if plays_client { &c } else { &s };
        let (own, other) = (victim.local_addr().unwrap(), victim.peer_addr().unwrap());
        option(victim, TCP_REPAIR, 1);
        let seqs = [SEND_QUEUE, RECV_QUEUE].map(|q| (q, sequence(victim, q)));
        option(victim, TCP_REPAIR, -1); // off, without a window probe
        let fake = forger.inside(|| {
            let f = socket_from(own);
            option(&f, TCP_REPAIR, 1);
            for (queue, seq) in seqs {
                // The handshake that is left out would have counted the SYN.
                let syn = u32::from(queue == SEND_QUEUE);
                option(&f, TCP_REPAIR_QUEUE, queue);
                option(&f, TCP_QUEUE_SEQ, seq.wrapping_sub(syn) as i32);
            }
            rustix::net::connect(&f, &other).unwrap();
            option(&f, TCP_REPAIR, -1);
            TcpStream::from(f)
        });
        assert_eq!(
            (fake.local_addr().unwrap(), fake.peer_addr().unwrap()),
            (own, other)
        );
        let (mut a, mut b, mut f) = (Shim::new(&d.dir), Shim::new(&d.dir), Shim::new(&d.dir));
        let k = f.enter(&fake, plays_client);
        f.register(k, &fake);
        waiting(&mut f);
        let (i, j) = (a.enter(&c, true), b.enter(&s, false));
        b.register(j, &s);
        waiting(&mut b);
        a.register(i, &c);
        offers(&mut a, &mut b);
    }
}

/// What was established while no daemon ran has been recorded all the same.
#[test]
fn records_outlive_the_daemon() {
    if !root_or_skip("the pinned records") {
        return;
    }
    let pins = Pins::new("pin");
    let (n1, n2) = joined("pin");
    drop(pins.daemon());
    let (c, s) = both(&n1, &n2, "10.77.0.2:0");
    let d = pins.daemon();
    paired(&d, &c, &s);
}

/// A call of `bpf`, whose argument is in these words.
fn bpf(command: i32, argument: &[u64]) -> OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: the argument lives, and so does what it points to.
    let r = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            argument.as_ptr(),
            std::mem::size_of_val(argument),
        )
    };
    assert!(r >= 0, "bpf {command}: {}", std::io::Error::last_os_error());
    // SAFETY: just made; or 0 for calls that make none, which is not used, and leaked by whoever calls.
    unsafe { OwnedFd::from_raw_fd(r as i32) }
}

/// Pins as an earlier version has left them: a program of another version, which does less, with the map that there is.
fn older(pins: &Pins) {
    const BPF_PROG_LOAD: i32 = 5;
    const BPF_OBJ_GET: i32 = 7;
    const BPF_LINK_UPDATE: i32 = 29;
    const SOCK_OPS: u64 = 13;
    const CGROUP_SOCK_OPS: u64 = 3;
    // r0 = 1; exit
    let code: [u64; 2] = [0x1_0000_00b7, 0x95];
    let license = c"Apache-2.0";
    let mut name = [0u8; 16];
    name[..9].copy_from_slice(b"underpass");
    let name = [0, 8].map(|at: usize| u64::from_ne_bytes(name[at..at + 8].try_into().unwrap()));
    let load = [
        SOCK_OPS | 2 << 32,
        code.as_ptr() as u64,
        license.as_ptr() as u64,
        0, // no log
        0,
        0, // (the kernel's version, and flags)
        name[0],
        name[1],
        CGROUP_SOCK_OPS << 32,
    ];
    let program = bpf(BPF_PROG_LOAD, &load);
    let path = std::ffi::CString::new(format!("{}/v1-node/link", pins.dir)).unwrap();
    let link = bpf(BPF_OBJ_GET, &[path.as_ptr() as u64, 0]);
    let numbers = |a: &OwnedFd, b: &OwnedFd| a.as_raw_fd() as u64 | (b.as_raw_fd() as u64) << 32;
    std::mem::forget(bpf(BPF_LINK_UPDATE, &[numbers(&link, &program), 0]));
}

/// An earlier version has left its program: another one takes its place, and what was recorded before stays.
#[test]
fn an_older_program_is_replaced() {
    if !root_or_skip("the older program") {
        return;
    }
    let pins = Pins::new("older");
    let (n1, n2) = joined("older");
    drop(pins.daemon());
    let before = both(&n1, &n2, "10.77.0.2:0");
    older(&pins);
    let unrecorded = both(&n1, &n2, "10.77.0.2:0");
    let d = pins.daemon();
    let after = both(&n1, &n2, "10.77.0.2:0");
    for (c, s) in [&before, &after] {
        paired(&d, c, s);
    }
    // (So that the older one did run.)
    let (c, s) = &unrecorded;
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (i, j) = (a.enter(c, true), b.enter(s, false));
    a.register(i, c);
    b.register(j, s);
    assert_eq!(a.declined(i).0, Reason::Unproven.code());
}

/// What is pinned cannot be used: pins of this version take its place, and outlive the daemon.
#[test]
fn pins_that_cannot_be_used_are_replaced() {
    if !root_or_skip("the broken pins") {
        return;
    }
    const BPF_MAP_CREATE: i32 = 0;
    const BPF_OBJ_PIN: i32 = 6;
    const ARRAY: u64 = 2;
    let pins = Pins::new("broken");
    let (n1, n2) = joined("broken");
    drop(pins.daemon());
    let records = format!("{}/v1-node/records", pins.dir);
    std::fs::remove_file(&records).unwrap();
    // Keys and values of four bytes, one of them.
    let map = bpf(BPF_MAP_CREATE, &[ARRAY | 4 << 32, 4 | 1 << 32]);
    let path = std::ffi::CString::new(records).unwrap();
    std::mem::forget(bpf(
        BPF_OBJ_PIN,
        &[path.as_ptr() as u64, map.as_raw_fd() as u64],
    ));
    drop(pins.daemon());
    let (c, s) = both(&n1, &n2, "10.77.0.2:0");
    let d = pins.daemon();
    paired(&d, &c, &s);
}

/// `connect(AF_UNSPEC)` and a second connect: the same socket and cookie, another connection.
#[test]
fn a_reused_socket_has_the_record_of_its_present_connection() {
    if !root_or_skip("the reused socket") {
        return;
    }
    let pins = Pins::new("reuse");
    let d = pins.daemon();
    let (n1, n2) = joined("reuse");
    let (c, s1) = both(&n1, &n2, "10.77.0.2:0");
    // SAFETY: a zeroed sockaddr is AF_UNSPEC; the size is right.
    let r = unsafe {
        let a: libc::sockaddr = std::mem::zeroed();
        libc::connect(c.as_raw_fd(), &a, std::mem::size_of_val(&a) as u32)
    };
    assert_eq!(r, 0);
    let l = listen(&n2, "10.77.0.2:0");
    rustix::net::connect(&c, &l.local_addr().unwrap()).unwrap();
    let s2 = l.accept().unwrap().0;
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (i, j) = (a.enter(&c, true), b.enter(&s2, false));
    a.register(i, &c);
    waiting(&mut a);
    b.register(j, &s2);
    offers(&mut a, &mut b);
    drop(s1);
}
