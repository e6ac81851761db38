//! `sendfile` onto a lane: read in pieces, and sent like any other bytes.

use super::*;

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
    native: impl Fn(usize) -> isize,
) -> isize {
    let c = table::conn(i);
    if control::pending() {
        control::pump();
    }
    let l = table::local(i);
    let mut cut = Cut::default();
    let mut total = 0usize;
    while !promote::engaged_tx(c) {
        promote::evidence(i, fd, c);
        if promote::try_up(i, c, l, fd) {
            break;
        }
        let large = cut.begun() || count > PART;
        let want = match large && cut.begin(i, fd, 0, libc::SO_SNDTIMEO) {
            true => PART.min(count - total),
            false => count,
        };
        if total > 0 && (c.rx.has_error() || !cut.may_send(fd, c)) {
            return total as isize;
        }
        if !c.tx.enter_native() {
            break;
        }
        let r = told_or(c, || native(want));
        c.tx.leave_native(r.max(0) as u64);
        total += r.max(0) as usize;
        if r < want as isize {
            l.starved.store(1, Relaxed);
            return if total > 0 { total as isize } else { r };
        }
        if total == count {
            return r.max(total as isize);
        }
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
    let mut buf = core::mem::MaybeUninit::<[u8; 32 << 10]>::uninit();
    let buf: *mut u8 = buf.as_mut_ptr().cast();
    while total < count {
        let want = (32 << 10).min(count - total);
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
        let r = unsafe { send(fd, i, &v, 0, || real::send(fd, v[0].iov_base, n, 0)) };
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
