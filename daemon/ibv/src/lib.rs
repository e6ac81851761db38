//! Verbs of real RDMA devices, through libibverbs and librdmacm.
//!
//! This crate is the only user of `rdma-sys`, so that replacing it is a local change, and nothing else needs clang and
//! the headers of libibverbs to build. Of that crate only types, constants and layouts are used; functions come from [`library`], because
//! the daemon must start where libibverbs is not installed.
//!
//! Objects are wrapped so that each holds what it is made of (`Arc`): Rust's rules then free them in
//! the order that verbs demand. libibverbs is thread-safe, so all handles may be sent and shared.
//!
//! What soft-RoCE (rxe of Linux 6.12) does, seen with `examples/verbs_pair.rs` in two virtual machines;
//! real cards differ, and the engine must be right with both:
//!
//! - Its work is done by kernel threads. Where there is no processor to spare, polling in a loop keeps
//!   them from running until the next tick: sleeping on the queue's descriptor is faster.
//! - Posting costs a system call. Up to 512 bytes may be inline; every queue has at least 31 places.
//! - A wrong key or missing rights: `RemoteAccess` for the write, signaled or not, then flushes on both
//!   ends; there is no event, not even at the end that refused.
//! - Peer, its queue pair or the wire gone: `RetryExceeded` after (retries + 1) timeouts. Own port down:
//!   `Flushed` at once when something is sent; a queue pair that does not send survives it.
//! - Registering makes and pins all pages (no on-demand paging): what the daemon registers before an
//!   application has touched it is charged to the daemon.
//! - Removal of a device in use sends no event and waits; only its `uverbs` device disappears.
//!
//! iWARP queue pairs are connected with librdmacm, see [`cm`]. While one connects it has a thread; one
//! that is dropped meanwhile is freed by a thread, later, and counts as living until then.

// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

mod cm;
mod completion;
mod convert;
mod device;
mod last;
mod library;
mod memory;
mod queue;

use convert::last_errno;
use library::Library;
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use underpass_rdma::devices::Tree;
use underpass_rdma::verbs::{self, DeviceId, Error, Live};

pub use completion::Cq;
pub use device::Device;
pub use memory::{Mr, Pd};
pub use queue::Qp;

/// Devices of this machine.
pub struct Ibv {
    lib: &'static Library,
    counts: Arc<Counts>,
    tree: Tree,
}

/// What exists. Statistics only: nothing is read or written on the strength of these numbers, so
/// they pair with nothing.
#[derive(Default)]
struct Counts {
    devices: AtomicUsize,
    pds: AtomicUsize,
    mrs: AtomicUsize,
    cqs: AtomicUsize,
    qps: AtomicUsize,
    stuck: AtomicUsize,
}

impl Counts {
    /// An object was given back to the library, or could not be. Says whether it is gone.
    fn freed(&self, what: &AtomicUsize, result: Result<(), Error>) -> Result<(), Error> {
        match result {
            Ok(()) => what.fetch_sub(1, Relaxed),
            Err(_) => self.stuck.fetch_add(1, Relaxed),
        };
        result
    }
}

impl Ibv {
    /// [`Error::NoLibrary`] where libibverbs is not installed. A kernel without RDMA is no error:
    /// it has no devices.
    pub fn new() -> Result<Self, Error> {
        Ok(Ibv {
            lib: Library::get()?,
            counts: Arc::default(),
            tree: Tree::system(),
        })
    }

    /// Calls `visit` with each device of the library's list until it answers.
    fn find<T>(
        &self,
        mut visit: impl FnMut(*mut rdma_sys::ibv_device, &str) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let mut n = 0;
        // SAFETY: the function only writes the number.
        let list = unsafe { (self.lib.ibv_get_device_list)(&mut n) };
        if list.is_null() {
            return match last_errno() {
                libc::ENOSYS | libc::ENOENT => Ok(None),
                e => Err(convert::error(e)),
            };
        }
        let mut found = None;
        for i in 0..usize::try_from(n).unwrap_or(0) {
            // SAFETY: the list has `n` entries, valid until it is freed below.
            let device = unsafe { *list.add(i) };
            // SAFETY: a device of the list; its name is a C string inside it.
            let name = unsafe { CStr::from_ptr((self.lib.ibv_get_device_name)(device)) };
            if let Ok(name) = name.to_str() {
                found = visit(device, name);
            }
            if found.is_some() {
                break;
            }
        }
        // SAFETY: the list from above, freed once. Devices that were opened stay.
        unsafe { (self.lib.ibv_free_device_list)(list) };
        Ok(found)
    }
}

impl verbs::Provider for Ibv {
    type Device = Device;
    type Pd = Pd;
    type Mr = Mr;
    type Cq = Cq;
    type Qp = Qp;

    fn scan(&self) -> Result<Vec<DeviceId>, Error> {
        let mut all = Vec::new();
        self.find(|_, name| {
            all.extend(self.tree.id(name));
            None::<()>
        })?;
        all.sort();
        Ok(all)
    }

    fn open(&self, id: &DeviceId) -> Result<Device, Error> {
        let opened = self.find(|raw, name| {
            // SAFETY: `raw` is in a list that is not freed yet.
            (name == id.name).then(|| unsafe { Device::open(self, raw, id) })
        })?;
        let device = opened.unwrap_or(Err(Error::NoDevice))?;
        // The name may have gone to another device meanwhile.
        if self.tree.id(&id.name).as_ref() != Some(id) {
            return Err(Error::NoDevice);
        }
        Ok(device)
    }

    fn live(&self) -> Live {
        let c = &self.counts;
        Live {
            devices: c.devices.load(Relaxed),
            pds: c.pds.load(Relaxed),
            mrs: c.mrs.load(Relaxed),
            cqs: c.cqs.load(Relaxed),
            qps: c.qps.load(Relaxed),
            stuck: c.stuck.load(Relaxed),
        }
    }
}

/// Sets a descriptor of the library to answer instead of waiting.
fn never_wait(fd: std::ffi::c_int) -> Result<(), Error> {
    // SAFETY: the descriptor belongs to an object that the caller holds.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let set = || {
        let flags = rustix::fs::fcntl_getfl(fd)?;
        rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
    };
    set().map_err(|e: rustix::io::Errno| convert::error(e.raw_os_error()))
}
