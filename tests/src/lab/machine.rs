//! One running virtual machine: the qemu process, its console, monitor and agent. Dropping it
//! pulls the plug.

use super::guest::Guest;
use super::kernel::Kernel;
use super::monitor::Monitor;
use super::wire::{mac, Wire};
use super::Spec;
use crate::harness::{until, Place, Program, Running};
use anyhow::{bail, Result};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const QEMU: &str = "qemu-system-x86_64";
/// Ten seconds or so are usual; a loaded machine of two processors may need many times that.
const BOOT: Duration = Duration::from_secs(180);

pub(super) struct Machine {
    qemu: Running,
    monitor: Monitor,
    pub guest: Guest,
    console: PathBuf,
}

impl Machine {
    /// Starts qemu; the machine boots meanwhile (see [`Machine::booted`]).
    pub fn start(
        spec: &Spec,
        kernel: &Kernel,
        dir: &Path,
        wires: &[Wire],
        node: usize,
        boots: usize,
    ) -> Result<Self> {
        let path = |what: &str| dir.join(format!("node{node}-boot{boots}.{what}"));
        let (monitor, agent, console) = (path("monitor"), path("agent"), path("console"));
        let listeners = [UnixListener::bind(&monitor)?, UnixListener::bind(&agent)?];
        let smp = spec.cpus.to_string();
        let memory = spec.memory_mib.to_string();
        // Without `no_timer_check` a kernel that gets no processor while it looks at its timer is lost.
        let append = format!(
            "no_timer_check console=ttyS0 quiet panic=-1 oops=panic mitigations=off net.ifnames=0 LABNODE={}",
            node + 1
        );
        let mut p = match spec.outside {
            None => Program::new(QEMU, &Place::bare()),
            Some(pid) => Program::new("nsenter", &Place::bare()).args([
                "--net",
                "--target",
                &pid.to_string(),
                "--",
                QEMU,
            ]),
        };
        p = p
            .words("-nodefaults -no-user-config -display none -no-reboot")
            // Without cmpxchg16b: a failing one leaves wrong flags for an interrupt to save (seen with
            // qemu 7.2), and the kernel, which allocates memory by it, dies under heavy traffic.
            .words("-accel tcg,thread=multi -cpu max,-cx16")
            .args(["-smp", &smp, "-m", &memory])
            .args(["-kernel", &text(&kernel.image)])
            .args(["-initrd", &text(&dir.join(super::IMAGE))])
            .args(["-append", &append])
            .args([
                "-chardev",
                &format!("file,id=console,path={}", text(&console)),
            ])
            .words("-serial chardev:console")
            .args(["-chardev", &socket("monitor", &monitor)])
            .words("-mon chardev=monitor,mode=control")
            .args(["-chardev", &socket("agent", &agent)])
            .words("-device virtio-serial-pci -device")
            .arg(format!(
                "virtserialport,chardev=agent,name={}",
                super::talk::PORT
            ))
            .arg("-virtfs")
            .arg("local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap");
        for (i, w) in wires.iter().enumerate() {
            let [local, remote] = [w.nic_path(node), w.remote_path(node)].map(|p| text(&p));
            let address = mac(i, node).map(|b| format!("{b:02x}")).join(":");
            p = p
                .arg("-netdev")
                .arg(format!(
                    "dgram,id=wire{i},local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
                ))
                .arg("-device")
                .arg(format!(
                    "virtio-net-pci,id=nic{i},netdev=wire{i},mac={address},romfile="
                ));
        }
        if spec.outside.is_some() {
            p = p.words(
                "-netdev user,id=outside -device virtio-net-pci,id=nico,netdev=outside,romfile=",
            );
        }
        let mut qemu = p.spawn()?;
        let [monitor, agent] = listeners.map(|l| accept(&l, &mut qemu));
        Ok(Machine {
            monitor: Monitor::new(monitor?)?,
            guest: Guest::new(agent?, &format!("lab{}", node + 1))?,
            qemu,
            console,
        })
    }

    /// Waits until the agent is there.
    pub fn booted(&mut self) -> Result<()> {
        self.guest.wait_hello(BOOT)
    }

    pub fn is_on(&mut self) -> bool {
        !self.qemu.has_ended()
    }

    /// The plug of a NIC is in or not: its carrier, which the machine sees.
    pub fn set_carrier(&mut self, wire: usize, on: bool) -> Result<()> {
        let arguments = serde_json::json!({"name": format!("nic{wire}"), "up": on});
        self.monitor.ask("set_link", arguments).map(|_| ())
    }

    /// What the console and qemu said.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "") + &self.qemu.stderr()
    }
}

fn text(p: &Path) -> String {
    // A comma separates qemu's options; doubled it is a comma.
    p.to_string_lossy().replace(',', ",,")
}

fn socket(id: &str, path: &Path) -> String {
    format!("socket,id={id},path={}", text(path))
}

/// Qemu connects at its start, or never.
fn accept(l: &UnixListener, qemu: &mut Running) -> Result<UnixStream> {
    l.set_nonblocking(true)?;
    let mut got = None;
    until("qemu connects", super::PATIENCE, || {
        got = l.accept().ok();
        got.is_some() || qemu.has_ended()
    })?;
    let Some((s, _)) = got else {
        bail!("qemu did not start: {}", qemu.stderr());
    };
    s.set_nonblocking(false)?;
    Ok(s)
}
