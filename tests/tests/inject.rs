//! System calls of the shim fail, each kind with each error, now and then: the programs see every byte, no
//! error, and no end before its time.

use anyhow::{ensure, Context, Result};
use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_tests::harness::{paths, Daemon, Place, Program};

/// Only against hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// A short count, for calls that move bytes.
const SHORT: i32 = 0;

/// Calls that the shim makes by itself, and what goes wrong with them: the errors that section ERRORS of their
/// manual pages has, as far as a program that made the call itself would not see them as well (the latter are
/// passed on), and EINTR, which seccomp's supervisors answer to any call. (epoll_ctl: only ADD needs memory.
/// recvmsg: the daemon's words. Of TCP, EAGAIN is an answer, not an error: "nothing is there" of a connection that
/// has bytes costs a program that waits for edges that edge.)
const CALLS: &[(&str, i64, &[i32])] = {
    use libc::*;
    &[
        ("read", SYS_read, &[SHORT, EINTR, EAGAIN]),
        ("write", SYS_write, &[EINTR, EAGAIN]),
        ("close", SYS_close, &[EINTR, EIO]),
        ("fstat", SYS_fstat, &[EINTR, ENOMEM]),
        ("lseek", SYS_lseek, &[EINTR]),
        ("mmap", SYS_mmap, &[EINTR, EAGAIN, ENOMEM]),
        ("munmap", SYS_munmap, &[EINTR, ENOMEM]),
        ("rt_sigprocmask", SYS_rt_sigprocmask, &[EINTR]),
        ("ioctl", SYS_ioctl, &[EINTR]),
        ("pread64", SYS_pread64, &[SHORT, EINTR, EIO]),
        ("sched_yield", SYS_sched_yield, &[EINTR]),
        ("madvise", SYS_madvise, &[EINTR, EAGAIN, ENOMEM]),
        ("socket", SYS_socket, &[EINTR, EMFILE, ENOMEM]),
        ("connect", SYS_connect, &[EINTR, EAGAIN]),
        ("sendto", SYS_sendto, &[SHORT, EINTR]),
        ("recvfrom", SYS_recvfrom, &[SHORT, EINTR]),
        ("sendmsg", SYS_sendmsg, &[EINTR, EAGAIN]),
        ("recvmsg", SYS_recvmsg, &[EINTR, EAGAIN, ENOMEM]),
        ("socketpair", SYS_socketpair, &[EINTR, EMFILE, ENOMEM]),
        ("setsockopt", SYS_setsockopt, &[EINTR, ENOMEM]),
        ("getsockname", SYS_getsockname, &[EINTR, ENOMEM]),
        ("getpeername", SYS_getpeername, &[EINTR, ENOMEM]),
        ("getsockopt", SYS_getsockopt, &[EINTR, ENOMEM]),
        ("fcntl", SYS_fcntl, &[EINTR, EAGAIN, EMFILE]),
        ("ftruncate", SYS_ftruncate, &[EINTR]),
        ("futex", SYS_futex, &[EINTR, EAGAIN]),
        ("epoll_ctl", SYS_epoll_ctl, &[EINTR, ENOMEM, ENOSPC]),
        ("newfstatat", SYS_newfstatat, &[EINTR, ENOMEM]),
        ("ppoll", SYS_ppoll, &[EINTR, ENOMEM]),
        ("epoll_pwait", SYS_epoll_pwait, &[EINTR]),
        ("eventfd2", SYS_eventfd2, &[EINTR, EMFILE, ENOMEM]),
        ("epoll_create1", SYS_epoll_create1, &[EINTR, EMFILE, ENOMEM]),
        ("prlimit64", SYS_prlimit64, &[EINTR]),
        ("memfd_create", SYS_memfd_create, &[EINTR, EMFILE, ENOMEM]),
        ("pidfd_open", SYS_pidfd_open, &[EINTR, EMFILE, ENOMEM]),
    ]
};

/// Calls of the shim that are let alone, and why.
const OTHERS: &[(i64, &str)] = {
    use libc::*;
    &[
        (SYS_mprotect, "is the application's own"),
        (SYS_mremap, "is the application's own"),
        (SYS_pkey_mprotect, "is the application's own"),
        (SYS_shmdt, "is the application's own"),
        (SYS_pselect6, "is made where ppoll is refused, for a limit"),
        (SYS_exit_group, "has no error"),
        (SYS_getpid, "has no error"),
        (SYS_getppid, "has no error"),
        (SYS_gettid, "has no error"),
        (
            SYS_kill,
            "only asks whether a process lives, or is the application's SIGPIPE",
        ),
        (
            SYS_tgkill,
            "passes on a signal of the application's, which cannot come otherwise",
        ),
        (SYS_rt_tgsigqueueinfo, "the same"),
        (
            SYS_unshare,
            "only asks whether this is the one thread, where /proc does not tell",
        ),
        (
            SYS_rt_sigaction,
            "is the application's own, and asks about its handlers at the start",
        ),
        (
            SYS_shutdown,
            "ends a connection: there is no other way to say that",
        ),
    ]
};

/// How far before a system call its number is looked for, in instructions.
const BEFORE: usize = 100;

