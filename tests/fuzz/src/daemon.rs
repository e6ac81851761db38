//! Decoders in the daemon's own crate: messages of other nodes' daemons, its configuration, family tables, the file of rules,
//! what `/proc` says of a process.

use crate::input::{pieces, Input};
use bytes::BytesMut;
use lane::family::{state, Conn, Header, CONNS, HOLDERS, TABLE_BYTES};
use std::mem::{offset_of, size_of};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use underpass_admin::proc;
use underpass_admin::rules::{Action, Rule};
use underpassd::clients::family::{home, Family};
use underpassd::config::Config;
use underpassd::nodes::peers::msg::{Frames, Msg};
use underpassd::os::fds::Foreign;
use underpassd::os::memfd::Ident;
use underpassd::os::memory_room::Hierarchy;
use underpassd::rules::{self, Rules, Subject};

/// What comes over a channel, in pieces.
pub(crate) fn peers(data: &[u8]) {
    let mut frames = Frames::default();
    for piece in pieces(data) {
        frames.room().extend_from_slice(piece);
        loop {
            match frames.take() {
                Ok(Some(m)) => again(&m),
                Ok(None) => break,
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    return;
                }
            }
        }
    }
}

/// What was understood can be said, and then means the same.
fn again(m: &Msg) {
    let mut b = BytesMut::new();
    m.encode(&mut b);
    let mut frames = Frames::default();
    frames.room().extend_from_slice(&b);
    assert_eq!(frames.take().as_ref(), Ok(&Some(m.clone())));
    assert_eq!(frames.take(), Ok(None));
}

/// The configuration's text.
pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match toml::from_str::<Config>(text) {
        Err(e) => assert!(!e.to_string().is_empty()),
        Ok(c) => match c.check() {
            Err(e) => assert!(!e.to_string().is_empty()),
            Ok(()) => {
                let nodes = c.directory().expect("checked");
                assert_eq!(nodes.is_some(), !c.peer.is_empty());
                assert!(c.control_port().is_ok() && c.ring_log2 <= c.ring_max_log2);
                let _ = c.limits();
            }
        },
    }
}

/// The file of rules that an administrator has added. What cannot be followed denies everything.
pub(crate) fn rule(data: &[u8]) {
    let dir = std::env::temp_dir().join(format!("underpass-fuzz-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(rules::FILE), data).unwrap();
    let mut all = Rules::default();
    all.keep_in(&dir);
    let [added, configured] = all.shown();
    assert!(configured.is_empty());
    let wanted = match serde_json::from_slice::<Vec<Rule>>(data) {
        Err(_) => vec![Rule::default()],
        Ok(mut rules) => {
            let can = |r: &Rule| rules::check(std::slice::from_ref(r)).is_ok();
            rules
                .iter_mut()
                .filter(|r| !can(r))
                .for_each(|r| *r = Rule::default());
            rules
        }
    };
    assert_eq!(added, wanted);
    let end = Subject {
        program: "a",
        uid: 1,
        addresses: [([10, 0, 0, 1], 80).into(), ([10, 0, 0, 2], 81).into()],
        namespace: Some("n"),
    };
    let denied = all.deny(&end);
    assert!(denied || added.first() != Some(&Rule::default()));
    assert!(!denied || added.iter().any(|r| r.action == Action::Deny));
    // What is added comes first, and all of it is kept.
    let allow = Rule {
        action: Action::Allow,
        ..Rule::default()
    };
    match all.add(allow) {
        Err(e) => assert!(!e.to_string().is_empty()),
        Ok(()) => {
            assert!(!all.deny(&end));
            let mut next = Rules::default();
            next.keep_in(&dir);
            assert_eq!(next.shown(), all.shown());
            next.delete(1).expect("it is there");
            assert_eq!((next.shown()[0].clone(), next.deny(&end)), (added, denied));
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// `/proc/self/mountinfo`, and behind a zero `/proc/PID/cgroup`.
pub(crate) fn proc(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (mounts, cgroups) = text.split_once('\0').unwrap_or(("", &text));
    let key = proc::cgroup_key(cgroups);
    assert!(key.starts_with('/') && (key == "/" || !key.ends_with('/')));
    assert_eq!(proc::cgroup_key(&format!("0::{key}")), key, "it is its own");
    let Some(h) = Hierarchy::of(mounts) else {
        return;
    };
    let levels = h.levels(cgroups);
    assert!(levels.len() <= cgroups.len() + 1);
    for (n, l) in levels.iter().enumerate() {
        assert!(l.starts_with(&h.top), "{l:?} is not in {:?}", h.top);
        assert!(n == 0 || levels[n - 1].starts_with(l));
    }
}

/// A family table, and the file that it is.
struct Shown {
    family: Family,
    file: std::fs::File,
}

impl Shown {
    fn new() -> Shown {
        // SAFETY: a plain call with a C string; the descriptor is this program's to own.
        let fd = unsafe {
            let fd = libc::memfd_create(c"table".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        };
        let file = std::fs::File::from(fd.try_clone().unwrap());
        file.set_len(TABLE_BYTES as u64).unwrap();
        Shown {
            family: Family::new(Ident { dev: 0, ino: 0 }, Foreign::new(fd)),
            file,
        }
    }
}

thread_local! {
    // (Never dropped: a daemon closes such descriptors in threads of its own.)
    static SHOWN: &'static Shown = Box::leak(Box::new(Shown::new()));
}

/// Entries of the table that a target's bytes may be in.
const SOME: usize = 70;
/// Most of them at a time.
const ENTRIES_MAX: usize = 6;

/// A table, as the daemon reads it: the header, then entries, each behind its place.
pub(crate) fn table(data: &[u8]) {
    let shown = SHOWN.with(|s| *s);
    let mut input = Input(data);
    let mut header = input.bytes(size_of::<Header>()).to_vec();
    header.resize(size_of::<Header>(), 0);
    let (at, used) = (offset_of!(Header, used), usize::from(header[0]) % SOME);
    // (What is beyond those is empty, and would only be read.)
    header[at..at + 4].copy_from_slice(&(used as u32).to_le_bytes());
    shown.file.write_all_at(&header, 0).unwrap();
    let place = |i: usize| (offset_of!(lane::family::Table, conns) + i * size_of::<Conn>()) as u64;
    let mut written = Vec::new();
    while !input.0.is_empty() && written.len() < ENTRIES_MAX {
        let i = usize::from(input.u8()) % SOME;
        let entry = input.bytes(size_of::<Conn>());
        shown.file.write_all_at(entry, place(i)).unwrap();
        written.push(i);
    }
    let family = &shown.family;
    let views = family.views();
    assert!(views.len() <= used);
    for v in &views {
        assert!((v.index as usize) < used);
        assert!(matches!(
            v.state,
            state::EMBRYO | state::LISTEN | state::OPEN
        ));
        assert!(v.holders.len() <= HOLDERS && !v.holders.contains(&0));
        assert_eq!(family.view(v.index).as_ref(), Some(v));
        let _ = (
            family.sending(v.index, v.gen),
            family.at_work(v.index, v.gen),
        );
    }
    assert!(family.view(CONNS as u32).is_none() && family.view(u32::MAX).is_none());
    let stats = family.stats();
    let mut sum = stats;
    sum.add(&stats);
    assert_eq!(stats.grown(&stats), Default::default());
    assert_eq!(sum.highest(&stats), sum);
    let _ = home(&Foreign::new(shown.file.try_clone().unwrap().into()));
    let nothing = [0; size_of::<Conn>()];
    for i in written {
        shown.file.write_all_at(&nothing, place(i)).unwrap();
    }
}
