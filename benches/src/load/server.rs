//! The serving end: accepts a known number of connections and answers requests until all have hung
//! up. One connection is served by blocking calls, several by a poll loop.

use super::calls::{Calls, Socket};
use super::{machine, message, number, op, Message, BLOCK, MESSAGE};
use anyhow::{bail, Result};

/// One connection.
struct Conn {
    socket: Socket,
    request: Message,
    /// Bytes of the request that are there.
    have: usize,
    /// Bytes still to be swallowed.
    swallow: u64,
}

pub fn serve(calls: Calls, port: u16, connections: usize) -> Result<()> {
    let listener = calls.listen(port, connections as i32)?;
    println!("listening");
    let mut conns = Vec::new();
    for _ in 0..connections {
        conns.push(Conn {
            socket: listener.accept()?,
            request: [0; MESSAGE],
            have: 0,
            swallow: 0,
        });
    }
    let mut buffer = vec![0; BLOCK];
    if let [conn] = &mut conns[..] {
        while conn.serve(&mut buffer, true)? {}
        return Ok(());
    }
    let mut polled: Vec<_> = conns.iter().map(|c| c.socket.polled()).collect();
    while !conns.is_empty() {
        calls.readable(&mut polled)?;
        for i in (0..conns.len()).rev() {
            if polled[i].revents != 0 && !conns[i].serve(&mut buffer, false)? {
                conns.swap_remove(i);
                polled.swap_remove(i);
            }
        }
    }
    Ok(())
}

impl Conn {
    /// Takes what one call gives. False: the peer has hung up.
    fn serve(&mut self, buffer: &mut [u8], wait: bool) -> Result<bool> {
        let Some(n) = self.socket.recv(buffer, wait)? else {
            return Ok(true);
        };
        let mut rest = &buffer[..n];
        while !rest.is_empty() {
            let taken = if self.swallow > 0 {
                let taken = rest.len().min(self.swallow as usize);
                self.swallow -= taken as u64;
                if self.swallow == 0 {
                    self.socket.send_all(&message(op::SWALLOW, 0))?;
                }
                taken
            } else {
                let taken = rest.len().min(MESSAGE - self.have);
                self.request[self.have..self.have + taken].copy_from_slice(&rest[..taken]);
                self.have += taken;
                if self.have == MESSAGE {
                    self.have = 0;
                    self.answer()?;
                }
                taken
            };
            rest = &rest[taken..];
        }
        Ok(n > 0)
    }

    fn answer(&mut self) -> Result<()> {
        match self.request[0] {
            op::ECHO => self.socket.send_all(&self.request),
            op::BUSY => {
                let busy = machine::busy_ns()?;
                self.socket.send_all(&message(op::BUSY, busy))
            }
            op::SWALLOW => {
                self.swallow = number(&self.request);
                Ok(())
            }
            other => bail!("request {other:#x}"),
        }
    }
}
