//! Lanes across nodes as explicit-state models, explored exhaustively within small bounds.
//!
//! [`lane`] is one direction of one lane between two nodes: application A, its daemon D1, the
//! network, daemon D2, application B. The two shims' halves make the steps of `lane::half`; what
//! happens inside one node's memory is no part of this: it is explored as it ships (`lane/tests`, and loom in
//! `lane/src/half/checked`). So a step of an application is one call under its lock, except where another one's step in
//! between matters. [`wake`] is the chain of
//! sleepers from one application to the other.
//!
//! Bounded, so that everything is explored in about a minute on two processors: one direction, a ring of two bytes, at
//! most four bytes, two rails with one message under way on each, one switch, and of the other events none but those that
//! a configuration names ([`state::Config`]). Configurations in which many things may happen have one byte. One message
//! per rail is enough for it to be overtaken by another rail's, or to land after its rail has failed. D2's messages are
//! under way for a while only where a configuration is about that (`slow`); elsewhere they arrive at once. A daemon that is
//! dead does not start again: its successor begins without lanes.
//!
//! A model that cannot fail proves nothing: [`Bug`] takes one rule away at a time, and
//! the tests insist that the checker finds each; and they insist that each kind of step ([`steps`]) was made.

#[path = "remote/daemons.rs"]
mod daemons;
#[path = "explore.rs"]
pub mod explore;
#[path = "remote/half.rs"]
mod half;
#[path = "remote/inward.rs"]
mod inward;
#[path = "remote/lane.rs"]
pub mod lane;
#[path = "remote/leave.rs"]
mod leave;
#[path = "remote/network.rs"]
mod network;
#[path = "remote/outward.rs"]
mod outward;
#[path = "remote/read.rs"]
mod read;
#[path = "remote/receiver.rs"]
mod receiver;
#[path = "remote/resets.rs"]
mod resets;
#[path = "remote/sender.rs"]
mod sender;
#[path = "remote/state.rs"]
pub mod state;
#[path = "remote/steps.rs"]
pub mod steps;
#[path = "remote/takeover.rs"]
mod takeover;
#[path = "remote/tcp.rs"]
mod tcp;
#[path = "remote/wake.rs"]
pub mod wake;
#[path = "word.rs"]
mod word;

use underpass_rdma::wire::Body;

/// Messages on a queue pair that no step here reads.
fn not_here(message: &Body) -> ! {
    match message {
        Body::Switch { .. } | Body::SwitchReply { .. } | Body::Landed { .. } | Body::Cdc(_) => {
            unreachable!("in the other direction")
        }
        // `network` has links that fail, are destroyed at both ends, and come again.
        Body::ConfirmLink { .. }
        | Body::AddLink { .. }
        | Body::DeleteLink { .. }
        | Body::TestLink { .. } => unreachable!("links"),
        // Memory is there from the beginning, and there is one ring (`space` has moves, on one node; across nodes
        // `daemon/rdma/tests` do).
        Body::ConfirmRkey(_) | Body::DeleteRkey { .. } => unreachable!("memory"),
        Body::Ring { .. } | Body::RingReply { .. } => unreachable!("another ring"),
    }
}

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
    /// D2 says that a switch never came, and takes it when it comes after all.
    QueryForgets,
    /// The proxy's head stays where it was when a new epoch starts.
    HeadStays,
    /// D2 stores a snapshot as it is, however old.
    OldSnapshots,
    /// A snapshot that was posted to a rail that died is not sent again.
    SnapshotIsEvent,
    /// Any answer to a switch of the epoch is taken for that to the last one.
    AnyAttempt,
    /// An answer of D2 that was posted to a rail that died is not sent again.
    AnswerIsEvent,
    /// D1 does not say that its head may be lower than one that it has announced.
    NoValidate,
    /// Bytes behind a message are taken for written when the device has the message.
    InlineIsThere,
    /// The rest goes over the next rail before the peer has destroyed its end of the dead one.
    NoWaitForDelete,
    /// After a failover the transfer goes on where it was posted, not where it was completed.
    NoRewrite,
    /// A lane changes rails while writes are under way on the old one.
    MoveUndrained,
    /// A rail announces bytes that another one carries.
    CdcElsewhere,
    /// The receiver leaves at once if nothing is unread, as on one node.
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
    /// A receiver leaves only when it is told that all is on TCP, though it could count that.
    WaitForWord,
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
    /// The end does not look whether the daemon has taken its direction over.
    NoLookAtTakeover,
    /// A daemon that has brought a direction down does not give it back.
    NoDone,
    /// D1's engine learns only from a helper's result that the helper has put a direction on TCP.
    AwaitResult,
    /// The end of a daemon that had taken a direction over does not take it back.
    NoReclaim,
    /// An end that stays on the way down is not taken over.
    ForgetDowning,
    /// Who takes over a drain begins it again and does not ask the kernel.
    TrustRecord,
    /// Who puts a frame on TCP does not note it first.
    NoRecord,
    /// Nobody is told how an end came down that had said that it would, and was taken over.
    DownUntold,
    /// Bytes that do not arrive over the rails are not put on TCP before the end.
    NoFlush,
    /// A drain leaves its mode before it has said so.
    ModeBeforeWord,
    /// No rail is left, and nobody brings the sender down.
    NoWantDown,
    /// The sender does not go down when its own daemon dies.
    IgnoreDaemon,
    /// It answers a revocation without a frame even then, though nobody is left to tell the answer.
    ResumeOrphan,
    /// D1 does not say that more than half of the ring is unread.
    SilentWish,
    /// The receiver does not tell its daemon that it has emptied the ring, or read a good part of it.
    SilentReader,
    /// A daemon goes to sleep without a second look at the words.
    SleepWithoutLook,
    /// A daemon goes to sleep without a second look at its completion queue.
    ArmWithoutPoll,
    /// D1 stores the cursor and does not look whether the sender sleeps.
    NoLookForSleeper,
    /// A cursor that found the wire busy is not sent later.
    LostCursor,
}
