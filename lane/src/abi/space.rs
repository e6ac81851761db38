//! How much of a direction may be unread, and the word by which its sender asks for space.

use crate::prim::{AtomicU32, Ordering};

/// What a kernel takes for a reader: `room`, or its first window.
pub fn window(room: u32) -> u64 {
    match room {
        0 => 64 << 10,
        room => u64::from(room),
    }
}

/// Most bytes of a direction that may be unread where the application has asked for a send buffer of `sndbuf` bytes:
/// about as many as the kernel would take. The send buffer holds so much, the reader's `room`; and the kernel, which
/// looks at its buffer once a segment, takes one more than fits, of up to half a window.
pub fn unread_max(sndbuf: u32, room: u32) -> u64 {
    let window = window(room);
    u64::from(sndbuf) + window + window / 2
}

/// What a sender says about space. In memory it is `sndbuf << 1 | waits`; only this module knows that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct SpaceWord(u32);

impl SpaceWord {
    /// The sender does not wait, and its application has not asked for a size.
    pub const NONE: SpaceWord = SpaceWord(0);
    const WAITS: u32 = 1;

    /// Of a sender whose application has not asked for a size.
    #[inline(always)]
    pub const fn new(waits: bool) -> SpaceWord {
        SpaceWord(waits as u32 * Self::WAITS)
    }

    /// The word with these bits: for tests with invalid words.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> SpaceWord {
        SpaceWord(raw)
    }

    /// Does the sender wait for space?
    #[inline(always)]
    pub const fn waits(self) -> bool {
        self.0 & Self::WAITS != 0
    }

    /// Most bytes that may be unread. Unlimited unless the application has set the size of its send buffer. `room`:
    /// the reader's; asked only where it counts.
    #[inline(always)]
    pub fn unread_max(self, room: impl FnOnce() -> u32) -> u64 {
        match self.0 >> 1 {
            0 => u64::MAX,
            sndbuf => unread_max(sndbuf, room()),
        }
    }
}

/// A [`SpaceWord`] in shared memory. Where it is used, comments say what its memory orders pair with.
#[derive(Default)]
#[repr(transparent)]
pub struct SharedSpace(AtomicU32);

impl SharedSpace {
    /// Reads the word, whoever has stored it.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> SpaceWord {
        SpaceWord(self.0.load(order))
    }

    /// Stores another word.
    #[inline(always)]
    pub fn store(&self, word: SpaceWord, order: Ordering) {
        self.0.store(word.0, order);
    }

    /// From now on the sender waits. Returns the word before.
    #[inline(always)]
    pub(crate) fn wait(&self, order: Ordering) -> SpaceWord {
        SpaceWord(self.0.fetch_or(SpaceWord::WAITS, order))
    }

    /// Stores the size of the send buffer (0: not set), and keeps whether the sender waits.
    pub(crate) fn set_sndbuf(&self, bytes: u32, order: Ordering) {
        let bits = bytes.min(u32::MAX >> 1) << 1;
        let set = |w| Some(w & SpaceWord::WAITS | bits);
        let _ = self.0.fetch_update(order, Ordering::Relaxed, set);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::prim::Ordering::SeqCst;

    /// Clients of different builds share this word, so its bits must never change.
    #[test]
    fn the_bits_in_memory() {
        let w = SharedSpace::default();
        assert_eq!(w.wait(SeqCst), SpaceWord::NONE);
        assert_eq!(w.load(SeqCst), SpaceWord::new(true));
        w.set_sndbuf(5, SeqCst);
        assert_eq!(w.load(SeqCst).0, 0b1011);
        assert_eq!(w.load(SeqCst).unread_max(|| 100), 155);
        w.set_sndbuf(u32::MAX, SeqCst);
        assert_eq!(w.load(SeqCst).0, u32::MAX);
        w.store(SpaceWord::new(false), SeqCst);
        w.set_sndbuf(7, SeqCst);
        let now = w.load(SeqCst);
        assert_eq!((now.0, now.waits()), (14, false));
        assert_eq!(SpaceWord::new(true).unread_max(|| unreachable!()), u64::MAX);
    }
}
