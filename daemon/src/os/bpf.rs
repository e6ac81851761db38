//! What the kernel's `bpf` call does and the crate in use does not offer: another program in the place of an attached one.

use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// linux/bpf.h
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_LINK_UPDATE: libc::c_long = 29;

/// The call's argument, for `BPF_OBJ_GET`.
#[repr(C)]
#[derive(Default)]
struct Get {
    path: u64,
    fd: u32,
    flags: u32,
}

/// The same, for `BPF_LINK_UPDATE`.
#[repr(C)]
#[derive(Default)]
struct Update {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// # Safety
/// `T` must be what the command takes, and what it points to must live.
unsafe fn call<T>(command: libc::c_long, mut what: T) -> Result<libc::c_long, Errno> {
    // SAFETY: the argument lives, with its size; the caller vouches for the rest.
    let r = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            &raw mut what,
            std::mem::size_of::<T>(),
        )
    };
    match r {
        0.. => Ok(r),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

fn number(fd: i32) -> u32 {
    fd.unsigned_abs() // no descriptor is negative
}

/// From one event to the next, the link that is pinned there runs this program.
pub(crate) fn replace_program(pin: &Path, program: BorrowedFd<'_>) -> Result<(), Errno> {
    let path = CString::new(pin.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let get = Get {
        path: path.as_ptr() as u64,
        ..Get::default()
    };
    // SAFETY: the path lives.
    let fd = unsafe { call(BPF_OBJ_GET, get) }?;
    let fd = i32::try_from(fd).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel has just made this descriptor for us.
    let link = unsafe { OwnedFd::from_raw_fd(fd) };
    let update = Update {
        link: number(link.as_raw_fd()),
        program: number(program.as_raw_fd()),
        ..Update::default()
    };
    // SAFETY: numbers only.
    unsafe { call(BPF_LINK_UPDATE, update) }.map(|_| ())
}
