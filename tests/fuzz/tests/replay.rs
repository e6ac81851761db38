//! Every input that is kept, and every seed, once through its target: what was found once is not lost again.

use std::path::{Path, PathBuf};
use underpass_fuzz::{find, seeds, TARGETS};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// Bytes that may be kept of all targets together: the tree is no archive.
const KEPT_MAX: u64 = 300 << 10;

#[test]
fn every_kept_input_is_a_targets() {
    let mut size = 0;
    let mut names = Vec::new();
    for dir in std::fs::read_dir(corpus()).unwrap() {
        let dir = dir.unwrap();
        names.push(dir.file_name().into_string().unwrap());
        for file in std::fs::read_dir(dir.path()).unwrap() {
            size += file.unwrap().metadata().unwrap().len();
        }
    }
    names.sort();
    let known: Vec<&str> = TARGETS.iter().map(|t| t.0).collect();
    assert_eq!(names, known);
    assert!(size <= KEPT_MAX, "{size} bytes");
}

/// Each says by its name which input it was that a target did not like.
fn replay(name: &str) {
    let (_, run) = find(name).unwrap();
    let own = seeds::of(name);
    assert!(!own.is_empty());
    own.iter().for_each(|seed| run(seed));
    let mut kept = 0;
    for file in std::fs::read_dir(corpus().join(name)).unwrap() {
        let path = file.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        let done = std::panic::catch_unwind(|| run(&data));
        assert!(done.is_ok(), "{}", path.display());
        kept += 1;
    }
    assert!(kept > 0, "nothing is kept for {name}");
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })*

        #[test]
        fn none_is_left_out() {
            assert_eq!([$(stringify!($name)),*], *TARGETS.iter().map(|t| t.0).collect::<Vec<_>>());
        }
    };
}

targets! { admin area capture config control csr engine frame groups nri peers proc queue review rule table words }
