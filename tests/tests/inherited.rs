//! Connections that other processes hold when the shim's own closes them: nobody is cut off, whether or
//! not the daemon has answered by then, and the last close ends the connection at once.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::peers::result;
use underpass_tests::harness::{until, Daemon, Place, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);
const CLIENTS: u64 = 20;

fn server(how: &str, place: &Place) -> Result<(Running, String)> {
    let mut s = Program::python("inherited.py", place)
        .args(["serve", how])
        .spawn()?;
    let port = s.line("port ", PATIENCE)?;
    Ok((s, port))
}

/// All clients of a server that hands its connections on as `how` says get what they sent.
fn served(how: &str, server_at: &Place, client_at: &Place) -> Result<()> {
    served_after(how, 6, server_at, client_at)
}

/// After so many lines of each.
fn served_after(how: &str, lines: u32, server_at: &Place, client_at: &Place) -> Result<()> {
    let (_s, port) = server(how, server_at)?;
    let mut c = Program::python("inherited.py", client_at)
        .args(["client", &port])
        .words(&format!("{CLIENTS} {lines}"));
    if ENDS.contains(&how) {
        c = c.args(["end"]);
    } else if how == "early" {
        c = c.args(["large"]);
    }
    let out = c.spawn()?.wait(LIMIT)?;
    let v = result(&out.stdout)?;
    ensure!(v["served"] == CLIENTS, "{how}: {v}\n{}", out.stderr);
    Ok(())
}

/// Were most of them? (As many as there are credits for, on a machine where the daemon comes late.)
fn registered(d: &Daemon, how: &str) -> Result<()> {
    until(&format!("{how}: registered"), PATIENCE, || {
        d.stats().is_ok_and(|s| s.registered >= CLIENTS / 2)
    })
}

const WAYS: [&str; 5] = ["popen", "shell", "spawn", "fork", "rights"];
const ENDS: [&str; 2] = ["end", "stream"];

/// Clients without the shim: the kernel's answer, then the default mode and eager, the daemon well, and
/// stopped so that each registration stays unanswered.
#[test]
fn handed_on() -> Result<()> {
    let bare = Place::bare();
    for how in WAYS {
        served(how, &bare, &bare)?;
        let d = Daemon::start()?;
        served(how, &d.place(), &bare)?;
        registered(&d, how)?;
        served(how, &d.eager(), &bare)?;
    }
    Ok(())
}

/// The same with clients under the shim: what is offered meanwhile must not be taken, and what a client has sent before it
/// shut down is there.
#[test]
fn handed_on_by_both() -> Result<()> {
    for how in WAYS {
        let d = Daemon::start()?;
        served(how, &d.place(), &d.place())?;
        registered(&d, how)?;
        served(how, &d.eager(), &d.eager())?;
        ensure!(d.stats()?.resets == 0, "{how}: {}", d.picture());
    }
    Ok(())
}

/// The program that gets it was told of the number before that was a connection's: it is on its lane until then.
#[test]
fn handed_on_by_actions_made_before() -> Result<()> {
    let bare = Place::bare();
    served_after("early", 600, &bare, &bare)?;
    let d = Daemon::start()?;
    served_after("early", 600, &d.eager(), &d.eager())?;
    d.assert_promoted(10, 1000)?;
    Ok(())
}

/// A daemon that is stopped has the registrations unread in its queue.
#[test]
fn handed_on_daemon_stopped() -> Result<()> {
    for how in WAYS {
        let d = Daemon::start()?;
        let (_s, port) = server(how, &d.place())?;
        // The server's connection to the daemon is there before that is stopped.
        let client = |n: u32| -> Result<u64> {
            let c = Program::python("inherited.py", &Place::bare())
                .args(["client", &port])
                .words(&format!("{n} 6"));
            let out = c.spawn()?.wait(LIMIT)?;
            Ok(result(&out.stdout)?["served"].as_u64().unwrap_or(0))
        };
        ensure!(client(2)? == 2, "{how}");
        d.freeze()?;
        let n = client(CLIENTS as u32)?;
        d.thaw()?;
        ensure!(n == CLIENTS, "{how}: {n} of {CLIENTS}");
    }
    Ok(())
}

/// Nobody else holds it: the close ends the connection, although a stopped daemon has not read the
/// registration.
#[test]
fn the_last_close_ends_it() -> Result<()> {
    ENDS.iter().try_for_each(|how| ends(how))
}

fn ends(how: &str) -> Result<()> {
    let d = Daemon::start()?;
    served(how, &d.place(), &Place::bare())?;
    registered(&d, how)?;
    let (_s, port) = server(how, &d.place())?;
    let c = |n: u64| -> Result<()> {
        let c = Program::python("inherited.py", &Place::bare())
            .args(["client", &port])
            .words(&format!("{n} 6 end"));
        let v = result(&c.spawn()?.wait(LIMIT)?.stdout)?;
        ensure!(v["served"] == n, "{v}");
        Ok(())
    };
    c(2)?;
    d.freeze()?;
    let r = c(10);
    d.thaw()?;
    r
}
