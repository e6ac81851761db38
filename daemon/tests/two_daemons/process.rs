//! A process with a shim, as far as the daemon can tell: it maps areas, takes lanes, and does with its connections'
//! ends what the shim does with remote ones (`shim/src/process/remote`, `promotion/remote`, `promotion/retire`). The
//! halves of its lanes are the real ones.

use super::app::{self, App};
use super::sock::Sock;
use lane::abi::{Epoch, Loc, CONTROL_BYTES};
use lane::family::{flag, state, Conn, Table, TABLE_BYTES};
use lane::half::{tx, Area};
use lane::notify;
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use lane::proto::reason::Reason;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::collections::{HashMap, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::Arc;
use underpass_rdma::sim::Rng;
use underpass_rdma::verbs::{Mapping, Memory as _};

/// Rings of a slot, in pages of the first data chunk.
const RINGS: [u32; 5] = [12, 13, 14, 12, 13];
const PAGES: u32 = 10;
/// Tells what happens, if asked to.
macro_rules! tell {
    ($($what:tt)*) => {
        if std::env::var_os("WHY").is_some() {
            eprintln!($($what)*);
        }
    };
}
pub(crate) use tell;

/// A link group, as the process has mapped it.
pub struct LinkGroup {
    pub own: Area,
    pub peer: Area,
    pub bell: OwnedFd,
    maps: Vec<Arc<Mapping>>,
    pub gone: bool,
    /// The daemon that made it has died.
    pub dead: bool,
}

/// How far an end is from its close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Life {
    Open,
    /// It sends no more: the rest of its ring is to go to TCP, and the FIN after it.
    Shutting,
    Shut,
    Closed,
}

/// One end of a connection.
pub struct End {
    pub app: App,
    pub life: Life,
    pub sock: Option<TcpStream>,
    client: bool,
    /// Link group and slot.
    pub lane: Option<(u64, u32)>,
    pub given_back: bool,
    /// A switch was under way when nobody was left to say what became of it: the connection is reset.
    pub doubt: bool,
    /// Its other end was killed.
    pub bereft: bool,
    pub registered: bool,
    pub not_before: u64,
    pub gen: u32,
    pub ups: u64,
    pub lanes: u64,
    was_up: bool,
    /// Its connection has left its lane, and never gets one again.
    pub left: bool,
}

impl End {
    pub fn new(sock: TcpStream, client: bool, app: App) -> End {
        sock.set_nonblocking(true).unwrap();
        End {
            app,
            life: Life::Open,
            sock: Some(sock),
            client,
            lane: None,
            given_back: false,
            doubt: false,
            bereft: false,
            registered: false,
            not_before: 0,
            gen: 0,
            ups: 0,
            lanes: 0,
            was_up: false,
            left: false,
        }
    }

    /// Has it done all that it was made for, so that it may close?
    pub fn is_through(&self) -> bool {
        self.life >= Life::Shut && self.app.ended
    }
}

/// A message to the daemon, with its descriptors.
pub type Said = (ToDaemon, Vec<OwnedFd>);

pub struct Process {
    pub name: String,
    table_fd: OwnedFd,
    table: Mapping,
    /// Our end of the control connection.
    pub control: Option<OwnedFd>,
    pub said: VecDeque<Said>,
    pub links: HashMap<u64, LinkGroup>,
    pub ends: Vec<End>,
    /// Does nothing until then: it computes, or sleeps outside every call.
    pub busy_until: u64,
    /// Counted as a sleeper on its link groups.
    asleep: bool,
    pub killed: bool,
    /// Its thread makes this end leave its lane, until then.
    pub leaving: Option<(usize, u64)>,
    pub declined: HashMap<u32, u64>,
}

