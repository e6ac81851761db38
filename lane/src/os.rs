//! What the kernel says about a TCP socket, read by shim and daemon alike. The system calls are the caller's:
//! in the shim they must not be the C library's.

pub mod dirs;
pub mod room;

use crate::abi::TcpPos;

/// Soft limits of a process, their lines in `/proc/PID/limits`, and the bytes below which the shim leaves it alone: the
/// program would miss what tables and link groups take of its address space, or the table cannot be made (see
/// setrlimit(2)).
pub const ROOM: [(u32, &str, u64); 3] = [
    (libc::RLIMIT_AS, "Max address space", 2 << 30),
    (libc::RLIMIT_DATA, "Max data size", 1 << 30),
    FILE_SIZE,
];
/// That of a file, as which the table counts.
pub const FILE_SIZE: (u32, &str, u64) = (
    libc::RLIMIT_FSIZE,
    "Max file size",
    crate::family::TABLE_BYTES as u64,
);

/// `struct tcp_info` (linux/tcp.h), as far as it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// The kernel's number of the connection's state (`TCP_ESTABLISHED` 1 to `TCP_NEW_SYN_RECV` 12).
    pub state: u8,
    /// Sequence numbers acknowledged by the other end. A SYN that this end sent by `connect` is one.
    pub acked: u64,
    /// Stream bytes received in order; a FIN is one.
    pub received: u64,
    /// Stream bytes sent, with those sent again and those that were dropped on the way to the device; sent again;
    /// not sent yet. `None` on kernels that do not count them (before 4.19).
    pub sent: Option<(u64, u64, u32)>,
}

impl TcpInfo {
    /// Room for the structure.
    pub const BYTES: usize = 248;
    /// `TCP_ESTABLISHED` of the kernel.
    pub const ESTABLISHED: u8 = 1;
    const FIN_WAIT1: u8 = 4;
    const FIN_WAIT2: u8 = 5;
    /// `TCP_CLOSE`: the connection is over.
    pub const CLOSE: u8 = 7;
    /// `TCP_CLOSE_WAIT`: the peer has sent its FIN.
    pub const CLOSE_WAIT: u8 = 8;

    /// `None`: a kernel that does not count bytes (before 4.1).
    pub fn parse(b: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let b = b.get(at..at + 8)?;
            let mut w = [0u8; 8];
            w.copy_from_slice(b);
            Some(u64::from_ne_bytes(w))
        };
        let half = |at: usize| {
            let b = b.get(at..at + 4)?;
            let mut w = [0u8; 4];
            w.copy_from_slice(b);
            Some(u32::from_ne_bytes(w))
        };
        Some(TcpInfo {
            state: *b.first()?,
            acked: word(120)?,
            received: word(128)?,
            sent: word(200).and_then(|sent| Some((sent, word(208)?, half(144)?))),
        })
    }

    /// Which side of the handshake this end was on. `outstanding`: SIOCOUTQ, asked while nothing else has changed.
    /// `None`: the counters do not tell.
    pub fn side(&self, outstanding: u64) -> Option<Side> {
        // The one is exact, and has the SYN of a `connect`. The other has none, and is wrong by what was dropped
        // before the device, or could not even be sent again.
        let with_syn = self.acked + outstanding;
        let (sent, again, unsent) = self.sent?;
        let without = (sent + u64::from(unsent)).checked_sub(again)?;
        Some(Side {
            client: match with_syn.checked_sub(without)? {
                0 => false,
                1 => true,
                _ => return None,
            },
            certain: sent == 0 && unsent == 0,
        })
    }
}

/// How an end came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// It called connect, so that its SYN counts.
    pub client: bool,
    /// Nothing was sent yet, so that no dropped packet can have falsified the counters.
    pub certain: bool,
}

/// Where the streams of a connected socket are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounts {
    /// The kernel's number of the connection's state.
    pub state: u8,
    /// Sequence numbers ever taken from the application: with the SYN of a `connect`, and a FIN.
    pub sent: u64,
    /// Bytes ever handed out to the application (not exact beyond an urgent mark, or after a FIN).
    pub taken: u64,
    /// As in [`TcpInfo`].
    pub acked: u64,
    /// As in [`TcpInfo`].
    pub received: u64,
}

impl TcpCounts {
    /// Where the sending direction is, while it is open. `client`: this end called `connect`, so its SYN counts.
    pub fn tx_pos(&self, client: bool) -> TcpPos {
        TcpPos::new(self.sent.wrapping_sub(u64::from(client)))
    }

    /// Where the receiving direction is, while it is open.
    pub fn rx_pos(&self) -> TcpPos {
        TcpPos::new(self.taken)
    }

