//! One end: the TCP connection to the other, an open device, and queue pairs connected over it.

use crate::Result;
use rustix::event::{poll, PollFd, PollFlags};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use underpass_ibv::{Cq, Device, Ibv, Mr, Pd, Qp};
use underpass_rdma::devices::{best_gid, Candidate, SysDevice, Tree};
use underpass_rdma::verbs::{Device as _, *};

/// Lines of text to and from the other end.
pub struct Control {
    pub stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Control {
    pub fn new(stream: TcpStream) -> Result<Control> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Control { stream, reader })
    }

    pub fn say(&mut self, line: &str) -> Result<()> {
        Ok(self.stream.write_all(format!("{line}\n").as_bytes())?)
    }

    pub fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err("the other end has gone".into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// Both ends are here.
    pub fn meet(&mut self, what: &str) -> Result<()> {
        self.say(what)?;
        let received = self.hear()?;
        if received != what {
            return Err(format!("out of step: {what} here, {received} there").into());
        }
        Ok(())
    }
}

pub struct End {
    pub control: Control,
    pub ibv: Ibv,
    pub device: Device,
    pub info: DeviceInfo,
    pub gid: Candidate,
    pub pd: Pd,
    /// With iWARP: this end waits for the other to connect.
    listens: bool,
}

impl End {
    pub fn new(mut control: Control, listens: bool) -> Result<End> {
        let local = control.stream.local_addr()?.ip();
        let peer = control.stream.peer_addr()?.ip();
        let devices = Tree::system().scan();
        let gid = best_gid(&devices, Some(local), peer.into())
            .or_else(|| iwarp(&devices, local))
            .ok_or("no GID for this address")?;
        let ibv = Ibv::new()?;
        let id = ibv.scan()?.into_iter().find(|d| d.name == gid.device);
        let device = ibv.open(&id.ok_or("the device has gone")?)?;
        let info = device.info()?;
        let pd = device.alloc_pd()?;
        control.meet("hello")?;
        Ok(End {
            control,
            ibv,
            device,
            info,
            gid,
            pd,
            listens,
        })
    }

    /// Are queue pairs connected by a handshake?
    pub fn iwarp(&self) -> bool {
        self.info.transport == Transport::Iwarp
    }

    pub fn port(&self) -> &PortInfo {
        let port = self.info.ports.iter().find(|p| p.port == self.gid.port);
        port.unwrap_or(&self.info.ports[0])
    }
}

/// An active iWARP port, whose GIDs say nothing: the kernel knows whether the address is its own.
fn iwarp(devices: &[SysDevice], local: IpAddr) -> Option<Candidate> {
    let device = devices.iter().find(|d| d.transport == Transport::Iwarp)?;
    let mut ports = device.ports.iter();
    let port = ports.find(|p| p.state == PortState::Active)?;
    Some(Candidate {
        device: device.id.name.clone(),
        port: port.port,
        index: 0,
        gid: Gid::from(local),
    })
}

/// A connected queue pair with buffers for messages.
pub struct Conn {
    pub qp: Qp,
    pub cq: Cq,
    pub inbox: Arc<Mapping>,
    pub inbox_mr: Mr,
    /// The other end's memory for writes.
    pub remote: (u64, u32),
}

pub const MESSAGE: usize = 44;
/// Far more than anything takes, emulated machines included.
const PATIENCE: Duration = Duration::from_secs(90);
const SLOT: usize = 64;
const SLOTS: usize = 64;

