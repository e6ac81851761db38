//! One shared object for every image: what it needs from the system, and that it loads.
//!
//! A missing dependency or symbol version of a preload kills every program in the container, so
//! this is checked on the very file that `make build` installs.

use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use underpass_tests::harness::{paths, until, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(30);

/// What a container's programs load, and the probe that the tool for containers carries.
fn both() -> [PathBuf; 2] {
    [
        paths::shim(),
        paths::shim().with_file_name("underpass-probe"),
    ]
}

fn tool(name: &str, args: &[&str]) -> Result<String> {
    tool_on(name, args, &paths::shim())
}

fn tool_on(name: &str, args: &[&str], file: &Path) -> Result<String> {
    let out = Command::new(name)
        .args(args)
        .arg(file)
        .output()
        .with_context(|| name.to_string())?;
    ensure!(
        out.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(String::from_utf8(out.stdout)?)
}

#[test]
fn needs_only_the_c_library() -> Result<()> {
    for file in both() {
        let text = tool_on("readelf", &["-Wd"], &file)?;
        let needed: Vec<&str> = text
            .lines()
            .filter(|l| l.contains("(NEEDED)"))
            .filter_map(|l| l.split(['[', ']']).nth(1))
            .collect();
        ensure!(!needed.is_empty(), "no dependencies at all?\n{text}");
        for n in needed {
            // musl's libc answers to this name. An image need not have the other parts of glibc.
            ensure!(n == "libc.so.6", "{}: needs {n}", file.display());
        }
    }
    Ok(())
}

/// It is started as the tool for containers starts it, and has a lane.
#[test]
fn the_probe_runs_under_musl_and_an_old_glibc() -> Result<()> {
    let [_, probe] = both();
    let old = paths::target().join(OLD);
    // An image need not have more of it.
    let alone = tempfile::tempdir()?;
    std::fs::copy(old.join("libc.so.6"), alone.path().join("libc.so.6"))?;
    let d = Daemon::start()?;
    let mut server = Program::new(paths::bin("underpass"), &Place::bare())
        .words("check --serve 127.0.0.1:0 --dir")
        .arg(d.dir())
        .env("UNDERPASS_LIB", paths::shim())
        .spawn()?;
    let port = server.line("listening on 127.0.0.1:", LIMIT)?;
    let under_old = vec![
        old.join("ld-2.31.so"),
        "--inhibit-cache".into(),
        "--library-path".into(),
        alone.path().to_owned(),
    ];
    // (Up to 2.33 glibc finds names by libraries of its own, which are not there.)
    let musl = vec!["/lib/ld-musl-x86_64.so.1".into()];
    for (loader, host) in [(musl, "localhost"), (under_old, "127.0.0.1")] {
        // Of the bytes of a test, how many has the kernel's TCP carried? The first tests promote the connection.
        let on_lane = || -> Result<bool> {
            let said = Program::new(&loader[0], &d.eager())
                .args(&loader[1..])
                .arg(&probe)
                .args(["measure", host, &port, "lane"])
                .stdin(b"ping 500\nup 50 65536\ndown 50 65536\nup 50 65536\n")
                .check(LIMIT)
                .with_context(|| format!("{loader:?}"))?;
            let words = said.lines().last().unwrap_or_default().split(' ');
            let numbers: Vec<u64> = words.filter_map(|w| w.parse().ok()).collect();
            ensure!(numbers.len() == 4, "{said}");
            Ok(numbers[3] < numbers[2] / 50)
        };
        let mut seen = on_lane();
        until("the probe has a lane", LIMIT, || {
            if matches!(seen, Ok(false)) {
                seen = on_lane();
            }
            !matches!(seen, Ok(false))
        })?;
        seen?;
    }
    Ok(())
}

#[test]
fn needs_no_newer_glibc_than_2_17() -> Result<()> {
    for file in both() {
        let text = tool_on("objdump", &["-T"], &file)?;
        let versions = text
            .split(['(', ')', ' '])
            .filter_map(|w| w.strip_prefix("GLIBC_"));
        let mut seen = 0;
        for v in versions {
            let parts: Vec<u32> = v.split('.').map_while(|n| n.parse().ok()).collect();
            ensure!(parts.as_slice() <= [2, 17].as_slice(), "needs GLIBC_{v}");
            seen += 1;
        }
        ensure!(seen > 0, "no versions found");
        ensure!(!text.contains("GCC_"), "needs libgcc_s");
    }
    Ok(())
}

/// Every call that the issue names is exported, so that none passes by unseen.
#[test]
fn exports_its_hooks() -> Result<()> {
    let text = tool("readelf", &["-W", "--dyn-syms"])?;
    let mut exported = std::collections::HashSet::new();
    for l in text.lines() {
        let f: Vec<&str> = l.split_whitespace().collect();
        if f.len() >= 8 && f[3] == "FUNC" && f[6] != "UND" {
            exported.insert(f[7].split('@').next().unwrap_or(f[7]).to_string());
        }
    }
    let wanted = "socket connect accept accept4 send sendto sendmsg sendmmsg recv recvfrom recvmsg recvmmsg \
        read write readv writev sendfile sendfile64 splice close close_range shutdown dup dup2 dup3 \
        fcntl fcntl64 ioctl sockatmark getsockopt setsockopt poll ppoll select pselect epoll_create epoll_create1 epoll_ctl \
        epoll_wait epoll_pwait fork execve posix_spawn posix_spawnp pidfd_spawn pidfd_spawnp \
        system popen fdopen syscall";
    let missing: Vec<&str> = wanted
        .split_whitespace()
        .filter(|w| !exported.contains(*w))
        .collect();
    ensure!(missing.is_empty(), "not hooked: {missing:?}");
    Ok(())
}

/// A C program that opens a connection to itself and sends something over it.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(l, (void *)&a, sizeof a) || listen(l, 1) || getsockname(l, (void *)&a, &n)) return 1;
    int c = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c, (void *)&a, sizeof a)) return 2;
    int s = accept(l, 0, 0);
    char b[64];
    for (int i = 0; i < 2000; i++) {
        if (write(c, "across and under", 16) != 16) return 3;
        if (recv(s, b, 16, MSG_WAITALL) != 16 || memcmp(b, "across and under", 16)) return 4;
        if (send(s, b, 16, 0) != 16 || read(c, b, 64) != 16) return 5;
    }
    shutdown(c, SHUT_WR);
    if (read(s, b, 64) != 0) return 6;
    /* By number, whether or not the C library has functions for them. */
    if (dup2(s, 50) != 50 || syscall(SYS_close_range, 50, 60, 0) || write(50, "x", 1) != -1) return 7;
    if (syscall(SYS_execveat, AT_FDCWD, "/no/such", 0, 0, 0) != -1 || errno != ENOENT) return 8;
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int loaded = 0;
    while (maps && fgets(line, sizeof line, maps)) loaded |= strstr(line, "libunderpass.so") != 0;
    puts(loaded ? "loaded" : "not loaded");
    return 0;
}
"#;

