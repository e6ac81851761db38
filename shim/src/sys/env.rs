//! The shim's configuration: three environment variables, read once when it is loaded.
//!
//! - `UNDERPASS=off`: every hook passes through. `UNDERPASS=eager`: register at once, when the
//!   connection is made, watched or used (tests, `underpass run --eager`).
//! - `UNDERPASS_DIR`: the daemon's runtime directory. Without it the system's is tried, then the user's, which is in
//!   `XDG_RUNTIME_DIR` if that names a directory.

use crate::sys;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};
use lane::os::dirs;

static MODE: AtomicU32 = AtomicU32::new(0);
const OFF: u32 = 1;
const EAGER: u32 = 2;

const LEN: usize = 100;
struct Dirs(core::cell::UnsafeCell<[[u8; LEN]; 2]>);
// SAFETY: written once in `init` (single-threaded: before main), read-only afterwards.
unsafe impl Sync for Dirs {}
static DIRS: Dirs = Dirs(core::cell::UnsafeCell::new([[0; LEN]; 2]));
static EXPLICIT: AtomicU32 = AtomicU32::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn var(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: getenv returns null or a NUL-terminated string that lives in the environment.
    unsafe {
        let p = libc::getenv(name.as_ptr());
        (!p.is_null()).then(|| CStr::from_ptr(p))
    }
}

pub fn init() {
    // A program with more rights than its caller (AT_SECURE) must ignore the caller's environment.
    // SAFETY: getauxval has no preconditions.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    MODE.store(
        match var(c"UNDERPASS").map(CStr::to_bytes) {
            _ if secure => OFF,
            Some(b"off") => OFF,
            Some(b"eager") => EAGER,
            _ => 0,
        },
        Relaxed,
    );
    let mut n = 0;
    let mut add = |parts: &[&[u8]]| {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if n < 2 && len < LEN {
            // SAFETY: see `Dirs`.
            let d = unsafe { &mut (*DIRS.0.get())[n] };
            let mut at = 0;
            for p in parts {
                d[at..at + p.len()].copy_from_slice(p);
                at += p.len();
            }
            d[at..].fill(0);
            n += 1;
        }
    };
    match var(c"UNDERPASS_DIR").filter(|d| !d.is_empty()) {
        Some(d) => {
            add(&[d.to_bytes()]);
            EXPLICIT.store(1, Relaxed);
        }
        None => {
            add(&[dirs::SYSTEM_DIR.as_bytes()]);
            let xdg = var(c"XDG_RUNTIME_DIR");
            let there = |_| xdg.is_some_and(sys::is_directory);
            // SAFETY: getuid has no preconditions.
            let uid = unsafe { libc::getuid() };
            let mut digits = [0u8; 10];
            let xdg = xdg.map(CStr::to_bytes);
            add(&dirs::user_dir(xdg, there, uid, &mut digits));
        }
    }
    COUNT.store(n, Release);
}

#[inline(always)]
pub fn off() -> bool {
    MODE.load(Relaxed) == OFF
}

/// From now on, no connection is considered.
pub fn switch_off() {
    MODE.store(OFF, Relaxed);
}

#[inline(always)]
pub fn eager() -> bool {
    MODE.load(Relaxed) == EAGER
}

/// Was the directory set in the environment? That is as trustworthy as `LD_PRELOAD` itself.
pub fn dir_is_explicit() -> bool {
    EXPLICIT.load(Relaxed) != 0
}

/// Runtime directories to try, in order.
pub fn dirs() -> impl Iterator<Item = &'static [u8]> {
    (0..COUNT.load(Acquire)).map(|i| {
        // SAFETY: see `Dirs`.
        let d = unsafe { &(*DIRS.0.get())[i] };
        &d[..d.iter().position(|b| *b == 0).unwrap_or(0)]
    })
}
