//! `underpass run`: the environment it gives, its exit statuses, and how it starts a daemon. The
//! daemon is a stand-in: a script that runs [`stand_in`] in this very test program.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use support::{harmless_library, text, tool, TOOL};
use underpass_admin::{Request, Response, ADMIN_SOCK};

/// An installation of its own: the tool, a stand-in daemon beside it, a runtime directory.
struct Install {
    root: tempfile::TempDir,
}

impl Install {
    fn new() -> Self {
        let i = Install {
            root: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(i.path("bin")).unwrap();
        copy(TOOL.as_ref(), &i.path("bin/underpass"));
        let me = std::env::current_exe().unwrap();
        i.daemon(&format!(
            "env > '{root}/daemon.env'\necho \"$@\" > '{root}/daemon.args'\n\
             ls -l /proc/$$/fd > '{root}/daemon.fds'\necho $$ >> '{root}/daemon.pids'\n\
             STAND_IN=1 exec '{me}' --exact stand_in --nocapture",
            root = i.root.path().display(),
            me = me.display()
        ));
        i
    }

    fn path(&self, p: &str) -> PathBuf {
        self.root.path().join(p)
    }

    fn read(&self, p: &str) -> String {
        fs::read_to_string(self.path(p)).unwrap_or_default()
    }

    /// Installs a script as underpassd.
    fn daemon(&self, script: &str) {
        fs::write(self.path("script"), format!("#!/bin/sh\n{script}\n")).unwrap();
        copy(&self.path("script"), &self.path("bin/underpassd"));
    }

    fn tool(&self, args: &[&str]) -> Command {
        let mut c = Command::new(self.path("bin/underpass"));
        for v in ["UNDERPASS", "LD_PRELOAD", "XDG_RUNTIME_DIR"] {
            c.env_remove(v);
        }
        c.env("UNDERPASS_LIB", harmless_library())
            .env("UNDERPASS_DIR", self.path("rt"))
            .args(args);
        c
    }

    fn run(&self, args: &[&str]) -> Output {
        self.tool(&[&["run"], args].concat()).output().unwrap()
    }

    fn pids(&self) -> Vec<i32> {
        self.read("daemon.pids")
            .lines()
            .map(|l| l.parse().unwrap())
            .collect()
    }
}

/// Installs a program. By another process: a descriptor open for writing here, inherited by what
/// another test's thread starts at that moment, would make it "text file busy".
fn copy(from: &Path, to: &Path) {
    let done = Command::new("install")
        .args(["-m", "755"])
        .args([from, to])
        .status();
    assert!(done.unwrap().success());
}

impl Drop for Install {
    fn drop(&mut self) {
        for p in self.pids() {
            let _ = Command::new("kill")
                .arg(p.to_string())
                .stderr(Stdio::null())
                .status();
        }
    }
}

/// Not a test of its own: the stand-in daemon, when the script above starts it.
#[test]
fn stand_in() {
    if std::env::var_os("STAND_IN").is_none() {
        return;
    }
    let dir = std::env::var_os("UNDERPASS_DIR").unwrap();
    support::serve(
        Path::new(&dir),
        Arc::new(Mutex::new(Vec::new())),
        |r| match r {
            Request::Log => Response::Log {
                lines: vec!["stand-in".into()],
            },
            _ => Response::Error {
                message: "not in the stand-in".into(),
            },
        },
    );
    // Longer than any test; not for ever, so that a test that waits for its end by mistake fails.
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn the_program_gets_library_directory_and_its_own_arguments() {
    let i = Install::new();
    let lib = harmless_library().display().to_string();
    let out = i.run(&[
        "--eager",
        "sh",
        "-c",
        "env; for a; do echo \"<$a>\"; done",
        "sh",
        "-x",
        "--eager",
        "a b",
        "--",
    ]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    assert!(said.contains(&format!("LD_PRELOAD={lib}\n")), "{said}");
    assert!(
        said.contains(&format!("UNDERPASS_DIR={}\n", i.path("rt").display())),
        "{said}"
    );
    assert!(said.contains("UNDERPASS=eager\n"), "{said}");
    assert!(said.ends_with("<-x>\n<--eager>\n<a b>\n<-->\n"), "{said}");

    let out = i
        .tool(&["run", "--", "env"])
        .env("LD_PRELOAD", "/lib/other.so")
        .output()
        .unwrap();
    let said = text(&out.stdout);
    assert!(
        said.contains(&format!("LD_PRELOAD=/lib/other.so:{lib}\n")),
        "{said}"
    );
    assert!(!said.contains("UNDERPASS=eager"), "{said}");
    assert_eq!(
        i.pids().len(),
        1,
        "the second one found the first one's daemon"
    );
}

#[test]
fn a_directory_that_is_named_on_the_command_line_reaches_the_program() {
    let i = Install::new();
    let out = i
        .tool(&["run", "--dir", "rt", "env"])
        .env_remove("UNDERPASS_DIR")
        .current_dir(i.root.path())
        .output()
        .unwrap();
    let said = text(&out.stdout);
    // Absolute, whatever was named: the program may go elsewhere.
    assert!(
        said.contains(&format!("UNDERPASS_DIR={}\n", i.path("rt").display())),
        "{said}{}",
        text(&out.stderr)
    );
}

#[test]
fn the_program_is_the_same_process_and_has_no_child_of_ours() {
    let i = Install::new();
    let child = i
        .tool(&[
            "run",
            "sh",
            "-c",
            "echo $$; cat /proc/$$/task/$$/children; exit 7",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(7));
    let said = text(&out.stdout);
    let mut lines = said.lines();
    assert_eq!(lines.next(), Some(&*pid.to_string()));
    // `cat` is the shell's only child.
    assert_eq!(
        lines.next().unwrap_or_default().split_whitespace().count(),
        1,
        "{said}"
    );
}

#[test]
fn the_daemon_is_detached_and_clean() {
    let i = Install::new();
    // A pipe of the caller's at descriptor 9: the daemon must not keep it open.
    let script = format!(
        "exec 9>&1; '{}' run true",
        i.path("bin/underpass").display()
    );
    let mut c = i.tool(&[]);
    let env: Vec<_> = c
        .get_envs()
        .filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned())))
        .collect();
    c = Command::new("sh");
    let out = c
        .args(["-c", &script])
        .envs(env)
        .env("LD_PRELOAD", harmless_library())
        .env("UNDERPASS", "eager")
        .output()
        .unwrap(); // would not return if the daemon held standard output or descriptor 9
    assert!(out.status.success(), "{}", text(&out.stderr));
    let env = i.read("daemon.env");
    assert!(
        !env.contains("LD_PRELOAD=") && !env.contains("UNDERPASS="),
        "{env}"
    );
    assert!(
        env.contains(&format!("UNDERPASS_DIR={}", i.path("rt").display())),
        "{env}"
    );
    assert!(i.read("daemon.args").contains("--idle-exit 30"));
    assert!(
        !i.read("daemon.fds").contains("pipe:"),
        "{}",
        i.read("daemon.fds")
    );
    let pid = i.pids()[0];
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session: i32 = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap();
    let own = fs::read_to_string("/proc/self/stat").unwrap();
    let ours: i32 = own
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap();
    assert_ne!(session, ours, "a session of its own");
    assert_eq!(
        fs::read_link(format!("/proc/{pid}/cwd")).unwrap(),
        Path::new("/")
    );
    assert_eq!(
        fs::metadata(i.path("rt")).unwrap().permissions().mode() & 0o777,
        0o700
    );
    assert_eq!(
        text(&i.tool(&["log"]).output().unwrap().stdout),
        "stand-in\n"
    );
}

/// The last thing that a daemon hears before the program starts is that it is to stay.
#[test]
fn the_daemon_is_asked_to_stay() {
    let d = support::FakeDaemon::new(|r| panic!("{r:?}"));
    let mut c = d.tool(&["run", "true"]);
    c.env("UNDERPASS_LIB", harmless_library());
    assert!(c.status().unwrap().success());
    assert_eq!(d.received().last().unwrap(), "{\"op\":\"keep\"}");
}

#[test]
fn runs_at_the_same_time_start_one_daemon() {
    let i = Install::new();
    let children: Vec<_> = (0..8)
        .map(|_| {
            i.tool(&["run", "true"])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for c in children {
        let out = c.wait_with_output().unwrap();
        assert_eq!(
            (out.status.code(), text(&out.stderr)),
            (Some(0), String::new())
        );
    }
    assert_eq!(i.pids().len(), 1);
}

#[test]
fn a_daemon_that_died_is_replaced() {
    let i = Install::new();
    assert!(i.run(&["true"]).status.success());
    let pid = i.pids()[0];
    assert!(Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap()
        .success());
    while text(&i.tool(&["log"]).output().unwrap().stdout) == "stand-in\n" {}
    fs::remove_file(i.path("rt").join(ADMIN_SOCK)).unwrap(); // the real one does so itself
    assert!(i.run(&["true"]).status.success());
    assert_eq!(i.pids().len(), 2);
}

/// Stopped, or far too busy: the shim copes with that, and a second daemon would do harm.
#[test]
fn a_daemon_that_is_silent_is_left_alone() {
    let i = Install::new();
    fs::create_dir(i.path("rt")).unwrap();
    let _silent = std::os::unix::net::UnixListener::bind(i.path("rt").join(ADMIN_SOCK)).unwrap();
    let out = i.run(&["echo", "ran"]);
    assert_eq!(text(&out.stdout), "ran\n");
    assert!(
        text(&out.stderr).contains("does not answer"),
        "{}",
        text(&out.stderr)
    );
    assert!(i.pids().is_empty());
}

#[test]
fn exit_statuses_are_those_of_env_and_nohup() {
    let i = Install::new();
    let plain = i.path("plain");
    fs::write(&plain, "not a program").unwrap();
    for (args, code) in [
        (&["true"] as &[&str], 0),
        (&["sh", "-c", "exit 42"], 42),
        (&["no-such-program-anywhere"], 127),
        (&["/no/such/path"], 127),
        (&[plain.to_str().unwrap()], 126),
        (&["/"], 126),
    ] {
        let out = i.run(args);
        assert_eq!(
            out.status.code(),
            Some(code),
            "{args:?}: {}",
            text(&out.stderr)
        );
        assert_eq!(
            code >= 126,
            text(&out.stderr).contains("cannot run"),
            "{args:?}: {}",
            text(&out.stderr)
        );
    }
    assert_eq!(tool(&["run"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn failures_of_our_own_are_125_and_say_why() {
    let i = Install::new();
    let failing = |out: Output, part: &str| {
        assert_eq!(
            out.status.code(),
            Some(125),
            "{part}: {}",
            text(&out.stderr)
        );
        assert_eq!(text(&out.stdout), "", "the program must not have run");
        assert!(
            text(&out.stderr).contains(part),
            "{part}: {}",
            text(&out.stderr)
        );
    };
    let echo = &["run", "echo", "ran"];
    failing(
        i.tool(echo)
            .env("UNDERPASS_LIB", "/no/lib.so")
            .output()
            .unwrap(),
        "/no/lib.so, which is not a file",
    );
    let spaced = i.path("with space.so");
    fs::write(&spaced, "").unwrap();
    failing(
        i.tool(echo).env("UNDERPASS_LIB", &spaced).output().unwrap(),
        "cannot be preloaded",
    );
    failing(
        i.tool(echo)
            .env("UNDERPASS_DIR", "/proc/none")
            .output()
            .unwrap(),
        "cannot create /proc/none",
    );

    let long = i.path(&"d".repeat(100));
    failing(
        i.tool(echo).env("UNDERPASS_DIR", long).output().unwrap(),
        "too long",
    );

    i.daemon("echo 'config: line 3: nonsense' >&2; exit 1");
    failing(i.tool(echo).output().unwrap(), "config: line 3: nonsense");
    fs::remove_file(i.path("bin/underpassd")).unwrap();
    failing(
        i.tool(echo).env("PATH", i.path("bin")).output().unwrap(),
        "neither beside this one nor in PATH",
    );
}

#[test]
fn the_library_beside_the_tool_is_found() {
    let i = Install::new();
    fs::copy(harmless_library(), i.path("bin/libunderpass.so")).unwrap();
    let out = i
        .tool(&["run", "env"])
        .env_remove("UNDERPASS_LIB")
        .output()
        .unwrap();
    let want = format!("LD_PRELOAD={}\n", i.path("bin/libunderpass.so").display());
    assert!(
        text(&out.stdout).contains(&want),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
}

#[test]
fn the_daemon_is_found_in_path_too() {
    let i = Install::new();
    fs::create_dir(i.path("sbin")).unwrap();
    fs::rename(i.path("bin/underpassd"), i.path("sbin/underpassd")).unwrap();
    let path = format!(
        "{}:{}",
        i.path("sbin").display(),
        std::env::var("PATH").unwrap()
    );
    assert!(i
        .tool(&["run", "true"])
        .env("PATH", path)
        .status()
        .unwrap()
        .success());
    assert_eq!(i.pids().len(), 1);
}
