//! Readings of family tables, for the sums.
//!
//! Any process may have many tables, full ones, so readings are made one at a time and end after a while: what was not
//! read then is in the next one ([`crate::clients::families::Families::readable`] says in which order).

use crate::clients::families::{Families, Reading};
use crate::clients::family::{Family, Totals};
use crate::core::Shared;
use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use crate::os::process::ProcId;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedMutexGuard;

/// Longest time of a reading of all tables.
const LIMIT: Duration = Duration::from_secs(2);

/// Reads all family tables; what all families have done.
pub(crate) async fn read_all(shared: &Shared) -> Totals {
    let read = read(shared, Families::readable).await;
    let mut c = shared.borrow_mut();
    c.was_read(&read.0);
    c.families.total()
}

/// Reads the tables of ended families for the last time, and lets them go.
pub(crate) async fn fade(shared: &Shared) {
    if shared.borrow().families.fading().is_empty() {
        return;
    }
    let read = read(shared, Families::fading).await;
    shared.borrow_mut().faded(&read.0);
}

/// Reads the table of a process that is about to be known, if the count of its family begins with what is in it: then it
/// is older than this daemon, and not read yet. Gives the table back; `None`: it could not be read.
pub(crate) async fn begin(
    shared: &Shared,
    (ident, table): (Ident, Foreign),
    of: ProcId,
) -> Option<(Foreign, Option<Totals>)> {
    if !shared.borrow().begins((ident, &table), of) {
        return Some((table, None));
    }
    let work = move || {
        let family = Family::new(ident, table);
        let totals = family.stats();
        (family.into_table(), Some(totals))
    };
    tokio::task::spawn_blocking(work).await.ok()
}

/// Those that were read in time. The turn goes with them, because the next reading must not begin before they are taken
/// in; and it stays with a reading that hangs.
async fn read(
    shared: &Shared,
    which: fn(&Families) -> Vec<Arc<Family>>,
) -> (Vec<Reading>, Option<OwnedMutexGuard<()>>) {
    let turn = shared.borrow().reading.clone();
    let read = async {
        let turn = turn.lock_owned().await;
        let (families, began) = {
            let mut c = shared.borrow_mut();
            c.find_pods();
            (which(&c.families), c.now())
        };
        let work = move || (read_until(&families, began, Instant::now() + LIMIT), turn);
        tokio::task::spawn_blocking(work).await.ok()
    };
    // (The helper looks at the time itself. This is for one that hangs, and for those that wait after it.)
    match tokio::time::timeout(2 * LIMIT, read).await {
        Ok(Some((all, turn))) => (all, Some(turn)),
        _ => (Vec::new(), None),
    }
}

fn read_until(families: &[Arc<Family>], began: Duration, end: Instant) -> Vec<Reading> {
    let mut at = Instant::now();
    let mut all = Vec::new();
    for f in families {
        if at > end {
            break;
        }
        let totals = f.stats();
        let took = at.elapsed();
        at += took;
        all.push(Reading {
            ident: f.ident,
            totals,
            began,
            took,
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::memfd;

    fn family(ino: u64) -> Arc<Family> {
        let fd = memfd::make("t", lane::family::TABLE_BYTES).unwrap();
        Arc::new(Family::new(Ident { dev: 1, ino }, Foreign::new(fd)))
    }

    #[test]
    fn a_reading_ends_in_time() {
        let all = [family(1), family(2)];
        let read = |end| read_until(&all, Duration::ZERO, end).len();
        let now = Instant::now();
        assert_eq!(read(now + Duration::from_secs(60)), 2);
        assert!(now
            .checked_sub(Duration::from_secs(1))
            .is_none_or(|t| read(t) == 0));
    }
}
