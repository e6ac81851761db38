//! The report on a program and its children.

use super::process::{Cause, Seen};
use crate::out::clean;
use serde_json::{json, Value};
use std::process::ExitStatus;

pub fn text(all: &[Seen]) -> String {
    let mut t = format!(
        "{:<8} {:<16} {:<8} {:<10} Program\n",
        "Pid", "Name", "Library", "Daemon"
    );
    for s in all {
        let carries = match (&s.library, &s.cause) {
            (Some(_), _) => "yes",
            (None, Some(Cause::Hidden | Cause::Starting)) => "?",
            _ => "no",
        };
        t.push_str(&format!(
            "{:<8} {:<16} {:<8} {:<10} {}\n",
            s.pid,
            clean(&s.comm),
            carries,
            s.daemon.name(),
            clean(&s.program)
        ));
        if let Some(c) = &s.cause {
            t.push_str(&format!("    {}: {}\n", c.name(), clean(&c.text())));
        }
        if !s.daemon.text().is_empty() {
            let said = clean(&s.daemon.text());
            t.push_str(&format!("    {}: {said}\n", s.daemon.name()));
        }
    }
    if all.is_empty() {
        t.push_str("no process lived long enough to be looked at: nothing can be said\n");
        return t;
    }
    let fine = all.iter().filter(|s| s.fine()).count();
    t.push_str(&format!(
        "{fine} of {} carry the library and reach a daemon\n",
        all.len()
    ));
    t
}

/// How the program that was run ended.
pub fn ending(status: Option<ExitStatus>, by_itself: bool, wait_s: u64) -> String {
    match (status, by_itself) {
        (Some(s), true) => format!("the program ended with {s}\n"),
        _ => format!("the program was told to end after {wait_s} s\n"),
    }
}

pub fn json(all: &[Seen]) -> Value {
    let one = |s: &Seen| {
        json!({
            "pid": s.pid,
            "comm": s.comm,
            "program": s.program,
            "library": s.library,
            "cause": s.cause.as_ref().map(|c| json!({ "name": c.name(), "text": c.text() })),
            "daemon": s.daemon.name(),
            "note": s.daemon.text(),
            "fine": s.fine(),
        })
    };
    all.iter().map(one).collect()
}
