//! The core's part of lanes to other nodes: it connects the rails with clients, link groups and peers.

use super::{Core, RETRY_SOON_MS, RETRY_TROUBLE_MS};
use crate::clients::client::Client;
use crate::clients::ids::{ClientId, ConnRef};
use crate::dataplane::rail::locality::Holder;
use crate::dataplane::rail::{Effect, Rails};
use crate::lanes::groups::{Out, Refused, Send, Violation};
use crate::lanes::inherited::Inheritance;
use crate::lanes::unseen::{Held, Idle};
use crate::nodes::peers::pairing::Paired;
use crate::os::fds::Foreign;
use crate::os::sockopt;
use lane::num;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use underpass_rdma::verbs::Provider;

/// Results of the rails' steps that are not carried out yet.
#[derive(Default)]
pub(super) struct Effects {
    waiting: VecDeque<Effect>,
    under_way: bool,
}

impl Effects {
    /// Whoever carried them out does not do so any more.
    pub(super) fn interrupted(&mut self) {
        self.under_way = false;
    }

    /// For tests.
    pub(super) fn interrupt(&mut self) {
        self.under_way = true;
    }
}

/// The daemon's side of every remote link group.
const REMOTE: u8 = 1;

impl<V: Provider> Core<V> {
    /// Makes a step of the rails, and carries out its effects. Effects of the data plane's own steps are carried
    /// out first.
    pub fn rails<T>(&mut self, step: impl FnOnce(&mut Rails<V>) -> T) -> Option<T> {
        let plane = self.rails.clone()?;
        let done = loop {
            let mut rails = plane.lock();
            rails.take_effects(&mut self.effects.waiting);
            if self.effects.waiting.is_empty() || self.effects.under_way {
                break step(&mut rails);
            }
            drop(rails);
            self.effects();
        };
        self.effects();
        Some(done)
    }

    /// Carries out the effects of the rails' steps in their order. Effects that arise meanwhile are appended, and
    /// also carried out by this loop, not by a nested call.
    pub fn effects(&mut self) {
        let Some(plane) = self.rails.clone() else {
            return;
        };
        if std::mem::replace(&mut self.effects.under_way, true) {
            return;
        }
        loop {
            plane.lock().take_effects(&mut self.effects.waiting);
            let Some(e) = self.effects.waiting.pop_front() else {
                break;
            };
            self.effect(e);
        }
        self.effects.under_way = false;
    }

    fn effect(&mut self, e: Effect) {
        if let Effect::WantChunk { group } = e {
            let own = self.groups.remote_client(group);
            if own.is_some_and(|id| !self.may_grow(id, (group, REMOTE))) {
                return;
            }
        }
        let mut out = Out::default();
        let groups = &mut self.groups;
        // A link group may be gone already, because its last messages crossed ours: then `as_remote` does nothing.
        let done = match e {
            Effect::Say(node, msg) => {
                if let Some(p) = &mut self.peers {
                    p.send(&node, msg);
                }
                Ok(())
            }
            Effect::Mapped { group, chunk } => {
                groups.as_remote(group, |l, p| l.mapped(p, group, REMOTE, chunk, &mut out))
            }
            Effect::PeerMapped { group, chunk } => groups.as_remote(group, |l, p| {
                l.peer_mapped(p, group, REMOTE, chunk, &mut out)
            }),
            Effect::WantChunk { group } => {
                groups.as_remote(group, |l, p| l.want_chunk(p, group, REMOTE, &mut out))
            }
            Effect::TearDown { group } => {
                groups.as_remote(group, |l, p| l.group_failed(p, group, REMOTE, &mut out))
            }
            Effect::Release { at, who, uses, tag } => {
                groups.release(at, who, (uses, tag), &mut out);
                Ok(())
            }
            Effect::Abandon {
                at,
                who,
                local,
                peer,
                retry_ms,
            } => {
                groups.abandon(at.0, at.1, &mut Out::default());
                self.decline(who, local, peer, retry_ms);
                Ok(())
            }
            Effect::Done { at } => {
                groups.as_remote(at.0, |l, p| l.lane_done(p, at.0, REMOTE, at.1, &mut out))
            }
            Effect::Unused { at, who } => {
                if let Some(p) = self.clients.get_mut(&who.client) {
                    let msg = ToShim::LaneGone {
                        group: at.0,
                        side: 0,
                        lane: at.1,
                        conn: who.conn,
                        gen: who.gen,
                    };
                    p.send(msg, vec![]);
                }
                Ok(())
            }
            Effect::Reset { who, reason } => {
                self.decline(who, reason, Reason::None, 0);
                Ok(())
            }
            Effect::Refusal(node, code) => {
                if let Some(p) = &mut self.peers {
                    p.pairing.set_refusal(&node, code);
                }
                Ok(())
            }
        };
        if let Err(Violation(what)) = done {
            tracing::error!("our own side of a link group: {what}");
        }
        self.act(out, Reason::DaemonLost, RETRY_SOON_MS);
        self.busy_changed();
    }

    /// Passes on to the rails: messages of link groups for remote clients, lanes whose link group is set up, and lanes
    /// that failed.
    pub(super) fn act_remote(
        &mut self,
        sends: Vec<Send>,
        ready: &[ConnRef],
        failed: &[[ConnRef; 2]],
    ) {
        let ready: Vec<_> = ready
            .iter()
            .filter_map(|w| self.groups.lane_of(*w))
            .collect();
        let undone = failed.iter().filter(|e| e[1].client.is_remote());
        let undone: Vec<ConnRef> = undone.map(|e| e[0]).collect();
        if sends.is_empty() && ready.is_empty() && undone.is_empty() {
            return;
        }
        self.rails(|rails| {
            for s in sends {
                rails.deliver(s.to, s.msg, &s.fds);
            }
            ready.into_iter().for_each(|at| rails.ready(at));
            undone.into_iter().for_each(|who| rails.undone(who));
        });
    }

