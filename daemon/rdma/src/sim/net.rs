//! What happens to requests: they are fetched, land and are acknowledged, each with a delay; or they are lost.

use super::Inner;
use crate::verbs::{Completion, Opcode, QpCaps, RecvBuffer, Sge, Status};
use lane::num;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// How often a packet is repeated before the queue pair fails, and the usual interval.
const REPEATS: u32 = 5;
const REPEAT_NS: u64 = 200_000;
/// Number of writes that are remembered, to find late writes that land over newer ones.
const LANDED: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The device reads the memory of the next request.
    Fetch(u32),
    /// The next fetched request arrives.
    Land(u32),
    /// The acknowledgement of the next landed request arrives.
    Ack(u32),
    /// A request of a queue pair that has failed arrives nevertheless, at this queue pair.
    Ghost(u32, Packet),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Packet {
    Write {
        remote: u64,
        rkey: u32,
        data: Vec<u8>,
        /// Number of the request in the order in which all requests were posted.
        order: u64,
    },
    Message(Vec<u8>),
}

pub(super) enum Work {
    Write { local: Sge, remote: u64, rkey: u32 },
    Message(Vec<u8>),
}

pub(super) struct Posted {
    pub wr_id: u64,
    pub signaled: bool,
    pub work: Work,
    pub order: u64,
    pub packet: Option<Packet>,
    pub landed: bool,
    /// It had its completion before it landed (iWARP).
    pub told: bool,
}

pub(super) struct QpState {
    pub node: usize,
    pub rail: usize,
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub caps: QpCaps,
    pub state: crate::verbs::QpState,
    pub remote: u32,
    pub sends: VecDeque<Posted>,
    /// Requests that are done without a completion, until a signaled one follows.
    pub unretired: usize,
    pub recvs: VecDeque<RecvBuffer>,
    /// Earliest times for the next event of each stage; keeps each stage in order.
    pub times: [u64; 3],
    pub repeats: u32,
    pub iwarp: bool,
    /// Steps of iWARP's handshake: it listens for the peer; the handshake is finished; the peer has sent something.
    pub listens: bool,
    pub linked: bool,
    pub received: bool,
    /// The first packet that arrived, if it stays unnoticed until another one arrives (as with `siw_accept`).
    pub overlooked: Option<Packet>,
}

