//! Before an end shuts the last of both directions down, its receiving direction goes to TCP. Afterwards its kernel is to
//! take nothing more and answers whatever comes with a reset: a frame, too, and what is unread could not come there for
//! who has the connection next.

use super::{Revoked, RxState};
use crate::half::mem::Memory;
use crate::half::Port;
use crate::proto::reason::Reason;

/// What an end that is about to shut the last direction down finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeforeDeaf {
    /// The direction may stay where it is. (On one node, with nothing unread: before its sender writes a frame, it sees
    /// what this end announces, SYNC deaf.)
    Stays,
    /// It is on TCP. (What was unread may still be on its way there.)
    OnTcp,
    /// Its sender, or the sender's daemon, has to put something on TCP first: ask again.
    Sender,
    /// It cannot go there: what is unread is only on the ring.
    Impossible,
}

impl RxState {
    /// One attempt; the caller decides how long it waits for the sender. Across nodes the direction goes to TCP whatever is
    /// unread: a sender that leaves in this moment learns too late that nobody takes its frame any more.
    pub fn before_deaf(&self, m: &Memory, port: &impl Port) -> Result<BeforeDeaf, Reason> {
        if !m.is_remote() && self.is_up() && self.ring_unread(m) == 0 {
            return Ok(BeforeDeaf::Stays);
        }
        Ok(match self.revoke(m, port)? {
            Revoked::Clear => BeforeDeaf::OnTcp,
            Revoked::Pending => BeforeDeaf::Sender,
            Revoked::Impossible => BeforeDeaf::Impossible,
        })
    }

    /// The sender does not answer, and the last direction is shut down all the same. On one node what is unread stays on the
    /// ring then ([`RxState::go_on`]); false: bytes of the ring come on TCP, after all. Across nodes nothing is withdrawn:
    /// the sender may have answered already, and its answer be on its way.
    pub fn deaf_all_the_same(&self, m: &Memory) -> bool {
        m.is_remote() || self.go_on(m)
    }
}
