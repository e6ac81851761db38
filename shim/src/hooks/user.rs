//! User and group ids and capabilities: a process that changes them leaves what it shares with its family
//! (`crate::family`).
//!
//! The C library's functions change all threads of a process, a call by number only the calling thread. Both matter
//! alike here, because all threads share what the process has of its family.

use crate::process::not_ours;
use crate::promotion::family;
use crate::sys::{env, real, thread};
use core::ffi::{c_char, c_void};
use lane::num;

/// `succeeded` says whether a result means that something has changed.
fn changed(native: impl FnOnce() -> i32, succeeded: impl FnOnce(i32) -> bool) -> i32 {
    let _inside = thread::enter();
    let ours = !env::off() && crate::preserving_errno(|| !not_ours());
    if ours {
        crate::preserving_errno(family::before_user_change);
    }
    let r = native();
    if ours && succeeded(r) {
        family::user_changed();
    }
    r
}

macro_rules! changes {
    ($($name:ident($($a:ident: $t:ty),*);)*) => {
        $(
            #[no_mangle]
            pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
                // SAFETY: see the module above (all calls in this file).
                changed(|| unsafe { real::$name($($a),*) }, |r| r == 0)
            }
        )*
    };
}

changes! {
    setuid(u: u32);
    seteuid(u: u32);
    setgid(g: u32);
    setegid(g: u32);
    setreuid(r: u32, e: u32);
    setregid(r: u32, e: u32);
    setresuid(r: u32, e: u32, s: u32);
    setresgid(r: u32, e: u32, s: u32);
    setgroups(n: usize, list: *const u32);
    initgroups(user: *const c_char, g: u32);
    capset(header: *mut c_void, data: *const c_void);
}

// The next two return the previous id whether they succeed or not; this argument only queries it.
const ASK: u32 = u32::MAX;

#[no_mangle]
pub unsafe extern "C" fn setfsuid(u: u32) -> i32 {
    // SAFETY: see above.
    changed(
        || unsafe { real::setfsuid(u) },
        |r| u != ASK && num::bits(r) != u,
    )
}

#[no_mangle]
pub unsafe extern "C" fn setfsgid(g: u32) -> i32 {
    // SAFETY: see above.
    changed(
        || unsafe { real::setfsgid(g) },
        |r| g != ASK && num::bits(r) != g,
    )
}

/// The calls by number, which change only the calling thread.
pub mod by_number {
    use super::{changed, num, real};

    /// Has a call that returns the previous id, `r`, been given another one?
    fn another(r: i32, new: usize) -> bool {
        let new = num::low32(new as u64);
        new != super::ASK && num::bits(r) != new
    }

    macro_rules! numbers {
        ($($name:ident $n:ident($($a:ident),*), $succeeded:expr;)*) => {$(
            pub unsafe extern "C" fn $name($($a: usize),*) -> i32 {
                let mut w = [$($a),*].into_iter().chain([0; 3]);
                let mut next = || w.next().unwrap_or(0);
                let (a, b, c) = (next(), next(), next());
                let succeeded: fn(i32, usize) -> bool = $succeeded;
                // SAFETY: as the caller's own call.
                let native = || unsafe { real::call(libc::$n, a, b, c, 0, 0, 0) };
                changed(native, |r| succeeded(r, a))
            }
        )*};
    }

    numbers! {
        setuid SYS_setuid(a), |r, _| r == 0;
        setgid SYS_setgid(a), |r, _| r == 0;
        setreuid SYS_setreuid(a, b), |r, _| r == 0;
        setregid SYS_setregid(a, b), |r, _| r == 0;
        setresuid SYS_setresuid(a, b, c), |r, _| r == 0;
        setresgid SYS_setresgid(a, b, c), |r, _| r == 0;
        setgroups SYS_setgroups(a, b), |r, _| r == 0;
        capset SYS_capset(a, b), |r, _| r == 0;
        setfsuid SYS_setfsuid(a), another;
        setfsgid SYS_setfsgid(a), another;
    }
}
