//! Looks up functions of the C library, also in images that have only a part of it.
//!
//! Up to glibc 2.33 `dlsym` and a part of the pthread functions lie in libdl.so.2 and libpthread.so.0. An image may
//! lack both: its program does not need them. A shim that needs them would keep such programs from starting, so ours
//! needs libc.so.6 alone, and asks at run time what there is.

use core::arch::global_asm;
use core::ffi::{c_char, c_int, c_uint, c_void, CStr};
use core::sync::atomic::{AtomicPtr, Ordering::*};

// The weak references: zero where nothing loaded has the name. (In Rust, weak linkage is not stable.) std refers to
// `dlsym` too, and not weakly: `make build` makes that one weak in the finished file.
#[cfg(target_arch = "x86_64")]
macro_rules! weak {
    ($($get:literal = $name:literal),*) => { $(global_asm!(
        concat!(".weak ", $name),
        concat!(".hidden ", $get),
        concat!(".globl ", $get),
        concat!(".type ", $get, ",@function"),
        concat!($get, ":"),
        concat!("mov rax, qword ptr [rip + ", $name, "@GOTPCREL]"),
        "ret",
    );)* };
}
#[cfg(target_arch = "aarch64")]
macro_rules! weak {
    ($($get:literal = $name:literal),*) => { $(global_asm!(
        concat!(".weak ", $name),
        concat!(".hidden ", $get),
        concat!(".globl ", $get),
        concat!(".type ", $get, ",@function"),
        concat!($get, ":"),
        concat!("adrp x0, :got:", $name),
        concat!("ldr x0, [x0, :got_lo12:", $name, "]"),
        "ret",
    );)* };
}
weak!(
    "find_dlsym" = "dlsym",
    "find_libc_dlsym" = "__libc_dlsym",
    "find_libc_dlopen" = "__libc_dlopen_mode"
);

extern "C" {
    fn find_dlsym() -> Option<Dlsym>;
    fn find_libc_dlsym() -> Option<Dlsym>;
    fn find_libc_dlopen() -> Option<Dlopen>;
}

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// glibc's flag that the call is a `dlopen` (`__RTLD_DLOPEN` in its include/dlfcn.h), which `__libc_dlopen_mode` wants.
const RTLD_DLOPEN: c_int = i32::MIN;

/// The C library's handle, for a process without `dlsym`.
static LIBC: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Address of the next definition of `name` after the shim's, or null. Takes a kilobyte of stack.
///
/// Without libdl.so.2 it is the C library's: another library that stands between would need `dlsym` as we do.
pub fn definition(name: &CStr) -> *mut c_void {
    // SAFETY: the function above reads one word of the global offset table, which the dynamic linker has filled.
    if let Some(dlsym) = unsafe { find_dlsym() } {
        // SAFETY: a NUL-terminated name; RTLD_NEXT searches the objects after this one.
        return unsafe { dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    }
    // SAFETY: as above.
    let (Some(open), Some(dlsym)) = (unsafe { find_libc_dlopen() }, unsafe { find_libc_dlsym() })
    else {
        return core::ptr::null_mut();
    };
    // Relaxed: the handle is the same for everybody who finds none here.
    let mut libc = LIBC.load(Relaxed);
    if libc.is_null() {
        // SAFETY: the C library is loaded, and is only counted once more.
        libc = unsafe { open(c"libc.so.6".as_ptr(), libc::RTLD_NOW | RTLD_DLOPEN) };
        LIBC.store(libc, Relaxed);
    }
    if libc.is_null() {
        return libc;
    }
    // SAFETY: a handle of `__libc_dlopen_mode`'s, and a NUL-terminated name.
    unsafe { dlsym(libc, name.as_ptr()) }
}

/// What std and its unwinder would call, and never do in the shim: a destructor of thread-local storage (the shim has
/// none) where the C library has no `__cxa_thread_atexit_impl`; the lock of the unwinder's cache and the names of
/// functions (a panic aborts). Defined here, hidden, they are not looked for in libpthread.so.0 and libdl.so.2.
extern "C" fn nothing() -> c_int {
    0
}

/// (std takes a key of 0 for none.)
extern "C" fn a_key(key: *mut c_uint, _: *const c_void) -> c_int {
    // SAFETY: std gives it room for a key.
    unsafe { key.write(1) };
    0
}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {f}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {f}"
    };
}
macro_rules! instead {
    ($f:ident: $($name:literal),*) => { $(global_asm!(
        concat!(".hidden ", $name),
        concat!(".globl ", $name),
        concat!(".type ", $name, ",@function"),
        concat!($name, ":"),
        jump!(),
        f = sym $f,
    );)* };
}
instead!(a_key: "pthread_key_create");
instead!(
    nothing: "dladdr",
    "pthread_key_delete",
    "pthread_setspecific",
    "pthread_rwlock_rdlock",
    "pthread_rwlock_wrlock",
    "pthread_rwlock_unlock"
);
