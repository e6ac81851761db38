//! The word that a receiver says about an epoch, as in `lane::abi`, with epochs as small as a model needs.

use lane::abi::rx::{self, Flag};
use lane::abi::RxFlags;

/// `RxWords::word`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Word {
    pub epoch: u8,
    pub flags: RxFlags,
}

impl Word {
    pub fn new(epoch: u8, flags: RxFlags) -> Word {
        Word { epoch, flags }
    }

    /// That of a receiver that is ready and asks for nothing.
    pub fn ready(epoch: u8) -> Word {
        Word::new(epoch, rx::READY)
    }

    pub fn has(self, any: RxFlags) -> bool {
        self.flags.has(any)
    }

    /// Does it ask the sender for something?
    pub fn asks(self) -> bool {
        Flag::ALL.iter().any(|&flag| match flag {
            Flag::Revoked | Flag::WantDown => self.has(flag.value()),
            Flag::Ready => false,
            // (The readers of the models die, or read to the end.)
            Flag::Closed => false,
            // What a daemon and a reader across nodes add says how far they are.
            Flag::Accepted | Flag::Past => false,
        })
    }

    pub fn with(self, flags: RxFlags) -> Word {
        Word::new(self.epoch, self.flags | flags)
    }
}
