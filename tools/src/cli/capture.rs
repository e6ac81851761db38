//! The command line of `capture`.

use clap::Args;
use std::path::PathBuf;

pub(super) const CAPTURE_LONG: &str = "\
Write what one connection's lane carries as TCP segments in a pcapng file: the bytes that tcpdump does not \
see. The segments are reconstructed; no such packets were sent. Addresses, order, acknowledgements and \
sequence numbers are as if the bytes had gone over TCP. If the daemon has no record of the connection's own \
sequence numbers, they begin with 1.

A segment is written when the other end has taken its bytes, with the time at which that was seen; if the \
other end is on another node, when they have left for it or arrived from it. Reading along never delays the \
connection. So where it moves bytes faster than they can be read, some are missing: \
the sequence numbers jump, and the next segment has a comment that says how many. Bytes that go over TCP \
while a direction is not up are missing in the same way; tcpdump has them.

Of a connection to another node (SMCR), this node's daemon shows what its end sends and receives. It waits \
while the connection is on TCP, and ends with the connection.

Root on the node may capture every connection, others those whose ends on this node are all theirs. Nobody \
can from within a pod.";

pub(super) const CAPTURE_AFTER: &str = "\
Examples:
  underpass capture 127.0.0.1:6379 127.0.0.1:40112 -w redis.pcapng
  underpass capture --inode 81234 --seconds 10 -w - | tshark -r -

The addresses are those of a row of `underpass ss -W`. What happens is told on standard error. Exit status: 0, \
or 1 if the connection is not there or may not be seen.";

#[derive(Debug, Args)]
pub struct Capture {
    /// The connection of the socket with this inode
    #[arg(long, value_name = "INODE", conflicts_with = "local")]
    pub inode: Option<u64>,
    /// One end's address, IP:PORT
    #[arg(requires = "peer", value_parser = crate::addr::argument, required_unless_present = "inode")]
    pub local: Option<String>,
    /// The other end's address, IP:PORT
    #[arg(value_parser = crate::addr::argument)]
    pub peer: Option<String>,
    /// Write to this file; `-`: to standard output, if that is no terminal
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub write: PathBuf,
    /// End after so many bytes of the connection, both directions together
    #[arg(short = 'n', long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    pub bytes: Option<u64>,
    /// End after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub seconds: Option<u64>,
}
