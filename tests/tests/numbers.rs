//! Calls by number do what the same calls by name do, and a number that has come to mean something else
//! is found out before a byte goes the wrong way.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::Duration;
use underpass_tests::harness::{c, paths, peers::Pair, until, Daemon};

const LIMIT: Duration = Duration::from_secs(60);

include!("../../shim/src/hooks/calls.rs");

/// (number, symbols) of each hook, symbols without a number, and numbers that pass with the reason.
struct Listed {
    hooks: Vec<(&'static str, Vec<&'static str>)>,
    symbols: Vec<&'static str>,
    passes: Vec<(&'static str, &'static str)>,
}

macro_rules! listed {
    (
        hooks { $($(#[$only:meta])* $n:ident $arity:ident $hook:path [$($s:ident)*];)* }
        symbols { $($why:literal [$($alone:ident)*];)* }
        passes { $($reason:literal [$($p:ident)*];)* }
    ) => {
        Listed {
            hooks: vec![$((stringify!($n), vec![$(stringify!($s)),*])),*],
            symbols: vec![$($(stringify!($alone)),*),*],
            passes: vec![$($((stringify!($p), $reason)),*),*],
        }
    };
}

fn listed() -> Listed {
    calls!(listed)
}

#[test]
fn each_exported_symbol_has_its_number() -> Result<()> {
    let out = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(paths::shim())
        .output()?;
    let text = String::from_utf8(out.stdout)?;
    let exported: BTreeSet<&str> = text.lines().filter_map(|l| l.split(' ').nth(2)).collect();
    anyhow::ensure!(exported.len() > 50, "nm: {text}");
    let all = listed();
    let named = all.hooks.iter().flat_map(|(_, s)| s);
    let named: Vec<&str> = named.chain(&all.symbols).copied().collect();
    let once: BTreeSet<&str> = named.iter().copied().collect();
    anyhow::ensure!(once.len() == named.len(), "a symbol is listed twice");
    assert_eq!(exported, once, "exported, and listed in hooks/calls.rs");
    Ok(())
}

#[test]
fn each_number_of_the_kernel_is_decided() -> Result<()> {
    let header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";
    let text = std::fs::read_to_string(header).context(header)?;
    let kernel: BTreeSet<String> = text
        .lines()
        .filter_map(|l| l.strip_prefix("#define __NR_")?.split(' ').next())
        .map(|n| format!("SYS_{n}"))
        .collect();
    anyhow::ensure!(kernel.len() > 300, "{header}: {} numbers", kernel.len());
    let all = listed();
    let mut decided = BTreeMap::new();
    let hooked = all.hooks.iter().map(|(n, _)| (*n, "hooked"));
    for (n, how) in hooked.chain(all.passes.iter().copied()) {
        anyhow::ensure!(!how.is_empty(), "{n} without a reason");
        if let Some(before) = decided.insert(n.to_string(), how) {
            anyhow::bail!("{n}: {before:?} and {how:?}");
        }
    }
    let undecided: Vec<_> = kernel
        .iter()
        .filter(|n| !decided.contains_key(*n))
        .collect();
    anyhow::ensure!(undecided.is_empty(), "hooks/calls.rs lacks {undecided:?}");
    Ok(())
}

macro_rules! by_number {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            Pair::both_ways("numbers.py", stringify!($name), LIMIT)
        }
    )*};
}

by_number! {
    close_range close dup2 dup3 duplicate other
    inline_close inline_close_range inline_dup2 inline_dup3 inline_duplicate inline_other
    fork clone clone3 named_clone execve execveat option whole full lowered mappings pidfd
}

/// A program at its hard limit, where descriptors of the shim's count: a daemon's end gives it none of them.
#[test]
fn hard() -> Result<()> {
    let p = Pair::bare("numbers.py", "hard")?;
    p.mark("enough")?;
    p.finish(LIMIT).context("bare")?;
    let mut d = Daemon::start()?;
    let mut p = Pair::promoted("numbers.py", "hard", &d)?;
    p.await_mark("full")?;
    d.restart()?;
    p.await_mark("room")?;
    until("both ends' lanes", LIMIT, || d.promoted_now() == 2)?;
    p.mark("enough")?;
    p.finish(LIMIT).with_context(|| d.picture())?;
    d.assert_promoted(0, 0)?; // (promoted before this daemon began)
    Ok(())
}

/// Not bare: a child that comes back on its parent's stack ruins it. Here it has one of its own.
#[test]
fn vfork() -> Result<()> {
    let d = Daemon::start()?;
    let p = Pair::promoted("numbers.py", "vfork", &d)?;
    p.finish(LIMIT).with_context(|| d.picture())?;
    d.assert_promoted(2, 1000)?;
    Ok(())
}

/// Children that share only one of descriptors and memory, or both without being a thread.
#[test]
fn clones() -> Result<()> {
    for (what, how) in [
        ("files", "name"),
        ("files", "number"),
        ("files", "number3"),
        ("memory", "name"),
        ("both", "name"),
    ] {
        c::both_ways("clones", &[what, how], 18, 18).with_context(|| format!("{what} {how}"))?;
    }
    Ok(())
}

/// What the kernel would refuse to read, the hooks of these numbers leave to it.
#[test]
fn pointers() -> Result<()> {
    c::both_ways("pointers", &[], 2, 2)
}

/// The functions that the library exports may lead elsewhere: a program has written over them, and its way to what they
/// did is their number.
#[test]
fn patched() -> Result<()> {
    c::both_ways("patched", &[], 2, 400)
}

/// Who closes all that it finds, the shim's own among them, goes on as if these were not there.
#[test]
fn cleanup() -> Result<()> {
    c::both_ways("cleanup", &["seen"], 8, 250)?;
    c::both_ways("cleanup", &["unseen"], 4, 80)
}
