//! The family table: what the processes that descend by fork from one loaded shim know about their
//! connections. A memfd that the shim makes, seals against resizing, and shows (read-only) to the
//! daemon alone: peers never see it. Because the daemon reads it in place, its view is complete
//! after a restart without a message, and a connection that was never registered costs nothing.
//!
//! The shim trusts this memory; the daemon does not: it copies words out and checks them.

use crate::abi::{AtomicEpoch, Epoch};
use crate::half::{Counted, RxState, TxState};
use crate::num;
use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

/// [`Header::magic`]: the bytes `URP_FTB1`.
pub const MAGIC: u64 = 0x3142_5446_5f50_5255; // "URP_FTB1"
/// Connections per family.
pub const CONNS: usize = 65_536;
/// Processes that are remembered as holders of one connection.
pub const HOLDERS: usize = 8;

/// Bits of a process or thread number in this table that say of which pid namespace it is (0: the one in which the
/// table was made). Those below are enough for any number.
pub const DOMAINS: u32 = 0x7fc0_0000;

/// The first 128 bytes of a table. The family's processes write it; they, and the daemon by `pread`, read it.
#[repr(C, align(64))]
pub struct Header {
    /// [`MAGIC`]; stored last when the table is made.
    pub magic: AtomicU64,
    /// Oldest version that has this table: [`crate::MIN_VERSION`] of the shim that made it.
    pub version: AtomicU32,
    /// [`CONNS`] of that shim.
    pub conns: AtomicU32,
    /// Process that loaded the shim.
    pub pid: AtomicU32,
    /// Highest index ever used plus one: readers need not look further.
    pub used: AtomicU32,
    /// What the family has done so far.
    pub stats: Stats,
    /// Device and inode of the runtime directory in which a daemon was found last: that one may look
    /// for this table in `/proc` when it is started again. 0: none yet.
    pub home: [AtomicU64; 2],
    /// Pid namespaces besides the first one, of those who have inherited the table. In bytes that were padding.
    pub domains: AtomicU32,
    /// The number that the daemons of that directory have for it (a new directory may get the inode of one that was
    /// removed). 0: not told. In bytes that were padding.
    pub home_number: AtomicU32,
}

/// What a table says of its runtime directory: device, inode, and the directory's number.
pub type Home = [u64; 3];

impl Header {
    /// The runtime directory that was entered last. Its words are read one by one.
    pub fn home(&self) -> Home {
        [
            self.home[0].load(Relaxed),
            self.home[1].load(Relaxed),
            self.home_number.load(Relaxed).into(),
        ]
    }

    /// Enters a runtime directory in which a daemon was found; 32 bits of its number are kept.
    pub fn set_home(&self, [dev, ino, number]: Home) {
        self.home[0].store(dev, Relaxed);
        self.home[1].store(ino, Relaxed);
        self.home_number.store(num::low32(number), Relaxed);
    }
}

/// Counters of the whole family, for `underpass stats`. Statistics only: they order nothing.
#[repr(C)]
pub struct Stats {
    /// Connections that reached a lane in at least one direction.
    pub promoted: AtomicU64,
    /// Switches up of sending directions.
    pub ups: AtomicU64,
    /// Switches down of sending directions.
    pub downs: AtomicU64,
    /// Bytes sent over lanes that have ended; those of the others are in their entries.
    pub lane_tx: AtomicU64,
    /// Bytes received over them.
    pub lane_rx: AtomicU64,
    /// Doorbells rung.
    pub rings: AtomicU64,
    /// Sleeps of threads that a lane has to wake.
    pub sleeps: AtomicU64,
    /// Connections reset by the shim itself, and the fuse: see [`Stats::resets`] and [`Stats::is_blown`].
    resets: AtomicU64,
    /// Registrations sent to the daemon.
    pub registered: AtomicU64,
    /// Connections that ended after they had been promoted.
    pub ended_promoted: AtomicU64,
}

