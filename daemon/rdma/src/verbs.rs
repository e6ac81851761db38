//! What the engine needs of RDMA verbs, as traits.
//!
//! There are two implementations: real devices through libibverbs, and a deterministic simulation for tests.
//! Everything is polled: no call blocks, and nothing here starts a thread (except for iWARP's handshake, whose system
//! calls block). File descriptors are only for sleeping until polling is worthwhile again; a simulation has none.
//!
//! Handles keep what they are made of alive (a queue pair its completion queues and protection domain, those their
//! device), so `Drop` always frees objects in the right order. [`Provider::live`] tells whether any are left.
//!
//! What a caller must know about hardware, and a simulation has to imitate:
//!
//! - A queue pair completes its own work in order; nothing is ordered between queue pairs.
//! - Nor are receives ordered with sends of the same queue pair: an answer can arrive before the acknowledgement of the
//!   message that it answers.
//! - Unsignaled work has no completion unless it fails. A signaled completion of a later request
//!   means that all earlier ones on the same queue pair are done, and frees their places in the queue.
//! - After an error, a queue pair flushes what was posted: one completion each, signaled or not,
//!   status [`Status::Flushed`]. Such a completion says nothing about whether the peer has got the data.
//! - The first completion with an error need not give the cause: if our own port goes down, all requests are flushed.
//! - A receiver that posts nothing learns nothing if its peer or the wire is gone: no completion and no event, ever.
//!   Only a sender finds out.
//! - Posting to a queue pair in the error state succeeds, and is flushed.
//! - In a completion with an error, only `wr_id`, `status`, `qpn` and `vendor` are valid.
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
    /// Protection domain, in which regions and queue pairs are made.
    type Pd: ProtectionDomain<Self>;
    /// Registered memory that devices may access.
    type Mr: MemoryRegion;
    /// Completion queue.
    type Cq: CompletionQueue;
    /// One end of a connection.
    type Qp: QueuePair;

    /// The devices that exist now. Called again and again: this is how devices that appear later are found. A device
    /// that was removed and came back under the same name has another `index`.
    fn scan(&self) -> Result<Vec<DeviceId>, Error>;

    /// Opens a device; [`Error::NoDevice`] if this appearance of it is gone.
    fn open(&self, device: &DeviceId) -> Result<Self::Device, Error>;

    /// Number of objects that exist now, including those that could not be freed.
    fn live(&self) -> Live;
}

/// An open device. Handles need not be cloned: whatever is made of a device keeps it alive.
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

    /// A queue for at least `entries` completions. If a queue overflows, it and all its queue pairs are lost, so
    /// `entries` has to cover everything that can be posted to them.
    fn create_cq(&self, entries: u32) -> Result<P::Cq, Error>;
}

/// Queue pairs and regions of different domains cannot be combined: a peer reaches only regions in its queue pair's
/// domain.
pub trait ProtectionDomain<P: Provider> {
    /// Registers memory, so that the device can access it. The region keeps `memory` (hence its mapping) alive. With
    /// [`Access::LocalRead`] the mapping may be read-only.
    fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<P::Mr, Error>;

    /// A reliable-connected queue pair in state [`QpState::Reset`].
    fn create_qp(&self, send: &P::Cq, recv: &P::Cq, caps: QpCaps) -> Result<P::Qp, Error>;
}

/// Registered memory. Dropping it invalidates the keys. Whoever drops it has to know that no request that names them
/// is in progress and that no peer may still write (see the failover rules).
pub trait MemoryRegion {
    /// Address of the first byte, as used in requests, local and remote.
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

    /// A part of this region for a request, if it lies inside.
    fn sge(&self, offset: u64, len: u32) -> Option<Sge> {
        let end = offset.checked_add(u64::from(len))?;
        (end <= self.len()).then(|| Sge {
            addr: self.addr() + offset,
            len,
            lkey: self.lkey(),
        })
    }
}

/// Reports what became of requests and receive buffers of the queue pairs that were made with it.
pub trait CompletionQueue {
    /// Appends at most `max` completions to `out` and returns their number.
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error>;

    /// Requests one notification at the next completion that is added. Completions that were there before cause none:
    /// arm, poll once more, then sleep on the descriptor. `messages`: notify only of incoming inline messages;
    /// completions of sent requests, and with some devices errors, then have to be polled for.
    fn arm(&self, messages: bool) -> Result<(), Error>;

    /// Takes one notification. Returns whether there was any; if there are more, the descriptor stays readable.
    fn take_notification(&self) -> Result<bool, Error>;

    /// A descriptor that becomes readable at a notification.
    fn fd(&self) -> Option<RawFd>;
}

/// One end of a reliable connection. Requests are processed in the order in which they are posted.
pub trait QueuePair {
    /// Its number on the device, 24 bits.
    fn qpn(&self) -> u32;

    /// The sizes that the device granted, which are at least those requested.
    fn caps(&self) -> QpCaps;

    /// Reset → Init, on this port.
    fn to_init(&self, port: u8) -> Result<(), Error>;

    /// Init → ready to receive from `attr.remote`. From here on posted receive buffers are used.
    fn to_rtr(&self, attr: &RtrAttr) -> Result<(), Error>;

    /// Ready to receive → ready to send, too.
    fn to_rts(&self, attr: &RtsAttr) -> Result<(), Error>;

    /// From any state: everything posted is flushed. Only [`QueuePair::destroy`] guarantees that no write of the peer
    /// lands any more; until then a packet may still be inside the device.
    fn to_error(&self) -> Result<(), Error>;

    /// If devices connect queue pairs by a handshake (iWARP): waits for the handshake of the peer's device at this
    /// address of ours. Returns the port to tell the peer, as its [`Endpoint::lid`]; 0 with other devices. The end
    /// that does not listen begins the handshake, and must be the first to send.
    fn listen(&self, _address: Gid) -> Result<u16, Error> {
        Ok(0)
    }

    /// Continues that handshake, after [`QueuePair::to_rts`]; returns whether requests may be posted. To be called
    /// again until it does.
    fn connected(&self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Does the success of a request mean that the peer's device has taken it? (With iWARP it means only that our own
    /// device, which repeats it if need be, no longer needs our memory.)
    fn acknowledges(&self) -> bool {
        true
    }

    /// The state that the device reports now.
    fn state(&self) -> Result<QpState, Error>;

    /// Posts requests in order, with one doorbell. [`Error::Full`] if the send queue has no room.
    fn post_send(&self, requests: &[Request<'_>]) -> Result<(), PostError>;

    /// Posts buffers for messages. Allowed from [`QpState::Init`] on.
    fn post_recv(&self, buffers: &[RecvBuffer]) -> Result<(), PostError>;

    /// As dropping it, but reports if the device refused. After success no write of the peer can land through this
    /// queue pair.
    fn destroy(self) -> Result<(), Error>
    where
        Self: Sized,
    {
        drop(self);
        Ok(())
    }
}
