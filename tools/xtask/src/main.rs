//! The project's task runner: what `make` targets and CI do, in one place, so that a developer's
//! command and CI's run the same steps. It prepares nothing on the system itself: Debian packages
//! are `tools/install-deps.sh`'s business, which runs first because this program needs a linker.
//!
//! It must never report what it did not see: the summary counts result lines of the test programs
//! and exit codes, and a step that printed no results counts as a failure.

mod build;
mod checks;
mod deb;
mod elf;
mod fuzz;
mod image;
mod nodes;
mod package;
mod previous;
mod steps;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use steps::{Kind, Step, Then};

/// Places everything is found at, fixed once.
pub struct Tree {
    /// The workspace.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
}

impl Tree {
    fn find() -> Self {
        // The task runner runs from the workspace it was built in.
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().unwrap_or(root);
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |t| root.join(t));
        Tree { root, target }
    }

    /// A command that runs in the workspace.
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut c = Command::new(program);
        c.args(args).current_dir(&self.root);
        c
    }

    /// A cargo that does not see that this program was started by another: ring compiles anew when these variables come or go.
    pub fn cargo(&self, args: &str) -> Command {
        let mut c = self.command("cargo", &args.split_whitespace().collect::<Vec<_>>());
        let ours = ["CARGO_MANIFEST_", "CARGO_PKG_"];
        let all = std::env::vars().map(|(k, _)| k);
        all.filter(|k| ours.iter().any(|o| k.starts_with(o)))
            .for_each(|k| {
                c.env_remove(k);
            });
        c
    }
}

const USAGE: &str = "\
task TARGET [arguments]

  build         release programs and the shim, in target/underpass
  image         an OCI image of the daemon, target/underpass/image.tar
  deb           a package for Debian, target/underpass/underpass_VERSION_amd64.deb
  demo          TCP and Underpass side by side, then a transfer through a daemon's death
  test          build, model, unit, loom, symbols, containers, integration; one summary
  lint          formatting, clippy, rustdoc, dependencies, names in Python programs
  dependencies  the last part of lint: cargo-deny, cargo-machete and pyflakes
  compilers     Debian 13's compiler; lane and shim for aarch64; the oldest compiler promised, if there
  miri          the contract's unit tests under Miri, if there is a toolchain that has it
  asan          the contract's tests with the address sanitizer
  ci            lint without rustdoc and cargo-machete, everything of test, half of suites and cluster, a third of lab
  model         the state space of the protocol between nodes
  unit          unit and property tests of all crates, and the inputs that fuzzing has kept
  engine        the RDMA data engine, and two whole daemons, over simulated verbs
  mutants       changes of single places of the switch, the data engine and the daemon's rails, each of which must
                fail a test (see tests/mutants)
  loom          ring, doorbell and lane under every interleaving
  fuzz          libFuzzer on every decoder of foreign bytes, 20 s each (arguments: names of targets;
                UNDERPASS_FUZZ_SECONDS)
  integration   real programs under the shim (arguments: names of tests)
  containers    containers of a real runtime that the daemon gives the shim (arguments: names of tests)
  cluster       pods of a real Kubernetes cluster (arguments: names of tests; `lab`: two nodes with RDMA in virtual
                machines; `measure`: what a node pays, 20 min); the first time, it is built (6 min)
  packaging     image and package, each made, and used where nothing else is changed (arguments: names of tests)
  previous      builds the previous version, and has the two beside each other: daemons, shims, tools, a chart's upgrade
  lab           virtual machines with RDMA rails (arguments: names of tests)
  suites        other people's test suites, those that are quick (arguments: names of suites)
  suites-full   all of them, in all modes; writes the table in docs/compatibility.md
  programs      programs as people run them (arguments: names); writes the table there, too
  soak          ten minutes of seeded chaos (UNDERPASS_SOAK_SECONDS, UNDERPASS_SOAK_SEED)
  full          everything of ci, and what does not fit there
  symbols       does the shim load everywhere?
  bench         every case side by side, target/bench/report.json
  bench-quick   the same, short
  bench-lab     TCP, rsockets, SMC-R and Underpass between two virtual machines";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    if std::env::var_os(build::BETWEEN).is_some() {
        let done = build::rustc(args.collect()).status();
        return code(done.is_ok_and(|s| s.success()));
    }
    let name = args.next().unwrap_or_default();
    task(&Tree::find(), &name, args.collect())
}