impl Stats {
    /// In `resets`: the fuse of the family's programs has blown.
    const BLOWN: u64 = 1 << 63;
    /// Beside it: a process has told its daemon.
    const TOLD: u64 = 1 << 62;
    const FUSE: u64 = Self::BLOWN | Self::TOLD;

    /// The shim has reset a connection. `fault`: the fuse blows.
    pub fn count_reset(&self, fault: bool) {
        self.resets.fetch_add(1, Relaxed);
        if fault {
            self.resets.fetch_or(Self::BLOWN, Relaxed);
        }
    }

    /// Connections reset by the shim itself.
    pub fn resets(&self) -> u64 {
        self.resets.load(Relaxed) & !Self::FUSE
    }

    /// Has a connection of the family been reset by a fault, and nobody looked at it since then?
    pub fn is_blown(&self) -> bool {
        self.resets.load(Relaxed) & Self::BLOWN != 0
    }

    /// True for the first process that asks after it has blown.
    pub fn is_news(&self) -> bool {
        self.resets.fetch_or(Self::TOLD, Relaxed) & Self::TOLD == 0
    }

    /// An operator has looked.
    pub fn mend_fuse(&self) {
        self.resets.fetch_and(!Self::FUSE, Relaxed);
    }

    /// A process takes its connections to this new table: the fuse is that of the old one.
    pub fn set_fuse(&self, of: &Stats) {
        let fuse = of.resets.load(Relaxed) & Self::FUSE;
        self.resets.fetch_or(fuse, Relaxed);
    }
}

/// Values of `Conn::state`.
pub mod state {
    /// The entry is nobody's.
    pub const FREE: u32 = 0;
    /// Being set up or torn down; readers skip it.
    pub const BUSY: u32 = 1;
    /// A TCP socket, not connected.
    pub const EMBRYO: u32 = 2;
    /// `listen` has succeeded.
    pub const LISTEN: u32 = 3;
    /// It was accepted, or `connect` has succeeded or is under way.
    pub const OPEN: u32 = 4;
}

/// Bits of `Conn::flags`.
pub mod flag {
    /// `inode`, `uid` and addresses are filled in.
    pub const NAMED: u32 = 1;
    /// A lane is attached (`group`, `side`, `lane`, `tag` are valid).
    pub const LANE: u32 = 2;
    /// Has been promoted at least once.
    pub const PROMOTED: u32 = 4;
    /// Sent down by an operator: no promotion until `up`.
    pub const HELD: u32 = 8;
    /// Never (again) promoted: `reason` says why.
    pub const DISQUALIFIED: u32 = 16;
    /// A `Register` is under way or waiting for its peer.
    pub const REGISTERED: u32 = 32;
    /// This end called connect (as opposed to accept).
    pub const CLIENT: u32 = 64;
    /// O_NONBLOCK is set on the description.
    pub const NONBLOCK: u32 = 128;
    /// A hooked poll or select, or a registration with an epoll set, has watched the connection.
    pub const WATCHED: u32 = 256;
    /// Set beside `LANE`: the lane leads to another node (the link group's other client is the daemon).
    pub const REMOTE: u32 = 512;
    /// TCP_INQ is set on the socket: receives with control data tell what is left to read.
    pub const INQ: u32 = 1024;
    /// SO_RCVTIMEO is negative: no receive waits (the kernel shows 0 for it, as for no limit).
    pub const RCV_AT_ONCE: u32 = 2048;
    /// The same of SO_SNDTIMEO and sends.
    pub const SND_AT_ONCE: u32 = 4096;
    /// It came from another process, beside a message or by exec: whether that one still holds it, the daemon finds
    /// out when it is registered.
    pub const RECEIVED: u32 = 8192;
    /// Beside `RECEIVED`: nothing is counted yet.
    pub const NEW: u32 = 16_384;
    /// Beside `RECEIVED`: whether `CLIENT` is right is not quite certain.
    pub const UNSURE: u32 = 32_768;
    /// It was handed to another program, which no table knows to hold it, and goes on there when it ends here. Beside
    /// `DISQUALIFIED`: for good. Beside `RECEIVED`: lent, and it may get a lane when nobody else holds it.
    pub const LEFT: u32 = 65_536;
    /// Beside `LANE`: the other end has given the lane back, and this one does as soon as both directions are on TCP.
    pub const GIVEN_BACK: u32 = 131_072;
}

