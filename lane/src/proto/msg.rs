//! Control messages between a shim and its daemon: one message per SEQPACKET datagram, descriptors
//! beside it by SCM_RIGHTS.
//!
//! Wire form, little endian: `kind u16 | length of the rest u16 | fields`. Unknown trailing bytes
//! are ignored (a newer minor sender may append fields), unknown kinds are reported as such, and
//! nothing here allocates: the shim decodes on its stack.

use crate::abi::{Epoch, TcpPos};

/// Longest message in bytes.
pub const MAX: usize = 256;
/// Most descriptors beside one message.
pub const MAX_FDS: usize = 4;
/// `Command::conn` that means every connection of the process.
pub const ALL: u32 = u32::MAX;

/// Why a message could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// It ends before its length says, or before its last field.
    Short,
    /// This build knows no message of this kind: a newer sender's, to be ignored.
    UnknownKind(u16),
}

trait Field: Sized {
    fn put(&self, out: &mut Writer<'_>);
    fn take(r: &mut Reader<'_>) -> Result<Self, Error>;
}

struct Writer<'a> {
    buf: &'a mut [u8; MAX],
    at: usize,
}

struct Reader<'a> {
    buf: &'a [u8],
}

macro_rules! int_field {
    ($($t:ty),*) => {$(
        impl Field for $t {
            fn put(&self, out: &mut Writer<'_>) {
                let b = self.to_le_bytes();
                let end = out.at + b.len();
                if let Some(d) = out.buf.get_mut(out.at..end) { d.copy_from_slice(&b); out.at = end; }
            }
            fn take(r: &mut Reader<'_>) -> Result<Self, Error> {
                const N: usize = core::mem::size_of::<$t>();
                let (head, rest) = r.buf.split_first_chunk::<N>().ok_or(Error::Short)?;
                r.buf = rest;
                Ok(<$t>::from_le_bytes(*head))
            }
        }
    )*};
}
int_field!(u8, u16, u32, u64);

