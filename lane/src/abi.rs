//! What lies where in a client's area.
//!
//! An area is a list of *chunks*, each one memfd. Chunk 0 holds the control words of every lane;
//! the others hold ring data. Each word has exactly one writer: the client that owns the area.
//! Nothing is ever a pointer; positions of rings are (chunk, page) pairs that the reader checks
//! against the chunk sizes the daemon told it.

use crate::num;
use crate::prim::{AtomicU32, AtomicU64};

mod position;
mod space;
mod words;
pub use position::{Cursor, Landed, TcpPos};
pub use space::{unread_max, window, SharedSpace, SpaceWord};
pub use words::{
    rx, takeover, tx, AtomicEpoch, Epoch, Private, RxFlags, RxWord, Shared, TakeoverPhase,
    TakeoverWord, TxPhase, TxWord, Word,
};

/// Lanes per link group. A pair of clients that needs more gets another link group.
pub const LANES: usize = if cfg!(loom) { 1 } else { 1024 };
/// Epochs of one use of a lane slot: the daemon gives the next use a base that lies so much higher.
pub const EPOCHS: u32 = 65_536;
/// Lanes that share one publish counter.
pub const LANES_PER_COUNTER: usize = if cfg!(loom) { 1 } else { 64 };
/// Number of publish counters.
pub const COUNTERS: usize = LANES / LANES_PER_COUNTER;
/// Publishes by one counter that its log remembers.
pub const LOG: usize = if cfg!(loom) { 1 } else { 128 };
/// Most chunks an area can have, chunk 0 included.
pub const CHUNKS: usize = 64;
/// Seals (fcntl(2)) of a chunk that its writer has mapped: nobody else maps it writable, writes to it, or makes it shorter.
pub const CHUNK_SEALS: i32 =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
/// Size of a data chunk in bytes. Pages are touched, and so paid for, only as rings use them.
pub const CHUNK_BYTES: usize = 16 << 20;
/// The same for link groups to other nodes, where a device holds every page of a chunk.
pub const REMOTE_CHUNK_BYTES: usize = 4 << 20;
/// Smallest ring: log2 of its bytes.
pub const RING_LOG2_MIN: u32 = if cfg!(loom) { 1 } else { 12 };
/// Largest ring: log2 of its bytes.
pub const RING_LOG2_MAX: u32 = 22;
/// Most bytes that a sender has put on its ring, or is putting there, beyond its published head. Who reads a ring without
/// a cursor (a capture) relies on that.
pub const UNPUBLISHED_MAX: u64 = 32 << 10;
/// log2 of the bytes up to which rings grow to be fast. They grow further only for a send that may not wait, to take of
/// it what the kernel's buffers would.
pub const RING_FAST_LOG2: u32 = 20;

/// First bytes of chunk 0.
pub const MAGIC: u64 = 0x314b_4e4c_5f50_5255; // "URP_LNK1"

/// One 64-byte line, so that words with different writers or different rhythms do not share one.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Line<T>(pub T);

/// Head of chunk 0.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`crate::VERSION`] of the daemon that made the area.
    pub version: AtomicU32,
    /// Which side of the link group (0 or 1) this area belongs to.
    pub side: AtomicU32,
    /// Number of the link group, as messages have it.
    pub group: AtomicU64,
    /// [`LANES`] of that daemon.
    pub lanes: AtomicU32,
}

/// Words of one lane that its *sending* half writes. One line.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct TxWords {
    /// An epoch and `tx::*`. Stored with Release after the words below; loaded with Acquire.
    pub state: Shared<TxWord>,
    /// TCP position at which TCP ended for this epoch.
    pub up_tcp_pos: Shared<TcpPos>,
    /// Ring cursor of the first byte of this epoch.
    pub up_start: Shared<Cursor>,
    /// Two ring locations; the newest is at [`loc_index`]`(loc_seq)`.
    pub loc: [Shared<LocWord>; 2],
    /// Cursors from which the two locations hold.
    pub loc_from: [Shared<Cursor>; 2],
    /// Number of moves so far.
    pub loc_seq: AtomicU32,
    /// Whether the sender waits for space (then ring its doorbell after consuming); and, on one node, the size of the
    /// send buffer that its application asked for, for [`unread_max`].
    pub want_space: SharedSpace,
}

/// Words of one lane that its *receiving* half writes. One line.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct RxWords {
    /// An epoch and `rx::*`, with Release; the sender looks at it after every publish.
    pub word: Shared<RxWord>,
    /// The frozen cursor of a revocation.
    pub revoked: Shared<Cursor>,
    /// Processor that last consumed or published here: hint for spinners on the other side.
    pub cpu: AtomicU32,
    /// `marks::*` of this end. Not about an epoch.
    pub marks: AtomicU32,
    /// Across nodes, written by a daemon in its proxy: the head that the remote daemon is known to
    /// have shown to its end. (That the network has taken the bytes is not enough: the remote daemon may
    /// die before it says so, and nobody else can.) On one node, written by an end that has `ENDED`: all
    /// bytes that it has put on TCP (`TcpPos::UNKNOWN`: a daemon still brings some there).
    pub landed: Shared<Landed>,
    /// About this end's sending direction: what it is putting on TCP (`takeover::*`), for whoever goes on after it.
    pub takeover: Shared<TakeoverWord>,
    /// Cursor from which on a frame, or plain bytes, are put on TCP. Valid with `DOWN`, `FIN` and `PLAIN`.
    pub takeover_at: Shared<Cursor>,
    /// On one node: bytes that the receive buffer holds which this end's application asked for (0: it did not ask
    /// for a size).
    pub room: AtomicU32,
}

