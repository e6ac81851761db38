//! Programs as Debian packages them: users, root directories, process models. Server and clients under
//! the shim, as root; what each does is in `programs/packaged.sh`.

use anyhow::{ensure, Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use underpass_tests::harness::web::noise;
use underpass_tests::harness::{
    free_port, listening, paths, until, Daemon, Program, Running, SOON,
};
use underpassd::admin::Row;

const LIMIT: Duration = Duration::from_secs(60);

/// One program with its directory, under the shim of one daemon.
struct Packaged<'a> {
    name: &'static str,
    daemon: &'a Daemon,
    dir: TempDir,
    port: u16,
    /// For what some programs have behind them.
    back: u16,
}

impl<'a> Packaged<'a> {
    fn new(name: &'static str, daemon: &'a Daemon) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
        let www = dir.path().join("www");
        fs::create_dir(&www)?;
        fs::write(www.join("small"), "x".repeat(612))?;
        fs::write(www.join("big"), noise(3 << 20))?;
        let port = free_port()?;
        Ok(Packaged {
            name,
            daemon,
            dir,
            port,
            back: free_port()?,
        })
    }

    fn act(&self, action: &str) -> Program {
        Program::new(paths::script("packaged.sh"), &self.daemon.place())
            .args([self.name, action])
            .arg(self.dir.path())
            .arg(self.port.to_string())
            .arg(self.back.to_string())
    }

    fn serve(&self) -> Result<Running> {
        let mut server = self.act("serve").spawn()?;
        let listens = until("it listens", SOON, || {
            server.has_ended() || listening(self.port)
        });
        listens
            .with_context(|| format!("{}: {}{}", self.name, server.stdout(), server.stderr()))?;
        ensure!(!server.has_ended(), "{}: {}", self.name, server.stderr());
        Ok(server)
    }

    /// Rows of both ends of connections to the program.
    fn rows(&self) -> Vec<Row> {
        let port = format!(":{}", self.port);
        let mut rows = self.daemon.ss().unwrap_or_default();
        rows.retain(|r| {
            r.state == "ACTIVE" && (r.local.ends_with(&port) || r.peer.ends_with(&port))
        });
        rows
    }

    /// Serves traffic until both ends of all its lasting connections have been on lanes at one time.
    fn runs_on_lanes(&self) -> Result<()> {
        let server = self.serve()?;
        let load = self.act("load").spawn()?;
        // (Of the connections of curl, which last for a moment, one may be young.)
        let on_lanes = || {
            let rows = self.rows();
            let smcd = rows.iter().filter(|r| r.mode == "SMCD").count();
            smcd >= 16 && smcd + 4 >= rows.len()
        };
        let promoted = until("both ends of its connections are SMCD", SOON, on_lanes)
            .with_context(|| format!("{}\n{}", self.name, self.daemon.picture()));
        fs::write(self.dir.path().join("stop"), "")?;
        let said = load.wait(LIMIT)?.ok();
        self.act("stop").check(LIMIT)?;
        drop(server);
        promoted?;
        ensure!(said?.ends_with("ok\n"));
        self.daemon.assert_promoted(16, 10 << 20)?;
        Ok(())
    }
}

macro_rules! on_lanes {
    ($($test:ident $name:literal)*) => {$(
        #[test]
        fn $test() -> Result<()> {
            let d = Daemon::start()?; // in a directory that only root may enter
            Packaged::new($name, &d)?.runs_on_lanes()
        }
    )*};
}

on_lanes! {
    root_nginx "nginx"
    root_haproxy "haproxy"
    root_apache_event "apache-event"
    root_apache_prefork "apache-prefork"
    root_varnish "varnish"
    root_gunicorn "gunicorn"
}

