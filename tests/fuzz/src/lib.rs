//! Fuzz targets: what decodes foreign bytes, the state machines of the daemon and its engine beside others that say anything,
//! and an end of a lane beside a peer that writes anything.
//!
//! A target takes any bytes and panics if a property does not hold. `make fuzz` has libFuzzer look for such bytes; the
//! inputs kept under `corpus/TARGET`, and [`seeds`], are an ordinary test (`tests/replay.rs`).

// Tests' code: what a conversion loses, they notice.
#![warn(unreachable_pub)]

mod admin;
mod area;
#[cfg(feature = "daemon")]
mod cluster;
#[cfg(feature = "daemon")]
mod daemon;
mod engine;
#[cfg(feature = "daemon")]
mod groups;
mod input;
mod node;
pub mod seeds;
mod shim;

/// A target: its name, also that of its directory of kept inputs, and what it does.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("admin", admin::admin),
    ("area", area::area),
    ("capture", admin::capture),
    #[cfg(feature = "daemon")]
    ("config", daemon::config),
    ("control", shim::control),
    #[cfg(feature = "daemon")]
    ("csr", cluster::csr),
    ("engine", engine::engine),
    ("frame", shim::frame),
    #[cfg(feature = "daemon")]
    ("groups", groups::groups),
    ("nri", node::nri),
    #[cfg(feature = "daemon")]
    ("peers", daemon::peers),
    #[cfg(feature = "daemon")]
    ("proc", daemon::proc),
    ("queue", node::queue),
    #[cfg(feature = "daemon")]
    ("review", cluster::review),
    #[cfg(feature = "daemon")]
    ("rule", daemon::rule),
    #[cfg(feature = "daemon")]
    ("table", daemon::table),
    ("words", shim::words),
];

/// The target with this name.
pub fn find(name: &str) -> Option<Target> {
    TARGETS.iter().copied().find(|t| t.0 == name)
}
