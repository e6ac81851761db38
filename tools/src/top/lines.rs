//! What each view lists: its columns, and a line for each thing, cleaned of control characters.

use super::sample::{moved, Id, Meter, Seen};
use crate::addr::smcss;
pub use crate::cli::View;
use crate::out::{bytes, clean};
use crate::{pods, ss};
use std::collections::BTreeMap;
use underpass_admin::{PodRow, RailStats, Row, Where};

pub const VIEWS: [View; 3] = [View::Connections, View::Pods, View::Rails];

impl View {
    pub fn title(self) -> &'static str {
        match self {
            View::Connections => "Connections",
            View::Pods => "Pods",
            View::Rails => "Rails",
        }
    }

    pub fn columns(self) -> &'static [Column] {
        match self {
            View::Connections => ENDS,
            View::Pods => PODS,
            View::Rails => RAILS,
        }
    }

    /// Position of the view among `VIEWS`.
    pub fn number(self) -> usize {
        VIEWS.iter().position(|v| *v == self).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Text,
    /// An endpoint, whose port remains when it is cut.
    Address,
    /// Sorted by value, largest first.
    Number,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Column {
    pub head: &'static str,
    pub kind: Kind,
}

const fn text(head: &'static str) -> Column {
    Column {
        head,
        kind: Kind::Text,
    }
}

const fn number(head: &'static str) -> Column {
    Column {
        head,
        kind: Kind::Number,
    }
}

const fn address(head: &'static str) -> Column {
    Column {
        head,
        kind: Kind::Address,
    }
}

const ENDS: &[Column] = &[
    text("Mode"),
    text("Up"),
    number("Out/s"),
    number("In/s"),
    number("Bytes"),
    address("Local Address"),
    address("Peer Address"),
    text("Process"),
    text("Reason"),
    text("Pod"),
];

const PODS: &[Column] = &[
    text(pods::HEAD[0]),
    text(pods::HEAD[1]),
    text(pods::HEAD[2]),
    text(pods::HEAD[3]),
    text(pods::HEAD[4]),
    number(pods::HEAD[5]),
    number(pods::HEAD[6]),
    number(pods::HEAD[7]),
    number("Out/s"),
    number("In/s"),
];

const RAILS: &[Column] = &[
    text("Device"),
    number("Port"),
    number("Links"),
    number("Lanes"),
    number("Bytes/s"),
    number("Writes/s"),
    number("Sent/s"),
    number("Received/s"),
    number("Bytes"),
    number("Failed"),
];

/// The column by which each view is sorted at first.
pub fn first_sort(v: View) -> usize {
    let by = match v {
        View::Connections | View::Pods => "Out/s",
        View::Rails => "Bytes/s",
    };
    let found = v.columns().iter().position(|c| c.head == by);
    found.unwrap_or_default()
}

#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub text: String,
    /// What it is sorted by, in a column of numbers.
    pub value: Option<u64>,
}

impl Cell {
    fn text(s: impl Into<String>) -> Self {
        Cell {
            text: s.into(),
            value: None,
        }
    }

    fn count(n: u64) -> Self {
        Cell {
            text: n.to_string(),
            value: Some(n),
        }
    }

    fn bytes(n: u64) -> Self {
        Cell {
            text: bytes(n),
            value: Some(n),
        }
    }

    fn byte_rate(n: Option<u64>) -> Self {
        Cell {
            text: rate(n),
            value: n,
        }
    }

    fn rate(n: Option<u64>) -> Self {
        Cell {
            text: n.map_or_else(|| "-".into(), |n| n.to_string()),
            value: n,
        }
    }
}

/// Bytes per second.
pub fn rate(n: Option<u64>) -> String {
    n.map_or_else(|| "-".into(), |n| format!("{}/s", bytes(n)))
}

#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub id: Id,
    pub cells: Vec<Cell>,
    /// Further lines about it, for when it is selected.
    pub about: About,
}

/// Which of what was seen a line is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum About {
    End(usize),
    Container(usize),
    Rail(usize),
}

