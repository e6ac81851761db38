//! Software iWARP on the rails: what its devices look like, and that they carry data.

use anyhow::{bail, ensure, Result};
use nix::sys::signal::Signal;
use std::net::IpAddr;
use std::time::Duration;
use underpass_tests::lab::{End, Family, Lab, Node, Running, Soft, PATIENCE};

/// Files of the device on the first rail. The kernel has no GID type for iWARP and says its first.
const FACTS: &[(&str, &str)] = &[
    ("node_type", "4: RNIC"),
    ("node_desc", "Software iWARP stack"),
    ("ports/1/state", "4: ACTIVE"),
    ("ports/1/phys_state", "5: LinkUp"),
    ("ports/1/link_layer", "Ethernet"),
    ("ports/1/gid_attrs/types/0", "IB/RoCE v1"),
    ("ports/1/gid_attrs/ndevs/0", "eth1"),
];

/// After how long a pair that takes three seconds is stuck, and how often it may be.
const STUCK: Duration = Duration::from_secs(20);
const TRIES: u32 = 6;

/// Messages of `ib_write_bw`, and their bytes.
const WRITES: [u64; 2] = [200, 4096];

pub fn iwarp_rails(lab: &mut Lab) -> Result<()> {
    for n in [0, 1] {
        lab.set_devices(n, 1, &[Soft::Siw])?;
    }
    for n in [0, 1] {
        devices(lab.node(n), &["rxe2", "siw1"])?;
        facts(lab.node(n), n)?;
    }
    for family in [Family::V4, Family::V6] {
        ping(lab, lab.node(0).address(1, family))?;
    }
    write(lab)?;
    // Both kinds on one rail; and what there was before.
    for n in [0, 1] {
        lab.set_devices(n, 1, &[Soft::Siw, Soft::Rxe])?;
        devices(lab.node(n), &["rxe1", "rxe2", "siw1"])?;
    }
    lab.restore()?;
    for n in [0, 1] {
        devices(lab.node(n), &["rxe1", "rxe2"])?;
    }
    Ok(())
}

fn devices(node: &Node, wanted: &[&str]) -> Result<()> {
    let there = node.check("ls /sys/class/infiniband")?;
    let there: Vec<&str> = there.lines().collect();
    ensure!(there == wanted, "{}: {there:?}", node.name());
    Ok(())
}

fn facts(node: &Node, n: usize) -> Result<()> {
    let guest = node.guest()?;
    let file = |name: &str| -> Result<String> {
        let bytes = guest.read(&format!("/sys/class/infiniband/siw1/{name}"))?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_string())
    };
    for &(name, wanted) in FACTS {
        let is = file(name)?;
        ensure!(is == wanted, "{}: {name} is {is}", node.name());
    }
    // One GID, which is the hardware address and none of the network's.
    let gid = format!("5254:004c:01{:02x}:0000:0000:0000:0000:0000", n + 1);
    ensure!(file("ports/1/gids/0")? == gid);
    let rest = node.check("cd /sys/class/infiniband/siw1; ls ports/1/gids; ls; ls ports/1")?;
    let mut rest = rest.lines();
    ensure!(rest.next() == Some("0"));
    // No hardware to show, and nothing counted.
    ensure!(!rest.any(|l| ["1", "device", "parent", "hw_counters"].contains(&l)));
    let said = node.check("ibv_devinfo -d siw1")?;
    ensure!(said.contains("iWARP (1)"), "{said}");
    Ok(())
}

/// Both ends compare what they receive: sends, reads and writes.
fn ping(lab: &Lab, to: IpAddr) -> Result<()> {
    let command = |role: &str| format!("exec rping {role} -a {to} -C 10 -v -V");
    for said in pair(lab, 7174, &command("-s"), &command("-c"))? {
        let pings = said.matches("ping data: rdma-ping-").count();
        ensure!(pings == 10, "{pings} pings: {said}");
    }
    Ok(())
}

/// All that is written crosses the rail.
fn write(lab: &Lab) -> Result<()> {
    let [a, b] = [0, 1].map(|n| lab.node(n));
    let sent = |rail| b.nic_counter(rail, "tx_bytes");
    let [count, bytes] = WRITES;
    let command = format!("exec ib_write_bw -R -F -d siw1 -n {count} -s {bytes}");
    let to = a.address(1, Family::V4);
    let before = [sent(1)?, sent(2)?];
    for said in pair(lab, 18_515, &command, &format!("{command} {to}"))? {
        ensure!(said.contains("Transport type : IW\n"), "{said}");
    }
    let crossed = [sent(1)? - before[0], sent(2)? - before[1]];
    ensure!(
        crossed[0] >= count * bytes && crossed[1] < bytes,
        "{crossed:?} bytes were sent on the rails"
    );
    Ok(())
}

/// What a pair of programs said that both ended well. `siw_accept` answers before it looks at the
/// socket, and nobody looks again: what came in between waits for what comes next, the pair for ever.
fn pair(lab: &Lab, port: u16, server: &str, client: &str) -> Result<[String; 2]> {
    let [a, b] = [0, 1].map(|n| lab.node(n));
    for _ in 0..TRIES {
        let server = a.spawn(server)?;
        listens(a, &server, port)?;
        let client = b.sh(client)?.limit(STUCK).run()?;
        if client.end != End::TimedOut {
            return Ok([client.ok()?, server.wait()?.ok()?]);
        }
        server.signal(Signal::SIGKILL)?;
        server.wait()?;
    }
    bail!("{TRIES} times in a row nothing moved")
}

/// Waits until connections to this port are awaited on the device.
fn listens(node: &Node, server: &Running, port: u16) -> Result<()> {
    let port = format!(":{port}");
    let on = |l: &str| {
        let ours = l.starts_with("link siw1/") && l.contains(" state LISTEN ");
        ours && l.split_whitespace().any(|w| w.ends_with(&port))
    };
    server.until("it listens on siw1", PATIENCE, || {
        let ids = node.check("rdma resource show cm_id");
        ids.is_ok_and(|i| i.lines().any(on))
    })
}
