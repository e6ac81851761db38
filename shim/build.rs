//! Hooks call one another by name. Programs may export functions of the same names, which then call
//! ours as the next ones (Erlang's machine does it with `sigaction`): inside the library a name means
//! the library's own, or the two call each other for ever.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