impl Process {
    pub fn new(name: String) -> Process {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("table", flags).unwrap();
        rustix::fs::ftruncate(&fd, TABLE_BYTES as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        Process {
            name,
            table: Mapping::of(&fd, 0, TABLE_BYTES, true).unwrap(),
            table_fd: fd,
            control: None,
            said: VecDeque::new(),
            links: HashMap::new(),
            ends: Vec::new(),
            busy_until: 0,
            asleep: false,
            killed: false,
            leaving: None,
            declined: HashMap::new(),
        }
    }

    pub fn table_fd(&self) -> OwnedFd {
        self.table_fd.try_clone().unwrap()
    }

    /// Has it not told the daemon yet that it is done with a lane?
    pub fn says_done(&self) -> bool {
        let done = |(m, _): &Said| matches!(m, ToDaemon::LaneDone { .. });
        self.said.iter().any(done)
    }

    /// Is an end not on TCP yet that no daemon would bring there, if its process were killed now?
    pub fn has_nobody(&self, i: usize) -> bool {
        let e = &self.ends[i];
        let dead = e.lane.is_some_and(|k| self.links[&k.0].dead);
        dead && e.app.tx.mode.load(Relaxed) != tx::mode::TCP
    }

    pub fn conn(&self, i: usize) -> &Conn {
        // SAFETY: mapped for a whole table, of atomics.
        let table = unsafe { self.table.addr().cast::<Table>().as_ref() };
        &table.conns[i]
    }

    pub fn add(&mut self, mut end: End) {
        let i = self.ends.len();
        let c = self.conn(i);
        end.gen = c.gen.fetch_add(1, Relaxed) + 1;
        let inode = rustix::fs::fstat(end.sock.as_ref().unwrap())
            .unwrap()
            .st_ino;
        c.inode.store(inode, Relaxed);
        c.holders[0].store(std::process::id(), Relaxed);
        let client = if end.client { flag::CLIENT } else { 0 };
        c.flags.store(flag::NAMED | client, Relaxed);
        c.state.store(state::OPEN, Release); // pairs with the daemon's copy of the entry
                                             // SAFETY: as in `conn`.
        let table = unsafe { self.table.addr().cast::<Table>().as_ref() };
        table.header.used.fetch_max(i as u32 + 1, Relaxed);
        self.ends.push(end);
    }

    pub fn say(&mut self, msg: ToDaemon, fds: Vec<OwnedFd>) {
        if self.control.is_some() {
            self.said.push_back((msg, fds));
        }
    }

    /// Takes in what the daemon has said. `false`: it is gone.
    pub fn listen(&mut self, now: u64, rng: &mut Rng) -> bool {
        while let Some(sock) = &self.control {
            let mut buf = [0u8; MAX];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let into = &mut [IoSliceMut::new(&mut buf)];
            let got = rustix::net::recvmsg(sock, into, &mut ancillary, flags);
            let len = match got {
                Ok(g) if g.bytes > 0 => g.bytes,
                Err(rustix::io::Errno::AGAIN) => return true,
                _ => return false,
            };
            let mut fds = Vec::new();
            for m in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(r) = m {
                    fds.extend(r);
                }
            }
            let msg = ToShim::decode(&buf[..len]).unwrap();
            self.hear(msg, fds, now, rng);
        }
        true
    }

    fn hear(&mut self, msg: ToShim, mut fds: Vec<OwnedFd>, now: u64, rng: &mut Rng) {
        match msg {
            ToShim::GroupNew {
                group,
                side,
                bytes,
                remote,
            } => {
                assert_eq!((side, remote, fds.len()), (0, 1, 2));
                let (first, bell) = (fds.pop().unwrap(), fds.pop().unwrap());
                let l = self
                    .links
                    .entry(group)
                    .or_insert_with(|| LinkGroup::new(bell));
                l.enter(true, 0, &first, bytes);
                let chunk = 0;
                self.say(ToDaemon::Mapped { group, side, chunk }, vec![]);
            }
            ToShim::Chunk {
                group,
                side,
                chunk,
                bytes,
            } => {
                if let Some(l) = self.links.get_mut(&group) {
                    l.enter(true, chunk, &fds[0], bytes);
                    self.say(ToDaemon::Mapped { group, side, chunk }, vec![]);
                }
            }
            ToShim::PeerChunk {
                group,
                side,
                chunk,
                bytes,
            } => {
                let l = self.links.get_mut(&group);
                l.expect("told of the link group before")
                    .enter(false, chunk, &fds[0], bytes);
                if chunk > 0 {
                    self.say(ToDaemon::PeerMapped { group, side, chunk }, vec![]);
                }
            }
            msg => self.hear_of_lanes(msg, now, rng),
        }
    }

