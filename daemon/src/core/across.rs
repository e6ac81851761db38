//! The core's part of pairing with other nodes: what it says about its ends, what it does when one is paired, what
//! it tells `ss`.

use super::{alive, Core, RETRY_UNPROVEN_MS};
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::view::{self, Entry};
use crate::nodes::peers::cut::Cut;
use crate::nodes::peers::digest::Key;
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::members::GONE;
use crate::nodes::peers::msg::Msg;
use crate::nodes::peers::pairing::{Asked, Out, Paired, Pairing, Shown};
use crate::nodes::peers::{Accepted, Peers};
use crate::os::diag::Pair;
use crate::os::translated::Leaving;
use crate::pairing::socket::End;
use lane::proto::reason::Reason;
use std::collections::HashMap;
use std::rc::Rc;
use tokio::sync::mpsc;
use underpass_rdma::verbs::Provider;

/// When ends that no rail could serve may try again.
const RETRY_RAIL_MS: u32 = 1000;

type Step<'a> = dyn FnOnce(&mut Pairing, u64, &dyn Fn(&ConnRef) -> bool, &mut Vec<Out>) + 'a;

impl<V: Provider> Core<V> {
    /// Makes a step of the pairing with other nodes, and carries out the results.
    fn across(&mut self, step: Box<Step<'_>>) {
        let Some(peers) = &mut self.peers else { return };
        let mut out = Vec::new();
        let clients = &self.clients;
        step(
            &mut peers.pairing,
            self.system.now(),
            &|c| alive(clients, c),
            &mut out,
        );
        for o in out {
            match o {
                Out::Send(node, msg) => {
                    if let Some(p) = &mut self.peers {
                        p.send(&node, msg);
                    }
                }
                Out::Paired(p) => self.paired_across(p),
                Out::Expedited(node, asked) => self.lookup.remote(node, asked),
            }
        }
    }

    /// An end waits and its other end was not found on this node: look for it on other nodes.
    pub(crate) fn lookup_across(&mut self, who: ConnRef, end: End) {
        self.across(Box::new(|p, now, alive, out| {
            p.lookup(who, end, now, alive, out)
        }));
    }

    /// An expedited end waits: asks the nodes that may have its other end to look for it. `false`: none could be
    /// asked.
    pub(crate) fn expedited_across(&mut self, who: ConnRef) -> bool {
        let mut told = 0;
        let n = &mut told;
        self.across(Box::new(move |p, _, _, out| *n = p.expedited(&who, out)));
        told > 0
    }

    /// Reports to a node what was found of a connection that it asked about.
    pub(crate) fn seen_for(&mut self, node: &Name, asked: Asked, reason: u32) {
        if let Some(p) = &mut self.peers {
            let Asked { local, peer, .. } = asked;
            let msg = Msg::Seen {
                local,
                peer,
                reason,
            };
            p.send(node, msg);
        }
    }

    /// An end waits no longer: paired here, declined, closed.
    pub(crate) fn forget_across(&mut self, who: ConnRef) {
        self.across(Box::new(|p, _, _, out| p.forget(who, out)));
    }

    pub(crate) fn forget_client_across(&mut self, id: ClientId) {
        self.across(Box::new(|p, _, _, out| p.forget_client(id, out)));
    }

    /// A step of it. `true`: there is more to do.
    pub(crate) fn sweep_across(&mut self) -> bool {
        let mut more = false;
        let there_is = &mut more;
        self.across(Box::new(move |p, _, alive, out| {
            *there_is = p.sweep(alive, out);
        }));
        more
    }

    pub fn tick_across(&mut self) {
        self.across(Box::new(|p, now, alive, out| p.tick(now, alive, out)));
    }

    /// Ends of which it is to be looked up how this node translates their addresses.
    pub(crate) fn untranslated(&mut self) -> Vec<(ConnRef, Leaving)> {
        let mut due = Vec::new();
        let all = &mut due;
        self.across(Box::new(move |p, now, _, _| *all = p.untranslated(now)));
        let leaving = |(who, (local, peer)): (ConnRef, _)| {
            let p = self.clients.get(&who.client)?;
            let (netns, pid) = (p.netns, p.proc_id.pid);
            let of = Leaving {
                netns,
                pid,
                local,
                peer,
            };
            Some((who, of))
        };
        due.into_iter().filter_map(leaving).collect()
    }

    /// They were looked up: local and peer address of their other ends, where these are others.
    pub(crate) fn translated(&mut self, found: Vec<(ConnRef, Option<Pair>)>) {
        self.across(Box::new(|p, now, alive, out| {
            for (who, there) in found {
                p.translated(who, there, now, alive, out);
            }
        }));
    }

    /// A channel is ready for use. Returns its number, or `None` if another channel is used.
    pub fn channel_up(
        &mut self,
        accepted: &Accepted,
        key: Key,
        room: usize,
        queue: mpsc::Sender<Msg>,
        cut: Rc<Cut>,
    ) -> Option<u64> {
        self.effects(); // messages that belong to the former channel must not go to the new one
        let peers = self.peers.as_mut()?;
        let before = peers.has_channel(&accepted.node);
        let id = peers.admit(accepted, queue, cut)?;
        let node = accepted.node.clone();
        self.across(Box::new(move |p, now, alive, out| {
            if before {
                p.channel_down(&node, Reason::PeerDaemon, now, alive, out);
            }
            p.channel_up(&node, key, room, now, alive, out);
        }));
        self.rails(|r| r.channel_up(&accepted.node, accepted.incarnation));
        Some(id)
    }

