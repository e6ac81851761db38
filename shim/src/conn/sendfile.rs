//! `sendfile` onto a lane: the file is read in pieces, which are sent like any other bytes.

use super::parts::{Cut, PART};
use super::send::run;
use super::*;
use crate::promotion;
use crate::state::{attached, table};
use crate::sys::{self, thread};
use crate::tcp::native::{native, Native, Way};
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use lane::half::CALL_MAX;
use lane::num;

/// Bytes read and sent at a time.
const PIECE: usize = 32 << 10;

/// `sendfile` onto a lane: reads and sends in pieces, and advances the file's position by what was sent.
///
/// # Safety
/// `off` is null or the application's valid pointer.
pub unsafe fn sendfile(
    fd: i32,
    i: u32,
    input: i32,
    off: *mut i64,
    count: usize,
    own: impl Fn(i32, i32, usize) -> isize,
) -> isize {
    let (c, l) = (table::conn(i), table::local(i));
    if c.tx.on_lane() {
        real::test_cancel();
    }
    let _inside = thread::enter();
    if c.tx.on_lane() && !still(fd, i, c, l, Way::Send) {
        return thread::outside(|| own(fd, input, count));
    }
    let Some((mut call, i)) = Call::of(fd, i) else {
        return thread::outside(|| own(fd, input, count));
    };
    let (c, l) = (table::conn(i), table::local(i));
    if daemon::pending() {
        daemon::pump();
    }
    let count = count.min(CALL_MAX);
    let mut input = input;
    let total = match natively(&mut call, (fd, i), &mut input, count, &own) {
        Continue(total) => total,
        Break(r) => return r,
    };
    // Hold before taking the buffer: clean-up handlers run in reverse order.
    if !call.hold(c, l) {
        return closed(total);
    }
    // With several pieces, the file's number could stand for another file in between: use a copy.
    if count > PIECE {
        input = call.file(input);
    }
    // SAFETY: passed on.
    let mut pos = match unsafe { position(input, off, total) } {
        Ok(pos) => pos,
        Err(r) => return r,
    };
    let Some(buf) = Buffer::take() else {
        return fail_or(total, libc::ENOMEM);
    };
    let give = || buf.give();
    let r = thread::or_undo(&give, || {
        // SAFETY: passed on.
        unsafe { pieces(&mut call, (fd, i), input, &mut pos, count - total, buf.p) }
    });
    crate::preserving_errno(give);
    if r < 0 {
        return match total {
            0 => r,
            n => num::ssize(n),
        };
    }
    if off.is_null() {
        let _ = sys::lseek(input, pos, libc::SEEK_SET);
    } else if !pages::writable(off, 8) {
        return fail(libc::EFAULT); // after the bytes were sent, as in the kernel
    } else {
        // SAFETY: not null, hence the application's valid pointer.
        unsafe { *off = pos };
    }
    num::ssize(total) + r
}

/// Makes the application's own calls while the direction is on TCP. Returns how many bytes they have sent, or, as
/// [`Break`], what the whole call returns. From the second on they use copies of the descriptors, `input` too: the numbers
/// may get another meaning in between.
fn natively(
    call: &mut Call,
    (fd, i): (i32, u32),
    input: &mut i32,
    count: usize,
    own: &impl Fn(i32, i32, usize) -> isize,
) -> ControlFlow<isize, usize> {
    let (c, l) = (table::conn(i), table::local(i));
    let mut out = fd;
    let mut cut = Cut::default();
    let mut total = 0usize;
    while !attached::engaged_tx(c) {
        if total > 0 {
            let Some(copy) = call.native(c, l) else {
                return Break(num::ssize(total));
            };
            (out, *input) = (copy, call.file(*input));
        }
        promotion::evidence(i, out, c);
        if promotion::try_up(i, c, l, out) {
            break;
        }
        let large = cut.begun() || count > PART;
        let want = match large && cut.begin((i, out), 0, libc::SO_SNDTIMEO, &mut None) {
            true => PART.min(count - total),
            false => count - total,
        };
        if total > 0 && (c.has_error() || !cut.may_send(out)) {
            return Break(num::ssize(total));
        }
        let made = native(call, (c, l), Way::Send, true, || {
            send_or_told(c, || own(out, *input, want))
        });
        let (r, ours) = match made {
            Native::Made { says, ours } => (says, ours),
            Native::Lane => break,
            Native::Closed => return Break(closed(total)),
        };
        total += num::count(r);
        if ours && r < num::ssize(want) {
            l.starved.store(1, Relaxed);
        }
        if r < num::ssize(want) || total == count {
            return Break(if total > 0 { num::ssize(total) } else { r });
        }
    }
    Continue(total)
}

