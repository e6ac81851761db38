//! What earlier runs have seen, below `target/mutants`. A run that was stopped goes on where it was, as long as the tree is
//! the same; after an edit the test that failed before is tried first.

use crate::programs::Seen;
use crate::rewrite::Key;
use anyhow::Result;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Who has caught a change; nobody, if it passes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Catch {
    pub program: String,
    pub seen: Seen,
}

/// The list: lines of tree, change, program, and test.
pub struct Caught {
    path: PathBuf,
    tree: String,
    now: BTreeMap<String, Catch>,
    before: BTreeMap<String, Catch>,
}

/// What a line has for a test that was not told.
const SOME: &str = "?";
const HANGS: &str = "hangs";
const PASSES: &str = "passes";

impl Caught {
    /// `files`: what decides, names and texts.
    pub fn load(path: PathBuf, from: &Path, files: &[String]) -> Result<Caught> {
        let mut h = DefaultHasher::new();
        for name in files {
            (name, std::fs::read(from.join(name))?).hash(&mut h);
        }
        let mut all = Caught {
            path,
            tree: format!("{:016x}", h.finish()),
            now: BTreeMap::new(),
            before: BTreeMap::new(),
        };
        let text = std::fs::read_to_string(&all.path).unwrap_or_default();
        for line in text.lines() {
            let parts: Vec<&str> = line.split('\t').collect();
            let [tree, key, program, test] = parts[..] else {
                continue; // (the run was stopped while it wrote this)
            };
            let seen = match test {
                HANGS => Seen::Hangs,
                PASSES => Seen::Passes,
                SOME => Seen::Fails(None),
                t => Seen::Fails(Some(t.to_string())),
            };
            let program = program.to_string();
            let same = tree == all.tree;
            let of = if same { &mut all.now } else { &mut all.before };
            if same || seen != Seen::Passes {
                of.insert(key.to_string(), Catch { program, seen });
            }
        }
        Ok(all)
    }

    /// Was it tried on this tree?
    pub fn is(&self, key: &Key) -> Option<&Catch> {
        self.now.get(&key.name())
    }

    /// What has caught it when the tree was another one?
    pub fn hint(&self, key: &Key) -> Option<&Catch> {
        self.before.get(&key.name())
    }

    pub fn add(&mut self, key: &Key, catch: Catch) -> Result<()> {
        let test = match &catch.seen {
            Seen::Fails(Some(t)) => t,
            Seen::Fails(None) => SOME,
            Seen::Hangs => HANGS,
            Seen::Passes => PASSES,
        };
        let line = [&self.tree, &key.name(), &catch.program, test].join("\t") + "\n";
        let mut f = std::fs::OpenOptions::new();
        f.create(true)
            .append(true)
            .open(&self.path)?
            .write_all(line.as_bytes())?;
        self.now.insert(key.name(), catch);
        Ok(())
    }
}
