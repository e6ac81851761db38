//! The sums of `stats` over families whose processes come and go.

mod common;
use common::*;
use lane::family::TABLE_BYTES;
use std::io::{BufRead, BufReader, Lines};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

/// A member of a family: a process with a table that it has from its parent, this test.
struct Member(Child, Lines<BufReader<ChildStdout>>);

impl Member {
    fn of(d: &Daemon, table: &OwnedFd) -> Member {
        rustix::io::fcntl_setfd(table, rustix::io::FdFlags::empty()).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "member", "--nocapture", "--test-threads=1"])
            .env("UNDERPASSD_TEST_DIR", &d.dir)
            .env("UNDERPASSD_TEST_TABLE", table.as_raw_fd().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(out.any(|l| l.unwrap().contains("greeted")));
        Member(child, out)
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        self.1.for_each(drop);
        self.0.wait().unwrap();
    }
}

/// Not a test: what [`Member`] runs. One connection more was promoted, and moved 100 bytes.
#[test]
fn member() {
    let Some(dir) = std::env::var_os("UNDERPASSD_TEST_DIR") else {
        return;
    };
    let fd: i32 = std::env::var("UNDERPASSD_TEST_TABLE")
        .unwrap()
        .parse()
        .unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows the number.
    let table = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut s = Shim::with_table(dir.as_ref(), table);
    s.greet();
    s.stats().promoted.fetch_add(1, Relaxed);
    s.stats().lane_tx.fetch_add(100, Relaxed);
    println!("greeted");
    std::io::stdin().lines().for_each(drop);
}

/// Children of a parent that itself never speaks to the daemon.
#[test]
fn a_family_that_comes_and_goes_counts_once() {
    let d = Daemon::plain();
    let table = table_fd(TABLE_BYTES, SEALS);
    let sums = |d: &Daemon| {
        let s = d.stats();
        (s.promoted, s.lane_tx_bytes)
    };
    for n in 1..=3 {
        let m = Member::of(&d, &table);
        assert_eq!(sums(&d), (n, n * 100), "child {n} lives");
        m.end();
        d.until("its end", |s| s.clients == 0);
        assert_eq!(sums(&d), (n, n * 100), "child {n} has ended");
    }
    // Several at once, which end one after the other.
    let (a, b) = (Member::of(&d, &table), Member::of(&d, &table));
    assert_eq!(sums(&d), (5, 500));
    a.end();
    d.until("one left", |s| s.clients == 1);
    assert_eq!(sums(&d), (5, 500));
    // The daemon reads ended tables for the last time every few seconds.
    b.end();
    d.until("its end", |s| s.clients == 0);
    std::thread::sleep(std::time::Duration::from_secs(6));
    assert_eq!(sums(&d), (5, 500));
    let c = Member::of(&d, &table);
    assert_eq!(sums(&d), (6, 600), "back after that");
    c.end();
}