/// The lines of a view, in no order.
pub fn lines(v: View, seen: &Seen, meter: &Meter) -> Vec<Line> {
    match v {
        View::Connections => each(&seen.rows, About::End, |r| end(r, meter)),
        View::Pods => {
            let mut ends: BTreeMap<&Where, Vec<&Row>> = BTreeMap::new();
            for r in &seen.rows {
                if let Some(w) = &r.at {
                    ends.entry(w).or_default().push(r);
                }
            }
            let pods = seen.pods.as_deref().unwrap_or_default();
            each(pods, About::Container, |p| {
                let own = ends.get(&p.at).into_iter().flatten().copied();
                container(p, meter.sum(own))
            })
        }
        View::Rails => each(&seen.stats.rails, About::Rail, |r| rail(r, meter)),
    }
}

fn each<T>(
    all: &[T],
    about: fn(usize) -> About,
    line: impl Fn(&T) -> (Id, Vec<Cell>),
) -> Vec<Line> {
    let numbered = all.iter().enumerate();
    let lines = numbered.map(|(n, t)| {
        let (id, cells) = line(t);
        Line {
            id,
            cells,
            about: about(n),
        }
    });
    lines.collect()
}

fn end(r: &Row, meter: &Meter) -> (Id, Vec<Cell>) {
    let id = Id::end(r);
    let [tx, rx, ..] = meter.of(&id);
    let (sent, received) = moved(r);
    let reason = match ss::promoted(r) {
        true => "-",
        false => ss::Said::of(r.reason).name,
    };
    let whole = |a: &str| Cell::text(smcss(&clean(a), 0, true));
    let cells = vec![
        Cell::text(mode(r)),
        Cell::text(clean(&r.up)),
        Cell::byte_rate(tx),
        Cell::byte_rate(rx),
        Cell::bytes(sent.saturating_add(received)),
        whole(&r.local),
        whole(&r.peer),
        Cell::text(ss::process(r.pid, &r.comm)),
        Cell::text(reason),
        Cell::text(ss::pod(r)),
    ];
    (id, cells)
}

/// The mode without the codes of the reasons.
fn mode(r: &Row) -> String {
    clean(r.mode.split(' ').next().unwrap_or_default())
}

fn container(p: &PodRow, (tx, rx): (Option<u64>, Option<u64>)) -> (Id, Vec<Cell>) {
    let mut cells: Vec<Cell> = pods::words(p).map(Cell::text).into();
    cells.extend([p.smcd, p.smcr, p.tcp].map(Cell::count));
    cells.extend([tx, rx].map(Cell::byte_rate));
    (Id::Container(p.at.clone()), cells)
}

fn rail(r: &RailStats, meter: &Meter) -> (Id, Vec<Cell>) {
    let id = Id::rail(r);
    let [moved, writes, sent, received] = meter.of(&id);
    let cells = vec![
        Cell::text(clean(&r.device)),
        Cell::count(r.port.into()),
        Cell::count(r.links.iter().map(|l| l.up).fold(0, u64::saturating_add)),
        Cell::count(r.links.iter().map(|l| l.lanes).fold(0, u64::saturating_add)),
        Cell::byte_rate(moved),
        Cell::rate(writes),
        Cell::rate(sent),
        Cell::rate(received),
        Cell::bytes(r.bytes),
        Cell::count(r.links_failed),
    ];
    (id, cells)
}

/// What else is known of a line's thing, in words.
pub fn about(a: About, seen: &Seen) -> Vec<String> {
    let mut text = String::new();
    match a {
        About::End(n) => {
            if let Some(r) = seen.rows.get(n) {
                ss::explanation(r, &mut text);
            }
        }
        About::Container(n) => {
            let row = seen.pods.as_ref().ok().and_then(|p| p.get(n));
            text = row.map_or_else(String::new, |p| clean(&p.why_not));
        }
        About::Rail(n) => {
            for l in seen.stats.rails.get(n).iter().flat_map(|r| &r.links) {
                let to = match l.node.is_empty() {
                    true => "other nodes".into(),
                    false => clean(&l.node),
                };
                text.push_str(&format!("to {to}: links up {}, lanes {}\n", l.up, l.lanes));
            }
        }
    }
    text.lines().map(|l| l.trim_start().to_owned()).collect()
}

/// How many ends run over each mode: SMCD, SMCR, TCP.
pub fn modes(rows: &[Row]) -> [usize; 3] {
    ["SMCD", "SMCR", "TCP"].map(|m| rows.iter().filter(|r| mode(r) == m).count())
}
