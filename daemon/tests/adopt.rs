//! What a daemon knows when it starts: programs that were there before it, and say nothing.

mod common;
use common::*;
use lane::family::TABLE_BYTES;
use lane::proto::msg::{op, ToShim, ALL};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io::{BufRead, BufReader, Lines};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use underpass_admin::{Request, Response, Row, Target};

/// A program under a shim that sleeps: its table exists, mapped, and nothing is said. A process of
/// its own, which is this test program, run again with a role.
struct Sleeper {
    child: Child,
    stdin: ChildStdin,
    out: Lines<BufReader<ChildStdout>>,
    port: u16,
}

impl Sleeper {
    /// `role`: words that change what is in the table, see [`role`].
    fn start(dir: &Path, role: &str) -> Sleeper {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "role", "--nocapture", "--test-threads=1"])
            .env("UNDERPASSD_TEST_DIR", dir)
            .env("UNDERPASSD_TEST_ROLE", role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = out.find_map(|l| l.unwrap().split_once("port ")?.1.parse().ok());
        Sleeper {
            child,
            stdin,
            out,
            port: port.expect("a port"),
        }
    }

    /// A connection to it.
    fn connect(&mut self) -> TcpStream {
        let s = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        assert!(self.out.any(|l| l.unwrap().contains("accepted")));
        s
    }

    fn tell(&mut self, word: &str) {
        use std::io::Write;
        writeln!(self.stdin, "{word}").unwrap();
        assert!(self.out.any(|l| l.unwrap().contains("done")));
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn shim_table(seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("underpass-family", flags).unwrap();
    rustix::fs::ftruncate(&fd, TABLE_BYTES as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// The number of a runtime directory.
fn number(dir: &Path) -> u32 {
    let kept = std::fs::read(dir.join("lock")).unwrap();
    u32::from_ne_bytes(kept.try_into().unwrap())
}

/// Not a test: what [`Sleeper`] runs.
#[test]
fn role() {
    let Some(dir) = std::env::var_os("UNDERPASSD_TEST_DIR") else {
        return;
    };
    let role = std::env::var("UNDERPASSD_TEST_ROLE").unwrap();
    let is = |word: &str| role.split(' ').any(|w| w == word);
    let seals = if is("unsealed") {
        SealFlags::GROW
    } else {
        SEALS
    };
    let table = shim_table(seals);
    if is("foreign") {
        let other = rustix::process::Uid::from_raw(65534);
        rustix::fs::fchown(&table, Some(other), None).unwrap();
    }
    let mut s = Shim::unconnected(table);
    s.stats().promoted.store(7, Relaxed);
    let m = std::fs::metadata(if is("stranger") {
        "/".as_ref()
    } else {
        dir.as_os_str()
    })
    .unwrap();
    let number = match is("removed") {
        true => u64::from(number(dir.as_ref()) ^ 1), // of a directory that had this inode before
        false if is("told") => number(dir.as_ref()).into(),
        false => 0,
    };
    s.home([m.dev(), m.ino(), number]);
    let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    if is("nobody") {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534)).unwrap();
    }
    println!("port {}", l.local_addr().unwrap().port());
    let (c, _) = l.accept().unwrap();
    let i = s.enter(&c, false);
    if is("forger") {
        // Somebody else's socket, as far as the table says.
        s.conn(i).inode.store(1, Relaxed);
    }
    println!("accepted");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "hello" => {
                s.sock = dial(dir.as_ref());
                s.greet();
            }
            "promoted" => {
                s.stats().promoted.fetch_add(1, Relaxed);
            }
            "ordered" => {
                let order = |m: &ToShim| match *m {
                    ToShim::Command { conn, gen, op } => Some((conn, gen, op)),
                    _ => None,
                };
                let commands = [(); 2].map(|_| s.until("an order", order));
                assert_eq!(commands, [(ALL, 0, op::DOWN), (i, s.gen(i), op::UP)]);
            }
            w => panic!("{w}"),
        }
        println!("done");
    }
}

fn mine(d: &Daemon, c: &TcpStream) -> Vec<Row> {
    let here = c.local_addr().unwrap().to_string();
    let rows = d.rows();
    rows.into_iter().filter(|r| r.peer == here).collect()
}

fn started(tmp: &tempfile::TempDir) -> std::path::PathBuf {
    let dir = tmp.path().join("run");
    drop(Daemon::start_in(&dir, &["--no-bpf"])); // makes the directory, and is killed
    dir
}

