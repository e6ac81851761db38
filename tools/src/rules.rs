//! `underpass deny`, `allow` and `rules`: which connections may have lanes.

use crate::ask;
use crate::cli;
use crate::client::{ask, unexpected};
use crate::out::{self, clean, Outcome};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::rules::{Action, Rule};
use underpass_admin::{Request, Response};

fn rule(action: Action, about: &cli::About) -> Rule {
    Rule {
        action,
        programs: about.program.clone(),
        uids: about.uid.clone(),
        addresses: about.address.clone(),
        ports: about.port.clone(),
        namespaces: about.namespace.clone(),
    }
}

/// Puts a rule before all others.
pub fn add(dir: Option<PathBuf>, action: Action, about: &cli::About) -> Outcome {
    let rule = rule(action, about);
    told(ask(dir, &Request::Rule { rule })?)
}

fn told(response: Response) -> Outcome {
    match response {
        Response::Told { ends, later } => {
            out::print(&ask::told(ends, later, "told what the rules say now"))?;
            Ok(ExitCode::SUCCESS)
        }
        other => Err(unexpected(&other)),
    }
}

/// Shows the rules, or takes one away.
pub fn rules(dir: Option<PathBuf>, o: &cli::Rules) -> Outcome {
    if let Some(number) = o.delete {
        return told(ask(dir, &Request::Unrule { number })?);
    }
    match ask(dir, &Request::Rules)? {
        Response::Rules { added, configured } if o.json => {
            out::print_json(&json!({"added": added, "configured": configured}))?;
        }
        Response::Rules { added, configured } => out::print(&table(&added, &configured))?,
        other => return Err(unexpected(&other)),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(added: &[Rule], configured: &[Rule]) -> String {
    let mut t = String::new();
    for (n, r) in added.iter().enumerate() {
        t.push_str(&format!("{:>6}  {}\n", n + 1, clean(&r.to_string())));
    }
    for r in configured {
        t.push_str(&format!("config  {}\n", clean(&r.to_string())));
    }
    if t.is_empty() {
        t.push_str("no rules: every connection may have a lane\n");
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_in_their_order() {
        assert!(table(&[], &[]).starts_with("no rules"));
        let deny = Rule::default();
        let allow = Rule {
            action: Action::Allow,
            programs: vec!["a\u{1b}[1m".into()],
            ..Rule::default()
        };
        let t = table(std::slice::from_ref(&allow), std::slice::from_ref(&deny));
        let lines: Vec<_> = t.lines().collect();
        assert!(lines[0].starts_with("     1  allow program a") && !t.contains('\u{1b}'));
        assert_eq!(lines[1], "config  deny all");
    }
}
