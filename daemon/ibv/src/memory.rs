//! Protection domains and registered memory.

use super::convert::{access, check, last_error};
use super::device::Context;
use super::{Cq, Ibv, Qp};
use rdma_sys::*;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::verbs::{self, Access, Error, Memory, QpCaps};

pub(super) struct Domain {
    pub context: Arc<Context>,
    pub raw: NonNull<ibv_pd>,
}

// SAFETY: see `Context`.
unsafe impl Send for Domain {}
// SAFETY: see `Context`.
unsafe impl Sync for Domain {}

impl Drop for Domain {
    fn drop(&mut self) {
        let c = &self.context;
        // SAFETY: allocated by us, given back once; what was made of it held this value and is gone.
        let done = check(unsafe { (c.lib.ibv_dealloc_pd)(self.raw.as_ptr()) });
        let _ = c.counts.freed(&c.counts.pds, done);
    }
}

pub struct Pd(Arc<Domain>);

impl Pd {
    pub(super) fn alloc(context: Arc<Context>) -> Result<Pd, Error> {
        // SAFETY: an open context.
        let raw = unsafe { (context.lib.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        context.counts.pds.fetch_add(1, Relaxed);
        Ok(Pd(Arc::new(Domain { context, raw })))
    }
}

impl verbs::ProtectionDomain<Ibv> for Pd {
    fn register(&self, memory: Arc<dyn Memory>, rights: Access) -> Result<Mr, Error> {
        let c = &self.0.context;
        // SAFETY: `Memory` promises that the range is mapped as long as the value lives, which is at
        // least as long as the region; without a mapping of the right kind the kernel refuses.
        let raw = unsafe {
            (c.lib.ibv_reg_mr)(
                self.0.raw.as_ptr(),
                memory.addr().as_ptr().cast(),
                memory.len(),
                access(rights),
            )
        };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        c.counts.mrs.fetch_add(1, Relaxed);
        // SAFETY: the library has just made it; its keys never change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        let remote = matches!(rights, Access::RemoteWrite);
        Ok(Mr {
            raw,
            lkey,
            rkey: if remote { rkey } else { 0 },
            memory: ManuallyDrop::new(memory),
            domain: self.0.clone(),
        })
    }

    fn create_qp(&self, send: &Cq, recv: &Cq, caps: QpCaps) -> Result<Qp, Error> {
        Qp::create(self.0.clone(), send, recv, caps)
    }
}

pub struct Mr {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    memory: ManuallyDrop<Arc<dyn Memory>>,
    domain: Arc<Domain>,
}

// SAFETY: see `Context`; `Memory` is `Send` and `Sync`.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl verbs::MemoryRegion for Mr {
    fn addr(&self) -> u64 {
        self.memory.addr().as_ptr() as u64
    }

    fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    fn lkey(&self) -> u32 {
        self.lkey
    }

    fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let c = &self.domain.context;
        // SAFETY: registered by us, taken back once.
        let done = check(unsafe { (c.lib.ibv_dereg_mr)(self.raw.as_ptr()) });
        if c.counts.freed(&c.counts.mrs, done).is_ok() {
            // SAFETY: dropped once, here. If the device can still reach the memory it stays mapped,
            // for ever: another mapping must not come to lie at an address that has a live key.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
