//! Processes: fork, exec, spawn.

use super::actions;
use crate::sys::{self, env, filter, real, thread};
use crate::{daemon, process};
use core::ffi::{c_char, c_void, CStr};
use lane::proto::reason::Reason;

/// Makes `native`, a call that creates a child with its own copy of the memory.
pub fn forked(native: impl FnOnce() -> i32) -> i32 {
    if env::off() {
        return native();
    }
    let _inside = thread::enter();
    crate::preserving_errno(process::before_fork);
    let r = native();
    if r == 0 {
        crate::preserving_errno(process::after_fork_child);
    } else {
        crate::preserving_errno(|| process::after_fork_parent(u32::try_from(r).ok()));
    }
    r
}

/// Ends the process; what is on rings goes to TCP before.
#[no_mangle]
pub unsafe extern "C" fn _exit(code: i32) -> i32 {
    process::exits();
    loop {
        sys::exit_group(code);
    }
}

#[no_mangle]
pub unsafe extern "C" fn _Exit(code: i32) -> i32 {
    // SAFETY: it is the same call.
    unsafe { _exit(code) }
}

/// Its handlers come later, and find their connections on TCP.
#[no_mangle]
pub unsafe extern "C" fn quick_exit(code: i32) -> i32 {
    process::exits();
    // SAFETY: see the module above. It does not return.
    unsafe { real::quick_exit(code) }
}

#[no_mangle]
pub unsafe extern "C" fn fork() -> i32 {
    // SAFETY: see the module above (all calls in this file).
    forked(|| unsafe { real::fork() })
}

#[no_mangle]
pub unsafe extern "C" fn _Fork() -> i32 {
    // SAFETY: see above.
    forked(|| unsafe { real::_Fork() })
}

#[no_mangle]
pub unsafe extern "C" fn __fork() -> i32 {
    // SAFETY: see above.
    forked(|| unsafe { real::__fork() })
}

#[no_mangle]
pub unsafe extern "C" fn forkpty(
    pty: *mut i32,
    name: *mut c_char,
    term: *const c_void,
    size: *const c_void,
) -> i32 {
    // SAFETY: see above.
    forked(|| unsafe { real::forkpty(pty, name, term, size) })
}

#[no_mangle]
pub unsafe extern "C" fn daemon(a: i32, b: i32) -> i32 {
    let _inside = thread::enter();
    crate::preserving_errno(process::before_fork);
    let parent = sys::getpid();
    // SAFETY: see above. The parent exits inside; what returns is the child, or a failure.
    let r = unsafe { real::daemon(a, b) };
    if sys::getpid() != parent {
        crate::preserving_errno(process::after_fork_child);
    } else {
        crate::preserving_errno(|| process::after_fork_parent(None));
    }
    r
}

#[no_mangle]
pub unsafe extern "C" fn unshare(flags: i32) -> i32 {
    let _inside = thread::enter();
    if flags & libc::CLONE_FILES != 0 {
        process::before_split();
    }
    if flags & libc::CLONE_NEWNS != 0 {
        before_moving();
    }
    // SAFETY: see above.
    unsafe { real::unshare(flags) }
}

/// To be called before a seccomp filter comes into force that might kill the process for a call of the shim's. If
/// lanes could not work under the filter, this process has no lanes from now on.
///
/// # Safety
/// `filter` is the application's `struct sock_fprog`.
pub unsafe fn before_filter(strict: bool, filter: *const c_void) {
    // SAFETY: by contract.
    if !env::off() && (strict || unsafe { filter::refuses(filter) }) {
        let _inside = thread::enter();
        process::step_out(Reason::Seccomp);
    }
}

#[no_mangle]
pub unsafe extern "C" fn prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32 {
    const STRICT: usize = 1;
    const FILTER: usize = 2;
    if option == libc::PR_SET_SECCOMP && matches!(a, STRICT | FILTER) {
        // SAFETY: the application's own pointer.
        unsafe { before_filter(a == STRICT, b as *const c_void) };
    }
    // SAFETY: see above; fixed arguments serve C's variadic callers on the ABIs supported here.
    unsafe { real::prctl(option, a, b, c, d) }
}

/// To be called before this process sees another file tree. It takes along a way to reach its daemon, even if it has
/// not needed the daemon so far: its listeners may have come by exec, and its children will accept connections.
pub fn before_moving() {
    if !process::not_ours() {
        crate::preserving_errno(daemon::take_along);
    }
}

#[no_mangle]
pub unsafe extern "C" fn chroot(path: *const c_char) -> i32 {
    let _inside = thread::enter();
    before_moving();
    // SAFETY: see above.
    unsafe { real::chroot(path) }
}

