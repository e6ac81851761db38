//! `underpass devices`: this node's RDMA devices, and why one of them carries no lanes. Reads what the kernel shows;
//! needs no daemon, no RDMA library and no privilege.

use crate::cli;
use crate::out::{self, clean, Outcome};
use serde_json::{json, Value};
use std::process::ExitCode;
use underpass_rdma::devices::{SysDevice, SysPort, Tree};

pub fn run(o: &cli::Json) -> Outcome {
    let devices = Tree::system().scan();
    match o.json {
        true => out::print_json(&rows(&devices))?,
        false => out::print(&table(&devices))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn each(devices: &[SysDevice]) -> impl Iterator<Item = (&SysDevice, &SysPort)> {
    devices
        .iter()
        .flat_map(|d| d.ports.iter().map(move |p| (d, p)))
}

fn rows(devices: &[SysDevice]) -> Value {
    let row = |(d, p): (&SysDevice, &SysPort)| {
        let gids: Vec<_> = p
            .gids
            .iter()
            .map(|g| {
                json!({ "gid": g.gid.to_string(), "type": g.kind.to_string(), "index": g.index, "netdev": g.netdev })
            })
            .collect();
        json!({
            "device": d.id.name,
            "port": p.port,
            "state": p.state.to_string(),
            "type": d.fabric(p).to_string(),
            "netdev": p.netdev,
            "pci": d.pci,
            "numa": d.numa_node,
            "mbps": p.speed_mbps,
            "usable": d.usable(p).is_ok(),
            "reason": d.usable(p).err().map(|e| e.to_string()),
            "gids": gids,
        })
    };
    each(devices).map(row).collect()
}

fn table(devices: &[SysDevice]) -> String {
    if each(devices).next().is_none() {
        return "no RDMA devices (no-rdma-device): connections to other nodes stay on TCP\n".into();
    }
    let mut t = format!(
        "{:<12} {:<4} {:<8} {:<10} {:<10} {:<12} {:<4} {:>8} {:<17} GIDs\n",
        "Device", "Port", "State", "Type", "Netdev", "PCI", "NUMA", "Gbit/s", "Lanes"
    );
    let or = |s: Option<String>| s.unwrap_or_else(|| "-".into());
    for (d, p) in each(devices) {
        let gids: Vec<_> = p.gids.iter().map(|g| g.gid.to_string()).collect();
        let line = format!(
            "{:<12} {:<4} {:<8} {:<10} {:<10} {:<12} {:<4} {:>8} {:<17} {}",
            clean(&d.id.name),
            p.port,
            p.state,
            d.fabric(p),
            clean(&or(p.netdev.clone())),
            clean(&d.pci.clone().unwrap_or_else(|| "virtual".into())),
            or(d.numa_node.map(|n| n.to_string())),
            or(p.speed_mbps.map(|m| format!("{}", f64::from(m) / 1000.0))),
            d.usable(p)
                .map_or_else(|e| e.to_string(), |()| "yes".into()),
            gids.join(" ")
        );
        t.push_str(line.trim_end());
        t.push('\n');
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_devices_it_says_what_follows() {
        assert!(table(&[]).contains("stay on TCP"));
        assert_eq!(rows(&[]), json!([]));
    }
}
