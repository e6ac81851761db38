//! Conversions of whole numbers that `From` has not: for each it is said here what becomes of a number that does not
//! fit. Everything else converts with `From` and `TryFrom`.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "each function says, and its callers mean, what becomes of numbers that do not fit"
)]

// What is shared is described in 64 bits, and mapped by processes that have them.
const _: () = assert!(usize::BITS == 64);

/// A number of bytes, or a place, in the memory of this process. All numbers fit.
#[inline(always)]
pub const fn size(n: u64) -> usize {
    n as usize
}

/// The low half of the bits.
#[inline(always)]
pub const fn low32(n: u64) -> u32 {
    n as u32
}

/// The low quarter of the bits.
#[inline(always)]
pub const fn low16(n: u64) -> u16 {
    n as u16
}

/// The lowest byte.
#[inline(always)]
pub const fn low8(n: u64) -> u8 {
    n as u8
}

/// The place or length `n`; one that does not fit becomes the largest number, which no table and no field has.
#[inline(always)]
pub const fn small(n: usize) -> u32 {
    if n > u32::MAX as usize {
        u32::MAX
    } else {
        n as u32
    }
}

/// The same in a byte.
#[inline(always)]
pub const fn tiny(n: usize) -> u8 {
    if n > u8::MAX as usize {
        u8::MAX
    } else {
        n as u8
    }
}

/// A number of bytes or descriptors for a C function; more than fit are the largest number.
#[inline(always)]
pub const fn int(n: u64) -> i32 {
    if n > i32::MAX as u64 {
        i32::MAX
    } else {
        n as i32
    }
}

/// A time-out in milliseconds for a C function; a negative one is none. What is longer than fits becomes the longest.
#[inline(always)]
pub const fn millis(n: i64) -> i32 {
    if n < 0 {
        -1
    } else {
        int(n as u64)
    }
}

/// As [`int`], in 64 bits.
#[inline(always)]
pub const fn long(n: u64) -> i64 {
    if n > i64::MAX as u64 {
        i64::MAX
    } else {
        n as i64
    }
}

/// What C says with a signed number that is never negative; a negative one becomes 0.
#[inline(always)]
pub const fn natural(n: i64) -> u64 {
    if n < 0 {
        0
    } else {
        n as u64
    }
}

/// Bytes that a call returned; an error becomes 0.
#[inline(always)]
pub const fn count(n: isize) -> usize {
    natural(n as i64) as usize
}

/// The same bits without a sign: for words of memory that hold a C `int`.
#[inline(always)]
pub const fn bits(n: i32) -> u32 {
    n as u32
}

/// The C `int` with these bits.
#[inline(always)]
pub const fn signed(n: u32) -> i32 {
    n as i32
}

/// A number of bytes as C functions return it. The bytes lie in memory, so the number fits: no object is larger.
#[inline(always)]
pub const fn ssize(n: usize) -> isize {
    n as isize
}

/// A C `int` in a register, or as a place: the sign goes on, so that a negative number is larger than any place.
#[inline(always)]
pub const fn word(n: i32) -> usize {
    n as usize
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit() {
        assert_eq!(size(u64::MAX), usize::MAX);
        assert_eq!(low32(0x1_2345_6789), 0x2345_6789);
        assert_eq!((low16(0x1_2345), low8(0x123)), (0x2345, 0x23));
        assert_eq!((small(7), small(1 << 32)), (7, u32::MAX));
        assert_eq!((tiny(255), tiny(256)), (255, 255));
        assert_eq!((int(7), int(1 << 31)), (7, i32::MAX));
        assert_eq!((long(7), long(1 << 63)), (7, i64::MAX));
        assert_eq!((natural(7), natural(-1)), (7, 0));
        assert_eq!((count(7), count(-1)), (7, 0));
        assert_eq!((bits(-1), signed(u32::MAX)), (u32::MAX, -1));
        assert_eq!((ssize(7), word(7), word(-1)), (7, 7, usize::MAX));
        assert_eq!((millis(7), millis(-1)), (7, -1));
        assert_eq!((millis(1 << 32), millis(i64::MIN)), (i32::MAX, -1));
    }
}
