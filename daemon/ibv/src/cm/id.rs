//! Ids of librdmacm, and the channel of their events.

use crate::convert::{self, check, last_errno};
use crate::device::Context;
use crate::library::Cm;
use crate::never_wait;
use rdma_sys::*;
use std::ffi::{c_int, CStr};
use std::mem::zeroed;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::{null, null_mut, NonNull};
use underpass_rdma::verbs::Error;

/// For finding the address and the route, in milliseconds.
const RESOLVE: c_int = 2000;
/// Requests that may wait to be looked at.
const BACKLOG: c_int = 4;
/// Bytes that a connecting end shows.
pub const DATA: usize = 12;

#[expect(
    clippy::cast_possible_truncation,
    reason = "numbers of address families are small, and an `int` in C's constants alone"
)]
fn to_sockaddr(ip: IpAddr, port: u16) -> libc::sockaddr_storage {
    // SAFETY: numbers only.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    match ip {
        IpAddr::V4(ip) => {
            // SAFETY: the storage is large enough and aligned for addresses of every family.
            let a = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in>() };
            a.sin_family = libc::AF_INET as libc::sa_family_t;
            a.sin_port = port.to_be();
            a.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
        }
        IpAddr::V6(ip) => {
            // SAFETY: as above.
            let a = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in6>() };
            a.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            a.sin6_port = port.to_be();
            a.sin6_addr.s6_addr = ip.octets();
        }
    }
    storage
}

fn from_sockaddr(storage: &libc::sockaddr_storage) -> Option<IpAddr> {
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family, and all of its fields are numbers.
            let a = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
            Some(Ipv6Addr::from(a.sin6_addr.s6_addr).to_canonical())
        }
        _ => None,
    }
}

