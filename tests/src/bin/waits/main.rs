//! Threads that wait for connections while other threads work on the same ones, and on the daemon's
//! messages.
//!
//! ```text
//! waits serve                     echoes on each connection, a thread each; prints "port N"
//! waits race HOW ROUNDS PORT...   HOW: poll ppoll select pselect
//! waits two ROUNDS PORT           two threads wait on one epoll set
//! waits both ROUNDS               one thread with one epoll set is both ends of connections
//! waits idle HOW                  serves one connection: echoes, and says what its waits cost
//! waits storm MILLISECONDS PORT   tells `idle` of news all the time, and of no event
//! waits held HOW WHO PORT         HOW: epoll poll recv nonblocking; WHO holds the lane's locks: dead zombie stopped
//! ```
//!
//! Prints `result {…}`; a wait that nothing ends within 20 s ends the program with status 3.

mod by_hand;

use by_hand::{entry, ping, promoted, shared};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A wait that lasts so long is taken for one that nothing ends.
const HUNG: Duration = Duration::from_secs(20);
const SIZE: usize = 64;
/// No further round begins after so long: a busy machine has fewer.
const ENOUGH: Duration = Duration::from_secs(20);
/// First byte of a message that wants no echo: the server closes a moment later.
const CLOSE: u8 = 0xee;
/// First byte of a message after whose echo nothing comes for a while.
const IDLE: u8 = 0xb0;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve"] => serve(),
        ["race", how, rounds, ports @ ..] => race(how, number(rounds), ports),
        ["two", rounds, port] => two(number(rounds), port),
        ["both", rounds] => both(number(rounds)),
        ["idle", how] => idle(how),
        ["storm", ms, port] => storm(number(ms), port),
        ["held", how, who, port] => held(how, who, port),
        _ => panic!("see the head of waits.rs"),
    }
}

fn number(s: &str) -> u64 {
    s.parse().expect("a number")
}

fn dial(port: &str) -> TcpStream {
    let s = TcpStream::connect(("127.0.0.1", number(port) as u16)).expect("connect");
    s.set_nodelay(true).expect("TCP_NODELAY");
    s
}

fn serve() {
    let l = TcpListener::bind("127.0.0.1:0").expect("bind");
    println!("port {}", l.local_addr().expect("address").port());
    for s in l.incoming() {
        let mut s = s.expect("accept");
        std::thread::spawn(move || {
            let mut b = [0u8; SIZE];
            while let Ok(n @ 1..) = s.read(&mut b) {
                if b[0] == CLOSE {
                    std::thread::sleep(Duration::from_millis(300));
                    return;
                }
                if s.write_all(&b[..n]).is_err() {
                    return;
                }
            }
        });
    }
}

/// Ends the program if `done` does not come true.
fn await_or_die(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + HUNG;
    while !done() {
        if Instant::now() > end {
            eprintln!("nothing ends: {what}");
            std::process::exit(3);
        }
        std::thread::yield_now();
    }
}

/// Takes what is there, without waiting.
fn take(fd: i32) -> isize {
    let mut b = [0u8; 4096];
    // SAFETY: `b` is valid for the call.
    unsafe { libc::recv(fd, b.as_mut_ptr().cast(), b.len(), libc::MSG_DONTWAIT) }
}

