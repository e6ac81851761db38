//! The survivors that `survivors.md` explains: a heading for each file, an item for each change, its reason below it.

use crate::rewrite::Key;
use anyhow::{bail, ensure, Context, Result};
use std::collections::BTreeSet;

/// Reads the list.
pub fn explained(text: &str) -> Result<BTreeSet<Key>> {
    let mut all = BTreeSet::new();
    let mut file = None;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("## ") {
            file = Some(name.to_string());
        } else if let (Some(item), Some(file)) = (line.strip_prefix("- "), &file) {
            let Some((within, what)) = item
                .strip_prefix("in `")
                .and_then(|rest| rest.split_once("`: "))
            else {
                bail!("not \"- in `function`: change\": {line}");
            };
            let key = Key {
                file: file.clone(),
                within: within.to_string(),
                what: what.to_string(),
            };
            let reason = lines.peek().is_some_and(|l| l.starts_with("  "));
            ensure!(reason, "without a reason: {line}");
            ensure!(all.insert(key), "twice: {line}");
        }
    }
    file.context("no file has a heading")?;
    Ok(all)
}
