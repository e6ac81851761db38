//! The words that say in which state a lane is: an epoch, and what the writer says about that epoch.
//!
//! In memory a word is `epoch << 8 | phase`, or `epoch << 8 | flags`; only this module knows that. Each kind of word
//! is a type of its own, so that none is stored in the place of another. Any 64 bits are a valid value of every kind:
//! a peer may have stored anything, and the reader decides what it believes. The bits above 40 mean nothing, but
//! words that differ in them are not equal.

use super::EPOCHS;
use crate::num;
use crate::prim::{AtomicU64, Ordering};
use core::marker::PhantomData;

/// Number of a switch up on one lane slot. It only grows, in steps of one, and wraps; 0 is before the first switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Epoch(u32);

impl Epoch {
    /// The direction was not switched up yet.
    pub const NONE: Epoch = Epoch(0);

    /// The epoch with this number.
    #[inline(always)]
    pub const fn new(number: u32) -> Epoch {
        Epoch(number)
    }

    /// The number, for messages, frames and output.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Base of use number `n` (from 0) of a slot: the epochs of that use are the [`EPOCHS`] numbers above the base.
    #[inline(always)]
    pub const fn base(n: u32) -> Epoch {
        Epoch(n.wrapping_mul(EPOCHS))
    }

    /// The next epoch.
    #[inline(always)]
    pub const fn next(self) -> Epoch {
        Epoch(self.0.wrapping_add(1))
    }

    /// Number of epochs from `other` up to this one, wrapping: more than half of all numbers if this epoch is older.
    #[inline(always)]
    pub const fn since(self, other: Epoch) -> u32 {
        self.0.wrapping_sub(other.0)
    }

    /// Do both epochs belong to the same use of the slot?
    #[inline(always)]
    pub(crate) const fn same_use(self, other: Epoch) -> bool {
        self.0 / EPOCHS == other.0 / EPOCHS
    }
}

/// An [`Epoch`] in memory that one process, or family, writes. Not a loom atomic, because it changes only under a
/// lock.
#[derive(Default)]
#[repr(transparent)]
pub struct AtomicEpoch(core::sync::atomic::AtomicU32);

impl AtomicEpoch {
    /// Reads the epoch.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> Epoch {
        Epoch(self.0.load(order))
    }

    /// Stores another epoch.
    #[inline(always)]
    pub fn store(&self, epoch: Epoch, order: Ordering) {
        self.0.store(epoch.0, order);
    }
}

/// A value that one word of shared memory can hold.
pub trait Word: Copy {
    /// The value with these bits; every value is accepted.
    fn from_raw(raw: u64) -> Self;
    /// The bits of the value.
    fn raw(self) -> u64;
}

/// A word of shared memory that holds a `W`. Where it is used, comments say what its memory orders pair with.
#[derive(Default)]
#[repr(transparent)]
pub struct Shared<W>(pub(super) AtomicU64, PhantomData<W>);

impl<W: Word> Shared<W> {
    /// Reads the value, whoever has stored it.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> W {
        W::from_raw(self.0.load(order))
    }

    /// Stores another value.
    #[inline(always)]
    pub fn store(&self, word: W, order: Ordering) {
        self.0.store(word.raw(), order);
    }
}

/// The same in memory that one process, or family, has to itself. Not a loom atomic, because it changes only under a
/// lock.
#[derive(Default)]
#[repr(transparent)]
pub struct Private<W>(core::sync::atomic::AtomicU64, PhantomData<W>);

impl<W: Word> Private<W> {
    /// Reads the value.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> W {
        W::from_raw(self.0.load(order))
    }

    /// Stores another value.
    #[inline(always)]
    pub fn store(&self, word: W, order: Ordering) {
        self.0.store(word.raw(), order);
    }

    /// Stores another value and returns the former one.
    #[inline(always)]
    pub fn swap(&self, word: W, order: Ordering) -> W {
        W::from_raw(self.0.swap(word.raw(), order))
    }
}

/// How far a sender is in an epoch: one of the phases in [`tx`], or, from a peer, any byte. The order is the order in
/// time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TxPhase(u8);

impl TxPhase {
    /// From the byte of a message.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> TxPhase {
        TxPhase(byte)
    }

    /// The byte for a message.
    #[inline(always)]
    pub const fn raw(self) -> u8 {
        self.0
    }
}

/// What a receiver says about an epoch: a set of the flags in [`rx`], or, from a peer, any byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct RxFlags(u8);

