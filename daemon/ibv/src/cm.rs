//! Connections of iWARP queue pairs, which are made by a handshake of the devices (RDMA-CM).
//!
//! The queue pair is made as on other devices; librdmacm only connects it: the kernel is told its
//! number, finds it on the device, and makes it ready to send itself.
//!
//! What was looked up in Linux 6.12 (`iw_cm`, `siw`) and librdmacm 44, and has to stay in mind:
//!
//! - `rdma_connect` blocks while TCP connects, with siw: two minutes where a firewall swallows what is
//!   sent. So it has a thread, for as long as it takes.
//! - While a handshake is under way (the peer may take 10 s to answer, says siw), both destroying the
//!   queue pair and destroying the id wait for its end. Then a thread does it, see [`super::queue`].
//! - The queue pair is destroyed before the id, as librdmacm's manual has it: this ends the connection,
//!   and the kernel's connection manager lets go of the queue pair.
//! - Destroying an id waits until all its events that were read are acknowledged, which is done here as
//!   soon as they are read. Those not read are thrown away with it, also requests to a listening one.
//! - Ports are out of the connection manager's own table: a socket may have the one it takes.
//! - librdmacm keeps the devices open that it has connected on, until the process ends.
//! - Whoever knows the port can ask for a connection, hence the [`token`].

mod id;

use super::device::Context;
use super::library::Cm;
use id::{Channel, Event, Id};
use rdma_sys::rdma_cm_event_type;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use underpass_rdma::verbs::{Endpoint, Error, Gid};

/// Ports to try.
const PORTS: usize = 8;
/// Events taken in at once: strangers must not keep us here.
const EVENTS: usize = 8;

const MAGIC: [u8; 4] = *b"UPiw";
const TOKEN: usize = id::DATA;

/// What the connecting end shows: two numbers that the two ends have told each other over a connection
/// that nobody else reads.
fn token(connecting: u32, listening: u32) -> [u8; TOKEN] {
    let mut t = [0; TOKEN];
    t[..4].copy_from_slice(&MAGIC);
    t[4..8].copy_from_slice(&(connecting & 0xff_ffff).to_le_bytes());
    t[8..].copy_from_slice(&(listening & 0xff_ffff).to_le_bytes());
    t
}

