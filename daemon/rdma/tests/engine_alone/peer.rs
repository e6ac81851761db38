//! The other end of a pair, written by hand: it has queue pairs and memory, says only what it is told to say, and keeps
//! what it hears.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use underpass_rdma::engine::LinkId;
use underpass_rdma::sim::{self, World};
use underpass_rdma::verbs::*;
use underpass_rdma::wire::{Body, Key, LinkEnd, Message, DATA_MAX, LEN};

const SLOT: usize = LEN + DATA_MAX;
/// Receive buffers of each link.
pub const DEPTH: u16 = 64;
/// Length of its memory.
pub const BYTES: usize = 1 << 20;

/// Its memory on a rail.
struct Rail {
    mr: sim::Mr,
    pd: sim::Pd,
    device: sim::Device,
}

struct Link {
    qp: sim::Qp,
    recv: sim::Mr,
    cq: sim::Cq,
    buffers: Arc<Mapping>,
    posted: u16,
    /// Buffers that are not posted.
    idle: Vec<u16>,
    sent: u64,
    linked: bool,
    received: VecDeque<(Message, Vec<u8>)>,
}

pub struct Peer {
    links: BTreeMap<LinkId, Link>,
    rails: Vec<Rail>,
    node: sim::Node,
    pub memory: Arc<Mapping>,
    seq: u16,
    /// Buffers are posted again, so that the pair gets credits.
    pub reposts: bool,
    /// With iWARP: it is not the one that offers links.
    pub listens: bool,
}

impl Peer {
    pub fn new(world: &World, rails: usize) -> Peer {
        let node = world.node(1);
        let memory = Arc::new(Mapping::anonymous(BYTES).expect("memory"));
        let found = node.scan().expect("scan");
        let rail = |n: usize| {
            let device = node.open(&found[n]).expect("a device");
            let pd = device.alloc_pd().expect("a domain");
            let mr = pd.register(memory.clone(), Access::RemoteWrite);
            let mr = mr.expect("registered");
            Rail { mr, pd, device }
        };
        Peer {
            links: BTreeMap::new(),
            rails: (0..rails).map(rail).collect(),
            node: node.clone(),
            memory: memory.clone(),
            seq: 0,
            reposts: true,
            listens: true,
        }
    }

    /// How to write to its memory over a rail.
    pub fn key(&self, rail: usize) -> Key {
        let mr = &self.rails[rail].mr;
        Key {
            addr: mr.addr(),
            len: mr.len(),
            rkey: mr.rkey(),
        }
    }

    /// A part of its memory, for a request over this rail.
    pub fn local(&self, rail: usize, len: u32) -> Sge {
        self.rails[rail].mr.sge(0, len).expect("inside")
    }

    /// Makes its end of a link, not connected.
    pub fn end(&mut self, no: LinkId, rail: usize) -> LinkEnd {
        let r = &self.rails[rail];
        let cq = r.device.create_cq(1024).expect("a queue");
        let caps = QpCaps {
            send_requests: 256,
            recv_buffers: u32::from(DEPTH),
            inline_bytes: SLOT as u32,
        };
        let qp = r.pd.create_qp(&cq, &cq, caps).expect("a queue pair");
        let len = usize::from(DEPTH) * SLOT;
        let buffers = Arc::new(Mapping::anonymous(len).expect("memory"));
        let recv = r.pd.register(buffers.clone(), Access::LocalWrite);
        let recv = recv.expect("registered");
        qp.to_init(1).expect("init");
        let end = LinkEnd {
            link: no,
            fabric: rail as u32,
            gid: self.node.gid(rail).0,
            lid: match self.listens {
                true => qp.listen(self.node.gid(rail)).expect("a port"),
                false => 0,
            },
            qpn: qp.qpn(),
            psn: 5,
            mtu: Mtu::B1024 as u8,
            depth: DEPTH,
        };
        let mut link = Link {
            qp,
            recv,
            cq,
            buffers,
            posted: 0,
            idle: Vec::new(),
            sent: 0,
            linked: false,
            received: VecDeque::new(),
        };
        (0..DEPTH).for_each(|slot| link.post(slot));
        self.links.insert(no, link);
        end
    }

