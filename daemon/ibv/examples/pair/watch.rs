//! Prints what happens to this machine's devices, and when.

use crate::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use underpass_ibv::{Device, Ibv};
use underpass_rdma::devices::{Change, SysDevice, Tree, Watch};
use underpass_rdma::verbs::{Device as _, DeviceEvent, DeviceId, Provider};

fn describe(d: &SysDevice) -> String {
    let mut text = format!(
        "{} ({}) bus {} node {:?}",
        d.id.name,
        d.id.index,
        d.pci.as_deref().unwrap_or("virtual"),
        d.numa_node
    );
    for p in &d.ports {
        text += &format!(
            "; port {} {} {} {} Mb/s on {}",
            p.port,
            d.fabric(p),
            p.state,
            p.speed_mbps.unwrap_or(0),
            p.netdev.as_deref().unwrap_or("-")
        );
        for g in &p.gids {
            text += &format!(" [{} {} {}]", g.index, g.kind, g.gid);
        }
        if let Err(reason) = d.usable(p) {
            text += &format!(" unusable: {reason}");
        }
    }
    text
}

pub fn run(long: Duration) -> Result<()> {
    let ibv = Ibv::new()?;
    let mut watch = Watch::new(Tree::system());
    let mut open: BTreeMap<DeviceId, Device> = BTreeMap::new();
    let start = Instant::now();
    let say = |what: String| println!("{:7.3} {what}", start.elapsed().as_secs_f64());
    let mut slowest = Duration::ZERO;
    while start.elapsed() < long {
        let mut gone = Vec::new();
        for (id, device) in &open {
            loop {
                match device.poll_event() {
                    Ok(None) => break,
                    Ok(Some(event)) => {
                        say(format!("{}: {event:?}", id.name));
                        match event {
                            DeviceEvent::GidChange(_) => watch.stale(id),
                            DeviceEvent::Removed => gone.push(id.clone()),
                            _ => {}
                        }
                    }
                    Err(e) => {
                        say(format!("{}: no more events: {e}", id.name));
                        gone.push(id.clone());
                        break;
                    }
                }
            }
        }
        for id in gone {
            say(format!("{}: closing", id.name));
            open.remove(&id);
        }
        let looked = Instant::now();
        let changes = watch.look();
        if changes.is_empty() {
            slowest = slowest.max(looked.elapsed());
        }
        for change in changes {
            match change {
                Change::Added(d) => {
                    say(format!("added in {:?}: {}", looked.elapsed(), describe(&d)));
                    match ibv.open(&d.id) {
                        Ok(device) => {
                            let asked = Instant::now();
                            let info = device.info()?;
                            let same = d
                                .ports
                                .iter()
                                .zip(&info.ports)
                                .all(|(a, b)| a.gids == b.gids);
                            say(format!("info in {:?}, same GIDs: {same}", asked.elapsed()));
                            open.insert(d.id, device);
                        }
                        Err(e) => say(format!("{}: cannot open: {e}", d.id.name)),
                    }
                }
                Change::Changed(d) => say(format!("changed: {}", describe(&d))),
                Change::Removed(id) => {
                    say(format!("removed: {} ({})", id.name, id.index));
                    open.remove(&id);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    open.clear();
    say(format!(
        "slowest idle look {slowest:?}, live: {:?}",
        ibv.live()
    ));
    Ok(())
}
