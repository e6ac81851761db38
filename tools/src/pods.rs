//! `underpass pods`: the containers of this node, and which of them have the shim.

use crate::cli;
use crate::client::{ask, unexpected};
use crate::out::{self, clean, Failure, Outcome};
use serde_json::json;
use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::{PodRow, Request, Response};

/// The columns.
pub const HEAD: [&str; 8] = [
    "Namespace",
    "Pod",
    "Container",
    "Wanted",
    "Has it",
    "SMCD",
    "SMCR",
    "TCP",
];

/// Instead of a table.
pub const NONE: &str =
    "this daemon does not look after containers (see [pods] in its configuration)";

pub fn run(dir: Option<PathBuf>, o: &cli::Pods) -> Outcome {
    let (rows, runtime) = rows(dir, o.namespace.as_deref())?;
    match o.json {
        true => out::print_json(&json!({ "runtime": runtime, "rows": rows }))?,
        false => out::print(&table(&rows, &runtime))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The containers (of a namespace), and where the daemon asks for them; empty: nowhere.
pub fn rows(
    dir: Option<PathBuf>,
    namespace: Option<&str>,
) -> Result<(Vec<PodRow>, String), Failure> {
    match ask(dir, &Request::Pods)? {
        Response::Pods { mut rows, runtime } => {
            rows.retain(|r| namespace.is_none_or(|n| n == r.at.namespace));
            Ok((rows, runtime))
        }
        other => Err(unexpected(&other)),
    }
}

/// What the first columns say of a container.
pub fn words(r: &PodRow) -> [String; 5] {
    let word = |b| String::from(if b { "yes" } else { "no" });
    [
        clean(&r.at.namespace),
        clean(&r.at.pod),
        clean(&r.at.container),
        word(r.wanted),
        word(r.injected),
    ]
}

fn line(words: &[impl Display; 5], counts: [impl Display; 3]) -> String {
    let ([namespace, pod, container, wanted, injected], [smcd, smcr, tcp]) = (words, counts);
    format!("{namespace:<20} {pod:<36} {container:<20} {wanted:<6} {injected:<6} {smcd:>5} {smcr:>5} {tcp:>5}\n")
}

fn table(rows: &[PodRow], runtime: &str) -> String {
    if runtime.is_empty() {
        return format!("{NONE}\n");
    }
    let [namespace, pod, container, wanted, injected, counts @ ..] = HEAD;
    let mut t = line(&[namespace, pod, container, wanted, injected], counts);
    for r in rows {
        t.push_str(&line(&words(r), [r.smcd, r.smcr, r.tcp]));
        if !r.why_not.is_empty() {
            t.push_str(&format!("    {}\n", clean(&r.why_not)));
        }
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use underpass_admin::Where;

    #[test]
    fn a_table() {
        let row = PodRow {
            at: Where {
                namespace: "shop\u{1b}".into(),
                pod: "web-0".into(),
                container: "web".into(),
                ..Where::default()
            },
            wanted: true,
            why_not: "no room".into(),
            smcd: 3,
            ..PodRow::default()
        };
        let t = table(&[row], "/run/nri/nri.sock");
        let lines: Vec<&str> = t.lines().collect();
        let words: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(words[1..], ["web-0", "web", "yes", "no", "3", "0", "0"]);
        assert!(
            !t.contains('\u{1b}'),
            "nothing reaches the terminal as it is"
        );
        assert_eq!(lines[2], "    no room");
        assert!(table(&[], "").contains("does not look after"));
    }
}
