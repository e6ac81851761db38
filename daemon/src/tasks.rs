//! The tasks around the core: each waits for one kind of thing (a client's message, a peer's, a helper's result) and
//! gives it to the core.
//!
//! They do the waiting and the I/O, and hold no state that outlives a connection: what to do is decided in `core`,
//! which knows none of them.

pub mod channels;
pub(crate) mod lookups;
pub(crate) mod readings;
pub(crate) mod seal;
pub mod server;
mod share;
pub(crate) mod takeover;

use crate::clients::limits::Cgroup;
use crate::os::pool;
use std::sync::Arc;

/// A helper's work, as soon as this cgroup, which pays, may have one more. `None`: it has panicked.
async fn helped<T: Send + 'static>(
    payer: &Arc<Cgroup>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    payer.unsaturated().await;
    let _job = payer.job();
    pool::LANES.run(Some(payer.descriptors.clone()), work).await
}
