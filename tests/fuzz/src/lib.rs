//! Fuzz targets: what decodes foreign bytes, and an end of a lane beside a peer that writes anything.
//!
//! A target takes any bytes and panics if a property does not hold. `make fuzz` has libFuzzer look for such bytes; the
//! inputs kept under `corpus/TARGET`, and [`seeds`], are an ordinary test (`tests/replay.rs`).

// Tests' code: what a conversion loses, they notice.
#![warn(unreachable_pub)]

mod admin;
mod area;
#[cfg(feature = "daemon")]
mod daemon;
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
    ("frame", shim::frame),
    ("nri", node::nri),
    #[cfg(feature = "daemon")]
    ("peers", daemon::peers),
    ("queue", node::queue),
    #[cfg(feature = "daemon")]
    ("table", daemon::table),
    ("words", shim::words),
];

/// The target with this name.
pub fn find(name: &str) -> Option<Target> {
    TARGETS.iter().copied().find(|t| t.0 == name)
}
