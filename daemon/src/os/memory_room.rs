//! How much more memory a process may have made charged to it before its memory cgroup is full, or one above that.
//!
//! Rings are charged to who writes them. A pod that gets lanes until its limit is reached would be killed because of them.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// For so long what was read is believed; what was granted since then is counted instead.
const FRESH: Duration = Duration::from_millis(100);
/// A limit at least so large is none (version 1 says "none" by a number near the largest).
const NONE: u64 = 1 << 60;

/// Left of a limit for everything but lanes: an eighth of it, within these.
const LEFT: (u64, u64) = (4 << 20, 256 << 20);

/// Where the cgroups that limit memory are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub top: PathBuf,
    /// The cgroup that is mounted there, as `/proc/PID/cgroup` names it.
    root: String,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Hierarchy {
    /// From the text of `/proc/self/mountinfo`: the memory controller's of version 1, else version 2.
    pub fn of(mountinfo: &str) -> Option<Hierarchy> {
        let found = |fs: &str, option: &str, version| {
            mountinfo.lines().find_map(|l| {
                let (mount, of) = l.split_once(" - ")?;
                let mut of = of.split(' ');
                let here = of.next() == Some(fs);
                let options = of.nth(1)?;
                if !here || !option.is_empty() && options.split(',').all(|o| o != option) {
                    return None;
                }
                let mut f = mount.split(' ').skip(3);
                let root = f.next()?.trim_end_matches('/').to_owned();
                let top = f.next()?.replace("\\040", " ").into();
                Some(Hierarchy { top, root, version })
            })
        };
        found("cgroup", "memory", Version::One).or_else(|| found("cgroup2", "", Version::Two))
    }

    /// The directories of a process's cgroup and of those above it, from what `/proc/PID/cgroup` says of it.
    pub fn levels(&self, cgroups: &str) -> Vec<PathBuf> {
        let of = |l: &str| {
            let mut f = l.splitn(3, ':');
            let (id, controllers, path) = (f.next()?, f.next()?, f.next()?);
            let here = match self.version {
                Version::One => controllers.split(',').any(|c| c == "memory"),
                Version::Two => id == "0" && controllers.is_empty(),
            };
            here.then(|| path.to_owned())
        };
        let Some(path) = cgroups.lines().find_map(of) else {
            return Vec::new();
        };
        // (Seen from a cgroup namespace, others' begin with `..`: what is mounted may be above it.)
        let mut path = path.as_str();
        let above = |p: &&str| p.is_empty() || p.starts_with('/'); // (a name may begin so)
        while let Some(rest) = path.strip_prefix("/..").filter(above) {
            path = rest;
        }
        let path = path.strip_prefix(&self.root).unwrap_or(path);
        let below = Path::new(path.trim_start_matches('/'));
        let mut all: Vec<PathBuf> = below.ancestors().map(|a| self.top.join(a)).collect();
        all.retain(|d| d.is_dir());
        all
    }

    /// What may still be charged at this level for lanes. `None`: it has no limit.
    fn left(&self, level: &Path) -> Option<u64> {
        let text = |f: &str| std::fs::read_to_string(level.join(f)).ok();
        let number = |f: &str| text(f)?.trim().parse::<u64>().ok(); // or "max"
        let (limits, used, cache): (&[&str], _, _) = match self.version {
            Version::One => (
                &["memory.limit_in_bytes"],
                "memory.usage_in_bytes",
                "total_inactive_file ",
            ),
            Version::Two => (
                &["memory.max", "memory.high"],
                "memory.current",
                "inactive_file ",
            ),
        };
        let limit = limits.iter().filter_map(|f| number(f)).min()?;
        if limit >= NONE {
            return None;
        }
        let kept = (limit / 8).clamp(LEFT.0, LEFT.1);
        let most = limit.saturating_sub(kept);
        let used = number(used)?;
        if used < most / 2 {
            return Some(most - used);
        }
        // What is only read from files and not in use is dropped before anybody is killed.
        let stat = text("memory.stat").unwrap_or_default();
        let cached = stat
            .lines()
            .find_map(|l| l.strip_prefix(cache)?.parse().ok());
        Some(most.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
    }
}

/// Of a process's cgroup.
#[derive(Debug)]
pub(crate) struct Room {
    hierarchy: Option<Hierarchy>,
    levels: Vec<PathBuf>,
    /// When it was read, and what was left then and was not granted since. `None`: there is no limit.
    last: Cell<Option<(Duration, Option<u64>)>>,
}

impl Room {
    /// Is there room for so many bytes more? Then they count as used until it is read again.
    pub(crate) fn take(&self, bytes: u64, now: Duration) -> bool {
        let last = self.last.get();
        let last = last.filter(|(at, _)| now.saturating_sub(*at) < FRESH);
        let (at, left) = last.unwrap_or_else(|| (now, self.read()));
        let rest = left.map(|n| n.checked_sub(bytes));
        let (fits, left) = match rest {
            None => (true, None),
            Some(Some(rest)) => (true, Some(rest)),
            Some(None) => (false, left),
        };
        self.last.set(Some((at, left)));
        fits
    }

    fn read(&self) -> Option<u64> {
        let h = self.hierarchy.as_ref()?;
        self.levels.iter().filter_map(|l| h.left(l)).min()
    }
}

/// Those of all processes that are clients.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    hierarchy: Option<Hierarchy>,
    all: HashMap<Vec<PathBuf>, Weak<Room>>,
}