impl RxFlags {
    /// From the byte of a message.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> RxFlags {
        RxFlags(byte)
    }

    /// The byte for a message.
    #[inline(always)]
    pub const fn raw(self) -> u8 {
        self.0
    }

    /// Is any of the flags `any` set?
    #[inline(always)]
    pub const fn has(self, any: RxFlags) -> bool {
        self.0 & any.0 != 0
    }

    /// The flags that are also in `mask`.
    #[inline(always)]
    pub const fn only(self, mask: RxFlags) -> RxFlags {
        RxFlags(self.0 & mask.0)
    }

    /// The flags that are not in `mask`.
    #[inline(always)]
    pub const fn without(self, mask: RxFlags) -> RxFlags {
        RxFlags(self.0 & !mask.0)
    }
}

impl core::ops::BitOr for RxFlags {
    type Output = RxFlags;
    #[inline(always)]
    fn bitor(self, other: RxFlags) -> RxFlags {
        RxFlags(self.0 | other.0)
    }
}

/// How far a takeover is: one of the phases in [`takeover`], or, from a peer, any byte. The order is the order in
/// time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TakeoverPhase(u8);

impl TakeoverPhase {
    /// The phase with this number: for tests with invalid phases.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> TakeoverPhase {
        TakeoverPhase(byte)
    }
}

/// A word that consists of an epoch and a `$said`.
macro_rules! word_of {
    ($(#[$doc:meta])* $name:ident: $said:ident $reads:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The word that says this about the epoch.
            #[inline(always)]
            pub const fn new(epoch: Epoch, $reads: $said) -> $name {
                $name((epoch.0 as u64) << 8 | $reads.0 as u64)
            }

            /// The epoch of the word.
            #[inline(always)]
            pub const fn epoch(self) -> Epoch {
                Epoch(num::low32(self.0 >> 8))
            }

            /// What the word says about its epoch.
            #[inline(always)]
            pub const fn $reads(self) -> $said {
                $said(num::low8(self.0))
            }
        }

        impl Word for $name {
            #[inline(always)]
            fn from_raw(raw: u64) -> $name {
                $name(raw)
            }
            #[inline(always)]
            fn raw(self) -> u64 {
                self.0
            }
        }
    };
}

word_of! {
    /// `TxWords::state`: an epoch, and how far its sender is.
    TxWord: TxPhase phase
}
word_of! {
    /// `RxWords::word`: an epoch, and what its receiver says.
    RxWord: RxFlags flags
}
word_of! {
    /// `RxWords::takeover`: an epoch, and how far its takeover is.
    TakeoverWord: TakeoverPhase phase
}

impl RxWord {
    /// Is any of these flags set?
    #[inline(always)]
    pub const fn has(self, any: RxFlags) -> bool {
        self.0 & any.0 as u64 != 0
    }

    /// The same with these flags set.
    #[inline(always)]
    pub const fn with(self, flags: RxFlags) -> RxWord {
        RxWord(self.0 | flags.0 as u64)
    }

    /// The same with these flags cleared.
    #[inline(always)]
    pub const fn without(self, flags: RxFlags) -> RxWord {
        RxWord(self.0 & !(flags.0 as u64))
    }
}

/// Phases of `TxWords::state`.
pub mod tx {
    use super::TxPhase;

    named! { TxPhase, TxPhase => Phase;
        /// The sender has not switched up in this epoch.
        NONE: None = 0;
        /// The sender's bytes are on the ring: TCP ended at `up_tcp_pos`, the ring starts at `up_start`.
        UP: Up = 1;
        /// The sender is about to put a `Down` frame on TCP.
        DOWNING: Downing = 2;
        /// The sender has put the `Down` frame, and every byte that it announces, on TCP.
        DOWN: Down = 3;
        /// After a revocation, or when all bytes of the ring are consumed: all bytes from the revoked, or consumed,
        /// cursor on are on TCP, without a frame.
        RESUMED: Resumed = 4;
        /// TCP did not take everything (it is shut down or dead): the missing bytes are only on the ring.
        BROKEN: Broken = 5;
        /// As `DOWN`, but nothing follows, because TCP is shut down. All bytes are on the ring, too.
        ENDED: Ended = 6;
    }
}

/// Flags of `RxWords::word`.
pub mod rx {
    use super::RxFlags;

    /// The receiver is not ready.
    pub const NONE: RxFlags = RxFlags(0);

    named! { RxFlags, RxFlags => Flag;
        /// The receiver will look for the switch before it reads TCP.
        READY: Ready = 1;
        /// The receiver asks the sender to go down when convenient (a second process, an operator).
        WANT_DOWN: WantDown = 2;
        /// The cursor is frozen at `revoked`; the sender has to continue on TCP from there, without a frame.
        REVOKED: Revoked = 4;
        /// This end has closed: nobody will read any more.
        CLOSED: Closed = 8;
        /// Across nodes only. A daemon sets it in its proxy of the remote receiver's word: the switch of this epoch is
        /// stored in the remote node's memory. (A switch that came too late is answered by `REVOKED`.)
        ACCEPTED: Accepted = 16;
        /// Across nodes only: the receiver has read all TCP bytes from before this epoch's switch. A `Fin` frame sent now
        /// cannot end up after bytes that perhaps nobody will read.
        PAST: Past = 32;
    }
}

