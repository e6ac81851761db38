//! What `check` has found out, and the text and JSON for it.

use super::peer::{Peer, Process, Shim};
use crate::out::clean;
use crate::ss;
use lane::proto::reason::Reason;
use serde_json::{json, Value};
use underpass_admin::{Across, Row};

/// One end of the connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct End {
    /// The daemon's row for it, if there is one.
    pub row: Option<Row>,
    /// Why it is on TCP, if known.
    pub reason: Option<u32>,
    pub pid: u32,
    pub comm: String,
    /// Anything else to be said.
    pub note: &'static str,
}

impl End {
    fn new(row: Option<Row>) -> Self {
        match row {
            Some(r) => End {
                // (Nothing is sent here, so one direction or both may not have switched.)
                reason: Some(match ss::promoted(&r) && r.reason == Reason::Ready.code() {
                    true => 0,
                    false => r.reason,
                }),
                pid: r.pid,
                comm: r.comm.clone(),
                note: "",
                row: Some(r),
            },
            None => End::default(),
        }
    }

    /// The test's own end. The shim may not have contacted the daemon yet.
    pub fn here(row: Option<Row>) -> Self {
        let note = if row.is_none() {
            "the daemon does not know it (yet); does the shim load?"
        } else {
            ""
        };
        End {
            note,
            ..End::new(row)
        }
    }

    /// The service's end as the daemon knows it; `told` is the daemon's reason for an end without a row.
    pub fn there(row: Option<Row>, told: u32) -> Self {
        match row {
            Some(_) => End::new(row),
            None => End {
                reason: (told != 0).then_some(told),
                ..End::default()
            },
        }
    }

    /// The service's end, on another node: `told` is the reason that our daemon was told from there.
    pub fn remote(told: u32) -> Self {
        End {
            note: "on another node, from where nothing was received about it",
            ..End::there(None, told)
        }
        .noted(told != 0, "on another node")
    }

    /// The service's end, seen from a container: `told` is the reason that the daemon was told from there.
    pub fn hidden(told: u32) -> Self {
        End {
            note: "not shown in a container; ask on the node",
            ..End::there(None, told)
        }
    }

    fn noted(self, on: bool, note: &'static str) -> Self {
        let note = if on { note } else { self.note };
        End { note, ..self }
    }

    /// The service's end, about which the daemon knows no more than `told`.
    pub fn seen(peer: Peer, told: u32) -> Self {
        let known = End::there(None, told);
        match peer {
            Peer::Elsewhere => End {
                note: "on another node or in another network namespace, and not known here",
                ..known
            },
            Peer::Unaccepted => End {
                note: "the program has not accepted the connection yet",
                ..End::default()
            },
            Peer::Hidden => End {
                note: "held by a process of another user",
                ..known
            },
            Peer::Here(Process { pid, comm, shim }) => {
                let (reason, note) = match shim {
                    // The daemon cannot know this any better: its view is older than the process.
                    Some(Shim::Loaded) => (
                        Some(Reason::Young.code()),
                        "under Underpass, and has not used the connection yet",
                    ),
                    Some(Shim::Off) => (Some(Reason::Config.code()), ""),
                    Some(Shim::Absent) => (Some(Reason::PeerNoShim.code()), ""),
                    None => (known.reason, "held by a process of another user"),
                };
                End {
                    row: None,
                    reason,
                    pid,
                    comm,
                    note,
                }
            }
        }
    }

    fn promoted(&self) -> bool {
        self.row.as_ref().is_some_and(ss::promoted)
    }

    fn lines(&self, label: &str, t: &mut String) {
        match self.reason {
            _ if self.promoted() => t.push_str(&format!("    {label}  promoted\n")),
            Some(code) => ss::end(label, code, t),
            None => t.push_str(&format!("    {label}  {}\n", self.note)),
        }
        if self.pid != 0 {
            t.push_str(&format!(
                "          program: {} (pid {})\n",
                clean(&self.comm),
                self.pid
            ));
        }
        if self.reason.is_some() && !self.note.is_empty() {
            t.push_str(&format!("          note: {}\n", self.note));
        }
    }

    fn json(&self) -> Value {
        json!({
            "known": self.row.is_some(),
            "mode": self.row.as_ref().map(|r| &r.mode),
            "up": self.row.as_ref().map(|r| &r.up),
            "reason": self.reason.map(|c| ss::Said::of(c).json()),
            "pid": self.pid,
            "comm": self.comm,
            "note": self.note,
        })
    }
}

/// Both ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    pub local: String,
    pub peer: String,
    pub here: End,
    pub there: End,
    /// What lies between, if the service is on another node.
    pub across: Option<Across>,
    /// In a container, the daemon shows this end only, and nothing else of the other one can be seen.
    pub one_sided: bool,
    /// Why there is no daemon to ask.
    pub no_daemon: Option<String>,
    /// Did the service hang up during the test?
    pub closed: bool,
}