impl Field for Epoch {
    fn put(&self, out: &mut Writer<'_>) {
        self.get().put(out);
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, Error> {
        u32::take(r).map(Epoch::new)
    }
}

impl Field for TcpPos {
    fn put(&self, out: &mut Writer<'_>) {
        self.get().put(out);
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, Error> {
        u64::take(r).map(TcpPos::new)
    }
}

/// What a field says, in every message that has it.
macro_rules! meaning {
    (version) => { "Highest [version](crate::VERSION) that the shim speaks; in the answer, the one that both use." };
    (min_version) => { "Lowest version that the shim speaks." };
    (pid) => { "The process, as its own pid namespace numbers it." };
    (table_bytes) => { "Length of the family table's file." };
    (conn) => { "Place of the connection's entry in the family table." };
    (gen) => { "Generation of that entry: for another one the message is void." };
    (tx_tcp_pos) => { "Bytes of the stream that hooked calls have sent." };
    (rx_tcp_pos) => { "Bytes of the stream that hooked calls have received." };
    (flags) => { "Bits of [`register`]." };
    (from) => { "Process from which the connection came; 0: not known." };
    (copies) => { "Descriptors of it that this process has." };
    (group) => { "Number of the link group." };
    (side) => { "Side of the link group, 0 or 1, that the shim is on which sends or gets this." };
    (sender) => { "Side of the link group, 0 or 1, of the end that sends in the direction." };
    (chunk) => { "Number of the chunk in its area; 0: the first file, with chunks 0 and 1." };
    (lane) => { "The lane's slot on the link group." };
    (bytes) => { "Length of the file." };
    (remote) => { "1: the other client is the daemon, and lanes lead to another node; 0: it is a process." };
    (client) => { "Number that the daemon has given to this process." };
    (home) => { "The runtime directory's number, see [`crate::family::Header::home_number`]." };
    (credits) => { "So many `Register`s may be sent at first." };
    (ring_log2) => { "log2 of the bytes of a lane's first ring." };
    (ring_max_log2) => { "log2 of the bytes of the largest ring that it may grow to." };
    (probe_s) => { "Seconds for which TCP below a busy lane may be silent; 0: for ever." };
    (reason) => { "Reason code, see [`crate::proto::reason`]." };
    (n) => { "How many more." };
    (local) => { "Reason code of the end that gets this." };
    (peer) => { "Reason code of the other end; 0: none is known." };
    (retry_ms) => { "It may be registered again after so many milliseconds; 0: it stays on TCP for good." };
    (epoch) => { "Epochs of this use of the lane are larger." };
    (tag) => { "Secret that marks this lane's frames." };
    (op) => { "One of [`op`]'s." };
}

macro_rules! messages {
    ($(#[$em:meta])* $name:ident { $($(#[$m:meta])* $kind:literal $var:ident { $($(#[$fm:meta])* $f:ident: $t:ty),* $(,)? })* }) => {
        $(#[$em])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$m])* $var { $($(#[$fm])* #[doc = meaning!($f)] $f: $t),* }),* }

        impl $name {
            /// Encodes into `buf` and returns the length.
            pub fn encode(&self, buf: &mut [u8; MAX]) -> usize {
                let mut w = Writer { buf, at: 4 };
                let kind: u16 = match self {
                    $(Self::$var { $($f),* } => { $($f.put(&mut w);)* $kind })*
                };
                let end = w.at;
                w.at = 0;
                kind.put(&mut w);
                $crate::num::low16((end - 4) as u64).put(&mut w);
                end
            }

            /// Decodes one datagram.
            pub fn decode(b: &[u8]) -> Result<Self, Error> {
                let mut r = Reader { buf: b };
                let kind = u16::take(&mut r)?;
                let len = usize::from(u16::take(&mut r)?);
                r.buf = r.buf.get(..len).ok_or(Error::Short)?;
                match kind {
                    $($kind => Ok(Self::$var { $($f: <$t>::take(&mut r)?),* }),)*
                    k => Err(Error::UnknownKind(k)),
                }
            }
        }
    };
}

messages! {
    /// What a shim says.
    ToDaemon {
        /// First message. Descriptors: the family table (a memfd sealed SHRINK and GROW); and one end of a socket pair
        /// (SEQPACKET), unless this process dials over one that it has: our forked children have the other, and send
        /// over it, beside one byte, one end of a pair of their own, as if they had connected.
        1 Hello { version: u16, min_version: u16, pid: u32, table_bytes: u64 }
        /// Please promote connection `conn` (index and generation in the family table). Descriptor: the socket, or a
        /// Unix socket with it in its queue: the shim keeps a descriptor of that, too, and so can take the socket back
        /// until the daemon reads it. `tx_tcp_pos` and `rx_tcp_pos`: bytes that hooked calls moved, equal to the
        /// kernel's own counts when this was sent. Needs a credit.
        2 Register { conn: u32, gen: u32, tx_tcp_pos: TcpPos, rx_tcp_pos: TcpPos, flags: u32 }
        /// Chunk `chunk` of our own area `side` (0: the first file, chunks 0 and 1) is mapped writable: it may be
        /// sealed and given to the other client.
        3 Mapped { group: u64, side: u8, chunk: u32 }
        /// A further chunk of the other client is mapped read-only; `side` is ours.
        4 PeerMapped { group: u64, side: u8, chunk: u32 }
        /// We no longer use this lane: its connection has ended here, or goes on without it.
        5 LaneDone { group: u64, side: u8, lane: u32 }
        /// Our area needs another data chunk.
        6 WantChunk { group: u64, side: u8 }
        /// The first file, ours or the other client's, could not be mapped: the link group cannot be used.
        7 GroupFailed { group: u64, side: u8 }
        /// The connection closed before the daemon answered its `Register`.
        8 Forget { conn: u32, gen: u32 }
        /// An offered lane is not taken (no memory, shared by now), or one is given back whose connection goes on in
        /// other hands: as `LaneDone`, and the other end is to give it up, too.
        9 LaneRefused { group: u64, side: u8, lane: u32 }
        /// A lane to another node is taken. Descriptor: the connection's socket, of which the daemon
        /// keeps a copy until the lane is done, so that it can finish what we cannot.
        10 LaneHeld { group: u64, side: u8, lane: u32 }
        /// The application has shut down this lane's sending direction: the daemon is to shut the
        /// socket down when everything has arrived. We touch the direction no more.
        11 LaneShut { group: u64, side: u8, lane: u32 }
        /// A process that has left its family: its connections are at the same places in a table of its
        /// own from now on. Descriptor: that table.
        13 Moved { table_bytes: u64 }
        /// `Register` for a connection that came from another process: `from` (0: unknown), by exec or beside a
        /// message. It is promoted if nobody holds it but this process, which has `copies` descriptors of it.
        14 RegisterReceived { conn: u32, gen: u32, tx_tcp_pos: TcpPos, rx_tcp_pos: TcpPos, flags: u32, from: u32, copies: u32 }
        /// The shim has reset this connection. For the log only.
        15 Reset { conn: u32, gen: u32, reason: u32 }
        /// New connections of this process stay on TCP, because of a reset. For the log only.
        16 FuseBlown {}
        /// We leave this lane, which is within the node, and what the end at side `sender` has on its ring does not get
        /// to TCP: it is the other end, and does nothing, or it is ours, and may not have as much of TCP. The daemon is
        /// to do it in its stead ([`crate::abi::DaemonWords`]). `side` is ours. There is no answer.
        17 TakeOver { group: u64, side: u8, lane: u32, sender: u8 }
    }
}

messages! {
    /// What a daemon says.
    ToShim {
        /// Answer to `Hello`. Descriptor: the notice page (read-only memfd of 4096 bytes; its first
        /// u32 grows with every message sent, so that a hook sees with one load that there is
        /// something to read). `home`: see `family::Header::home_number`.
        1 HelloAck { version: u16, client: u64, home: u64, credits: u32, ring_log2: u8, ring_max_log2: u8, probe_s: u16 }
        /// The daemon will not serve this shim: a reason code.
        2 Refused { reason: u32 }
        /// So many more `Register`s may be sent.
        3 Credit { n: u32 }
        /// The connection stays on TCP for now: `local` is the reason on this end, `peer` on the
        /// other. `retry` not 0: may be registered again after so many milliseconds.
        4 Decline { conn: u32, gen: u32, local: u32, peer: u32, retry_ms: u32 }
        /// A link group in the making. Descriptors: our end of the doorbell, the first file of our area (writable,
        /// `bytes` long). `remote` not 0: the other client is the daemon, and lanes lead to another node.
        5 GroupNew { group: u64, side: u8, bytes: u64, remote: u8 }
        /// A further chunk for our own area. Descriptor: the memfd (writable).
        6 Chunk { group: u64, side: u8, chunk: u32, bytes: u64 }
        /// A chunk of the other client's area (0: the first file), sealed. Descriptor: the memfd. `side` is ours.
        7 PeerChunk { group: u64, side: u8, chunk: u32, bytes: u64 }
        /// The other client has mapped our further chunk: rings may be placed in it.
        8 ChunkReady { group: u64, side: u8, chunk: u32 }
        /// A lane for connection `conn`. Both clients have been given the first files of both areas. Epochs of this use
        /// of the lane are larger than `epoch`. `tag` marks frames.
        9 Offer { group: u64, side: u8, lane: u32, conn: u32, gen: u32, epoch: Epoch, tag: u64 }
        /// The other client of this link group is gone: its lanes go down.
        10 PeerGone { group: u64, side: u8 }
        /// Operator: `op` is one of `op::*`; `conn` may be [`ALL`].
        11 Command { conn: u32, gen: u32, op: u32 }
        /// The other end does not take this lane, or has given it back: so do you, and register again later.
        12 LaneGone { group: u64, side: u8, lane: u32, conn: u32, gen: u32 }
        /// On one node: what this end sends was taken over, and is its own again. It may sleep because of that.
        13 TakenOver { group: u64, side: u8, lane: u32, conn: u32, gen: u32 }
    }
}

/// Values of `ToShim::Command::op`.
pub mod op {
    /// Go down and stay down (`underpass down`).
    pub const DOWN: u32 = 1;
    /// May be promoted again (`underpass up`).
    pub const UP: u32 = 2;
    /// Promote at once, without waiting for the usual evidence of use (`underpass check`).
    pub const EAGER: u32 = 3;
    /// The same for a connection that the table has no addresses of yet: `conn` is a descriptor of
    /// the process, `gen` the lower half of the inode that it must refer to.
    pub const EAGER_FD: u32 = 4;
    /// The other end's process is gone, and nobody else has its connection (`PeerGone` for one lane of a
    /// link group that lives on).
    pub const GONE: u32 = 5;
}

/// Bits of `ToDaemon::Register::flags`.
pub mod register {
    /// Waiting for the answer (eager): the daemon tells the other end's shim, if it finds it.
    pub const EAGER: u32 = 1;
    /// This shim serves `TCP_INQ` and `SO_ZEROCOPY` on lanes.
    pub const INQ_ZEROCOPY: u32 = 2;
    /// This end has called connect: the kernel counts its SYN.
    pub const CLIENT: u32 = 4;
    /// That, or the opposite, is certain. (One that came from another process has it from the kernel's counters.)
    pub const CERTAIN: u32 = 8;
    /// Of one that came from another process: bytes were moved that no hooked call has moved. Only the reason for that
    /// is wanted: is it held elsewhere?
    pub const MISCOUNTED: u32 = 16;
    /// `from` of a connection that this process had lent to a program which has ended: a number above all pids.
    pub const ENDED: u32 = i32::MAX as u32;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(conn: u32, gen: u32, sent: u64, received: u64, flags: u32) {
            let (tx_tcp_pos, rx_tcp_pos) = (TcpPos::new(sent), TcpPos::new(received));
            let m = ToDaemon::Register { conn, gen, tx_tcp_pos, rx_tcp_pos, flags };
            let mut b = [0; MAX];
            let n = m.encode(&mut b);
            prop_assert_eq!(ToDaemon::decode(&b[..n]), Ok(m));
            for cut in 0..n { prop_assert!(ToDaemon::decode(&b[..cut]).is_err()); }
        }

        #[test]
        fn noise_never_panics(b in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = ToDaemon::decode(&b);
            let _ = ToShim::decode(&b);
        }
    }

    /// Fields are not taken from beyond the length that the message says.
    #[test]
    fn shorter_than_its_fields() {
        let mut b = [0; MAX];
        let n = ToShim::Credit { n: 7 }.encode(&mut b);
        b[2] -= 1;
        assert_eq!(ToShim::decode(&b[..n]), Err(Error::Short));
    }

    #[test]
    fn longer_messages_of_newer_senders_decode() {
        let m = ToShim::Credit { n: 7 };
        let mut b = [0; MAX];
        let n = m.encode(&mut b);
        b[2] += 8;
        assert_eq!(ToShim::decode(&b[..n + 8]), Ok(m));
    }
}
