//! The end of queue pairs.

use super::cm::Connection;
use super::completion::CqInner;
use super::convert::check;
use super::memory::Domain;
use rdma_sys::ibv_qp;
use std::ptr::NonNull;
use std::sync::Arc;
use underpass_rdma::verbs::Error;

/// # Safety
///
/// The queue pair was created in this domain, and is not used any more by anyone.
pub unsafe fn free(raw: NonNull<ibv_qp>, domain: &Domain) -> Result<(), Error> {
    let c = &domain.context;
    // SAFETY: as the caller promises.
    let done = check(unsafe { (c.lib.ibv_destroy_qp)(raw.as_ptr()) });
    c.counts.freed(&c.counts.qps, done)
}

/// An iWARP queue pair that nobody uses any more. Fields are dropped in this order.
pub struct Last {
    raw: NonNull<ibv_qp>,
    connection: Connection,
    _queues: [Arc<CqInner>; 2],
    domain: Arc<Domain>,
    freed: Option<Result<(), Error>>,
}

// SAFETY: see `Context`.
unsafe impl Send for Last {}

impl Last {
    /// # Safety
    ///
    /// As for [`free`].
    pub unsafe fn new(
        raw: NonNull<ibv_qp>,
        connection: Connection,
        queues: [Arc<CqInner>; 2],
        domain: Arc<Domain>,
    ) -> Last {
        Last {
            raw,
            connection,
            _queues: queues,
            domain,
            freed: None,
        }
    }

    pub fn free(&mut self) -> Result<(), Error> {
        if let Some(done) = self.freed {
            return done;
        }
        self.connection.settle();
        // SAFETY: as `new` was promised, and this is done once.
        let done = unsafe { free(self.raw, &self.domain) };
        self.freed = Some(done);
        done
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        // A failure is counted. The ids go after the queue pair.
        let _ = self.free();
    }
}
