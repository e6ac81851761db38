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

/// Who has mapped it, and the file.
pub(crate) struct Unsealed {
    pub client: ClientId,
    pub chunk: (u64, u8, u32),
    pub file: Arc<OwnedFd>,
    pub payer: Arc<Cgroup>,
}

/// Seals it, and then tells the core what the shim has said. A chunk that cannot be sealed fails its link group.
pub(crate) async fn seal(shared: Shared, u: Unsealed) {
    let (client, (group, side, chunk)) = (u.client, u.chunk);
    u.payer.unsaturated().await;
    let job = u.payer.job();
    let sealed = tokio::task::spawn_blocking(move || memfd::seal(&u.file).is_ok()).await;
    drop(job);
    let says = match sealed {
        Ok(true) => ToDaemon::Mapped { group, side, chunk },
        _ => ToDaemon::GroupFailed { group, side },
    };
    let mut core = shared.borrow_mut();
    if core.message(client, says, vec![]).is_err() {
        core.count_refused(Reason::Hostile);
    }
}
