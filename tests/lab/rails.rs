//! The rails are there, and verbs work on them without anything of ours.

use crate::verbs::ping_pong;
use anyhow::{ensure, Result};
use underpass_tests::harness::paths;
use underpass_tests::lab::{Family, Lab};

pub fn two_rails_each(lab: &mut Lab) -> Result<()> {
    for n in 0..lab.nodes() {
        let node = lab.node(n);
        let links = node.check("rdma link")?;
        for rail in [1, 2] {
            let wanted =
                format!("link rxe{rail}/1 state ACTIVE physical_state LINK_UP netdev eth{rail}");
            ensure!(links.contains(&wanted), "{}: {links}", node.name());
            let gids = node.gids(rail)?;
            ensure!(gids.iter().all(|g| g.2 == "RoCE v2"), "{gids:?}");
            node.gid_index(rail, Family::V4)?;
            node.gid_index(rail, Family::V6)?;
        }
        ensure!(links.lines().count() == 2, "{links}");
        ensure!(node.check("hostname")?.trim() == node.name());
        // Ours tells the same, and all that is needed to choose an address.
        let tool = paths::bin("underpass");
        let ours = node.check(format!("{} devices -j", tool.display()))?;
        let rows: Vec<serde_json::Value> = serde_json::from_str(&ours)?;
        ensure!(rows.len() == 2, "{ours}");
        for (rail, row) in (1..).zip(&rows) {
            ensure!(
                row["device"] == format!("rxe{rail}") && row["usable"] == true,
                "{row}"
            );
            ensure!(
                row["netdev"] == format!("eth{rail}") && row["state"] == "active",
                "{row}"
            );
            let all: Vec<_> = row["gids"].as_array().into_iter().flatten().collect();
            ensure!(all.iter().all(|g| g["type"] == "RoCE v2"), "{row}");
            for family in [Family::V4, Family::V6] {
                let index = node.gid_index(rail, family)?;
                ensure!(
                    all.iter().any(|g| g["index"] == index),
                    "{family:?} {index}: {row}"
                );
            }
        }
    }
    Ok(())
}

pub fn verbs_over_each_rail(lab: &mut Lab) -> Result<()> {
    for rail in [1, 2] {
        for family in [Family::V4, Family::V6] {
            let sent = |r| -> Result<[u64; 2]> {
                let of = |n| lab.node(n).counter(r, "sent_pkts");
                Ok([of(0)?, of(1)?])
            };
            let before = [sent(1)?, sent(2)?];
            ping_pong(lab, rail, family, 200)?.finish()?;
            let after = [sent(1)?, sent(2)?];
            for n in [0, 1] {
                let [one, two] = [0, 1].map(|r| after[r][n] - before[r][n]);
                let (on, off) = if rail == 1 { (one, two) } else { (two, one) };
                ensure!(on >= 200 && off == 0, "rail {rail}: {before:?} {after:?}");
            }
        }
    }
    Ok(())
}

/// What the benchmarks compare with, and what other tests filter packets with.
pub fn kernel_modules_on_demand(lab: &mut Lab) -> Result<()> {
    for n in 0..lab.nodes() {
        let node = lab.node(n);
        node.check("modprobe smc; modprobe smc_diag; grep -q ^smc_diag /proc/modules")?;
        node.check(
            "python3.11 -c 'import socket; socket.socket(43, socket.SOCK_STREAM, 0).listen()'",
        )?;
        // Nobody asks for these modules: the kernel loads them when the program needs them.
        node.check("iptables -A INPUT -p tcp --dport 9 -j DROP; iptables -t nat -A OUTPUT -p tcp --dport 9 -j DNAT --to 127.0.0.1:10")?;
        node.check("tc qdisc add dev eth0 root netem delay 1ms; tc qdisc del dev eth0 root")?;
        node.check("iptables -F; iptables -t nat -F; modprobe -r smc_diag smc")?;
    }
    Ok(())
}