    fn hear_of_lanes(&mut self, msg: ToShim, now: u64, rng: &mut Rng) {
        let of = |e: &&mut End, gen| e.gen == gen;
        match msg {
            ToShim::Offer {
                group,
                side,
                lane,
                conn,
                gen,
                epoch,
                tag,
            } => {
                let taken = self.attach((group, lane), (conn, gen), (epoch, tag), rng);
                if !taken {
                    self.say(ToDaemon::LaneRefused { group, side, lane }, vec![]);
                }
            }
            ToShim::Decline {
                conn,
                gen,
                local,
                retry_ms,
                ..
            } => {
                *self.declined.entry(local).or_default() += 1;
                let e = self.ends.get_mut(conn as usize);
                if let Some(e) = e.filter(|e| of(e, gen)) {
                    e.registered = false;
                    e.not_before = now + u64::from(retry_ms) * 1_000_000;
                    e.doubt |= local == Reason::InDoubt.code();
                    let never = [Reason::Hostile, Reason::Stalled].map(|r| r.code());
                    assert!(!never.contains(&local), "reset: {local:#x}");
                }
            }
            ToShim::LaneGone {
                group,
                lane,
                conn,
                gen,
                ..
            } => {
                let e = self.ends.get_mut(conn as usize);
                if let Some(e) = e.filter(|e| of(e, gen)) {
                    e.given_back |= e.lane == Some((group, lane));
                }
            }
            ToShim::PeerGone { group, .. } => self.group_gone(group, false),
            _ => {}
        }
    }

    /// A lane is offered; whether it is taken.
    fn attach(
        &mut self,
        at: (u64, u32),
        (conn, gen): (u32, u32),
        (epoch, tag): (Epoch, u64),
        rng: &mut Rng,
    ) -> bool {
        let (Some(l), Some(e)) = (self.links.get(&at.0), self.ends.get_mut(conn as usize)) else {
            return false;
        };
        if e.lane == Some(at) {
            return true;
        }
        let usable = e.gen == gen && e.life == Life::Open && e.registered && e.lane.is_none();
        let Some(sock) = e.sock.as_ref().filter(|_| usable && !l.gone) else {
            return false;
        };
        let copy = OwnedFd::from(sock.try_clone().unwrap());
        let mut page = at.1 * PAGES;
        let places = RINGS.map(|log2| {
            let loc = Loc {
                chunk: 1,
                page,
                log2,
            };
            page += 1 << (log2 - 12);
            loc
        });
        e.app.slot = at.1;
        e.app.set_places(places.to_vec());
        let w = app::World {
            app: &l.own,
            proxy: &l.peer,
            port: &(),
        };
        e.app.attach(&w, epoch, tag, rng);
        if e.client {
            e.app.rx.mark_client(&app::memory(&w, at.1));
        }
        tell!("{}[{conn}] takes {at:x?}", self.name);
        e.registered = false;
        e.given_back = false;
        e.lane = Some(at);
        e.lanes += 1;
        let msg = ToDaemon::LaneHeld {
            group: at.0,
            side: 0,
            lane: at.1,
        };
        self.say(msg, vec![copy]);
        true
    }

    /// The daemon has ended.
    pub fn daemon_lost(&mut self) {
        self.control = None;
        self.said.clear();
        for e in &mut self.ends {
            e.registered = false;
        }
        let all: Vec<u64> = self.links.keys().copied().collect();
        all.into_iter().for_each(|l| self.group_gone(l, true));
    }

    /// Does something, as a program might. Whether anything moved.
    pub fn step(&mut self, now: u64, rng: &mut Rng, calm: bool) -> bool {
        if self.asleep && !self.wakes() {
            return false;
        }
        self.wake_up();
        if !self.listen(now, rng) {
            self.daemon_lost();
        }
        let mut moved = false;
        for i in 0..self.ends.len() {
            if calm || !rng.one_in(3) {
                moved |= self.step_end(i, now, rng, false);
            }
        }
        if !moved && rng.one_in(4) {
            self.fall_asleep(now, rng);
        }
        moved
    }

    /// Counts itself asleep, and looks once more at everything.
    fn fall_asleep(&mut self, now: u64, rng: &mut Rng) {
        for l in self.links.values().filter(|l| !l.gone) {
            notify::fall_asleep(&l.own.control().unwrap().sleepers.0);
        }
        self.asleep = true;
        let mut moved = false;
        for i in 0..self.ends.len() {
            moved |= self.step_end(i, now, rng, true);
        }
        let waits = |e: &End| e.life == Life::Shutting || e.lane.is_none() && e.life == Life::Open;
        if moved || self.ends.iter().any(waits) {
            self.wake_up();
        }
    }

