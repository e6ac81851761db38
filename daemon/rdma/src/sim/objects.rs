//! The handles: they implement the verbs traits over the simulated world.

use super::net::{Posted, QpState, Work};
use super::{CqState, Inner, MrState, World};
use crate::verbs::*;
use lane::num;
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// One node's verbs.
#[derive(Clone)]
pub struct Node {
    pub(super) world: World,
    pub(super) node: usize,
}

/// An open device of a node.
pub struct Device {
    world: World,
    node: usize,
    rail: usize,
    id: DeviceId,
}

/// A protection domain: only objects of the same domain can be used together.
pub struct Pd {
    world: World,
    node: usize,
    rail: usize,
    id: u32,
}

/// Registered memory, which devices can access until this is dropped.
pub struct Mr {
    world: World,
    node: usize,
    key: u32,
    addr: u64,
    len: u64,
    remote: bool,
}

/// A completion queue.
pub struct Cq {
    world: World,
    node: usize,
    id: u32,
}

/// A queue pair. What it has sent may land after it is dropped.
pub struct Qp {
    world: World,
    node: usize,
    qpn: u32,
    caps: QpCaps,
}

impl Inner {
    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn count(&mut self, node: usize) -> &mut Live {
        self.live.entry(node).or_default()
    }

    fn present(&self, node: usize, rail: usize) -> Result<(), Error> {
        let here = |p: &super::Port| p.node == node && p.rail == rail && !p.gone;
        if self.ports.iter().any(here) {
            Ok(())
        } else {
            Err(Error::NoDevice)
        }
    }

    fn memory(&mut self) -> Result<(), Error> {
        if self.rng.one_in(self.faults.no_memory_in) {
            Err(Error::NoMemory)
        } else {
            Ok(())
        }
    }
}

impl Node {
    /// Address of this node's port on a rail.
    pub fn gid(&self, rail: usize) -> Gid {
        Gid::from(Ipv4Addr::new(
            10,
            num::tiny(rail),
            0,
            num::tiny(self.node) + 1,
        ))
    }
}

impl Provider for Node {
    type Device = Device;
    type Pd = Pd;
    type Mr = Mr;
    type Cq = Cq;
    type Qp = Qp;

    fn scan(&self) -> Result<Vec<DeviceId>, Error> {
        let w = self.world.get();
        let of = w.ports.iter().filter(|p| p.node == self.node && !p.gone);
        Ok(of
            .map(|p| DeviceId {
                name: format!("sim{}", p.rail),
                index: p.index,
            })
            .collect())
    }

    fn open(&self, device: &DeviceId) -> Result<Device, Error> {
        let mut w = self.world.get_mut();
        let is = |p: &&super::Port| p.node == self.node && p.index == device.index && !p.gone;
        let rail = w.ports.iter().find(is).map(|p| p.rail);
        let rail = rail.ok_or(Error::NoDevice)?;
        w.count(self.node).devices += 1;
        Ok(Device {
            world: self.world.clone(),
            node: self.node,
            rail,
            id: device.clone(),
        })
    }

    fn live(&self) -> Live {
        self.world.get_mut().count(self.node).to_owned()
    }
}

impl crate::verbs::Device<Node> for Device {
    fn id(&self) -> &DeviceId {
        &self.id
    }

    fn info(&self) -> Result<DeviceInfo, Error> {
        let w = self.world.get();
        w.present(self.node, self.rail)?;
        let node = Node {
            world: self.world.clone(),
            node: self.node,
        };
        let port = PortInfo {
            port: 1,
            state: if w.wires[self.rail] {
                PortState::Active
            } else {
                PortState::Down
            },
            link_layer: LinkLayer::Ethernet,
            active_mtu: Mtu::B1024,
            max_mtu: Mtu::B4096,
            lid: 0,
            speed_mbps: None,
            gids: vec![GidEntry {
                index: 0,
                gid: node.gid(self.rail),
                kind: GidKind::RoceV2,
                netdev: None,
            }],
        };
        Ok(DeviceInfo {
            id: self.id.clone(),
            node_guid: self.node as u64,
            transport: Transport::InfiniBand,
            numa_node: None,
            pci: None,
            limits: Limits {
                qps: 1024,
                qp_requests: 1024,
                cqs: 1024,
                cq_entries: 65_536,
                mrs: 1024,
                mr_bytes: u64::MAX,
            },
            ports: vec![port],
        })
    }