/// Which of `fds` have data; waits without a limit.
fn wait(how: &str, fds: &[i32]) -> Vec<i32> {
    let none = std::ptr::null::<u8>();
    if how.ends_with("poll") {
        let mut p: Vec<_> = fds
            .iter()
            .map(|fd| libc::pollfd {
                fd: *fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: `p` has as many entries as the calls are told.
        let n = unsafe {
            match how {
                "poll" => libc::poll(p.as_mut_ptr(), p.len() as u64, -1),
                _ => libc::ppoll(p.as_mut_ptr(), p.len() as u64, none.cast(), none.cast()),
            }
        };
        assert!(n > 0, "{how}: {n}");
        return p.iter().filter(|p| p.revents != 0).map(|p| p.fd).collect();
    }
    let null = std::ptr::null_mut();
    // SAFETY: a descriptor set is plain bits; the descriptors are below 1,024, few as they are.
    unsafe {
        let mut set: libc::fd_set = std::mem::zeroed();
        fds.iter().for_each(|fd| libc::FD_SET(*fd, &mut set));
        let most = fds.iter().max().expect("some") + 1;
        let n = match how {
            "select" => libc::select(most, &mut set, null, null, std::ptr::null_mut()),
            _ => libc::pselect(most, &mut set, null, null, none.cast(), none.cast()),
        };
        assert!(n > 0, "{how}: {n}");
        fds.iter()
            .copied()
            .filter(|fd| libc::FD_ISSET(*fd, &set))
            .collect()
    }
}

/// One thread polls a lane that is there for good, and connections that get theirs while it does;
/// another works off what the daemon says, in calls of its own.
fn race(how: &str, rounds: u64, ports: &[&str]) {
    let constant = dial(ports[0]);
    let other = dial(ports[0]);
    let (mut wake, woken) = std::os::unix::net::UnixStream::pair().expect("socketpair");
    let got: Arc<Mutex<HashMap<i32, u64>>> = Arc::default();
    let watched: Arc<Mutex<Vec<i32>>> = Arc::default();
    watched
        .lock()
        .expect("lock")
        .extend([constant.as_raw_fd(), woken.as_raw_fd()]);
    let asleep = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    let mut done = 0;
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(SeqCst) {
                asleep.fetch_add(1, SeqCst);
                let fds = watched.lock().expect("lock").clone();
                for fd in wait(how, &fds) {
                    let mut b = [0u8; 64];
                    if fd == woken.as_raw_fd() {
                        let _ = (&woken).read(&mut b);
                        continue;
                    }
                    let n = take(fd).max(0) as u64;
                    *got.lock().expect("lock").entry(fd).or_default() += n;
                }
            }
        });
        s.spawn(|| {
            while !over.load(SeqCst) {
                take(other.as_raw_fd());
                std::hint::spin_loop();
            }
        });
        let count = |fd: i32| got.lock().expect("lock").get(&fd).copied().unwrap_or(0);
        let echo = |mut c: &TcpStream| {
            let before = count(c.as_raw_fd());
            c.write_all(&[7; SIZE]).expect("send");
            await_or_die("an echo that was sent", || {
                count(c.as_raw_fd()) == before + SIZE as u64
            });
        };
        let mut wake_poller = || {
            let turn = asleep.load(SeqCst);
            wake.write_all(&[1]).expect("wake");
            await_or_die("the poller's sleep", || asleep.load(SeqCst) > turn);
        };
        for _ in 0..200 {
            echo(&constant);
        }
        let begin = Instant::now();
        while done < rounds && begin.elapsed() < ENOUGH {
            let c = dial(ports[1 + done as usize % (ports.len() - 1)]);
            let fd = c.as_raw_fd();
            watched.lock().expect("lock").push(fd);
            wake_poller();
            for _ in 0..30 {
                echo(&c);
            }
            await_or_die("a lane", || {
                echo(&c);
                entry(&c).is_some()
            });
            watched.lock().expect("lock").retain(|f| *f != fd);
            wake_poller();
            got.lock().expect("lock").remove(&fd);
            done += 1;
        }
        over.store(true, SeqCst);
        wake.write_all(&[1]).expect("wake");
    });
    println!("result {{\"rounds\":{done}}}");
}

/// Two threads wait on one epoll set, from before its connection gets a lane. The one that takes a
/// certain echo is busy until the other has taken the next ones.
fn two(rounds: u64, port: &str) {
    for r in 0..rounds {
        two_once(port, 8 + r % 40);
    }
    println!("result {{\"rounds\":{rounds}}}");
}

fn two_once(port: &str, hold_at: u64) {
    const MORE: u64 = 3;
    // SAFETY: a plain system call.
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(set >= 0);
    let c = dial(port);
    let fd = c.as_raw_fd();
    c.set_nonblocking(true).expect("O_NONBLOCK");
    let ctl = |op: i32, events: i32| {
        let mut ev = libc::epoll_event {
            events: events as u32,
            u64: 0,
        };
        // SAFETY: `ev` is valid for the call.
        assert_eq!(unsafe { libc::epoll_ctl(set, op, fd, &mut ev) }, 0);
    };
    ctl(libc::EPOLL_CTL_ADD, libc::EPOLLIN | libc::EPOLLET);
    let taken = AtomicU64::new(0);
    let waiting = AtomicU64::new(0);
    let held = AtomicBool::new(false);
    let over = AtomicBool::new(false);
    let waiter = || {
        waiting.fetch_add(1, SeqCst);
        while !over.load(SeqCst) {
            let mut ev = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: room for the one event that is asked for.
            unsafe { libc::epoll_wait(set, &mut ev, 1, -1) };
            while let n @ 1.. = take(fd) {
                let all = taken.fetch_add(n as u64, SeqCst) + n as u64;
                if all >= hold_at * SIZE as u64 && !held.swap(true, SeqCst) {
                    await_or_die("the sleep of the second waiter", || {
                        taken.load(SeqCst) >= all + MORE * SIZE as u64
                    });
                }
            }
        }
    };
    std::thread::scope(|s| {
        s.spawn(waiter);
        s.spawn(waiter);
        await_or_die("two waiters", || waiting.load(SeqCst) == 2);
        std::thread::sleep(Duration::from_millis(2));
        for n in 1..=hold_at + MORE + 4 {
            (&c).write_all(&[7; SIZE]).expect("room for a few bytes");
            await_or_die("an echo that was sent", || {
                taken.load(SeqCst) == n * SIZE as u64
            });
        }
        over.store(true, SeqCst);
        // Level-triggered: both see the end.
        ctl(libc::EPOLL_CTL_MOD, libc::EPOLLIN | libc::EPOLLOUT);
    });
    // SAFETY: ours, and not used any more.
    unsafe { libc::close(set) };
}