/// Where Debian 11's C library lies, unpacked: up to 2.33 glibc has `dlsym` in a library of its own.
const OLD: &str = "glibc2.31/lib/x86_64-linux-gnu";

/// An image with an old glibc whose program needs nothing but libc.so.6 need not have libpthread.so.0 and libdl.so.2.
#[test]
fn loads_under_a_part_of_an_old_glibc() -> Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("p.c"), PROGRAM)?;
    let libraries = ["libc.so.6", "libpthread.so.0", "libdl.so.2"];
    for (name, has, links) in [
        ("alone", &libraries[..1], &[][..]),
        ("whole", &libraries[..], &[][..]),
        (
            "linked",
            &libraries[..],
            &["-Wl,--no-as-needed", "-lpthread", "-ldl"][..],
        ),
    ] {
        let root = dir.path().join(name);
        std::fs::create_dir(&root)?;
        for library in has {
            std::fs::copy(paths::target().join(OLD).join(library), root.join(library))?;
        }
        let program = root.join("p");
        let out = Command::new(paths::target().join("venv/bin/python"))
            .args([
                "-m",
                "ziglang",
                "cc",
                "-target",
                "x86_64-linux-gnu.2.17",
                "-O1",
                "-o",
            ])
            .arg(&program)
            .arg(dir.path().join("p.c"))
            .args(links)
            .output()
            .context("zig")?;
        ensure!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
        let d = Daemon::start()?;
        for (place, loaded) in [
            (Place::bare(), "not loaded"),
            (Place::shim(Path::new("/nowhere")), "loaded"),
            (d.eager(), "loaded"),
        ] {
            // The kernel would take this system's dynamic linker.
            let said = Program::new(paths::target().join(OLD).join("ld-2.31.so"), &place)
                .args(["--inhibit-cache", "--library-path"])
                .arg(&root)
                .arg(&program)
                .check(LIMIT)
                .with_context(|| format!("{name}, {place:?}"))?;
            ensure!(said.trim() == loaded, "{name}, {place:?}: {said}");
        }
        d.assert_promoted(2, 1000).context(name)?;
    }
    Ok(())
}

