//! Why a connection is on TCP: one 32-bit code per end, shown by `underpass ss` as
//! `TCP 0x<local>/0x<peer>`.
//!
//! Where the meaning is the same as in SMC, the code is SMC's (`SMC_CLC_DECL_*` in Linux's
//! `net/smc/smc_clc.h`), so that tables and scripts written for it keep working. Everything else
//! lies in an own range, `0x0a00_0000`.

/// One row of the table: code, short name, explanation, what to do about it.
pub struct Info {
    /// The code.
    pub reason: Reason,
    /// Short name, in lower case with hyphens.
    pub name: &'static str,
    /// When it is used, in a phrase for people.
    pub text: &'static str,
    /// What they can do about it.
    pub advice: &'static str,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $id:ident = $code:literal, $name:literal, $text:literal, $advice:literal;)*) => {
        /// A reason code. `0` means "no reason": the connection is promoted or may yet be.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Reason { $($(#[$doc])* #[doc = $text] $id = $code,)* }

        /// Every reason: the table behind `underpass reasons`.
        pub const TABLE: &[Info] = &[$(Info { reason: Reason::$id, name: $name, text: $text, advice: $advice },)*];

        impl Reason {
            /// The reason with this code, or `None` for a code this build does not know (a newer
            /// peer's, or a hostile one's).
            pub fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some(Reason::$id),)* _ => None }
            }
        }
    };
}