    fn poll_event(&self) -> Result<Option<DeviceEvent>, Error> {
        let mut w = self.world.get_mut();
        Ok(w.port_of(self.node, self.rail)
            .and_then(super::Port::next_report))
    }

    fn event_fd(&self) -> Option<RawFd> {
        let mut w = self.world.get_mut();
        let port = w.port_of(self.node, self.rail)?;
        port.fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn alloc_pd(&self) -> Result<Pd, Error> {
        let mut w = self.world.get_mut();
        w.present(self.node, self.rail)?;
        let id = w.id();
        w.pds.insert(id, self.node);
        w.count(self.node).pds += 1;
        Ok(Pd {
            world: self.world.clone(),
            node: self.node,
            rail: self.rail,
            id,
        })
    }

    fn create_cq(&self, entries: u32) -> Result<Cq, Error> {
        let mut w = self.world.get_mut();
        w.present(self.node, self.rail)?;
        let id = w.id();
        let fd = w.descriptors.then(super::eventfd);
        let state = CqState {
            node: self.node,
            entries: entries as usize,
            queue: VecDeque::new(),
            armed: None,
            notified: false,
            fd: fd.flatten(),
        };
        w.cqs.insert(id, state);
        w.count(self.node).cqs += 1;
        Ok(Cq {
            world: self.world.clone(),
            node: self.node,
            id,
        })
    }
}

impl ProtectionDomain<Node> for Pd {
    fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Mr, Error> {
        let mut w = self.world.get_mut();
        w.present(self.node, self.rail)?;
        w.memory()?;
        let key = w.id();
        let (addr, len) = (memory.addr().as_ptr() as u64, memory.len() as u64);
        let state = MrState {
            node: self.node,
            pd: self.id,
            addr,
            len,
            local_write: access != Access::LocalRead,
            remote_write: access == Access::RemoteWrite,
            _memory: memory,
        };
        w.mrs.insert(key, state);
        w.count(self.node).mrs += 1;
        Ok(Mr {
            world: self.world.clone(),
            node: self.node,
            key,
            addr,
            len,
            remote: access == Access::RemoteWrite,
        })
    }

    fn create_qp(&self, send: &Cq, recv: &Cq, caps: QpCaps) -> Result<Qp, Error> {
        let mut w = self.world.get_mut();
        w.present(self.node, self.rail)?;
        w.memory()?;
        let qpn = w.id();
        let iwarp = w.faults.iwarp >> self.rail & 1 != 0;
        let state = QpState {
            node: self.node,
            rail: self.rail,
            pd: self.id,
            send_cq: send.id,
            recv_cq: recv.id,
            caps,
            state: crate::verbs::QpState::Reset,
            remote: 0,
            sends: VecDeque::new(),
            unretired: 0,
            recvs: VecDeque::new(),
            times: [0; 3],
            repeats: 0,
            iwarp,
            listens: false,
            linked: false,
            received: false,
            overlooked: None,
        };
        w.qps.insert(qpn, state);
        w.count(self.node).qps += 1;
        Ok(Qp {
            world: self.world.clone(),
            node: self.node,
            qpn,
            caps,
        })
    }
}

impl MemoryRegion for Mr {
    fn addr(&self) -> u64 {
        self.addr
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn lkey(&self) -> u32 {
        self.key
    }

    fn rkey(&self) -> u32 {
        if self.remote {
            self.key
        } else {
            0
        }
    }
}

impl Cq {
    /// Number of the queue, as returned by [`super::World::notified`].
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl CompletionQueue for Cq {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        let mut w = self.world.get_mut();
        let q = w.cqs.get_mut(&self.id).ok_or(Error::Invalid)?;
        let node = q.node;
        let n = q.queue.len().min(max);
        out.extend(q.queue.drain(..n));
        if w.panics.take_if(|of| *of == node).is_some() {
            drop(w);
            panic!("a test wants it");
        }
        Ok(n)
    }

