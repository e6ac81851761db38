//! `underpass check` between two nodes, against programs that do nothing: the daemon of the other
//! node finds them. There is no RDMA here, so every connection stays on TCP, and what is tested is
//! that the answer says so at once, about both ends. All of it needs root.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use underpass_tests::harness::node::{pair, Lan, Node};
use underpass_tests::harness::peers::Echo;

const NO_LANES: &str = "no-rdma-device";

/// Checks the way from `a` to a server of `b`: reason here and there, and the whole answer.
fn check(a: &Node, host: &str, port: u16) -> Result<(String, String, Value)> {
    let v = a.check(&format!("-j --wait 10 {host} {port}"))?;
    let name = |end: &str| v[end]["reason"]["name"].as_str().unwrap_or("-").to_owned();
    Ok((name("here"), name("there"), v))
}

/// The other end was found, and both nodes say that they have no device.
fn found(a: &Node, b: &Node, host: &str, port: u16, listed: bool) -> Result<()> {
    let (here, there, v) = check(a, host, port)?;
    let across = &v["across"];
    ensure!(
        (here.as_str(), there.as_str()) == (NO_LANES, NO_LANES)
            && v["promotable"] == false
            && v["there"]["known"] == false
            && across["own"] == *a.name
            && across["listed"] == listed
            && across["refusal"]["name"] == NO_LANES,
        "{v:#}\n{}{}",
        a.picture(),
        b.picture()
    );
    let way = (&across["node"], &across["channel"]);
    match listed {
        true => ensure!(way.0 == b.name.as_str() && way.1 == "up", "{v:#}"),
        false => ensure!(way.0 == "" && way.1 == "", "{v:#}"),
    }
    Ok(())
}

#[test]
fn root_an_idle_server_of_another_node_is_found() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    for mode in ["epoll", "select"] {
        // Of two nodes one is the initiator: both ways.
        for (from, to) in [(&a, &b), (&b, &a)] {
            let echo = Echo::serve(mode, &to.addr(), &to.quiet())?;
            // The second connection meets a program that its daemon knows.
            for round in 0..2 {
                found(from, to, &to.addr(), echo.port()?, true)
                    .with_context(|| format!("{mode} on {}, round {round}", to.name))?;
            }
        }
    }
    Ok(())
}

/// Only the address of this end is the same at both.
#[test]
fn root_an_idle_server_behind_a_translated_address_is_found() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    let echo = Echo::serve("epoll", &b.addr(), &b.quiet())?;
    a.sh(&format!(
        "iptables -w -t nat -A OUTPUT -d 10.96.0.9 -p tcp --dport 80 -j DNAT --to-destination {}:{}",
        b.addr(),
        echo.port()?
    ))?;
    found(&a, &b, "10.96.0.9", 80, false)
}

#[test]
fn root_what_the_other_node_says_of_its_end() -> Result<()> {
    let lan = Lan::new()?;
    let (a, mut b) = pair(&lan)?;
    // It cannot be woken: it sleeps in a blocking call.
    let deaf = Echo::serve("threads", &b.addr(), &b.quiet())?;
    let bare = Echo::serve("epoll", &b.addr(), &b.bare())?;
    for (echo, reason) in [(&deaf, "young"), (&bare, "peer-no-shim")] {
        let (here, there, v) = check(&a, &b.addr(), echo.port()?)?;
        ensure!(
            (here.as_str(), there.as_str()) == ("waiting", reason)
                && v["promotable"] == false
                && v["across"]["node"] == "n2",
            "{reason}: {v:#}\n{}{}",
            a.picture(),
            b.picture()
        );
    }
    // Nobody can be asked.
    b.kill();
    a.await_down("n2", "")?;
    let (here, there, v) = check(&a, &b.addr(), bare.port()?)?;
    ensure!(
        (here.as_str(), there.as_str()) == ("peer-daemon", "-")
            && v["across"]["channel"] == "down"
            && v["across"]["trouble"] != "",
        "{v:#}"
    );
    Ok(())
}
