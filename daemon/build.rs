//! Compiles the BPF program. It needs no kernel headers of the target: only the stable UAPI.

use std::path::Path;
use std::process::Command;

fn main() {
    const SOURCE: &str = "bpf/sockops.bpf.c";
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let out =
        Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("sockops.o");
    let mut c = Command::new(&clang);
    c.args([
        "-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-c", SOURCE, "-o",
    ])
    .arg(&out);
    // Debian keeps `asm/` in a directory per architecture, which the bpf target does not know.
    let arch = std::env::var("HOST").unwrap_or_default();
    let arch = arch.split('-').next().unwrap_or_default();
    c.arg("-idirafter")
        .arg(format!("/usr/include/{arch}-linux-gnu"));
    match c.status() {
        Ok(s) if s.success() => {}
        Ok(s) => panic!("{clang} could not compile {SOURCE} ({s}); it needs libbpf's headers (Debian: libbpf-dev)"),
        Err(e) => panic!("cannot run {clang}: {e}; building underpassd needs clang (Debian: clang) and libbpf-dev"),
    }
}
