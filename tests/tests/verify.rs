//! `underpass run --verify` and `underpass check --pid`: each cause that keeps the library or the daemon
//! away is named, and a program that has both is said to have both.

#[path = "../../daemon/tests/common/skip.rs"]
mod skip;

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use underpass_tests::harness::{paths, until, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

fn underpass(d: &Daemon, words: &[&str]) -> Program {
    Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .args(words)
        .env("UNDERPASS_LIB", paths::shim())
}

/// Runs a command line under `--verify`: exit status, and the report on each process.
fn verify(d: &Daemon, command: &[&str]) -> Result<(i32, Vec<Value>)> {
    let begin = ["run", "--verify", "--json", "--wait", "2"];
    let out = underpass(d, &[&begin, command].concat()).run(LIMIT)?;
    // Programs may have said something before.
    let at = out.stderr.rfind("\n[").map_or(0, |i| i + 1);
    let rows = serde_json::from_str(&out.stderr[at..]).with_context(|| format!("{out:?}"))?;
    Ok((out.status.code().context("status")?, rows))
}

/// The report on the program of this name must be `cause`/`daemon`, and the verdict follow from it.
fn says(d: &Daemon, command: &[&str], name: &str, cause: Option<&str>, daemon: &str) -> Result<()> {
    let (code, rows) = verify(d, command)?;
    let row = rows.iter().find(|r| r["comm"] == name);
    let row = row.with_context(|| format!("{command:?}: no {name} in {rows:#?}"))?;
    let fine = cause.is_none() && matches!(daemon, "connected" | "reachable");
    ensure!(
        row["cause"]["name"].as_str() == cause && row["daemon"] == daemon && row["fine"] == fine,
        "{command:?}: {rows:#?}"
    );
    let all = rows.iter().all(|r| r["fine"] == true);
    ensure!(code == i32::from(!all), "{command:?}: {code} {rows:#?}");
    Ok(())
}

/// A compiled program, in a directory of its own.
fn program(dir: &Path, name: &str, source: &str, compiler: &[&str]) -> Result<PathBuf> {
    let path = dir.join(name);
    let file = dir.join(format!("{name}.c"));
    std::fs::write(&file, source)?;
    let done = Command::new(compiler[0])
        .args(&compiler[1..])
        .arg("-o")
        .arg(&path)
        .arg(&file)
        .status()?;
    ensure!(done.success(), "{compiler:?}");
    Ok(path)
}

const SLEEPER: &str = "#include <unistd.h>\nint main(void) { sleep(1); return 0; }\n";

#[test]
fn what_has_all_it_needs_is_fine() -> Result<()> {
    let d = Daemon::start()?;
    says(&d, &["sleep", "1"], "sleep", None, "reachable")?;
    let serve = paths::script("sockets.py");
    let serve = serve.to_str().context("path")?;
    let python = paths::PYTHON;
    says(
        &d,
        &[python, serve, "echo"],
        "python3.11",
        None,
        "connected",
    )?;
    let t = tempfile::tempdir()?;
    let musl = program(t.path(), "muslsleep", SLEEPER, &["musl-gcc"])?;
    let musl = musl.to_str().context("path")?;
    says(&d, &[musl], "muslsleep", None, "reachable")
}

#[test]
fn what_the_loader_does_not_load_is_named() -> Result<()> {
    let d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    let fixed = program(t.path(), "fixed", SLEEPER, &["gcc", "-static"])?;
    let fixed = fixed.to_str().context("path")?;
    let lib = Some("preload-overwritten");
    for (command, name, cause) in [
        (&[fixed][..], "fixed", Some("static")),
        (
            &["env", "-i", "/bin/sleep", "1"],
            "sleep",
            Some("no-preload"),
        ),
        (&["env", "LD_PRELOAD=libm.so.6", "sleep", "1"], "sleep", lib),
        // The child of a program that is fine itself.
        (
            &["sh", "-c", "env -u LD_PRELOAD sleep 1; true"],
            "sleep",
            Some("no-preload"),
        ),
        // A daemon, whose parent has ended.
        (
            &["sh", "-c", "env -i /bin/sleep 1 &"],
            "sleep",
            Some("no-preload"),
        ),
    ] {
        says(&d, command, name, cause, "-")?;
    }
    says(
        &d,
        &["env", "UNDERPASS=off", "sleep", "1"],
        "sleep",
        Some("off"),
        "-",
    )
}

#[test]
fn root_rights_and_namespaces_are_named() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skip::skip("needs root");
        return Ok(());
    }
    let d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    std::fs::set_permissions(t.path(), std::fs::Permissions::from_mode(0o755))?;
    let sleeper = program(t.path(), "setuid", SLEEPER, &["gcc"])?;
    std::os::unix::fs::chown(&sleeper, Some(65534), Some(65534))?;
    std::fs::set_permissions(&sleeper, std::fs::Permissions::from_mode(0o6755))?;
    let sleeper = sleeper.to_str().context("path")?;
    says(&d, &[sleeper], "setuid", Some("secure"), "-")?;
    let lib = paths::shim();
    let lib = lib.parent().and_then(Path::to_str).context("path")?;
    let absent = format!("mount -t tmpfs none {lib} && exec sleep 1");
    let unshare = ["unshare", "-m", "sh", "-c"];
    let command = [&unshare[..], &[&absent]].concat();
    says(&d, &command, "sleep", Some("library-absent"), "-")?;
    let dir = d.dir().to_str().context("path")?;
    let alone = format!("mount -t tmpfs none {dir} && exec sleep 1");
    let command = [&unshare[..], &[&alone]].concat();
    says(&d, &command, "sleep", None, "absent")?;
    let closed = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(d.dir(), closed)?;
    let nobody = [
        "setpriv",
        "--reuid",
        "65534",
        "--clear-groups",
        "--inh-caps=-all",
    ];
    let command = [&nobody[..], &["sleep", "1"]].concat();
    says(&d, &command, "sleep", None, "forbidden")
}

