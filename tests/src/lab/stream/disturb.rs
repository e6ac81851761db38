//! What else a program does while its streams run: children of every kind, and spare connections that a
//! signal handler closes, or another program inherits. Nothing of it may change a byte of the streams.

use super::flow::Random;
use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::sync::Arc;
use std::time::Duration;

/// How often each kind of disturbance happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbed {
    pub spawns: u64,
    pub systems: u64,
    pub forks: u64,
    pub handler_closes: u64,
    /// Connections that went on in a program that was started with them.
    #[serde(default)]
    pub inherited: u64,
}

/// Descriptor that the next signal closes; -1: none. SeqCst throughout: on no fast path.
static SPARE: AtomicI32 = AtomicI32::new(-1);

/// Bytes that a spare connection carries each way before it is closed: enough to be promoted.
const SPARE_ROUNDS: u64 = 24;
const SPARE_PIECE: usize = 8 << 10;
/// Fits into every buffer: its sender never waits.
const SMALL_PIECE: usize = 1 << 10;

extern "C" fn close_spare(_: i32) {
    let fd = SPARE.swap(-1, SeqCst);
    if fd >= 0 {
        // SAFETY: close is async-signal-safe, and the descriptor was handed over for this.
        unsafe { libc::close(fd) };
    }
}

/// Disturbs until told to stop; the first thing that went wrong, or the counts.
pub fn run(seed: u64, stop: &AtomicBool) -> Result<Disturbed> {
    let mut random = Random::new(seed, u32::MAX);
    let mut done = Disturbed::default();
    install()?;
    while !stop.load(SeqCst) {
        match random.below(6) {
            0 => {
                ensure!(Command::new("/bin/true").status()?.success(), "spawn");
                done.spawns += 1;
            }
            1 => {
                // SAFETY: a constant, NUL-terminated command.
                ensure!(unsafe { libc::system(c"true".as_ptr()) } == 0, "system");
                done.systems += 1;
            }
            2 => {
                fork_and_end(random.below(2) == 0)?;
                done.forks += 1;
            }
            3 => {
                inherited(&mut random).context("inherited connection")?;
                done.inherited += 1;
            }
            _ => {
                spare(&mut random).context("spare connection")?;
                done.handler_closes += 1;
            }
        }
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
    }
    Ok(done)
}

fn install() -> Result<()> {
    use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};
    let action = SigAction::new(
        SigHandler::Handler(close_spare),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler makes one async-signal-safe call.
    unsafe { sigaction(Signal::SIGUSR1, &action) }?;
    Ok(())
}

/// A child that ends at once, or a little later, without a word about what it has inherited.
fn fork_and_end(at_once: bool) -> Result<()> {
    // SAFETY: the child only sleeps and ends.
    let pid = unsafe { libc::fork() };
    ensure!(pid >= 0, "fork");
    if pid == 0 {
        // SAFETY: async-signal-safe calls.
        unsafe {
            if !at_once {
                libc::usleep(3000);
            }
            libc::_exit(0)
        }
    }
    let mut status = 0;
    // SAFETY: our own child, whose status goes into a local word.
    while unsafe { libc::waitpid(pid, &mut status, 0) } < 0 {
        let e = std::io::Error::last_os_error();
        ensure!(e.raw_os_error() == Some(libc::EINTR), "waitpid: {e}");
    }
    ensure!(status == 0, "the child's status is {status}");
    Ok(())
}

/// A connection of this process to itself; a handler that interrupts some other thread closes one end.
/// The other end sees what was sent, and then the end.
fn spare(random: &mut Random) -> Result<()> {
    let (a, b) = connection()?;
    let echo = std::thread::spawn(move || -> std::io::Result<u64> {
        let mut piece = [0; SPARE_PIECE];
        let mut total = 0;
        loop {
            match (&b).read(&mut piece) {
                Ok(0) => return Ok(total),
                Ok(n) => {
                    total += n as u64;
                    (&b).write_all(&piece[..n])?;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    });
    let sent = there_and_back(&a, random)?;
    let fd = a.into_raw_fd();
    SPARE.store(fd, SeqCst);
    interrupt_somebody(random, fd)?;
    match echo.join() {
        Ok(Ok(n)) if n == sent => Ok(()),
        Ok(other) => bail!("{sent} bytes were sent, and the other end saw {other:?}"),
        Err(_) => bail!("a thread has panicked"),
    }
}

fn connection() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let a = TcpStream::connect(listener.local_addr()?)?;
    Ok((a, listener.accept()?.0))
}

/// Pieces to somebody who sends them back; how many bytes.
fn there_and_back(mut a: &TcpStream, random: &mut Random) -> Result<u64> {
    let (mut sent, mut back) = (0, [0; SPARE_PIECE]);
    for round in 0..SPARE_ROUNDS {
        let piece = [round as u8; SPARE_PIECE];
        let n = 1 + random.below(SPARE_PIECE as u64) as usize;
        a.write_all(&piece[..n])?;
        a.read_exact(&mut back[..n])?;
        ensure!(back[..n] == piece[..n], "round {round} came back changed");
        sent += n as u64;
    }
    Ok(sent)
}

/// A connection that was used here, in both directions, and then is another program's standard input
/// and output: under the shim or not, by posix_spawn or by fork and exec.
fn inherited(random: &mut Random) -> Result<()> {
    let (mut a, mut b) = connection()?;
    let mut piece = [7; SMALL_PIECE];
    for _ in 0..SPARE_ROUNDS {
        a.write_all(&piece)?;
        b.read_exact(&mut piece)?;
        b.write_all(&piece)?;
        a.read_exact(&mut piece)?;
    }
    // Sent before, and for the other program to read.
    let early = random.below(2) == 0;
    if early {
        a.write_all(&piece)?;
    }
    let mut cat = Command::new("/bin/cat");
    cat.stdin(OwnedFd::from(b.try_clone()?))
        .stdout(OwnedFd::from(b));
    if random.below(2) == 0 {
        cat.env_remove("LD_PRELOAD");
    }
    if random.below(2) == 0 {
        // SAFETY: it does nothing; with it the child is made by fork and exec.
        unsafe { cat.pre_exec(|| Ok(())) };
    }
    let mut child = cat.spawn()?;
    drop(cat); // and its copies of our end
    if early {
        let mut back = [0; SMALL_PIECE];
        a.read_exact(&mut back)?;
        ensure!(back == piece, "what was sent before came back changed");
    }
    there_and_back(&a, random)?;
    a.shutdown(Shutdown::Write)?;
    let rest = a.read(&mut piece)?;
    ensure!(rest == 0, "{rest} bytes too many");
    let status = child.wait()?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Sends the signal to a thread of this process, until one has taken it.
fn interrupt_somebody(random: &mut Random, fd: RawFd) -> Result<()> {
    while SPARE.load(SeqCst) == fd {
        let tasks: Vec<i32> = std::fs::read_dir("/proc/self/task")?
            .filter_map(|t| t.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        let tid = tasks[random.below(tasks.len() as u64) as usize];
        // SAFETY: a signal to a thread of our own process, for which a handler is installed.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) };
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Runs it beside the streams, for as long as the guard lives.
pub struct Beside {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<Disturbed>>,
}

impl Beside {
    pub fn start(seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        Beside {
            stop,
            thread: std::thread::spawn(move || run(seed, &told)),
        }
    }

    pub fn finish(self) -> Result<Disturbed> {
        self.stop.store(true, SeqCst);
        match self.thread.join() {
            Ok(r) => r,
            Err(_) => bail!("the disturbing thread has panicked"),
        }
    }
}
