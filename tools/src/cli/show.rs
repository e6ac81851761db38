//! The options of the commands that show connections.

use clap::{Args, ValueEnum};
use std::time::Duration;

pub const SS_LONG: &str = "\
Show the TCP sockets of all programs under the shim, with the columns, options and modes of smcss \
from smc-tools. Without options: all connected sockets. In a network namespace, its sockets only; \
root, and the daemon's own user, see all from the daemon's namespace.

Columns:
  State          INIT (neither connected nor listening), LISTEN, ACTIVE, or a closing state
  UID, Inode     owner and inode of the socket, as in `ss -e`
  Local Address, Peer Address
                 `..` stands for what was cut off; -W shows it
  Intf           interface index; 0000: not bound to one
  Mode           SMCD  through shared memory
                 SMCR  through RDMA
                 TCP 0xLOCAL/0xPEER
                       through TCP, with the reason of this end and of the other; a reason that is 0
                       or not known may be missing. `-e` explains them, `underpass reasons` lists them";

pub const SS_AFTER: &str = "\
Columns that -d adds, for SMCD and SMCR connections (`-`: not known):
  Shutd          <-> open, R-> cannot receive, <-W cannot send, R-W neither
  Token          names the connection on its link group
  Sndbuf, Rcvbuf size of the outgoing and of the incoming ring, hexadecimal
  Peerbuf        size of the ring that the peer receives from: the outgoing one
  rxprod-Cursor, rxcons-Cursor
                 EPOCH:BYTES put into the incoming ring by the peer, and taken out here
  rxFlags        01: this direction is on the ring now
  txprod-Cursor, txcons-Cursor, txFlags
                 the same for the outgoing ring
  txprep-Cursor, txsent-Cursor, txfin-Cursor
                 as txprod, txprod and txcons: shared memory has no stage between them
Columns that -D adds:
  GID, Peer-GID  the process at each end: network namespace and process id, 8 digits each
  Token, Peer-Token
                 lane and epoch of each direction; one end's Token is the other's Peer-Token
  Linkid         the link group (memory and doorbells that two processes share)
Columns that -R adds (of the RDMA link that carries the connection now; it changes when a rail fails):
  Role           SERV or CLNT: part of this node among the two
  IB-device, Port
                 the local device and its port, hexadecimal; see `underpass devices`
  Linkid         number of the link, hexadecimal
  GID, Peer-GID  addresses of the two ends of the link; shown to root on the node only
-j prints an array of objects with the keys state, uid, inode, local, peer, intf, mode; -d, -D and -R \
add their columns under the lower-case names shown above; -e adds reason and peer_reason (null, or \
an object with code, name, text and advice; for an end with one direction on the ring those of the other \
direction), rail (null, or an object with role, device, port, link, \
gid and peer_gid), at (null, or an object with namespace, pod, container, sandbox and id) and what it tells \
about the process and its bytes.

Examples:
  underpass ss -e                    everything about every connection, in words
  underpass ss -a -W                 listening sockets too, addresses whole
  underpass ss -R                    connections through RDMA, with device, port and GIDs
  underpass ss -j | jq '.[] | select(.mode | startswith(\"TCP\"))'
  underpass ss -W --watch            the table anew every 2 seconds
  underpass ss -ej --watch 10 >> log one line of JSON every 10 seconds";

const WATCH: &str = "\
Show it anew every SECONDS (2 if left out; 0.1 to 86400), until interrupted or until nobody reads it. \
On a terminal the screen is cleared before each table; elsewhere each has the time above it, and an \
empty line between two. With -j each is an array on one line, and nothing else. A daemon that goes \
away is asked again.";

/// An interval: fractions of a second are allowed.
fn seconds(s: &str) -> Result<Duration, String> {
    let range = 0.1..=86_400.0;
    let n = s.parse().ok().filter(|n: &f64| range.contains(n));
    n.map(Duration::from_secs_f64)
        .ok_or_else(|| "not a number of seconds from 0.1 to 86400".into())
}

#[derive(Clone, Debug, Default, Args)]
pub struct Ss {
    /// Show all sockets: listening, connecting, connected and closing
    #[arg(short, long)]
    pub all: bool,
    /// Show listening sockets only
    #[arg(short, long, conflicts_with_all = ["all", "debug", "smcd", "smcr"])]
    pub listening: bool,
    /// Show debug information, such as shutdown state and cursors
    #[arg(short, long)]
    pub debug: bool,
    /// Show detailed SMC-D information (shared memory); only such connections
    #[arg(short = 'D', long, conflicts_with = "smcr")]
    pub smcd: bool,
    /// Show detailed SMC-R information (RDMA); only such connections
    #[arg(short = 'R', long)]
    pub smcr: bool,
    /// Do not cut off addresses
    #[arg(short = 'W', long)]
    pub wide: bool,
    /// Explain each connection in words: process, bytes, reasons and what to do about them
    #[arg(short, long)]
    pub explain: bool,
    /// Show whose connection it is: namespace/pod/container
    #[arg(short, long)]
    pub pods: bool,
    /// Show connections of pods in this Kubernetes namespace only, and whose they are
    #[arg(short, long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Print JSON
    #[arg(short, long)]
    pub json: bool,
    /// Show it anew every SECONDS (2), until interrupted or until nobody reads it
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = seconds, long_help = WATCH)]
    pub watch: Option<Duration>,
    /// Print the version
    #[arg(short = 'v', visible_short_alias = 'V', long, action = clap::ArgAction::Version)]
    version: Option<bool>,
}

pub const TOP_AFTER: &str = "\
Connections have Mode, Up (directions on the ring), Out/s and In/s (bytes per second, on TCP and on
the ring), Bytes (all so far), addresses, process, the reason of this end, and pod. A connection
within the node has two lines: its ends. Pods have the columns of `underpass pods`; rails, which are
ports of RDMA devices, the counters of `underpass stats`, per second. Below is what is known of the
chosen line, for connections what `ss -e` says. A screen that is narrow has fewer columns.

Keys: q quit; Tab, 1, 2, 3 view; arrows, PageUp, PageDown, Home, End choose a line; s or >, and <
sort by the next column or the one before; r the other way round; / show lines with a text; space
pause; ? help.

Examples:
  underpass top -n shop
  underpass top --once --view rails -d 10     what the rails moved in these 10 seconds, as text";

/// A table of `top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum View {
    #[default]
    Connections,
    Pods,
    Rails,
}

#[derive(Debug, Args)]
pub struct Top {
    /// Ask every SECONDS
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub delay: Duration,
    /// Show pods in this Kubernetes namespace only, and their connections
    #[arg(short, long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// What is shown first
    #[arg(long, value_enum, default_value_t)]
    pub view: View,
    /// Print one table after SECONDS, with their rates; needs no terminal
    #[arg(long)]
    pub once: bool,
}
