//! Seals chunks that their writers have mapped and not sealed, each by a helper: sealing waits for a write that is under way,
//! and who writes may see to it that it never ends.

use crate::clients::ids::ClientId;
use crate::clients::limits::Cgroup;
use crate::core::Shared;
use crate::os::memfd;
use lane::proto::msg::ToDaemon;
use lane::proto::reason::Reason;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Seals the chunk that this client has mapped, and then tells the core what the shim has said. A chunk that cannot be
/// sealed fails its link group.
pub(crate) async fn seal(
    shared: Shared,
    client: ClientId,
    (group, side, chunk): (u64, u8, u32),
    (file, payer): (Arc<OwnedFd>, Arc<Cgroup>),
) {
    let sealed = super::helped(&payer, move || memfd::seal(&file).is_ok()).await;
    let says = match sealed {
        Some(true) => ToDaemon::Mapped { group, side, chunk },
        _ => ToDaemon::GroupFailed { group, side },
    };
    let mut core = shared.borrow_mut();
    if core.message(client, says, vec![]).is_err() {
        core.count_refused(Reason::Hostile);
    }
}