    fn arm(&self, messages: bool) -> Result<(), Error> {
        let mut w = self.world.get_mut();
        let q = w.cqs.get_mut(&self.id).ok_or(Error::Invalid)?;
        q.armed = Some(!messages);
        Ok(())
    }

    fn take_notification(&self) -> Result<bool, Error> {
        let mut w = self.world.get_mut();
        let q = w.cqs.get_mut(&self.id).ok_or(Error::Invalid)?;
        if let Some(fd) = &q.fd {
            let _ = rustix::io::read(fd, &mut [0u8; 8]);
        }
        Ok(std::mem::take(&mut q.notified))
    }

    fn fd(&self) -> Option<RawFd> {
        let w = self.world.get();
        Some(w.cqs.get(&self.id)?.fd.as_ref()?.as_raw_fd())
    }
}

impl Qp {
    fn set(&self, from: QpStateName, to: QpStateName) -> Result<(), Error> {
        let mut w = self.world.get_mut();
        let q = w.qps.get_mut(&self.qpn).ok_or(Error::Invalid)?;
        if q.state != from {
            return Err(Error::Invalid);
        }
        q.state = to;
        Ok(())
    }
}

use crate::verbs::QpState as QpStateName;

/// The port on which a queue pair listens.
fn port(qpn: u32) -> u16 {
    num::low16(qpn.into()) | 1
}

impl QueuePair for Qp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn to_init(&self, _port: u8) -> Result<(), Error> {
        self.set(QpStateName::Reset, QpStateName::Init)
    }

    fn to_rtr(&self, attr: &RtrAttr) -> Result<(), Error> {
        self.set(QpStateName::Init, QpStateName::Rtr)?;
        let mut w = self.world.get_mut();
        let q = w.qps.get_mut(&self.qpn).ok_or(Error::Invalid)?;
        q.remote = attr.remote.qpn;
        match !q.iwarp || q.listens || attr.remote.lid == port(q.remote) {
            true => Ok(()),
            false => Err(Error::Invalid),
        }
    }

    fn listen(&self, _: Gid) -> Result<u16, Error> {
        let mut w = self.world.get_mut();
        let q = w.qps.get_mut(&self.qpn).ok_or(Error::Invalid)?;
        q.listens = q.iwarp;
        Ok(if q.iwarp { port(self.qpn) } else { 0 })
    }

    fn connected(&self) -> Result<bool, Error> {
        let mut w = self.world.get_mut();
        let q = w.qps.get(&self.qpn).ok_or(Error::Invalid)?;
        if !q.iwarp || q.linked {
            return Ok(true);
        }
        let peer = w.qps.get(&q.remote).ok_or(Error::Invalid)?;
        let begun = peer.state == QpStateName::Rts && peer.listens != q.listens;
        // The end that listens finishes first.
        let turn = begun && (q.listens || peer.linked) && w.rng.one_in(3);
        if let Some(q) = w.qps.get_mut(&self.qpn).filter(|_| turn) {
            q.linked = true;
        }
        Ok(turn)
    }

    fn acknowledges(&self) -> bool {
        let w = self.world.get();
        w.qps.get(&self.qpn).is_none_or(|q| !q.iwarp)
    }

    fn to_rts(&self, _attr: &RtsAttr) -> Result<(), Error> {
        self.set(QpStateName::Rtr, QpStateName::Rts)
    }

    fn to_error(&self) -> Result<(), Error> {
        self.world.get_mut().fail(self.qpn, Status::Flushed);
        Ok(())
    }

    fn destroy(self) -> Result<(), Error> {
        let refused = self.world.get().holds == Some(self.node);
        if refused {
            std::mem::forget(self);
            return Err(Error::NoDevice);
        }
        Ok(())
    }

    fn state(&self) -> Result<QpStateName, Error> {
        let w = self.world.get();
        w.qps.get(&self.qpn).map(|q| q.state).ok_or(Error::Invalid)
    }

