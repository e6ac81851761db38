//! Two network namespaces with a wire between them: what two pods of one node look like to the
//! kernel. Needs root.

use anyhow::{bail, Context, Result};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct Pods {
    names: [String; 2],
}

impl Pods {
    /// Addresses of the two pods, and of a service that leads from the first to the second.
    pub const A: &'static str = "10.77.0.1";
    pub const B: &'static str = "10.77.0.2";
    pub const SERVICE: &'static str = "10.96.0.9";

    pub fn new() -> Result<Self> {
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let name = |side: &str| format!("underpass-{}-{n}{side}", std::process::id());
        let pods = Pods {
            names: [name("a"), name("b")],
        };
        let [a, b] = &pods.names;
        for p in [a, b] {
            ip(&format!("netns add {p}"))?;
            ip(&format!("-n {p} link set lo up"))?;
        }
        ip(&format!(
            "link add eth0 netns {a} type veth peer name eth0 netns {b}"
        ))?;
        for (p, addr) in [(a, Self::A), (b, Self::B)] {
            ip(&format!("-n {p} addr add {addr}/24 dev eth0"))?;
            ip(&format!("-n {p} link set eth0 up"))?;
        }
        ip(&format!("-n {a} route add {}/32 dev eth0", Self::SERVICE))?;
        Ok(pods)
    }

    pub fn a(&self) -> &str {
        &self.names[0]
    }

    pub fn b(&self) -> &str {
        &self.names[1]
    }

    /// Connections of the first pod to `SERVICE:port` arrive at `B:to`, as with a cluster service.
    pub fn dnat(&self, port: u16, to: u16) -> Result<()> {
        let rule = format!(
            "netns exec {} iptables -w -t nat -A OUTPUT -d {} -p tcp --dport {port} -j DNAT --to-destination {}:{to}",
            self.a(),
            Self::SERVICE,
            Self::B
        );
        ip(&rule)
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        for n in &self.names {
            let _ = ip(&format!("netns del {n}"));
        }
    }
}

fn ip(line: &str) -> Result<()> {
    let out = Command::new("ip")
        .args(line.split_whitespace())
        .output()
        .context("ip")?;
    if !out.status.success() {
        bail!("ip {line}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}