/// An IPv4 or IPv6 endpoint. `family` is AF_INET, AF_INET6 or 0 (unknown); `port` in host order.
#[repr(C)]
#[derive(Default)]
pub struct Addr {
    /// Sixteen bytes in network order, IPv4 ones mapped; each word has eight of them as they lie in memory.
    pub ip: [AtomicU64; 2],
    /// AF_INET, AF_INET6, or 0: unknown.
    pub family: AtomicU32,
    /// In host order.
    pub port: AtomicU32,
}

/// A socket of the family. Those who hold it write; the daemon reads copies ([`Conn::view`]).
#[repr(C, align(64))]
pub struct Conn {
    /// One of [`state`]'s. Stored with Release when the entry is opened.
    pub state: AtomicU32,
    /// Grows each time the entry is used for another socket.
    pub gen: AtomicU32,
    /// Bits of [`flag`].
    pub flags: AtomicU32,
    /// Reason code of this end ([`crate::proto::reason`]).
    pub reason: AtomicU32,
    /// The other end's, as far as the daemon told us; 0: none.
    pub peer_reason: AtomicU32,
    /// Owner of the socket (`fstat`), valid with `NAMED`.
    pub uid: AtomicU32,
    /// Inode of the socket, valid with `NAMED`.
    pub inode: AtomicU64,
    /// Processes that hold the connection, with [`DOMAINS`] (0: slot unused); `forks` counts children that have
    /// not yet entered themselves.
    pub holders: [AtomicU32; HOLDERS],
    /// Such children; and holders for which there was no room, or whose number is of a pid namespace that nobody else
    /// knows.
    pub forks: AtomicU32,
    /// Hooked calls so far (saturating use only): evidence for promotion.
    pub calls: AtomicU32,
    /// Address of this end, valid with `NAMED`.
    pub local: Addr,
    /// Address of the other end, valid with `NAMED`.
    pub peer: Addr,
    /// Number of the link group that the lane is on, valid with `LANE`.
    pub group: AtomicU64,
    /// The lane's secret for frames, valid with `LANE`.
    pub tag: AtomicU64,
    /// The lane's slot on the link group, valid with `LANE`.
    pub lane: AtomicU32,
    /// Our side of the link group, 0 or 1, valid with `LANE`.
    pub side: AtomicU32,
    /// The process that registered it: only that one works its lane.
    pub owner_pid: AtomicU32,
    /// Base epoch of the lane's present use.
    pub epoch: AtomicEpoch,
    /// Clock (CLOCK_MONOTONIC, ms) before which no registration, switch up or readiness is tried again.
    pub not_before_ms: AtomicU64,
    /// A descriptor of the connection plus one, in a process that holds it; 0: unknown. Where the entry
    /// has no inode yet, the daemon looks there which socket it is about. In bytes that were padding.
    pub fd: AtomicU32,
    /// Probes on TCP below the lane, under the sending direction's lock: their state, the seconds after which one is
    /// due, and the application's own options. The socket has them for all who hold it. In bytes that were padding.
    pub probes: AtomicU32,
    /// Seconds of silence after which a probe is due.
    pub probe_idle_s: AtomicU32,
    /// What the application has set: TCP_USER_TIMEOUT (ms), TCP_KEEPCNT, TCP_KEEPINTVL (s), TCP_KEEPIDLE (s) and
    /// SO_KEEPALIVE, in this order.
    pub options: [AtomicU32; 5],
    /// The sending half, whose lock is in it.
    pub tx: TxState,
    /// The receiving half, whose lock is in it.
    pub rx: RxState,
}

