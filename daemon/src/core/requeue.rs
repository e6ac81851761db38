//! Unread bytes of a peer that is gone, which go back to TCP ([`crate::lanes::requeue`]).

use super::Core;
use crate::clients::ids::ConnRef;
use crate::clients::limits::{Cgroup, TakeoverSeat};
use crate::lanes::requeue::Requeue;
use crate::os::fds::Foreign;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// One to be carried out. Who asked pays for the helper, and takes the seat.
pub(crate) struct Ordered {
    pub requeue: Requeue,
    pub who: ConnRef,
    pub payer: Arc<Cgroup>,
    pub seat: TakeoverSeat,
}

impl<V: Provider> Core<V> {
    /// A shim leaves a lane whose other end is gone, and asks that what it has not read be put into its socket's
    /// queue. If this is refused, what came with the message is closed, and the shim sees that.
    pub(super) fn requeue(&mut self, who: ConnRef, bytes: u64, fds: Vec<Foreign>) {
        let Ok([socket, file, answer]) = <[Foreign; 3]>::try_from(fds) else {
            return;
        };
        let Some(cookie) = self.cookie(who) else {
            return;
        };
        let payer = self.clients.get(&who.client).map(|p| p.cgroup().clone());
        let Some((payer, seat)) = payer.and_then(|p| Some((p.clone(), p.takeover()?))) else {
            return;
        };
        self.requeues.push(Ordered {
            requeue: Requeue {
                socket,
                cookie,
                file,
                bytes,
                answer,
            },
            who,
            payer,
            seat,
        });
    }

    /// The cookie of the socket of a connection that had a lane within the node. (A forked child may ask about its
    /// parent's.)
    fn cookie(&self, who: ConnRef) -> Option<u64> {
        self.known(who).find_map(|k| k.cookie)
    }

    /// It was carried out, or not.
    pub(crate) fn requeued(&mut self, who: ConnRef, bytes: Option<u64>) {
        if let Some(n) = bytes {
            let what = format!("{}: {n} unread bytes are back on TCP", self.named(who));
            self.event(who.client, &what);
        }
    }
}
