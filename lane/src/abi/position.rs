//! Positions in the streams of one direction: on its rings, and on TCP. The two count from different origins, so
//! they are types of their own: one is never compared with, or stored in the place of, the other.

use super::words::{Shared, Word};
use crate::prim::Ordering;

/// A number of bytes from the beginning of a stream. Differences are plain numbers of bytes.
macro_rules! position {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The position after this many bytes.
            #[inline(always)]
            pub const fn new(bytes: u64) -> $name {
                $name(bytes)
            }

            /// The number of bytes, for messages, frames and output.
            #[inline(always)]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// Number of bytes from `other` up to here, wrapping: a huge number if `other` is further.
            #[inline(always)]
            pub const fn since(self, other: $name) -> u64 {
                self.0.wrapping_sub(other.0)
            }

            /// Number of bytes from `other` up to here; `None` if `other` is further.
            #[inline(always)]
            pub const fn checked_since(self, other: $name) -> Option<u64> {
                self.0.checked_sub(other.0)
            }

            /// Number of bytes from `other` up to here; 0 if `other` is further.
            #[inline(always)]
            pub const fn saturating_since(self, other: $name) -> u64 {
                self.0.saturating_sub(other.0)
            }

            /// The position `bytes` before this one, but not before the beginning.
            #[inline(always)]
            pub const fn back(self, bytes: u64) -> $name {
                $name(self.0.saturating_sub(bytes))
            }
        }

        impl core::ops::Add<u64> for $name {
            type Output = $name;
            #[inline(always)]
            fn add(self, bytes: u64) -> $name {
                $name(self.0 + bytes)
            }
        }

        impl core::ops::AddAssign<u64> for $name {
            #[inline(always)]
            fn add_assign(&mut self, bytes: u64) {
                self.0 += bytes;
            }
        }

        /// The number of bytes between two positions whose order is known.
        impl core::ops::Sub for $name {
            type Output = u64;
            #[inline(always)]
            fn sub(self, other: $name) -> u64 {
                self.0 - other.0
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

position! {
    /// Bytes ever put into, or taken from, the rings of one direction of a lane slot. It goes on from one use of the
    /// slot to the next, and from one ring to the next. Where it is called a head, the sender has published so many
    /// bytes.
    Cursor
}
position! {
    /// Bytes of one direction that TCP has carried since the connection was made: the application's, frames, and ring
    /// bytes that are repeated. Without the SYN and the FIN that the kernel counts.
    TcpPos
}

impl Cursor {
    /// No cursor. In `RxWords::revoked`: the receiver had not yet seen the switch.
    pub const UNSEEN: Cursor = Cursor(u64::MAX);
    /// Daemons accept no switch that begins beyond this cursor.
    pub const START_MAX: Cursor = Cursor(u64::MAX / 2);

    /// Is this cursor older than `other`? With wrapping: it is if it is less than half of all numbers behind.
    #[inline(always)]
    pub const fn is_before(self, other: Cursor) -> bool {
        self.since(other) > u64::MAX / 2
    }
}

impl TcpPos {
    /// No position that a stream reaches: it is not known yet.
    pub const UNKNOWN: TcpPos = TcpPos(u64::MAX);
}

impl Shared<TcpPos> {
    /// Counts `bytes` more. Several threads may count at the same time.
    #[inline(always)]
    pub fn add(&self, bytes: u64, order: Ordering) {
        self.0.fetch_add(bytes, order);
    }
}

/// `RxWords::landed`: across nodes a cursor, on one node a position on TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Landed(u64);

impl Landed {
    /// Across nodes: bytes of the ring that the remote end can see.
    #[inline(always)]
    pub const fn at_cursor(head: Cursor) -> Landed {
        Landed(head.0)
    }

    /// On one node: all that the end has put on TCP.
    #[inline(always)]
    pub const fn at_tcp_pos(sent: TcpPos) -> Landed {
        Landed(sent.0)
    }

    /// What a daemon has stored.
    #[inline(always)]
    pub const fn cursor(self) -> Cursor {
        Cursor(self.0)
    }

    /// What an end on the same node has stored.
    #[inline(always)]
    pub const fn tcp_pos(self) -> TcpPos {
        TcpPos(self.0)
    }
}

impl Word for Landed {
    #[inline(always)]
    fn from_raw(raw: u64) -> Landed {
        Landed(raw)
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
    fn differences() {
        let (a, b) = (Cursor::new(3), Cursor::new(10));
        assert_eq!((b - a, b.since(a), b.saturating_since(a)), (7, 7, 7));
        assert_eq!(a.since(b), 7u64.wrapping_neg());
        assert_eq!((a.checked_since(b), b.checked_since(a)), (None, Some(7)));
        assert_eq!((a.saturating_since(b), a.back(5)), (0, Cursor::default()));
        assert_eq!((a + 7, b.back(7)), (b, a));
    }

    #[test]
    fn order_of_cursors_wraps() {
        let (old, new) = (Cursor::new(u64::MAX - 1), Cursor::new(1));
        assert!(old.is_before(new) && !new.is_before(old));
        assert!(!new.is_before(new));
        assert!(!Cursor::new(0).is_before(Cursor::new(1 << 63 | 1)));
    }

    #[test]
    fn as_large_as_their_numbers() {
        assert_eq!(core::mem::size_of::<Shared<Cursor>>(), 8);
        assert_eq!(core::mem::size_of::<Shared<TcpPos>>(), 8);
        assert_eq!(core::mem::size_of::<Shared<Landed>>(), 8);
    }
}
