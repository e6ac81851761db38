//! A peek at TCP into the application's buffers, for [`lane::half::Port`]. All bytes are peeked in one call,
//! because the kernel peeks only from the first unread byte on.

use crate::sys;
use lane::half::Iov;
use libc::iovec;

/// Entries on the stack, for which no memory is mapped.
const VECS: usize = 16;

const NONE: iovec = iovec {
    iov_base: core::ptr::null_mut(),
    iov_len: 0,
};

/// Most entries that the kernel takes in one call.
const MOST: usize = 1024;

/// See [`lane::half::Port::tcp_peek`].
pub fn peek(fd: i32, iov: Iov<'_>, what: (usize, &mut [u8], usize)) -> Result<usize, i32> {
    let mut few = [NONE; VECS];
    // One entry for the gap, and one for a buffer that the gap splits.
    let most = (iov.runs() + 2).min(MOST);
    let bytes = most * size_of::<iovec>();
    let mapped = match most > VECS {
        true => sys::map_private(bytes).ok(), // without memory, peek only as far as these reach
        false => None,
    };
    let vecs: &mut [iovec] = match mapped {
        // SAFETY: fresh zeroed memory for that many entries, page aligned, unmapped below; zeroes are valid ones.
        Some(p) => unsafe { core::slice::from_raw_parts_mut(p.cast(), most) },
        None => &mut few,
    };
    let n = fill(vecs, iov, what);
    let r = match vecs {
        // (A peek at one byte, as most are.)
        [v, ..] if n == 1 => sys::recv(fd, v.iov_base.cast(), v.iov_len, libc::MSG_PEEK),
        vecs => {
            // SAFETY: all-zero is a valid msghdr.
            let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
            h.msg_iov = vecs.as_mut_ptr();
            h.msg_iovlen = n;
            sys::recvmsg(fd, &mut h, libc::MSG_PEEK | libc::MSG_DONTWAIT)
        }
    };
    if let Some(p) = mapped {
        sys::unmap(p, bytes);
    }
    r
}

/// Fills in the buffers for the first bytes, the gap, and the buffers for the rest; returns the number of entries.
fn fill(
    vecs: &mut [iovec],
    mut iov: Iov<'_>,
    (first, gap, rest): (usize, &mut [u8], usize),
) -> usize {
    let mut n = 0;
    let mut put = |p: *mut u8, len: usize| {
        if let Some(v) = vecs.get_mut(n) {
            v.iov_base = p.cast();
            v.iov_len = len;
            n += 1;
        }
    };
    let mut into_buffers = |mut left: usize, put: &mut dyn FnMut(*mut u8, usize)| {
        while left > 0 {
            let Some((p, len)) = iov.take(left) else {
                break;
            };
            left -= len;
            put(p, len);
        }
    };
    into_buffers(first, &mut put);
    if !gap.is_empty() {
        put(gap.as_mut_ptr(), gap.len());
    }
    into_buffers(rest, &mut put);
    n
}