    pub fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            for l in self.links.values().filter(|l| !l.gone) {
                notify::wake_up(&l.own.control().unwrap().sleepers.0);
                lane::notify::doorbell::drain(l.bell.as_fd());
            }
        }
    }

    /// Is there anything that ends a sleep: a doorbell, the daemon, TCP?
    fn wakes(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let bells = self
            .links
            .values()
            .filter(|l| !l.gone)
            .map(|l| l.bell.as_fd());
        let control = self.control.iter().map(|c| c.as_fd());
        let mut all: Vec<PollFd> = bells
            .chain(control)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        for e in &self.ends {
            let Some(s) = &e.sock else { continue };
            let out = e.life == Life::Open && e.app.sent < e.app.total && !e.app.tx.is_up();
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !e.app.ended);
            flags.set(PollFlags::OUT, out);
            all.push(PollFd::from_borrowed_fd(s.as_fd(), flags));
        }
        matches!(rustix::event::poll(&mut all, Some(&Timespec::default())), Ok(n) if n > 0)
    }

    fn step_end(&mut self, i: usize, now: u64, rng: &mut Rng, all: bool) -> bool {
        let e = &mut self.ends[i];
        let Some(sock) = &e.sock else { return false };
        let copy = sock.as_fd().try_clone_to_owned().unwrap();
        let fd = copy.as_fd();
        let moved = match e.lane.and_then(|k| Some((k, self.links.get(&k.0)?))) {
            Some((_, l)) => {
                let open = !l.gone && !e.given_back;
                e.app.may_up = open;
                let bell = Some(l.bell.as_fd());
                let port = Sock { fd, bell };
                let w = app::World {
                    app: &l.own,
                    proxy: &l.peer,
                    port: &port,
                };
                let moved = e.app.step(&w, rng, all);
                let up = e.app.tx.is_up();
                if up != e.was_up {
                    tell!("{}[{i}] up: {up}", self.name);
                }
                e.ups += u64::from(up && !e.was_up);
                e.was_up = up;
                moved
            }
            None => e.app.step_native(&Sock { fd, bell: None }, rng),
        };
        self.retire(i, fd, now);
        self.go_on_shutting(i, fd);
        self.register(i, now, rng);
        moved
    }

    fn register(&mut self, i: usize, now: u64, rng: &mut Rng) {
        let e = &self.ends[i];
        let wanted = e.life == Life::Open && e.lane.is_none() && !e.registered && !e.left;
        if !wanted || self.control.is_none() || now < e.not_before || !rng.one_in(4) {
            return;
        }
        let Some(sock) = &e.sock else { return };
        let fd = OwnedFd::from(sock.try_clone().unwrap());
        let client = if e.client {
            lane::proto::msg::register::CLIENT
        } else {
            0
        };
        let msg = ToDaemon::Register {
            conn: i as u32,
            gen: e.gen,
            tx_tcp_pos: e.app.tx.tcp_pos.load(Relaxed),
            rx_tcp_pos: e.app.rx.tcp_pos.load(Relaxed),
            flags: lane::proto::msg::register::CERTAIN | client,
        };
        self.ends[i].registered = true;
        self.say(msg, vec![fd]);
    }
}

impl LinkGroup {
    fn new(bell: OwnedFd) -> LinkGroup {
        LinkGroup {
            own: Area::new(),
            peer: Area::new(),
            bell,
            maps: Vec::new(),
            gone: false,
            dead: false,
        }
    }

    fn enter(&mut self, own: bool, n: u32, fd: &OwnedFd, bytes: u64) {
        let area = if own { &self.own } else { &self.peer };
        let bytes = bytes as usize;
        let (skip, data) = if n == 0 {
            (CONTROL_BYTES, 1)
        } else {
            (0, n as usize)
        };
        if area.has_chunk(data) {
            return; // once more, after a new control connection
        }
        // SAFETY: mapped for so many bytes, and kept as long as the area.
        unsafe {
            if n == 0 {
                let words = Arc::new(Mapping::of(fd, 0, CONTROL_BYTES, own).unwrap());
                area.set_control(words.addr().as_ptr().cast());
                self.maps.push(words);
            }
            let map = Arc::new(Mapping::of(fd, skip as u64, bytes - skip, own).unwrap());
            area.set_chunk(data, map.addr().as_ptr(), map.len());
            self.maps.push(map);
        }
    }
}
