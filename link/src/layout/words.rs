//! The words of a lane that say where it stands: an epoch, and what its writer says of it.
//!
//! In memory a word is `epoch << 8 | phase`, or flags in the place of the phase. Only this module knows. Each kind of
//! word is a type of its own, so that none is stored where another belongs. Any 64 bits are a value of every kind: a
//! peer may have stored anything, and whoever reads it decides what it believes. The bits above 40 mean nothing, but
//! words that differ there are not equal.

use super::EPOCHS;
use crate::prim::{AtomicU64, Ordering};
use core::marker::PhantomData;

/// Number of a switch up on one lane slot. It only grows, by wrapping steps of one; 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Epoch(u32);

impl Epoch {
    /// Nothing was switched up yet.
    pub const NONE: Epoch = Epoch(0);

    /// The epoch with this number.
    #[inline(always)]
    pub const fn new(number: u32) -> Epoch {
        Epoch(number)
    }

    /// Its number: for messages, frames and people.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Base of a slot's use number `n`, counted from 0: the epochs of the use are the [`EPOCHS`] above it.
    #[inline(always)]
    pub const fn base(n: u32) -> Epoch {
        Epoch(n.wrapping_mul(EPOCHS))
    }

    /// The one after it.
    #[inline(always)]
    pub const fn next(self) -> Epoch {
        Epoch(self.0.wrapping_add(1))
    }

    /// Epochs from `other` up to this one, wrapping: more than half of all if this one is older.
    #[inline(always)]
    pub const fn since(self, other: Epoch) -> u32 {
        self.0.wrapping_sub(other.0)
    }

    /// Do both belong to one use of the slot?
    #[inline(always)]
    pub(crate) const fn same_use(self, other: Epoch) -> bool {
        self.0 / EPOCHS == other.0 / EPOCHS
    }
}

/// An [`Epoch`] in memory that one process, or family, writes. Not loom's: it changes only under a lock.
#[derive(Default)]
#[repr(transparent)]
pub struct AtomicEpoch(core::sync::atomic::AtomicU32);

impl AtomicEpoch {
    /// The epoch that is there.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> Epoch {
        Epoch(self.0.load(order))
    }

    /// Puts another one there.
    #[inline(always)]
    pub fn store(&self, epoch: Epoch, order: Ordering) {
        self.0.store(epoch.0, order);
    }
}

/// What one word of shared memory can hold.
pub trait Word: Copy {
    /// The value of these bits, whatever they are.
    fn from_raw(raw: u64) -> Self;
    /// Its bits.
    fn raw(self) -> u64;
}

/// A word of shared memory that holds a `W`. What an order pairs with is said where the word is used.
#[derive(Default)]
#[repr(transparent)]
pub struct Shared<W>(AtomicU64, PhantomData<W>);

impl<W: Word> Shared<W> {
    /// What is there, from whomever.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> W {
        W::from_raw(self.0.load(order))
    }

    /// Puts another value there.
    #[inline(always)]
    pub fn store(&self, word: W, order: Ordering) {
        self.0.store(word.raw(), order);
    }
}

/// How far a sender is in an epoch, one of [`tx`]'s; or, from a peer, any byte. In the order in which they follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TxPhase(u8);

impl TxPhase {
    /// As a message has it.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> TxPhase {
        TxPhase(byte)
    }

    /// For a message.
    #[inline(always)]
    pub const fn raw(self) -> u8 {
        self.0
    }
}

/// What a receiver says in an epoch, a set of [`rx`]'s flags; or, from a peer, any byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct RxFlags(u8);

impl RxFlags {
    /// As a message has them.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> RxFlags {
        RxFlags(byte)
    }

    /// For a message.
    #[inline(always)]
    pub const fn raw(self) -> u8 {
        self.0
    }

    /// Is any of these among them?
    #[inline(always)]
    pub const fn has(self, any: RxFlags) -> bool {
        self.0 & any.0 != 0
    }

    /// Those that are among `mask`.
    #[inline(always)]
    pub const fn only(self, mask: RxFlags) -> RxFlags {
        RxFlags(self.0 & mask.0)
    }

    /// Those that are not among `mask`.
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

/// How far a takeover is, one of [`takeover`]'s; or, from a peer, any byte. In the order in which they follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TakeoverPhase(u8);

impl TakeoverPhase {
    /// Of this number: for those who try what is none.
    #[inline(always)]
    pub const fn from_raw(byte: u8) -> TakeoverPhase {
        TakeoverPhase(byte)
    }
}