/// Why a sending direction went down to TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The other end asked for it, or took the direction off its ring.
    Peer,
    /// The ring was full for too long.
    Full,
    /// `underpass down`.
    Operator,
    /// The connection left its lane: it ends here, or a call or an option is not carried.
    Left,
    /// Another process has the connection, too.
    Shared,
    /// It is watched in a way that a lane cannot serve.
    Watched,
    /// The link group to the other node is gone, or the daemon that serves it.
    Daemon,
    /// The daemon had taken the direction over.
    TakenOver,
    /// A probe on TCP below the lane was not answered.
    Unanswered,
}

impl Cause {
    /// All, in order of their places in [`More`], with a name each.
    pub const ALL: [(Cause, &'static str); 9] = [
        (Cause::Peer, "peer"),
        (Cause::Full, "ring-full"),
        (Cause::Operator, "operator"),
        (Cause::Left, "left"),
        (Cause::Shared, "shared"),
        (Cause::Watched, "watched"),
        (Cause::Daemon, "daemon"),
        (Cause::TakenOver, "taken-over"),
        (Cause::Unanswered, "unanswered"),
    ];
}

/// More counters of the family. Statistics only: they order nothing. Shims before these were added leave them 0.
#[repr(C, align(64))]
pub struct More {
    /// [`Stats::downs`] by [`Cause`], in the order of [`Cause::ALL`]; there is room for more.
    pub downs_by: [AtomicU64; 15],
    /// Connections that ended as after a reset, because the process at the other end died with bytes unread on its ring. (In
    /// what was the last place of `downs_by`.)
    pub deaths: AtomicU64,
}

/// The whole file. Zeroed memory is an empty table.
#[repr(C)]
pub struct Table {
    /// What is about all entries.
    pub header: Header,
    /// One for each socket; places of closed ones are used again.
    pub conns: [Conn; CONNS],
    /// In bytes that were padding of the file.
    pub more: More,
}

/// Bytes of the table, a multiple of the page size. Sparse: unused entries cost nothing.
pub const TABLE_BYTES: usize = (core::mem::size_of::<Table>() + 4095) & !4095;

/// A copy of what `ss` shows of one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Place of the entry in the table.
    pub index: u32,
    /// [`Conn::gen`]: which socket of that place this is.
    pub gen: u32,
    /// One of [`state`]'s, never `FREE` or `BUSY`.
    pub state: u32,
    /// Bits of [`flag`].
    pub flags: u32,
    /// Reason code of this end.
    pub reason: u32,
    /// The other end's; 0: none was told.
    pub peer_reason: u32,
    /// Owner of the socket, valid with `NAMED`.
    pub uid: u32,
    /// Inode of the socket, valid with `NAMED`.
    pub inode: u64,
    /// A descriptor plus one, if it is known.
    pub fd: u32,
    /// [`Conn::not_before_ms`]; 0: at any time.
    pub not_before_ms: u64,
    /// Address of this end.
    pub local: Endpoint,
    /// Address of the other end.
    pub peer: Endpoint,
    /// Number of the link group, valid with `LANE`.
    pub group: u64,
    /// This end's side of it, 0 or 1, valid with `LANE`.
    pub side: u32,
    /// The lane's slot on it, valid with `LANE`.
    pub lane: u32,
    /// Does it send to the ring?
    pub tx_up: bool,
    /// Does it receive from the ring?
    pub rx_up: bool,
    /// Does it receive from TCP alone?
    pub rx_tcp: bool,
    /// Epoch of the last switch up of the sending half.
    pub tx_epoch: Epoch,
    /// Epoch of the receiving half's last readiness.
    pub rx_epoch: Epoch,
    /// log2 of the outgoing ring in bytes; 0: there is none.
    pub ring_log2: u32,
    /// Bytes sent over this lane; those of lanes that have ended are in [`Stats`].
    pub lane_tx: u64,
    /// Bytes received over it.
    pub lane_rx: u64,
    /// Bytes that hooked calls and lanes put on TCP, frames included.
    pub tcp_tx: u64,
    /// Bytes that they took from TCP, frames included.
    pub tcp_rx: u64,
    /// Of those in `tcp_tx`, bytes that are not the application's, or that a ring has had as well.
    pub again: u64,
    /// Of those in `tcp_rx`, bytes that are not the application's, or that it got from a ring. (Shims of before December
    /// 2026 do not count them.)
    pub rx_again: u64,
    /// Number of switches up of the sending half.
    pub ups: u32,
    /// What was counted when the sending half switched up last.
    pub tx_before: Counted,
    /// What was counted when the receiving half declared itself ready last.
    pub rx_before: Counted,
    /// The application has shut down sending while it was on a lane to another node.
    pub shut: bool,
    /// Numbers of the processes that hold it, each as its own pid namespace has it.
    pub holders: Vec<u32>,
    /// Children that may hold it and have not entered themselves.
    pub forks: u32,
}