impl Inner {
    pub(super) fn run_until(&mut self, now: u64) {
        while let Some(Reverse((at, _, _))) = self.events.peek() {
            if *at > now {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else {
                break;
            };
            self.now = at;
            match event {
                Event::Fetch(q) => self.fetch(q),
                Event::Land(q) => self.land(q),
                Event::Ack(q) => self.ack(q),
                Event::Ghost(q, packet) => {
                    self.arrive(q, &packet, true);
                }
            }
        }
        self.now = now;
    }

    fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, event)));
    }

    pub(super) fn violation(&mut self, what: String) {
        self.violations.push(format!("{}: {what}", self.now));
    }

    fn delay(&mut self) -> u64 {
        let d = 1 + self.rng.below(self.faults.delay_ns.max(1));
        if self.rng.one_in(self.faults.slow_in) {
            d * 50
        } else {
            d
        }
    }

    /// Schedules a stage of the next request of a queue pair.
    pub(super) fn stage(&mut self, qpn: u32, stage: usize) {
        let delay = self.delay();
        let now = self.now;
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        let at = (now + delay).max(q.times[stage] + 1);
        q.times[stage] = at;
        let event = [Event::Fetch(qpn), Event::Land(qpn), Event::Ack(qpn)][stage].clone();
        self.at(at, event);
    }

    fn works(&self, qpn: u32) -> bool {
        let q = self.qps.get(&qpn);
        q.is_some_and(|q| q.state == crate::verbs::QpState::Rts)
    }

    fn fetch(&mut self, qpn: u32) {
        if !self.works(qpn) {
            return;
        }
        if self.rng.one_in(self.faults.error_in) {
            return self.fail(qpn, Status::Other);
        }
        let Some(q) = self.qps.get(&qpn) else {
            return;
        };
        let (node, pd) = (q.node, q.pd);
        let Some(i) = q.sends.iter().position(|p| p.packet.is_none()) else {
            return;
        };
        let order = q.sends[i].order;
        // With iWARP, at random: the request completes before it has landed, or only with its acknowledgement.
        let soon = self.rng.one_in(2);
        let packet = match &q.sends[i].work {
            Work::Message(data) => Packet::Message(data.clone()),
            Work::Write {
                local,
                remote,
                rkey,
            } => {
                let (local, remote, rkey) = (*local, *remote, *rkey);
                let inside = self.mrs.get(&local.lkey).is_some_and(|m| {
                    let end = m.addr + m.len;
                    let fits = local.addr >= m.addr && local.addr + u64::from(local.len) <= end;
                    m.node == node && m.pd == pd && fits
                });
                if !inside {
                    self.violation(format!("a request of node {node} reads foreign memory"));
                    return self.fail(qpn, Status::LocalProtection);
                }
                let mut data = vec![0; local.len as usize];
                // SAFETY: inside a region, whose memory is mapped as long as it is registered.
                unsafe {
                    let from = local.addr as *const u8;
                    std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len());
                }
                Packet::Write {
                    remote,
                    rkey,
                    data,
                    order,
                }
            }
        };
        if let Some(q) = self.qps.get_mut(&qpn) {
            q.sends[i].packet = Some(packet);
            if q.iwarp && soon && q.sends.iter().take(i).all(|p| p.told) {
                q.sends[i].told = true;
                let p = &q.sends[i];
                let what = (p.wr_id, p.signaled, matches!(p.work, Work::Message(_)));
                self.done(qpn, what);
            }
        }
        self.stage(qpn, 1);
    }

    fn land(&mut self, qpn: u32) {
        if !self.works(qpn) {
            return;
        }
        let q = &self.qps[&qpn];
        let (remote, rail) = (q.remote, q.rail);
        let Some(i) = q.sends.iter().position(|p| !p.landed) else {
            return;
        };
        let Some(packet) = q.sends[i].packet.clone() else {
            return;
        };
        if self.rng.one_in(self.faults.error_in) {
            return self.fail(qpn, Status::RetryExceeded);
        }
        let reached = self.wires[rail] && self.arrive(remote, &packet, false) == Some(true);
        if !self.works(qpn) {
            return; // the arrival was refused
        }
        let now = self.now;
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        if reached {
            q.sends[i].landed = true;
            q.repeats = 0;
            self.stage(qpn, 2);
        } else if q.repeats == REPEATS {
            self.fail(qpn, Status::RetryExceeded);
        } else {
            q.repeats += 1;
            let next = match self.faults.repeat_ns {
                0 => now + REPEAT_NS,
                ns => now + ns,
            };
            q.times[1] = q.times[1].max(next);
            self.at(next, Event::Land(qpn));
        }
    }

    fn ack(&mut self, qpn: u32) {
        if !self.works(qpn) {
            return;
        }
        if self.rng.one_in(self.faults.error_in) {
            // The acknowledgement is lost: the request has landed, but looks as if it had not.
            return self.fail(qpn, Status::RetryExceeded);
        }
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        let Some(done) = q.sends.pop_front() else {
            return;
        };
        if !done.told {
            let message = matches!(done.work, Work::Message(_));
            self.done(qpn, (done.wr_id, done.signaled, message));
        }
    }

    /// A request has succeeded as far as the sender's device knows.
    fn done(&mut self, qpn: u32, (wr_id, signaled, message): (u64, bool, bool)) {
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        if !signaled {
            q.unretired += 1;
            return;
        }
        q.unretired = 0;
        let cq = q.send_cq;
        let opcode = match message {
            false => Opcode::Write,
            true => Opcode::Send,
        };
        let c = completion(wr_id, Status::Success, opcode, qpn, 0);
        self.complete(cq, c);
    }

    pub(super) fn complete(&mut self, cq: u32, c: Completion) {
        let Some(q) = self.cqs.get_mut(&cq) else {
            return;
        };
        q.queue.push_back(c);
        // Notifies as rarely as a device may: not of sent requests, and not of errors.
        let message = (c.opcode, c.status) == (Opcode::Recv, Status::Success);
        if q.armed.is_some_and(|all| all || message) {
            q.notify();
        }
        if q.queue.len() > q.entries {
            self.violation("a completion queue overflows".into());
        }
    }

    /// A packet reaches a queue pair. `None`: there is no such queue pair; `false`: it accepts nothing now.
    fn arrive(&mut self, qpn: u32, packet: &Packet, ghost: bool) -> Option<bool> {
        use crate::verbs::QpState::*;
        let q = self.qps.get(&qpn)?;
        let (node, state) = (q.node, q.state);
        let gone = |p: &super::Port| p.node == node && p.rail == q.rail && p.gone;
        if self.ports.iter().any(gone) {
            return Some(false);
        }
        // A write that is inside the device lands even if the state has just changed.
        let takes = matches!(state, Rtr | Rts) || ghost && matches!(packet, Packet::Write { .. });
        if !takes || q.iwarp && !q.linked {
            return Some(false);
        }
        if q.iwarp && q.listens && !q.received && q.overlooked.is_none() && self.rng.one_in(4) {
            self.qps.get_mut(&qpn)?.overlooked = Some(packet.clone());
            return Some(true);
        }
        let q = self.qps.get_mut(&qpn)?;
        q.received = true;
        if let Some(first) = q.overlooked.take() {
            self.arrive(qpn, &first, ghost);
        }
        match packet {
            Packet::Message(data) => self.receive(qpn, data),
            Packet::Write {
                remote,
                rkey,
                data,
                order,
            } => self.write(qpn, (*remote, *rkey), data, *order, ghost),
        }
    }

    /// A message arrives. `false`: there is no buffer for it.
    fn receive(&mut self, qpn: u32, data: &[u8]) -> Option<bool> {
        let q = self.qps.get_mut(&qpn)?;
        let (node, recv_cq) = (q.node, q.recv_cq);
        let Some(buffer) = q.recvs.pop_front() else {
            self.violation(format!("node {node} has no receive buffer"));
            return Some(false);
        };
        let at = buffer.buffer.addr;
        let mr = self.mrs.get(&buffer.buffer.lkey);
        let fits = |m: &super::MrState| {
            let len = u64::from(buffer.buffer.len);
            m.local_write && at >= m.addr && at + len <= m.addr + m.len
        };
        if !mr.is_some_and(fits) || data.len() > buffer.buffer.len as usize {
            self.violation(format!("a receive buffer of node {node} is not registered"));
            return Some(false);
        }
        // SAFETY: inside a region, whose memory is mapped as long as it is registered.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), at as *mut u8, data.len());
        }
        let n = num::small(data.len());
        let c = completion(buffer.wr_id, Status::Success, Opcode::Recv, qpn, n);
        self.complete(recv_cq, c);
        Some(true)
    }

    /// A write arrives, for an address under a key. `false`: there is no such region.
    fn write(
        &mut self,
        qpn: u32,
        (at, rkey): (u64, u32),
        data: &[u8],
        order: u64,
        ghost: bool,
    ) -> Option<bool> {
        let q = self.qps.get(&qpn)?;
        let (node, pd) = (q.node, q.pd);
        let len = data.len() as u64;
        let mr = self.mrs.get(&rkey);
        let fits = |m: &super::MrState| {
            let inside = at >= m.addr && at.checked_add(len) <= m.addr.checked_add(m.len);
            m.node == node && m.pd == pd && m.remote_write && inside
        };
        if !mr.is_some_and(fits) {
            if self.lie.is_none() {
                let what = format!("a write (late: {ghost}) meets no region of node {node}");
                self.violation(what);
            }
            if !ghost {
                let by = self.qps.iter().find(|(_, q)| q.remote == qpn);
                let by = by.map(|(n, _)| *n);
                if let Some(by) = by {
                    self.fail(by, Status::RemoteAccess);
                }
                self.fail(qpn, Status::Flushed);
            }
            return Some(false);
        }
        let hit = |f: &&(u64, u64)| at < f.0 + f.1 && f.0 < at + len;
        if self.forbidden.iter().any(|f| hit(&f)) {
            let what = format!("a write (late: {ghost}) lands in unused memory of {node}");
            self.violation(what);
        }
        let over = |w: &&(u64, u64, u64)| w.2 > order && hit(&&(w.0, w.1));
        if ghost && self.landed.iter().any(|w| over(&w)) {
            self.violation(format!("a late write lands over a newer one in {node}"));
        }
        if self.landed.len() == LANDED {
            self.landed.pop_front();
        }
        self.landed.push_back((at, len, order));
        // SAFETY: inside a region, whose memory is mapped as long as it is registered.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), at as *mut u8, data.len());
        }
        Some(true)
    }

    /// A queue pair fails: its posted requests are flushed, and may land later, in order.
    pub(super) fn fail(&mut self, qpn: u32, status: Status) {
        use crate::verbs::QpState::Error;
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        if q.state == Error {
            return;
        }
        q.state = Error;
        let (send_cq, recv_cq) = (q.send_cq, q.recv_cq);
        let left = q.sends.iter().filter(|p| !p.told);
        let flushed: Vec<u64> = left.map(|p| p.wr_id).collect();
        let recvs: Vec<u64> = q.recvs.drain(..).map(|r| r.wr_id).collect();
        self.ghosts(qpn);
        for (i, wr_id) in flushed.into_iter().enumerate() {
            let status = if i == 0 { status } else { Status::Flushed };
            self.complete(send_cq, completion(wr_id, status, Opcode::Other, qpn, 0));
        }
        for wr_id in recvs {
            let c = completion(wr_id, Status::Flushed, Opcode::Other, qpn, 0);
            self.complete(recv_cq, c);
        }
    }

    /// Packets in flight when a queue pair fails or is dropped: some of them arrive.
    pub(super) fn ghosts(&mut self, qpn: u32) {
        let Some(q) = self.qps.get_mut(&qpn) else {
            return;
        };
        let remote = q.remote;
        let packets: Vec<Packet> = q
            .sends
            .drain(..)
            .filter(|p| !p.landed)
            .map_while(|p| p.packet)
            .collect();
        let some = num::size(self.rng.below(packets.len() as u64 + 1));
        let mut at = self.now;
        for packet in packets.into_iter().take(some) {
            at += 1 + self.rng.below(self.faults.late_ns.max(1));
            self.at(at, Event::Ghost(remote, packet));
        }
    }
}

fn completion(wr_id: u64, status: Status, opcode: Opcode, qpn: u32, bytes: u32) -> Completion {
    Completion {
        wr_id,
        status,
        vendor: 0,
        opcode,
        bytes,
        imm: None,
        qpn,
    }
}
