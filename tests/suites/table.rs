//! The table of suites in docs/compatibility.md.

use super::{Mode, Outcome};
use underpass_tests::page::{self, Line, Table};

pub const TABLE: Table = Table {
    name: "suites",
    by: "make suites-full",
    text: "\
## Test suites

Every test of a suite has the same result in each mode as without the shim: bare; with the shim
switched off (`UNDERPASS=off`); as `underpass run` starts programs; with every connection promoted at
its first call (eager); the same in rings of one page; the same while all connections are sent down and
up at random. *Unsteady*: a result that differed once and not again.",
    columns: &[
        "suite",
        "version",
        "tests",
        Mode::Off.name(),
        Mode::Default.name(),
        Mode::Eager.name(),
        Mode::Page.name(),
        Mode::Chaos.name(),
    ],
};

pub fn line(name: &str, version: &str, outcomes: &[Outcome]) -> Line {
    let tests = outcomes.first().map_or(0, |o| o.tests);
    let cell = |m: &Mode| {
        let Some(o) = outcomes.iter().find(|o| o.mode == *m) else {
            return page::NOT_RUN.to_owned();
        };
        let mut t = match o.differs.len() {
            0 => "same".to_owned(),
            n => format!("**{n} differ**"),
        };
        if o.unsteady > 0 {
            t += &format!(", {} unsteady", o.unsteady);
        }
        if o.promoted > 0 {
            t += &format!(", {} ends promoted", o.promoted);
        }
        t
    };
    let first = [name.to_owned(), version.to_owned(), tests.to_string()];
    let cells: Vec<String> = first
        .into_iter()
        .chain(Mode::ALL.iter().map(cell))
        .collect();
    page::line(&cells)
}