impl Finding {
    /// Have both ends switched to the lane? An end learns of a direction that the other one has switched only when it
    /// looks; and an end on another node is seen only by its own daemon. Where the other end is not shown: this one
    /// cannot have switched both directions without it.
    pub fn promoted(&self) -> bool {
        let both = || self.here.row.as_ref().is_some_and(|r| r.up == "both");
        let seen = self.across.is_some() || self.there.promoted();
        self.here.promoted() && (seen || (self.is_hidden() && both()))
    }

    /// Is the other end's row not shown? (In a container, or it is in another network namespace than the caller's.)
    fn is_hidden(&self) -> bool {
        self.there.row.is_none()
    }

    /// Not promoted yet, but nothing prevents it.
    pub fn promotable(&self) -> bool {
        let passes = |e: &End| e.reason.is_some_and(passes);
        let road = |a: &Across| a.refusal == 0 && a.channel == "up";
        self.here.row.is_some()
            && passes(&self.here)
            && (passes(&self.there) || (self.is_hidden() && self.here.promoted()))
            && self.across.as_ref().is_none_or(road)
    }

    /// Will waiting longer change nothing?
    pub fn lasting(&self) -> bool {
        let mut known = [&self.here, &self.there]
            .into_iter()
            .filter_map(|e| e.reason);
        known.any(|r| !passes(r) && lasts(r))
    }

    /// The mode that the connection has now.
    pub fn now(&self) -> String {
        match &self.here.row {
            // A lane that only one end has taken moves no bytes yet.
            Some(r) if !r.mode.is_empty() && self.here.promoted() == self.promoted() => {
                clean(&r.mode)
            }
            _ => format!(
                "TCP 0x{:08x}/0x{:08x}",
                self.here.reason.unwrap_or(0),
                self.there.reason.unwrap_or(0)
            ),
        }
    }

    /// The mode that a connection from here to there gets.
    fn mode(&self) -> String {
        match (self.promotable() && !self.promoted(), &self.across) {
            (true, None) if self.here.row.as_ref().is_some_and(|r| r.remote) => "SMCR".into(),
            (true, None) => "SMCD".into(),
            (true, Some(_)) => "SMCR".into(),
            (false, _) => self.now(),
        }
    }

    pub fn text(&self) -> String {
        let how = match (self.promoted(), self.promotable()) {
            (true, _) => "promoted".into(),
            (_, true) => format!("after some use; now {}", self.now()),
            _ => "stays on TCP".into(),
        };
        let mut t = format!(
            "connection {} -> {}\nmode       {} ({how})\n",
            self.local,
            self.peer,
            self.mode()
        );
        if let Some(a) = &self.across {
            across(a, self.here.row.as_ref(), &mut t);
        }
        self.here.lines("here", &mut t);
        match &self.across {
            Some(_) if self.promoted() => t.push_str("    peer  promoted, on another node\n"),
            None if self.promoted() && self.is_hidden() => t.push_str("    peer  promoted\n"),
            _ => self.there.lines("peer", &mut t),
        }
        if let Some(m) = &self.no_daemon {
            t.push_str(&format!("note       {}\n", clean(m)));
        }
        if self.closed {
            t.push_str("note       the service closed the connection during the test\n");
        }
        t
    }

    pub fn json(&self) -> Value {
        json!({
            "local": self.local,
            "peer": self.peer,
            "mode": self.mode(),
            "now": self.now(),
            "promoted": self.promoted(),
            "promotable": self.promoted() || self.promotable(),
            "here": self.here.json(),
            "there": self.there.json(),
            "across": self.across.as_ref().map(|a| json!({
                "own": a.own,
                "node": a.node,
                "listed": a.listed,
                "channel": a.channel,
                "trouble": a.trouble,
                "refusal": (a.refusal != 0).then(|| ss::Said::of(a.refusal).json()),
                "links": a.links,
                "rail": self.here.row.as_ref().and_then(|r| r.rail.as_ref()),
            })),
            "daemon": self.no_daemon.is_none(),
            "closed": self.closed,
        })
    }
}

/// What lies between the two nodes, from here to there.
fn across(a: &Across, here: Option<&Row>, t: &mut String) {
    let or = |s: &str, other: &str| match s.is_empty() {
        true => other.to_owned(),
        false => clean(s),
    };
    let node = match a.listed {
        true => or(&a.node, "another node"),
        false => "an address that no [[peer]] lists (outside, or translated on the way)".into(),
    };
    t.push_str(&format!(
        "nodes      {} -> {node}\n",
        or(&a.own, "this one")
    ));
    if a.listed {
        let why = match a.trouble.is_empty() {
            true => String::new(),
            false => format!(": {}", clean(&a.trouble)),
        };
        let state = or(&a.channel, "not known");
        t.push_str(&format!("channel    {state}{why}\n"));
    }
    if a.refusal != 0 {
        let s = ss::Said::of(a.refusal);
        t.push_str(&format!("RDMA       none: {} ({})\n", s.text, s.name));
    } else if let Some(r) = here.and_then(|r| r.rail.as_ref()) {
        let device = clean(&r.device);
        let (port, n) = (r.port, a.links);
        t.push_str(&format!(
            "RDMA       {device} port {port}, link {}; {n} links work\n",
            r.link
        ));
    } else if a.listed {
        t.push_str(&format!("RDMA       usable here; {} links work\n", a.links));
    } else {
        t.push_str("RDMA       usable here\n");
    }
}

