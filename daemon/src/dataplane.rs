//! What moves bytes between nodes: rails, the lanes on them, and the thread that polls them.
//!
//! Nothing here may wait for a client, a tool or a peer's daemon: their work must not delay a lane's bytes. What
//! happens leaves as effects, which the core carries out.

pub(crate) mod rail;
pub mod thread;

/// Has one of these devices a port that is a rail, by this configuration?
pub fn has_rail(
    all: &[underpass_rdma::devices::SysDevice],
    config: &crate::config::RailRules,
) -> bool {
    rail::has_rail(all, config)
}