macro_rules! exec {
    ($($name:ident($($a:ident: $t:ty),*);)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
            let _inside = thread::enter();
            crate::preserving_errno(process::before_exec);
            // (The new program inherits the signal mask, so the mask is restored first.)
            // SAFETY: see above.
            let r = thread::outside(|| unsafe { real::$name($($a),*) });
            crate::preserving_errno(process::exec_failed);
            r
        }
    )*};
}

exec! {
    execve(p: *const c_char, a: *const *const c_char, e: *const *const c_char);
    execv(p: *const c_char, a: *const *const c_char);
    execvp(p: *const c_char, a: *const *const c_char);
    execvpe(p: *const c_char, a: *const *const c_char, e: *const *const c_char);
    execveat(d: i32, p: *const c_char, a: *const *const c_char, e: *const *const c_char, f: i32);
    fexecve(fd: i32, a: *const *const c_char, e: *const *const c_char);
}

/// Is this the helper that Java spawns programs with? It first closes every descriptor except its own pipes, then
/// executes the program. So nobody uses the sockets that it inherits (Java's sockets are not close-on-exec).
///
/// # Safety
/// `path` is null or a C string.
unsafe fn keeps_nothing(path: *const c_char) -> bool {
    // SAFETY: by contract.
    let path = (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) }.to_bytes());
    path.is_some_and(|p| p.ends_with(b"/lib/jspawnhelper"))
}

/// Makes `native`, which spawns `program`, when the connections that it gets are on TCP.
///
/// # Safety
/// `program` is null or a C string.
unsafe fn spawn(
    program: *const c_char,
    actions: *const c_void,
    native: impl FnOnce() -> i32,
) -> i32 {
    // SAFETY: by contract.
    if unsafe { keeps_nothing(program) } {
        return thread::outside(native);
    }
    process::spawning(false, || actions::before_spawn(actions), native)
}

macro_rules! spawn {
    ($($name:ident)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32 {
            let _inside = thread::enter();
            // SAFETY: see above; the application's path.
            let r = unsafe { spawn(p, fa, || real::$name(pid, p, fa, at, a, e)) };
            // SAFETY: null, or the application's variable, which the call has set if it has succeeded.
            if let Some(pid) = unsafe { pid.as_ref() }.filter(|_| r == 0) {
                crate::preserving_errno(|| process::spawned(lane::num::bits(*pid)));
            }
            r
        }
    )*};
}

spawn! { posix_spawn posix_spawnp }

#[no_mangle]
pub unsafe extern "C" fn popen(c: *const c_char, t: *const c_char) -> *mut c_void {
    let _inside = thread::enter();
    // SAFETY: see above.
    process::spawning(false, || (), || unsafe { real::popen(c, t) })
}

/// (In glibc since 2.39.) They return a number of an error. Where the C library lacks them it is ENOSYS, which callers
/// know from kernels that cannot do it.
macro_rules! pidfd_spawn {
    ($($name:ident)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name(pidfd: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32 {
            let _inside = thread::enter();
            // SAFETY: see above; the application's path.
            match unsafe { spawn(p, fa, || real::$name(pidfd, p, fa, at, a, e)) } {
                -1 => libc::ENOSYS,
                0 => {
                    // SAFETY: null (the caller does not want it), or set by the call.
                    if let Some(pidfd) = unsafe { pidfd.as_ref() } {
                        crate::preserving_errno(|| spawned_as(*pidfd));
                    }
                    0
                }
                error => error,
            }
        }
    )*};
}

pidfd_spawn! { pidfd_spawn pidfd_spawnp }

/// A program was spawned, and its pidfd is a new descriptor of this process.
fn spawned_as(pidfd: i32) {
    process::replaced(pidfd);
    // SAFETY: see above. (The library has it if it has those above.)
    let pid = thread::outside(|| unsafe { real::pidfd_getpid(pidfd) });
    if pid > 0 {
        process::spawned(lane::num::bits(pid));
    }
}

/// The command has ended when it returns, and its descriptors with it.
#[no_mangle]
pub unsafe extern "C" fn system(c: *const c_char) -> i32 {
    let _inside = thread::enter();
    // SAFETY: see above.
    let native = || unsafe { real::system(c) };
    if c.is_null() {
        return thread::outside(native); // is there a shell?
    }
    let r = process::spawning(true, || (), native);
    crate::preserving_errno(process::spawned_ended);
    r
}

/// As above.
#[no_mangle]
pub unsafe extern "C" fn pclose(f: *mut c_void) -> i32 {
    // SAFETY: see above.
    let r = unsafe { real::pclose(f) };
    let _inside = thread::enter();
    crate::preserving_errno(process::spawned_ended);
    r
}
