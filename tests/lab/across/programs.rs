//! Programs that are killed, exit, close or fall asleep right after their last send. What their
//! calls took arrives, or the peer is told that the connection was reset: never a short stream that
//! ends as if it were whole.

use super::{all_arrived, arrived, RATE};
use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::until;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::stream::{Last, Outcome};
use underpass_tests::lab::streams::{Plan, Streams, CLIENT, SERVER};
use underpass_tests::lab::{Lab, PATIENCE};

/// Bytes per connection, of which the last ones wait for a gate. These fit into every ring.
const ALL: u64 = 400_000;
const LAST: u64 = 40_000;

const EACH: u32 = 4;

/// Clients that do this after their last send, held just before their last bytes, on RDMA.
fn at_the_gate(lab: &Lab, c: &Cluster, last: Last, gate: &str, unread: &str) -> Result<Streams> {
    // Not so fast that all is sent before there is a lane.
    let plan = Plan::one_way(EACH, ALL, last, c.eager()).rate(2 * RATE);
    let mut plan = plan.gate(LAST, gate);
    if !unread.is_empty() {
        plan = plan.receive_gate(LAST, unread);
    }
    let s = Streams::start(lab, plan)?;
    s.await_received(SERVER, ALL - LAST)?;
    c.await_smcr_one_way(s.port, EACH as usize)?;
    Ok(s)
}

/// Waits for the receiver's end, and judges it.
fn judge(mut s: Streams) -> Result<usize> {
    let report = s.report(SERVER)?;
    arrived(&report, &[[ALL, 0]; EACH as usize])
}

/// Nothing fails but the programs. Who exits or closes after its last send is the most usual of
/// programs, and all that it sent arrives.
pub fn programs_end(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let whole = [
        at_the_gate(lab, &c, Last::Exit, "/run/whole-end", "")?,
        at_the_gate(lab, &c, Last::Close, "/run/whole-end", "")?,
        // Their last bytes are read long after they have gone.
        at_the_gate(lab, &c, Last::Exit, "/run/whole-end", "/run/whole-read")?,
        at_the_gate(lab, &c, Last::Close, "/run/whole-end", "/run/whole-read")?,
    ];
    lab.node(1).guest()?.touch("/run/whole-end")?;
    whole[2].await_sent(CLIENT, ALL)?;
    until("it has exited", PATIENCE, || {
        whole[2].running(CLIENT).has_ended()
    })?;
    lab.node(0).guest()?.touch("/run/whole-read")?;
    for s in whole {
        ensure!(judge(s)? == 0, "reset");
    }

    // Closed with bytes of the peer unread: that is a reset, as it is in TCP.
    let mut plan = Plan::bytes(EACH, 100_000, c.eager()).gate(LAST, "/run/whole-close");
    plan.ends[CLIENT].receives = false;
    plan.ends[CLIENT].last = Last::Close;
    let mut s = Streams::start(lab, plan)?;
    s.await_sent(SERVER, 100_000)?;
    s.await_received(SERVER, 100_000 - LAST)?;
    lab.node(1).guest()?.touch("/run/whole-close")?;
    let report = s.report(SERVER)?;
    let reset = Outcome::Error("recv".into(), "ECONNRESET".into());
    ensure!(
        report.ends.iter().all(|e| e.received.outcome == reset),
        "closed with unread bytes, and the peer sees {report:?}"
    );
    Ok(())
}

