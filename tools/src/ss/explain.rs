//! `ss -e`: a row in words. The texts of the reasons come from the table in the contract crate, so that the tool says
//! about a code exactly what shim and daemon mean by it.

use crate::out::{bytes, clean};
use lane::proto::reason::Reason;
use serde_json::{json, Map, Value};
use underpass_admin::Row;

/// A reason code in words.
pub struct Said {
    pub code: u32,
    pub name: &'static str,
    pub text: &'static str,
    pub advice: &'static str,
}

impl Said {
    /// The meaning of `code`; also for codes that this build does not know.
    pub fn of(code: u32) -> Self {
        match Reason::from_code(code) {
            Some(r) => {
                let i = r.info();
                Said {
                    code,
                    name: i.name,
                    text: i.text,
                    advice: i.advice,
                }
            }
            None => Said {
                code,
                name: "unknown",
                text: "a reason that this version does not know",
                advice: "upgrade this tool, or look at the version of the other end",
            },
        }
    }

    pub fn json(&self) -> Value {
        json!({ "code": format!("0x{:08x}", self.code), "name": self.name, "text": self.text, "advice": self.advice })
    }
}

/// One end's reason, as two lines of text.
pub fn end(label: &str, code: u32, text: &mut String) {
    let s = Said::of(code);
    text.push_str(&format!(
        "    {label:<5} 0x{:08x} {}: {}\n",
        s.code, s.name, s.text
    ));
    if code != 0 {
        text.push_str(&format!("          what to do: {}\n", s.advice));
    }
}

pub fn process(pid: u32, comm: &str) -> String {
    match (pid, comm.is_empty()) {
        (0, _) => "process not known".into(),
        (pid, true) => format!("pid {pid}"),
        (pid, false) => format!("{} (pid {pid})", clean(comm)),
    }
}

/// The container of the process.
fn container(r: &Row) -> String {
    let Some(w) = &r.at else {
        return String::new();
    };
    let [namespace, pod, name] = [&w.namespace, &w.pod, &w.container].map(|s| clean(s));
    format!(" in {namespace}/{pod}/{name}")
}

/// The other processes under the shim that hold the socket.
fn others(r: &Row) -> String {
    let all = r.pids.iter().filter(|p| **p != r.pid);
    let all: Vec<String> = all.map(u32::to_string).collect();
    match all.is_empty() {
        true => String::new(),
        false => format!(", also held by pid {}", all.join(", ")),
    }
}

/// Is only one direction on the ring, with a reason why the other is on TCP?
fn one_way(r: &Row) -> bool {
    matches!(r.up.as_str(), "tx" | "rx") && r.reason != 0
}

/// The indented lines below a row.
pub fn lines(r: &Row, text: &mut String) {
    text.push_str("    ");
    text.push_str(&process(r.pid, &r.comm));
    text.push_str(&container(r));
    text.push_str(&others(r));
    if matches!(r.role.as_str(), "client" | "server") {
        text.push_str(&format!(", {}", r.role));
    }
    if matches!(r.state.as_str(), "INIT" | "LISTEN" | "CLOSED") {
        text.push('\n');
        return;
    }
    match r.up.as_str() {
        "both" => text.push_str("; both directions on the ring"),
        "tx" => text.push_str("; sending on the ring, receiving on TCP"),
        "rx" => text.push_str("; receiving on the ring, sending on TCP"),
        _ => {}
    }
    if let Some(rail) = &r.rail {
        text.push_str(&format!(
            "; over {} port {}, link {}",
            clean(&rail.device),
            rail.port,
            rail.link
        ));
    }
    text.push_str(&format!(
        "; ring {} out, {} in; TCP {} out, {} in\n",
        bytes(r.lane_tx_bytes),
        bytes(r.lane_rx_bytes),
        bytes(r.tcp_tx_bytes),
        bytes(r.tcp_rx_bytes)
    ));
    if r.peer_pid != 0 {
        let peer = process(r.peer_pid, &r.peer_comm);
        text.push_str(&format!("    other end: {peer}\n"));
    }
    if super::promoted(r) && !one_way(r) {
        return;
    }
    end("here", r.reason, text);
    if r.peer_reason != 0 {
        end("peer", r.peer_reason, text);
    }
}

/// The members that `-e` adds to a JSON row.
pub fn members(r: &Row, m: &mut Map<String, Value>) {
    let connected = !matches!(r.state.as_str(), "INIT" | "LISTEN" | "CLOSED");
    let reason = |on: bool, code| {
        if on {
            Said::of(code).json()
        } else {
            Value::Null
        }
    };
    let tcp = connected && (!super::promoted(r) || one_way(r));
    m.insert("reason".into(), reason(tcp, r.reason));
    m.insert(
        "peer_reason".into(),
        reason(tcp && r.peer_reason != 0, r.peer_reason),
    );
    for (key, value) in [
        ("pid", json!(r.pid)),
        ("comm", json!(r.comm)),
        ("pids", json!(r.pids)),
        ("peer_pid", json!(r.peer_pid)),
        ("peer_comm", json!(r.peer_comm)),
        ("netns", json!(r.netns)),
        ("at", json!(r.at)),
        ("role", json!(r.role)),
        ("up", json!(r.up)),
        ("rail", json!(r.rail)),
        ("link", json!(r.link)),
        ("lane", json!(r.lane)),
        ("tx_epoch", json!(r.tx_epoch)),
        ("rx_epoch", json!(r.rx_epoch)),
        ("lane_tx_bytes", json!(r.lane_tx_bytes)),
        ("lane_rx_bytes", json!(r.lane_rx_bytes)),
        ("tcp_tx_bytes", json!(r.tcp_tx_bytes)),
        ("tcp_rx_bytes", json!(r.tcp_rx_bytes)),
    ] {
        // `-R` has a `role` of its own. Both say the same; the column uses the words of smcss.
        m.entry(key).or_insert(value);
    }
}
