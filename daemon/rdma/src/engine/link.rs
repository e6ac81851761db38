//! One link: a queue pair with its completion queue, its receive buffers and its credits.
//!
//! Each end has a fixed number of receive buffers posted and reposts each as soon as its message is copied out; every
//! message tells how many buffers its sender has ever posted. A sender never has more messages in flight than that,
//! so the peer's device never meets an empty receive queue. The last credit is reserved for the message that returns
//! credits, so that two ends cannot starve each other.

use super::api::{Config, Rail};
use super::request::{Load, What};
use crate::verbs::*;
use crate::wire::{Body, Key, LinkEnd, Malformed, Message, DATA_MAX, LEN};
use lane::num;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Distance in bytes between receive buffers.
const SLOT: usize = LEN + DATA_MAX;
/// Maximum number of completions taken in one poll.
pub(super) const COMPLETIONS: usize = 64;
/// Marks the ids of receive requests; send requests are counted from 0.
const RECV: u64 = 1 << 63;
/// Maximum number of messages that may wait for credits on a link: more than honest peers can cause.
const LLC_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Our offer was sent.
    Offered,
    /// Both queue pairs are connected, as far as we know; the first message has not arrived.
    Confirming,
    Active,
}

/// What a completion means.
pub(super) enum Outcome {
    /// A message, and the bytes that came with it.
    Message(Message, Box<[u8]>),
    /// That many requests at the front of the queue are done.
    Done(usize),
    Nothing,
    /// The link is dead.
    Dead(&'static str),
    /// The peer violated the protocol.
    Broken(&'static str),
}

pub(super) struct Link<P: Provider> {
    qp: P::Qp,
    pub cq: P::Cq,
    recv_mr: P::Mr,
    buffers: Arc<Mapping>,
    pub rail: u32,
    pub state: State,
    pub ours: LinkEnd,
    pub peer: Option<LinkEnd>,
    /// Keys of the peer's regions over this link; none for those that the peer could not register.
    pub keys: HashMap<u32, Option<Key>>,
    /// Regions of ours for which the peer was told that there is no key here.
    pub refused_keys: BTreeSet<u32>,
    /// Messages about links and regions that wait for credits.
    llc: VecDeque<(u32, Body)>,
    /// Requests that were posted and are not known to be done.
    sent: VecDeque<What>,
    /// Number of requests in `sent` that belong to lanes.
    of_lanes: usize,
    /// Id of the oldest request in `sent`.
    first_wr: u64,
    /// Length of the send queue.
    room: usize,
    /// Maximum number of bytes in flight, and the number of those that are.
    window: u64,
    bytes: u64,
    depth: u16,
    /// Receive buffers that we have ever posted, and that number as last told to the peer, modulo 2^16.
    recv_posted: u16,
    recv_told: u16,
    /// Receive buffers that the peer has ever posted, and messages that we have sent, modulo 2^16.
    granted: u16,
    used: u16,
    pub last_received: u64,
    /// When it became active.
    pub since: u64,
    /// When we asked whether the peer is there; set while nothing has come since.
    pub asked: Option<u64>,
    /// The same until the answer to that question comes, whatever else is heard.
    pub tested: Option<u64>,
    pub deadline: u64,
    pub next_try: u64,
    /// Number of lanes that are bound to it.
    pub lanes: usize,
    /// Lanes that wait for room, in order.
    pub waiters: VecDeque<u32>,
    /// A lane waits for the requests before this number to be done.
    awaited: u64,
    /// Do our device's successes tell nothing about the peer's device (iWARP)? Then requests are done when the peer's
    /// credits tell that it has taken the message after them.
    local_ack_only: bool,
    /// Number of messages that the peer has taken, modulo 2^16, and how many of them are still in `sent`.
    taken: u16,
    settled: usize,
    /// Our device is done with the requests before this number.
    local_wr: u64,
    /// `probing`: we have asked the peer for its credits. `answer`: it has asked us whether we are there.
    probing: bool,
    pub answer: bool,
    /// Our first message may stay unnoticed in the peer's device until another one arrives.
    pub wake_peer: bool,
    /// The oldest request when the timers last ran.
    oldest: u64,
    /// Requests may be posted: a handshake, if the queue pair needs one, is finished.
    linked: bool,
    /// `armed`: the completion queue will notify, of messages, or (true) of all completions. `known`: the caller that
    /// sleeps knows the queue.
    pub armed: Option<bool>,
    pub known: bool,
}

/// A completion queue, and a queue pair with room for so many requests and receive buffers. (In this order: what is
/// declared last is dropped first.)
fn queues<P: Provider>(
    rail: &Rail<P::Device>,
    pd: &P::Pd,
    (sends, depth): (u32, u16),
) -> Result<(P::Cq, P::Qp), Error> {
    let cq = rail.device.create_cq(sends + u32::from(depth) + 2)?;
    let caps = |inline: usize| QpCaps {
        send_requests: sends,
        recv_buffers: u32::from(depth),
        inline_bytes: num::small(inline),
    };
    // Devices that accept no larger inline messages get small pieces as writes, like all others.
    let qp = pd
        .create_qp(&cq, &cq, caps(LEN + DATA_MAX))
        .or_else(|_| pd.create_qp(&cq, &cq, caps(LEN)))?;
    Ok((cq, qp))
}

impl<P: Provider> Link<P> {
    /// A queue pair that can receive, not connected.
    pub(super) fn new(
        no: u32,
        rail_no: u32,
        rail: &Rail<P::Device>,
        pd: &P::Pd,
        config: &Config,
        psn: u32,
    ) -> Result<Self, Error> {
        let depth = config.depth.max(4);
        let sends = config.sends.max(8);
        let (cq, qp) = queues::<P>(rail, pd, (sends, depth))?;
        let buffers = Mapping::anonymous(usize::from(depth) * SLOT).map_err(|_| Error::NoMemory)?;
        let buffers = Arc::new(buffers);
        let recv_mr = pd.register(buffers.clone(), Access::LocalWrite)?;
        qp.to_init(rail.port)?;
        // The end that offers is the first to send.
        let port = if config.first {
            0
        } else {
            qp.listen(rail.gid)?
        };
        let local_ack_only = !qp.acknowledges();
        let ours = LinkEnd {
            link: no,
            fabric: rail.fabric,
            gid: rail.gid.0,
            lid: if port == 0 { rail.lid } else { port },
            qpn: qp.qpn(),
            psn: psn & 0xff_ffff,
            mtu: rail.mtu as u8,
            depth,
        };
        let mut link = Link {
            qp,
            cq,
            recv_mr,
            buffers,
            rail: rail_no,
            state: State::Offered,
            ours,
            peer: None,
            keys: HashMap::new(),
            refused_keys: BTreeSet::new(),
            llc: VecDeque::new(),
            sent: VecDeque::new(),
            of_lanes: 0,
            first_wr: 0,
            room: sends as usize,
            window: config.window,
            bytes: 0,
            depth,
            recv_posted: 0,
            recv_told: depth,
            granted: 0,
            used: 0,
            last_received: 0,
            since: 0,
            asked: None,
            tested: None,
            deadline: u64::MAX,
            next_try: 0,
            lanes: 0,
            waiters: VecDeque::new(),
            awaited: 0,
            local_ack_only,
            taken: 0,
            settled: 0,
            local_wr: 0,
            probing: false,
            answer: false,
            wake_peer: false,
            oldest: 0,
            linked: false,
            armed: None,
            known: false,
        };
        for slot in 0..depth {
            link.post_recv(slot).map_err(|e| e.error)?;
        }
        Ok(link)
    }

    /// Connects to the peer's end.
    pub(super) fn connect(
        &mut self,
        peer: LinkEnd,
        rail: &Rail<P::Device>,
        config: &Config,
    ) -> Result<(), Error> {
        let remote = Endpoint {
            qpn: peer.qpn,
            psn: peer.psn,
            gid: Gid(peer.gid),
            lid: peer.lid,
        };
        let mtu = Mtu::ALL
            .into_iter()
            .find(|m| *m as u8 == peer.mtu)
            .ok_or(Error::Invalid)?
            .min(rail.mtu);
        self.qp.to_rtr(&RtrAttr::new(
            remote,
            rail.gid,
            mtu,
            rail.port,
            rail.gid_index,
        ))?;
        self.qp.to_rts(&RtsAttr {
            psn: self.ours.psn,
            timeout: config.ack_timeout,
            retry_count: config.ack_retries,
            rnr_retry: 6,
        })?;
        self.granted = peer.depth;
        self.peer = Some(peer);
        self.state = State::Confirming;
        Ok(())
    }

    fn post_recv(&mut self, slot: u16) -> Result<(), PostError> {
        let buffer = self
            .recv_mr
            .sge(u64::from(slot) * SLOT as u64, num::small(SLOT))
            .ok_or(PostError {
                accepted: 0,
                error: Error::Invalid,
            })?;
        self.qp.post_recv(&[RecvBuffer {
            wr_id: RECV | u64::from(slot),
            buffer,
        }])?;
        self.recv_posted = self.recv_posted.wrapping_add(1);
        Ok(())
    }

    /// Takes completions; if it returns [`COMPLETIONS`], there may be more.
    pub(super) fn poll(&self, out: &mut Vec<Completion>) -> Result<usize, Error> {
        self.cq.poll(out, COMPLETIONS)
    }

    /// Requests a notification, unless one was requested already and has not come.
    pub(super) fn arm(&mut self) -> bool {
        // Completions of sent requests are polled for in passing, unless a lane waits for room. (siw does not count a
        // message as one that requests a notification; and where the peer's credits tell what is done, our own device
        // may be the last to complete.)
        let all = self.local_ack_only || self.is_tight();
        if self.armed == Some(all) || self.armed == Some(true) {
            return false;
        }
        self.armed = self.cq.arm(!all).is_ok().then_some(all);
        self.armed.is_some()
    }

    /// Processes one completion.
    pub(super) fn completed(&mut self, c: &Completion, now: u64) -> Outcome {
        match c.status {
            Status::Success => {}
            Status::RetryExceeded => return Outcome::Dead("no acknowledgement"),
            Status::RnrRetryExceeded => return Outcome::Dead("the peer had no receive buffer"),
            Status::RemoteAccess | Status::RemoteInvalid => {
                return Outcome::Dead("the peer's device refused a write")
            }
            Status::LocalProtection | Status::LocalLength => {
                return Outcome::Dead("our device refused a request")
            }
            _ => return Outcome::Dead("the queue pair failed"),
        }
        if c.wr_id & RECV == 0 {
            let Some(n) = c.wr_id.checked_sub(self.first_wr) else {
                return Outcome::Nothing;
            };
            self.local_wr = c.wr_id + 1;
            return Outcome::Done(match self.local_ack_only {
                true => self.settle(),
                false => (num::size(n) + 1).min(self.sent.len()),
            });
        }
        self.last_received = now;
        self.asked = None;
        let Ok(slot) = u16::try_from(c.wr_id & !RECV) else {
            return Outcome::Broken("a message in no buffer of ours");
        };
        let mut whole = [0; SLOT];
        let Some(b) = whole.get_mut(..c.bytes as usize) else {
            return Outcome::Broken("a message of a wrong length");
        };
        if c.opcode != Opcode::Recv || !self.buffers.read(usize::from(slot) * SLOT, b) {
            return Outcome::Broken("a message in no buffer of ours");
        }
        let (m, data) = match Message::decode(b) {
            Ok(m) => m,
            Err(Malformed::Length(_)) => return Outcome::Broken("a message of a wrong length"),
            Err(_) => return Outcome::Broken("a message that is none"),
        };
        let data = data.into();
        if self.post_recv(slot).is_err() {
            return Outcome::Dead("no receive buffer could be posted");
        }
        let more = m.credits.wrapping_sub(self.granted);
        let open = m.credits.wrapping_sub(self.used);
        let depth = self.peer.map_or(0, |p| p.depth);
        if more > depth || open > depth {
            return Outcome::Broken("impossible credits");
        }
        self.granted = m.credits;
        Outcome::Message(m, data)
    }

    /// Number of requests that are done according to the peer's credits, if our device does not tell.
    pub(super) fn confirmed(&mut self) -> usize {
        if !self.local_ack_only {
            return 0;
        }
        let depth = self.peer.map_or(0, |p| p.depth);
        let taken = self.granted.wrapping_sub(depth);
        self.settled += usize::from(taken.wrapping_sub(self.taken));
        self.taken = taken;
        self.settle()
    }

    /// Number of requests at the front that both devices are done with.
    fn settle(&mut self) -> usize {
        let local = num::size(self.local_wr.saturating_sub(self.first_wr));
        let message = |(_, w): &(usize, &What)| !matches!(w, What::Write { .. });
        let done = self.sent.iter().take(local).enumerate().filter(message);
        let mut n = 0;
        for (i, _) in done.take(self.settled) {
            n = i + 1;
            self.settled -= 1;
        }
        n
    }

    /// The peer has sent its credits because we asked.
    pub(super) fn answered(&mut self) {
        self.probing = false;
    }

    /// Asks the peer for its credits if a lane waits for requests to be done, and answers the peer's question. All
    /// other messages leave credits and queue places for these two; otherwise both ends could wait for each other's.
    fn probe(&mut self) -> Result<(), Error> {
        let tight = self.is_tight() || !self.llc.is_empty();
        let waits = self.local_ack_only && (self.of_lanes > 0 || !self.has_places()) && tight;
        if waits && !self.probing && self.credits() > 1 && self.sent.len() + 2 <= self.room {
            self.probing = true;
            self.test(false)?;
        }
        let reserve = u16::from(!self.local_ack_only);
        if self.answer && self.credits() > reserve && self.sent.len() < self.room {
            self.answer = false;
            self.test(true)?;
        }
        Ok(())
    }

    fn test(&mut self, reply: bool) -> Result<(), Error> {
        let body = Body::TestLink { reply };
        self.post(&Load::default(), self.ours.link, 0, body, What::Llc, 0)
    }

    /// Are there credits and queue places for two writes and a message?
    fn spare(&self) -> bool {
        self.credits() > 1 + u16::from(self.local_ack_only) && self.has_places()
    }

    fn has_places(&self) -> bool {
        self.sent.len() + if self.local_ack_only { 5 } else { 3 } <= self.room
    }

    /// Makes sure that requests sent a while ago become known as done, too.
    pub(super) fn tick(&mut self) {
        if self.local_ack_only && self.of_lanes > 0 && self.oldest == self.first_wr {
            self.await_sent();
        }
        self.oldest = self.first_wr;
    }

    /// Removes the oldest request, which is done.
    pub(super) fn pop_done(&mut self) -> Option<What> {
        let w = self.sent.pop_front()?;
        self.first_wr += 1;
        self.of_lanes -= usize::from(!matches!(w, What::Llc));
        if let What::Write { bytes, .. } = w {
            self.bytes -= u64::from(bytes);
        }
        Some(w)
    }

    /// Is its queue pair being connected?
    pub(super) fn shakes_hands(&self) -> bool {
        self.state == State::Confirming && !self.linked
    }

    pub(super) fn under_way(&self) -> impl Iterator<Item = &What> {
        self.sent.iter()
    }

    fn credits(&self) -> u16 {
        self.granted.wrapping_sub(self.used)
    }

    /// May a lane post two writes and a message now?
    pub(super) fn open(&self) -> bool {
        self.state == State::Active && self.llc.is_empty() && self.spare()
    }

    /// The caller waits for everything that was posted to be done.
    pub(super) fn await_sent(&mut self) {
        self.awaited = self.first_wr + self.sent.len() as u64;
    }

    /// Does anything wait for requests to be done?
    pub(super) fn is_tight(&self) -> bool {
        self.first_wr < self.awaited
            || !self.waiters.is_empty()
            || self.bytes * 2 > self.window
            || self.sent.len() * 2 > self.room
    }

    /// May a lane post bytes now?
    pub(super) fn has_room(&self) -> bool {
        self.open() && self.window() > 0
    }

    /// Maximum number of bytes that can be sent in a message.
    pub(super) fn data_max(&self) -> u64 {
        u64::from(self.qp.caps().inline_bytes)
            .saturating_sub(LEN as u64)
            .min(DATA_MAX as u64)
    }

    /// Number of bytes that may still be put in flight.
    pub(super) fn window(&self) -> u64 {
        self.window.saturating_sub(self.bytes)
    }

    /// Queues a message about the link or a region.
    pub(super) fn say(&mut self, token: u32, body: Body) {
        if self.llc.len() < LLC_MAX {
            self.llc.push_back((token, body));
        }
    }

    pub(super) fn flooded(&self) -> bool {
        self.llc.len() >= LLC_MAX
    }

    /// Posts the queued messages as far as credits allow, and returns credits if it is time.
    pub(super) fn flush(&mut self) -> Result<(), Error> {
        if self.state == State::Offered {
            return Ok(());
        }
        if !self.linked {
            self.linked = self.qp.connected()?;
            if !self.linked {
                return Ok(());
            }
        }
        if self.state == State::Active {
            self.probe()?;
        } else if std::mem::take(&mut self.wake_peer) && self.local_ack_only && self.spare() {
            self.test(false)?;
        }
        while self.spare() {
            let Some((token, body)) = self.llc.pop_front() else {
                break;
            };
            self.post(&Load::default(), token, 0, body, What::Llc, 0)?;
        }
        let untold = self.recv_posted.wrapping_sub(self.recv_told);
        if untold >= self.depth / 2 && self.credits() > 0 && self.sent.len() < self.room {
            self.test(true)?;
        }
        Ok(())
    }

    /// Posts writes and the message after them. The caller has checked that there is room.
    pub(super) fn post(
        &mut self,
        load: &Load,
        token: u32,
        seq: u16,
        body: Body,
        what: What,
        lane: u32,
    ) -> Result<(), Error> {
        let message = Message {
            seq,
            token,
            credits: self.recv_posted,
            body,
        }
        .encode();
        let (writes, data) = (&load.writes, &load.data[..]);
        let mut whole = [0; LEN + DATA_MAX];
        whole[..LEN].copy_from_slice(&message);
        whole[LEN..LEN + data.len()].copy_from_slice(data);
        let mut wr_id = self.first_wr + self.sent.len() as u64;
        let mut requests: Vec<Request<'_>> = Vec::with_capacity(3);
        for w in writes {
            requests.push(Request {
                wr_id,
                op: Op::Write {
                    local: w.local,
                    remote: w.remote,
                    rkey: w.rkey,
                },
                signaled: false,
            });
            wr_id += 1;
        }
        requests.push(Request {
            wr_id,
            op: Op::Inline(&whole[..LEN + data.len()]),
            signaled: true,
        });
        self.qp.post_send(&requests).map_err(|e| e.error)?;
        for w in writes {
            self.bytes += u64::from(w.local.len);
            self.sent.push_back(What::Write {
                lane,
                region: w.region,
                bytes: w.local.len,
            });
        }
        self.of_lanes += writes.len() + usize::from(!matches!(what, What::Llc));
        self.sent.push_back(what);
        self.used = self.used.wrapping_add(1);
        self.recv_told = self.recv_posted;
        Ok(())
    }

    /// After success, no write of the peer can land through this link.
    pub(super) fn destroy(self) -> Result<(), Error> {
        let Link {
            qp, cq, recv_mr, ..
        } = self;
        // It does not matter whether the state changes: only destroying counts.
        let _ = qp.to_error();
        let r = qp.destroy();
        if r.is_err() {
            // The device may still use both.
            std::mem::forget(recv_mr);
            std::mem::forget(cq);
        }
        r
    }
}
