//! `sendfile` onto a lane: read in pieces, and sent like any other bytes.

use super::*;

/// Bytes read and sent at a time.
const PIECE: usize = 32 << 10;

/// `sendfile` onto a lane: read and send in pieces, moving the file's position by what was sent.
///
/// # Safety
/// `off` is null or the application's valid pointer.
pub unsafe fn sendfile(
    fd: i32,
    i: u32,
    input: i32,
    off: *mut i64,
    count: usize,
    native: impl Fn() -> isize,
) -> isize {
    let Some(mut call) = Call::begin(fd, i) else {
        return fail(libc::EBADF);
    };
    let (c, l) = (table::conn(i), table::local(i));
    if control::pending() {
        control::pump();
    }
    if !promote::engaged_tx(c) {
        promote::evidence(i, fd, c);
        if !promote::try_up(i, c, l, fd) && c.tx.enter_native() {
            if !call.current(c, l) {
                c.tx.leave_native(0);
                return fail(libc::EBADF);
            }
            let r = told_or(c, &native);
            let ours = call.counts(c);
            c.tx.leave_native(if ours { r.max(0) as u64 } else { 0 });
            if ours && r < count as isize {
                l.starved.store(1, Relaxed);
            }
            return r;
        }
    }
    // More than one piece: neither socket nor file may become another's in between.
    let mut input = input;
    if count > PIECE {
        if !call.hold(c, l) {
            return fail(libc::EBADF);
        }
        input = call.file(input);
    }
    let mut pos = match off.is_null() {
        true => match sys::lseek(input, 0, libc::SEEK_CUR) {
            Ok(p) => p,
            Err(e) => return fail(e),
        },
        // SAFETY: not null, hence the application's valid pointer.
        false => unsafe { *off },
    };
    // Not cleared: that would cost more than the copy of a small file.
    let mut buf = core::mem::MaybeUninit::<[u8; PIECE]>::uninit();
    let buf: *mut u8 = buf.as_mut_ptr().cast();
    let mut total = 0usize;
    while total < count {
        let want = PIECE.min(count - total);
        let n = match sys::pread(input, buf, want, pos) {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) if total > 0 => break,
            Err(e) => return fail(e),
        };
        let v = [iovec {
            iov_base: buf.cast(),
            iov_len: n,
        }];
        // SAFETY: our own buffer, of which the kernel has written `n` bytes.
        let r = unsafe { send_on(&mut call, i, &v, 0, || real::send(fd, v[0].iov_base, n, 0)) };
        if r < 0 {
            if total > 0 {
                break;
            }
            return r;
        }
        total += r as usize;
        pos += r as i64;
        if (r as usize) < n {
            break;
        }
    }
    if off.is_null() {
        let _ = sys::lseek(input, pos, libc::SEEK_SET);
    } else {
        // SAFETY: as above.
        unsafe { *off = pos };
    }
    total as isize
}
