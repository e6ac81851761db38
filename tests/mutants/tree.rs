//! The copy of the tree that has the mutants, and what builds it.

use crate::programs::{Stage, STAGES};
use crate::rewrite::{Mutant, Rewriter};
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use underpass_tests::harness::paths;

/// What is mutated.
const PLACES: [&str; 18] = [
    "lane/src/notify.rs",
    "lane/src/proto/frame.rs",
    "lane/src/half/leave.rs",
    "lane/src/half/native_calls.rs",
    "lane/src/half/ring.rs",
    "lane/src/half/rx.rs",
    "lane/src/half/rx/",
    "lane/src/half/tx.rs",
    "lane/src/half/tx/",
    "daemon/src/core/remote.rs",
    "daemon/src/core/takeover.rs",
    "daemon/src/dataplane/thread.rs",
    "daemon/src/dataplane/rail.rs",
    "daemon/src/dataplane/rail/",
    "daemon/src/lanes/groups/takeover.rs",
    "daemon/src/lanes/takeover.rs",
    "daemon/rdma/src/engine.rs",
    "daemon/rdma/src/engine/",
];

/// The root of the contract crate, and what is added to it.
const LIB: &str = "lane/src/lib.rs";
const IS: &str = "
#[doc(hidden)]
pub mod mutant {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    static ON: AtomicU32 = AtomicU32::new(u32::MAX);
    #[inline(always)]
    pub fn is(n: u32) -> bool {
        let on = ON.load(Relaxed);
        on == n || on == u32::MAX && first(n)
    }
    #[cold]
    fn first(n: u32) -> bool {
        let on = std::env::var(\"MUTANT\").ok().and_then(|v| v.parse().ok());
        ON.store(on.unwrap_or(u32::MAX - 1), Relaxed);
        on == Some(n)
    }
}
";

/// Copies the tree as it is now, whatever is edited meanwhile. Returns the files that decide what a test says.
pub fn prepare(to: &Path) -> Result<Vec<String>> {
    let (from, tree) = (to.join("from"), to.join("tree"));
    copy(&paths::root(), &from, |_| true)?;
    copy(&from, &tree, |n| n != LIB && !is_mutated(n))?;
    let mut all = files(&from)?;
    all.retain(|n| {
        ["lane/", "daemon/", "Cargo."]
            .iter()
            .any(|p| n.starts_with(p))
    });
    Ok(all)
}

/// Builds the test programs of a stage.
pub fn cargo(to: &Path, stage: Stage) -> Command {
    let mut c = Command::new(env!("CARGO"));
    c.current_dir(to.join("tree"))
        .args(["test", "--release", "--no-run", "--message-format=json"])
        // As tests are built anyhow; otherwise all is built twice, once for the daemon's program.
        .args(["--config", "profile.release.panic=\"unwind\""])
        .args(stage.targets())
        .stderr(Stdio::inherit());
    let packages: BTreeSet<&str> = STAGES.iter().map(|s| s.package()).collect();
    for package in packages {
        let of = |what: &str| format!("profile.release.package.{package}.{what}");
        c.args(["--config", &of("codegen-units=16")]);
        c.args(["--config", &of("debug=false")]);
        if package != Stage::Lane.package() {
            c.args(["--config", &of("opt-level=1")]); // they take minutes to build, and are small to run
        }
    }
    let at = match stage {
        Stage::Loom => {
            c.env("RUSTFLAGS", "--cfg loom -Awarnings");
            "build-loom"
        }
        _ => "build",
    };
    c.env("CARGO_TARGET_DIR", to.join(at));
    c
}

/// The names of all files below a folder, without what is built, git's own, and documents.
fn files(root: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(at) = todo.pop() {
        for e in std::fs::read_dir(root.join(&at))? {
            let e = e?;
            let name = at.join(e.file_name()).to_string_lossy().into_owned();
            match e.file_type()? {
                _ if ["target", ".git", "docs"].contains(&name.as_str()) => {}
                t if t.is_dir() => todo.push(name.into()),
                t if t.is_file() => all.push(name),
                _ => {}
            }
        }
    }
    all.sort();
    Ok(all)
}

/// Copies those of them that differ, so that cargo builds nothing twice, and removes what is gone.
fn copy(from: &Path, to: &Path, take: impl Fn(&str) -> bool) -> Result<()> {
    let all = files(from)?;
    for name in all.iter().filter(|n| take(n)) {
        put(&to.join(name), &std::fs::read(from.join(name))?)?;
    }
    for gone in files(to)?.iter().filter(|n| !all.contains(n)) {
        std::fs::remove_file(to.join(gone))?;
    }
    Ok(())
}

fn put(path: &Path, text: &[u8]) -> Result<()> {
    if std::fs::read(path).ok().as_deref() != Some(text) {
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

fn is_mutated(name: &str) -> bool {
    PLACES
        .iter()
        .any(|p| name == *p || p.ends_with('/') && name.starts_with(p) && name.ends_with(".rs"))
}

/// Writes the mutated files.
pub fn write(to: &Path, without: &BTreeSet<usize>) -> Result<()> {
    let (from, tree) = (&to.join("from"), &to.join("tree"));
    let lib = std::fs::read_to_string(from.join(LIB))? + IS;
    put(&tree.join(LIB), lib.as_bytes())?;
    let (_, texts) = rewrite(from, without)?;
    for (name, text) in texts {
        put(&tree.join(name), text.as_bytes())?;
    }
    Ok(())
}

/// All mutants, and the files that have them: names and texts.
pub type Rewritten = (Vec<Mutant>, Vec<(String, String)>);

/// Puts the mutants into the files that are mutated.
pub fn rewrite(from: &Path, without: &BTreeSet<usize>) -> Result<Rewritten> {
    let mut r = Rewriter::default();
    r.without = without.clone();
    let mut texts = Vec::new();
    for name in files(from)?.into_iter().filter(|n| is_mutated(n)) {
        let text = std::fs::read_to_string(from.join(&name))?;
        let is = match name.starts_with("lane/") {
            true => "crate::mutant::is",
            false => "::lane::mutant::is",
        };
        let text = r.file(&name, &text, is).with_context(|| name.clone())?;
        // A number is looked for by lines.
        texts.push((name, text.replace("mutant :: is", "mutant\n:: is")));
    }
    Ok((r.mutants, texts))
}

pub fn messages(said: &str) -> impl Iterator<Item = Value> + '_ {
    said.lines().filter_map(|l| serde_json::from_str(l).ok())
}

pub fn errors(said: &str) -> impl Iterator<Item = Value> + '_ {
    messages(said).filter(|v| v["message"]["level"] == "error")
}

/// Numbers of the mutants that the compiler complained of: each error's nearest number before it, or in it.
pub fn wrong(to: &Path, said: &str) -> Result<BTreeSet<usize>> {
    let tree = to.join("tree");
    let mut bad = BTreeSet::new();
    for v in errors(said) {
        for s in v["message"]["spans"].as_array().into_iter().flatten() {
            let (Some(file), Some(at), Some(end)) = (
                s["file_name"].as_str(),
                s["byte_start"].as_u64(),
                s["byte_end"].as_u64(),
            ) else {
                continue;
            };
            let Ok(text) = std::fs::read_to_string(tree.join(file)) else {
                continue;
            };
            let number = |at: usize| -> Option<usize> {
                let t = text[at..].split_once('(')?.1;
                t.split_once("u32")?.0.trim().parse().ok()
            };
            let (at, end) = (at as usize, end as usize);
            let inside = text[at..end].find("mutant\n:: is").map(|i| at + i);
            let before = text[..at].rfind("mutant\n:: is");
            bad.extend(inside.or(before).and_then(number));
        }
    }
    Ok(bad)
}
