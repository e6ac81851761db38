//! Without the BPF proof: an end whose other end cannot be seen under the mirrored addresses does
//! not wait for ever. Needs root, for a network namespace with address translation.

mod common;
use common::*;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

fn run(line: &str) {
    let mut words = line.split_ascii_whitespace();
    let done = Command::new(words.next().unwrap()).args(words).status();
    assert!(done.unwrap().success(), "{line}");
}

/// Not a test: runs in a namespace of its own, which has to be that of its whole process.
#[test]
fn role() {
    let Some(dir) = std::env::var_os("UNDERPASSD_TEST_DIR") else {
        return;
    };
    run("ip link set lo up");
    run("nft add table ip t");
    run("nft add chain ip t o { type nat hook output priority -100 ; }");
    run("nft add rule ip t o tcp dport 8081 redirect to :8080");
    let l = TcpListener::bind("127.0.0.1:8080").unwrap();
    let connect = |port| {
        let c = TcpStream::connect(("127.0.0.1", port)).unwrap();
        (c, l.accept().unwrap().0)
    };
    let mut shim = Shim::new(dir.as_ref());
    // Translated: neither end has a mirror.
    let (c, s) = connect(8081);
    let (i, j) = (shim.enter(&c, true), shim.enter(&s, false));
    // Not translated; its other end just does not register.
    let (idle, other) = connect(8080);
    let k = shim.enter(&idle, true);
    for (n, sock) in [(k, &idle), (i, &c), (j, &s)] {
        shim.register(n, sock);
    }
    let mut given_up = Vec::new();
    while given_up.len() < 2 {
        if let ToShim::Decline {
            conn,
            local,
            retry_ms,
            ..
        } = shim.step().expect("a daemon")
        {
            assert_eq!(local, Reason::Unproven.code());
            assert!(retry_ms > 0, "it may try again");
            given_up.push(conn);
        }
    }
    given_up.sort();
    assert_eq!(given_up, [i, j]);
    // The other one waits on: two more looks do not change that, and it is paired when it comes.
    std::thread::sleep(std::time::Duration::from_secs(11));
    let m = shim.enter(&other, false);
    shim.register(m, &other);
    assert_eq!(shim.offer().conn, k);
}

#[test]
fn a_translated_connection_does_not_wait_for_ever() {
    if !root_or_skip("address translation") {
        return;
    }
    let d = Daemon::plain();
    let done = Command::new("unshare")
        .arg("-n")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "role", "--nocapture", "--test-threads=1"])
        .env("UNDERPASSD_TEST_DIR", &d.dir)
        .status()
        .unwrap();
    assert!(done.success());
}
