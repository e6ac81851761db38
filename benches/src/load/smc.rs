//! Setting up the kernel's SMC, and looking what became of its connections: Debian has no
//! smc-tools. Messages and numbers are those of <linux/smc.h>, <linux/smc_diag.h> and
//! <linux/genetlink.h>.

use super::calls::AF_SMC;
use anyhow::{Context, Result};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_sys::protocols::{NETLINK_GENERIC, NETLINK_SOCK_DIAG};
use netlink_sys::Socket;
use serde::{Deserialize, Serialize};
use underpass_admin::netlink::{self, attribute, find, Raw};

/// An identifier that both machines give themselves; without one in common they do not speak
/// version 2. As long as the kernel wants it, 32 characters.
const UEID: &str = "UNDERPASS.LAB                   ";
/// A name for the network that all devices are connected to.
const PNET: &str = "UNDERPASSLAB";

const GENERIC_HEADER: usize = 4;

const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const SMC_NETLINK_GET_LGR_SMCR: u8 = 2;
const SMC_NETLINK_ADD_UEID: u8 = 10;
const SMC_NLA_EID_TABLE_ENTRY: u16 = 1;
const SMC_GEN_LGR_SMCR: u16 = 2;
const SMC_NLA_LGR_R_V2_COMMON: u16 = 7;
const SMC_NLA_LGR_V2_VER: u16 = 0;

const SMC_PNETID_ADD: u8 = 2;
const SMC_PNETID_NAME: u16 = 1;
const SMC_PNETID_ETHNAME: u16 = 2;
const SMC_PNETID_IBNAME: u16 = 3;
const SMC_PNETID_IBPORT: u16 = 4;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SMC_DIAG_LGRINFO: u16 = 2;
const SMC_DIAG_FALLBACK: u16 = 5;
const SMC_DIAG_MODE_SMCR: u8 = 0;
/// The kernel's states of SMC sockets.
const SMC_ACTIVE: u8 = 1;

/// A connected socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Conn {
    pub local_port: u16,
    pub peer_port: u16,
    /// Not fallen back to TCP, and not by shared memory.
    pub smcr: bool,
    /// Why it has fallen back; 0: it has not.
    pub fallback: u32,
    /// The RDMA device of its first link.
    pub device: String,
}

/// What `lab-load smc-show` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shown {
    pub conns: Vec<Conn>,
    /// The version of each SMC-R link group.
    pub versions: Vec<u8>,
}

/// Gives this machine the identifier, and the network's name to these interfaces and devices.
pub fn set_up(netdevs: &[String], devices: &[String]) -> Result<()> {
    let mut g = Generic::open()?;
    let smc = g.family("SMC_GEN_NETLINK")?;
    let ueid = string(SMC_NLA_EID_TABLE_ENTRY, UEID);
    g.0.ask(smc, NLM_F_ACK, &generic(SMC_NETLINK_ADD_UEID, &ueid))
        .context("UEID")?;
    let pnet = g.family("SMC_PNETID")?;
    let name = || string(SMC_PNETID_NAME, PNET);
    for n in netdevs {
        let entry = [name(), string(SMC_PNETID_ETHNAME, n)].concat();
        g.0.ask(pnet, NLM_F_ACK, &generic(SMC_PNETID_ADD, &entry))
            .with_context(|| format!("PNET ID of {n}"))?;
    }
    for d in devices {
        let device = string(SMC_PNETID_IBNAME, d);
        let entry = [name(), device, attribute(SMC_PNETID_IBPORT, &[1])].concat();
        g.0.ask(pnet, NLM_F_ACK, &generic(SMC_PNETID_ADD, &entry))
            .with_context(|| format!("PNET ID of {d}"))?;
    }
    Ok(())
}

/// What became of the sockets that are connected now.
pub fn show() -> Result<Shown> {
    let mut g = Generic::open()?;
    let smc = g.family("SMC_GEN_NETLINK")?;
    let mut versions = Vec::new();
    for m in
        g.0.ask(smc, NLM_F_DUMP, &generic(SMC_NETLINK_GET_LGR_SMCR, &[]))
            .context("link groups")?
    {
        let path = [
            SMC_GEN_LGR_SMCR,
            SMC_NLA_LGR_R_V2_COMMON,
            SMC_NLA_LGR_V2_VER,
        ];
        let mut at = m.get(GENERIC_HEADER..).unwrap_or_default();
        for kind in path {
            at = find(at, kind).unwrap_or_default();
        }
        // A link group of version 1 does not say so.
        versions.push(at.first().copied().unwrap_or(1));
    }
    // Family, two bytes of nothing, what to tell, and no socket in particular.
    let mut request = [0; 52];
    request[0] = AF_SMC as u8;
    request[3] = 1 << (SMC_DIAG_LGRINFO - 1) | 1 << (SMC_DIAG_FALLBACK - 1);
    let told = Netlink::open(NETLINK_SOCK_DIAG)?
        .ask(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &request)
        .context("smc_diag")?;
    let conns = told.iter().filter_map(|m| conn(m)).collect();
    Ok(Shown { conns, versions })
}

