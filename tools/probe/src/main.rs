//! The probe as a program of its own, for images: the tool for containers has it inside.
//!
//! It begins at the C library's `main`: what Rust's standard library does before its own needs a library of glibc that an
//! image need not have.
#![no_main]

use std::ffi::{c_char, c_int, CStr};

/// Called by the C library with the program's arguments.
#[unsafe(no_mangle)]
extern "C" fn main(count: c_int, arguments: *const *const c_char) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    let all = (1..count).map(|i| {
        // SAFETY: the C library passes an array of so many strings, which stay where they are.
        unsafe { CStr::from_ptr(*arguments.add(i)) }
    });
    let all: Vec<&str> = all.filter_map(|a| a.to_str().ok()).collect();
    underpass_probe::named();
    underpass_probe::run(&all)
}