/// Connections that are refused by a filter of system calls: the library cannot speak to its daemon.
#[test]
fn a_filter_is_named() -> Result<()> {
    const FILTER: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int n, char **v) {
    struct sock_filter f[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog p = { 6, f };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) return 9;
    execv(v[1], v + 1);
    return 8;
}
"#;
    let d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    let filter = program(t.path(), "filter", FILTER, &["gcc"])?;
    let filter = filter.to_str().context("path")?;
    let mut echo = Program::python("sockets.py", &Place::bare())
        .arg("echo")
        .spawn()?;
    let port = echo.line("port ", PATIENCE)?;
    let script = paths::script("sockets.py");
    let script = script.to_str().context("path")?;
    let command = [filter, paths::PYTHON, script, "talk", &port, "1"];
    says(&d, &command, "python3.11", None, "seccomp")
}

/// The same of a program that runs already, and of one whose daemon has gone.
#[test]
fn running_processes_are_looked_at() -> Result<()> {
    let mut d = Daemon::start()?;
    let mut echo = Program::python("sockets.py", &d.place())
        .arg("echo")
        .spawn()?;
    echo.line("ready", PATIENCE)?;
    let check = |d: &Daemon, pid: u32| -> Result<(i32, Vec<Value>)> {
        let out = underpass(d, &["check", "-j", "--pid", &pid.to_string()]).run(LIMIT)?;
        let rows = serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))?;
        Ok((out.status.code().context("status")?, rows))
    };
    let (code, rows) = check(&d, echo.pid())?;
    ensure!(code == 0 && rows.len() == 1, "{code} {rows:#?}");
    ensure!(
        rows[0]["daemon"] == "connected" && rows[0]["fine"] == true,
        "{rows:#?}"
    );
    let library = rows[0]["library"].as_str().context("library")?;
    ensure!(library.ends_with("libunderpass.so"), "{library}");
    let bare = Program::python("sockets.py", &Place::bare())
        .arg("echo")
        .spawn()?;
    let mut seen = String::new();
    until("the bare program runs", PATIENCE, || {
        let r = check(&d, bare.pid());
        seen = format!("{r:?}");
        r.is_ok_and(|(code, rows)| code == 1 && rows[0]["cause"]["name"] == "no-preload")
    })
    .context(seen)?;
    d.kill();
    let (code, rows) = check(&d, echo.pid())?;
    ensure!(
        code == 1 && rows[0]["daemon"] == "silent",
        "{code} {rows:#?}"
    );
    let out = underpass(&d, &["check", "--pid", "4194305"]).run(LIMIT)?;
    ensure!(out.status.code() == Some(2), "{out:?}");
    Ok(())
}