/// Waits until there is something to receive, or an end; `Err`: not within the time (ms, -1: for ever).
struct Waiter {
    set: i32,
    fd: i32,
}

impl Waiter {
    fn new(how: &str, c: &TcpStream) -> Self {
        let mut w = Waiter {
            set: -1,
            fd: c.as_raw_fd(),
        };
        if how != "recv" {
            c.set_nonblocking(true).expect("O_NONBLOCK");
        }
        if how == "epoll" {
            // SAFETY: plain system calls; `ev` is valid for the second.
            unsafe {
                w.set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
                let mut ev = libc::epoll_event {
                    events: libc::EPOLLIN as u32,
                    u64: 0,
                };
                assert_eq!(
                    libc::epoll_ctl(w.set, libc::EPOLL_CTL_ADD, w.fd, &mut ev),
                    0
                );
            }
        }
        w
    }

    fn ready(&self, how: &str, ms: i32) -> bool {
        let mut ev = libc::epoll_event { events: 0, u64: 0 };
        let mut p = libc::pollfd {
            fd: self.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: room for the one event, and the one entry.
        let n = unsafe {
            match how {
                "epoll" => libc::epoll_wait(self.set, &mut ev, 1, ms),
                "recv" => 1, // which waits itself
                _ => libc::poll(&mut p, 1, ms),
            }
        };
        assert!(n >= 0);
        n == 1
    }
}

/// Milliseconds of processor time of this thread, and times that it went to sleep.
fn usage() -> (u64, u64) {
    // SAFETY: all-zero is a valid `rusage` and `timespec`; both are valid for the calls.
    unsafe {
        let mut r: libc::rusage = std::mem::zeroed();
        let mut t: libc::timespec = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut r);
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t);
        (
            t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000,
            r.ru_nvcsw as u64,
        )
    }
}

