//! `underpass pods`: the containers of this node, and which of them have the shim.

use crate::cli;
use crate::client::{ask, unexpected};
use crate::out::{self, clean, Outcome};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::{PodRow, Request, Response};

pub fn run(dir: Option<PathBuf>, o: &cli::Pods) -> Outcome {
    match ask(dir, &Request::Pods)? {
        Response::Pods { mut rows, runtime } => {
            rows.retain(|r| o.namespace.as_ref().is_none_or(|n| *n == r.at.namespace));
            match o.json {
                true => out::print_json(&json!({ "runtime": runtime, "rows": rows }))?,
                false => out::print(&table(&rows, &runtime))?,
            }
        }
        other => return Err(unexpected(&other)),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[PodRow], runtime: &str) -> String {
    if runtime.is_empty() {
        return "this daemon does not look after containers (see [pods] in its configuration)\n"
            .into();
    }
    let mut t = format!(
        "{:<20} {:<36} {:<20} {:<6} {:<6} {:>5} {:>5} {:>5}\n",
        "Namespace", "Pod", "Container", "Wanted", "Has it", "SMCD", "SMCR", "TCP"
    );
    let word = |b| if b { "yes" } else { "no" };
    for r in rows {
        t.push_str(&format!(
            "{:<20} {:<36} {:<20} {:<6} {:<6} {:>5} {:>5} {:>5}\n",
            clean(&r.at.namespace),
            clean(&r.at.pod),
            clean(&r.at.container),
            word(r.wanted),
            word(r.injected),
            r.smcd,
            r.smcr,
            r.tcp
        ));
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
