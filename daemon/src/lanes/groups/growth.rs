//! How areas grow: the writer asks for a further chunk, and both clients map it before rings are placed there.

use super::area::{make_chunk, Chunk, Stage};
use super::{LinkGroups, Out, Side, Size, Violation, FURTHER};
use crate::clients::ids::ClientId;
use crate::clients::limits::{Cgroup, Limit};
use crate::os::memfd;
use lane::abi::CHUNKS;
use lane::num;
use lane::proto::msg::ToShim;
use std::sync::Arc;
use std::time::Duration;

/// Shortest time between two times that the same chunk is sent.
pub(super) const RESEND_AFTER: Duration = Duration::from_millis(900);

impl LinkGroups {
    /// The other client has mapped a further chunk of the area opposite `side`.
    pub fn peer_mapped(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        n: u32,
        out: &mut Out,
    ) -> Result<(), Violation> {
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(());
        };
        let owner = 1 - usize::from(side);
        let client = group.sides[owner].client;
        let Some(c) = group.sides[owner].chunk(n).filter(|_| n != 0) else {
            return Err(Violation("mapped a peer chunk that does not exist"));
        };
        if c.stage == Stage::Shared {
            return Ok(()); // it was given twice
        }
        if c.stage != Stage::Sealed {
            return Err(Violation("mapped a peer chunk it was not given"));
        }
        c.stage = Stage::Shared;
        ready(id, num::tiny(owner), client, n, out);
        Ok(())
    }

    /// The writer wants another data chunk. If a limit forbids it, the writer goes on without, and asks again. A
    /// chunk that is on its way already is sent again: a client that could not map it may be able to now.
    pub fn want_chunk(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        out: &mut Out,
    ) -> Result<(), Violation> {
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(());
        };
        let remote = group.is_remote();
        let peer = group.sides[1 - usize::from(side)].client;
        let s = &mut group.sides[usize::from(side)];
        let bytes = s.size.chunk_bytes() as u64;
        let number = |k: usize| num::small(FURTHER + k);
        let growing = s.more.iter().position(|c| c.stage != Stage::Shared);
        if let Some(k) = growing {
            // A remote client is this daemon, which maps what it is given: it is sent nothing again.
            match s.more[k].stage {
                _ if self.clock.since(s.more[k].sent) < RESEND_AFTER => return Ok(()),
                Stage::Given if !s.client.is_remote() => give(id, side, s, number(k), out),
                Stage::Sealed if !peer.is_remote() => {
                    share(id, 1 - side, peer, number(k), &s.more[k], out);
                }
                _ => {}
            }
            s.more[k].sent = self.clock.now();
            return Ok(());
        }
        let n = number(s.more.len());
        if n as usize >= CHUNKS {
            s.payer.refused(Limit::Chunks);
            return Ok(());
        }
        if !s.payer.take_memory(bytes, remote) {
            return Ok(());
        }
        match make_chunk(id, side, n, s.size, self.clock.now()) {
            Ok(c) => {
                s.more.push(c);
                s.starved = false;
            }
            Err(e) => {
                tracing::warn!(group = %format_args!("{id:#x}"), "no memory for a chunk: {e}");
                s.payer.give_memory(bytes, remote);
                return Ok(());
            }
        }
        give(id, side, s, n, out);
        Ok(())
    }

    /// Bytes of the chunk that a client would get if it wanted one now. `None`: it would get none, or one that it has already.
    pub(crate) fn would_grow(&self, from: ClientId, id: u64, side: u8) -> Option<u64> {
        let s = self.groups.get(&id)?.sides.get(usize::from(side))?;
        let growing = s.more.iter().any(|c| c.stage != Stage::Shared);
        let may = s.client == from && !growing && FURTHER + s.more.len() < CHUNKS;
        may.then_some(s.size.chunk_bytes() as u64)
    }

    /// There is no memory for that chunk.
    pub(crate) fn starve(&mut self, id: u64, side: u8) {
        let group = self.groups.get_mut(&id);
        if let Some(s) = group.and_then(|g| g.sides.get_mut(usize::from(side))) {
            s.starved = true;
        }
    }

    /// Bytes that another lane of these two may make it necessary to give to the first: those of an area, if they have no
    /// link group with a free slot, or those of a chunk, if it was refused one. `None`: it has memory for the ring.
    pub(crate) fn lacks(&self, id: ClientId, other: ClientId, size: Size) -> Option<u64> {
        let pair = (id.min(other), id.max(other));
        let ids = self.by_pair.get(&pair).into_iter().flatten();
        let free = |g: &&super::LinkGroup| g.free_slot().is_some();
        let Some(g) = ids.filter_map(|g| self.groups.get(g)).find(free) else {
            return Some(size.first_bytes() as u64);
        };
        let starved = g.sides.iter().filter(|s| s.client == id && s.starved);
        starved.map(|s| s.size.chunk_bytes() as u64).max()
    }

    /// Of the areas of these clients, for which `payer` pays, the bytes that nobody has touched: they may be charged at any
    /// time, and nobody asks again.
    pub(crate) fn untouched(&self, payer: &Arc<Cgroup>, counts: impl Fn(ClientId) -> bool) -> u64 {
        let sides = self.groups.values().flat_map(|g| &g.sides);
        let all = sides.filter(|s| Arc::ptr_eq(&s.payer, payer) && counts(s.client));
        let left = |c: &Chunk| c.bytes.saturating_sub(memfd::touched(&c.fd));
        all.flat_map(Side::chunks).map(left).sum()
    }
}

/// Gives a sealed chunk to the client that reads it.
pub(super) fn share(id: u64, side: u8, to: ClientId, n: u32, c: &Chunk, out: &mut Out) {
    let msg = ToShim::PeerChunk {
        group: id,
        side,
        chunk: n,
        bytes: c.bytes,
    };
    out.send(to, msg, vec![c.fd.clone()]);
}

/// Tells a writer that the other client has its further chunk.
pub(super) fn ready(id: u64, side: u8, to: ClientId, n: u32, out: &mut Out) {
    let msg = ToShim::ChunkReady {
        group: id,
        side,
        chunk: n,
    };
    out.send(to, msg, vec![]);
}

/// Gives a further chunk to its writer.
fn give(id: u64, side: u8, s: &mut Side, n: u32, out: &mut Out) {
    let client = s.client;
    let Some(c) = s.chunk(n) else { return };
    let msg = ToShim::Chunk {
        group: id,
        side,
        chunk: n,
        bytes: c.bytes,
    };
    out.send(client, msg, vec![c.fd.clone()]);
}