    pub fn channel_down(&mut self, node: &Name, id: u64, why: &str, code: Reason) {
        if self.peers.as_mut().is_some_and(|p| p.ended(node, id, why)) {
            self.rails(|r| r.channel_down(node));
            let node = node.clone();
            self.across(Box::new(move |p, now, alive, out| {
                p.channel_down(&node, code, now, alive, out)
            }));
        }
    }

    /// The directory has changed. Returns nodes that have come.
    pub fn nodes_changed(&mut self) -> Vec<Name> {
        let Some(changes) = self.peers.as_mut().map(Peers::compare) else {
            return Vec::new();
        };
        for node in &changes.gone {
            if let Some(id) = self.peers.as_ref().and_then(|p| p.part(node)) {
                self.channel_down(node, id, GONE, Reason::PeerDaemon);
            }
            self.rails(|r| r.node_left(node));
            if let Some(p) = &mut self.peers {
                p.leave(node);
            }
        }
        for node in &changes.come {
            if let Some(p) = &mut self.peers {
                p.join(node);
            }
            self.rails(|r| r.node_came(&node.name));
        }
        self.across(Box::new(|p, now, alive, out| p.reassign(now, alive, out)));
        changes.come.into_iter().map(|p| p.name).collect()
    }

    /// An attempt at a channel has failed.
    pub fn channel_failed(&mut self, node: &Name, why: &str, code: Reason) {
        let Some(p) = self.peers.as_mut().filter(|p| !p.has_channel(node)) else {
            return;
        };
        p.failed(node, why);
        let node = node.clone();
        self.across(Box::new(move |p, now, alive, out| {
            p.channel_down(&node, code, now, alive, out)
        }));
    }

    pub fn peer_message(&mut self, node: &Name, id: u64, msg: Msg) -> Result<(), &'static str> {
        // Messages that still arrive on a replaced channel refer to an outdated state.
        if !self.peers.as_ref().is_some_and(|p| p.is_current(node, id)) {
            return Ok(());
        }
        if matches!(
            msg,
            Msg::Rails { .. }
                | Msg::Engine { .. }
                | Msg::Lane { .. }
                | Msg::LaneGo { .. }
                | Msg::NoLane { .. }
        ) {
            self.rails(|r| r.message(node, msg));
            return Ok(());
        }
        let mut done = Ok(());
        let slot = &mut done;
        self.across(Box::new(move |p, now, alive, out| {
            *slot = p.message(node, msg, now, alive, out);
        }));
        done
    }

    /// Two ends on two nodes are one connection: makes a lane if both nodes can, otherwise both ends are told why
    /// not.
    fn paired_across(&mut self, p: Paired) {
        if let Some(inode) = self.waiting.end(&p.who).map(|e| e.inode) {
            self.lookup.paired(&p.node, p.who, inode);
        }
        self.waiting.forget(p.who);
        self.counters.paired_across += 1;
        self.event(
            p.who.client,
            &format!(
                "connection {} is paired with node {} ({:?})",
                p.who.conn, p.node, p.part
            ),
        );
        let (local, peer) = (p.own_refusal, p.refusal);
        if local == 0 && peer == 0 {
            return self.lane_across(&p);
        }
        let known = |code| Reason::from_code(code).unwrap_or(Reason::PeerDeclined);
        let (local, peer) = match (known(local), known(peer)) {
            (Reason::None, Reason::NoDevice) => (Reason::PeerNoDevice, Reason::NoDevice),
            (Reason::None, p) => (Reason::PeerDeclined, p),
            (l, p) => (l, p),
        };
        // A rail that is down may soon be up again; a missing device rarely appears.
        let soon = [local, peer].contains(&Reason::RailDown);
        let retry_ms = if soon {
            RETRY_RAIL_MS
        } else {
            RETRY_UNPROVEN_MS
        };
        self.decline(p.who, local, peer, retry_ms);
    }

    /// Why ends that wait for other nodes still wait.
    pub(crate) fn waiting_across(&self) -> HashMap<(ClientId, u32, u32), Shown> {
        let Some(peers) = &self.peers else {
            return HashMap::new();
        };
        let ends = self.waiting.ends();
        let shown = |w: ConnRef| Some(((w.client, w.conn, w.gen), peers.pairing.shown(&w)?));
        ends.filter_map(shown).collect()
    }
}

/// Where a row's own reason is only that it waits, enters what is known of other nodes.
pub(crate) fn explain(rows: &mut [Entry], shown: &HashMap<(ClientId, u32, u32), Shown>) {
    for e in rows
        .iter_mut()
        .filter(|e| e.row.reason == Reason::Waiting.code())
    {
        let Some(s) = shown.get(&(e.client, e.conn, e.gen)) else {
            continue;
        };
        // (A service's address is no node's, and yet the other end may be on this one.)
        let here = e.peer_here && s.local == Reason::UnknownNode.code();
        if s.local != 0 && !here {
            e.row.reason = s.local;
        }
        if e.other.is_none() && s.peer != 0 {
            e.row.peer_reason = s.peer;
        }
        view::set_mode(&mut e.row);
    }
}