/// Where the call reads. `Err`: what it returns instead, after `total` bytes.
///
/// # Safety
/// As [`sendfile()`].
unsafe fn position(input: i32, off: *const i64, total: usize) -> Result<i64, isize> {
    let pos = match off.is_null() {
        true => match sys::lseek(input, 0, libc::SEEK_CUR) {
            Ok(p) => p,
            Err(libc::ESPIPE) => return Err(fail_or(total, libc::EINVAL)), // a pipe, a socket
            Err(e) => return Err(fail_or(total, e)),
        },
        false if !pages::readable(off, 8) => return Err(fail(libc::EFAULT)),
        // SAFETY: not null, hence the application's valid pointer.
        false => unsafe { *off },
    };
    match pos < 0 {
        true => Err(fail_or(total, libc::EINVAL)),
        false => Ok(pos),
    }
}

/// Reads and sends up to `count` bytes, and advances `pos` past them.
///
/// # Safety
/// `buf` has room for a piece.
unsafe fn pieces(
    call: &mut Call,
    (fd, i): (i32, u32),
    input: i32,
    pos: &mut i64,
    count: usize,
    buf: *mut u8,
) -> isize {
    let mut total = 0usize;
    let mut over = false;
    while total < count {
        let want = PIECE.min(count - total);
        let n = match sys::pread(input, buf, want, *pos) {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) if total > 0 => break,
            Err(e) => return fail(e),
        };
        let v = [iovec {
            iov_base: buf.cast(),
            iov_len: n,
        }];
        let mut r = match over {
            true => num::ssize(n),
            // SAFETY: our own buffer, of which the kernel has written `n` bytes.
            false => unsafe { run(call, i, &v, 0, &|| real::send(fd, v[0].iov_base, n, 0)) },
        };
        if r < 0 {
            if total == 0 {
                return r;
            }
            Way::Send.put_error(table::conn(i), fd, crate::errno()); // the next call reports it
            over = super::short::was_taken((table::conn(i), table::local(i)), fd, total, count);
            if !over {
                break;
            }
            r = num::ssize(n);
        }
        total += num::count(r);
        *pos += r as i64;
        if num::count(r) < n {
            break;
        }
    }
    num::ssize(total)
}

/// Memory for a piece, because the stack may have no room for it. A few buffers are kept for reuse.
struct Buffer {
    p: *mut u8,
    kept: Option<u32>,
}

const KEPT: usize = 8;
static KEEP: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
static TAKEN: AtomicU32 = AtomicU32::new(0);

impl Buffer {
    fn take() -> Option<Self> {
        let mut p = KEEP.load(Acquire);
        if p.is_null() {
            let new = sys::map_private(KEPT * PIECE).ok()?;
            match KEEP.compare_exchange(core::ptr::null_mut(), new, AcqRel, Acquire) {
                Ok(_) => p = new,
                Err(other) => {
                    sys::unmap(new, KEPT * PIECE);
                    p = other;
                }
            }
        }
        for k in 0..num::small(KEPT) {
            // Acquire: the thread that gave the buffer back has finished with it.
            if TAKEN.fetch_or(1 << k, Acquire) & 1 << k == 0 {
                return Some(Buffer {
                    p: p.wrapping_add(k as usize * PIECE),
                    kept: Some(k),
                });
            }
        }
        let p = sys::map_private(PIECE).ok()?;
        Some(Buffer { p, kept: None })
    }

    fn give(&self) {
        match self.kept {
            Some(k) => {
                TAKEN.fetch_and(!(1 << k), Release);
            }
            None => sys::unmap(self.p, PIECE),
        }
    }
}