impl Rooms {
    pub(crate) fn here() -> Rooms {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Rooms {
            hierarchy: Hierarchy::of(&text),
            all: HashMap::new(),
        }
    }

    /// That of a process of which `/proc/PID/cgroup` says this.
    pub(crate) fn of(&mut self, cgroups: &str) -> Rc<Room> {
        let levels = self.hierarchy.as_ref().map(|h| h.levels(cgroups));
        let levels = levels.unwrap_or_default();
        if let Some(r) = self.all.get(&levels).and_then(Weak::upgrade) {
            return r;
        }
        self.all.retain(|_, r| r.strong_count() > 0);
        let room = Rc::new(Room {
            hierarchy: self.hierarchy.clone(),
            levels: levels.clone(),
            last: Cell::default(),
        });
        self.all.insert(levels, Rc::downgrade(&room));
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn write(dir: &Path, files: &[(&str, String)]) {
        std::fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            std::fs::write(dir.join(name), text).unwrap();
        }
    }

    fn rooms(top: &Path, version: Version) -> Rooms {
        let hierarchy = Some(Hierarchy {
            top: top.to_owned(),
            root: String::new(),
            version,
        });
        Rooms {
            hierarchy,
            all: HashMap::new(),
        }
    }

    #[test]
    fn finds_the_controller() {
        let two = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let one = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
            35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let both = Hierarchy::of(&format!("{two}{one}")).unwrap();
        assert_eq!((both.version, &*both.root), (Version::One, "/docker/x"));
        assert_eq!(both.top, Path::new("/sys/fs/cgroup/memory"));
        let unified = Hierarchy::of(two).unwrap();
        assert_eq!((unified.version, &*unified.root), (Version::Two, ""));
        assert_eq!(Hierarchy::of("1 2 0:3 / / rw - ext4 /dev/x rw\n"), None);
    }

    /// The tightest level counts; what files have cached does not; an eighth is left.
    #[test]
    fn the_tightest_level() {
        let dir = tempfile::tempdir().unwrap();
        let of = |n: u64| format!("{n}\n");
        let (pod, container) = (dir.path().join("pod"), dir.path().join("pod/c"));
        write(
            &pod,
            &[
                ("memory.max", of(800 * MIB)),
                ("memory.high", "max\n".into()),
                ("memory.current", of(790 * MIB)),
                (
                    "memory.stat",
                    format!("anon 1\ninactive_file {}\n", 190 * MIB),
                ),
            ],
        );
        write(&container, &[("memory.max", "max\n".into())]);
        let mut all = rooms(dir.path(), Version::Two);
        let room = all.of("0::/../pod/c\n");
        assert_eq!(room.read(), Some(100 * MIB));
        assert!(Rc::ptr_eq(&room, &all.of("7:cpu:/x\n0::/pod/c\n")));
        // Less where a container has less.
        write(
            &container,
            &[
                ("memory.max", of(64 * MIB)),
                ("memory.current", of(16 * MIB)),
            ],
        );
        assert_eq!(room.read(), Some(40 * MIB));
        assert_eq!(all.of("0::/elsewhere\n").read(), None, "it is nowhere");
        assert_eq!(all.of("0::/..pod/c\n").read(), None, "another name");
        assert_eq!(all.of("").read(), None);
    }

    #[test]
    fn version_one() {
        let dir = tempfile::tempdir().unwrap();
        let files = |limit: u64, used: u64| {
            let limit = ("memory.limit_in_bytes", format!("{limit}\n"));
            [limit, ("memory.usage_in_bytes", format!("{used}\n"))]
        };
        write(dir.path(), &files(u64::MAX >> 1 & !4095, 1 << 40));
        let a = dir.path().join("a");
        write(&a, &files(64 * MIB, 60 * MIB));
        let mut all = rooms(dir.path(), Version::One);
        let room = all.of("4:memory:/a\n0::/b\n");
        assert_eq!(room.read(), Some(0));
        write(
            &a,
            &[("memory.stat", format!("total_inactive_file {}\n", 20 * MIB))],
        );
        assert_eq!(room.read(), Some(16 * MIB));
        assert_eq!(all.of("4:memory:/\n").read(), None);
    }

    /// It is read ten times a second at most, and what was granted in between counts.
    #[test]
    fn what_was_granted_counts() {
        let dir = tempfile::tempdir().unwrap();
        let used = |n: u64| {
            let used = ("memory.current", format!("{n}\n"));
            write(
                dir.path(),
                &[("memory.max", format!("{}\n", 64 * MIB)), used],
            );
        };
        used(50 * MIB);
        let room = rooms(dir.path(), Version::Two).of("0::/\n");
        let at = Duration::from_millis;
        assert!(room.take(4 * MIB, at(0)) && room.take(2 * MIB, at(10)));
        assert!(!room.take(1, at(20)));
        used(0);
        assert!(!room.take(1, at(99)), "it is not read again so soon");
        assert!(room.take(56 * MIB, at(100)) && !room.take(1, at(100)));
        std::fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        assert!(room.take(u64::MAX, at(200)));
    }
}
