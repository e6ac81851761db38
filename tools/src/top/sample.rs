//! One look at the daemon, and what changed since the one before.

use crate::out::Failure;
use crate::{ask, pods, ss};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use underpass_admin::{PodRow, RailStats, Row, Stats, Where};

/// What the daemon has said.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When, on a clock that only goes forward.
    pub at: Duration,
    pub rows: Vec<Row>,
    /// Containers; or why there are none to see: not everybody may, and not every daemon looks after them.
    pub pods: Result<Vec<PodRow>, String>,
    pub stats: Box<Stats>,
}

/// Asks for everything: a view that was not shown has rates, too, when it is.
pub fn look(
    dir: Option<PathBuf>,
    namespace: Option<&str>,
    clock: impl FnOnce() -> Duration,
) -> Result<Seen, Failure> {
    let rows = ss::connected(dir.clone(), namespace)?;
    let at = clock();
    let stats = ask::counters(dir.clone())?;
    let pods = pods::rows(dir, namespace).map_err(|f| f.message);
    Ok(Seen {
        at,
        rows,
        pods: pods.and_then(|(rows, runtime)| match runtime.is_empty() {
            true => Err(pods::NONE.into()),
            false => Ok(rows),
        }),
        stats,
    })
}

/// Whose line it is, from one look to the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Id {
    /// An end of a connection: inode and peer. (Inodes are used again.)
    End(u64, String),
    Container(Where),
    /// Device and port.
    Rail(String, u8),
}

impl Id {
    pub fn end(r: &Row) -> Self {
        Id::End(r.inode, r.peer.clone())
    }

    pub fn rail(r: &RailStats) -> Self {
        Id::Rail(r.device.clone(), r.port)
    }
}

/// Bytes that have left an end and come to it, whichever way.
pub fn moved(r: &Row) -> (u64, u64) {
    (
        r.lane_tx_bytes.saturating_add(r.tcp_tx_bytes),
        r.lane_rx_bytes.saturating_add(r.tcp_rx_bytes),
    )
}

/// Counters of one line: out and in of an end; bytes, writes, messages sent and received of a rail.
type Counters = [u64; 4];
/// The same per second. `None`: not known, since there is nothing to compare with.
pub type Rates = [Option<u64>; 4];

/// Remembers the counters of the last look.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    at: Duration,
    counters: BTreeMap<Id, Counters>,
    rates: BTreeMap<Id, Rates>,
}

impl Meter {
    pub fn take(&mut self, seen: &Seen) {
        let ends = seen.rows.iter().map(|r| {
            let (tx, rx) = moved(r);
            (Id::end(r), [tx, rx, 0, 0])
        });
        let rails = seen.stats.rails.iter().map(|r| {
            let counters = [r.bytes, r.writes, r.messages_sent, r.messages_received];
            (Id::rail(r), counters)
        });
        let now: BTreeMap<Id, Counters> = ends.chain(rails).collect();
        let elapsed = seen.at.saturating_sub(self.at);
        let rates = now.iter().filter_map(|(id, c)| {
            let before = self.counters.get(id)?;
            let each = |i: usize| per_second(before[i], c[i], elapsed);
            Some((id.clone(), [each(0), each(1), each(2), each(3)]))
        });
        self.rates = rates.collect();
        self.counters = now;
        self.at = seen.at;
    }

    pub fn of(&self, id: &Id) -> Rates {
        self.rates.get(id).copied().unwrap_or_default()
    }

    /// Out and in of all ends that `which` selects; `None` if no rate of theirs is known.
    pub fn sum<'a>(&self, ends: impl Iterator<Item = &'a Row>) -> (Option<u64>, Option<u64>) {
        let add = |sum: Option<u64>, rate: Option<u64>| match (sum, rate) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        };
        ends.map(|r| self.of(&Id::end(r)))
            .fold((None, None), |(tx, rx), r| (add(tx, r[0]), add(rx, r[1])))
    }
}

/// A counter that has become smaller began anew.
fn per_second(before: u64, now: u64, elapsed: Duration) -> Option<u64> {
    let more = u128::from(now.checked_sub(before)?) * 1_000_000_000;
    let rate = more.checked_div(elapsed.as_nanos())?;
    Some(u64::try_from(rate).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_over_the_time_that_has_passed() {
        let row = |inode, tx, tcp| Row {
            inode,
            lane_tx_bytes: tx,
            tcp_rx_bytes: tcp,
            ..Row::default()
        };
        let seen = |at, rows| Seen {
            at: Duration::from_millis(at),
            rows,
            pods: Ok(Vec::new()),
            stats: Box::default(),
        };
        let mut m = Meter::default();
        m.take(&seen(1000, vec![row(1, 500, 0), row(2, 900, 0)]));
        assert_eq!(m.of(&Id::end(&row(1, 0, 0))), [None; 4], "the first look");
        let rows = vec![row(1, 1500, 40), row(2, 100, 0), row(3, 7, 7)];
        m.take(&seen(1500, rows.clone()));
        let of = |i: usize| m.of(&Id::end(&rows[i]));
        assert_eq!(of(0), [Some(2000), Some(80), Some(0), Some(0)]);
        assert_eq!(of(1)[0], None, "it began anew");
        assert_eq!(of(2), [None; 4], "a new one");
        assert_eq!(m.sum(rows.iter()), (Some(2000), Some(80)));
        assert_eq!(m.sum([].into_iter()), (None, None));
        assert_eq!(per_second(0, 5, Duration::ZERO), None);
        assert_eq!(
            per_second(0, u64::MAX, Duration::from_nanos(1)),
            Some(u64::MAX)
        );
    }
}