/// What is no program that could carry the library is called what it is.
#[test]
fn what_is_no_process_is_named() -> Result<()> {
    let d = Daemon::start()?;
    let check = |pid: &str| underpass(&d, &["check", "-j", "--pid", pid]).run(LIMIT);
    let out = check(&std::process::id().to_string())?;
    ensure!(out.status.code() == Some(1), "{out:?}");
    // This test runs in a thread of its own.
    let me = std::process::id();
    let thread = nix::unistd::gettid().to_string();
    ensure!(thread != me.to_string());
    let out = check(&thread)?;
    let said = format!("{thread} is no process, but a thread of process {me}");
    ensure!(
        out.status.code() == Some(2) && out.stderr.contains(&said),
        "{out:?}"
    );
    let mut child = Command::new("true").spawn()?;
    let pid = child.id();
    until("it has ended", PATIENCE, || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(") Z ")
    })?;
    let out = check(&pid.to_string())?;
    ensure!(
        out.status.code() == Some(2) && out.stderr.contains("has ended"),
        "{out:?}"
    );
    child.wait()?;
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|c| c == "kthreadd\n") {
        let out = check("2")?;
        let rows: Vec<Value> = serde_json::from_str(&out.stdout)?;
        let named = rows.iter().all(|r| r["cause"]["name"] == "kernel-thread");
        ensure!(out.status.code() == Some(1) && named, "{out:?}");
    }
    Ok(())
}

/// Nothing is said to be fine that nobody has seen.
#[test]
fn what_ends_at_once_is_not_judged() -> Result<()> {
    let d = Daemon::start()?;
    until("it was too short for a look", PATIENCE, || {
        let found = verify(&d, &["true"]);
        matches!(found, Ok((2, rows)) if rows.is_empty())
    })
}

/// A program for 32 bits, with a loader of its own (the system may have none).
#[test]
fn another_architecture_is_named() -> Result<()> {
    const SOURCE: &str = r#"
static int call(int n, void *a) { int r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(n), "b"(a), "c"(0) : "memory"); return r; }
void _start(void) { int second[2] = {1, 0}; call(162, second); for (;;) call(1, 0); }
"#;
    let d = Daemon::start()?;
    let t = tempfile::tempdir()?;
    let plain = ["gcc", "-m32", "-nostdlib", "-fno-stack-protector"];
    let loader = program(
        t.path(),
        "loader",
        SOURCE,
        &[&plain[..], &["-static-pie"]].concat(),
    )?;
    let named = format!("-Wl,--dynamic-linker={}", loader.display());
    let small = program(
        t.path(),
        "small",
        SOURCE,
        &[&plain[..], &["-pie", &named]].concat(),
    )?;
    for (program, cause) in [(&small, "architecture"), (&loader, "static")] {
        let name = program.file_name().and_then(|n| n.to_str());
        let path = program.to_str().context("path")?;
        says(&d, &[path], name.context("name")?, Some(cause), "-")?;
    }
    Ok(())
}