/// A `struct smc_diag_msg` and what follows it; `None`: not connected.
fn conn(m: &[u8]) -> Option<Conn> {
    const SIZE: usize = 64;
    let (head, rest) = (m.get(..SIZE)?, m.get(SIZE..)?);
    let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    if head[1] != SMC_ACTIVE {
        return None;
    }
    let fallback = find(rest, SMC_DIAG_FALLBACK)
        .and_then(|f| Some(u32::from_ne_bytes(f.get(..4)?.try_into().ok()?)));
    // The link's number, then the device's name.
    let device = find(rest, SMC_DIAG_LGRINFO)
        .and_then(|l| l.get(1..65)?.split(|b| *b == 0).next())
        .map(|n| String::from_utf8_lossy(n).into_owned());
    Some(Conn {
        local_port: port(4),
        peer_port: port(6),
        smcr: head[2] == SMC_DIAG_MODE_SMCR,
        fallback: fallback.unwrap_or(0),
        device: device.unwrap_or_default(),
    })
}

struct Netlink(Socket);

impl Netlink {
    fn open(protocol: isize) -> Result<Self> {
        Ok(Netlink(netlink::open(protocol)?))
    }

    /// One request and all that the kernel says to it.
    fn ask(&mut self, kind: u16, flags: u16, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        let bytes = payload.to_vec();
        let mut told = Vec::new();
        netlink::ask(&self.0, flags, Raw { kind, bytes }, |m: Raw| {
            told.push(m.bytes);
            Ok(())
        })?;
        Ok(told)
    }
}

struct Generic(Netlink);

impl Generic {
    fn open() -> Result<Self> {
        Ok(Generic(Netlink::open(NETLINK_GENERIC)?))
    }

    /// The number of a family.
    fn family(&mut self, name: &str) -> Result<u16> {
        let request = generic(CTRL_CMD_GETFAMILY, &string(CTRL_ATTR_FAMILY_NAME, name));
        let told = self
            .0
            .ask(GENL_ID_CTRL, NLM_F_ACK, &request)
            .with_context(|| format!("the kernel does not know {name}"))?;
        let id = told.iter().find_map(|m| {
            let id = find(m.get(GENERIC_HEADER..)?, CTRL_ATTR_FAMILY_ID)?;
            Some(u16::from_ne_bytes(id.get(..2)?.try_into().ok()?))
        });
        id.with_context(|| format!("{name} has no number"))
    }
}

fn generic(command: u8, attributes: &[u8]) -> Vec<u8> {
    [&[command, 1, 0, 0], attributes].concat()
}

fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's list of families is itself a family, with a number that is fixed.
    #[test]
    fn the_kernel_answers() {
        let mut g = Generic::open().unwrap();
        assert_eq!(g.family("nlctrl").unwrap(), GENL_ID_CTRL);
        assert!(g.family("no such family").is_err());
    }

    #[test]
    fn connections() {
        let mut m = vec![0; 64];
        (m[1], m[2]) = (SMC_ACTIVE, SMC_DIAG_MODE_SMCR);
        m[4..8].copy_from_slice(&[0x12, 0x34, 0, 80]);
        let mut link = vec![0; 148];
        link[1..5].copy_from_slice(b"rxe1");
        m.extend(attribute(SMC_DIAG_LGRINFO, &link));
        let c = conn(&m).unwrap();
        assert!(c.smcr && c.fallback == 0 && c.device == "rxe1");
        assert_eq!((c.local_port, c.peer_port), (0x1234, 80));
        m[2] = 1;
        m.truncate(64);
        m.extend(attribute(SMC_DIAG_FALLBACK, &[2, 0, 3, 3, 0, 0, 0, 0]));
        let c = conn(&m).unwrap();
        assert!(!c.smcr && c.fallback == 0x0303_0002);
        assert!(conn(&m[..63]).is_none());
        m[1] = 10;
        assert!(conn(&m).is_none());
    }
}
