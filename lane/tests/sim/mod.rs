//! A world in which the real lane code is driven step by step: two ends, their areas, a simulated
//! TCP connection, and a check on every byte that reaches an application.
//!
//! Whatever an end does may be interrupted at each system call and each publish by something the
//! other end (or another thread of the same end) does, or by the death of the end: see [`Op`].

#![allow(dead_code)] // each test uses a part

mod acts;
mod calls;
mod ends;
pub mod memory;
pub mod moves;
pub mod net;
mod op;
pub mod scribble;
mod settle;
mod takeover;
mod wire;

use lane::abi::{Cursor, Epoch, Loc, EPOCHS};
use lane::half::rx::How;
use lane::half::{Area, Memory, RxState, TxState};
use lane::proto::frame::{Frame, Kind};
use lane::proto::reason::Reason;
use memory::Client;
use net::Net;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

#[allow(unused_imports)] // each test uses a part
pub use op::*;
pub use wire::Wire;

pub const LANE: u32 = 70;
pub const TAG: u64 = 0x5eed_5eed_0bad_cafe;

#[derive(Default)]
pub struct Host {
    pub tx: TxState,
    pub rx: RxState,
    pub attached: Cell<bool>,
    pub dead: Cell<bool>,
    pub closed: Cell<bool>,
    pub wr_shut: Cell<bool>,
    /// Inside the call that may put the end of the stream on TCP.
    pub finishing: Cell<bool>,
    pub eof: Cell<bool>,
    /// TCP reported an error.
    pub failed: Cell<bool>,
    pub revoking: Cell<bool>,
    /// Leaves its lane; has left it, and the other end may not have yet.
    pub leaving: Cell<bool>,
    /// Since when it leaves.
    leaves_ms: Cell<u64>,
    pub left: Cell<bool>,
    /// Its process will execute another program as soon as it has left.
    pub execs: Cell<bool>,
    /// A shutdown (`false`) or close (`true`) is under way that something else has to come before.
    pub wants: Cell<Option<bool>>,
    /// A thread has taken the sending direction's lock, and done nothing yet.
    woken: Cell<bool>,
    /// The lane's use that this end has had last, and its last epoch if its program is another one by now.
    last_use: Cell<u32>,
    used: Cell<u32>,
    /// Bytes the application was told are sent, and those of a call that has not returned.
    pub sent: Cell<u64>,
    pub in_flight: Cell<u64>,
    pub got: Cell<u64>,
    pub unread: Cell<u64>,
    /// Bytes that the last receive found.
    pub found: Cell<u64>,
    /// Locks: the lane's two, and the application's two.
    busy: [Cell<bool>; 4],
    locs: RefCell<Vec<Loc>>,
}

const TX: usize = 0;
const RX: usize = 1;
const SEND: usize = 2;
const RECV: usize = 3;

/// Unwinds out of the middle of an operation: the process died there.
struct Killed;

pub struct World {
    clients: &'static [Client; 2],
    own: [Area; 2],
    /// What the honest end's application has sent to a hostile one, as far as it was looked at.
    sent_bytes: RefCell<Vec<u8>>,
    peer: [Area; 2],
    /// Each end's area as its daemon sees it, and the other one's as a daemon writes it.
    beside: [[Area; 2]; 2],
    /// On one node: what the daemon has of each end.
    taken: [takeover::Taken; 2],
    daemon_gone: Cell<bool>,
    /// Has the end's process lost its control connection?
    cut: [Cell<bool>; 2],
    now_ms: Cell<u64>,
    /// How often the lane was offered for this connection.
    lane_use: Cell<u32>,
    /// What was seen last of each end.
    at: [Cell<moves::At>; 2],
    /// Which changes were seen, and how often.
    pub moves: RefCell<moves::Moves>,
    pub host: [Host; 2],
    pub net: RefCell<Net>,
    inner: RefCell<VecDeque<(usize, usize, Act)>>,
    nested: Cell<bool>,
    acting: Cell<usize>,
    /// The ends are on two nodes. Nobody is between them: a test stores the words of their daemons itself.
    across: Cell<bool>,
    steps: Cell<u64>,
    base: Cell<Epoch>,
    use_no: Cell<u64>,
    /// System calls of the operation under way: none may loop for ever.
    calls: Cell<u32>,
    pub trace: Cell<bool>,
    /// How often things happened, so that tests can insist that they did.
    pub seen: RefCell<std::collections::BTreeMap<&'static str, u64>>,
    /// Called in every hook; for the hostile test.
    pub meddle: RefCell<Option<Meddle>>,
    /// One end is hostile: the checks of content do not apply.
    pub hostile: Cell<bool>,
}

