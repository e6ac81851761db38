//! The node's network namespaces, found by its processes.

use std::collections::{HashMap, HashSet};
use underpass_admin::proc;

/// All in which processes are that may be looked at, but for these: with one process each.
pub(crate) fn others(than: &HashSet<u64>) -> HashMap<u64, u32> {
    let mut found = HashMap::new();
    for pid in proc::all() {
        if let Some(n) = proc::netns(pid).filter(|n| !than.contains(n)) {
            found.entry(n).or_insert(pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_one_is_found() {
        let own = proc::own_netns().unwrap();
        let all = others(&HashSet::new());
        assert_eq!(all.get(&own).and_then(|p| proc::netns(*p)), Some(own));
        assert!(!others(&HashSet::from([own])).contains_key(&own));
    }
}
