//! What the project's tests, demo and benchmarks share.

pub mod harness;
pub mod lab;
pub mod page;
pub mod soak;