/// Is this the token, maybe with padding? Takes as long for all that are not.
fn shows(data: &[u8], token: [u8; TOKEN]) -> bool {
    let Some(data) = data.get(..TOKEN) else {
        return false;
    };
    let pairs = data.iter().zip(token);
    pairs.fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

enum Stage {
    /// Nothing was asked for, or we listen.
    Quiet,
    /// Address and route are looked for.
    Resolving,
    /// `rdma_connect` runs. Nobody else touches the id until it is done.
    Connecting(JoinHandle<Result<(), Error>>),
    /// The devices talk.
    Shaking,
    Connected,
    Failed(Error),
}

/// How a queue pair is connected.
pub(super) struct Connection {
    cm: &'static Cm,
    inner: Mutex<Inner>,
}

/// Fields are dropped in this order: the ids before their channel.
struct Inner {
    stage: Stage,
    /// Asked to connect or to be connected, and not told what became of it: freeing would wait.
    under_way: bool,
    remote: Option<Endpoint>,
    local: Gid,
    psn: Option<u32>,
    /// Ports of ours that were tried for connecting.
    tries: usize,
    id: Option<Id>,
    listener: Option<Id>,
    channel: Option<Channel>,
}

impl Connection {
    /// [`Error::NoCmLibrary`] where librdmacm is not installed.
    pub fn new() -> Result<Connection, Error> {
        let inner = Inner {
            stage: Stage::Quiet,
            under_way: false,
            remote: None,
            local: Gid::default(),
            psn: None,
            tries: 0,
            id: None,
            listener: None,
            channel: None,
        };
        Ok(Connection {
            cm: Cm::get()?,
            inner: Mutex::new(inner),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Would freeing it or its queue pair wait for the peer?
    pub fn under_way(&self) -> bool {
        self.lock().under_way
    }

    /// Waits until no other thread uses an id. Must be called before the queue pair is destroyed:
    /// connecting would go on with one that is half gone.
    pub fn settle(&self) {
        // What became of it does not matter any more.
        let _ = self.lock().settle();
    }

    pub fn listen(&self, device: &Context, address: Gid) -> Result<u16, Error> {
        let mut inner = self.lock();
        if inner.channel.is_some() || inner.psn.is_some() {
            return Err(Error::Invalid);
        }
        let channel = Channel::open(self.cm)?;
        let mut tries = 0;
        let (id, port) = loop {
            let id = Id::create(&channel)?;
            id.handle().bind(address.ip())?;
            id.handle().on(device)?;
            tries += 1;
            match id.handle().listen() {
                Ok(0) => return Err(Error::Unsupported),
                Ok(port) => break (id, port),
                // A socket has the port, which the connection manager did not know.
                Err(Error::Os(libc::EADDRINUSE)) if tries < PORTS => {}
                Err(e) => return Err(e),
            }
        };
        inner.listener = Some(id);
        inner.channel = Some(channel);
        Ok(port)
    }

    pub fn to_rtr(&self, remote: Endpoint, local: Gid) -> Result<(), Error> {
        let mut inner = self.lock();
        if inner.psn.is_some() {
            return Err(Error::Invalid);
        }
        inner.remote = Some(remote);
        inner.local = local;
        Ok(())
    }

    /// Begins, unless we listen.
    pub fn to_rts(&self, psn: u32) -> Result<(), Error> {
        let mut inner = self.lock();
        let remote = inner.remote.ok_or(Error::Invalid)?;
        if inner.psn.is_some() {
            return Err(Error::Invalid);
        }
        if inner.listener.is_none() {
            if remote.lid == 0 {
                return Err(Error::Invalid);
            }
            inner.channel = Some(Channel::open(self.cm)?);
            inner.begin(remote)?;
        }
        inner.psn = Some(psn);
        Ok(())
    }

    pub fn connected(&self, device: &Context, qpn: u32) -> Result<bool, Error> {
        let mut inner = self.lock();
        match inner.stage {
            Stage::Connected => return Ok(true),
            Stage::Failed(e) => return Err(e),
            _ => {}
        }
        let r = inner.go_on(device, qpn);
        if let Err(e) = r {
            inner.stage = Stage::Failed(e);
        }
        r
    }
}

impl Inner {
    fn begin(&mut self, remote: Endpoint) -> Result<(), Error> {
        let id = Id::create(self.channel.as_ref().ok_or(Error::Invalid)?)?;
        let (from, to) = (self.local.ip(), remote.gid.ip());
        id.handle().resolve(from, to, remote.lid)?;
        self.id = Some(id);
        self.stage = Stage::Resolving;
        self.tries += 1;
        Ok(())
    }

    /// Takes in what has happened.
    fn go_on(&mut self, device: &Context, qpn: u32) -> Result<bool, Error> {
        // A request that comes before we know of whom has to wait in the channel.
        let (Some(psn), Some(remote)) = (self.psn, self.remote) else {
            return Ok(false);
        };
        if let Stage::Connecting(thread) = &self.stage {
            if !thread.is_finished() {
                return Ok(false);
            }
            match self.settle() {
                // Our own port, as with listening.
                Err(Error::Os(libc::EADDRINUSE)) if self.tries < PORTS => self.begin(remote)?,
                r => r?,
            }
        }
        for _ in 0..EVENTS {
            let Some(event) = self.channel.as_ref().ok_or(Error::Invalid)?.next()? else {
                return Ok(false);
            };
            if event.kind == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST {
                self.request(&event, device, qpn, token(remote.psn, psn))?;
            } else if self.event(&event, device, qpn, token(psn, remote.psn))? {
                return Ok(true);
            }
            if matches!(self.stage, Stage::Connecting(_)) {
                return Ok(false);
            }
        }
        Ok(false)
    }

    /// Waits for the thread that connects, if there is one.
    fn settle(&mut self) -> Result<(), Error> {
        if !matches!(self.stage, Stage::Connecting(_)) {
            return Ok(());
        }
        let Stage::Connecting(thread) = std::mem::replace(&mut self.stage, Stage::Shaking) else {
            return Ok(());
        };
        let r = thread.join().unwrap_or(Err(Error::NoMemory));
        if r.is_err() {
            // Then the kernel has begun nothing.
            self.under_way = false;
        }
        r
    }

    /// Somebody wants to connect.
    fn request(
        &mut self,
        event: &Event,
        device: &Context,
        qpn: u32,
        token: [u8; TOKEN],
    ) -> Result<(), Error> {
        let Some(channel) = &self.channel else {
            return Ok(());
        };
        // SAFETY: this event was just taken from the channel. Whatever becomes of the request, its
        // id is ours to destroy.
        let Some(id) = (unsafe { Id::of(event, channel) }) else {
            return Ok(());
        };
        let peer = self.remote.map(|r| r.gid.ip());
        let good = self.listener.is_some()
            && id.handle().peer() == peer
            && shows(&event.data, token)
            && id.handle().on(device).is_ok();
        if !good {
            id.handle().reject();
            return Ok(());
        }
        id.handle().accept(qpn)?;
        self.under_way = true;
        self.stage = Stage::Shaking;
        self.id = Some(id);
        // Nobody else is wanted. Requests that wait are refused with it.
        self.listener = None;
        Ok(())
    }

    /// Something became of what we began. Says whether we are connected.
    fn event(
        &mut self,
        event: &Event,
        device: &Context,
        qpn: u32,
        token: [u8; TOKEN],
    ) -> Result<bool, Error> {
        use rdma_cm_event_type::*;
        if event.kind == RDMA_CM_EVENT_DEVICE_REMOVAL {
            return Err(Error::NoDevice);
        }
        let Some(id) = self.id.as_ref().filter(|id| id.has(event)) else {
            return Ok(false);
        };
        let id = id.handle();
        match event.kind {
            RDMA_CM_EVENT_ADDR_RESOLVED => {
                id.on(device)?;
                id.route()?;
            }
            RDMA_CM_EVENT_ROUTE_RESOLVED => {
                id.on(device)?;
                let connect = move || id.connect(qpn, token);
                let thread = thread::Builder::new().name("iwarp-connect".into());
                let thread = thread.spawn(connect).map_err(|_| Error::NoMemory)?;
                self.under_way = true;
                self.stage = Stage::Connecting(thread);
            }
            RDMA_CM_EVENT_ESTABLISHED => {
                self.under_way = false;
                self.stage = Stage::Connected;
                return Ok(true);
            }
            RDMA_CM_EVENT_ADDR_ERROR | RDMA_CM_EVENT_ROUTE_ERROR | RDMA_CM_EVENT_UNREACHABLE => {
                self.under_way = false;
                return Err(Error::Unreachable);
            }
            RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_CONNECT_ERROR | RDMA_CM_EVENT_DISCONNECTED => {
                self.under_way = false;
                return Err(Error::Refused);
            }
            _ => {}
        }
        Ok(false)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The thread must not use an id that is gone.
        let _ = self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn tokens() {
        let t = token(0x0012_3456, 0x00ab_cdef);
        assert_eq!(t, *b"UPiw\x56\x34\x12\x00\xef\xcd\xab\x00");
        assert_eq!(t, token(0xff12_3456, 0x01ab_cdef), "24 bits count");
        assert!(shows(&t, t));
        assert!(shows(&[&t[..], &[0; 50]].concat(), t), "padded");
        assert!(!shows(&t[..TOKEN - 1], t), "cut");
        assert!(!shows(&[], t));
        assert!(!shows(&token(0x00ab_cdef, 0x0012_3456), t), "the other way");
        for i in 0..TOKEN {
            let mut wrong = t;
            wrong[i] ^= 1;
            assert!(!shows(&wrong, t));
        }
    }

    /// Nothing of the kernel's is asked for until it is needed, and steps out of order are refused.
    #[test]
    fn order() {
        let c = Connection::new().unwrap();
        let remote = Endpoint {
            qpn: 1,
            psn: 2,
            gid: Ipv4Addr::LOCALHOST.into(),
            lid: 0,
        };
        assert_eq!(c.to_rts(1), Err(Error::Invalid), "the peer is not known");
        c.to_rtr(remote, remote.gid).unwrap();
        assert_eq!(c.to_rts(1), Err(Error::Invalid), "nobody listens");
        assert!(!c.under_way());
        c.settle();
    }
}