    fn post_send(&self, requests: &[Request<'_>]) -> Result<(), PostError> {
        let mut w = self.world.get_mut();
        for (accepted, r) in requests.iter().enumerate() {
            let fail = |error| PostError { accepted, error };
            let q = w.qps.get(&self.qpn).ok_or(fail(Error::Invalid))?;
            let node = q.node;
            if !matches!(q.state, QpStateName::Rts | QpStateName::Error) {
                return Err(fail(Error::Invalid));
            }
            let places = q.sends.iter().filter(|p| !p.told).count() + q.unretired;
            if places >= q.caps.send_requests as usize {
                w.violation(format!("a send queue of node {node} is full"));
                return Err(fail(Error::Full));
            }
            if q.iwarp && !(q.linked && (q.received || !q.listens)) && q.state == QpStateName::Rts {
                w.violation(format!("node {node} sends before it may"));
                return Err(fail(Error::Invalid));
            }
            let work = match r.op {
                Op::Write {
                    local,
                    remote,
                    rkey,
                } => Work::Write {
                    local,
                    remote,
                    rkey,
                },
                Op::Inline(data) if data.len() <= q.caps.inline_bytes as usize => {
                    let mut data = data.to_vec();
                    if let Some(lie) = &mut w.lie {
                        lie(node, &mut data);
                    }
                    Work::Message(data)
                }
                _ => return Err(fail(Error::Unsupported)),
            };
            let Some(q) = w.qps.get_mut(&self.qpn) else {
                return Err(fail(Error::Invalid));
            };
            if q.state == QpStateName::Error {
                let (cq, qpn) = (q.send_cq, self.qpn);
                let c = Completion {
                    wr_id: r.wr_id,
                    status: Status::Flushed,
                    vendor: 0,
                    opcode: Opcode::Other,
                    bytes: 0,
                    imm: None,
                    qpn,
                };
                w.complete(cq, c);
                continue;
            }
            let order = w.order;
            let Some(q) = w.qps.get_mut(&self.qpn) else {
                return Err(fail(Error::Invalid));
            };
            q.sends.push_back(Posted {
                wr_id: r.wr_id,
                signaled: r.signaled,
                work,
                order,
                packet: None,
                landed: false,
                told: false,
            });
            w.stage(self.qpn, 0);
        }
        Ok(())
    }

    fn post_recv(&self, buffers: &[RecvBuffer]) -> Result<(), PostError> {
        let mut w = self.world.get_mut();
        for (accepted, b) in buffers.iter().enumerate() {
            let fail = |error| PostError { accepted, error };
            let q = w.qps.get_mut(&self.qpn).ok_or(fail(Error::Invalid))?;
            if q.state == QpStateName::Reset {
                return Err(fail(Error::Invalid));
            }
            if q.recvs.len() >= q.caps.recv_buffers as usize {
                w.violation("a receive queue is full".into());
                return Err(fail(Error::Full));
            }
            q.recvs.push_back(*b);
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.world.get_mut().count(self.node).devices -= 1;
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        let mut w = self.world.get_mut();
        let used =
            w.mrs.values().any(|m| m.pd == self.id) || w.qps.values().any(|q| q.pd == self.id);
        if used {
            w.violation("a protection domain goes before what is in it".into());
        }
        w.pds.remove(&self.id);
        w.count(self.node).pds -= 1;
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let mut w = self.world.get_mut();
        let gone = w.mrs.remove(&self.key);
        w.count(self.node).mrs -= 1;
        drop(w);
        drop(gone);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let mut w = self.world.get_mut();
        if w.qps
            .values()
            .any(|q| q.send_cq == self.id || q.recv_cq == self.id)
        {
            w.violation("a completion queue goes before its queue pair".into());
        }
        w.cqs.remove(&self.id);
        w.count(self.node).cqs -= 1;
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let mut w = self.world.get_mut();
        w.ghosts(self.qpn);
        w.qps.remove(&self.qpn);
        w.count(self.node).qps -= 1;
    }
}
