//! How much more memory a process may have made charged to it before its memory cgroup is full, or one above that.
//!
//! Rings are charged to who writes them. A pod that gets lanes until its limit is reached would be killed because of them.
//! What was granted is charged when it is touched, which may be much later: until then it is promised.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// For so long what was read is believed.
const FRESH: Duration = Duration::from_millis(100);
/// For so long it is believed how much of what was granted is not touched yet: to find out, each file is asked.
const LOOK: Duration = Duration::from_secs(1);
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

/// What a tenant has been granted, in bytes.
pub(crate) struct Granted<F> {
    /// All that it has now, touched or not.
    pub held: u64,
    /// All that it ever got: this only grows, and may wrap.
    pub ever: u64,
    /// Finds out how much of it is not touched yet.
    pub untouched: F,
}

/// What was found out about that.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Duration,
    untouched: u64,
    ever: u64,
}

/// Of a process's cgroup.
#[derive(Debug)]
pub(crate) struct Room {
    hierarchy: Option<Hierarchy>,
    levels: Vec<PathBuf>,
    /// When it was read, and what was left then. `None`: there is no limit.
    last: Cell<Option<(Duration, Option<u64>)>>,
    look: Cell<Option<Look>>,
}

impl Room {
    /// Is there room for so many bytes more, although all that was granted may be touched at any time? (Whoever is told yes
    /// grants them.)
    pub(crate) fn has(
        &self,
        bytes: u64,
        now: Duration,
        granted: Granted<impl FnOnce() -> u64>,
    ) -> bool {
        let Some(left) = self.left(now) else {
            return true;
        };
        if granted.held.saturating_add(bytes) <= left {
            return true; // even if nothing of it is touched
        }
        let look = self.look.get();
        let look = look.filter(|l| now.saturating_sub(l.at) < LOOK);
        let look = look.unwrap_or_else(|| {
            let untouched = (granted.untouched)();
            // What is touched in between counts twice rather than not at all.
            self.last.set(None);
            Look {
                at: now,
                untouched,
                ever: granted.ever,
            }
        });
        self.look.set(Some(look));
        // What was touched since then counts twice: what is left is less by that. What was given back since then as well.
        let promised = look
            .untouched
            .saturating_add(granted.ever.wrapping_sub(look.ever));
        let left = self.left(now);
        left.is_none_or(|n| promised.saturating_add(bytes) <= n)
    }

    pub(crate) fn is_limited(&self, now: Duration) -> bool {
        self.left(now).is_some()
    }

