//! Programs as Debian packages them: users, root directories, process models. Server and clients under
//! the shim, as root; what each does is in `programs/packaged.sh`.

use anyhow::{ensure, Context, Result};
use std::path::Path;
use underpass_admin::Row;
use underpass_tests::harness::packaged::{Packaged, LIMIT};
use underpass_tests::harness::{paths, until, Daemon, Place, Program, PATIENCE};
use underpass_tests::page::{line, Table, NOT_RUN, PAGE};

macro_rules! on_lanes {
    ($($test:ident $name:literal)*) => {$(
        #[test]
        fn $test() -> Result<()> {
            let d = Daemon::start()?; // in a directory that only root may enter
            Packaged::new($name, &d.place())?.runs_on_lanes(&d)
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
    root_redis "redis"
    root_grpc "grpc"
    root_node "node"
}

/// A server that changes its root directory and user, closes every descriptor, and forks: its
/// children have no other way to the daemon than the one they were born with.
#[test]
fn root_jailed() -> Result<()> {
    jailed("serve")
}

/// The same of a program that had no need of the daemon before: its listener is another's, as that of haproxy
/// after a reload, or of whom systemd hands its sockets.
#[test]
fn root_jailed_with_a_listener_from_another() -> Result<()> {
    jailed("handed")
}

fn jailed(how: &str) -> Result<()> {
    let d = Daemon::start()?;
    let jail = tempfile::tempdir()?;
    let mut server = Program::python("jailed.py", &d.place())
        .arg(how)
        .arg(jail.path())
        .spawn()?;
    let port = server.line("port ", PATIENCE)?;
    let clients = Program::python("jailed.py", &d.place())
        .args(["load", &port])
        .spawn()?;
    let of = format!(":{port}");
    let inside = |r: &Row| r.local.ends_with(&of) && r.mode == "SMCD" && r.state == "ACTIVE";
    until("the jailed ends are SMCD", PATIENCE, || {
        d.ss()
            .is_ok_and(|rows| rows.iter().filter(|r| inside(r)).count() >= 4)
    })
    .with_context(|| d.picture())?;
    let out = clients.wait(LIMIT)?.ok()?;
    ensure!(out.contains("ok"), "{out}");
    d.assert_promoted(8, 0)?;
    Ok(())
}

/// The page that `make programs` and `make suites-full` write.
#[test]
fn lines_are_replaced_and_other_tables_stay() {
    let table = |name| Table {
        name,
        by: "make",
        text: "## Some",
        columns: &["program", "result"],
    };
    let row = |a: &str, b: &str| line(&[a.to_owned(), b.to_owned()]);
    let page = table("a").put(PAGE, &[row("one", "1"), row("two", "2")]);
    let page = table("b").put(&page, &[row("one", "9")]);
    let page = table("a").put(&page, &[row("two", "3"), row("new", "4")]);
    assert!(page.starts_with(PAGE), "{page}");
    let rows: Vec<&str> = page
        .lines()
        .filter(|l| l.starts_with("| ") && !l.contains("---"))
        .collect();
    let head = ["| program | result |"];
    let a = ["| new | 4 |", "| one | 1 |", "| two | 3 |"];
    assert_eq!(rows, [&head[..], &a, &head, &["| one | 9 |"]].concat());
    assert_eq!(table("b").put(&page, &[row("one", "9")]), page);
    // What was not run this time is as it was.
    let page = table("c").put(&page, &[row("one", "8")]);
    assert_eq!(table("c").put(&page, &[row("one", NOT_RUN)]), page);
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
    let out = Program::new("unshare", &Place::bare())
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
        let built = Program::new("gcc", &Place::bare())
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
    Program::new("gcc", &Place::bare())
        .args(["-pthread", "-o"])
        .arg(&plain)
        .arg(&source)
        .check(LIMIT)?;
    let lib = Program::new("gcc", &Place::bare())
        .arg("-print-file-name=libasan.so")
        .check(LIMIT)?;
    let d = Daemon::start()?;
    let said = run(&d, &plain, Some(lib.trim()))?;
    ensure!(said.contains("done"), "{said}");
    d.assert_promoted(2, 1 << 20)?;
    Ok(())
}

fn run(d: &Daemon, program: &Path, preload: Option<&str>) -> Result<String> {
    let mut p = Program::new(paths::bin("underpass"), &Place::bare())
        .env("UNDERPASS_DIR", d.dir())
        .env("UNDERPASS_LIB", paths::shim())
        .arg("run")
        .arg(program);
    if let Some(lib) = preload {
        p = p.env("LD_PRELOAD", lib);
    }
    p.check(LIMIT)
}
