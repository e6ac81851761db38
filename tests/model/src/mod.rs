//! The switch protocol as an explicit-state model, explored exhaustively within small bounds.
//!
//! One direction of one lane: a sender, a receiver, the TCP stream, the ring, the shared words,
//! the two doorbells, and the daemon that offers the lane. Every action is one load or store of
//! shared memory or one system call, in the order in which `lane::half` makes them, so that the
//! two ends (and their deaths) interleave at every point where they can in life. The two
//! directions of a connection share nothing but the doorbells and the end, so one is enough;
//! `space` models several sleepers on one link group, `holders` several threads or processes on one end.
//!
//! Memory is sequentially consistent here. The code has a full fence wherever a store must be
//! visible before a later load (publish and look, revoke and look, wish and look), and release and
//! acquire elsewhere; that this suffices on weaker memory is what the loom tests in `lane` check.
//!
//! This is a second version of what `lane::half` does, written by hand: it shows that the rules suffice, step by step, and
//! what ships has to be shown to keep them elsewhere. What came after it is not repeated here: a daemon that takes a
//! direction over on one node is explored as it ships, by `lane/tests/lane_random` (seeded) and by loom
//! (`lane/src/half/checked`).
//!
//! A model that cannot fail proves nothing: [`Bug`] takes one precaution away at a time, and the
//! tests insist that the checker finds each.

pub mod explore;
pub mod holders;
pub mod lane;
mod read;
mod receiver;
mod revoke;
mod sender;
pub mod space;
pub mod state;
pub mod tcp;
mod word;

/// A precaution left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The sender does not look at the receiver's word after a publish.
    NoLookAfterPublish,
    /// A ready receiver reads TCP without counting first.
    UnboundedRead,
    /// It counts, but does not look for the switch once more afterwards.
    NoLookAfterCount,
    /// An end goes to sleep without a second look.
    SleepWithoutLook,
    /// The publisher looks for sleepers before it publishes.
    LookBeforePublish,
    /// The head becomes visible before the data.
    HeadBeforeData,
    /// End of file is believed without another look at the ring.
    EofWithoutLook,
    /// The same while ready, where the switch may have come just before.
    ReadyEofWithoutLook,
    /// A switch up does not look whether readiness was taken back meanwhile.
    NoRetreat,
    /// Ready again before the sender has read the revocation.
    ReadyTooEarly,
    /// Receives go on while a revocation waits.
    ConsumeWhileRevoking,
    /// Bytes that come twice are not skipped.
    NoSkip,
    /// A send that met a revocation says that all is sent, though TCP refused it.
    NoTakeBack,
    /// Anything on TCP is a frame once the sender has announced one.
    TrustAnnouncement,
    /// The receiver wants to be told of space, but its cursor was not looked at again.
    WishWithoutLook,
    /// The reader does not look for a wish after it has consumed.
    NoLookForWish,
    /// One waiter's success takes back the wish of another.
    WishTakenBack,
    /// The switch does not wait for those who are inside a native call.
    NoGate,
    /// The native caller counts itself in after it has looked at the gate.
    CountAfterLook,
    /// A switch trusts its own count and does not ask the kernel.
    TrustCount,
    /// Who finds another's work on the doorbell does not pass it on.
    NoForward,
    /// The new ring's place is announced before the place is written.
    MoveBeforePlace,
    /// The sender moves on although the reader is still in the ring before.
    MoveTooEarly,
    /// Half a frame stays in the kernel, which calls the socket readable.
    HalfStays,
    /// Bytes unread on the ring stay there alone when the sender shuts down or closes.
    NoRepeat,
    /// A revocation that comes in the middle of that does not delay the end until its bytes are on TCP.
    NoFlush,
}
