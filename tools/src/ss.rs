//! `underpass ss`: the daemon's rows in the form of `smcss`.
//!
//! The columns, their widths and what the options select are those of smc-tools, so that scripts written for it work.
//! Values that `smcss` reads from the kernel's SMC sockets come from the lane; if a lane has no such value, the
//! column shows dashes, never an invented value.

mod column;
mod explain;
mod watch;

use crate::addr::smcss;
use crate::cli;
use crate::out::{self, Failure, Outcome};
use crate::{client, diag};
use column::{Ctx, DEBUG, SMCD, SMCR};
use serde_json::{json, Map, Value};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::{Request, Response, Row, Where};

pub use explain::{end, lines as explanation, process, Said};

/// Width of an address column.
const ADDRESS: usize = 23;

pub fn run(dir: Option<PathBuf>, o: &cli::Ss) -> Outcome {
    if let Some(every) = o.watch {
        return watch::run(every, o.json, || {
            let rows = rows(dir.clone())?;
            Ok(match o.json {
                true => format!("{}\n", json(&rows, o)),
                false => table(&rows, o),
            })
        });
    }
    let rows = rows(dir)?;
    match o.json {
        true => out::print_json(&json(&rows, o))?,
        false => out::print(&table(&rows, o))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// All that the daemon shows.
fn rows(dir: Option<PathBuf>) -> Result<Vec<Row>, Failure> {
    match client::ask(dir, &Request::Ss)? {
        Response::Ss { rows } => {
            let left_out: u64 = rows.iter().map(|r| r.left_out).sum();
            if left_out > 0 {
                eprintln!("underpass: {left_out} sockets are not shown: a user or pod has too many of them");
            }
            Ok(rows)
        }
        other => Err(client::unexpected(&other)),
    }
}

/// The connections (of a namespace's pods), as without options.
pub fn connected(dir: Option<PathBuf>, namespace: Option<&str>) -> Result<Vec<Row>, Failure> {
    let mut o = cli::Ss::default();
    o.namespace = namespace.map(String::from);
    let mut rows = rows(dir)?;
    rows.retain(|r| wanted(r, &o));
    Ok(rows)
}

/// Does this connection run over shared memory or RDMA?
pub fn promoted(r: &Row) -> bool {
    matches!(r.mode.as_str(), "SMCD" | "SMCR")
}

fn wanted(r: &Row, o: &cli::Ss) -> bool {
    let state = match r.state.as_str() {
        "LISTEN" => o.listening || o.all,
        "INIT" => o.all,
        _ => !o.listening,
    };
    let namespace = || r.at.as_ref().map(|w| &w.namespace);
    let at = o.namespace.is_none() || o.namespace.as_ref() == namespace();
    state && at && (!o.smcd || r.mode == "SMCD") && (!o.smcr || r.mode == "SMCR")
}

/// Whose connection it is.
pub fn pod(r: &Row) -> String {
    let at = r.at.as_ref();
    let name = |w: &Where| format!("{}/{}/{}", w.namespace, w.pod, w.container);
    out::clean(&at.map_or_else(|| "-".into(), name))
}

/// The blocks of columns that the options add.
fn blocks(o: &cli::Ss) -> impl Iterator<Item = &'static [column::Column]> {
    [(o.debug, DEBUG), (o.smcr, SMCR), (o.smcd, SMCD)]
        .into_iter()
        .filter_map(|(on, b)| on.then_some(b))
}

fn intf(r: &Row) -> String {
    match r.intf.parse::<u32>() {
        Ok(n) if r.intf.len() < 4 => format!("{n:04x}"),
        _ => out::clean(&r.intf),
    }
}

/// Shutdown mask by inode, if wanted.
fn masks(o: &cli::Ss) -> HashMap<u64, u8> {
    if !o.debug {
        return HashMap::new();
    }
    let known = diag::sockets().into_iter();
    known.filter_map(|s| Some((s.inode, s.shut?))).collect()
}

fn table(rows: &[Row], o: &cli::Ss) -> String {
    let ctx = Ctx::new(rows, masks(o));
    let mut text = String::new();
    let mut head = String::from(
        "State          UID   Inode   Local Address           Peer Address            Intf Mode ",
    );
    for c in blocks(o).flatten() {
        head.push_str(&format!("{:<w$} ", c.head, w = c.width));
    }
    let pods = o.pods || o.namespace.is_some();
    if pods {
        head.push_str("Pod");
    }
    text.push_str(head.trim_end());
    text.push('\n');
    for r in rows.iter().filter(|r| wanted(r, o)) {
        let mut line = line(r, &ctx, o);
        if pods {
            line.push_str(&pod(r));
        }
        text.push_str(line.trim_end());
        text.push('\n');
        if o.explain {
            explain::lines(r, &mut text);
        }
    }
    text
}

fn line(r: &Row, ctx: &Ctx<'_>, o: &cli::Ss) -> String {
    let mut s = format!("{:<14} {:05} {:07} ", out::clean(&r.state), r.uid, r.inode);
    if r.state == "INIT" {
        return s;
    }
    s.push_str(&format!(
        "{:<ADDRESS$} ",
        smcss(&out::clean(&r.local), ADDRESS, o.wide)
    ));
    if r.state == "LISTEN" {
        return s;
    }
    s.push_str(&format!(
        "{:<ADDRESS$} ",
        smcss(&out::clean(&r.peer), ADDRESS, o.wide)
    ));
    s.push_str(&format!("{} ", intf(r)));
    if r.state == "CLOSED" {
        return s;
    }
    s.push_str(&format!("{:<4} ", out::clean(&r.mode)));
    if promoted(r) {
        for c in blocks(o).flatten() {
            let v = (c.value)(r, ctx).unwrap_or_else(|| "-".into());
            s.push_str(&format!("{v:<w$} ", w = c.width));
        }
    }
    s
}

fn json(rows: &[Row], o: &cli::Ss) -> Value {
    let ctx = Ctx::new(rows, masks(o));
    let object = |r: &Row| {
        let mut m = Map::new();
        m.insert("state".into(), json!(r.state));
        m.insert("uid".into(), json!(r.uid));
        m.insert("inode".into(), json!(r.inode));
        m.insert("local".into(), json!(r.local));
        m.insert("peer".into(), json!(r.peer));
        m.insert("intf".into(), json!(intf(r)));
        m.insert("mode".into(), json!(r.mode));
        for c in blocks(o).flatten() {
            let v = if promoted(r) {
                (c.value)(r, &ctx)
            } else {
                None
            };
            m.insert(
                c.head.to_lowercase(),
                v.map_or(Value::Null, |v| json!(v.trim())),
            );
        }
        if o.explain {
            explain::members(r, &mut m);
        }
        Value::Object(m)
    };
    rows.iter().filter(|r| wanted(r, o)).map(object).collect()
}