/// The numbers of all system calls in the shim's code: each is loaded into `eax` right before it.
fn made() -> Result<BTreeSet<i64>> {
    let text = Program::new("objdump", &Place::bare())
        .args(["-d", "--no-show-raw-insn"])
        .arg(paths::shim())
        .check(LIMIT)?;
    let (mut all, mut function) = (BTreeSet::new(), "");
    let mut before: VecDeque<&str> = VecDeque::new();
    for line in text.lines() {
        let Some((_, instruction)) = line.split_once(":\t") else {
            function = line;
            before.clear();
            continue;
        };
        let instruction = instruction.trim();
        if instruction.starts_with("syscall") {
            let found = before.iter().rev().find_map(|i| loads(i));
            let number = found.flatten();
            all.insert(number.with_context(|| format!("a call with what number? {function}"))?);
        }
        before.push_back(instruction);
        if before.len() > BEFORE {
            before.pop_front();
        }
    }
    Ok(all)
}

/// Does this set `eax`, and to which constant?
fn loads(instruction: &str) -> Option<Option<i64>> {
    let (what, to) = instruction.rsplit_once(',')?;
    if !["%eax", "%rax"].contains(&to) || what.starts_with("cmp") || what.starts_with("test") {
        return None;
    }
    let (name, from) = what.split_once(char::is_whitespace)?;
    let from = from.trim();
    let constant = || i64::from_str_radix(from.strip_prefix("$0x")?, 16).ok();
    Some(match name {
        "xor" if from == to => Some(0),
        "mov" => constant(),
        _ => None,
    })
}

/// A call that the shim makes since yesterday is tested, or it is said why not.
#[test]
fn every_call_is_in_the_list() -> Result<()> {
    let made = made()?;
    ensure!(made.len() > 20, "{made:?}");
    let tested = CALLS.iter().map(|c| c.1);
    let known: BTreeSet<i64> = tested.chain(OTHERS.iter().map(|c| c.0)).collect();
    let (new, gone) = (&made - &known, &known - &made);
    ensure!(
        new.is_empty() && gone.is_empty(),
        "not in CALLS or OTHERS: {new:?}; in them, and no longer made: {gone:?}"
    );
    Ok(())
}

/// What one run saw of the calls: how many, and how many failed.
fn run(d: &Daemon, library: &Path, spec: &str, dir: &Path, eager: bool) -> Result<(u64, u64)> {
    let log = dir.join("log");
    let _ = std::fs::remove_file(&log);
    let place: Place = if eager { d.eager() } else { d.place() };
    let both = format!("{} {}", paths::shim().display(), library.display());
    let said = Program::python("inject.py", &place)
        .env("LD_PRELOAD", both)
        .env("INJECT", spec)
        .env("INJECT_LOG", &log)
        .check(LIMIT)?;
    ensure!(said.starts_with("whole "), "{said}");
    let mut sum = (0, 0);
    for l in std::fs::read_to_string(&log).unwrap_or_default().lines() {
        let mut n = l.split(' ').map(|n| n.parse::<u64>().unwrap_or(0));
        sum.0 += n.next().unwrap_or(0);
        sum.1 += n.next().unwrap_or(0);
    }
    Ok(sum)
}

fn library(dir: &Path) -> Result<PathBuf> {
    let out = dir.join("inject.so");
    Program::new("cc", &Place::bare())
        .words("-O1 -Wall -Wextra -Werror -shared -fPIC -o")
        .arg(&out)
        .arg(paths::script("inject.c"))
        .check(LIMIT)?;
    Ok(out)
}

/// `UNDERPASS_INJECT_ALL`: at every rate and in both modes; else each pair once.
#[test]
fn every_call_with_every_error() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let library = library(dir.path())?;
    let d = Daemon::start()?;
    let all = std::env::var_os("UNDERPASS_INJECT_ALL").is_some();
    let only = std::env::var("UNDERPASS_INJECT_ONLY").unwrap_or_default();
    let (mut failed, mut seen, mut injected) = (vec![], 0, 0);
    let mut never = vec![];
    for (k, (call, number, errors)) in CALLS.iter().enumerate() {
        let mut calls = 0;
        for (e, errno) in errors.iter().enumerate() {
            let name = match *errno {
                SHORT => format!("{call}, a short count"),
                e => format!("{call} {:?}", nix::errno::Errno::from_raw(e)),
            };
            if !name.contains(&only) {
                continue;
            }
            for (turn, (every, eager)) in [(3, true), (3, false), (1, true), (40, false)]
                .into_iter()
                .enumerate()
            {
                // (Nothing is interrupted for ever.)
                if !all && turn != (k + e) % 2 || every == 1 && *errno == libc::EINTR {
                    continue;
                }
                let spec = format!("{number} {errno} {every} {}", k * 8 + e);
                match run(&d, &library, &spec, dir.path(), eager) {
                    Ok((s, i)) => {
                        calls += s;
                        seen += s;
                        injected += i;
                    }
                    Err(e) => failed.push(format!("{name}, one in {every}, eager {eager}: {e:#}")),
                }
            }
        }
        if calls == 0 && only.is_empty() {
            never.push(*call);
        }
    }
    println!("{seen} calls, {injected} of them failed by us; never made: {never:?}");
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    ensure!(
        injected > 1000 || !only.is_empty(),
        "only {injected} failed"
    );
    d.assert_promoted(20, 1 << 20)
        .context("promoted meanwhile")?;
    Ok(())
}