/// A word of an epoch and `$said`.
macro_rules! word_of {
    ($(#[$doc:meta])* $name:ident: $said:ident $reads:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// What its writer says in this epoch.
            #[inline(always)]
            pub const fn new(epoch: Epoch, $reads: $said) -> $name {
                $name((epoch.0 as u64) << 8 | $reads.0 as u64)
            }

            /// The epoch that it is about.
            #[inline(always)]
            pub const fn epoch(self) -> Epoch {
                Epoch((self.0 >> 8) as u32)
            }

            /// What it says of that epoch.
            #[inline(always)]
            pub const fn $reads(self) -> $said {
                $said(self.0 as u8)
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
    /// `RxWords::takeover`: an epoch, and how far it is taken over.
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
    /// The sender has not switched up in this epoch.
    pub const NONE: TxPhase = TxPhase(0);
    /// The sender's bytes are on the ring: TCP ended at `up_kpos`, the ring starts at `up_start`.
    pub const UP: TxPhase = TxPhase(1);
    /// The sender is about to put a `Down` frame on TCP.
    pub const DOWNING: TxPhase = TxPhase(2);
    /// The `Down` frame, and every byte it promised, is on TCP.
    pub const DOWN: TxPhase = TxPhase(3);
    /// After a revocation, or with all bytes of the ring consumed: every byte from the revoked, or consumed, cursor
    /// on is on TCP, without a frame.
    pub const RESUMED: TxPhase = TxPhase(4);
    /// TCP did not take everything (it is shut or dead): what is not there is only on the ring.
    pub const BROKEN: TxPhase = TxPhase(5);
    /// `DOWN`, and nothing follows: TCP is shut. Everything is on the ring, too.
    pub const ENDED: TxPhase = TxPhase(6);
}

/// Flags of `RxWords::word`.
pub mod rx {
    use super::RxFlags;
    /// The receiver is not ready.
    pub const NONE: RxFlags = RxFlags(0);
    /// The receiver will look for the switch before it reads TCP.
    pub const READY: RxFlags = RxFlags(1);
    /// Please go down when convenient (a second process, an operator).
    pub const WANT_DOWN: RxFlags = RxFlags(2);
    /// The cursor is frozen at `revoked`; continue on TCP from there, without a frame.
    pub const REVOKED: RxFlags = RxFlags(4);
    /// This end has closed: nobody will read any more.
    pub const CLOSED: RxFlags = RxFlags(8);
    /// Across nodes only, and only a daemon sets it, in its mirror of the far receiver's word: the
    /// switch of this epoch stands in the far node's memory. (A switch that came too late is answered
    /// by `REVOKED`.)
    pub const ACCEPTED: RxFlags = RxFlags(16);
    /// Across nodes only: nothing of the time before this epoch's switch is unread on TCP any more, so
    /// that a `Fin` frame would not lie behind bytes which nobody may want to read.
    pub const PAST: RxFlags = RxFlags(32);
}

/// Phases of `RxWords::takeover`. The end itself stores only `DOWN`, `FIN` and `PLAIN`.
pub mod takeover {
    use super::TakeoverPhase;
    /// The direction is the end's alone.
    pub const NONE: TakeoverPhase = TakeoverPhase(0);
    /// The daemon has the sending direction: the end leaves it alone.
    pub const TAKEN: TakeoverPhase = TakeoverPhase(1);
    /// A `Down` frame with cursor `takeover_at` is put on TCP, and what follows.
    pub const DOWN: TakeoverPhase = TakeoverPhase(2);
    /// A `Fin` frame with that cursor is put on TCP.
    pub const FIN: TakeoverPhase = TakeoverPhase(3);
    /// After a revocation: the bytes from that cursor on are put on TCP, without a frame.
    pub const PLAIN: TakeoverPhase = TakeoverPhase(4);
    /// It is on TCP, at kernel position `takeover_kpos`, and the end's again.
    pub const DONE: TakeoverPhase = TakeoverPhase(5);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two parties of different builds share these words: the numbers are for ever.
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
        let t = [
            tx::NONE,
            tx::UP,
            tx::DOWNING,
            tx::DOWN,
            tx::RESUMED,
            tx::BROKEN,
            tx::ENDED,
        ];
        assert_eq!(t.map(TxPhase::raw), [0, 1, 2, 3, 4, 5, 6]);
        let r = [
            rx::NONE,
            rx::READY,
            rx::WANT_DOWN,
            rx::REVOKED,
            rx::CLOSED,
            rx::ACCEPTED,
            rx::PAST,
        ];
        assert_eq!(r.map(RxFlags::raw), [0, 1, 2, 4, 8, 16, 32]);
        let o = [
            takeover::NONE,
            takeover::TAKEN,
            takeover::DOWN,
            takeover::FIN,
            takeover::PLAIN,
            takeover::DONE,
        ];
        assert_eq!(o.map(|p| p.0), [0, 1, 2, 3, 4, 5]);
    }

    proptest! {
        /// Whatever a peer stores: a reader has the same bits, an epoch and a byte of it, and no more.
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
