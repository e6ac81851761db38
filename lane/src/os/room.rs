//! Room in a socket's send buffer for what an end that leaves its lane has on its way down. The receiver may take
//! nothing meanwhile, and a ring may hold more than the buffer, which is small while it has seen little traffic.

/// SO_BUF_LOCK (Linux 5.15): which sizes were set by the application.
pub const SO_BUF_LOCK: i32 = 72;
/// Its bit for the send buffer.
pub const SNDBUF_LOCKED: u32 = 1;
/// Its bit for the receive buffer.
pub const RCVBUF_LOCKED: u32 = 2;

/// Bytes that the send buffer holds in addition: two rings that have grown to be fast, and the kernel's own structures.
const MORE: u32 = (2 << 20) + (256 << 10);
/// Largest send buffer that everybody may ask for, unless an administrator has set it lower (`SK_WMEM_MAX`). A larger one
/// has grown by itself, and could not be set to that size again.
const ASKED_MAX: u32 = 2 * 212_992;
/// A send buffer of this size is not made larger (somebody else may be doing it).
const LARGEST: u32 = 8 << 20;

/// Options of one socket. The system calls are the caller's, as elsewhere in this module.
pub trait Options {
    /// `None`: this kernel does not know it.
    fn get(&self, level: i32, name: i32) -> Option<u32>;
    /// False: not permitted.
    fn set(&self, level: i32, name: i32, value: u32) -> bool;
}

/// Sends, while the socket's send buffer is larger than it is meant to be; not if it cannot be given back its size. The
/// buffer never holds more than [`MORE`] bytes above that, however often this is called. What somebody else sets
/// meanwhile stays. `force`: for who may set sizes beyond `net.core.wmem_max` (socket(7)).
pub fn with_more<R>(o: &impl Options, force: bool, send: impl FnOnce() -> R) -> R {
    let (sol, tcp) = (libc::SOL_SOCKET, libc::IPPROTO_TCP);
    let lock = o.get(sol, SO_BUF_LOCK);
    let size = o.get(sol, libc::SO_SNDBUF);
    let unsent = o.get(tcp, libc::TCP_NOTSENT_LOWAT);
    let (Some(lock), Some(size), Some(unsent)) = (lock, size, unsent) else {
        return send();
    };
    // The kernel doubles what it is told.
    let larger = size.saturating_add(MORE) / 2;
    let by = match force && size < LARGEST && o.set(sol, libc::SO_SNDBUFFORCE, larger) {
        true => libc::SO_SNDBUFFORCE,
        false if size <= ASKED_MAX && o.set(sol, libc::SO_SNDBUF, larger) => libc::SO_SNDBUF,
        false => return send(),
    };
    let ours = o.get(sol, libc::SO_SNDBUF);
    let lowered = o.set(tcp, libc::TCP_NOTSENT_LOWAT, u32::MAX);
    let r = send();
    if lowered && o.get(tcp, libc::TCP_NOTSENT_LOWAT) == Some(u32::MAX) {
        o.set(tcp, libc::TCP_NOTSENT_LOWAT, unsent);
    }
    if o.get(sol, libc::SO_SNDBUF) == ours {
        o.set(sol, by, size / 2);
        let now = o.get(sol, SO_BUF_LOCK).unwrap_or(lock);
        o.set(
            sol,
            SO_BUF_LOCK,
            now & !SNDBUF_LOCKED | lock & SNDBUF_LOCKED,
        );
    }
    r
}
