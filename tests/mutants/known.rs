//! Mutants that did not compile in an earlier run: finding them costs a build for each round of errors. They are known
//! by the text of their file, so that an edit makes all of them new.

use crate::rewrite::Mutant;
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// A name for each mutant: the text of its file, and which change it is.
fn names(from: &Path, mutants: &[Mutant]) -> Result<Vec<String>> {
    let mut texts = BTreeMap::new();
    let mut all = Vec::new();
    for m in mutants {
        let file = &m.key.file;
        if !texts.contains_key(file) {
            let mut h = DefaultHasher::new();
            std::fs::read_to_string(from.join(file))?.hash(&mut h);
            texts.insert(file, h.finish());
        }
        all.push(format!("{:016x} {}", texts[file], m.key.name()));
    }
    Ok(all)
}

/// Which of the mutants are known not to compile.
pub fn load(from: &Path, list: &Path, mutants: &[Mutant]) -> Result<BTreeSet<usize>> {
    let text = std::fs::read_to_string(list).unwrap_or_default();
    let known: BTreeSet<&str> = text.lines().collect();
    let all = names(from, mutants)?;
    let of = |n: &usize| known.contains(all[*n].as_str());
    Ok((0..all.len()).filter(of).collect())
}

/// Writes them down.
pub fn store(
    from: &Path,
    list: &Path,
    mutants: &[Mutant],
    without: &BTreeSet<usize>,
) -> Result<()> {
    let all = names(from, mutants)?;
    let lines: Vec<&str> = without.iter().map(|n| all[*n].as_str()).collect();
    Ok(std::fs::write(list, lines.join("\n"))?)
}
