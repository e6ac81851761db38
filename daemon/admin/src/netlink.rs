//! Questions to the kernel over netlink, and their answers.

use netlink_packet_core::{
    NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
    NlasIterator, NLA_HEADER_SIZE, NLM_F_REQUEST,
};
use netlink_sys::{Socket, SocketAddr};
use std::convert::Infallible;
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

/// A message whose body no crate knows: its kind, and what follows its header.
#[derive(Debug)]
pub struct Raw {
    /// As in the header.
    pub kind: u16,
    /// The body.
    pub bytes: Vec<u8>,
}

impl NetlinkSerializable for Raw {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for Raw {
    type Error = Infallible;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Infallible> {
        Ok(Raw {
            kind: header.message_type,
            bytes: payload.to_vec(),
        })
    }
}

/// An attribute of at most 65,531 bytes, padded.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(NLA_HEADER_SIZE + value.len()).unwrap_or(u16::MAX);
    let mut a = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    a.extend_from_slice(value);
    a.resize(a.len().next_multiple_of(4), 0);
    a
}

/// The value of the first attribute of a kind among these, up to the first that is none. The bits that say how to read a value
/// do not belong to its kind.
pub fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    let mut all = NlasIterator::new(attributes).map_while(Result::ok);
    let found = all.find(|a| a.kind() == kind)?;
    let length = usize::from(found.length());
    found.into_inner().get(NLA_HEADER_SIZE..length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes() {
        let all = [
            attribute(1, b"ab\0"),
            attribute(0x8002, &attribute(7, &[9])),
            attribute(3, &[0]),
        ]
        .concat();
        assert_eq!(find(&all, 1), Some(&b"ab\0"[..]));
        assert_eq!(find(find(&all, 2).unwrap(), 7), Some(&[9][..]));
        assert_eq!(find(&all, 3), Some(&[0][..]));
        assert_eq!(find(&all, 4), None);
        for cut in 0..all.len() - 4 {
            assert_eq!(find(&all[..cut], 3), None);
        }
        assert_eq!(find(&[0; 64], 1), None, "a length of nothing ends it");
    }
}
