//! A family of processes: its table, which they share by fork, and what the test knows of each entry.

use super::app::{App, Half};
use lane::family::{flag, state, Conn, Table, TABLE_BYTES};
use rustix::fs::{MemfdFlags, SealFlags};
use std::any::Any;
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use underpass_rdma::verbs::{Mapping, Memory as _};

/// How far an end is from its close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Life {
    Open,
    /// It sends no more: the rest of its ring is to go to TCP, and the FIN after it.
    Shutting,
    Shut,
    Closed,
}

/// One end of a connection, as all know it that hold it. The words that the daemon reads are in the table.
pub struct Entry {
    pub index: usize,
    /// Of its socket.
    pub inode: u64,
    pub app: App,
    pub life: Life,
    pub client: bool,
    /// Link group and slot.
    pub lane: Option<(u64, u32)>,
    /// The number of the process that registered it: only that one works its lane.
    pub owner: u32,
    pub given_back: bool,
    /// It could not leave its lane in time: the connection is reset.
    pub reset: bool,
    pub registered: bool,
    pub not_before: u64,
    pub gen: u32,
    pub ups: u64,
    pub was_up: bool,
    /// Its connection has left its lane, and never gets one again.
    pub left: bool,
    /// A program that has no shim goes on with it.
    pub foreign: bool,
    /// TCP may tell an error, because somebody died or was reset whom kernel TCP would not have spared either. (What
    /// arrives is right all the same, and no early end is a clean one.)
    pub excused: bool,
    /// The application takes this direction back, and goes on then; until when.
    pub revoking: Option<u64>,
}

pub type Shared = Rc<RefCell<Entry>>;

pub struct Family {
    fd: OwnedFd,
    table: Rc<Mapping>,
    entries: RefCell<usize>,
}

impl Family {
    pub fn new() -> Rc<Family> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("table", flags).unwrap();
        rustix::fs::ftruncate(&fd, TABLE_BYTES as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        Rc::new(Family {
            table: Rc::new(Mapping::of(&fd, 0, TABLE_BYTES, true).unwrap()),
            fd,
            entries: RefCell::default(),
        })
    }

    pub fn table_fd(&self) -> OwnedFd {
        self.fd.try_clone().unwrap()
    }

    fn table(&self) -> &Table {
        // SAFETY: mapped for a whole table, of atomics.
        unsafe { self.table.addr().cast::<Table>().as_ref() }
    }

    pub fn conn(&self, i: usize) -> &Conn {
        &self.table().conns[i]
    }

    /// A new entry, which this process holds.
    pub fn add(&self, mut app: App, pid: u32, client: bool, inode: u64) -> Shared {
        let index = *self.entries.borrow();
        *self.entries.borrow_mut() += 1;
        let c = self.conn(index);
        let gen = c.gen.fetch_add(1, Relaxed) + 1;
        c.inode.store(inode, Relaxed);
        add_holder(c, pid);
        let flags = if client { flag::CLIENT } else { 0 };
        c.flags.store(flag::NAMED | flags, Relaxed);
        c.state.store(state::OPEN, Release); // pairs with the daemon's copy of the entry
        let used = &self.table().header.used;
        used.fetch_max(index as u32 + 1, Relaxed);
        let keep: Rc<dyn Any> = self.table.clone();
        // SAFETY: both are in the table, which is mapped as long as `keep`.
        (app.tx, app.rx) =
            unsafe { (Half::within(&c.tx, keep.clone()), Half::within(&c.rx, keep)) };
        Rc::new(RefCell::new(Entry {
            index,
            inode,
            app,
            life: Life::Open,
            client,
            lane: None,
            owner: pid,
            given_back: false,
            reset: false,
            registered: false,
            not_before: 0,
            gen,
            ups: 0,
            was_up: false,
            left: false,
            foreign: false,
            excused: false,
            revoking: None,
        }))
    }
}

pub fn add_holder(c: &Conn, pid: u32) {
    let free = c.holders.iter().find(|h| h.load(Relaxed) == 0);
    free.expect("few processes").store(pid, Relaxed);
}

pub fn remove_holder(c: &Conn, pid: u32) {
    for h in c.holders.iter().filter(|h| h.load(Relaxed) == pid) {
        h.store(0, Relaxed);
    }
}

pub fn is_holder(c: &Conn, pid: u32) -> bool {
    c.holders.iter().any(|h| h.load(Relaxed) == pid)
}

/// Those who hold it, as far as the table knows.
pub fn holders(c: &Conn) -> usize {
    let entered = c.holders.iter().filter(|h| h.load(Relaxed) != 0);
    entered.count() + c.forks.load(Relaxed) as usize
}