/// Functions that a program exports under the names of the C library's, and that call the next ones, as
/// Erlang's machine has one for `sigaction`.
const NAMESAKES: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <sys/uio.h>
#define NEXT(result, name, parameters, arguments)                    \
    result name parameters {                                         \
        static result (*next) parameters;                            \
        if (!next) next = (result (*) parameters)dlsym(RTLD_NEXT, #name); \
        return next arguments;                                       \
    }
struct sigaction;
NEXT(int, __sigaction, (int n, const struct sigaction *a, struct sigaction *o), (n, a, o))
int sigaction(int n, const struct sigaction *a, struct sigaction *o) { return __sigaction(n, a, o); }
NEXT(int, close, (int fd), (fd))
NEXT(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
NEXT(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
NEXT(ssize_t, readv, (int fd, const struct iovec *v, int n), (fd, v, n))
NEXT(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
static void handler(int n) { (void)n; }
__attribute__((constructor)) static void begin(void) {
    struct sigaction a = {.sa_handler = handler};
    sigaction(SIGUSR1, &a, NULL);
    raise(SIGUSR1);
}
"#;

fn compiled_with(compiler: &str, args: &[&str], more: &str) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let source = dir.path().join("p.c");
    let program = dir.path().join("p");
    std::fs::write(&source, format!("{more}{PROGRAM}"))?;
    let out = Command::new(compiler)
        .args(args)
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .output()
        .context("compiler")?;
    ensure!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let bare = Program::new(&program, &Place::bare()).check(LIMIT)?;
    ensure!(bare.trim() == "not loaded", "{bare}");
    let d = Daemon::start()?;
    for place in [
        Place::shim(Path::new("/nowhere")),
        d.place(),
        d.eager(),
        d.place().off(),
    ] {
        let said = Program::new(&program, &place)
            .check(LIMIT)
            .with_context(|| format!("{place:?}"))?;
        ensure!(said.trim() == "loaded", "{place:?}: {said}");
    }
    d.assert_promoted(2, 1000)?;
    Ok(())
}

#[test]
fn loads_under_glibc() -> Result<()> {
    compiled_with("cc", &["-O1"], "")
}

#[test]
fn loads_under_musl() -> Result<()> {
    compiled_with("musl-gcc", &["-O1"], "")
}

#[test]
fn programs_may_export_the_same_names() -> Result<()> {
    compiled_with(
        "cc",
        &["-O1", "-fno-builtin", "-rdynamic", "-ldl"],
        NAMESAKES,
    )
}

/// Inside the library its own names mean its own functions, whatever the program exports.
#[test]
fn calls_itself_directly() -> Result<()> {
    let name = |l: &str, at: usize| -> Option<String> {
        let word = l.split_whitespace().nth(at)?;
        Some(word.split('@').next()?.to_owned())
    };
    let symbols = tool("readelf", &["-W", "--dyn-syms"])?;
    let own: std::collections::HashSet<String> = symbols
        .lines()
        .filter(|l| l.contains(" FUNC ") && !l.contains(" UND "))
        .filter_map(|l| name(l, 7))
        .collect();
    ensure!(own.contains("sigaction"), "{symbols}");
    let relocations = tool("readelf", &["-Wr"])?;
    let asked: Vec<String> = relocations
        .lines()
        .filter_map(|l| name(l, 4))
        .filter(|n| own.contains(n))
        .collect();
    ensure!(asked.is_empty(), "looked up outside: {asked:?}");
    Ok(())
}

/// Nothing is printed, nothing is left open where programs look.
#[test]
fn is_silent() -> Result<()> {
    let d = Daemon::start()?;
    let low = |place: &Place| -> Result<Vec<i32>> {
        let out = Program::new("/bin/sh", place)
            .args(["-c", "ls /proc/self/fd; true"])
            .run(LIMIT)?;
        ensure!(out.stderr.is_empty(), "stderr: {}", out.stderr);
        let fds = out.stdout.split_whitespace().filter_map(|n| n.parse().ok());
        Ok(fds.filter(|&n| n < 100).collect())
    };
    let bare = low(&Place::bare())?;
    for place in [d.eager(), Place::shim(Path::new("/nowhere")).eager()] {
        ensure!(
            low(&place)? == bare,
            "{place:?}: {:?}, bare {bare:?}",
            low(&place)?
        );
    }
    Ok(())
}
