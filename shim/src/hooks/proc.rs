//! Processes: fork, exec, spawn, and raw system calls.

use crate::{fdops, io, real, sys};
use core::ffi::{c_char, c_void};
use link::reason::Reason;

fn forked(native: impl Fn() -> i32) -> i32 {
    io::quietly(fdops::before_fork);
    let r = native();
    if r == 0 {
        io::quietly(fdops::after_fork_child);
    } else {
        io::quietly(|| fdops::after_fork_parent(r < 0));
    }
    r
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
pub unsafe extern "C" fn daemon(a: i32, b: i32) -> i32 {
    io::quietly(fdops::before_fork);
    let parent = sys::getpid();
    // SAFETY: see above. The parent exits inside; what returns is the child, or a failure.
    let r = unsafe { real::daemon(a, b) };
    if sys::getpid() != parent {
        io::quietly(fdops::after_fork_child);
    } else {
        io::quietly(|| fdops::after_fork_parent(true));
    }
    r
}

macro_rules! exec {
    ($($name:ident($($a:ident: $t:ty),*);)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
            io::quietly(fdops::before_exec);
            // SAFETY: see above.
            let r = unsafe { real::$name($($a),*) };
            io::quietly(fdops::exec_failed);
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

macro_rules! spawn {
    ($($name:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> $r {
            io::quietly(fdops::before_spawn);
            // SAFETY: see above.
            unsafe { real::$name($($a),*) }
        }
    )*};
}

spawn! {
    posix_spawn(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    posix_spawnp(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    system(c: *const c_char) -> i32;
    popen(c: *const c_char, t: *const c_char) -> *mut c_void;
}

/// What a spawned program will get as one of its descriptors leaves its lane now: the copy itself
/// is made inside libc, unseen.
#[no_mangle]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    fa: *mut c_void,
    fd: i32,
    to: i32,
) -> i32 {
    fdops::give_up(fd, Reason::Left);
    // SAFETY: see above.
    unsafe { real::posix_spawn_file_actions_adddup2(fa, fd, to) }
}

/// `syscall(2)`: calls that have a hook go through it, with the same result convention.
#[no_mangle]
pub unsafe extern "C" fn syscall(
    n: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> i64 {
    use super::{fd, msg, ready, rw, sock};
    let (fd0, len) = (a as i32, c);
    // SAFETY: see above; each hook has the contract of the raw call of the same name.
    unsafe {
        match n {
            libc::SYS_read => rw::read(fd0, b as _, len) as i64,
            libc::SYS_write => rw::write(fd0, b as _, len) as i64,
            libc::SYS_readv => rw::readv(fd0, b as _, len as i32) as i64,
            libc::SYS_writev => rw::writev(fd0, b as _, len as i32) as i64,
            libc::SYS_sendto => rw::sendto(fd0, b as _, len, d as i32, e as _, f as u32) as i64,
            libc::SYS_recvfrom => rw::recvfrom(fd0, b as _, len, d as i32, e as _, f as _) as i64,
            libc::SYS_sendmsg => msg::sendmsg(fd0, b as _, len as i32) as i64,
            libc::SYS_recvmsg => msg::recvmsg(fd0, b as _, len as i32) as i64,
            libc::SYS_sendmmsg => i64::from(msg::sendmmsg(fd0, b as _, len as u32, d as i32)),
            libc::SYS_recvmmsg => {
                i64::from(msg::recvmmsg(fd0, b as _, len as u32, d as i32, e as _))
            }
            libc::SYS_sendfile => rw::sendfile(fd0, b as i32, c as _, d) as i64,
            libc::SYS_splice => rw::splice(fd0, b as _, c as i32, d as _, e, f as u32) as i64,
            libc::SYS_close => i64::from(fd::close(fd0)),
            libc::SYS_dup => i64::from(fd::dup(fd0)),
            libc::SYS_dup3 => i64::from(fd::dup3(fd0, b as i32, c as i32)),
            libc::SYS_fcntl => i64::from(fd::fcntl(fd0, b as i32, c)),
            libc::SYS_ioctl => i64::from(sock::ioctl(fd0, b as u64, c)),
            libc::SYS_shutdown => i64::from(sock::shutdown(fd0, b as i32)),
            libc::SYS_connect => i64::from(sock::connect(fd0, b as _, c as u32)),
            libc::SYS_accept4 => i64::from(sock::accept4(fd0, b as _, c as _, d as i32)),
            libc::SYS_socket => i64::from(sock::socket(a as i32, b as i32, c as i32)),
            libc::SYS_epoll_create1 => i64::from(ready::epoll_create1(a as i32)),
            libc::SYS_epoll_ctl => i64::from(ready::epoll_ctl(fd0, b as i32, c as i32, d as _)),
            libc::SYS_epoll_pwait if e == 0 => {
                i64::from(ready::epoll_wait(fd0, b as _, c as i32, d as i32))
            }
            libc::SYS_epoll_pwait => {
                i64::from(ready::epoll_pwait(fd0, b as _, c as i32, d as i32, e as _))
            }
            libc::SYS_epoll_pwait2 => {
                i64::from(ready::epoll_pwait2(fd0, b as _, c as i32, d as _, e as _))
            }
            libc::SYS_ppoll => i64::from(ready::ppoll(a as _, b as u64, c as _, d as _)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => i64::from(ready::epoll_wait(fd0, b as _, c as i32, d as i32)),
            libc::SYS_pselect6 => {
                // The last argument points to the mask's address and length (select(2)).
                let mask = match f {
                    0 => core::ptr::null(),
                    f => *(f as *const *const libc::sigset_t),
                };
                let (r, w, x) = (b as _, c as _, d as _);
                i64::from(ready::pselect(fd0, r, w, x, e as _, mask))
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => i64::from(ready::select(fd0, b as _, c as _, d as _, e as _)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => i64::from(ready::poll(a as _, b as u64, c as i32)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => i64::from(fd::dup2(fd0, b as i32)),
            _ => {
                if matches!(n, libc::SYS_preadv2 | libc::SYS_pwritev2) {
                    fdops::give_up(fd0, Reason::Bypassed);
                }
                real::syscall(n, a, b, c, d, e, f)
            }
        }
    }
}