/// An address copied out of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// IPv6 form; IPv4 as a mapped address.
    pub ip: std::net::Ipv6Addr,
    /// AF_INET, AF_INET6, or 0: unknown.
    pub family: u32,
    /// In host order.
    pub port: u16,
}

impl Default for Endpoint {
    fn default() -> Endpoint {
        Endpoint {
            ip: std::net::Ipv6Addr::UNSPECIFIED,
            family: 0,
            port: 0,
        }
    }
}

impl Addr {
    /// A copy. The words are read one by one: they change only before the entry is `NAMED`.
    pub fn load(&self) -> Endpoint {
        let mut b = [0u8; 16];
        b[..8].copy_from_slice(&self.ip[0].load(Relaxed).to_ne_bytes());
        b[8..].copy_from_slice(&self.ip[1].load(Relaxed).to_ne_bytes());
        Endpoint {
            ip: b.into(),
            family: self.family.load(Relaxed),
            port: num::low16(self.port.load(Relaxed).into()),
        }
    }

    /// Stores an address in IPv6 form (IPv4 mapped), `family` as the socket has it.
    pub fn store(&self, ip: [u8; 16], family: u32, port: u16) {
        let half = |r: core::ops::Range<usize>| {
            let mut w = [0u8; 8];
            w.copy_from_slice(&ip[r]);
            u64::from_ne_bytes(w)
        };
        self.ip[0].store(half(0..8), Relaxed);
        self.ip[1].store(half(8..16), Relaxed);
        self.family.store(family, Relaxed);
        self.port.store(u32::from(port), Relaxed);
    }
}

impl Table {
    /// A sending direction has gone down.
    pub fn count_down(&self, why: Cause) {
        self.header.stats.downs.fetch_add(1, Relaxed);
        let at = Cause::ALL.iter().position(|c| c.0 == why);
        if let Some(n) = at.and_then(|at| self.more.downs_by.get(at)) {
            n.fetch_add(1, Relaxed);
        }
    }

    /// The process at the other end of a connection has died with bytes unread, and its end is told as a reset.
    pub fn count_death(&self) {
        self.more.deaths.fetch_add(1, Relaxed);
    }

    /// A lane of this entry ends: its bytes are counted in the sums from now on. Moved, not copied:
    /// another process may hold the entry on, and readers add up both. For an instant both have them;
    /// that neither has would look like a counter that goes back.
    pub fn count_ended(&self, c: &Conn) {
        let all = &self.header.stats;
        for (sum, own) in [
            (&all.lane_tx, &c.tx.ring_bytes),
            (&all.lane_rx, &c.rx.ring_bytes),
        ] {
            let n = own.load(Relaxed);
            // AcqRel: whoever sees the second has seen the first.
            sum.fetch_add(n, AcqRel);
            own.fetch_sub(n, AcqRel);
        }
    }
}

impl Conn {
    /// Has a call of ours taken an error from the socket that the application was not told yet?
    #[inline(always)]
    pub fn has_error(&self) -> bool {
        self.rx.error.is_set() || self.tx.error.is_set()
    }

    /// That error, to be told now; 0: there is none. The socket has one for both directions, so what the
    /// other direction met afterwards is only its consequence.
    pub fn take_error(&self) -> i32 {
        let (r, t) = (self.rx.error.take(), self.tx.error.take());
        if r != 0 {
            r
        } else {
            t
        }
    }

