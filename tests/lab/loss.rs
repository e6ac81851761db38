//! Wires that are cut, carriers that are lost, machines that are gone: the lab does to programs
//! that know nothing of Underpass what it will do to Underpass.

use crate::programs::{await_ping, Transfer};
use crate::verbs::{impatient, ping_pong, ENDLESS};
use anyhow::{ensure, Result};
use underpass_tests::harness::paths::PYTHON;
use underpass_tests::harness::until;
use underpass_tests::lab::{Family, Lab, PATIENCE};

/// Packets that both machines received on a rail.
fn received(lab: &Lab, rail: usize) -> Result<[u64; 2]> {
    let of = |n| lab.node(n).counter(rail, "rcvd_pkts");
    Ok([of(0)?, of(1)?])
}

/// Waits until both machines have received more on a rail.
fn await_traffic(lab: &Lab, rail: usize) -> Result<()> {
    let before = received(lab, rail)?;
    until(&format!("traffic on rail {rail}"), PATIENCE, || {
        received(lab, rail).is_ok_and(|now| now[0] > before[0] + 10 && now[1] > before[1] + 10)
    })
}

pub fn rail_cut_and_mended(lab: &mut Lab) -> Result<()> {
    let dies = impatient(lab, 1, Family::V4)?;
    let waits = ping_pong(lab, 1, Family::V6, ENDLESS)?;
    let other = ping_pong(lab, 2, Family::V4, ENDLESS)?;
    await_traffic(lab, 1)?;
    await_traffic(lab, 2)?;
    ensure!(dies.both_run());

    lab.rail(1).cut()?;
    // IBV_WC_RETRY_EXC_ERR
    let said = dies.failed()?;
    ensure!(said.contains("status 12\n"), "{said}");
    let dead = received(lab, 1)?;
    await_traffic(lab, 2)?;
    await_ping(lab, 0, true)?;
    ensure!(received(lab, 1)? == dead, "the rail is not cut");
    ensure!(waits.both_run() && other.both_run());

    lab.rail(1).mend()?;
    await_traffic(lab, 1)?;
    await_traffic(lab, 2)?;
    ensure!(waits.both_run() && other.both_run());
    Ok(())
}

/// Only eth0 is cut: what runs on the rails goes on, TCP goes on when it is back.
pub fn control_cut_and_mended(lab: &mut Lab) -> Result<()> {
    let _rail = ping_pong(lab, 1, Family::V4, ENDLESS)?;
    let t = Transfer::start(lab, Family::V4, [vec![], vec![]])?;
    t.await_bytes(1)?;
    lab.control().cut()?;
    await_ping(lab, 0, false)?;
    await_traffic(lab, 1)?;
    lab.control().mend()?;
    await_ping(lab, 0, true)?;
    let moved = t.finish(lab)?;
    ensure!(moved.iter().all(|&n| n > 0), "{moved:?}");

    // One way only: the second machine's frames arrive, the first one's do not.
    lab.control().cut_to(1)?;
    await_ping(lab, 0, false)?;
    lab.control().mend()?;
    await_ping(lab, 0, true)
}

pub fn carrier_lost_and_back(lab: &mut Lab) -> Result<()> {
    let await_state = |lab: &Lab, node: usize, state: &str| {
        until(&format!("rxe2 of node {node} is {state}"), PATIENCE, || {
            let links = lab.node(node).check("rdma link show rxe2/1");
            links.is_ok_and(|l| l.contains(&format!("state {state}")))
        })
    };
    lab.set_carrier(0, 2, false)?;
    await_state(lab, 0, "DOWN")?;
    // The other machine is not told: its own carrier is there.
    await_state(lab, 1, "ACTIVE")?;
    await_ping(lab, 2, false)?;
    lab.set_carrier(0, 2, true)?;
    await_state(lab, 0, "ACTIVE")?;
    await_ping(lab, 2, true)?;
    ping_pong(lab, 2, Family::V4, 50)?.finish()
}

/// Accepts one connection, greets, and never says anything again.
const SILENT: &str = r#"
import socket, sys, time
s = socket.create_server((sys.argv[1], 0))
print("port", s.getsockname()[1], flush=True)
c, _ = s.accept()
c.sendall(b"hello")
time.sleep(3600)
"#;

/// Holds a connection, sends on it when /run/gone is there, and says what it then sees: bytes, an
/// end of file, or an error. Its patience begins to end when /run/seen is there.
const WITNESS: &str = r#"
import os, socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("got", s.recv(100), flush=True)
def wait(mark):
    while not os.path.exists(mark):
        time.sleep(0.05)
wait("/run/gone")
try:
    s.sendall(b"are you there?")
    print("asked", flush=True)
    wait("/run/seen")
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000)
    print("saw", s.recv(100), flush=True)
except OSError as e:
    print("saw", type(e).__name__, e.errno, flush=True)
"#;

/// A machine that is gone says nothing: no reset, no end of file. TCP's own time-outs apply.
pub fn node_gone(lab: &mut Lab) -> Result<()> {
    let host = lab.node(1).host();
    let server = lab.node(1).sh(format!("exec {PYTHON} - {host}"))?;
    let server = server.stdin(SILENT.as_bytes()).spawn()?;
    let port = server.line("port ")?;
    let witness = lab.node(0).sh(format!("exec {PYTHON} - {host} {port}"))?;
    let witness = witness.stdin(WITNESS.as_bytes()).spawn()?;
    ensure!(witness.line("got ")? == "b'hello'");

    lab.kill(1);
    ensure!(server.wait().is_err(), "a dead machine reports an end");
    lab.node(0).check("touch /run/gone")?;
    witness.line("asked")?;
    // The connection stands, its bytes are not acknowledged.
    let state = lab.node(0).check(format!("ss -Htn dst {host}:{port}"))?;
    let mut words = state.split_whitespace();
    ensure!(words.next() == Some("ESTAB"), "{state}");
    ensure!(words.nth(1) == Some("14"), "{state}");
    lab.node(0).check("touch /run/seen")?;
    // ETIMEDOUT, or EHOSTUNREACH because nobody answers for the address; never a reset or an end.
    let saw = witness.line("saw ")?;
    ensure!(saw == "TimeoutError 110" || saw == "OSError 113", "{saw}");

    lab.start(&[1])?;
    await_ping(lab, 0, true)?;
    await_ping(lab, 1, true)
}
