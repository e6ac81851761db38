//! How the tree is built: no circle of modules in a crate, no file over 600 lines, what threads must agree on has a name in
//! a table, every test a line in another. What still breaks a rule is listed with its measure, which may only become smaller.

use anyhow::{ensure, Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::Visit;
use underpass_tests::harness::paths;

/// Crates, and how many modules their largest circle has.
const CRATES: [(&str, usize); 10] = [
    ("link", 0),
    ("shim", 0),
    ("daemon", 0),
    ("daemon/admin", 0),
    ("daemon/ibv", 0),
    ("daemon/rdma", 0),
    ("tools", 0),
    ("tools/xtask", 0),
    ("tests", 0),
    ("benches", 0),
];

/// Lines of a file.
const LINES_MAX: usize = 600;

type Module = Vec<String>;

/// The modules of a room, and which of them each names.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// What a module names of its own crate. (A module may name its parents' items, and these what they contain: that is one
/// room with what is in it. So circles are looked for among the modules of each room.)
struct Names {
    at: Module,
    found: Vec<Module>,
}

impl Names {
    /// Where a path leads that begins in this module.
    fn add(&mut self, path: &[String]) {
        let mut base = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.at.clone(),
            _ => return,
        };
        let up = |p: &&String| matches!(p.as_str(), "crate" | "self" | "super");
        let relative = path.iter().take_while(up);
        for _ in relative.clone().filter(|p| *p == "super") {
            base.pop();
        }
        base.extend(path[relative.count()..].iter().cloned());
        self.found.push(base);
    }

    fn tree(&mut self, before: &mut Module, tree: &syn::UseTree) {
        let depth = before.len();
        match tree {
            syn::UseTree::Path(p) => {
                before.push(p.ident.to_string());
                self.tree(before, &p.tree);
            }
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| self.tree(before, t)),
            syn::UseTree::Name(n) => {
                before.push(n.ident.to_string());
                self.add(before);
            }
            syn::UseTree::Rename(n) => {
                before.push(n.ident.to_string());
                self.add(before);
            }
            syn::UseTree::Glob(_) => self.add(before),
        }
        before.truncate(depth);
    }
}

fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|a| {
        a.path().is_ident("cfg")
            && a.meta
                .require_list()
                .is_ok_and(|l| l.tokens.to_string() == "test")
    })
}

impl<'a> Visit<'a> for Names {
    fn visit_item_use(&mut self, u: &'a syn::ItemUse) {
        self.tree(&mut Vec::new(), &u.tree);
    }

    fn visit_path(&mut self, p: &'a syn::Path) {
        let all: Module = p.segments.iter().map(|s| s.ident.to_string()).collect();
        self.add(&all);
        syn::visit::visit_path(self, p);
    }

    fn visit_item_mod(&mut self, m: &'a syn::ItemMod) {
        if !is_test(&m.attrs) {
            self.at.push(m.ident.to_string());
            syn::visit::visit_item_mod(self, m);
            self.at.pop();
        }
    }
}

fn files(dir: &Path, all: &mut Vec<PathBuf>) -> Result<()> {
    for e in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = e?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            files(&path, all)?;
        } else if name.ends_with(".rs") {
            all.push(path);
        }
    }
    Ok(())
}

/// The modules of a crate, and which others each of them names.
fn modules(source: &Path) -> Result<BTreeMap<Module, BTreeSet<Module>>> {
    let mut all = Vec::new();
    files(source, &mut all)?;
    let mut found = BTreeMap::new();
    for path in all {
        let inside = path.strip_prefix(source)?.with_extension("");
        let mut at: Module = inside
            .iter()
            .map(|p| p.to_string_lossy().into_owned())
            .collect();
        if matches!(at.last().map(String::as_str), Some("lib" | "main" | "mod")) {
            at.pop();
        }
        let text = std::fs::read_to_string(&path)?;
        let file = syn::parse_file(&text).with_context(|| path.display().to_string())?;
        let mut names = Names {
            at: at.clone(),
            found: Vec::new(),
        };
        names.visit_file(&file);
        found.entry(at).or_insert_with(Vec::new).extend(names.found);
    }
    let known: BTreeSet<Module> = found.keys().cloned().collect();
    let leads = |from: &Module, mut to: Module| {
        while !known.contains(&to) {
            to.pop()?;
        }
        (to != *from).then_some(to)
    };
    Ok(found
        .into_iter()
        .map(|(m, to)| {
            let to = to.into_iter().filter_map(|t| leads(&m, t)).collect();
            (m, to)
        })
        .collect())
}

