//! What `underpass ss` shows: the rows of all family tables, each with what is known of its other
//! end. Computed on the blocking pool from handles that the core gave away; reads tables and
//! `/proc`, changes nothing.

use crate::admin::Row;
use crate::family::Family;
use crate::party::PartyId;
use crate::process;
use crate::socket::normal;
use link::family::{flag, state, Endpoint, View};
use link::reason::Reason;
use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, SocketAddrV6};
use std::sync::Arc;

/// A process of a family, as the core knows it.
#[derive(Clone, Debug)]
pub struct Holder {
    pub party: PartyId,
    pub pid: u32,
    pub own_pid: u32,
    pub netns: u64,
    pub comm: String,
}

/// A family with its processes that are connected now, and others that were found in `/proc`, with
/// their start times.
pub struct Snapshot {
    pub family: Arc<Family>,
    pub holders: Vec<Holder>,
    pub relics: Vec<(u64, Holder)>,
}

/// One row, and where it came from.
#[derive(Clone, Debug)]
pub struct Entry {
    pub row: Row,
    pub party: PartyId,
    pub conn: u32,
    pub gen: u32,
    /// Index of the other end's row, if that is among them.
    pub other: Option<usize>,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    lane: Option<(u64, u32, u32)>,
}

impl Entry {
    /// Local and peer address of a connection.
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.local?, self.peer?))
    }
}

/// All rows.
pub fn entries(families: &[Snapshot]) -> Vec<Entry> {
    let mut all = Vec::new();
    for f in families {
        let lives = |r: &&(u64, Holder)| process::start_time(r.1.pid) == Some(r.0);
        let relics = f.relics.iter().filter(lives).map(|r| &r.1);
        // A family that nobody has vouched for shows the sockets that its processes hold, no others.
        let held = f.holders.is_empty().then(|| {
            let all = relics.clone().flat_map(|h| process::sockets(h.pid));
            all.collect::<HashSet<u64>>()
        });
        // The namespace may have changed since the hello; an unreadable one stays as it was.
        let holders: Vec<Holder> = f
            .holders
            .iter()
            .chain(relics)
            .map(|h| Holder {
                netns: process::netns(h.pid).unwrap_or(h.netns),
                comm: process::comm(h.pid).unwrap_or_else(|| h.comm.clone()),
                ..h.clone()
            })
            .collect();
        for v in f.family.views() {
            // Not yet named: younger than the shim's first look at it.
            let shown = held.as_ref().is_none_or(|s| s.contains(&v.inode));
            if v.flags & flag::NAMED != 0 && shown {
                if let Some(h) = holder_of(&holders, &v) {
                    all.push(entry(&v, h));
                }
            }
        }
    }
    link_ends(&mut all);
    all
}

/// The process that a row is shown under: one that holds the connection, else any of the family.
/// `None` where nobody holds it any more: a child that ended without closing leaves its entry.
fn holder_of<'a>(holders: &'a [Holder], v: &View) -> Option<&'a Holder> {
    let here = holders.iter().find(|h| v.holders.contains(&h.own_pid));
    here.or_else(|| {
        let any = holders.first()?;
        // Numbers in the table are those of the family's pid namespace: ours only if they agree.
        let ours = any.pid == any.own_pid && !v.holders.is_empty();
        let lives = |p: &u32| process::start_time(*p).is_some();
        (!ours || v.holders.iter().any(lives)).then_some(any)
    })
}

fn entry(v: &View, h: &Holder) -> Entry {
    let attached = v.flags & flag::LANE != 0;
    let up = match (attached && v.tx_up, attached && v.rx_up) {
        (true, true) => "both",
        (true, false) => "tx",
        (false, true) => "rx",
        (false, false) => "none",
    };
    let (local, peer) = (address(&v.local), address(&v.peer));
    let listening = v.state == state::LISTEN;
    let row = Row {
        state: match v.state {
            state::LISTEN => "LISTEN",
            state::OPEN => "ACTIVE",
            _ => "INIT",
        }
        .into(),
        uid: v.uid,
        inode: v.inode,
        local: local.map(|a| a.to_string()).unwrap_or_default(),
        peer: peer
            .filter(|_| !listening)
            .map(|a| a.to_string())
            .unwrap_or_default(),
        intf: "0000".into(),
        mode: String::new(),
        reason: v.reason,
        peer_reason: v.peer_reason,
        up: up.into(),
        far: attached && v.flags & flag::FAR != 0,
        rail: None,
        pid: h.pid,
        comm: h.comm.clone(),
        netns: h.netns,
        role: if v.flags & flag::CLIENT != 0 {
            "client"
        } else {
            "server"
        }
        .into(),
        link: if attached { v.link } else { 0 },
        lane: if attached { v.lane } else { 0 },
        tx_epoch: v.tx_epoch,
        rx_epoch: v.rx_epoch,
        tx_ring_bytes: if attached { ring_bytes(v.ring_log2) } else { 0 },
        lane_tx_bytes: v.lane_tx,
        lane_rx_bytes: v.lane_rx,
        tcp_tx_bytes: v.tcp_tx,
        tcp_rx_bytes: v.tcp_rx,
    };
    Entry {
        row,
        party: h.party,
        conn: v.index,
        gen: v.gen,
        other: None,
        local,
        peer: peer.filter(|_| !listening),
        // The other end of one that leads to another node is not on its link.
        lane: (attached && v.flags & flag::FAR == 0).then_some((v.link, v.lane, v.side)),
    }
}

