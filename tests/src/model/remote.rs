//! Lanes across nodes as explicit-state models, explored exhaustively within small bounds.
//!
//! [`lane`] is one direction of one lane between two nodes: application A, its daemon D1, the
//! network, daemon D2, application B. The two shims' halves make the steps of `lane::half`; what
//! happens between a shim and its own daemon inside one node's memory is as on one node, and the
//! model of that (`model::lane`) is not repeated here: a step of an application is one call under
//! its lock, except where another one's step in between matters. [`wake`] is the chain of
//! sleepers from one application to the other.
//!
//! As there, a model that cannot fail proves nothing: [`Bug`] takes one rule away at a time, and
//! the tests insist that the checker finds each.

#[path = "remote/daemons.rs"]
mod daemons;
#[path = "explore.rs"]
pub mod explore;
#[path = "remote/lane.rs"]
pub mod lane;
#[path = "remote/network.rs"]
mod network;
#[path = "remote/receiver.rs"]
mod receiver;
#[path = "remote/sender.rs"]
mod sender;
#[path = "remote/state.rs"]
pub mod state;
#[path = "remote/tcp.rs"]
mod tcp;
#[path = "remote/wake.rs"]
pub mod wake;

/// A rule left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The sender goes to the ring without waiting for the answer of the peer's daemon.
    NoAsk,
    /// D2 looks at the receiver's word, then stores the switch and answers.
    LookBeforeSwitch,
    /// D2 refuses a switch because the receiver merely wishes for a switch down.
    RefuseOnWish,
    /// A switch that comes again is made again.
    SwitchTwice,
    /// A switch in doubt is not asked for again over the control channel.
    NoQuery,
    /// The proxy's head stays where it was when a new epoch starts.
    HeadStays,
    /// D2 stores a snapshot as it is, however old.
    OldSnapshots,
    /// A snapshot that was posted to a rail that died is not sent again.
    SnapshotIsEvent,
    /// The rest goes over the next rail before the peer has destroyed its end of the dead one.
    NoWaitForDelete,
    /// After a failover the transfer goes on where it was posted, not where it was completed.
    NoRewrite,
    /// A lane changes rails while writes are under way on the old one.
    MoveUndrained,
    /// A rail announces bytes that another one carries.
    CdcElsewhere,
    /// Revoked while up and nothing unread: the receiver leaves at once, as on one node.
    LeaveAtOnce,
    /// A revocation is not passed on; the sender is asked to go down by a frame.
    RevokeByFrame,
    /// A revocation is passed on although the answer to it cannot be.
    RevokeWithoutPath,
    /// Revoked while the proxy still says `UP`: TCP is not looked at for a frame.
    FrameOnlyWhenSaid,
    /// A sender takes back what it has published when it meets a revocation.
    TakeBack,
    /// The `Down` frame does not say how much follows it.
    DownWithoutLength,
    /// A receiver may leave when its frame has come, whether or not the rest has.
    LeaveBeforeRest,
    /// A FIN without `Fin` is an end like any other.
    BareFinIsEnd,
    /// `Fin` is the end, whatever is on the ring.
    FinWithoutRing,
    /// `Fin` is written when the last write has completed, not when D2 has stored the head.
    FinOnCompletion,
    /// `Fin` is written although the receiver has not read TCP up to the switch.
    FinBehindPrefix,
    /// TCP is shut without a `Fin`.
    NoFin,
    /// An end of TCP while a revocation waits is taken for the answer.
    EndWhileRevoking,
    /// Nobody takes over from an application that is gone or asleep.
    NoTakeover,
    /// A direction is taken over without the lock.
    NoLock,
    /// A lock whose holder's daemon died is not taken over.
    NoSteal,
    /// Who takes over does not see that somebody was on the way down.
    ForgetDowning,
    /// Who takes over a drain goes on from its record and does not ask the kernel.
    TrustRecord,
    /// A drain leaves its mode before it has said so.
    ModeBeforeWord,
    /// All rails are down, and the sender is not told.
    NoWantDown,
    /// The sender does not go down when its own daemon dies.
    IgnoreDaemon,
    /// It answers a revocation without a frame, though nobody is left to tell the answer.
    ResumeOrphan,
    /// The sender does not announce that it waits for space (as on one node).
    SilentWish,
    /// The receiver announces its cursor as on one node: only if the ring was filled.
    LocalThreshold,
    /// A daemon goes to sleep without a second look at the words.
    SleepWithoutLook,
    /// A daemon goes to sleep without a second look at its completion queue.
    ArmWithoutPoll,
    /// D1 stores the cursor and does not look whether the sender waits.
    NoLookForWish,
    /// A cursor that found the wire busy is not sent later.
    LostCursor,
}
