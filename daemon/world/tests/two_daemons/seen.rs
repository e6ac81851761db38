//! What has happened, and how often: a test that reaches nothing would prove nothing.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

thread_local! {
    static SEEN: RefCell<Counts> = RefCell::default();
}

/// It has happened once more.
pub fn note(what: &'static str) {
    static STOP: OnceLock<Option<String>> = OnceLock::new();
    let stop = STOP.get_or_init(|| std::env::var("STOP").ok());
    assert_ne!(stop.as_deref(), Some(what), "stopped");
    add(what, 1);
}

pub fn add(what: &'static str, n: u64) {
    SEEN.with(|s| *s.borrow_mut().0.entry(what).or_default() += n);
}

/// What has happened on this thread since the last call.
pub fn take() -> Counts {
    SEEN.with(RefCell::take)
}

#[derive(Default)]
pub struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    pub fn add(&mut self, other: &Counts) {
        for (what, n) in &other.0 {
            *self.0.entry(what).or_default() += n;
        }
    }

    /// Fails if any of these has never happened.
    pub fn insist(&self, all: &[&str]) {
        let never: Vec<_> = all.iter().filter(|w| self.of(w) == 0).collect();
        assert!(never.is_empty(), "never happened: {never:?}");
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, n) in &self.0 {
            write!(f, "\n{n:>12}  {what}")?;
        }
        Ok(())
    }
}

/// Tells what happens, if the environment asks for it (`WHY=1`).
macro_rules! tell {
    ($($what:tt)*) => {
        if $crate::world::seen::tells() {
            eprintln!($($what)*);
        }
    };
}
pub(crate) use tell;

pub fn tells() -> bool {
    static WHY: OnceLock<bool> = OnceLock::new();
    *WHY.get_or_init(|| std::env::var_os("WHY").is_some())
}
