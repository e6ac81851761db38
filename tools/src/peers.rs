//! `underpass peers`: the other nodes, and, for those without a channel, the reason.

use crate::certs::date;
use crate::cli;
use crate::client::{ask, unexpected};
use crate::out::{self, clean, Outcome};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use underpass_admin::{NodeState, PeerState, RefusedState, Request, Response};

pub fn run(dir: Option<PathBuf>, o: &cli::Json) -> Outcome {
    match ask(dir, &Request::Peers)? {
        Response::Peers {
            node,
            peers,
            refused,
        } => match o.json {
            true => out::print_json(&json!({ "node": node, "peers": peers, "refused": refused }))?,
            false => out::print(&table(&node, &peers, &refused))?,
        },
        other => return Err(unexpected(&other)),
    }
    Ok(ExitCode::SUCCESS)
}

fn expiry(t: Option<i64>) -> String {
    t.map_or("-".into(), date)
}

fn table(node: &NodeState, peers: &[PeerState], refused: &[RefusedState]) -> String {
    if node.name.is_empty() {
        return "this daemon has no peers (see [[peer]] in its configuration)\n".into();
    }
    let mut t = format!(
        "node {}, listens at {}, certificate until {}, {} ends wait for other nodes\n",
        clean(&node.name),
        clean(&node.listens),
        expiry(node.expires),
        node.waiting
    );
    if !node.trouble.is_empty() {
        t.push_str(&format!("  certificate files: {}\n", clean(&node.trouble)));
    }
    t.push_str(&format!(
        "{:<20} {:<24} {:<5} {:<21} {:<8} {:<21} Lookups\n",
        "Peer", "Address", "State", "Since", "Version", "Certificate until"
    ));
    for p in peers {
        let line = format!(
            "{:<20} {:<24} {:<5} {:<21} {:<8} {:<21} {}",
            clean(&p.name),
            clean(&p.address),
            clean(&p.state),
            date(p.since),
            clean(&p.release),
            expiry(p.expires),
            p.lookups
        );
        t.push_str(line.trim_end());
        t.push('\n');
        if !p.reason.is_empty() {
            t.push_str(&format!("    {}\n", clean(&p.reason)));
        }
        if p.false_claims != 0 {
            let n = p.false_claims;
            t.push_str(&format!(
                "    spoke for an address of another node {n} times\n"
            ));
        }
    }
    if !refused.is_empty() {
        t.push_str("Refused\n");
    }
    for r in refused {
        t.push_str(&format!(
            "    {} ({} times, last {}): {}\n",
            clean(&r.address),
            r.times,
            date(r.at),
            clean(&r.reason)
        ));
    }
    t
}
