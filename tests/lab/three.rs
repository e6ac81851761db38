//! More than two machines: their wires are hubs of ours.

use crate::programs::await_ping;
use anyhow::{ensure, Result};
use underpass_tests::lab::{Family, Lab, Spec};

pub fn spec(agent: &str) -> Spec {
    Spec {
        nodes: 3,
        rails: 1,
        memory_mib: 512,
        ..Spec::pair(agent)
    }
}

pub fn three_machines(lab: &mut Lab) -> Result<()> {
    // Which of the others answer a machine on the rail?
    let answers = |lab: &Lab, from: usize| -> Result<Vec<usize>> {
        let mut yes = Vec::new();
        for to in (0..lab.nodes()).filter(|&to| to != from) {
            let to_address = lab.node(to).address(1, Family::V4);
            let ping = format!(
                "/bin/busybox ping -c 3 -W 2 {to_address} >/dev/null && echo yes || echo no"
            );
            if lab.node(from).check(ping)?.trim() == "yes" {
                yes.push(to);
            }
        }
        Ok(yes)
    };
    for (from, others) in [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])] {
        ensure!(answers(lab, from)? == others, "from {from}");
    }
    // One machine is cut off, the others are not.
    lab.rail(1).cut_to(2)?;
    ensure!(answers(lab, 0)? == [1]);
    ensure!(answers(lab, 2)?.is_empty());
    lab.rail(1).cut()?;
    await_ping(lab, 1, false)?;
    lab.rail(1).mend()?;
    ensure!(answers(lab, 0)? == [1, 2]);
    Ok(())
}
