//! Registrations: what becomes of a socket that a shim has handed in.

use super::{alive, Core, RETRY_SOON_MS, RETRY_TROUBLE_MS, RETRY_UNPROVEN_MS};
use crate::clients::client::{Known, KNOWN_MAX};
use crate::clients::control::Control;
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::{Job, Limit};
use crate::lanes::groups::{Out, Refused, Violation};
use crate::lanes::holders::Came;
use crate::os::fds::Foreign;
use crate::pairing::local::Verdict;
use crate::pairing::proof::Proof;
use crate::pairing::socket::End;
use crate::pairing::unprovable::{Seen, Unprovable};
use crate::rules::Subject;
use lane::abi::TcpPos;
use lane::family::state;
use lane::proto::msg::{register, ToShim};
use lane::proto::reason::Reason;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// Rules may change.
const RETRY_DENIED_MS: u32 = 30_000;

/// A socket that a shim has handed in, to be read. Until it is read, it counts as a helper job of its cgroup.
pub struct Registration {
    pub who: ConnRef,
    pub tcp_pos: [TcpPos; 2],
    pub flags: u32,
    pub came: Option<Came>,
    pub fd: Foreign,
    pub proof: Arc<dyn Proof>,
    pub control: Option<Rc<Control>>,
    pub job: Job,
}

/// Most credits that are returned in one message. (Shims remember 64 registrations that they could take back.)
const CREDITS_TOLD_MAX: u32 = 16;

impl<V: Provider> Core<V> {
    /// A registration: the socket is to be read.
    pub(super) fn register(
        &mut self,
        who: ConnRef,
        tcp_pos: [TcpPos; 2],
        flags: u32,
        came: Option<Came>,
        fds: Vec<Foreign>,
    ) -> Result<Option<Registration>, Violation> {
        let fd = super::only(fds, "a registration without exactly one descriptor")?;
        let Some(p) = self.clients.get_mut(&who.client) else {
            return Ok(None);
        };
        if p.credits == 0 {
            return Err(Violation("a registration without a credit"));
        }
        p.credits -= 1;
        p.under_way.insert((who.conn, who.gen));
        let (control, job) = (p.control.clone(), p.cgroup().job());
        self.counters.registered += 1;
        self.timing_begins(who);
        Ok(Some(Registration {
            who,
            tcp_pos,
            flags,
            came,
            fd,
            proof: self.proof.clone(),
            control,
            job,
        }))
    }

    /// A registration whose socket was lost, because there was no room for another descriptor: that is not the shim's
    /// fault.
    pub fn register_without(&mut self, who: ConnRef) -> Result<(), Violation> {
        let Some(p) = self.clients.get_mut(&who.client) else {
            return Ok(());
        };
        if p.credits == 0 {
            return Err(Violation("a registration without a credit"));
        }
        p.credits -= 1;
        let control = p.control.clone();
        self.counters.registered += 1;
        self.timing_begins(who);
        self.no_room(who);
        self.credit(who.client, control);
        Ok(())
    }

    fn no_room(&mut self, who: ConnRef) {
        self.cgroups.refused.count(Limit::Descriptors);
        self.decline(who, Reason::Limit, Reason::PeerDeclined, RETRY_TROUBLE_MS);
    }

    /// A registered socket was read. `None`: its shim had taken it back.
    pub fn registration_read(
        &mut self,
        who: ConnRef,
        read: Option<Result<End, Reason>>,
        came: Option<Came>,
        flags: u32,
    ) {
        match (read, came) {
            (Some(Ok(end)), Some(came)) => self.look_for_holders(who, end, came, flags),
            (Some(r), _) => self.registered(who, r),
            (None, _) => self.taken_back(who),
        }
        if flags & register::EAGER != 0 {
            self.start_search(who);
        }
    }