/// What a daemon does with the sending direction of an end in whose stead it brings it to TCP. Only daemons write it:
/// on one node in the area of that end, across nodes in the daemon's own, the proxy.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct DaemonWords {
    /// An epoch and `takeover::*`, with Release. Whoever goes on after the daemon finds here where.
    pub takeover: Shared<TakeoverWord>,
    /// Cursor from which on a frame, or plain bytes, are put on TCP. Valid with `DOWN`, `FIN` and `PLAIN`.
    pub at: Shared<Cursor>,
    /// TCP position of the direction when the daemon has brought it to TCP. Valid with `DONE`.
    pub tcp_pos: Shared<TcpPos>,
    /// The errno that the daemon met on the socket while it had the direction. Valid with `DONE`.
    pub error: AtomicU32,
}

/// Where in `TxWords::loc` and `loc_from` the sender's move number `seq` stores its ring: at the place that the move
/// before the last one left.
#[inline(always)]
pub const fn loc_index(seq: u32) -> usize {
    (seq & 1) as usize
}

/// Bits of `RxWords::marks`. 0: a version that has none of them.
pub mod marks {
    /// This end says `ENDED` before its kernel sends a FIN that the application asked for.
    pub const KEPT: u32 = 1;
    /// The application has shut its sending direction down, or closed.
    pub const ENDED: u32 = 2;
    /// This end called `connect`: the kernel counts its SYN among the acknowledged bytes.
    pub const SYN: u32 = 4;
    /// The application has shut its receiving direction down.
    pub const DEAF: u32 = 8;
    /// This end has found the other one dead with bytes unread, and tells its application.
    pub const CUT: u32 = 16;
    /// This end says so before its kernel sends a reset that it wants, or that its close is. Across nodes: its daemon is to
    /// reset the connection when what this end has sent is on TCP.
    pub const RESET: u32 = 32;
    /// This end's process ends: when it is gone, it has sent no more than it says.
    pub const EXITED: u32 = 64;
    /// Also within the node, this end says `PAST` before it takes anything off the ring. (Where the daemon is one of version 5.)
    pub const PASSES: u32 = 128;
}

/// An entry of `Control::log`: when a publish was, and about which lane among those of its counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct LogEntry(u64);

impl LogEntry {
    /// Bits of the lane's number among those of its counter.
    const LANE_BITS: u32 = 6;

    /// The entry about lane number `lane` of its counter at this time ([`crate::prim::ticks`]).
    #[inline(always)]
    pub const fn new(ticks: u64, lane: usize) -> LogEntry {
        LogEntry(ticks << Self::LANE_BITS | (lane % (1 << Self::LANE_BITS)) as u64)
    }

    /// The time, without its highest bits.
    #[inline(always)]
    pub const fn ticks(self) -> u64 {
        self.0 >> Self::LANE_BITS
    }

    /// The lane's number among those of its counter; always below [`LANES_PER_COUNTER`].
    #[inline(always)]
    pub const fn lane(self) -> usize {
        num::size(self.0) % (1 << Self::LANE_BITS) % LANES_PER_COUNTER
    }
}

impl Word for LogEntry {
    #[inline(always)]
    fn from_raw(raw: u64) -> LogEntry {
        LogEntry(raw)
    }
    #[inline(always)]
    fn raw(self) -> u64 {
        self.0
    }
}

/// All of chunk 0.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct Control {
    /// Which area of which link group this is, and of which version. Written once by the daemon.
    pub header: Header,
    /// Threads and sets of this client that sleep on this link group.
    pub sleepers: Line<AtomicU32>,
    /// Publish counters: bumped after a head, cursor or state word of one of the counter's lanes has changed.
    pub seq: [Line<AtomicU32>; COUNTERS],
    /// Outgoing heads: bytes ever published, per lane.
    pub heads: [Shared<Cursor>; LANES],
    /// Own read cursors for the incoming rings: bytes ever consumed, per lane.
    pub cursors: [Shared<Cursor>; LANES],
    /// What the sending half of each lane says.
    pub tx: [TxWords; LANES],
    /// What the receiving half of each lane says.
    pub rx: [RxWords; LANES],
    /// When each publish by a counter was, and about which of its lanes, at the counter's value before it. Only a hint:
    /// in which order a reader lists what it finds.
    pub log: [[Shared<LogEntry>; LOG]; COUNTERS],
    /// What a daemon does with the sending half of each lane.
    pub daemon: [DaemonWords; LANES],
}