fn task(tree: &Tree, name: &str, rest: Vec<String>) -> ExitCode {
    let built = || made("build", build::all(tree));
    match name {
        "build" => code(built()),
        "image" => code(built() && made("image", image::make(tree))),
        "deb" => code(built() && made("deb", deb::make(tree))),
        "demo" => code(built() && program(tree, "demo", &rest)),
        "bench" => code(built() && program(tree, "bench", &rest)),
        "bench-quick" => {
            let quick = ["--quick".to_string()]
                .into_iter()
                .chain(rest)
                .collect::<Vec<_>>();
            code(built() && program(tree, "bench", &quick))
        }
        "bench-lab" => code(built() && agent(tree) && program(tree, "bench-lab", &rest)),
        "lint" => steps::run(tree, lint(tree).chain(lint_more(tree)).collect()),
        "dependencies" => {
            let all = checks::dependencies(tree).into_iter();
            steps::run(tree, all.chain([checks::machete(tree)]).collect())
        }
        "compilers" => steps::run(tree, checks::compilers(tree)),
        "miri" => steps::run(tree, vec![checks::miri(tree)]),
        "asan" => steps::run(tree, vec![checks::asan(tree)]),
        "model" => steps::run(tree, vec![model(tree, true)]),
        "unit" => steps::run(tree, vec![unit(tree)]),
        "engine" => steps::run(tree, vec![engine(tree), worlds(tree)]),
        "fuzz" => steps::run(tree, fuzz::steps(tree, &rest)),
        "mutants" => code(mutants(tree, &rest)),
        "loom" => steps::run(tree, vec![loom(tree)]),
        "symbols" => steps::run(tree, vec![build_step(), symbols(tree)]),
        "integration" => steps::run(tree, vec![build_step(), integration(tree, &rest)]),
        "containers" => steps::run(tree, vec![build_step(), nodes::containers(tree, &rest)]),
        "cluster" => {
            let [image, tests] = [made_here(tree, "image"), nodes::cluster(tree, &rest)];
            steps::run(
                tree,
                vec![build_step(), nodes::kubernetes(tree), image, tests],
            )
        }
        "packaging" => {
            let [image, deb] = ["image", "deb"].map(|n| made_here(tree, n));
            steps::run(
                tree,
                vec![build_step(), image, deb, nodes::packaging(tree, &rest)],
            )
        }
        "previous" => {
            let mut all = vec![
                build_step(),
                nodes::kubernetes(tree),
                made_here(tree, "image"),
            ];
            all.extend(nodes::previous(tree));
            steps::run(tree, all)
        }
        "previous-build" => code(made("previous", previous::make(tree))),
        "lab" => steps::run(tree, vec![build_step(), nodes::lab(tree, &rest)]),
        "test" => steps::run(tree, test(tree)),
        "soak" => steps::run(tree, vec![build_step(), soak(tree)]),
        "suites" => steps::run(tree, vec![build_step(), suites(tree, &rest, false)]),
        "suites-full" => steps::run(tree, vec![build_step(), suites(tree, &rest, true)]),
        "programs" => steps::run(tree, all_programs(tree, &rest)),
        "ci" => ci_within_budget(tree),
        "full" => steps::run(tree, full(tree)),
        "" | "-h" | "--help" | "help" => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        other => {
            eprintln!("no task {other:?}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn ci_within_budget(tree: &Tree) -> ExitCode {
    let all = ci(tree);
    let budget = ci_budget(&all);
    println!("CI may take {budget} s of {CI_MAX} s");
    match budget > CI_MAX {
        true => ExitCode::FAILURE,
        false => steps::run(tree, all),
    }
}

fn code(ok: bool) -> ExitCode {
    if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Builds the program that lab machines take their orders from, which is a test's.
fn agent(tree: &Tree) -> bool {
    made("build", build::agent(tree))
}

/// Did it succeed? Otherwise it says why not.
fn made(what: &str, done: Result<(), String>) -> bool {
    done.map_err(|e| eprintln!("{what}: {e}")).is_ok()
}

/// Runs the mutants; what they print is the result.
fn mutants(tree: &Tree, args: &[String]) -> bool {
    let mut c = tree.cargo("test -p underpass-tests --test mutants --");
    c.args(args).status().is_ok_and(|s| s.success())
}

/// Runs one of the programs of `benches/`.
fn program(tree: &Tree, name: &str, args: &[String]) -> bool {
    let path = tree.target.join("release").join(name);
    match Command::new(&path)
        .args(args)
        .current_dir(&tree.root)
        .status()
    {
        Ok(s) => s.success(),
        Err(e) => {
            eprintln!("{}: {e}", path.display());
            false
        }
    }
}

fn test(tree: &Tree) -> Vec<Step> {
    vec![
        build_step(),
        model(tree, false),
        unit(tree),
        loom(tree),
        symbols(tree),
        nodes::containers(tree, &[]),
        integration(tree, &[]),
    ]
}

/// Seconds that CI may take on a cold machine with two processors.
const CI_MAX: u64 = 75 * 60;

/// What `.ci/run` may take: these steps, and preparing the system for them.
fn ci_budget(steps: &[Step]) -> u64 {
    steps::PACKAGES + steps::budget(steps)
}

/// Everything that CI runs.
fn ci(tree: &Tree) -> Vec<Step> {
    all_with(
        tree,
        [
            suites_short(tree),
            nodes::lab_short(tree),
            nodes::cluster_short(tree),
        ],
    )
}

/// The same with these of the suites, of the lab and of the cluster.
fn all_with(tree: &Tree, [suites, lab, cluster]: [Step; 3]) -> Vec<Step> {
    let mut all: Vec<Step> = lint(tree).chain(test(tree)).collect();
    all.push(suites);
    all.push(lab);
    // (What is left to wait for.)
    all.push(Step {
        budget: 90,
        ..nodes::kubernetes(tree).since("symbols")
    });
    all.push(made_here(tree, "image"));
    all.push(cluster);
    all
}

/// The same whole, and what does not fit there.
fn full(tree: &Tree) -> Vec<Step> {
    let whole = [
        suites(tree, &[], false),
        nodes::lab(tree, &[]),
        nodes::cluster(tree, &[]),
    ];
    let mut all = all_with(tree, whole);
    all.push(model(tree, true));
    all.push(worlds(tree));
    all.push(nodes::cluster_lab(tree));
    all.extend(lint_more(tree));
    all.extend(checks::compilers(tree));
    all.push(checks::miri(tree));
    all.push(checks::asan(tree));
    all.extend(fuzz::steps(tree, &[]));
    all.push(made_here(tree, "deb"));
    all.push(nodes::packaging(tree, &[]));
    all.extend(nodes::previous(tree));
    all.push(inject(tree));
    all.push(handovers(tree));
    all.push(soak(tree));
    all
}

/// What CI has of it.
fn lint(tree: &Tree) -> impl Iterator<Item = Step> {
    let all = [
        Step::new("fmt", Kind::Check, 10, tree.cargo("fmt --all --check")),
        Step::new(
            "clippy",
            Kind::Check,
            180,
            tree.cargo("clippy --workspace --all-targets -- -D warnings"),
        ),
    ];
    all.into_iter().chain(checks::dependencies(tree))
}

/// The rest: a compilation each.
fn lint_more(tree: &Tree) -> [Step; 3] {
    [
        // (The shim's library and the tool's have one name.)
        doc(tree, "doc", 60, "--workspace --exclude underpass-shim"),
        doc(tree, "doc shim", 15, "-p underpass-shim"),
        checks::machete(tree),
    ]
}

/// Links in comments lead somewhere, also to what is private.
fn doc(tree: &Tree, name: &'static str, budget: u64, what: &str) -> Step {
    let mut c = tree.cargo(&format!("doc --no-deps --document-private-items {what}"));
    c.env(
        "RUSTDOCFLAGS",
        "-D warnings -A rustdoc::private_intra_doc_links",
    );
    Step::new(name, Kind::Check, budget, c)
}

fn build_step() -> Step {
    Step {
        name: "build",
        kind: Kind::Build,
        command: None,
        then: Then::Commands(Vec::new()),
        since: None,
        budget: 480,
        skip: None,
    }
}

/// `whole`: with the explorations that leave one rule out each, which must find the harm.
fn model(tree: &Tree, whole: bool) -> Step {
    let mut c = tree.cargo("test --release -p underpass-model");
    if !whole {
        c.args(["--", "--skip", "mutations"]);
    }
    Step::new("model", Kind::Tests, if whole { 240 } else { 130 }, c)
}

fn unit(tree: &Tree) -> Step {
    // Debug assertions and overflow checks are on here. (The shim's crate has no unit tests: it would hook the test
    // program itself.)
    let c = tree
        .cargo("test -p underpass-lane -p underpass-rdma -p underpass-ibv -p underpass-nri -p underpass-pods -p underpass-kube -p underpass-certificates -p underpass-signer -p underpass-kubelet -p underpass-webhook -p underpass-admin -p underpassd -p underpass-world -p underpass -p underpass-probe -p underpass-fuzz -p xtask --tests --no-run --message-format json-render-diagnostics");
    Step {
        // (Four minutes of two processors; the others wait much of their time.)
        then: Then::Built(&["two_daemons"]),
        ..Step::new("unit", Kind::Tests, 540, c)
    }
}

/// The data engine, and two whole daemons, over simulated verbs: thousands of seeds, and the stories. (`unit` runs them, too.)
fn engine(tree: &Tree) -> Step {
    let c = tree.cargo("test -p underpass-rdma -p underpass-world --tests");
    Step::new("engine", Kind::Tests, 240, c)
}

/// The lane's world with 45,000 cases.
fn worlds(tree: &Tree) -> Step {
    let c = tree.cargo("test --release -p underpass-lane --test lane_random");
    Step::new("worlds", Kind::Tests, 300, c)
}

fn loom(tree: &Tree) -> Step {
    let mut c = tree.cargo("test --release -p underpass-lane --lib");
    c.env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", tree.target.join("loom"));
    Step::new("loom", Kind::Tests, 90, c)
}

fn symbols(tree: &Tree) -> Step {
    Step::new(
        "symbols",
        Kind::Tests,
        80,
        tree.cargo("test -p underpass-tests --test loads"),
    )
}

/// Real programs: two test programs at a time ([`steps`]), one test of each, because they share two processors.
fn integration(tree: &Tree, names: &[String]) -> Step {
    let all = steps::integration_tests(tree);
    let mut build = tree.cargo("test -p underpass-tests --no-run");
    for t in &all {
        build.arg("--test").arg(t);
    }
    let one = |test: &String| {
        let mut c = tree.cargo("test -p underpass-tests --test");
        c.args([test, "--", "--test-threads=1"]);
        if !steps::root() {
            // Network namespaces and the BPF proof need root; the summary counts these as skipped.
            c.args(["--skip", "root_"]);
        }
        c.args(names);
        c
    };
    let mut step = Step::new("integration", Kind::Tests, 900, build);
    step.then = Then::Commands(all.iter().map(one).collect());
    step
}

/// Chaos for ten minutes, or as long as the environment says; a minute of it is among the integration
/// tests.
fn soak(tree: &Tree) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test soak -- --nocapture");
    if std::env::var_os("UNDERPASS_SOAK_SECONDS").is_none() {
        c.env("UNDERPASS_SOAK_SECONDS", "600");
    }
    Step::new("soak", Kind::Tests, 780, c)
}

/// Each system call of the shim with each error, at every rate and in both modes.
fn inject(tree: &Tree) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test inject");
    c.env("UNDERPASS_INJECT_ALL", "1");
    Step::new("inject", Kind::Tests, 400, c)
}

/// Other people's test suites; the test program runs them one after the other by itself.
fn suites(tree: &Tree, names: &[String], full: bool) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test suites --");
    c.args(names);
    if full {
        c.env("UNDERPASS_SUITES", "full");
    }
    let budget = if full { 28_800 } else { 480 };
    Step::new("suites", Kind::Tests, budget, c)
}

/// CPython's and Redis's; the others take minutes, some of them to compile.
fn suites_short(tree: &Tree) -> Step {
    Step {
        budget: 200,
        ..suites(tree, &without(&["memcached", "curl", "tokio"]), false)
    }
}

/// What a test program is told to leave these out.
fn without(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| format!("--skip={n}")).collect()
}

