//! Memory that devices access: the applications' outgoing rings, for local reads only, and our chunks with their
//! incoming rings, which the peer may write.
//!
//! A chunk of ours is a *region*: the peer is told its number and its key for each link. It is deregistered only
//! after the peer has answered that it no longer writes there, or after every link on which the peer had the key is
//! destroyed here.

use super::api::Event;
use super::link::{Link, State};
use super::links::an_active;
use super::request::What;
use super::{ClientId, Pair, RailId};
use crate::verbs::{Access, Memory, MemoryRegion, ProtectionDomain, Provider};
use crate::wire::{Body, Key};
use litemap::LiteMap;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Maximum number of regions that a peer may tell us per link: 64 processes with all their chunks.
pub(super) const REGIONS_MAX: usize = 4096;

pub(super) struct Chunk<P: Provider> {
    pub client: ClientId,
    pub number: u32,
    own: bool,
    pub memory: Arc<dyn Memory>,
    pub mrs: LiteMap<RailId, P::Mr>,
    /// Links whose peer was told the key, and that are not destroyed.
    told: BTreeSet<u32>,
    leaving: Option<Leaving>,
}

struct Leaving {
    next_try: u64,
    answered: bool,
}

impl<P: Provider> Chunk<P> {
    /// A device may still write here: the registration, and with it the memory, is kept for ever.
    pub(super) fn leak(&mut self) {
        for (_, mr) in std::mem::take(&mut self.mrs) {
            std::mem::forget(mr);
        }
        std::mem::forget(self.memory.clone());
    }
}

impl<P: Provider> Pair<P> {
    /// Adds a chunk of the process, with rings that we send from. It may be mapped read-only.
    pub fn add_app_chunk(
        &mut self,
        client: ClientId,
        number: u32,
        memory: Arc<dyn Memory>,
    ) -> bool {
        self.add_chunk(client, number, memory, false)
    }

    /// Adds a chunk of our area, for rings that the process receives from.
    pub fn add_own_chunk(
        &mut self,
        client: ClientId,
        number: u32,
        memory: Arc<dyn Memory>,
    ) -> bool {
        self.add_chunk(client, number, memory, true)
    }

    fn add_chunk(&mut self, client: ClientId, number: u32, m: Arc<dyn Memory>, own: bool) -> bool {
        let Some(p) = self.clients.get_mut(&client) else {
            return false;
        };
        let of = if own {
            &mut p.own_chunks
        } else {
            &mut p.app_chunks
        };
        if p.removing || of.contains_key(&number) {
            return false;
        }
        let id = self.next.chunk;
        self.next.chunk += 1;
        of.insert(number, id);
        let chunk = Chunk {
            client,
            number,
            own,
            memory: m,
            mrs: LiteMap::new(),
            told: BTreeSet::new(),
            leaving: None,
        };
        self.chunks.insert(id, chunk);
        self.retry_chunks();
        true
    }

    /// Registers chunks that are not registered yet; devices may have been out of resources.
    pub(super) fn retry_chunks(&mut self) {
        let rails: Vec<_> = self.rails.keys().copied().collect();
        for rail in rails {
            self.register_all(rail);
        }
        self.leave_chunks();
    }

    pub(super) fn register_all(&mut self, rail: RailId) {
        let Some(r) = self.rails.get(&rail) else {
            return;
        };
        let mut fresh = false;
        for (_, c) in self.chunks.iter_mut() {
            if c.leaving.is_some() || c.mrs.contains_key(&rail) {
                continue;
            }
            let access = if c.own {
                Access::RemoteWrite
            } else {
                Access::LocalRead
            };
            if let Ok(mr) = r.pd.register(c.memory.clone(), access) {
                c.mrs.insert(rail, mr);
                fresh = true;
            }
        }
        let active = |l: &Link<P>| l.rail == rail && l.state == State::Active;
        let links: Vec<_> = self.links.iter().filter(|(_, l)| active(l)).collect();
        let links: Vec<_> = links.into_iter().map(|(no, _)| *no).collect();
        for no in links {
            self.tell_keys(no);
        }
        if fresh {
            self.wake_lanes(|_| true);
        }
    }

    /// To be called only after all links of the rail are destroyed.
    pub(super) fn deregister_all(&mut self, rail: RailId) {
        for (_, c) in self.chunks.iter_mut() {
            if !self.stuck {
                c.mrs.remove(&rail);
            }
        }
    }

