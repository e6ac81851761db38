//! What the engine needs of RDMA verbs, as traits.
//!
//! There are two implementations: real devices through libibverbs, and a deterministic simulation
//! for tests. Everything is polled: no call blocks, nothing here starts a thread (but for iWARP's
//! handshake, whose system calls do block). File descriptors are only there to sleep on until polling
//! is worth it again; a simulation has none.
//!
//! Handles keep what they are made of alive (a queue pair its completion queues and protection
//! domain, those their device), so objects are always freed in the right order, by `Drop`. Whether
//! anything is left is told by [`Provider::live`].
//!
//! What a caller must know about hardware, and a simulation has to be as unkind about:
//!
//! - A queue pair completes its own work in order; nothing is ordered between queue pairs.
//! - Nor are receives ordered with sends of the same queue pair: an answer can be there before the
//!   acknowledgement of what it answers.
//! - Unsignaled work has no completion unless it fails. A signaled completion of a later request
//!   means that all earlier ones on the same queue pair are done, and frees their places in the queue.
//! - After an error, a queue pair flushes what was posted: one completion each, signaled or not,
//!   status [`Status::Flushed`]. Such a completion says nothing about whether the peer has got the data.
//! - The first completion with an error need not say why: where our own port goes down, all are flushed.
//! - A receiver that posts nothing is told nothing when its peer or the wire is gone: no completion, no
//!   event, for ever. Only a sender finds out.
//! - Posting to a queue pair in error succeeds, and is flushed.
//! - Of a completion with an error only `wr_id`, `status`, `qpn` and `vendor` mean something.
//! - Completions of a queue pair that was dropped may still come. `wr_id` must tell them apart, since
//!   numbers of queue pairs are used again.
//! - A success of an RDMA write says that the peer's device has acknowledged it, not that the peer's
//!   process has seen it.

mod memory;
mod types;

pub use memory::{Mapping, Memory, Part};
pub use types::*;

use std::os::fd::RawFd;
use std::sync::Arc;

/// A family of implementations of the traits below.
pub trait Provider: Sized + 'static {
    /// An open device.
    type Device: Device<Self>;
    /// What regions and queue pairs are made in.
    type Pd: ProtectionDomain<Self>;
    /// Memory that devices may reach.
    type Mr: MemoryRegion;
    /// Where they tell what is done.
    type Cq: CompletionQueue;
    /// An end of a connection.
    type Qp: QueuePair;

    /// The devices that are there now. Called again and again: this is how devices that come later
    /// are found. A device that left and came back under the same name has another `index`.
    fn scan(&self) -> Result<Vec<DeviceId>, Error>;

    /// Opens a device; [`Error::NoDevice`] where this appearance of it is gone.
    fn open(&self, device: &DeviceId) -> Result<Self::Device, Error>;

    /// How many objects exist now, those included that could not be freed.
    fn live(&self) -> Live;
}

/// An open device. Clones of the handle are not needed: what is made of it keeps it alive.
pub trait Device<P: Provider> {
    /// Which one this is.
    fn id(&self) -> &DeviceId;

    /// What the device says about itself now; asked again after each event.
    fn info(&self) -> Result<DeviceInfo, Error>;

    /// The next event of the device or of one of its queue pairs, if there is one.
    fn poll_event(&self) -> Result<Option<DeviceEvent>, Error>;

    /// Becomes readable when there are events.
    fn event_fd(&self) -> Option<RawFd>;

    /// An empty protection domain.
    fn alloc_pd(&self) -> Result<P::Pd, Error>;

    /// A queue for at least `entries` completions. One that overflows is lost with all its queue
    /// pairs, so `entries` has to cover everything that can be posted to them.
    fn create_cq(&self, entries: u32) -> Result<P::Cq, Error>;
}

/// Queue pairs and regions of different domains do not work together: a peer reaches what is in that of its queue pair.
pub trait ProtectionDomain<P: Provider> {
    /// Lets the device reach this memory. The region keeps `memory` (hence its mapping) alive.
    /// With [`Access::LocalRead`] the mapping may be read-only.
    fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<P::Mr, Error>;