/// The table may say anything: only sizes that a ring can have are shown.
fn ring_bytes(log2: u32) -> u64 {
    use link::layout::{RING_LOG2_MAX, RING_LOG2_MIN};
    match log2 {
        RING_LOG2_MIN..=RING_LOG2_MAX => 1 << log2,
        _ => 0,
    }
}

fn address(e: &Endpoint) -> Option<SocketAddr> {
    (e.family != 0).then(|| normal(SocketAddr::V6(SocketAddrV6::new(e.ip, e.port, 0, 0))))
}

/// Finds each row's other end, and from it the peer's reason and the mode.
fn link_ends(all: &mut [Entry]) {
    let mut lanes = HashMap::new();
    let mut near = HashMap::new();
    let mut far: HashMap<_, Option<usize>> = HashMap::new();
    for (i, e) in all.iter().enumerate() {
        if let Some(l) = e.lane {
            lanes.insert(l, i);
        }
        if let (Some(a), Some(b)) = (e.local, e.peer) {
            near.insert((e.row.netns, a, b), i);
            // In another namespace: only if there is no doubt which.
            far.entry((a, b))
                .and_modify(|v| *v = None)
                .or_insert(Some(i));
        }
    }
    let find = |e: &Entry| {
        let lane = e
            .lane
            .and_then(|(link, lane, side)| lanes.get(&(link, lane, 1 ^ side)).copied());
        let (a, b) = (e.local?, e.peer?);
        lane.or_else(|| near.get(&(e.row.netns, b, a)).copied())
            .or_else(|| far.get(&(b, a)).copied().flatten())
    };
    let found: Vec<Option<usize>> = all.iter().map(find).collect();
    for (i, other) in found.into_iter().enumerate() {
        all[i].other = other.filter(|o| *o != i);
        if let Some(o) = all[i].other {
            all[i].row.peer_reason = all[o].row.reason;
        }
    }
    for e in all {
        set_mode(&mut e.row);
    }
}

/// The `Mode` column.
pub fn set_mode(row: &mut Row) {
    row.mode = if row.up == "none" {
        format!("TCP 0x{:08x}/0x{:08x}", row.reason, row.peer_reason)
    } else if row.far {
        "SMCR".into()
    } else {
        "SMCD".into()
    };
}

/// Rows whose other end has no row: find out whether that end is here, but without a shim.
///
/// In the same network namespace the other end's socket stands in `/proc/PID/net/tcp`. If it does,
/// its holders can be seen, and none of them has the shim loaded, it is a stranger. A shim that
/// has not named it yet, or has not called the daemon yet, has it loaded.
pub fn mark_strangers(all: &mut [Entry]) {
    let mut tables: HashMap<u64, HashMap<(SocketAddr, SocketAddr), u64>> = HashMap::new();
    let mut open: Vec<(usize, u64)> = Vec::new();
    for (i, e) in all.iter().enumerate() {
        let (None, 0, Some(a), Some(b)) = (e.other, e.row.peer_reason, e.local, e.peer) else {
            continue;
        };
        if e.row.far {
            continue; // has a lane, so its other end has a shim
        }
        let table = tables
            .entry(e.row.netns)
            .or_insert_with(|| tcp_table(e.row.pid));
        // Inode 0: closed by its program, the kernel finishes.
        if let Some(inode) = table.get(&(b, a)).filter(|i| **i != 0) {
            open.push((i, *inode));
        }
    }
    if open.is_empty() {
        return;
    }
    let strange = strangers(&open.iter().map(|o| o.1).collect());
    for (i, _) in open.iter().filter(|o| strange.contains(&o.1)) {
        all[*i].row.peer_reason = Reason::PeerNoShim.code();
        set_mode(&mut all[*i].row);
    }
}

