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
    native: impl Fn(i32, i32, usize) -> isize,
) -> isize {
    let (c, l) = (table::conn(i), table::local(i));
    if c.tx.on_lane() && !still(fd, i, c, l) {
        return native(fd, input, count);
    }
    let Some(mut call) = Call::begin(fd, i) else {
        return fail(libc::EBADF);
    };
    if control::pending() {
        control::pump();
    }
    let (mut out, mut input) = (fd, input);
    let mut cut = Cut::default();
    let mut total = 0usize;
    while !promote::engaged_tx(c) {
        if total > 0 {
            let Some(copy) = call.native(c, l) else {
                return total as isize;
            };
            (out, input) = (copy, call.file(input));
        }
        promote::evidence(i, out, c);
        if promote::try_up(i, c, l, out) {
            break;
        }
        let large = cut.begun() || count > PART;
        let want = match large && cut.begin(i, out, 0, libc::SO_SNDTIMEO) {
            true => PART.min(count - total),
            false => count - total,
        };
        if total > 0 && (c.rx.has_error() || !cut.may_send(out)) {
            return total as isize;
        }
        if !c.tx.enter_native() {
            break;
        }
        if !call.current(c, l) {
            c.tx.leave_native(0);
            return closed(total);
        }
        let r = told_or(c, || native(out, input, want));
        let ours = call.counts(c);
        c.tx.leave_native(if ours { r.max(0) as u64 } else { 0 });
        total += r.max(0) as usize;
        if ours && r < want as isize {
            l.starved.store(1, Relaxed);
        }
        if r < want as isize || total == count {
            return if total > 0 { total as isize } else { r };
        }
    }
    // More than one piece: neither socket nor file may become another's in between.
    if count > PIECE {
        if !call.hold(c, l) {
            return closed(total);
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