fn error(e: Error) -> Error {
    match e {
        Error::Os(libc::ECONNREFUSED | libc::ECONNRESET | libc::ECONNABORTED) => Error::Refused,
        Error::Os(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => Error::Unreachable,
        Error::Os(libc::EADDRNOTAVAIL) => Error::NotOurAddress,
        e => e,
    }
}

/// As [`check`]: all functions of librdmacm answer 0, or -1 and errno.
fn done(ret: c_int) -> Result<(), Error> {
    check(ret).map_err(error)
}

/// Where the events of the ids arrive.
pub struct Channel {
    raw: NonNull<rdma_event_channel>,
    cm: &'static Cm,
}

// SAFETY: librdmacm's functions may be called from any thread; a channel is used by one at a time.
unsafe impl Send for Channel {}

impl Channel {
    pub fn open(cm: &'static Cm) -> Result<Channel, Error> {
        // SAFETY: no arguments.
        let raw = unsafe { (cm.rdma_create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(|| match last_errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => Error::NoConnectionManager,
            e => convert::error(e),
        })?;
        let channel = Channel { raw, cm };
        // SAFETY: the library has just made it.
        never_wait(unsafe { (*raw.as_ptr()).fd })?;
        Ok(channel)
    }

    pub fn next(&self) -> Result<Option<Event>, Error> {
        let mut raw = null_mut();
        // SAFETY: a living channel whose descriptor does not wait, and room for the answer.
        if unsafe { (self.cm.rdma_get_cm_event)(self.raw.as_ptr(), &mut raw) } != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                e => Err(error(convert::error(e))),
            };
        }
        // SAFETY: an event that the library has filled in; of reliable connections, as all ids here
        // are, so that `conn` is the member which is set.
        let (kind, id, conn) = unsafe { ((*raw).event, (*raw).id, (*raw).param.conn) };
        let mut data = [0; DATA];
        let len = usize::from(conn.private_data_len).min(DATA);
        if !conn.private_data.is_null() {
            let from = conn.private_data.cast::<u8>();
            // SAFETY: the event has at least `len` bytes there until it is acknowledged.
            unsafe { from.copy_to_nonoverlapping(data.as_mut_ptr(), len) };
        }
        // SAFETY: the event from above, acknowledged once, not touched again.
        unsafe { (self.cm.rdma_ack_cm_event)(raw) };
        let data = data[..len].to_vec();
        Ok(Some(Event { kind, id, data }))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once, after the ids that report to it.
        unsafe { (self.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

pub struct Event {
    pub kind: rdma_cm_event_type::Type,
    id: *mut rdma_cm_id,
    /// What came with it, if the peer sent anything.
    pub data: Vec<u8>,
}

/// One end of a connection, or of what may become one. Whoever copies it makes sure that the [`Id`]
/// lives as long as the copy is used, and is used by one thread at a time.
#[derive(Clone, Copy)]
pub struct Handle {
    raw: NonNull<rdma_cm_id>,
    cm: &'static Cm,
}

// SAFETY: librdmacm's functions may be called from any thread; those here are never called for one
// id from two at once (see `Stage::Connecting`).
unsafe impl Send for Handle {}

impl Handle {
    pub fn bind(self, ip: IpAddr) -> Result<(), Error> {
        let mut to = to_sockaddr(ip, 0);
        // SAFETY: a living id, and an address of a family that it tells.
        done(unsafe { (self.cm.rdma_bind_addr)(self.raw.as_ptr(), (&raw mut to).cast()) })
    }

    pub fn listen(self) -> Result<u16, Error> {
        // SAFETY: a living id.
        done(unsafe { (self.cm.rdma_listen)(self.raw.as_ptr(), BACKLOG) })?;
        // SAFETY: as above.
        let port = unsafe { (self.cm.rdma_get_src_port)(self.raw.as_ptr()) };
        Ok(u16::from_be(port))
    }

    pub fn resolve(self, from: IpAddr, to: IpAddr, port: u16) -> Result<(), Error> {
        let (mut from, mut to) = (to_sockaddr(from, 0), to_sockaddr(to, port));
        let (from, to) = ((&raw mut from).cast(), (&raw mut to).cast());
        // SAFETY: a living id, and addresses of families that they tell, which are copied.
        done(unsafe { (self.cm.rdma_resolve_addr)(self.raw.as_ptr(), from, to, RESOLVE) })
    }

    pub fn route(self) -> Result<(), Error> {
        // SAFETY: a living id that has a device, see `on`.
        done(unsafe { (self.cm.rdma_resolve_route)(self.raw.as_ptr(), RESOLVE) })
    }

    /// Blocks for as long as TCP takes.
    pub fn connect(self, qpn: u32, data: [u8; DATA]) -> Result<(), Error> {
        let mut p = parameters(qpn, &data);
        // SAFETY: a living id that has a device, and parameters that are copied.
        done(unsafe { (self.cm.rdma_connect)(self.raw.as_ptr(), &mut p) })
    }

    pub fn accept(self, qpn: u32) -> Result<(), Error> {
        let mut p = parameters(qpn, &[]);
        // SAFETY: as above.
        done(unsafe { (self.cm.rdma_accept)(self.raw.as_ptr(), &mut p) })
    }

    pub fn reject(self) {
        // Nothing to do if it is gone already.
        // SAFETY: a living id, and no data.
        unsafe { (self.cm.rdma_reject)(self.raw.as_ptr(), null(), 0) };
    }

    pub fn peer(self) -> Option<IpAddr> {
        // SAFETY: a living id. The storage is the largest member of the union, and zero or written.
        from_sockaddr(unsafe { &(*self.raw.as_ptr()).route.addr.dst_addr_union.dst_storage })
    }

    /// Is it on our device? Only there the number of our queue pair means something. (An address may
    /// belong to several devices, of which the kernel takes one. Without a device the library's next
    /// functions would follow a null pointer.)
    pub fn on(self, ours: &Context) -> Result<(), Error> {
        // SAFETY: a living id.
        let verbs = unsafe { (*self.raw.as_ptr()).verbs };
        if verbs.is_null() {
            return Err(Error::NotOurAddress);
        }
        // SAFETY: an open context that the id keeps open; the device's name is a C string inside it.
        let name = unsafe { CStr::from_ptr((ours.lib.ibv_get_device_name)((*verbs).device)) };
        let same = name.to_bytes() == ours.id.name.as_bytes();
        same.then_some(()).ok_or(Error::NotOurAddress)
    }
}

fn parameters(qpn: u32, data: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: if data.is_empty() {
            null()
        } else {
            data.as_ptr().cast()
        },
        private_data_len: u8::try_from(data.len()).unwrap_or(u8::MAX),
        // We never read, but some devices begin a connection with an empty read of their own.
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: 0,
        // InfiniBand's.
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: qpn,
    }
}

/// Owns an id; dropped before its channel.
pub struct Id(Handle);

impl Id {
    /// The id that came with a request.
    ///
    /// # Safety
    ///
    /// The event is a request from this channel, and this is done once.
    pub unsafe fn of(request: &Event, channel: &Channel) -> Option<Id> {
        let (raw, cm) = (NonNull::new(request.id)?, channel.cm);
        Some(Id(Handle { raw, cm }))
    }

    pub fn handle(&self) -> Handle {
        self.0
    }

    pub fn has(&self, event: &Event) -> bool {
        std::ptr::eq(self.0.raw.as_ptr(), event.id)
    }

    pub fn create(channel: &Channel) -> Result<Id, Error> {
        let (cm, mut raw) = (channel.cm, null_mut());
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: a living channel, and room for the answer.
        done(unsafe { (cm.rdma_create_id)(channel.raw.as_ptr(), &mut raw, null_mut(), space) })?;
        let raw = NonNull::new(raw).ok_or(Error::NoMemory)?;
        Ok(Id(Handle { raw, cm }))
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: made by or for us, destroyed once. A refusal leaves memory of the library's behind;
        // the kernel's part goes with the channel.
        unsafe { (self.0.cm.rdma_destroy_id)(self.0.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use underpass_rdma::verbs::Gid;

    #[test]
    fn addresses() {
        let four: IpAddr = "10.9.0.1".parse().unwrap();
        let s = to_sockaddr(four, 0x1234);
        assert_eq!(c_int::from(s.ss_family), libc::AF_INET);
        // SAFETY: made of bytes only, and larger than 8 of them.
        let bytes = unsafe { &*(&raw const s).cast::<[u8; 8]>() };
        assert_eq!(bytes[2..], [0x12, 0x34, 10, 9, 0, 1]);
        assert_eq!(from_sockaddr(&s), Some(four));

        let six: IpAddr = "fd00:1::9".parse().unwrap();
        let s = to_sockaddr(six, 0x1234);
        assert_eq!(c_int::from(s.ss_family), libc::AF_INET6);
        // SAFETY: as above.
        let bytes = unsafe { &*(&raw const s).cast::<[u8; 28]>() };
        assert_eq!(bytes[2..4], [0x12, 0x34]);
        assert_eq!(bytes[8..24], Gid::from(six).0);
        assert_eq!(bytes[24..], [0; 4], "no scope");
        assert_eq!(from_sockaddr(&s), Some(six));

        // Mapped addresses are those of IPv4, on both sides of every comparison.
        let gid = Gid::from(four);
        assert_eq!(from_sockaddr(&to_sockaddr(gid.ip(), 1)), Some(four));
        let mapped = Ipv6Addr::from(gid.0).into();
        assert_eq!(from_sockaddr(&to_sockaddr(mapped, 1)), Some(four));

        // SAFETY: numbers only.
        let none: libc::sockaddr_storage = unsafe { zeroed() };
        assert_eq!(from_sockaddr(&none), None);
    }

    #[test]
    fn what_is_asked_of_the_kernel() {
        let t = [7; DATA];
        let p = parameters(77, &t);
        assert_eq!((p.qp_num, p.srq), (77, 0));
        assert_eq!(usize::from(p.private_data_len), DATA);
        assert_eq!(p.private_data, t.as_ptr().cast());
        let p = parameters(77, &[]);
        assert!(p.private_data.is_null() && p.private_data_len == 0);
    }

    #[test]
    fn errors_say_what_became_of_the_peer() {
        assert_eq!(error(Error::Os(libc::ECONNREFUSED)), Error::Refused);
        assert_eq!(error(Error::Os(libc::ETIMEDOUT)), Error::Unreachable);
        assert_eq!(
            error(Error::Os(libc::EADDRINUSE)),
            Error::Os(libc::EADDRINUSE)
        );
        assert_eq!(error(Error::Invalid), Error::Invalid);
    }
}