    /// A registration is over: its credit goes back to the shim. Credits are reported a quarter of the total at a
    /// time, so that a shim that registers rarely gets no messages about them.
    pub fn credit(&mut self, id: ClientId, control: Option<Rc<Control>>) {
        let Some(p) = self.clients.get_mut(&id) else {
            return;
        };
        // A new control connection has begun with all its credits.
        if let (Some(a), Some(b)) = (&p.control, &control) {
            if Rc::ptr_eq(a, b) {
                p.credits += 1;
                p.untold += 1;
                if p.untold >= (self.config.credits / 4).clamp(1, CREDITS_TOLD_MAX) {
                    let n = std::mem::take(&mut p.untold);
                    p.send(ToShim::Credit { n }, vec![]);
                }
            }
        }
    }

    /// The shim has taken the socket back before it was read: closed, or to be registered again.
    fn taken_back(&mut self, who: ConnRef) {
        let p = self.clients.get_mut(&who.client);
        if p.is_some_and(|p| p.under_way.remove(&(who.conn, who.gen))) {
            self.decline(who, Reason::Young, Reason::None, RETRY_SOON_MS);
        }
    }

    /// A registered socket was read.
    pub(crate) fn registered(&mut self, who: ConnRef, read: Result<End, Reason>) {
        let Some(p) = self.clients.get_mut(&who.client) else {
            return;
        };
        if !p.under_way.remove(&(who.conn, who.gen)) {
            return; // forgotten meanwhile
        }
        let end = match read {
            Ok(end) => end,
            Err(Reason::Young) => {
                return self.decline(who, Reason::Young, Reason::None, RETRY_SOON_MS)
            }
            Err(Reason::Limit) => return self.no_room(who),
            Err(reason) => return self.decline(who, reason, Reason::PeerDeclined, 0),
        };
        let Some(view) = p.family.view(who.conn) else {
            return self.decline(who, Reason::NotEstablished, Reason::None, 0);
        };
        if view.gen != who.gen
            || view.state != state::OPEN
            || (view.flags & lane::family::flag::NAMED != 0 && view.inode != end.inode)
        {
            // The descriptor, or the entry, was given to another connection meanwhile.
            return self.decline(who, Reason::NotEstablished, Reason::None, 0);
        }
        let pods = self.rules.ask_namespaces().then_some(&self.pods);
        let at = pods.and_then(|known| known.of_process(p.proc_id.pid, p.proc_id.start));
        let denied = self.rules.deny(&Subject {
            program: &p.comm,
            uid: p.uid,
            addresses: [end.local, end.peer],
            namespace: at.as_ref().map(|w| w.namespace.as_str()),
        });
        if denied {
            return self.decline(who, Reason::Config, Reason::None, RETRY_DENIED_MS);
        }
        let mut out = Out::default();
        let offered = self.groups.offer_again(who, &mut out);
        self.act(out, Reason::Internal, 0);
        if offered {
            return;
        }
        self.knows(who, &end);
        let shown = format!("{} -> {}", end.local, end.peer);
        self.forget_across(who); // what it registered before
        let clients = &self.clients;
        let copy = self.peers.is_some().then(|| end.clone());
        let (cookie, record) = (end.cookie, end.record);
        let verdict = self.waiting.register(who, end, |c| alive(clients, c));
        if let Verdict::Pair(other, _) | Verdict::Unproven(other) = verdict {
            self.forget_across(other);
        }
        match verdict {
            Verdict::Wait => {
                let seat = self.clients.get(&who.client);
                let Some(seat) = seat.and_then(|p| p.cgroup().waits()) else {
                    self.waiting.forget(who);
                    return self.decline(who, Reason::Limit, Reason::None, RETRY_TROUBLE_MS);
                };
                self.waiting.count(&who, seat);
                self.event(who.client, &format!("registered {shown}"));
                if let Some(end) = copy {
                    self.lookup_across(who, end);
                }
            }
            Verdict::Shared => self.decline(who, Reason::Shared, Reason::None, RETRY_SOON_MS),
            Verdict::Unproven(other) => {
                for w in [who, other] {
                    self.decline(w, Reason::Unproven, Reason::Unproven, RETRY_UNPROVEN_MS);
                }
            }
            Verdict::Pair(other, its) => {
                self.event(who.client, &format!("paired {shown}"));
                // What one end receives first, the other one has sent.
                let firsts = [record.map(|r| r.rcv), record.map(|r| r.snd)];
                self.pair([other, who], [(its, firsts[0]), (cookie, firsts[1])]);
            }
        }
    }