fn idle(how: &str) {
    let l = TcpListener::bind("127.0.0.1:0").expect("bind");
    println!("port {}", l.local_addr().expect("address").port());
    let (mut c, _) = l.accept().expect("accept");
    let w = Waiter::new(how, &c);
    let mut since = None;
    let mut worth = (0, 0, 0, 0);
    let mut b = [0u8; SIZE];
    loop {
        let mut turns = 0;
        while !w.ready(how, -1) {
            turns += 1;
        }
        let n = match c.read(&mut b) {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        if let Some((at, (cpu, switches))) = since.take() {
            let now = usage();
            let wall = Instant::elapsed(&at).as_millis();
            worth = (now.0 - cpu, now.1 - switches, wall, turns);
        }
        if b[0] == IDLE {
            since = Some((Instant::now(), usage()));
        }
        c.write_all(&b[..n]).expect("send");
    }
    let (cpu, switches, wall, turns) = worth;
    println!(
        "result {{\"cpu_ms\":{cpu},\"sleeps\":{switches},\"wall_ms\":{wall},\"vain\":{turns}}}"
    );
}

/// A shim's process that says all the time that there is news, and rings, but has none.
fn storm(ms: u64, port: &str) {
    use lane::abi::{Control, CHUNK_BYTES, CONTROL_BYTES, COUNTERS};
    let c = dial(port);
    promoted(&c);
    let areas: Vec<_> = shared()
        .into_iter()
        .filter(|(_, n, name)| *n == CONTROL_BYTES + CHUNK_BYTES && name.contains("memfd"))
        .collect();
    assert_eq!(areas.len(), 1, "{areas:?}");
    // SAFETY: our area's chunk 0, mapped as long as the link group is there; all its words are atomics.
    let ctl = unsafe { &*(areas[0].0 as *const Control) };
    let bells: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .expect("fd")
        .filter_map(|f| f.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| {
            let get = |name| {
                let (mut v, mut n) = (0i32, 4u32);
                let p = &raw mut v;
                // SAFETY: `v` has the length that the call is told.
                unsafe { libc::getsockopt(*fd, libc::SOL_SOCKET, name, p.cast(), &mut n) };
                v
            };
            get(libc::SO_DOMAIN) == libc::AF_UNIX && get(libc::SO_TYPE) == libc::SOCK_STREAM
        })
        .collect();
    assert!(!bells.is_empty(), "no doorbell");
    ping(&c, IDLE);
    let end = Instant::now() + Duration::from_millis(ms);
    let mut bumps = 0u64;
    while Instant::now() < end {
        for g in 0..COUNTERS {
            ctl.seq[g].0.fetch_add(1, SeqCst);
        }
        for b in &bells {
            // SAFETY: open, as long as the link group is there.
            lane::notify::doorbell::ring(unsafe { std::os::fd::BorrowedFd::borrow_raw(*b) });
        }
        bumps += 1;
    }
    for _ in 0..2000 {
        ping(&c, 2); // as well served as before
    }
    println!("result {{\"bumps\":{bumps}}}");
}

/// Somebody holds the locks of both directions of a lane, and is dead, or does nothing.
fn held(how: &str, who: &str, port: &str) {
    let c = dial(port);
    let conn = promoted(&c);
    let w = Waiter::new(how, &c);
    // SAFETY: the child only sleeps.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        loop {
            // SAFETY: plain system call.
            unsafe { libc::pause() };
        }
    }
    let signal = |s| {
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::kill(pid, s) }, 0);
    };
    // Its end, or for one that does not wait bytes, of which a look needs no lock to tell.
    let bytes = how == "nonblocking";
    let message = [if bytes { 0 } else { CLOSE }; SIZE];
    (&c).write_all(&message).expect("send");
    std::thread::sleep(Duration::from_millis(100));
    for word in [&conn.tx.lock, &conn.rx.lock] {
        assert_eq!(word.swap(pid as u32, SeqCst), 0, "the lock is taken");
    }
    signal(if who == "stopped" {
        libc::SIGSTOP
    } else {
        libc::SIGKILL
    });
    let reap = || {
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    };
    if who == "dead" {
        reap();
    }
    let before = usage();
    if who == "stopped" {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1500));
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
        });
    }
    // SAFETY: a plain system call: SIGALRM ends the program.
    unsafe { libc::alarm(HUNG.as_secs() as u32) };
    let mut b = [0u8; SIZE];
    loop {
        if !w.ready(how, 400) {
            continue;
        }
        match (&c).read(&mut b) {
            Ok(0) if !bytes => break,
            Ok(SIZE) if bytes => break,
            Ok(n) => panic!("{n} bytes"),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => panic!("{e}"),
        }
    }
    let now = usage();
    println!(
        "result {{\"cpu_ms\":{},\"sleeps\":{}}}",
        now.0 - before.0,
        now.1 - before.1
    );
}

/// As an event loop that is client and server at once: whoever holds its thread holds both ends.
fn both(rounds: u64) {
    const ECHOES: u64 = 40;
    let l = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = l.local_addr().expect("address").port().to_string();
    // SAFETY: a plain system call.
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    let add = |s: &TcpStream| {
        s.set_nonblocking(true).expect("O_NONBLOCK");
        let fd = s.as_raw_fd();
        let mut ev = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd as u64,
        };
        // SAFETY: `ev` is valid for the call.
        let r = unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut ev) };
        assert_eq!(r, 0);
    };
    let before = usage();
    for _ in 0..rounds {
        let client = dial(&port);
        add(&client);
        // The other end is not there yet, and will be only if this does not wait for it.
        (&client).write_all(&[7; SIZE]).expect("send");
        let (server, _) = l.accept().expect("accept");
        server.set_nodelay(true).expect("TCP_NODELAY");
        add(&server);
        let (mut got, mut echoes) = (0, 0);
        // (Who gives the lanes has to get its turn.)
        while echoes < ECHOES || entry(&client).is_none() {
            if echoes >= ECHOES {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut evs = [libc::epoll_event { events: 0, u64: 0 }; 2];
            // SAFETY: room for as many events as are asked for.
            let n = unsafe { libc::epoll_wait(set, evs.as_mut_ptr(), 2, HUNG.as_millis() as i32) };
            assert!(n > 0, "nothing ends a wait of both ends");
            for e in &evs[..n as usize] {
                let fd = e.u64 as i32;
                let n = take(fd).max(0) as u64;
                if fd == server.as_raw_fd() && n > 0 {
                    (&server).write_all(&vec![7; n as usize]).expect("send");
                } else {
                    got += n;
                    if n > 0 && got % SIZE as u64 == 0 {
                        echoes += 1;
                        (&client).write_all(&[7; SIZE]).expect("send");
                    }
                }
            }
        }
    }
    let (cpu, _) = usage();
    println!(
        "result {{\"rounds\":{rounds},\"cpu_ms\":{}}}",
        cpu - before.0
    );
}