/// Those of these sockets that processes without a shim hold, and nobody else, as far as we may look.
pub fn strangers(inodes: &HashSet<u64>) -> HashSet<u64> {
    let mut shims: HashMap<u32, bool> = HashMap::new();
    let mut shim = |p: &u32| *shims.entry(*p).or_insert_with(|| may_have_shim(*p));
    let strange = |(i, pids): (u64, Vec<u32>)| (!pids.iter().any(&mut shim)).then_some(i);
    holders_of(inodes).into_iter().filter_map(strange).collect()
}

/// Which processes hold these sockets, as far as we may look.
pub fn holders_of(inodes: &HashSet<u64>) -> HashMap<u64, Vec<u32>> {
    let mut all: HashMap<u64, Vec<u32>> = HashMap::new();
    let Ok(proc) = std::fs::read_dir("/proc") else {
        return all;
    };
    for pid in proc
        .flatten()
        .filter_map(|d| d.file_name().to_str()?.parse::<u32>().ok())
    {
        for socket in process::sockets(pid) {
            if inodes.contains(&socket) {
                all.entry(socket).or_default().push(pid);
            }
        }
    }
    all
}

/// Is the shim's library mapped in this process? If we cannot tell, it may be.
fn may_have_shim(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_or(true, |m| m.contains("libunderpass"))
}

/// The established connections of a process's network namespace, with socket inodes.
pub fn tcp_table(pid: u32) -> HashMap<(SocketAddr, SocketAddr), u64> {
    tcp_lines(pid, |state| state == "01")
}

/// The same with connections that are being made or closed.
pub fn tcp_sockets(pid: u32) -> HashMap<(SocketAddr, SocketAddr), u64> {
    tcp_lines(pid, |state| state != "0A")
}

fn tcp_lines(
    pid: u32,
    wanted: impl Fn(&str) -> bool + Copy,
) -> HashMap<(SocketAddr, SocketAddr), u64> {
    let mut all = HashMap::new();
    for file in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
        all.extend(text.lines().skip(1).filter_map(|l| tcp_line(l, wanted)));
    }
    all
}

fn tcp_line(line: &str, wanted: impl Fn(&str) -> bool) -> Option<((SocketAddr, SocketAddr), u64)> {
    let mut f = line.split_ascii_whitespace();
    let local = hex_address(f.nth(1)?)?;
    let peer = hex_address(f.next()?)?;
    wanted(f.next()?).then_some(())?;
    Some(((local, peer), f.nth(5)?.parse().ok()?))
}

/// `0100007F:1F90`: words in the processor's byte order, the port plain.
fn hex_address(s: &str) -> Option<SocketAddr> {
    let (ip, port) = s.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<[u8; 4]>> = (0..ip.len() / 8)
        .map(|i| {
            u32::from_str_radix(ip.get(i * 8..i * 8 + 8)?, 16)
                .ok()
                .map(u32::to_ne_bytes)
        })
        .collect();
    let bytes = words?.concat();
    let ip: std::net::IpAddr = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok()?.into(),
        16 => <[u8; 16]>::try_from(bytes).ok()?.into(),
        _ => return None,
    };
    Some(normal(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_net_tcp_shows_own_connections() {
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let a = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let (b, _) = l.accept().unwrap();
        let t = tcp_table(std::process::id());
        let key = (a.local_addr().unwrap(), a.peer_addr().unwrap());
        let ino = rustix::fs::fstat(&a).unwrap().st_ino;
        assert_eq!(t.get(&key), Some(&ino));
        let ino = rustix::fs::fstat(&b).unwrap().st_ino;
        assert_eq!(t.get(&(key.1, key.0)), Some(&ino));
    }

    #[test]
    fn hex_addresses() {
        let v4 = hex_address("0100007F:1F90").unwrap();
        assert_eq!(v4, "127.0.0.1:8080".parse().unwrap());
        let mapped = hex_address("0000000000000000FFFF00000100007F:0050").unwrap();
        assert_eq!(mapped, "127.0.0.1:80".parse().unwrap());
        let v6 = hex_address("00000000000000000000000001000000:0050").unwrap();
        assert_eq!(v6, "[::1]:80".parse().unwrap());
        for bad in ["", ":", "zz:1", "01:1", "0100007F:10000", "é100007F:1"] {
            assert_eq!(hex_address(bad), None, "{bad}");
        }
    }
}