    /// What is left.
    fn left(&self, now: Duration) -> Option<u64> {
        let last = self.last.get();
        let last = last.filter(|(at, _)| now.saturating_sub(*at) < FRESH);
        let (at, left) = last.unwrap_or_else(|| (now, self.read()));
        self.last.set(Some((at, left)));
        left
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

    /// Of version 2, as if it were mounted here.
    #[cfg(test)]
    pub(crate) fn at(top: &Path) -> Rooms {
        let hierarchy = Some(Hierarchy {
            top: top.to_owned(),
            root: String::new(),
            version: Version::Two,
        });
        Rooms {
            hierarchy,
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
            look: Cell::default(),
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
        let mut all = Rooms::at(dir.path());
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
        let mut all = Rooms::at(dir.path());
        all.hierarchy.as_mut().unwrap().version = Version::One;
        let room = all.of("4:memory:/a\n0::/b\n");
        assert_eq!(room.read(), Some(0));
        write(
            &a,
            &[("memory.stat", format!("total_inactive_file {}\n", 20 * MIB))],
        );
        assert_eq!(room.read(), Some(16 * MIB));
        assert_eq!(all.of("4:memory:/\n").read(), None);
    }

    /// A tenant that touches what it was granted at some later time, and has other memory.
    struct Tenant {
        dir: tempfile::TempDir,
        room: Rc<Room>,
        held: u64,
        ever: u64,
        touched: u64,
        other: u64,
        looks: u32,
        /// That it uses so much, its cgroup says.
        written: Option<u64>,
    }

    impl Tenant {
        fn new(limit: u64, other: u64) -> Tenant {
            let dir = tempfile::tempdir().unwrap();
            let room = Rooms::at(dir.path()).of("0::/\n");
            let t = Tenant {
                dir,
                room,
                held: 0,
                ever: 0,
                touched: 0,
                other,
                looks: 0,
                written: None,
            };
            t.limit(format!("{limit}\n"));
            t
        }

        fn limit(&self, text: String) {
            write(self.dir.path(), &[("memory.max", text)]);
        }

        fn used(&self) -> u64 {
            self.other + self.touched
        }

        /// It wants so much more, at this time in ms.
        fn gets(&mut self, bytes: u64, ms: u64) -> bool {
            if self.written.replace(self.used()) != Some(self.used()) {
                let used = format!("{}\n", self.used());
                write(self.dir.path(), &[("memory.current", used)]);
            }
            let untouched = self.held - self.touched;
            let granted = Granted {
                held: self.held,
                ever: self.ever,
                untouched: || {
                    self.looks += 1;
                    untouched
                },
            };
            let yes = self.room.has(bytes, Duration::from_millis(ms), granted);
            if yes {
                self.held += bytes;
                self.ever += bytes;
            }
            yes
        }
    }

    /// What was granted counts until it is touched, however long that takes; then it is part of what is used.
    #[test]
    fn what_was_granted_counts() {
        let mut t = Tenant::new(64 * MIB, 6 * MIB); // 8 MiB are left
        assert!(t.gets(40 * MIB, 0) && t.gets(10 * MIB, 10));
        assert_eq!(t.looks, 0, "all of it fits, touched or not");
        for ms in [20, 99, 100, 1000, 60_000] {
            assert!(!t.gets(1, ms), "{ms}");
        }
        t.touched = 25 * MIB;
        assert!(!t.gets(1, 61_000));
        t.touched = 50 * MIB;
        assert!(!t.gets(1, 63_000));
        (t.held, t.touched) = (10 * MIB, 10 * MIB);
        assert!(t.gets(30 * MIB, 65_000) && t.gets(10 * MIB, 65_010));
        assert!(!t.gets(1, 65_020));
        // Others that get full count as well.
        t.other = 30 * MIB;
        assert!(!t.gets(1, 70_000));
        t.limit("max\n".into());
        assert!(t.gets(1 << 50, 71_000));
    }

    /// What is touched after the limit was read and before somebody looks is not forgotten.
    #[test]
    fn touched_before_the_look() {
        let mut t = Tenant::new(64 * MIB, 6 * MIB);
        assert!(t.gets(40 * MIB, 0));
        t.touched = 40 * MIB;
        assert!(!t.gets(20 * MIB, 50), "10 MiB are left");
        assert!(t.gets(10 * MIB, 60) && !t.gets(1, 70));
    }

    /// The limit is read ten times a second at most, and files are asked once a second at most.
    #[test]
    fn not_looked_at_more_often() {
        let mut t = Tenant::new(64 * MIB, 50 * MIB);
        assert!(t.gets(6 * MIB, 0));
        for ms in 0..1000 {
            assert!(!t.gets(1, ms));
        }
        assert_eq!(t.looks, 1);
    }

    /// What is granted after a look counts until the next one, whoever of the tenant gets it.
    #[test]
    fn what_is_granted_after_a_look() {
        let mut t = Tenant::new(64 * MIB, 6 * MIB);
        assert!(t.gets(30 * MIB, 0));
        t.touched = 30 * MIB;
        assert!(t.gets(5 * MIB, 200) && t.gets(5 * MIB, 200));
        assert_eq!(t.looks, 1);
        // (Another process of it, whose cgroup is another one.)
        (t.held, t.ever) = (t.held + 10 * MIB, t.ever + 10 * MIB);
        assert!(!t.gets(1, 300));
        assert_eq!(t.looks, 1);
        assert_eq!(t.used() + t.held - t.touched, 56 * MIB);
    }

    /// 300 lanes that were idle for long all become busy, to 300 processes.
    #[test]
    fn idle_lanes_that_become_busy() {
        const FIRST: u64 = 452 << 10;
        const CHUNK: u64 = 4 * MIB;
        let (limit, other) = (256 * MIB, 20 * MIB);
        let mut t = Tenant::new(limit, other);
        assert!((0..300).all(|i| t.gets(FIRST, i)));
        t.touched = t.held / 3;
        let mut chunks = 0;
        for second in 100..120 {
            for lane in 0..300 {
                chunks += u64::from(t.gets(CHUNK, second * 1000 + lane * 3));
                // Some fill what they have, some do not.
                if lane % 50 == 0 {
                    t.touched = (t.touched + lane * 30_000).min(t.held);
                }
                assert!(t.used() + (t.held - t.touched) <= limit - limit / 8);
            }
        }
        assert_eq!(chunks, (limit - limit / 8 - other - 300 * FIRST) / CHUNK);
        assert!(t.looks <= 20, "{}", t.looks);
    }
}