    /// The ends of a connection are on two nodes that both have rails: makes a lane.
    pub(crate) fn lane_across(&mut self, p: &Paired) {
        let remote = self
            .rails
            .as_ref()
            .and_then(|r| r.lock().client_of(&p.node));
        let local = self.clients.get(&p.who.client);
        let local = local.map(|x| (x.cgroup().clone(), x.family.clone()));
        let (Some(remote), Some((cgroup, family))) = (remote, local) else {
            return;
        };
        let other = ConnRef {
            client: remote,
            conn: num::low32(p.pair),
            gen: num::low32(p.pair >> 32),
        };
        let ends = [p.who, other];
        let mut out = Out::default();
        let made = match self.may_have_lane([p.who.client, remote]) {
            Ok(sizes) => self.groups.connect(
                ends,
                [(&cgroup, sizes[0]), (&self.remote_cgroup, sizes[1])],
                self.system.random(),
                &mut out,
            ),
            Err(_) => Err(Refused::Memory),
        };
        match made {
            Ok((group, slot, uses)) => {
                for (end, first) in ends.into_iter().zip(p.firsts) {
                    self.groups.proven((group, slot), end, (0, first));
                }
                self.rails(|r| r.begin(p, (group, slot), uses, family));
                self.act(out, Reason::Memory, RETRY_TROUBLE_MS);
            }
            Err(e) => {
                let reason = match e {
                    Refused::Limit(_) => Reason::Limit,
                    Refused::Memory => Reason::Memory,
                };
                self.rails(|r| r.no_slot(p, reason));
                self.decline(p.who, reason, Reason::PeerDeclined, RETRY_TROUBLE_MS);
            }
        }
        self.effects();
        self.busy_changed();
    }

    /// A process cannot map a link group. Returns what ends of its lanes are told.
    pub(super) fn group_failed(
        &mut self,
        id: ClientId,
        (group, side): (u64, u8),
        out: &mut Out,
    ) -> Result<(Reason, u32), Violation> {
        self.event(id, &format!("cannot map link group {group:#x}"));
        self.groups.group_failed(id, group, side, out)?;
        self.rails(|r| r.group_failed(id, group));
        Ok((Reason::Memory, RETRY_TROUBLE_MS))
    }

    /// A process gives us a copy of the socket of a lane to another node.
    pub(super) fn lane_held(
        &mut self,
        from: ClientId,
        at: (u64, u32),
        fds: Vec<Foreign>,
    ) -> Result<(), Violation> {
        let fd = super::only(fds, "a lane's socket is exactly one descriptor")?;
        let holder = self.clients.get(&from).map(|p| Holder {
            pid: p.proc_id.pid,
            namespace: sockopt::network_namespace(fd.as_fd()).ok(),
            job: Some(p.cgroup().job()),
        });
        match self.rails(|r| r.held(from, holder.unwrap_or_default(), at, fd)) {
            Some(false) => Err(Violation("a lane's socket is another connection's")),
            _ => {
                self.held.notify_one();
                Ok(())
            }
        }
    }

    /// A process has ended: the daemon finishes its lanes to other nodes.
    pub(super) fn dead_remote(&mut self, p: &Client) {
        let Some(plane) = &self.rails else { return };
        let all = plane.lock().lanes_of(p.id);
        let system = self.system.clone();
        let inheritance = Inheritance::of(p, &*system); // reads `/proc`, so the rails are not locked meanwhile
        let left = |who: ConnRef| Some((who, inheritance.left(&who)?));
        let left: HashMap<_, _> = all.into_iter().filter_map(left).collect();
        let inherited = self.rails(|r| r.client_dead(p.id, &left));
        self.inherit(inherited.unwrap_or_default());
    }

    /// The owner of the lane that a message of `from` is about. A forked child may take its parent's connection
    /// back to TCP, whether the parent lives or not; its messages about that lane then count as the parent's.
    pub(super) fn owner(&self, from: ClientId, group: u64, side: u8, lane: u32) -> ClientId {
        let Some(family) = self.clients.get(&from).map(|p| p.family.ident) else {
            return from;
        };
        let kin = |p: &ClientId| {
            self.clients
                .get(p)
                .is_some_and(|p| p.family.ident == family)
        };
        // Within the node there is no such case: a child leaves the lane to its owner.
        let living = self.groups.remote_owner(group, side).filter(kin);
        let rails = self.rails.as_ref();
        let owner = living.or_else(|| rails?.lock().inherited((group, lane), family));
        owner.unwrap_or(from)
    }

    /// Ends of idle lanes to other nodes, whose holders are to be looked up.
    pub fn idle_ends(&mut self) -> Vec<Held> {
        let idle = self.rails.as_ref().map(|r| r.lock().idle_ends());
        let clients = &self.clients;
        let held = |idle: Idle| {
            let p = clients.get(&idle.who.client)?;
            Some(Held {
                idle,
                pid: p.proc_id.pid,
                family: p.family.clone(),
            })
        };
        idle.unwrap_or_default()
            .into_iter()
            .filter_map(held)
            .collect()
    }
}
