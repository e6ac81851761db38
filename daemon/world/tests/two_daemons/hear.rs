//! What a daemon says to a process, and what that does then, as `shim/src/daemon/dispatch`.

use super::app;
use super::family::{holders, Life, Shared};
use super::group::Group;
use super::process::{Process, SHARED_NS};
use super::seen::{note, tell};
use lane::abi::{Epoch, Loc};
use lane::family::flag;
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use lane::proto::reason::Reason;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::sim::Rng;

/// Rings of a slot, in pages of the first data chunk.
const RINGS: [u32; 5] = [12, 13, 14, 12, 13];
const PAGES: u32 = 10;
impl Process {
    /// Takes in what the daemon has said. `false`: it is gone.
    pub fn listen(&mut self, now: u64, rng: &mut Rng) -> bool {
        while let Some((sock, _)) = &self.control {
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
            tell!("{} hears {msg:x?}", self.name);
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
                let l = self.groups.entry(group).or_insert_with(|| Group::new(bell));
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
                if let Some(l) = self.groups.get_mut(&group) {
                    l.enter(true, chunk, &fds[0], bytes);
                    self.say(ToDaemon::Mapped { group, side, chunk }, vec![]);
                }
            }
            // (It finds that out only after its lane was offered.)
            ToShim::PeerChunk { chunk: 0, .. } if !self.maps => {}
            ToShim::PeerChunk {
                group,
                side,
                chunk,
                bytes,
            } => {
                let l = self.groups.get_mut(&group);
                l.expect("told of the link group before")
                    .enter(false, chunk, &fds[0], bytes);
                if chunk > 0 {
                    self.say(ToDaemon::PeerMapped { group, side, chunk }, vec![]);
                }
            }
            msg => self.hear_of_lanes(msg, now, rng),
        }
    }

    /// The entry of an end that this process holds.
    fn entry(&self, conn: u32, gen: u32) -> Option<Shared> {
        let mut held = self.ends.iter().filter(|e| e.sock.is_some());
        let found = held.find(|e| e.name == (conn, gen));
        found.map(|e| e.entry.clone())
    }

    fn hear_of_lanes(&mut self, msg: ToShim, now: u64, rng: &mut Rng) {
        match msg {
            ToShim::Offer { group, side, .. } if !self.maps => {
                self.say(ToDaemon::GroupFailed { group, side }, vec![]);
            }
            ToShim::Offer {
                group,
                side,
                lane,
                conn,
                gen,
                epoch,
                tag,
            } => {
                let taken = self.attach((group, lane), (conn, gen), (epoch, tag), now, rng);
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
                note("declined");
                if let Some(e) = self.entry(conn, gen) {
                    let e = &mut *e.borrow_mut();
                    if e.owner != self.pid {
                        return;
                    }
                    e.registered = false;
                    e.not_before = now + u64::from(retry_ms) * 1_000_000;
                    let never =
                        [Reason::Hostile, Reason::Stalled, Reason::InDoubt].map(|r| r.code());
                    assert!(e.excused || !never.contains(&local), "reset: {local:#x}");
                }
            }
            ToShim::LaneGone {
                group,
                lane,
                conn,
                gen,
                ..
            } => {
                if let Some(e) = self.entry(conn, gen) {
                    let e = &mut *e.borrow_mut();
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
        now: u64,
        rng: &mut Rng,
    ) -> bool {
        let (Some(l), Some(shared)) = (self.groups.get(&at.0), self.entry(conn, gen)) else {
            return false;
        };
        let e = &mut *shared.borrow_mut();
        if e.lane == Some(at) {
            return true;
        }
        let usable = e.life == Life::Open && e.registered && e.lane.is_none() && !e.left;
        if !usable || l.gone || e.owner != self.pid {
            return false;
        }
        let c = self.family.conn(e.index);
        if holders(c) != 1 {
            note("a lane refused because there is another holder");
            e.registered = false;
            e.not_before = now + SHARED_NS;
            return false;
        }
        let own = self.ends.iter().find(|e| Rc::ptr_eq(&e.entry, &shared));
        let Some(sock) = own.and_then(|e| e.sock.as_ref()) else {
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
            e.app.rx.mark_client(&l.memory(at.1));
        }
        tell!("{}[{conn}] takes {at:x?}", self.name);
        note("a lane taken");
        e.registered = false;
        e.given_back = false;
        e.lane = Some(at);
        c.flags.fetch_or(flag::LANE | flag::REMOTE, Relaxed);
        let (group, lane) = at;
        let side = 0;
        self.say(ToDaemon::LaneHeld { group, side, lane }, vec![copy]);
        true
    }
}