#[test]
fn a_sleeping_program_is_shown_at_once_until_it_speaks_or_ends() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = started(&tmp);
    let mut a = Sleeper::start(&dir, "");
    let mut b = Sleeper::start(&dir, "");
    let (c, e) = (a.connect(), b.connect());
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    for (c, s) in [(&c, &a), (&e, &b)] {
        let rows = mine(&d, c);
        assert_eq!(rows.len(), 1, "{rows:#?}");
        assert_eq!(
            (rows[0].pid, rows[0].state.as_str()),
            (s.child.id(), "ACTIVE")
        );
    }
    assert_eq!(d.stats().clients, 0, "shown, but not a client");
    // What an operator wants of it, it hears when it speaks.
    let target = Target::Inode(mine(&d, &c)[0].inode);
    let down = |target| d.ask(&Request::Down { target });
    let up = |target| d.ask(&Request::Up { target });
    assert_eq!(down(target.clone()), Response::Told { ends: 0, later: 1 });
    assert_eq!(down(Target::All), Response::Told { ends: 0, later: 2 });
    assert_eq!(up(target.clone()), Response::Told { ends: 0, later: 1 });
    // It speaks: one row still.
    a.tell("hello");
    a.tell("ordered");
    assert_eq!(d.stats().clients, 1);
    assert_eq!(mine(&d, &c).len(), 1);
    assert_eq!(down(target), Response::Told { ends: 1, later: 0 });
    // It ends.
    drop(b);
    assert!(mine(&d, &e).is_empty());
}

/// Statistics begin with the daemon: what they did before is not counted, whether they are found or speak first. What they
/// do from then on counts once, and stays when they have gone.
#[test]
fn their_sums_begin_with_the_daemon() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = started(&tmp);
    // (The second one is not found, because its table does not say that it is ours.)
    for role in ["", "stranger"] {
        let mut a = Sleeper::start(&dir, role);
        let _c = a.connect();
        let d = Daemon::start_in(&dir, &["--no-bpf"]);
        assert_eq!(d.rows().len(), usize::from(role.is_empty()));
        assert_eq!(d.stats().promoted, 0, "{role}");
        if role.is_empty() {
            a.tell("promoted");
            assert_eq!(d.stats().promoted, 1);
        }
        a.tell("hello");
        let before = d.stats().promoted;
        a.tell("promoted");
        assert_eq!(d.stats().promoted, before + 1, "{role}");
        drop(a);
        d.until("no client", |s| s.clients == 0);
        assert_eq!(d.stats().promoted, 1 + u64::from(role.is_empty()));
        // One that begins now counts from its beginning.
        let mut b = Sleeper::start(&dir, "");
        let _c = b.connect();
        b.tell("hello");
        assert_eq!(d.stats().promoted, before + 1 + 7);
    }
}

#[test]
fn tables_of_others_and_broken_ones_are_not_taken() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = started(&tmp);
    let roles = ["stranger", "removed", "unsealed", "forger", "", "told"];
    let mut all = roles.map(|r| Sleeper::start(&dir, r));
    let conns: Vec<_> = all.iter_mut().map(Sleeper::connect).collect();
    // Another daemon has been shown a table: it has it open, but it is not its own.
    let other = Daemon::plain();
    let shown = Shim::with_table(&other.dir, shim_table(SEALS));
    let m = std::fs::metadata(&dir).unwrap();
    shown.home([m.dev(), m.ino(), 0]);
    say(&shown.sock, &hello(), &[&shown.table_fd]);
    hear(&shown.sock).unwrap();
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    let seen: Vec<_> = conns.iter().map(|c| mine(&d, c).len()).collect();
    assert_eq!(seen, [0, 0, 0, 0, 1, 1], "{roles:?}");
    assert!(d.rows().iter().all(|r| r.pid != other.pid()));
}

/// A table made by one user in a process of another: only if root made it.
#[test]
fn memory_of_another_user_is_not_taken() {
    if !root_or_skip("processes of other users") {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let dir = started(&tmp);
    // Made by root, used by another user after it gave up its rights: as servers do.
    let mut worker = Sleeper::start(&dir, "nobody");
    let c = worker.connect();
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    assert_eq!(mine(&d, &c).len(), 1);
    // The other way round: owned by that user, in a process of root's.
    drop(d);
    let mut forged = Sleeper::start(&dir, "foreign");
    let e = forged.connect();
    let d = Daemon::start_in(&dir, &["--no-bpf"]);
    assert_eq!((mine(&d, &c).len(), mine(&d, &e).len()), (1, 0));
}