    fn knows(&mut self, who: ConnRef, end: &End) {
        let Some(p) = self.clients.get_mut(&who.client) else {
            return;
        };
        if p.known.len() == KNOWN_MAX {
            p.known.pop_front();
        }
        p.known.push_back(Known {
            who: (who.conn, who.gen),
            local: end.local,
            peer: end.peer,
        });
    }

    /// Registrations that are being looked at, or wait for their other end.
    pub fn waiting_here(&self) -> HashSet<(ClientId, u32, u32)> {
        let waiting = self.waiting.ends().map(|w| (w.client, w.conn, w.gen));
        let new = self.clients.values();
        let new = new.flat_map(|p| p.under_way.iter().map(|u| (p.id, u.0, u.1)));
        waiting.chain(new).collect()
    }

    /// Ends whose other end may never register (`pairing::unprovable`).
    pub fn unprovable(&self) -> Vec<Unprovable> {
        let doubt = |(who, end): (&ConnRef, &End)| {
            let p = self.clients.get(&who.client)?;
            Some(Unprovable {
                who: *who,
                pid: p.proc_id.pid,
                netns: p.netns,
                local: end.local,
                peer: end.peer,
            })
        };
        self.waiting.unprovable().filter_map(doubt).collect()
    }

    /// The other end of one of [`Core::unprovable`] was looked for.
    pub fn looked_for(&mut self, who: ConnRef, seen: Seen) {
        if self.waiting.looked_for(&who, seen) {
            self.forget_across(who);
            self.decline(who, Reason::Unproven, Reason::None, RETRY_UNPROVEN_MS);
        }
    }

    /// Two ends are one connection: give them a lane.
    fn pair(&mut self, ends: [ConnRef; 2], known: [(u64, Option<u32>); 2]) {
        let cgroup = |e: &ConnRef| self.clients.get(&e.client).map(|p| p.cgroup().clone());
        let (Some(a), Some(b)) = (cgroup(&ends[0]), cgroup(&ends[1])) else {
            return;
        };
        let sizes = match self.may_have_lane(ends.map(|e| e.client)) {
            Ok(sizes) => sizes,
            Err(at) => {
                let (own, other) = (Reason::Memory, Reason::PeerDeclined);
                self.decline(ends[at], own, other, RETRY_TROUBLE_MS);
                self.decline(ends[1 - at], other, own, RETRY_TROUBLE_MS);
                return self.busy_changed();
            }
        };
        let (mut out, of) = (Out::default(), [(&a, sizes[0]), (&b, sizes[1])]);
        match self
            .groups
            .connect(ends, of, self.system.random(), &mut out)
        {
            Ok((id, slot, _)) => {
                for (e, known) in ends.into_iter().zip(known) {
                    self.groups.proven((id, slot), e, known);
                }
                self.counters.paired += 1;
                self.act(out, Reason::Memory, RETRY_TROUBLE_MS);
            }
            Err(Refused::Memory) => {
                for e in ends {
                    self.decline(e, Reason::Memory, Reason::Memory, RETRY_TROUBLE_MS);
                }
            }
            Err(Refused::Limit(at)) => {
                self.decline(
                    ends[at],
                    Reason::Limit,
                    Reason::PeerDeclined,
                    RETRY_TROUBLE_MS,
                );
                self.decline(
                    ends[1 - at],
                    Reason::PeerDeclined,
                    Reason::Limit,
                    RETRY_TROUBLE_MS,
                );
            }
        }
        self.busy_changed();
    }

    pub(crate) fn decline(&mut self, who: ConnRef, local: Reason, peer: Reason, retry_ms: u32) {
        let Some(p) = self.clients.get_mut(&who.client) else {
            return;
        };
        let (local_code, peer_code) = (local.code(), peer.code());
        let msg = ToShim::Decline {
            conn: who.conn,
            gen: who.gen,
            local: local_code,
            peer: peer_code,
            retry_ms,
        };
        p.send(msg, vec![]);
        self.timing_ends(who);
        self.count_declined(local);
        self.event(
            who.client,
            &format!("declined connection {}: {}", who.conn, local.info().name),
        );
    }
}
