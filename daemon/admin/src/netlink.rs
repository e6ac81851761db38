//! Questions to the kernel over netlink, and their answers.

use netlink_packet_core::{
    NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
    NLM_F_REQUEST,
};
use netlink_sys::{Socket, SocketAddr};
use std::io;

/// A socket for this protocol (`NETLINK_ROUTE` and so on) in the thread's network namespace, in which it stays.
pub fn open(protocol: isize) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Sends a request, and shows each message of the answer until `each` fails. `flags`: `NLM_F_DUMP` or `NLM_F_ACK`, which
/// say how the answer ends. Waits for the kernel.
pub fn ask<M: NetlinkSerializable + NetlinkDeserializable>(
    socket: &Socket,
    flags: u16,
    message: M,
    mut each: impl FnMut(M) -> io::Result<()>,
) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = &datagram[..];
        while !rest.is_empty() {
            let m = NetlinkMessage::<M>::deserialize(rest).map_err(io::Error::other)?;
            let step = (m.header.length as usize).next_multiple_of(4);
            rest = rest.get(step.max(4)..).unwrap_or_default();
            match m.payload {
                NetlinkPayload::InnerMessage(m) => each(m)?,
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(e) if e.code.is_none() => return Ok(()),
                NetlinkPayload::Error(e) => return Err(e.to_io()),
                _ => {}
            }
        }
    }
}
