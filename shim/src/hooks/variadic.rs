//! Variadic C functions, which stable Rust cannot define: small assembly entries that gather the
//! arguments and call Rust. `fcntl`, `ioctl` and `syscall` need none of this, for their optional
//! arguments are passed in registers like fixed ones.
#![cfg(target_arch = "x86_64")]

use crate::process;
use crate::sys::real;
use core::ffi::{c_char, c_void};
use lane::proto::reason::Reason;

// System V ABI: the first six integer arguments are in rdi rsi rdx rcx r8 r9, the rest on the stack
// above the return address. `execl(path, arg, ...)`: rsi.. are pushed as an array, rdi stays.
macro_rules! exec_entry {
    ($name:ident => $target:path) => {
        /// The C function of this name.
        ///
        /// # Safety
        /// As the C function.
        #[unsafe(naked)]
        #[no_mangle]
        pub unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "lea r10, [rsp + 8]",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "mov rdx, r10",
                "call {target}",
                "add rsp, 40",
                "ret",
                target = sym $target,
            )
        }
    };
}
exec_entry!(execl => execl_args);
exec_entry!(execlp => execlp_args);
exec_entry!(execle => execle_args);

// `dprintf(fd, ...)` and its fortified form: save all argument registers, take the connection back to TCP, restore
// the registers, and jump to the real function.
macro_rules! printf_entry {
    ($name:ident => $target:path) => {
        /// The C function of this name.
        ///
        /// # Safety
        /// As the C function.
        #[unsafe(naked)]
        #[no_mangle]
        pub unsafe extern "C" fn $name() {
    core::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 192",
        "mov [rsp], rdi",
        "mov [rsp + 8], rsi",
        "mov [rsp + 16], rdx",
        "mov [rsp + 24], rcx",
        "mov [rsp + 32], r8",
        "mov [rsp + 40], r9",
        "mov [rsp + 48], rax",
        "movups [rsp + 64], xmm0",
        "movups [rsp + 80], xmm1",
        "movups [rsp + 96], xmm2",
        "movups [rsp + 112], xmm3",
        "movups [rsp + 128], xmm4",
        "movups [rsp + 144], xmm5",
        "movups [rsp + 160], xmm6",
        "movups [rsp + 176], xmm7",
        "call {prepare}",
        "mov r11, rax",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, [rsp + 16]",
        "mov rcx, [rsp + 24]",
        "mov r8, [rsp + 32]",
        "mov r9, [rsp + 40]",
        "mov rax, [rsp + 48]",
        "movups xmm0, [rsp + 64]",
        "movups xmm1, [rsp + 80]",
        "movups xmm2, [rsp + 96]",
        "movups xmm3, [rsp + 112]",
        "movups xmm4, [rsp + 128]",
        "movups xmm5, [rsp + 144]",
        "movups xmm6, [rsp + 160]",
        "movups xmm7, [rsp + 176]",
        "leave",
        "jmp r11",
        prepare = sym $target,
    )
}
    };
}
printf_entry!(dprintf => dprintf_prepare);
printf_entry!(__dprintf_chk => dprintf_chk_prepare);

/// Maximum number of arguments of an `execl`; more are refused with E2BIG.
const ARGS: usize = 1024;

/// Argument `k` after the path.
///
/// # Safety
/// `regs` has five words, `stack` the rest of the application's list, which ends with a null.
unsafe fn arg(regs: *const usize, stack: *const usize, k: usize) -> usize {
    // SAFETY: by contract; callers stop at the null.
    unsafe {
        if k < 5 {
            *regs.add(k)
        } else {
            *stack.add(k - 5)
        }
    }
}

/// Calls `f` with the argument vector and the index after its null.
///
/// # Safety
/// As `arg`.
unsafe fn gather(
    regs: *const usize,
    stack: *const usize,
    f: impl Fn(*const *const c_char, usize) -> i32,
) -> i32 {
    // SAFETY: not beyond the null.
    match (0..ARGS).position(|k| unsafe { arg(regs, stack, k) } == 0) {
        // SAFETY: passed on.
        Some(n) if n < 32 => unsafe { with::<32>(regs, stack, n, f) },
        // SAFETY: passed on.
        Some(n) => unsafe { with::<ARGS>(regs, stack, n, f) },
        None => {
            crate::set_errno(libc::E2BIG);
            -1
        }
    }
}

/// The same for at most ROOM - 1 arguments; the null is at `n`. (Not inlined, so that short calls use little stack.)
///
/// # Safety
/// As `arg`.
#[inline(never)]
unsafe fn with<const ROOM: usize>(
    regs: *const usize,
    stack: *const usize,
    n: usize,
    f: impl Fn(*const *const c_char, usize) -> i32,
) -> i32 {
    let mut argv = [core::ptr::null::<c_char>(); ROOM];
    for (k, slot) in argv.iter_mut().enumerate().take(n) {
        // SAFETY: before the null.
        *slot = unsafe { arg(regs, stack, k) } as *const c_char;
    }
    f(argv.as_ptr(), n + 1)
}

unsafe extern "C" fn execl_args(
    path: *const c_char,
    regs: *const usize,
    stack: *const usize,
) -> i32 {
    // SAFETY: called by the entry above with the application's arguments.
    unsafe { gather(regs, stack, |v, _| super::proc::execv(path, v)) }
}

unsafe extern "C" fn execlp_args(
    file: *const c_char,
    regs: *const usize,
    stack: *const usize,
) -> i32 {
    // SAFETY: as above.
    unsafe { gather(regs, stack, |v, _| super::proc::execvp(file, v)) }
}

unsafe extern "C" fn execle_args(
    path: *const c_char,
    regs: *const usize,
    stack: *const usize,
) -> i32 {
    // SAFETY: as above; the environment follows the null.
    unsafe {
        gather(regs, stack, |v, next| {
            super::proc::execve(path, v, arg(regs, stack, next) as *const *const c_char)
        })
    }
}

/// Takes the connection down and returns the real `dprintf`.
unsafe extern "C" fn dprintf_prepare(fd: i32) -> *mut c_void {
    process::force_tcp(fd, Reason::Option);
    static SYM: real::Sym = real::Sym::new(c"dprintf");
    SYM.get()
}

/// The same for `__dprintf_chk`.
unsafe extern "C" fn dprintf_chk_prepare(fd: i32) -> *mut c_void {
    process::force_tcp(fd, Reason::Option);
    static SYM: real::Sym = real::Sym::new(c"__dprintf_chk");
    SYM.get()
}

#[no_mangle]
pub unsafe extern "C" fn __vdprintf_chk(
    fd: i32,
    flag: i32,
    format: *const c_char,
    args: *mut c_void,
) -> i32 {
    process::force_tcp(fd, Reason::Option);
    // SAFETY: see the module above; a va_list is passed as a pointer on x86-64.
    unsafe { real::__vdprintf_chk(fd, flag, format, args) }
}

#[no_mangle]
pub unsafe extern "C" fn vdprintf(fd: i32, format: *const c_char, args: *mut c_void) -> i32 {
    process::force_tcp(fd, Reason::Option);
    // SAFETY: see the module above; a va_list is passed as a pointer on x86-64.
    unsafe { real::vdprintf(fd, format, args) }
}
