//! Memory that is charged to programs because of lanes: not so much that their memory cgroup gets full.

use super::Core;
use crate::clients::ids::ClientId;
use crate::clients::limits::Limit;
use lane::abi::{REMOTE_CHUNK_BYTES, RING_FAST_LOG2};
use underpass_rdma::verbs::Provider;

/// Of a lane, besides its ring: the pages of the words that it uses, some of which others use as well.
const WORDS: u64 = 6 * 4096;

impl<V: Provider> Core<V> {
    fn takes(&self, id: ClientId, bytes: u64) -> bool {
        let Some(p) = self.clients.get(&id) else {
            return true;
        };
        let fits = p.room.take(bytes, self.now());
        if !fits {
            p.cgroup().refused(Limit::Room);
        }
        fits
    }

    /// Is there memory for another lane of this process to that one, or to the node that it stands for? (What comes from
    /// another node is in memory of the daemon's.)
    pub(super) fn may_have_lane(&self, id: ClientId, other: ClientId) -> bool {
        let all = other.is_remote() && !self.groups.are_linked(id, other);
        let ring = match all {
            true => REMOTE_CHUNK_BYTES as u64,
            false => 1_u64 << self.config.ring_log2,
        };
        self.takes(id, ring + WORDS)
    }

    /// Is there memory for more of this link group? If not, the process goes on without, and asks again.
    pub(super) fn may_grow(&self, id: ClientId, group: u64) -> bool {
        let bytes = match self.groups.remote_client(group) {
            Some(_) => REMOTE_CHUNK_BYTES as u64,
            None => 1 << RING_FAST_LOG2,
        };
        self.takes(id, bytes)
    }
}