    /// Is this end's direction open? Then `sent` has no FIN.
    pub fn may_send(&self) -> bool {
        matches!(self.state, TcpInfo::ESTABLISHED | TcpInfo::CLOSE_WAIT)
    }

    /// Bytes handed out, without the FIN. `None`: it is not known whether there is one.
    pub fn bytes_taken(&self) -> Option<u64> {
        match self.state {
            TcpInfo::CLOSE_WAIT => Some(self.taken.wrapping_sub(1)),
            _ => self.may_receive().then_some(self.taken),
        }
    }

    /// Is the other end's? Then `taken` has no FIN.
    pub fn may_receive(&self) -> bool {
        let ended_here = matches!(self.state, TcpInfo::FIN_WAIT1 | TcpInfo::FIN_WAIT2);
        ended_here || self.state == TcpInfo::ESTABLISHED
    }
}

/// Attempts to read counters that do not move in between.
const TRIES: usize = 16;

/// Reads the position, which is exact: acknowledged plus outstanding (`snd_una` and `write_seq - snd_una`),
/// and received less unread. (`bytes_sent - bytes_retrans + notsent` is not: the kernel counts a segment before
/// it is queued to the device, and once more when a drop there makes it send it again.)
///
/// The two parts of each are not read at once, so they are read until the first has not moved from before to
/// after the second. `unread`: SIOCINQ, `outstanding`: SIOCOUTQ. `None`: the kernel does not tell, or the
/// other end is never quiet for so long.
pub fn position(
    info: impl Fn() -> Option<TcpInfo>,
    outstanding: impl Fn() -> Option<u64>,
    unread: impl Fn() -> Option<u64>,
) -> Option<TcpCounts> {
    let (mut sent, mut taken) = (None, None);
    let mut before = info()?;
    for _ in 0..TRIES {
        let (out, inn) = (outstanding()?, unread()?);
        let now = info()?;
        if now.acked == before.acked {
            sent = Some(now.acked.wrapping_add(out));
        }
        if now.received == before.received {
            taken = Some(now.received.wrapping_sub(inn));
        }
        if let (Some(sent), Some(taken)) = (sent, taken) {
            return Some(TcpCounts {
                state: now.state,
                sent,
                taken,
                acked: now.acked,
                received: now.received,
            });
        }
        before = now;
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn waits_until_nothing_moves() {
        // 100 bytes were taken from the application, 40 acknowledged; the rest is acknowledged, in three
        // steps, between the look at what is outstanding and the second look at the acknowledgements.
        let (acked, looks) = (Cell::new(40u64), Cell::new(0));
        let info = || {
            looks.set(looks.get() + 1);
            Some(TcpInfo {
                state: 1,
                acked: acked.get(),
                received: 7,
                sent: None,
            })
        };
        let outstanding = || {
            let out = 100 - acked.get();
            acked.set((acked.get() + 20).min(100));
            Some(out)
        };
        let p = position(info, outstanding, || Some(3)).unwrap();
        assert_eq!((p.sent, p.taken, p.acked), (100, 4, 100));
        assert_eq!(looks.get(), 5);
    }

    #[test]
    fn never_quiet_is_no_position() {
        let n = Cell::new(0);
        let info = || {
            n.set(n.get() + 1);
            Some(TcpInfo {
                acked: n.get(),
                ..TcpInfo::default()
            })
        };
        assert_eq!(position(info, || Some(0), || Some(0)), None);
    }

    #[test]
    fn the_side_of_an_end() {
        let end = |acked, sent, again, unsent| TcpInfo {
            acked,
            sent: Some((sent, again, unsent)),
            ..TcpInfo::default()
        };
        let side = |client, certain| Some(Side { client, certain });
        assert_eq!(end(0, 0, 0, 0).side(0), side(false, true));
        assert_eq!(end(1, 0, 0, 0).side(0), side(true, true));
        assert_eq!(end(1, 0, 0, 5).side(5), side(true, false));
        assert_eq!(end(70, 120, 30, 10).side(30), side(false, false));
        assert_eq!(end(71, 120, 30, 10).side(30), side(true, false));
        assert_eq!(end(70, 125, 30, 10).side(30), None, "5 were dropped");
        assert_eq!(
            TcpInfo::default().side(0),
            None,
            "the kernel does not count"
        );
    }

    #[test]
    fn short_answers_are_none() {
        assert_eq!(TcpInfo::parse(&[1; 135]), None);
        assert!(TcpInfo::parse(&[1; 136]).is_some());
        assert_eq!(TcpInfo::parse(&[]), None);
    }
}