/// Reasons that only mean that a connection is not promoted yet.
fn passes(code: u32) -> bool {
    matches!(
        Reason::from_code(code),
        Some(Reason::None | Reason::Young | Reason::Waiting | Reason::Ready | Reason::Idle)
    )
}

/// All reasons except those that may disappear within seconds, such as that of a busy daemon.
fn lasts(code: u32) -> bool {
    !matches!(
        Reason::from_code(code),
        Some(
            Reason::PeerDeclined
                | Reason::NoDaemon
                | Reason::TimeoutDaemon
                | Reason::NotEstablished
                | Reason::RingFull
                | Reason::UnknownNode
                | Reason::DaemonLost
                | Reason::RailDown
                | Reason::NotAccepted
                | Reason::Unreachable
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: &str, reason: Reason) -> Option<Row> {
        Some(Row {
            mode: mode.into(),
            reason: reason.code(),
            ..Row::default()
        })
    }

    fn ends(here: End, there: End) -> Finding {
        Finding {
            here,
            there,
            ..Finding::default()
        }
    }

    #[test]
    fn verdicts_follow_from_both_ends() {
        let tcp = |here, there| {
            ends(
                End::here(row("TCP", here)),
                End::there(row("TCP", there), 0),
            )
        };
        let smcd = || row("SMCD", Reason::None);
        let f = ends(End::here(smcd()), End::there(smcd(), 0));
        assert!(f.promoted() && f.now() == "SMCD");
        let mut f = ends(End::here(smcd()), End::default());
        assert!(!f.promoted(), "nobody has said so of the other end");
        f.across = Some(Across::default());
        assert!(f.promoted(), "only its daemon sees it");
        // One end has switched, and the other has not looked yet; either of the two.
        let tcp_row = row("TCP", Reason::Ready);
        for (here, there) in [(smcd(), tcp_row.clone()), (tcp_row, smcd())] {
            let f = ends(End::here(here), End::there(there, 0));
            assert!(!f.promoted() && f.promotable() && !f.lasting());
            assert!(f.mode() == "SMCD" && f.now().starts_with("TCP"), "{f:?}");
        }
        let f = tcp(Reason::Waiting, Reason::Young);
        assert!(!f.promoted() && f.promotable() && !f.lasting());
        let f = tcp(Reason::Waiting, Reason::Bypassed);
        assert!(
            !f.promotable() && f.lasting(),
            "the other end will not do it"
        );
        let f = tcp(Reason::TimeoutDaemon, Reason::Young);
        assert!(
            !f.promotable() && !f.lasting(),
            "a busy daemon gets less busy"
        );
        // In a container, or from one network namespace to another.
        let mut f = ends(End::here(smcd()), End::hidden(0));
        assert!(!f.promoted() && f.promotable() && f.mode() == "SMCD");
        f.here.row.iter_mut().for_each(|r| r.up = "both".into());
        assert!(f.promoted() && f.now() == "SMCD");
        assert!(f.text().ends_with("    peer  promoted\n"), "{}", f.text());
        let mut f = ends(
            End::here(row("TCP", Reason::Waiting)),
            End::hidden(Reason::PeerNoShim.code()),
        );
        f.one_sided = true;
        assert!(!f.promoted() && !f.promotable() && f.lasting());
        let f = ends(End::here(None), End::there(row("TCP", Reason::Young), 0));
        assert!(!f.promotable(), "our own end must be known");
    }

    #[test]
    fn an_end_without_a_row_is_judged_by_what_can_be_seen() {
        let waiting = || End::here(row("TCP", Reason::Waiting));
        let process = |shim| {
            Peer::Here(Process {
                pid: 5,
                comm: "x".into(),
                shim,
            })
        };
        let told = Reason::PeerNoShim.code();
        let f = ends(waiting(), End::seen(Peer::Elsewhere, 0));
        assert!(!f.promotable() && !f.lasting());
        let f = ends(waiting(), End::seen(Peer::Unaccepted, told));
        assert!(!f.promotable() && !f.lasting(), "it may still accept");
        let f = ends(waiting(), End::seen(Peer::Hidden, told));
        assert!(!f.promotable() && f.lasting(), "the daemon could look");
        let f = ends(waiting(), End::seen(process(Some(Shim::Loaded)), told));
        assert!(f.promotable(), "the daemon has not met this process yet");
        assert!(
            f.text()
                .contains("mode       SMCD (after some use; now TCP)"),
            "{}",
            f.text()
        );
        let f = ends(waiting(), End::seen(process(Some(Shim::Off)), 0));
        assert_eq!(
            (f.there.reason, f.lasting()),
            (Some(Reason::Config.code()), true)
        );
        let f = ends(waiting(), End::seen(process(Some(Shim::Absent)), 0));
        assert_eq!((f.there.reason, f.lasting()), (Some(told), true));
    }
}