    /// Connects it to the pair's end.
    pub fn connect(&mut self, to: LinkEnd, rail: usize) {
        let qp = &self.links[&to.link].qp;
        let remote = Endpoint {
            qpn: to.qpn,
            psn: to.psn,
            gid: Gid(to.gid),
            lid: to.lid,
        };
        let attr = RtrAttr::new(remote, self.node.gid(rail), Mtu::B1024, 1, 0);
        qp.to_rtr(&attr).expect("ready to receive");
        let attr = RtsAttr {
            psn: 5,
            timeout: 14,
            retry_count: 2,
            rnr_retry: 6,
        };
        qp.to_rts(&attr).expect("ready to send");
    }

    /// Its end of a link is destroyed.
    pub fn destroy(&mut self, no: LinkId) {
        self.links.remove(&no).expect("a link");
    }

    /// A message about a link or a region.
    pub fn say(&mut self, no: LinkId, token: u32, body: Body) {
        self.speak(no, (0, token), body, &[]);
    }

    /// The next message about a lane.
    pub fn say_of(&mut self, no: LinkId, token: u32, body: Body, data: &[u8]) {
        self.seq = self.seq.wrapping_add(1);
        self.speak(no, (self.seq, token), body, data);
    }

    pub fn speak(&mut self, no: LinkId, (seq, token): (u16, u32), body: Body, data: &[u8]) {
        let m = Message {
            seq,
            token,
            credits: self.links[&no].posted,
            body,
        };
        self.send(no, Op::Inline(&[&m.encode(), data].concat()));
    }

    pub fn send(&mut self, no: LinkId, op: Op<'_>) {
        let link = self.links.get_mut(&no).expect("a link");
        let r = Request {
            wr_id: link.sent,
            op,
            signaled: true,
        };
        link.sent += 1;
        link.qp.post_send(&[r]).expect("posted");
    }

    /// A message with chosen credits.
    pub fn say_with_credits(&mut self, no: LinkId, credits: u16, body: Body) {
        let m = Message {
            seq: 0,
            token: no,
            credits,
            body,
        };
        self.send(no, Op::Inline(&m.encode()));
    }

    /// All buffers of a link whose messages were taken are posted again.
    pub fn post_again(&mut self, no: LinkId) {
        let link = self.links.get_mut(&no).expect("a link");
        let idle = std::mem::take(&mut link.idle);
        idle.into_iter().for_each(|slot| link.post(slot));
    }

    /// Is the handshake of its queue pair finished, or was there none to do?
    pub fn linked(&self, no: LinkId) -> bool {
        self.links[&no].linked
    }

    /// Takes what has come.
    pub fn poll(&mut self) {
        for link in self.links.values_mut() {
            link.linked = link.qp.connected() == Ok(true);
            let mut got = Vec::new();
            link.cq.poll(&mut got, 1024).expect("completions");
            for c in got {
                if c.status == Status::Success && c.opcode == Opcode::Recv {
                    link.take(&c, self.reposts);
                }
            }
        }
    }

    /// All messages that came over a link since the last call.
    pub fn received(&mut self, no: LinkId) -> Vec<(Message, Vec<u8>)> {
        let link = self.links.get_mut(&no).expect("a link");
        link.received.drain(..).collect()
    }

    /// The same without sequence numbers, credits and data.
    pub fn bodies(&mut self, no: LinkId) -> Vec<(u32, Body)> {
        let all = self.received(no);
        all.into_iter().map(|(m, _)| (m.token, m.body)).collect()
    }
}

impl Link {
    fn post(&mut self, slot: u16) {
        let buffer = self.recv.sge(u64::from(slot) * SLOT as u64, SLOT as u32);
        let b = RecvBuffer {
            wr_id: u64::from(slot),
            buffer: buffer.expect("inside"),
        };
        self.qp.post_recv(&[b]).expect("posted");
        self.posted += 1;
    }

    fn take(&mut self, c: &Completion, repost: bool) {
        let mut b = vec![0; c.bytes as usize];
        assert!(self.buffers.read(c.wr_id as usize * SLOT, &mut b));
        let (m, data) = Message::decode(&b).expect("a message");
        self.received.push_back((m, data.to_vec()));
        match repost {
            true => self.post(c.wr_id as u16),
            false => self.idle.push(c.wr_id as u16),
        }
    }
}