/// A server that changes its root directory and user, closes every descriptor, and forks: its
/// children have no other way to the daemon than the one they were born with.
#[test]
fn root_jailed() -> Result<()> {
    let d = Daemon::start()?;
    let jail = tempfile::tempdir()?;
    let mut server = Program::python("jailed.py", &d.place())
        .arg("serve")
        .arg(jail.path())
        .spawn()?;
    let port = server.line("port ", SOON)?;
    let clients = Program::python("jailed.py", &d.place())
        .args(["load", &port])
        .spawn()?;
    let of = format!(":{port}");
    let jailed = |r: &Row| r.local.ends_with(&of) && r.mode == "SMCD" && r.state == "ACTIVE";
    until("the jailed ends are SMCD", SOON, || {
        d.ss()
            .is_ok_and(|rows| rows.iter().filter(|r| jailed(r)).count() >= 4)
    })
    .with_context(|| d.picture())?;
    let out = clients.wait(LIMIT)?.ok()?;
    ensure!(out.contains("ok"), "{out}");
    d.assert_promoted(8, 0)?;
    Ok(())
}

/// As root `underpass run` uses the node's daemon, which whoever it becomes can reach.
#[test]
fn root_run_starts_the_nodes_daemon() -> Result<()> {
    let tool = paths::bin("underpass");
    let script = format!(
        "mount -t tmpfs none /run && umask 077 && {0} run sh -c 'stat -c %a:%U $UNDERPASS_DIR $UNDERPASS_DIR/*.sock; \
         echo $UNDERPASS_DIR; exec setpriv --reuid nobody --clear-groups {0} ss' && kill $({0} stats -j | tr , '\\n' | sed -n 's/.*\"pid\": *//p')",
        tool.display()
    );
    let out = Program::new("unshare", &underpass_tests::harness::Place::bare())
        .args(["-m", "sh", "-c", &script])
        .check(LIMIT)?;
    let lines: Vec<&str> = out.lines().take(4).collect();
    ensure!(
        lines == ["755:root", "666:root", "666:root", "/run/underpass"],
        "{out}"
    );
    Ok(())
}

/// What a program preloads of its own comes first: GCC's AddressSanitizer insists, and where it is
/// linked to the program the shim may come before it.
#[test]
fn sanitizers() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let source = paths::script("pingpong.c");
    for (kind, want) in [("address", true), ("undefined", true), ("thread", true)] {
        let program = dir.path().join(kind);
        let built = Program::new("gcc", &underpass_tests::harness::Place::bare())
            .args(["-g", "-pthread", &format!("-fsanitize={kind}"), "-o"])
            .arg(&program)
            .arg(&source)
            .run(LIMIT)?;
        ensure!(built.status.success(), "{}", built.stderr);
        let d = Daemon::start()?;
        let said = run(&d, &program, None)?;
        ensure!(said.contains("done") == want, "{kind}: {said}");
        d.assert_promoted(2, 1 << 20)?;
    }
    // Preloaded by the user, for a program that was not built with it.
    let plain = dir.path().join("plain");
    Program::new("gcc", &underpass_tests::harness::Place::bare())
        .args(["-pthread", "-o"])
        .arg(&plain)
        .arg(&source)
        .check(LIMIT)?;
    let lib = Program::new("gcc", &underpass_tests::harness::Place::bare())
        .arg("-print-file-name=libasan.so")
        .check(LIMIT)?;
    let d = Daemon::start()?;
    let said = run(&d, &plain, Some(lib.trim()))?;
    ensure!(said.contains("done"), "{said}");
    d.assert_promoted(2, 1 << 20)?;
    Ok(())
}

fn run(d: &Daemon, program: &Path, preload: Option<&str>) -> Result<String> {
    let mut p = Program::new(
        paths::bin("underpass"),
        &underpass_tests::harness::Place::bare(),
    )
    .env("UNDERPASS_DIR", d.dir())
    .env("UNDERPASS_LIB", paths::shim())
    .arg("run")
    .arg(program);
    if let Some(lib) = preload {
        p = p.env("LD_PRELOAD", lib);
    }
    p.check(LIMIT)
}