impl Conn {
    /// Connects, telling the other end where it may write. `buffers` receives are posted.
    pub fn new(end: &mut End, target: Option<&Mr>, rts: RtsAttr, buffers: usize) -> Result<Conn> {
        let cq = end.device.create_cq(512)?;
        let caps = QpCaps {
            send_requests: 128,
            recv_buffers: SLOTS as u32,
            inline_bytes: MESSAGE as u32,
        };
        let qp = end.pd.create_qp(&cq, &cq, caps)?;
        let inbox = Arc::new(Mapping::anonymous(SLOT * SLOTS)?);
        let inbox_mr = end.pd.register(inbox.clone(), Access::LocalWrite)?;
        let psn = RandomState::new().build_hasher().finish() as u32 & 0xff_ffff;
        let (addr, rkey) = target.map_or((0, 0), |m| (m.addr(), m.rkey()));
        let mtu = end.port().active_mtu;
        let lid = match (end.iwarp(), end.listens) {
            (false, _) => end.port().lid,
            (true, false) => 0,
            (true, true) => qp.listen(end.gid.gid)?,
        };
        let mine = format!(
            "{} {psn} {} {} {} {addr} {rkey}",
            qp.qpn(),
            end.gid.gid,
            lid,
            mtu.bytes()
        );
        end.control.say(&mine)?;
        let received = end.control.hear()?;
        let [qpn, rpsn, gid, lid, rmtu, addr, rkey] = received.split(' ').collect::<Vec<_>>()[..]
        else {
            return Err("not an address".into());
        };
        let remote = Endpoint {
            qpn: qpn.parse()?,
            psn: rpsn.parse()?,
            gid: gid.parse()?,
            lid: lid.parse()?,
        };
        let mtu = mtu.min(Mtu::from_bytes(rmtu.parse()?).ok_or("no such MTU")?);
        qp.to_init(end.gid.port)?;
        let conn = Conn {
            qp,
            cq,
            inbox,
            inbox_mr,
            remote: (addr.parse()?, rkey.parse()?),
        };
        for slot in 0..buffers {
            conn.give(slot as u64)?;
        }
        conn.qp.to_rtr(&RtrAttr::new(
            remote,
            end.gid.gid,
            mtu,
            end.gid.port,
            end.gid.index,
        ))?;
        conn.qp.to_rts(&RtsAttr { psn, ..rts })?;
        let late = Instant::now() + PATIENCE;
        while !conn.qp.connected()? {
            if Instant::now() > late {
                return Err("no connection for too long".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        end.control.meet("connected")?;
        Ok(conn)
    }

    /// Posts the buffer of a slot.
    pub fn give(&self, slot: u64) -> Result<()> {
        let at = slot % SLOTS as u64 * SLOT as u64;
        let buffer = self.inbox_mr.sge(at, SLOT as u32).ok_or("slot")?;
        Ok(self.qp.post_recv(&[RecvBuffer {
            wr_id: slot,
            buffer,
        }])?)
    }

    pub fn message(&self, slot: u64) -> [u8; MESSAGE] {
        let mut m = [0; MESSAGE];
        let inside = self.inbox.read(slot as usize % SLOTS * SLOT, &mut m);
        assert!(inside, "the slot is in the inbox");
        m
    }

    /// Waits for `n` completions by polling, or as many as come in time.
    pub fn completions(&self, n: usize, within: Duration) -> Result<Vec<Completion>> {
        let end = Instant::now() + within;
        let mut out = Vec::new();
        while out.len() < n && Instant::now() < end {
            self.cq.poll(&mut out, n)?;
        }
        Ok(out)
    }

    /// Waits for one completion.
    pub fn one(&self, wait: Wait) -> Result<Completion> {
        let end = Instant::now() + PATIENCE;
        let mut out = Vec::new();
        while Instant::now() < end {
            if self.cq.poll(&mut out, 1)? == 1 {
                return Ok(out[0]);
            }
            match wait {
                Wait::Spin => std::hint::spin_loop(),
                Wait::Yield => std::thread::yield_now(),
                Wait::Sleep => {
                    self.cq.arm(false)?;
                    if self.cq.poll(&mut out, 1)? == 1 {
                        return Ok(out[0]);
                    }
                    readable(self.cq.fd(), PATIENCE)?;
                    self.cq.take_notification()?;
                }
            }
        }
        Err("no completion for too long".into())
    }
}

/// How to wait for a completion.
#[derive(Clone, Copy, Debug)]
pub enum Wait {
    Spin,
    Yield,
    Sleep,
}

/// Waits until a descriptor of the provider is readable.
pub fn readable(fd: Option<RawFd>, within: Duration) -> Result<bool> {
    // SAFETY: the descriptor belongs to an object that the caller holds while it waits.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.ok_or("nothing to sleep on")?) };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&within.try_into()?))? > 0)
}
