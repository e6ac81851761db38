//! `make build`: programs and shim, installed under `target/underpass` as a package would have
//! them, `bin/` beside `lib/`. Files are replaced by rename, never rewritten in place: running
//! programs have the shim mapped.

use crate::package::run;
use crate::{elf, Tree};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Oldest glibc that the shim loads under.
const SHIM_TARGET: &str = "x86_64-unknown-linux-gnu";
const SHIM_GLIBC: &str = "2.17";

/// Its programs: all but the tool for containers, which is linked in another way.
const BINS: &str = "--bin underpassd --bin underpass";

/// Those that show and measure, which no test needs.
const BENCHES: &str = "--bin bench --bin bench-lab --bin demo --bin lab-load";

/// The tool for containers, which has no libraries.
const STATIC: &str = "underpass-static";
const CRATE: &str = "underpass_static";

/// What it carries, and where its source finds that: the program for the image's own dynamic linker.
const PROBE: &str = "underpass-probe";
const PROBE_ENV: &str = "UNDERPASS_PROBE";

/// What the standard library and the unwinder in it call of other parts of glibc than `libc.so.6`, up to 2.33: after a
/// panic, and for ends of threads where glibc is older than 2.18.
const PROBE_WANTS: &[(&str, &[&str])] = &[
    ("libdl.so.2", &["dlsym", "dladdr"]),
    (
        "libpthread.so.0",
        &[
            "pthread_key_create",
            "pthread_key_delete",
            "pthread_setspecific",
            "pthread_rwlock_rdlock",
            "pthread_rwlock_wrlock",
            "pthread_rwlock_unlock",
        ],
    ),
];

/// What one build covers, always the same: another set has other features, and compiles anew.
const PROGRAMS: &str = "build --release -p underpassd -p underpass -p underpass-benches";

/// The agent of lab machines, for programs that are no tests: cargo builds it for those by itself.
pub fn agent(tree: &Tree) -> Result<(), String> {
    run(&mut tree.cargo(&format!("{PROGRAMS} -p underpass-tests --bin lab-agent")))
}

/// What is installed, and what shows and measures it.
pub fn all(tree: &Tree) -> Result<(), String> {
    installed(tree)?;
    run(&mut tree.cargo(&format!("{PROGRAMS} {BENCHES}")))
}

/// What is installed.
pub fn installed(tree: &Tree) -> Result<(), String> {
    let out = tree.target.join("underpass");
    for d in ["bin", "lib"] {
        fs::create_dir_all(out.join(d)).map_err(|e| format!("{}: {e}", out.display()))?;
    }
    run(&mut tree.cargo(&format!("{PROGRAMS} {BINS}")))?;
    for_images(tree, &out)?;
    let mut linked = tree.cargo(&format!("{PROGRAMS} --bin {STATIC}"));
    linked.env(PROBE_ENV, out.join("lib").join(PROBE));
    linked.env("RUSTC_WRAPPER", std::env::current_exe().unwrap_or_default());
    run(linked.env(BETWEEN, "1"))?;
    for b in ["underpass", "underpassd", STATIC] {
        put(
            &tree.target.join("release").join(b),
            &out.join("bin").join(b),
            |_| Ok(()),
        )?;
    }
    Ok(())
}

/// Set where this program runs between cargo and the compiler.
pub const BETWEEN: &str = "UNDERPASS_BETWEEN_CARGO_AND_RUSTC";

/// What cargo wants compiled, and how: only the tool for containers is linked in its own way. (`cargo rustc`, which has options
/// for one program, compiles all that this is made of anew: it builds for one package, which wants other features.)
pub fn rustc(args: Vec<String>) -> Command {
    let (compiler, args) = args
        .split_first()
        .map_or(("rustc", &[][..]), |(c, a)| (c, a));
    let mut c = Command::new(compiler);
    c.args(args);
    if args.windows(2).any(|w| w == ["--crate-name", CRATE]) {
        c.args([
            "-C",
            "target-feature=+crt-static",
            "--cfg",
            "underpass_probe",
        ]);
    }
    c
}

/// What runs with the C library of any image: the shim, and the probe.
fn for_images(tree: &Tree, out: &Path) -> Result<(), String> {
    let mut zig = tree.cargo("zigbuild --release -p underpass-shim -p underpass-probe --target");
    zig.arg(format!("{SHIM_TARGET}.{SHIM_GLIBC}"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::iter::once(tree.target.join("venv/bin")).chain(std::env::split_paths(&path));
    zig.env("CARGO_PROFILE_RELEASE_LTO", "thin");
    zig.env("CARGO_PROFILE_RELEASE_PANIC", "abort"); // nothing unwinds into an application
    zig.env(
        "PATH",
        std::env::join_paths(dirs).map_err(|e| e.to_string())?,
    );
    run(&mut zig)?;
    let built = tree.target.join(SHIM_TARGET).join("release");
    let weak = |name: &str, libraries: &[(&str, &[&str])]| {
        put(&built.join(name), &out.join("lib").join(name), |tmp| {
            // A missing dependency of a preload kills every program. musl has no dynamic linker of that name; glibc's
            // is always there, listed or not. What is wanted of the others is weak.
            let unlist = |library: &str| {
                let file = tmp.to_string_lossy();
                run(&mut tree.command("patchelf", &["--remove-needed", library, &file]))
            };
            unlist("ld-linux-x86-64.so.2")?;
            for (library, symbols) in libraries {
                unlist(library)?;
                elf::make_weak(tmp, symbols, library)?;
            }
            Ok(())
        })
    };
    weak(PROBE, PROBE_WANTS)?;
    weak("libunderpass.so", &[("libdl.so.2", &["dlsym"])])
}

/// Copies `from` beside `to`, lets `change` work on the copy, and renames it over `to`.
fn put(
    from: &Path,
    to: &Path,
    change: impl Fn(&PathBuf) -> Result<(), String>,
) -> Result<(), String> {
    let tmp = to.with_extension("new");
    fs::copy(from, &tmp).map_err(|e| format!("{}: {e}", from.display()))?;
    change(&tmp)?;
    fs::rename(&tmp, to).map_err(|e| format!("{}: {e}", to.display()))
}
