//! The columns that `-d`, `-D` and `-R` add: those of `smcss`, with values from the lane.

use crate::out::clean;
use std::collections::HashMap;
use underpass_admin::Row;

/// What a column needs besides its own row: the row of the other end, if the caller sees it, and what the kernel
/// knows.
pub struct Ctx<'a> {
    /// Shutdown mask by inode.
    shut: HashMap<u64, u8>,
    by_lane: HashMap<(u64, u32), Vec<&'a Row>>,
}

impl<'a> Ctx<'a> {
    pub fn new(rows: &'a [Row], shut: HashMap<u64, u8>) -> Self {
        let mut by_lane: HashMap<_, Vec<_>> = HashMap::new();
        // The other end of a lane to another node has no row on this node.
        let local = |r: &&Row| super::promoted(r) && !r.remote && r.link != 0;
        for r in rows.iter().filter(local) {
            by_lane.entry((r.link, r.lane)).or_default().push(r);
        }
        Ctx { shut, by_lane }
    }

    /// The other end of `r`'s lane.
    fn peer(&self, r: &Row) -> Option<&'a Row> {
        self.by_lane
            .get(&(r.link, r.lane))?
            .iter()
            .copied()
            .find(|p| !std::ptr::eq(*p, r))
    }
}

pub struct Column {
    pub head: &'static str,
    pub width: usize,
    /// `None`: not known.
    pub value: fn(&Row, &Ctx<'_>) -> Option<String>,
}

const fn column(
    head: &'static str,
    width: usize,
    value: fn(&Row, &Ctx<'_>) -> Option<String>,
) -> Column {
    Column { head, width, value }
}

/// A cursor. The epoch takes the place of SMC's wrap count.
fn cursor(epoch: u32, bytes: u64) -> Option<String> {
    Some(format!(
        "{:04x}:{:08x}",
        epoch & 0xffff,
        bytes & 0xffff_ffff
    ))
}

fn tx_made(r: &Row, _: &Ctx<'_>) -> Option<String> {
    cursor(r.tx_epoch, r.lane_tx_bytes)
}

fn tx_taken(r: &Row, c: &Ctx<'_>) -> Option<String> {
    cursor(r.tx_epoch, c.peer(r)?.lane_rx_bytes)
}

/// Size of the ring in which `r` sends.
fn ring(r: &Row) -> Option<String> {
    (r.tx_ring_bytes != 0).then(|| format!("{:08x}", r.tx_ring_bytes))
}

fn flags(r: &Row, direction: &str) -> Option<String> {
    Some(
        if r.up == "both" || r.up == direction {
            "01:00"
        } else {
            "00:00"
        }
        .into(),
    )
}

/// The directions that are shut down, as `smcss` writes them.
fn shutdown(mask: u8) -> String {
    let (r, w) = (mask & 1 != 0, mask & 2 != 0);
    format!(
        " {}-{}",
        if r { 'R' } else { '<' },
        if w { 'W' } else { '>' }
    )
}

/// Identifies one direction of a lane, like the receiving end's token in SMC.
fn token(r: &Row, epoch: u32) -> Option<String> {
    Some(format!("{:08x}{epoch:08x}", r.lane))
}

/// Identifies the process at an end.
fn gid(r: &Row) -> String {
    format!("{:08x}{:08x}", r.netns & 0xffff_ffff, r.pid)
}

pub const DEBUG: &[Column] = &[
    column("Shutd", 5, |r, c| {
        c.shut.get(&r.inode).copied().map(shutdown)
    }),
    column("Token", 8, |r, _| Some(format!("{:08x}", r.lane))),
    column("Sndbuf", 8, |r, _| ring(r)),
    // A ring belongs to its sender: the incoming one is the other end's outgoing one.
    column("Rcvbuf", 8, |r, c| ring(c.peer(r)?)),
    column("Peerbuf", 8, |r, _| ring(r)),
    column("rxprod-Cursor", 13, |r, c| {
        cursor(r.rx_epoch, c.peer(r)?.lane_tx_bytes)
    }),
    column("rxcons-Cursor", 13, |r, _| {
        cursor(r.rx_epoch, r.lane_rx_bytes)
    }),
    column("rxFlags", 7, |r, _| flags(r, "rx")),
    column("txprod-Cursor", 13, tx_made),
    column("txcons-Cursor", 13, tx_taken),
    column("txFlags", 7, |r, _| flags(r, "tx")),
    column("txprep-Cursor", 13, tx_made),
    column("txsent-Cursor", 13, tx_made),
    column("txfin-Cursor", 13, tx_taken),
];

fn filled(s: &str) -> Option<String> {
    (!s.is_empty()).then(|| clean(s))
}

/// As in SMC, role and numbers are those of the link between the two nodes, not of the connection.
pub const SMCR: &[Column] = &[
    column("Role", 4, |r, _| match r.rail.as_ref()?.role.as_str() {
        "server" => Some("SERV".into()),
        "client" => Some("CLNT".into()),
        _ => None,
    }),
    column("IB-device", 15, |r, _| filled(&r.rail.as_ref()?.device)),
    column("Port", 4, |r, _| {
        Some(format!("{:02x}", r.rail.as_ref()?.port))
    }),
    column("Linkid", 6, |r, _| {
        Some(format!("{:02x}", r.rail.as_ref()?.link))
    }),
    column("GID", 40, |r, _| filled(&r.rail.as_ref()?.gid)),
    column("Peer-GID", 8, |r, _| filled(&r.rail.as_ref()?.peer_gid)),
];

pub const SMCD: &[Column] = &[
    column("GID", 16, |r, _| Some(gid(r))),
    column("Token", 16, |r, _| token(r, r.rx_epoch)),
    column("Peer-GID", 16, |r, c| c.peer(r).map(gid)),
    column("Peer-Token", 16, |r, _| token(r, r.tx_epoch)),
    column("Linkid", 8, |r, _| Some(format!("{:08x}", r.link))),
];

#[cfg(test)]
mod tests {
    use super::shutdown;

    #[test]
    fn shutdown_reads_as_in_smcss() {
        assert_eq!([0, 1, 2, 3].map(shutdown), [" <->", " R->", " <-W", " R-W"]);
    }
}