    /// Tells the peer the keys that it does not have yet for this link.
    pub(super) fn tell_keys(&mut self, no: u32) {
        let Some(link) = self.links.get_mut(&no) else {
            return;
        };
        for (id, c) in &mut self.chunks {
            if !c.own || c.leaving.is_some() || c.told.contains(&no) {
                continue;
            }
            let key = c.mrs.get(&link.rail).map(|mr| Key {
                addr: mr.addr(),
                len: mr.len(),
                rkey: mr.rkey(),
            });
            if key.is_some() {
                c.told.insert(no);
            } else if !link.refused_keys.insert(*id) {
                continue; // the peer was told already that there is none
            }
            link.say(*id, Body::ConfirmRkey(key));
        }
    }

    /// The process is gone or has no more lanes to the peer's node: withdraws its memory. All its lanes must have
    /// been removed. [`Event::ClientRemoved`] follows.
    pub fn remove_client(&mut self, id: ClientId) {
        if let Some(p) = self.clients.get_mut(&id) {
            p.removing = true;
        }
        self.lane_timer = 0;
    }

    /// Continues the removal of clients.
    fn leave_chunks(&mut self) {
        let idle = |p: &super::clients::Client| p.removing && p.lanes() == 0;
        let clients: Vec<_> = self.clients.iter().filter(|(_, p)| idle(p)).collect();
        let clients: Vec<_> = clients.into_iter().map(|(id, _)| *id).collect();
        for client in clients {
            let all: Vec<_> = self
                .chunks
                .iter()
                .filter(|(_, c)| c.client == client)
                .collect();
            let all: Vec<u32> = all.into_iter().map(|(id, _)| *id).collect();
            let left = all.iter().filter(|id| !self.leave_chunk(**id)).count();
            if left == 0 {
                for id in all {
                    self.chunks.remove(&id);
                }
                self.clients.remove(&client);
                self.event(Event::ClientRemoved { client });
            }
        }
    }

    /// Can the chunk be deregistered? If not, asks the peer (again) to stop writing.
    fn leave_chunk(&mut self, id: u32) -> bool {
        let Some(c) = self.chunks.get_mut(&id) else {
            return true;
        };
        if self.stuck {
            return false;
        }
        if !c.own {
            return true; // every lane is gone, and with it every request that reads here
        }
        c.told.retain(|no| self.links.contains_key(no));
        let leaving = c.leaving.get_or_insert(Leaving {
            next_try: 0,
            answered: false,
        });
        if leaving.answered || c.told.is_empty() {
            return true;
        }
        if self.now >= leaving.next_try {
            leaving.next_try = self.now + self.config.retry_ns;
            if let Some(link) = an_active(&mut self.links) {
                link.say(id, Body::DeleteRkey { reply: false });
            }
        }
        false
    }

    /// The peer withdraws a region: from now on no lane writes there.
    pub(super) fn region_leaves(&mut self, region: u32) {
        for (_, l) in self.links.iter_mut() {
            l.keys.remove(&region);
        }
        if !self.leaving.contains(&region) && self.leaving.len() < REGIONS_MAX {
            self.leaving.push(region);
        }
    }

    /// Confirms the withdrawal of regions for which no write is in flight any more.
    pub(super) fn finish_leaving(&mut self) {
        // Writes in flight on a link that is destroyed only at our end may still land.
        if self.leaving.is_empty() || self.dead.values().any(|d| !d.peer) {
            return;
        }
        let links = &mut self.links;
        self.leaving.retain(|region| {
            let to = |w: &What| matches!(w, What::Write { region: r, .. } if r == region);
            if links.values().any(|l| l.under_way().any(to)) {
                return true;
            }
            match an_active(links) {
                Some(l) => l.say(*region, Body::DeleteRkey { reply: true }),
                None => return false, // the links with the key are gone, and the peer knows that
            }
            false
        });
    }

    /// The peer no longer writes to this region of ours.
    pub(super) fn region_left(&mut self, region: u32) {
        if let Some(l) = self
            .chunks
            .get_mut(&region)
            .and_then(|c| c.leaving.as_mut())
        {
            l.answered = true;
            self.lane_timer = 0;
        }
    }
}