/// Phases of `DaemonWords::takeover` and of `RxWords::takeover`. The end itself stores only `DOWN`, `FIN` and `PLAIN`.
pub mod takeover {
    use super::TakeoverPhase;

    named! { TakeoverPhase, TakeoverPhase => Phase;
        /// Only the end uses the direction.
        NONE: None = 0;
        /// The daemon has taken over the sending direction: the end does not touch it.
        TAKEN: Taken = 1;
        /// A `Down` frame with this cursor, and what follows it, is being put on TCP.
        DOWN: Down = 2;
        /// A `Fin` frame with that cursor is being put on TCP.
        FIN: Fin = 3;
        /// After a revocation: the bytes from that cursor on are being put on TCP, without a frame.
        PLAIN: Plain = 4;
        /// The direction is on TCP, at position `DaemonWords::tcp_pos`, and belongs to the end again.
        DONE: Done = 5;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Clients of different builds share these words, so the numbers must never change.
    #[test]
    fn the_bits_in_memory() {
        let e = Epoch::new(0x89ab_cdef);
        assert_eq!(TxWord::new(e, tx::RESUMED).raw(), 0x89_abcd_ef04);
        let w = RxWord::new(e, rx::READY | rx::REVOKED);
        assert_eq!(w.raw(), 0x89_abcd_ef05);
        assert_eq!(w.with(rx::PAST).raw(), 0x89_abcd_ef25);
        assert_eq!(w.without(rx::READY | rx::PAST).raw(), 0x89_abcd_ef04);
        assert_eq!(
            TakeoverWord::new(e, takeover::DONE).raw(),
            0x89_abcd_ef05,
            "the same bits, another type"
        );
        let t: Vec<u8> = tx::Phase::ALL.iter().map(|p| p.value().0).collect();
        assert_eq!(t, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(tx::RESUMED, TxPhase(4));
        let r: Vec<u8> = rx::Flag::ALL.iter().map(|f| f.value().0).collect();
        assert_eq!(r, [1, 2, 4, 8, 16, 32]);
        assert_eq!(rx::REVOKED, RxFlags(4));
        let o: Vec<u8> = takeover::Phase::ALL.iter().map(|p| p.value().0).collect();
        assert_eq!(o, [0, 1, 2, 3, 4, 5]);
        assert_eq!(takeover::PLAIN, TakeoverPhase(4));
    }

    #[test]
    fn names_of_what_peers_store() {
        assert_eq!(tx::Phase::of(tx::ENDED), Some(tx::Phase::Ended));
        assert_eq!(tx::Phase::of(TxPhase(7)), None);
        assert_eq!(takeover::Phase::of(TakeoverPhase(6)), None);
        assert_eq!(rx::Flag::of(rx::PAST), Some(rx::Flag::Past));
        assert_eq!(rx::Flag::of(rx::PAST | rx::READY), None, "two flags");
    }

    proptest! {
        /// Whatever a peer stores: the reader sees the same bits, and an epoch and a byte of them, and nothing else.
        #[test]
        fn any_bits_are_a_word(raw: u64) {
            let (epoch, byte) = (Epoch::new((raw >> 8) as u32), raw as u8);
            let t = TxWord::from_raw(raw);
            prop_assert_eq!((t.raw(), t.epoch(), t.phase().0), (raw, epoch, byte));
            let r = RxWord::from_raw(raw);
            prop_assert_eq!((r.raw(), r.epoch(), r.flags().0), (raw, epoch, byte));
            let o = TakeoverWord::from_raw(raw);
            prop_assert_eq!((o.raw(), o.epoch(), o.phase().0), (raw, epoch, byte));
            for bit in 0..8 {
                prop_assert_eq!(r.has(RxFlags(1 << bit)), byte & 1 << bit != 0);
            }
            let clean = raw >> 40 == 0;
            prop_assert_eq!(t == TxWord::new(t.epoch(), t.phase()), clean);
        }
    }

    #[test]
    fn epochs_wrap() {
        let last = Epoch::new(u32::MAX);
        assert_eq!(last.next(), Epoch::NONE);
        assert_eq!(Epoch::new(1).since(last), 2);
        assert_eq!(last.since(Epoch::new(1)), u32::MAX - 1);
        let base = Epoch::base(3);
        assert!(base.same_use(Epoch::new(base.get() + EPOCHS - 1)));
        assert!(!base.same_use(Epoch::base(4)));
    }
}