/// The modules in `room`, each with all that is in it, and which of them name which.
fn inside(room: &Module, all: &BTreeMap<Module, BTreeSet<Module>>) -> Graph {
    let child = |m: &Module| {
        let rest = m.strip_prefix(room.as_slice())?;
        Some(rest.first()?.clone())
    };
    let mut graph = Graph::new();
    for (from, to) in all {
        let Some(from) = child(from) else { continue };
        let to = to.iter().filter_map(child).filter(|t| *t != from);
        graph.entry(from.clone()).or_default().extend(to);
    }
    graph
}

/// All that can be reached from there.
fn reach(from: &str, graph: &Graph) -> BTreeSet<String> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.to_string()]);
    while let Some(m) = open.pop() {
        for to in &graph[&m] {
            if seen.insert(to.clone()) {
                open.push(to.clone());
            }
        }
    }
    seen
}

/// The largest circle in a graph.
fn circle(graph: &Graph) -> Vec<String> {
    let reached: BTreeMap<_, _> = graph.keys().map(|m| (m, reach(m, graph))).collect();
    let of = |m: &String| -> Vec<String> {
        let both = |o: &&String| reached[m].contains(*o) && reached[*o].contains(m);
        graph.keys().filter(both).cloned().collect()
    };
    graph
        .keys()
        .map(of)
        .max_by_key(Vec::len)
        .unwrap_or_default()
}

#[test]
fn no_circles() -> Result<()> {
    for (name, known) in CRATES {
        let all = modules(&paths::root().join(name).join("src"))?;
        ensure!(!all.is_empty(), "{name} has no modules");
        let rooms = all.keys().map(|r| circle(&inside(r, &all)));
        let largest = rooms.max_by_key(Vec::len).unwrap_or_default();
        ensure!(
            largest.len() == known,
            "{name}: the largest circle has {} modules, not {known}: {}",
            largest.len(),
            largest.join(", ")
        );
    }
    Ok(())
}

#[test]
fn short_files() -> Result<()> {
    let root = paths::root();
    let mut all = Vec::new();
    for dir in ["link", "shim", "daemon", "tools", "tests", "benches"] {
        files(&root.join(dir), &mut all)?;
    }
    let mut long = Vec::new();
    for path in all {
        let lines = std::fs::read_to_string(&path)?.lines().count();
        let name = path.strip_prefix(&root)?.to_string_lossy().into_owned();
        if lines > LINES_MAX {
            long.push(format!("{name}: {lines} lines"));
        }
    }
    ensure!(long.is_empty(), "{}", long.join("\n"));
    Ok(())
}

/// Each named pair of stores and looks stands in the table of CONTRIBUTING.md, and at both its places in the code.
#[test]
fn named_synchronisations() -> Result<()> {
    let root = paths::root();
    let mut all = Vec::new();
    for dir in ["lane/src", "shim/src", "daemon/src"] {
        files(&root.join(dir), &mut all)?;
    }
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for path in all {
        let text = std::fs::read_to_string(&path)?;
        for at in text.split("SYNC ").skip(1) {
            let end = at.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
            let name = at[..end.unwrap_or(at.len())].trim_end_matches('-');
            if name.starts_with(|c: char| c.is_ascii_lowercase()) {
                *found.entry(name.to_string()).or_default() += 1;
            }
        }
    }
    let text = std::fs::read_to_string(root.join("CONTRIBUTING.md"))?;
    let table = text
        .split("## Synchronisations")
        .nth(1)
        .context("no table")?;
    let rows = table
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split(" |").next());
    let told: BTreeSet<String> = rows
        .flat_map(|names| names.split(", ").map(|n| n.trim_matches('`').to_string()))
        .collect();
    let named: BTreeSet<String> = found.keys().cloned().collect();
    ensure!(named.len() > 10 && named == told, "{named:?}, not {told:?}");
    let alone = found
        .iter()
        .filter(|(n, times)| **times < 2 && !n.starts_with("wake"));
    let alone: Vec<_> = alone.collect();
    ensure!(alone.is_empty(), "at one place only: {alone:?}");
    Ok(())
}

/// Each file of integration tests is told of.
#[test]
fn tests_are_listed() -> Result<()> {
    let root = paths::root().join("tests");
    let text = std::fs::read_to_string(root.join("README.md"))?;
    let mut all = Vec::new();
    for e in std::fs::read_dir(root.join("tests"))? {
        let path = e?.path();
        if path.extension().is_some_and(|e| e == "rs") {
            let name = path.file_stem().context("a name")?;
            all.push(name.to_string_lossy().into_owned());
        }
    }
    all.retain(|name| !text.contains(&format!("`{name}`")));
    ensure!(all.is_empty(), "not in tests/README.md: {all:?}");
    Ok(())
}
