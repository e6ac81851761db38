//! An open device: what it says about itself, and its events.

use super::convert::{
    check, error, event, gid_kind, is_qp_error, last_errno, last_error, mtu_from,
};
use super::library::Library;
use super::{never_wait, Counts, Cq, Ibv, Pd};
use rdma_sys::*;
use std::mem::{size_of, MaybeUninit};
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::devices::Tree;
use underpass_rdma::verbs::{
    self, DeviceEvent, DeviceId, DeviceInfo, Error, Gid, GidEntry, Limits, LinkLayer, Mtu, PortInfo,
};

/// What everything made of a device holds.
pub(super) struct Context {
    pub lib: &'static Library,
    pub raw: NonNull<ibv_context>,
    pub counts: Arc<Counts>,
    pub iwarp: bool,
    pub id: DeviceId,
    tree: Tree,
}

// SAFETY: libibverbs' functions may be called from any thread, on the same objects at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once; whatever was made of it held this value and is gone.
        let done = check(unsafe { (self.lib.ibv_close_device)(self.raw.as_ptr()) });
        let _ = self.counts.freed(&self.counts.devices, done);
    }
}

pub struct Device(Arc<Context>);

impl Device {
    /// # Safety
    ///
    /// `raw` is in a device list that has not been freed.
    pub(super) unsafe fn open(
        ibv: &Ibv,
        raw: *mut ibv_device,
        id: &DeviceId,
    ) -> Result<Device, Error> {
        // SAFETY: as the caller promises.
        let raw = unsafe { (ibv.lib.ibv_open_device)(raw) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        ibv.counts.devices.fetch_add(1, Relaxed);
        let context = Context {
            lib: ibv.lib,
            raw,
            counts: ibv.counts.clone(),
            // SAFETY: an open context names its device, which says what it is and never changes.
            iwarp: unsafe { (*(*raw.as_ptr()).device).transport_type }
                == ibv_transport_type::IBV_TRANSPORT_IWARP,
            id: id.clone(),
            tree: ibv.tree.clone(),
        };
        let device = Device(Arc::new(context));
        never_wait(device.async_fd())?;
        Ok(device)
    }

    fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open; the field is set when it is opened and never changes.
        unsafe { (*self.0.raw.as_ptr()).async_fd }
    }

    fn limits(&self) -> Result<Limits, Error> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: an open context, and room for the answer.
        check(unsafe { (self.0.lib.ibv_query_device)(self.0.raw.as_ptr(), attr.as_mut_ptr()) })?;
        // SAFETY: all fields are numbers: valid when zeroed, and then filled in.
        let attr = unsafe { attr.assume_init() };
        let number = |n: i32| u32::try_from(n).unwrap_or(0);
        Ok(Limits {
            qps: number(attr.max_qp),
            qp_requests: number(attr.max_qp_wr),
            cqs: number(attr.max_cq),
            cq_entries: number(attr.max_cqe),
            mrs: number(attr.max_mr),
            mr_bytes: attr.max_mr_size,
        })
    }

    /// The GIDs of all ports, with their port: one system call, where sysfs has a file or three for
    /// each place of the table, used or not.
    fn gids(&self, layer: impl Fn(u8) -> LinkLayer) -> Result<Vec<(u8, GidEntry)>, Error> {
        let mut room = 64;
        let entries = loop {
            let mut entries = Vec::<ibv_gid_entry>::with_capacity(room);
            // SAFETY: an open context, and room for as many entries as we say.
            let n = unsafe {
                (self.0.lib.query_gid_table)(
                    self.0.raw.as_ptr(),
                    entries.as_mut_ptr(),
                    room,
                    0,
                    size_of::<ibv_gid_entry>(),
                )
            };
            match usize::try_from(n) {
                Ok(n) if n <= room => {
                    // SAFETY: the library has filled in the first `n`.
                    unsafe { entries.set_len(n) };
                    break entries;
                }
                // Too many for the room.
                Err(_) if n == -(libc::EINVAL as isize) && room < 1 << 16 => room *= 4,
                _ => return Err(error(i32::try_from(n.saturating_neg()).unwrap_or(0))),
            }
        };
        Ok(entries
            .iter()
            .filter_map(|e| {
                let port = u8::try_from(e.port_num).ok()?;
                // SAFETY: both forms of the union are bytes.
                let gid = Gid(unsafe { e.gid.raw });
                let entry = GidEntry {
                    index: e.gid_index,
                    gid,
                    kind: gid_kind(e.gid_type, layer(port)),
                    netdev: interface(e.ndev_ifindex),
                };
                (!gid.is_zero()).then_some((port, entry))
            })
            .collect())
    }

    /// Active and largest MTU of a port, which sysfs does not tell.
    fn mtus(&self, port: u8) -> Result<(Mtu, Mtu), Error> {
        let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: an open context, and room for the answer. The exported function fills the older,
        // shorter form of the same struct, up to `flags`; the rest stays zero.
        check(unsafe {
            (self.0.lib.ibv_query_port)(self.0.raw.as_ptr(), port, attr.as_mut_ptr().cast())
        })?;
        // SAFETY: all fields are numbers: valid when zeroed.
        let attr = unsafe { attr.assume_init() };
        Ok((
            mtu_from(attr.active_mtu).ok_or(Error::Unsupported)?,
            mtu_from(attr.max_mtu).ok_or(Error::Unsupported)?,
        ))
    }
}