/// Killed in the middle, whether or not it was sent to.
pub fn programs_killed_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    c.expect_resets();
    let plans = [
        Plan::one_way(EACH, u64::MAX, Last::Shutdown, c.eager()).rate(4 * RATE),
        Plan::endless(EACH, 2 * RATE, c.eager()),
    ];
    for plan in plans {
        let mut s = Streams::start(lab, plan)?;
        c.await_smcr_one_way(s.port, EACH as usize)?;
        s.await_received(SERVER, 300_000)?;
        s.kill(CLIENT)?;
        let report = s.report(SERVER)?;
        arrived(&report, &s.progress(CLIENT)?)?;
    }
    // And the one that only receives: its peer hears of it.
    let plan = Plan::one_way(EACH, u64::MAX, Last::Shutdown, c.eager()).rate(4 * RATE);
    let mut s = Streams::start(lab, plan)?;
    c.await_smcr_one_way(s.port, EACH as usize)?;
    s.await_received(SERVER, 300_000)?;
    s.kill(SERVER)?;
    let report = s.report(CLIENT)?;
    let told = |o: &Outcome| matches!(o, Outcome::Error(call, e) if call == "send" && (e == "ECONNRESET" || e == "EPIPE"));
    ensure!(
        report.ends.iter().all(|e| told(&e.sent.outcome)),
        "{report:?}"
    );
    for n in [0, 1] {
        let d = c.daemon(n)?;
        d.await_ss("no connection is left", |rows| {
            rows.iter().all(|r| r.state != "ACTIVE")
        })?;
    }
    Ok(())
}

/// The rails are cut, and before any daemon knows, programs send their last bytes and exit, close, or
/// sleep without any further call.
pub fn programs_end_with_rails_cut(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    c.expect_resets(); // (what is on its way may be lost with those who sent it)
    let mut asleep = at_the_gate(lab, &c, Last::Sleep, "/run/cut-end", "")?;
    let ended = [
        at_the_gate(lab, &c, Last::Exit, "/run/cut-end", "")?,
        at_the_gate(lab, &c, Last::Close, "/run/cut-end", "")?,
    ];
    lab.rail(1).cut()?;
    lab.rail(2).cut()?;
    lab.node(1).guest()?.touch("/run/cut-end")?;
    for s in ended {
        judge(s)?;
    }
    sleeper_has_sent(&mut asleep)?;
    // No sleeper keeps the node from serving others.
    Streams::start(lab, Plan::bytes(2, 200_000, c.eager()))?.complete()?;
    Ok(())
}

/// Asleep since a second when the rails are cut, with the bytes read and unread.
pub fn rails_cut_under_sleepers(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    c.expect_resets(); // (the sleepers are killed)
    let mut read = at_the_gate(lab, &c, Last::Sleep, "/run/asleep-end", "")?;
    let mut unread = at_the_gate(lab, &c, Last::Sleep, "/run/asleep-end", "/run/asleep-read")?;
    lab.node(1).guest()?.touch("/run/asleep-end")?;
    read.await_sent(CLIENT, ALL)?;
    unread.await_sent(CLIENT, ALL)?;
    std::thread::sleep(Duration::from_secs(1));
    lab.rail(1).cut()?;
    lab.rail(2).cut()?;
    sleeper_has_sent(&mut read)?;
    // Neither side of it is inside a call; the daemons have long given up the rails by now.
    c.await_rows(0, read.port, "no lane is up", |rows| {
        rows.iter().all(|r| r.mode != "SMCR" || r.up != "both")
    })?;
    lab.node(0).guest()?.touch("/run/asleep-read")?;
    sleeper_has_sent(&mut unread)?;
    Ok(())
}

/// The peer of one that sleeps has all of its bytes, or is told of a reset, while it sleeps. Then the
/// sleeper is killed, and that is the end of the stream.
fn sleeper_has_sent(s: &mut Streams) -> Result<()> {
    until("all has come, or a reset", PATIENCE, || {
        let all = s.progress(SERVER);
        s.running(SERVER).has_ended() || all.is_ok_and(|p| p.iter().all(|p| p[1] == ALL))
    })?;
    ensure!(!s.running(CLIENT).has_ended(), "it does not sleep");
    s.kill(CLIENT)?;
    let report = s.report(SERVER)?;
    if arrived(&report, &[[ALL, 0]; EACH as usize])? == 0 {
        all_arrived(&report, &s.progress(CLIENT)?)?;
    }
    Ok(())
}