reasons! {
    None = 0, "none", "promoted, or about to be",
        "nothing to do";
    Memory = 0x0101_0000, "memory", "no memory for rings could be had, or the memory cgroup of this process, or one above it, is nearly full",
        "give the pod, the service or the node more memory";
    TimeoutDaemon = 0x0201_0000, "daemon-timeout", "the daemon did not answer in time",
        "look whether underpassd is stopped or overloaded";
    PeerNoShim = 0x0301_0000, "peer-no-shim", "the other end does not run under Underpass",
        "start the other program under `underpass run`, or annotate its pod";
    Config = 0x0300_0000, "config", "switched off by configuration (UNDERPASS=off, a rule of the daemon, or lanes in clear text to other nodes are forbidden)",
        "`underpass rules` shows the daemon's; remove the exclusion";
    NoDevice = 0x0303_0002, "no-rdma-device", "the peer is on another node, and this node has no usable RDMA device",
        "see `underpass devices`";
    Option = 0x0306_0000, "socket-option", "the socket uses an option or a call that a lane cannot carry",
        "see docs/calls.md";
    VersionMismatch = 0x030c_0000, "version", "shim, daemon or peer speak no common version",
        "upgrade the older one; restart the program to load the new shim";
    Sync = 0x0400_0000, "sync", "the two ends disagree about the state of the connection",
        "please report this with `underpass log`";
    PeerDeclined = 0x0500_0000, "peer-declined", "the other end declined; see its own reason",
        "look at the peer's reason";
    Internal = 0x0999_0000, "internal", "internal error",
        "please report this with `underpass log`";

    Young = 0x0a00_0001, "young", "too few calls or bytes so far to be worth promoting",
        "nothing to do; use it more, or run with --eager";
    NoDaemon = 0x0a00_0002, "no-daemon", "no daemon is reachable",
        "start underpassd, or use `underpass run`";
    Waiting = 0x0a00_0003, "waiting", "registered; waiting for the other end to register too",
        "see the other end's program and reason: it registers when it uses the connection";
    Unproven = 0x0a00_0004, "unproven", "it could not be proven that both ends are one TCP connection",
        "load the BPF proof (run underpassd as root), or connect without NAT inside one network namespace";
    Bypassed = 0x0a00_0005, "bypassed", "bytes moved on this socket that no hooked call moved (io_uring, stdio, raw system calls)",
        "nothing; such programs stay on TCP";
    Shared = 0x0a00_0006, "shared", "more than one process holds this connection",
        "nothing; it is promoted when only one process is left";
    Left = 0x0a00_0007, "left", "the descriptor was handed to another program (exec, spawn, SCM_RIGHTS)",
        "nothing";
    Operator = 0x0a00_0008, "operator", "sent down by `underpass down`, or by a rule that came later (`underpass deny`)",
        "`underpass up`; `underpass rules`";
    RingFull = 0x0a00_0009, "ring-full", "the reader did not keep up; the kernel's buffers are larger",
        "nothing; it is promoted again later";
    Limit = 0x0a00_000a, "limit", "a limit of this cgroup is reached",
        "raise the limit in the daemon's configuration";
    SelfConnected = 0x0a00_000b, "self-connected", "the socket is connected to itself",
        "nothing";
    PeerGone = 0x0a00_000c, "peer-gone", "the process at the other end with which it had a lane, or was to have one, is gone",
        "nothing";
    NotEstablished = 0x0a00_000d, "not-established", "the connection is not established, or already closing",
        "nothing";
    EpollShared = 0x0a00_000e, "epoll", "the socket is watched in a way that a lane cannot serve",
        "see docs/readiness.md";
    Seccomp = 0x0a00_000f, "seccomp", "a system call that a lane needs is refused (seccomp, limits)",
        "allow memfd_create, mmap and SCM_RIGHTS for this program";
    Foreign = 0x0a00_0010, "foreign-bytes", "someone wrote into the TCP stream behind our back; the connection was reset",
        "find the code that writes to this socket without libc";
    Hostile = 0x0a00_0011, "bad-peer", "the peer's shared memory held impossible values; the connection was reset",
        "the peer is broken or malicious";
    Stalled = 0x0a00_0012, "stalled", "the sender (or its daemon in its place) did not put its bytes back on TCP in time; the connection was reset",
        "the peer process hangs outside every hooked call, or the other end does not read";
    Table = 0x0a00_0013, "table-full", "this process has more sockets than the shim's table",
        "nothing";
    UnknownNode = 0x0a00_0014, "unknown-node", "waiting for the other end; its address belongs to no node that this daemon knows",
        "if it is a node of yours, list it and its addresses under [[peer]]";
    PeerDaemon = 0x0a00_0015, "peer-daemon", "the daemon of the peer's node cannot be reached",
        "see `underpass peers`";
    WrongNode = 0x0a00_0016, "wrong-node", "a node speaks for an address that the directory gives to another node",
        "compare [node] and [[peer]] in the configuration of all nodes; see `underpass peers`";
    InDoubt = 0x0a00_0017, "in-doubt", "it could not be found out whether the peer's node had taken a switch to RDMA; the connection was reset",
        "a link or a daemon failed in that very round trip, and a shim or a daemon there is older than this one: replace it";
    RailDown = 0x0a00_0018, "rail-down", "no RDMA link to the peer's node works at the moment",
        "look at cables, ports and switches: `underpass devices` on both nodes, rails in `underpass stats`; it is tried again by itself";
    PeerNoDevice = 0x0a00_0019, "peer-no-rdma-device", "the peer's node has no usable RDMA device",
        "see `underpass devices` on the peer's node";
    DaemonLost = 0x0a00_001a, "daemon-lost", "the daemon of this or of the peer's node went away; promoted again later",
        "see `underpass peers`";
    Ready = 0x0a00_001b, "ready", "a lane is attached; each direction moves onto it with its next send",
        "nothing to do";
    Idle = 0x0a00_001c, "idle", "nothing has moved since it was last considered; it is considered again with its next call",
        "nothing to do; use it more, or run with --eager";
    Untracked = 0x0a00_001d, "untracked", "the shim did not see how this process got the socket (inherited by exec under a number above 15, or made by a call that it does not see)",
        "nothing; such connections stay on TCP";
    NotAccepted = 0x0a00_001e, "not-accepted", "the program at the other end has not accepted the connection yet",
        "look at the other program: it is busy or stuck";
    Unreachable = 0x0a00_001f, "peer-elsewhere", "the other end is nowhere that this daemon sees: on another node, in a network namespace without Underpass, behind address translation, or under another daemon",
        "for another node see `underpass peers`; else run underpassd as root";
    Unanswered = 0x0a00_0020, "unanswered", "a probe on the TCP connection below the lane was not answered; TCP carries the bytes until it is",
        "look at packet filters and the network between the ends";
    HeldElsewhere = 0x0a00_0021, "held-elsewhere", "it came from another process (exec, SCM_RIGHTS), and there is another descriptor of it: that process's, a third one's, or one that this process got besides",
        "nothing; it is promoted when only one process is left";
    Unseen = 0x0a00_0022, "unseen-holders", "it came from another process (exec, SCM_RIGHTS), and the daemon may not see whether that one still has a descriptor of it",
        "run underpassd as root, and with all capabilities that the processes of the node have (one with more, often the first of a container, may not be looked at)";
    Standard = 0x0a00_0023, "standard-stream", "it was made a standard stream (dup2 to 0, 1 or 2, as inetd and vsftpd do): calls of the C library's stdio on those are not seen",
        "nothing; such connections stay on TCP";
    Cramped = 0x0a00_0024, "cramped", "the process is limited to less address space (2 GiB), data (1 GiB) or file size than leaves room for lanes",
        "raise the limit: `ulimit -v`, `-d` or `-f`, LimitAS= and the like of its unit, default_vsz_limit of dovecot";
    Fuse = 0x0a00_0025, "fuse", "the shim had to reset a connection of this program, so its new connections stay on TCP",
        "`underpass log` says which one and why: please report it; `underpass up` ends this";
}

impl Reason {
    /// The table row of this reason.
    pub fn info(self) -> &'static Info {
        TABLE.iter().find(|i| i.reason == self).unwrap_or(&TABLE[0])
    }

    /// The code, as shown.
    pub fn code(self) -> u32 {
        self as u32
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_round_trip() {
        let mut seen = std::collections::HashSet::new();
        for i in TABLE {
            assert!(seen.insert(i.reason.code()), "{} twice", i.name);
            assert_eq!(Reason::from_code(i.reason.code()), Some(i.reason));
            assert_eq!(i.reason.info().name, i.name);
        }
        assert_eq!(Reason::from_code(0xdead_beef), None);
    }
}