/// Byte `at` of what end `e` sends on the `n`th connection. One block in eight looks like a frame.
fn content(n: u64, e: usize, at: u64, buf: &mut [u8]) {
    let mut block = u64::MAX;
    let mut bytes = [0u8; 32];
    for (i, d) in buf.iter_mut().enumerate() {
        let p = at + i as u64;
        if p / 32 != block {
            block = p / 32;
            let mut h = (n << 40 ^ (e as u64) << 32 ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h ^= h >> 29;
            if h.is_multiple_of(8) {
                let f = Frame {
                    kind: Kind::Down,
                    epoch: Epoch::new(1 + (h >> 8) as u32 % 8),
                    rest: 0,
                    cursor: Cursor::new(block * 32),
                    tag: !TAG,
                };
                bytes = f.encode();
            } else {
                for c in bytes.chunks_mut(8) {
                    h = h.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ h >> 31;
                    c.copy_from_slice(&h.to_le_bytes());
                }
            }
        }
        *d = bytes[(p % 32) as usize];
    }
}

fn vecs(b: &mut [u8]) -> Vec<libc::iovec> {
    let n = b.len();
    let cut = [0, n / 3, n / 3, n / 2 + n / 5, n]; // one of them empty
    cut.windows(2)
        .map(|w| libc::iovec {
            iov_base: b[w[0]..w[1]].as_mut_ptr().cast(),
            iov_len: w[1] - w[0],
        })
        .collect()
}

/// What a third party does in the middle of operations.
pub type Meddle = Box<dyn FnMut(&World)>;

thread_local! {
    // Mapping is dear; every case of a thread uses the same memory, cleared.
    static CLIENTS: &'static [Client; 2] = Box::leak(Box::new([Client::new(), Client::new()]));
}

impl World {
    pub fn new() -> World {
        let clients = CLIENTS.with(|p| *p);
        clients.iter().for_each(|c| c.clear(lane::VERSION));
        let w = World {
            clients,
            own: [clients[0].area(true), clients[1].area(true)],
            sent_bytes: Default::default(),
            peer: [clients[1].area(false), clients[0].area(false)],
            beside: [0, 1].map(|e| [clients[e].area(false), clients[1 - e].area(true)]),
            taken: Default::default(),
            daemon_gone: Cell::new(false),
            cut: Default::default(),
            now_ms: Cell::new(0),
            lane_use: Cell::new(1),
            at: Default::default(),
            moves: Default::default(),
            host: Default::default(),
            net: Default::default(),
            inner: Default::default(),
            nested: Cell::new(false),
            acting: Cell::new(0),
            across: Cell::new(false),
            steps: Cell::new(0),
            base: Cell::default(),
            use_no: Cell::new(0),
            calls: Cell::new(0),
            trace: Cell::new(false),
            seen: Default::default(),
            meddle: RefCell::new(None),
            hostile: Cell::new(false),
        };
        for a in &w.own {
            // Always count a sleeper, so that every publish rings and can be interrupted.
            a.control().unwrap().sleepers.0.store(1, SeqCst);
        }
        w
    }

    /// The ends are on two nodes. What each has for the other one's area is a daemon's, and the test writes it.
    pub fn across() -> World {
        let w = World::new();
        w.across.set(true);
        w
    }

    /// As the daemon beside end `e` has it when it takes the end's direction over.
    pub fn daemon(&self, e: usize) -> Memory<'_> {
        if !self.across.get() {
            return self.memory(e).for_takeover();
        }
        let [app, proxy] = &self.beside[e];
        Memory::new(app, proxy, LANE)
            .unwrap()
            .across(self.across.get())
            .for_takeover()
    }

    pub fn memory(&self, e: usize) -> Memory<'_> {
        Memory::new(&self.own[e], &self.peer[e], LANE)
            .unwrap()
            .across(self.across.get())
    }

    pub fn control(&self, e: usize) -> &lane::abi::Control {
        self.own[e].control().unwrap()
    }

    /// Foreign bytes into what end `e` has sent; not while the network is busy.
    pub fn inject(&self, e: usize, b: &[u8]) {
        if let Ok(mut n) = self.net.try_borrow_mut() {
            n.inject(e, b);
        }
    }

    pub fn scribble(&self, e: usize, at: usize, b: &[u8]) {
        self.clients[e].scribble(at, b);
    }

    pub fn note(&self, what: &'static str) {
        *self.seen.borrow_mut().entry(what).or_default() += 1;
    }

    fn hook(&self) {
        self.calls.set(self.calls.get() + 1);
        assert!(self.calls.get() < 20_000, "an operation does not end");
        self.see_moves();
        if let Ok(mut m) = self.meddle.try_borrow_mut() {
            if let Some(m) = m.as_mut() {
                m(self);
            }
        }
        if self.nested.get() {
            return;
        }
        // Everything that is due at this point, in order.
        loop {
            let next = {
                let mut q = self.inner.borrow_mut();
                match q.front_mut() {
                    Some((0, ..)) => q.pop_front(),
                    Some((k, ..)) => {
                        *k -= 1;
                        None
                    }
                    None => None,
                }
            };
            let Some((_, end, act)) = next else { return };
            if act == Act::Kill && end == self.acting.get() {
                self.act(end, &act);
                resume_unwind(Box::new(Killed));
            }
            if act == Act::DaemonDies && self.taken.iter().any(|t| t.working.get()) {
                self.daemon_dies(); // (in the middle of its work)
                resume_unwind(Box::new(Killed));
            }
            self.nested.set(true);
            self.act(end, &act);
            self.nested.set(false);
        }
    }

    /// Runs one operation with its interruptions.
    pub fn run(&mut self, op: &Op) {
        self.calls.set(0);
        if let Act::Reuse { gap } = op.act {
            return self.reuse(gap);
        }
        *self.inner.borrow_mut() = op.inner.iter().cloned().collect();
        let daemon = matches!(op.act, Act::TakeOver { .. }); // which goes on if the end dies
        self.acting.set(if daemon { 2 } else { op.end });
        if let Err(p) = catch_unwind(AssertUnwindSafe(|| self.act(op.end, &op.act))) {
            if !p.is::<Killed>() {
                resume_unwind(p);
            }
            self.note("killed within");
        }
        self.inner.borrow_mut().clear();
        (0..2).for_each(|e| self.act(e, &Act::Woken { down: false }));
        self.execute();
        self.see_moves();
        if !self.hostile.get() && !self.across.get() {
            self.check_all();
        }
    }

    fn reuse(&mut self, gap: u32) {
        let epochs = self
            .host
            .iter()
            .flat_map(|h| [&h.tx.epoch, &h.rx.epoch])
            .map(|e| e.load(Relaxed).get());
        let epochs = epochs.chain(self.host.iter().map(|h| h.used.get()));
        let last = epochs.fold(self.base.get().get(), u32::max);
        self.base.set(Epoch::base(last / EPOCHS + 1 + gap));
        for (h, p) in self.host.iter_mut().zip(self.clients) {
            h.locs.borrow_mut().drain(..).for_each(|l| p.release(l));
            *h = Host::default();
        }
        self.taken = Default::default();
        self.daemon_gone.set(false);
        self.cut.iter().for_each(|c| c.set(false));
        self.lane_use.set(1);
        (0..2).for_each(|e| self.forget_modes(e));
        *self.net.borrow_mut() = Net::default();
        self.use_no.set(self.use_no.get() + 1);
    }

    fn kill(&self, e: usize) {
        let h = &self.host[e];
        h.dead.set(true);
        if self.taken[1 - e].is_under_way() {
            self.note("a receiver is killed during a takeover");
        }
        let owes = || h.tx.must_flush(&self.memory(e)) || h.tx.awaits(&self.memory(e));
        if self.is_orphaned(e) && h.attached.get() && owes() {
            h.failed.set(true); // both have died, and nobody has the rest: docs/failures.md
        }
        self.close_socket(e);
    }

    /// The last descriptor of end `e` but for the daemon's.
    fn close_socket(&self, e: usize) {
        if !self.taken[e].holds() {
            self.net.borrow_mut().close(e);
        }
    }

    fn lock(&self, e: usize, which: usize) -> bool {
        !self.host[e].busy[which].replace(true)
    }

    fn unlock(&self, e: usize, which: usize) {
        self.host[e].busy[which].set(false);
    }

    fn poisoned(&self, e: usize, r: Reason) {
        if self.hostile.get() {
            self.note("reset");
            return self.kill(e);
        }
        // An end whose peer is gone may find the stream cut anywhere, but never a foreign byte.
        panic!("end {e}: reset with {r:?} among honest ends");
    }

    pub fn act(&self, e: usize, act: &Act) {
        self.see_moves();
        self.act_unseen(e, act);
        self.see_moves();
    }

    fn act_unseen(&self, e: usize, act: &Act) {
        if self.trace.get() {
            self.tell(e, act);
        }
        self.steps.set(self.steps.get() + 1);
        if self.acts_without_lanes_locks(e, act) {
            return;
        }
        let h = &self.host[e];
        let needs: &[usize] = match act {
            Act::TryUp | Act::Down | Act::Look | Act::Reclaim | Act::Move { .. } => &[TX],
            Act::Ready
            | Act::WantDown
            | Act::UnwantDown
            | Act::Revoke
            | Act::Probe
            | Act::Unread => &[RX],
            Act::Attach { .. } | Act::Sizes { .. } => &[TX, RX],
            _ => &[TX, RX, SEND, RECV],
        };
        if needs.iter().any(|&l| h.busy[l].get()) {
            return;
        }
        needs.iter().for_each(|&l| h.busy[l].set(true));
        if h.attached.get() != matches!(act, Act::Attach { .. })
            || matches!(act, Act::Close | Act::ShutWr)
        {
            self.locked(e, act);
        }
        needs.iter().for_each(|&l| h.busy[l].set(false));
    }

    fn tell(&self, e: usize, act: &Act) {
        let h = |e: usize| {
            let h = &self.host[e];
            (
                h.tx.mode.load(Relaxed),
                h.tx.epoch.load(Relaxed),
                h.rx.mode.load(Relaxed),
                h.rx.epoch.load(Relaxed),
                h.sent.get(),
                h.got.get(),
            )
        };
        eprintln!(
            "{}end {e}: {act:?}   {:?} {:?}",
            if self.nested.get() { "    " } else { "" },
            h(0),
            h(1)
        );
    }

    /// What needs no lock of the lane's, or takes it by itself. `false`: it is none of that.
    fn acts_without_lanes_locks(&self, e: usize, act: &Act) -> bool {
        let h = &self.host[e];
        match act {
            Act::Deliver { n } => {
                self.net.borrow_mut().deliver(e, *n);
            }
            Act::Buffers {
                snd,
                rcv,
                piece,
                more,
            } => {
                let p = &mut self.net.borrow_mut().pipe[e];
                (p.snd_cap, p.rcv_cap, p.piece, p.more) = (*snd, *rcv, *piece, *more);
            }
            Act::TakeError => {
                h.rx.error.take();
            }
            Act::TakeOver { own, early } => _ = self.take_over(e, *own, *early),
            Act::DaemonDies => self.daemon_dies(),
            Act::Cut => self.cut[e].set(true),
            Act::Pass { ms } => self.now_ms.set(self.now_ms.get() + ms),
            _ if h.dead.get() || h.closed.get() || h.failed.get() => {}
            Act::Send { len, up } => {
                let idle = h.wants.get().is_none() && !h.execs.get() && !h.wr_shut.get();
                if idle && self.lock(e, SEND) {
                    self.send(e, *len, *up);
                    self.unlock(e, SEND);
                }
            }
            Act::Recv {
                len,
                peek,
                discard,
                look,
            } => {
                if !h.execs.get() && self.lock(e, RECV) {
                    let how = How {
                        peek: *peek,
                        discard: *discard,
                        look: *look,
                        ..How::default()
                    };
                    self.recv(e, *len, how);
                    self.unlock(e, RECV);
                }
            }
            Act::Kill => self.kill(e),
            Act::Leave => self.leave(e),
            Act::Retire => self.retire(e),
            Act::Withdraw => self.withdraw(e),
            Act::Exec => {
                if !h.wr_shut.get() && h.wants.get().is_none() {
                    h.execs.set(true);
                    self.leave(e);
                }
            }
            Act::Wake => {
                let may = h.attached.get() && !h.woken.get();
                if may && self.lock(e, TX) {
                    h.woken.set(true);
                }
            }
            Act::Woken { down } => {
                if h.woken.take() {
                    self.locked(e, if *down { &Act::Down } else { &Act::Look });
                    self.unlock(e, TX);
                }
            }
            _ => return false,
        }
        true
    }

    fn live(&self, e: usize) -> bool {
        let h = &self.host[e];
        !(h.dead.get() || h.closed.get() || h.failed.get())
    }
}