/// Programs as they are packaged; the test program runs them one after the other by itself.
fn programs(tree: &Tree, names: &[String]) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test programs --");
    c.args(names);
    Step::new("programs", Kind::Tests, 900, c)
}

/// These; without names, also those that hand connections to others.
fn all_programs(tree: &Tree, names: &[String]) -> Vec<Step> {
    let mut all = vec![build_step(), programs(tree, names)];
    if names.is_empty() {
        all.push(handovers(tree));
    }
    all
}

/// Programs that hand connections to others, all of them.
fn handovers(tree: &Tree) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test handovers -- --nocapture");
    c.env("UNDERPASS_HANDOVERS", "all");
    Step::new("handovers", Kind::Tests, 480, c)
}

/// A step that this program does, as for `make NAME`.
fn made_here(tree: &Tree, name: &'static str) -> Step {
    let own = std::env::current_exe().unwrap_or_default();
    Step::new(
        name,
        Kind::Check,
        30,
        tree.command(&own.to_string_lossy(), &[name]),
    )
}

/// Tests that need root.
fn as_root(step: Step) -> Step {
    match steps::root() {
        true => step,
        false => {
            let why = format!("{} needs root", step.name);
            step.skipped(why)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ci_fits_its_time() {
        let budget = ci_budget(&ci(&Tree::find()));
        assert!(budget <= CI_MAX, "{budget} s");
    }
}