fn interface(index: u32) -> Option<String> {
    if index == 0 {
        return None;
    }
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        None,
    );
    rustix::net::netdevice::index_to_name(socket.ok()?, index).ok()
}

impl verbs::Device<Ibv> for Device {
    fn id(&self) -> &DeviceId {
        &self.0.id
    }

    fn info(&self) -> Result<DeviceInfo, Error> {
        let seen = self
            .0
            .tree
            .glance(&self.0.id.name)
            .filter(|d| d.id == self.0.id)
            .ok_or(Error::NoDevice)?;
        let layers: Vec<_> = seen.ports.iter().map(|p| (p.port, p.link_layer)).collect();
        let layer = |port| {
            let found = layers.iter().find(|(p, _)| *p == port);
            found.map_or(LinkLayer::Other, |(_, l)| *l)
        };
        let gids = match self.0.iwarp {
            true => Vec::new(),
            false => self.gids(layer)?,
        };
        let mut ports = Vec::new();
        for p in seen.ports {
            let own = gids.iter().filter(|(port, _)| *port == p.port);
            let own = own.map(|(_, g)| g.clone());
            let (active_mtu, max_mtu) = self.mtus(p.port)?;
            ports.push(PortInfo {
                port: p.port,
                state: p.state,
                link_layer: p.link_layer,
                active_mtu,
                max_mtu,
                lid: p.lid,
                speed_mbps: p.speed_mbps,
                gids: p.gids.into_iter().chain(own).collect(),
            });
        }
        Ok(DeviceInfo {
            id: seen.id,
            node_guid: seen.node_guid,
            transport: seen.transport,
            numa_node: seen.numa_node,
            pci: seen.pci,
            limits: self.limits()?,
            ports,
        })
    }

    fn poll_event(&self) -> Result<Option<DeviceEvent>, Error> {
        let mut raw = MaybeUninit::<ibv_async_event>::zeroed();
        let lib = self.0.lib;
        // SAFETY: an open context, and room for the answer. The descriptor does not wait.
        let ret = unsafe { (lib.ibv_get_async_event)(self.0.raw.as_ptr(), raw.as_mut_ptr()) };
        if ret != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                e => Err(error(e)),
            };
        }
        // The struct as a whole is never looked at: a kind of event that the headers do not know
        // would not be a valid value of the bindings' enum.
        // SAFETY: inside `raw`, an enum of C is an `int` of 32 bits, written or zero.
        let kind = unsafe { (&raw const (*raw.as_ptr()).event_type).cast::<u32>().read() };
        let element = if is_qp_error(kind) {
            // SAFETY: for these events the element is a queue pair, which cannot be destroyed
            // before the event is acknowledged.
            unsafe { (*(*raw.as_ptr()).element.qp).qp_num }
        } else {
            // SAFETY: all members of the union are numbers or pointers; the low 32 bits are read as
            // a number, which is only used for events whose element is a port.
            unsafe { (*raw.as_ptr()).element.port_num.cast_unsigned() }
        };
        // SAFETY: the event from above, acknowledged once.
        unsafe { (lib.ibv_ack_async_event)(raw.as_mut_ptr()) };
        Ok(Some(event(kind, element)))
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.async_fd())
    }

    fn alloc_pd(&self) -> Result<Pd, Error> {
        Pd::alloc(self.0.clone())
    }

    fn create_cq(&self, entries: u32) -> Result<Cq, Error> {
        Cq::create(self.0.clone(), entries)
    }
}