    /// The same for a receive that has come to the end. After a FIN the end is told, and EPIPE (a reset that
    /// came after it) is left for whoever sends or asks.
    pub fn take_error_at_end(&self) -> i32 {
        match self.tx.error.get() {
            libc::EPIPE if !self.rx.error.is_set() => 0,
            _ => self.take_error(),
        }
    }

    /// Copies the entry; `None` if it is not in use, or changed hands while it was read. For the
    /// daemon: every value is hostile until checked.
    pub fn view(&self, index: u32) -> Option<View> {
        use core::sync::atomic::Ordering::Acquire;
        let state = self.state.load(Acquire); // pairs with the Release that opens an entry
        if !matches!(state, state::EMBRYO | state::LISTEN | state::OPEN) {
            return None;
        }
        let gen = self.gen.load(Acquire);
        let v = View {
            index,
            gen,
            state,
            flags: self.flags.load(Relaxed),
            reason: self.reason.load(Relaxed),
            peer_reason: self.peer_reason.load(Relaxed),
            uid: self.uid.load(Relaxed),
            inode: self.inode.load(Relaxed),
            fd: self.fd.load(Relaxed),
            not_before_ms: self.not_before_ms.load(Relaxed),
            local: self.local.load(),
            peer: self.peer.load(),
            group: self.group.load(Relaxed),
            side: self.side.load(Relaxed),
            lane: self.lane.load(Relaxed),
            tx_up: self.tx.is_up(),
            rx_up: self.rx.is_up(),
            rx_tcp: !self.rx.engaged(),
            tx_epoch: self.tx.epoch.load(Relaxed),
            rx_epoch: self.rx.epoch.load(Relaxed),
            ring_log2: self.tx.ring_log2(),
            lane_tx: self.tx.ring_bytes.load(Relaxed),
            lane_rx: self.rx.ring_bytes.load(Relaxed),
            tcp_tx: self.tx.tcp_pos.load(Relaxed).get(),
            tcp_rx: self.rx.tcp_pos.load(Relaxed).get(),
            again: self.tx.again.load(Relaxed),
            rx_again: self.rx.again.load(Relaxed),
            ups: self.tx.ups.load(Relaxed),
            tx_before: self.tx.baseline.load(),
            rx_before: self.rx.baseline.load(),
            shut: self.tx.shut.load(Relaxed) != 0,
            forks: self.forks.load(Relaxed),
            holders: self
                .holders
                .iter()
                .map(|h| h.load(Relaxed) & !DOMAINS)
                .filter(|&p| p != 0)
                .collect(),
        };
        core::sync::atomic::fence(Acquire);
        (self.gen.load(Relaxed) == gen).then_some(v)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_fuse_is_the_familys() {
        // SAFETY: atomic integers, for which zero is a value.
        let [a, b]: [Stats; 2] = unsafe { core::mem::zeroed() };
        a.count_reset(false);
        assert_eq!((a.resets(), a.is_blown()), (1, false));
        a.count_reset(true);
        assert_eq!((a.resets(), a.is_blown()), (2, true));
        assert_eq!([a.is_news(), a.is_news()], [true, false]);
        b.set_fuse(&a);
        assert_eq!((b.resets(), b.is_blown(), b.is_news()), (0, true, false));
        a.mend_fuse();
        a.count_reset(false);
        assert_eq!((a.resets(), a.is_blown(), b.is_blown()), (3, false, true));
        a.count_reset(true);
        assert!(a.is_news());
    }

    #[test]
    fn entries_are_whole_lines() {
        assert_eq!(core::mem::size_of::<Header>(), 128);
        // Daemon and shims before `More` was added have the same size.
        let before = core::mem::offset_of!(Table, more);
        assert_eq!(TABLE_BYTES, (before + 4095) & !4095);
        assert_eq!(core::mem::size_of::<More>(), 128);
        // Daemon and shims of each build find the entries at the same places.
        assert_eq!(core::mem::size_of::<Conn>(), 576);
    }
}
