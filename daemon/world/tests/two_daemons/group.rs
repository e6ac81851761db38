//! A link group, as a process has mapped it.

use lane::abi::CONTROL_BYTES;
use lane::half::{Area, Memory};
use lane::notify;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use underpass_rdma::verbs::{Mapping, Memory as _};
use underpassd::os::memfd;

/// A piece of an area: whose, which chunk, and the mapping; for chunk 0 there is a second one, of its data.
type Piece = (bool, u32, Rc<Mapping>, Option<Rc<Mapping>>);

pub struct Group {
    pub own: Area,
    pub peer: Area,
    pub bell: OwnedFd,
    pieces: Vec<Piece>,
    /// It was given up, or the daemon that made it has died.
    pub gone: bool,
    pub dead: bool,
    /// Not all ends that are on it know that yet.
    pub news: bool,
    /// An ancestor's: its doorbell and its count of sleepers are that one's.
    pub inherited: bool,
}

impl Group {
    pub fn new(bell: OwnedFd) -> Group {
        Group {
            own: Area::new(),
            peer: Area::new(),
            bell,
            pieces: Vec::new(),
            gone: false,
            dead: false,
            news: false,
            inherited: false,
        }
    }

    /// As a forked child has it.
    pub fn fork(&self) -> Group {
        let mut l = Group::new(self.bell.try_clone().unwrap());
        for p in &self.pieces {
            l.put(p.clone());
        }
        (l.gone, l.dead, l.news, l.inherited) = (self.gone, self.dead, self.news, true);
        l
    }

    pub fn enter(&mut self, own: bool, n: u32, fd: &OwnedFd, bytes: u64) {
        let bytes = bytes as usize;
        let map = |at: usize, len| Rc::new(Mapping::of(fd, at as u64, len, own).unwrap());
        if self.pieces.iter().any(|p| (p.0, p.1) == (own, n)) {
            return; // once more, after a new control connection
        }
        self.put(match n {
            0 => {
                let data = map(CONTROL_BYTES, bytes - CONTROL_BYTES);
                (own, 0, map(0, CONTROL_BYTES), Some(data))
            }
            n => (own, n, map(0, bytes), None),
        });
        if own {
            memfd::seal(fd).unwrap();
        }
    }

    fn put(&mut self, piece: Piece) {
        let (own, n, first, data) = &piece;
        let area = if *own { &self.own } else { &self.peer };
        // SAFETY: mapped for so many bytes, and kept as long as the area.
        unsafe {
            match data {
                Some(data) => {
                    area.set_control(first.addr().as_ptr().cast());
                    area.set_chunk(1, data.addr().as_ptr(), data.len());
                }
                None => area.set_chunk(*n as usize, first.addr().as_ptr(), first.len()),
            }
        }
        self.pieces.push(piece);
    }

    pub fn memory(&self, slot: u32) -> Memory<'_> {
        let m = Memory::new(&self.own, &self.peer, slot).expect("mapped");
        m.across(true)
    }

    /// The doorbell, as long as somebody hears it.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.bell.as_fd())
    }

    /// Has the daemon closed its end of the doorbell?
    pub fn hung_up(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let mut p = [PollFd::new(&self.bell, PollFlags::empty())];
        let polled = rustix::event::poll(&mut p, Some(&Timespec::default()));
        polled.is_ok() && p[0].revents().contains(PollFlags::HUP)
    }

    pub fn fall_asleep(&self) {
        if !self.inherited {
            notify::fall_asleep(&self.own.control().unwrap().sleepers.0);
        }
    }

    pub fn wake_up(&self) {
        if !self.inherited {
            notify::wake_up(&self.own.control().unwrap().sleepers.0);
            notify::doorbell::drain(self.bell.as_fd());
        }
    }
}
