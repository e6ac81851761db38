//! How the tree is built: no circle of modules in a crate, no file over 600 lines, what threads must agree on has a name in
//! a table, every test a line in another, every file a line that says what it is, and what the pages name exists.

use anyhow::{ensure, Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::Visit;
use underpass_tests::harness::paths;

const CRATES: [&str; 21] = [
    "lane",
    "shim",
    "daemon",
    "daemon/admin",
    "daemon/certificates",
    "daemon/kubelet",
    "daemon/ibv",
    "daemon/kube",
    "daemon/nri",
    "daemon/pods",
    "daemon/rdma",
    "daemon/signer",
    "daemon/webhook",
    "daemon/world",
    "tools",
    "tools/probe",
    "tools/xtask",
    "tests",
    "tests/fuzz",
    "tests/model",
    "benches",
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
    for name in CRATES {
        let all = modules(&paths::root().join(name).join("src"))?;
        ensure!(!all.is_empty(), "{name} has no modules");
        let rooms = all.keys().map(|r| circle(&inside(r, &all)));
        let largest = rooms.max_by_key(Vec::len).unwrap_or_default();
        ensure!(
            largest.is_empty(),
            "{name}: a circle of modules: {}",
            largest.join(", ")
        );
    }
    Ok(())
}

/// A crate's rooms in ARCHITECTURE.md's order: none names one above it, and none is left out.
fn in_order(name: &str, page: &str) -> Result<()> {
    let (_, list) = page
        .split_once(&format!("\n- {name}: `"))
        .with_context(|| format!("no rooms of {name}"))?;
    let list = list.split(['(', ';']).next().unwrap_or_default();
    let order: Vec<&str> = list
        .split(|c: char| !c.is_ascii_lowercase())
        .filter(|w| !w.is_empty())
        .collect();
    let all = modules(&paths::root().join(name).join("src"))?;
    let graph = inside(&Vec::new(), &all);
    let at = |room: &str| order.iter().position(|o| *o == room);
    for (room, below) in &graph {
        let from = at(room).with_context(|| format!("{name}: `{room}` is not among the rooms"))?;
        let above = below.iter().find(|b| at(b).is_none_or(|b| b < from));
        ensure!(above.is_none(), "{name}: `{room}` names {above:?}");
    }
    ensure!(order.len() == graph.len(), "{name}: {order:?}");
    Ok(())
}

#[test]
fn rooms_in_their_order() -> Result<()> {
    let page = std::fs::read_to_string(paths::root().join("ARCHITECTURE.md"))?;
    in_order("shim", &page)?;
    in_order("daemon", &page)
}

/// No file is too long, and each begins with what it is for.
#[test]
fn files_are_short_and_say_what_they_are() -> Result<()> {
    let root = paths::root();
    let mut all = Vec::new();
    for dir in ["lane", "shim", "daemon", "tools", "tests", "benches"] {
        files(&root.join(dir), &mut all)?;
    }
    let mut wrong = Vec::new();
    for path in all {
        let text = std::fs::read_to_string(&path)?;
        let (lines, name) = (text.lines().count(), path.strip_prefix(&root)?.display());
        if lines > LINES_MAX {
            wrong.push(format!("{name}: {lines} lines"));
        }
        if !text.starts_with("//") {
            wrong.push(format!("{name}: does not say what it is"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// README is read in ten minutes, and ARCHITECTURE.md's glossary learned in as many.
#[test]
fn pages_are_short() -> Result<()> {
    let read = |page| std::fs::read_to_string(paths::root().join(page));
    let lines = read("README.md")?.lines().count();
    ensure!(lines <= 150, "README.md: {lines} lines");
    let page = read("ARCHITECTURE.md")?;
    let words = page.split("\n## Words\n").nth(1).context("no glossary")?;
    let words = words.split("\n## ").next().unwrap_or_default();
    let entries = words.lines().filter(|l| l.starts_with("| ")).count() - 2; // its head
    ensure!((20..=40).contains(&entries), "{entries} words");
    Ok(())
}

/// Words that gave way to others, so that one thing has one name (the glossary in ARCHITECTURE.md): no item, field or
/// variable is called so. Those with a `+` may not be a part of a name either.
const RETIRED: [&str; 41] = [
    "attend+",
    "barred+",
    "because",
    "behind",
    "bequeath+",
    "buried+",
    "bury+",
    "calm+",
    "custody+",
    "debts+",
    "door+",
    "doze+",
    "dozing+",
    "far",
    "farewell+",
    "forsake+",
    "give_up+",
    "hasten+",
    "heard",
    "heir+",
    "heirs+",
    "hurry+",
    "kick+",
    "kpos+",
    "lies",
    "maker",
    "natives+",
    "near",
    "owed+",
    "party",
    "penance+",
    "poke+",
    "poked+",
    "relic+",
    "relics+",
    "rouse+",
    "spoilt+",
    "stir+",
    "stirred+",
    "strangers+",
    "taker",
];

/// Is this name, in capitals or not, one of them?
fn is_retired(name: &str) -> bool {
    let (mut snake, mut before) = (String::new(), '_');
    for c in name.chars() {
        if c.is_uppercase() && before.is_lowercase() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
        before = c;
    }
    let within = format!("_{snake}_");
    RETIRED.iter().any(|word| match word.strip_suffix('+') {
        Some(part) => within.contains(&format!("_{part}_")),
        None => snake == *word,
    })
}

/// The retired words among the names that a file gives and uses.
#[derive(Default)]
struct Retired(BTreeSet<String>);

impl<'a> Visit<'a> for Retired {
    fn visit_ident(&mut self, i: &'a syn::Ident) {
        let name = i.to_string();
        if is_retired(&name) {
            self.0.insert(name);
        }
    }

    fn visit_item_use(&mut self, _: &'a syn::ItemUse) {}

    fn visit_path_segment(&mut self, s: &'a syn::PathSegment) {
        self.visit_path_arguments(&s.arguments);
    }
}

#[test]
fn no_retired_words() -> Result<()> {
    ensure!(["Door", "open_door", "CLOSED_DOOR", "heard"]
        .iter()
        .all(|n| is_retired(n)));
    ensure!(!["doorbell", "is_heard", "giveaway"]
        .iter()
        .any(|n| is_retired(n)));
    let root = paths::root();
    let mut all = Vec::new();
    files(&root, &mut all)?;
    let mut wrong = Vec::new();
    for path in &all {
        let mut found = Retired::default();
        found.visit_file(&syn::parse_file(&std::fs::read_to_string(path)?)?);
        if !found.0.is_empty() {
            wrong.push(format!(
                "{}: {:?}",
                path.strip_prefix(&root)?.display(),
                found.0
            ));
        }
    }
    ensure!(all.len() > 500 && wrong.is_empty(), "{}", wrong.join("\n"));
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

/// All files and directories below one, as paths from there.
fn tree(root: &Path, at: &str, all: &mut BTreeSet<String>) -> Result<()> {
    for e in std::fs::read_dir(root.join(at))? {
        let e = e?;
        let name = e.file_name().to_string_lossy().into_owned();
        if matches!(name.as_str(), "target" | ".git") {
            continue;
        }
        let path = match at {
            "" => name,
            at => format!("{at}/{name}"),
        };
        if e.file_type()?.is_dir() {
            tree(root, &path, all)?;
        }
        all.insert(path);
    }
    Ok(())
}

/// `a/{b,c}`: `a/b` and `a/c`.
fn alternatives(text: &str) -> Vec<String> {
    let braces = text.split_once('{').and_then(|(before, rest)| {
        let (inner, after) = rest.split_once('}')?;
        Some((before, inner, after))
    });
    let Some((before, inner, after)) = braces else {
        return vec![text.to_string()];
    };
    let each = inner
        .split(',')
        .map(|i| format!("{before}{}{after}", i.trim()));
    each.flat_map(|t| alternatives(&t)).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// The files of the tree, and what is in them.
struct Sources {
    /// Paths, and their ends: a page may leave out where a room lies, and that a module is a file.
    ends: BTreeSet<String>,
    /// The words of each file of Rust.
    rust: BTreeMap<String, BTreeSet<String>>,
}

impl Sources {
    fn read(root: &Path, all: &BTreeSet<String>) -> Result<Sources> {
        let (mut ends, mut rust) = (BTreeSet::new(), BTreeMap::new());
        for path in all {
            for p in [path.as_str(), path.trim_end_matches(".rs")] {
                ends.insert(p.to_string());
                ends.extend(p.match_indices('/').map(|(i, _)| p[i + 1..].to_string()));
            }
            if path.ends_with(".rs") {
                let text = std::fs::read_to_string(root.join(path))?;
                rust.insert(path.clone(), words(&text).map(String::from).collect());
            }
        }
        Ok(Sources { ends, rust })
    }

    /// Is there an item `name` in the module, or of the type, `of`? `name*`: one that begins so.
    fn has_item(&self, of: &str, name: &str) -> bool {
        let is_type = of.starts_with(char::is_uppercase);
        self.rust.iter().any(|(path, words)| {
            let mut rooms = path.trim_end_matches(".rs").split('/');
            let here = match is_type {
                true => words.contains(of),
                false => rooms.any(|r| r == of),
            };
            here && match name.strip_suffix('*') {
                Some(begin) => words.iter().any(|w| w.starts_with(begin)),
                None => words.contains(name),
            }
        })
    }

    /// Does what a page has between two backticks exist? So does whatever is neither a path nor an item.
    fn has(&self, named: &str) -> bool {
        let only = |more: &str| {
            let one = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
            named.chars().all(one)
        };
        // What the build makes is not there before it, and what begins at the root is not of this tree.
        if named.contains('/') && only("_-./") && !named.starts_with('/') {
            // (Kubernetes has names like `underpass.io/node`, below somebody's domain.)
            let domain = named.split('/').next().is_some_and(|d| d.ends_with(".io"));
            let known = self.ends.contains(named.trim_end_matches('/'));
            return domain || named.starts_with("target/") || known;
        }
        match named.rsplit_once("::") {
            Some((of, name)) if only("_:*") => {
                let of = of.rsplit("::").next().unwrap_or(of);
                // (IPv6 addresses are written like items.)
                of.contains(|c: char| c.is_ascii_digit()) || self.has_item(of, name)
            }
            _ => true,
        }
    }
}

/// Paths, items and other pages that the pages name exist.
#[test]
fn pages_name_what_exists() -> Result<()> {
    let root = paths::root();
    let mut all = BTreeSet::new();
    tree(&root, "", &mut all)?;
    let sources = Sources::read(&root, &all)?;
    let (mut missing, mut named) = (Vec::new(), 0);
    for page in all.iter().filter(|p| p.ends_with(".md")) {
        let text = std::fs::read_to_string(root.join(page))?;
        let beside = Path::new(page).parent().unwrap_or(Path::new(""));
        let mut fenced = false;
        for (n, line) in text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            if fenced {
                continue;
            }
            let code = line.split('`').skip(1).step_by(2);
            let code: Vec<String> = code.flat_map(alternatives).collect();
            let links = line
                .split("](")
                .skip(1)
                .filter_map(|l| l.split([')', '#']).next());
            let links = links.filter(|l| !l.contains("://") && !root.join(beside).join(l).exists());
            let gone = code.iter().map(String::as_str).filter(|c| !sources.has(c));
            missing.extend(gone.chain(links).map(|m| format!("{page}:{}: {m}", n + 1)));
            named += code.len();
        }
    }
    ensure!(named > 1000 && missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}