/// Bytes of chunk 0, a multiple of the page size.
pub const CONTROL_BYTES: usize = (core::mem::size_of::<Control>() + 4095) & !4095;

/// Where a ring lies in its writer's area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loc {
    /// Chunk number, 1 or more.
    pub chunk: u32,
    /// Offset in the chunk, in units of 4096 bytes.
    pub page: u32,
    /// log2 of the size in bytes.
    pub log2: u32,
}

impl Loc {
    /// As it stands in `TxWords::loc`.
    pub const fn word(self) -> LocWord {
        LocWord(
            (self.page as u64) << 32
                | (self.chunk as u64 & 0xffff) << 8
                | (self.log2 as u64 & 0xff),
        )
    }

    /// Size of the ring in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.log2
    }

    /// Where byte `at` of the direction lies in the ring.
    #[inline(always)]
    pub const fn offset(self, at: Cursor) -> u64 {
        at.get() & (self.bytes() as u64 - 1)
    }

    /// Where the bytes `[at, at + n)` of the direction lie in the chunk: before the ring's end and, if
    /// they go on there, at its beginning. `None`: more than the ring holds.
    pub fn pieces(self, at: Cursor, n: usize) -> Option<[core::ops::Range<usize>; 2]> {
        let (begin, size) = (self.page as usize * 4096, self.bytes());
        let offset = num::size(self.offset(at));
        let first = n.min(size - offset);
        (n <= size).then(|| {
            [
                begin + offset..begin + offset + first,
                begin..begin + n - first,
            ]
        })
    }

    /// Does the ring lie inside a chunk of `chunk_bytes`?
    pub const fn fits(self, chunk_bytes: usize) -> bool {
        (self.page as usize) * 4096 + self.bytes() <= chunk_bytes
    }
}

/// A [`Loc`] in a word of memory: `page << 32 | chunk << 8 | log2`. A peer may have stored anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct LocWord(u64);

impl LocWord {
    /// There is no ring.
    pub const NONE: LocWord = LocWord(0);

    /// Unpacks and checks everything that does not need the chunk table. `None`: impossible value.
    pub fn loc(self) -> Option<Loc> {
        let w = self.0;
        let l = Loc {
            page: num::low32(w >> 32),
            chunk: num::low32(w >> 8) & 0xff_ffff,
            log2: num::low32(w) & 0xff,
        };
        let ok = l.chunk >= 1
            && (l.chunk as usize) < CHUNKS
            && l.log2 >= RING_LOG2_MIN
            && l.log2 <= RING_LOG2_MAX;
        ok.then_some(l)
    }
}

impl Word for LocWord {
    #[inline(always)]
    fn from_raw(raw: u64) -> LocWord {
        LocWord(raw)
    }
    #[inline(always)]
    fn raw(self) -> u64 {
        self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_wrap() {
        let l = Loc {
            chunk: 1,
            page: 2,
            log2: RING_LOG2_MIN,
        };
        let size = l.bytes();
        assert_eq!(l.pieces(Cursor::new(5), 7), Some([8197..8204, 8192..8192]));
        let at = Cursor::new(3 * size as u64 - 2);
        let end = 8192 + size;
        assert_eq!(l.pieces(at, 5), Some([end - 2..end, 8192..8195]));
        assert_eq!(l.pieces(at, size).unwrap()[1].len(), size - 2);
        assert_eq!(l.pieces(Cursor::new(0), size + 1), None);
    }

    #[test]
    fn lines_do_not_share() {
        assert_eq!(core::mem::size_of::<TxWords>(), 64);
        assert_eq!(core::mem::size_of::<RxWords>(), 64);
        assert_eq!(core::mem::size_of::<Line<AtomicU32>>(), 64);
        assert_eq!(core::mem::size_of::<DaemonWords>(), 32);
        assert_eq!(CONTROL_BYTES % 4096, 0);
    }

    #[test]
    fn the_log_tells_time_and_lane() {
        let e = LogEntry::new(1000, LANES_PER_COUNTER + 5);
        assert_eq!((e.raw(), e.ticks(), e.lane()), (64_005, 1000, 5));
    }

    #[test]
    fn loc_round_trip_and_bounds() {
        let l = Loc {
            chunk: 3,
            page: 77,
            log2: 16,
        };
        assert_eq!(l.word().loc(), Some(l));
        assert_eq!(l.word().raw(), 77 << 32 | 3 << 8 | 16);
        for bad in [
            LocWord::NONE,
            Loc { chunk: 0, ..l }.word(),
            Loc { log2: 3, ..l }.word(),
            Loc { log2: 63, ..l }.word(),
            LocWord::from_raw(u64::MAX),
        ] {
            assert_eq!(bad.loc(), None);
        }
        assert!(Loc {
            chunk: 1,
            page: 0,
            log2: 22
        }
        .fits(4 << 20));
        assert!(!Loc {
            chunk: 1,
            page: 1,
            log2: 22
        }
        .fits(4 << 20));
        assert!(!Loc {
            chunk: 1,
            page: u32::MAX,
            log2: 22
        }
        .fits(CHUNK_BYTES));
    }
}