    /// A reliable-connected queue pair in state [`QpState::Reset`].
    fn create_qp(&self, send: &P::Cq, recv: &P::Cq, caps: QpCaps) -> Result<P::Qp, Error>;
}

/// Registered memory. Dropping it takes the keys back; whoever drops it has to know that no work
/// which names them is under way and that no peer may still write (see the failover rules).
pub trait MemoryRegion {
    /// Address of the first byte, as it stands in requests, local and remote.
    fn addr(&self) -> u64;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Key for requests of our own.
    fn lkey(&self) -> u32;
    /// 0 unless registered with [`Access::RemoteWrite`].
    fn rkey(&self) -> u32;

    /// Is its length 0?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A piece of this region for a request, if it lies inside.
    fn sge(&self, offset: u64, len: u32) -> Option<Sge> {
        let end = offset.checked_add(u64::from(len))?;
        (end <= self.len()).then(|| Sge {
            addr: self.addr() + offset,
            len,
            lkey: self.lkey(),
        })
    }
}

/// Tells what became of requests and receive buffers, for the queue pairs that were made with it.
pub trait CompletionQueue {
    /// Appends at most `max` completions to `out` and says how many.
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error>;

    /// Asks for one notification at the next completion that is added. Completions that were there
    /// before cause none: arm, poll once more, then sleep on the descriptor.
    /// `messages`: only for inline messages that come in; what was sent, and with some devices errors,
    /// have to be polled for.
    fn arm(&self, messages: bool) -> Result<(), Error>;

    /// Takes one notification in. Says whether there was any; there may be more, the descriptor is
    /// readable then.
    fn take_notification(&self) -> Result<bool, Error>;

    /// Becomes readable at a notification.
    fn fd(&self) -> Option<RawFd>;
}

/// One end of a reliable connection. Requests are done in the order in which they are posted.
pub trait QueuePair {
    /// Its number on the device, 24 bits.
    fn qpn(&self) -> u32;

    /// What the device granted; at least what was asked for.
    fn caps(&self) -> QpCaps;

    /// Reset → Init, on this port.
    fn to_init(&self, port: u8) -> Result<(), Error>;

    /// Init → ready to receive from `attr.remote`. From here on posted receives are used.
    fn to_rtr(&self, attr: &RtrAttr) -> Result<(), Error>;

    /// Ready to receive → ready to send, too.
    fn to_rts(&self, attr: &RtsAttr) -> Result<(), Error>;

    /// From any state: everything posted is flushed. Only [`QueuePair::destroy`] makes sure that no
    /// write of the peer lands any more; a packet may be under way inside the device until then.
    fn to_error(&self) -> Result<(), Error>;

    /// Where queue pairs are connected by a handshake of their devices (iWARP): waits for that of the
    /// peer's at this address of ours. The port to tell the peer, as its [`Endpoint::lid`]; 0 elsewhere.
    /// The end that does not listen begins, and must send first.
    fn listen(&self, _address: Gid) -> Result<u16, Error> {
        Ok(0)
    }

    /// Goes on with that handshake, after [`QueuePair::to_rts`]; whether requests may be posted.
    /// Asked again and again until it says so.
    fn connected(&self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Does the success of a request say that the peer's device has taken it? (With iWARP it says
    /// that our own device, which will repeat it if need be, is done with our memory.)
    fn acknowledges(&self) -> bool {
        true
    }

    /// What the device says of it now.
    fn state(&self) -> Result<QpState, Error>;

    /// Posts requests in order, with one doorbell. [`Error::Full`] when the send queue has no place.
    fn post_send(&self, requests: &[Request<'_>]) -> Result<(), PostError>;

    /// Posts buffers for messages. Allowed from [`QpState::Init`] on.
    fn post_recv(&self, buffers: &[RecvBuffer]) -> Result<(), PostError>;

    /// As dropping it, but says if the device refused. After success nothing of the peer's can land
    /// through this queue pair.
    fn destroy(self) -> Result<(), Error>
    where
        Self: Sized,
    {
        drop(self);
        Ok(())
    }
}
