//! One end of a lane without its peer: what the other end, or a daemon, has stored is written here by hand. TCP is two
//! queues of bytes; it counts how often it was asked, so that a test can say what a look costs.

#[path = "../sim/memory.rs"]
#[allow(dead_code)] // a part of it is used
mod memory;

use lane::abi::{
    rx, tx, Control, Cursor, DaemonWords, Epoch, Loc, RxFlags, RxWord, RxWords, Shared,
    TakeoverPhase, TakeoverWord, TcpPos, TxPhase, TxWord, TxWords, LANES_PER_COUNTER,
};
use lane::half::rx::How;
use lane::half::tx::{claim, mode, Adopted};
use lane::half::{Area, Iov, Memory, Port, Received, RxState, Sent, TxState};
use lane::proto::frame::{Frame, Kind, LEN};
use memory::Client;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

pub const LANE: u32 = 70;
pub const L: usize = LANE as usize;
pub const TAG: u64 = 0x7a67;
/// The epoch of the first switch, and the next one.
pub const FIRST: Epoch = Epoch::new(1);
pub const SECOND: Epoch = Epoch::new(2);
/// The ring of either end: the smallest one.
pub const RING: Loc = Loc {
    chunk: 1,
    page: 0,
    log2: 12,
};
pub const SIZE: usize = RING.bytes();
/// A ring of 128 KiB.
pub const LARGE: Loc = Loc {
    chunk: 2,
    page: 0,
    log2: 17,
};

/// The end's TCP connection.
pub struct Tcp {
    /// What it has sent, and how much more the kernel takes.
    pub out: RefCell<Vec<u8>>,
    pub room: Cell<usize>,
    /// What it would receive, and what is behind that.
    pub queue: RefCell<VecDeque<u8>>,
    pub ended: Cell<bool>,
    /// How far the next urgent byte is.
    pub mark: Cell<Option<usize>>,
    pub error: Cell<i32>,
    /// A receive or peek is told the error once, as by the kernel, and then there is nothing but the end.
    pub once: Cell<bool>,
    /// The application's memory is found to be there so many more times.
    pub mapped: Cell<u32>,
    /// Bytes received. The kernel may not be able to tell its counts.
    pub taken: Cell<u64>,
    pub knows: Cell<bool>,
    /// The socket is open.
    pub open: Cell<bool>,
    /// Number of receives, peeks and counts of the queue.
    pub asked: Cell<u32>,
    pub rung: Cell<u32>,
    pub pushed: Cell<u32>,
    /// What had been sent when the FIN was.
    pub fin: Cell<Option<usize>>,
    /// Most bytes that one send takes.
    pub piece: Cell<usize>,
    /// How much more it takes of an end that leaves.
    pub more: Cell<usize>,
    pub leaves: Cell<bool>,
    /// The process dies at the so many-th point from here: before a call, or after its effect.
    pub dies: Cell<Option<u32>>,
    /// Done in the next call that rings the doorbell, or that asks for the so many-th time.
    pub then: RefCell<Option<Box<dyn FnOnce()>>>,
    pub at_ask: Cell<Option<u32>>,
}

impl Default for Tcp {
    fn default() -> Tcp {
        Tcp {
            out: RefCell::default(),
            room: Cell::new(1 << 20),
            queue: RefCell::default(),
            ended: Cell::default(),
            mark: Cell::default(),
            error: Cell::default(),
            once: Cell::default(),
            mapped: Cell::new(u32::MAX),
            taken: Cell::default(),
            knows: Cell::new(true),
            open: Cell::new(true),
            asked: Cell::default(),
            rung: Cell::default(),
            pushed: Cell::default(),
            fin: Cell::default(),
            piece: Cell::new(usize::MAX),
            more: Cell::default(),
            leaves: Cell::default(),
            dies: Cell::default(),
            then: RefCell::default(),
            at_ask: Cell::default(),
        }
    }
}

/// Unwinds out of a call in which the process dies.
struct Died;

impl Tcp {
    fn ask(&self) {
        self.asked.set(self.asked.get() + 1);
        if self.at_ask.get() == Some(self.asked.get()) {
            self.now();
        }
    }

    fn now(&self) {
        if let Some(f) = self.then.take() {
            f();
        }
    }

    fn point(&self) {
        match self.dies.get() {
            Some(0) => {
                self.dies.set(None);
                resume_unwind(Box::new(Died));
            }
            left => self.dies.set(left.map(|n| n - 1)),
        }
    }
}

impl Port for Tcp {
    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.room.set(self.more.take());
        let r = self.tcp_send(data, len);
        self.more.set(self.room.take());
        r
    }
    fn leaves(&self) -> bool {
        self.leaves.get()
    }
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.point();
        if self.error.get() != 0 {
            return Err(self.error.get());
        }
        let n = len.min(self.room.get()).min(self.piece.get());
        if n == 0 && len > 0 {
            return Err(libc::EAGAIN);
        }
        self.room.set(self.room.get() - n);
        // SAFETY: the lane passes a run of its own ring or a frame.
        let b = unsafe { std::slice::from_raw_parts(data, n) };
        self.out.borrow_mut().extend(b);
        self.point();
        Ok(n)
    }
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        self.ask();
        self.point();
        let mut q = self.queue.borrow_mut();
        // As Linux: a receive stops at the urgent byte, and skips it if it is the next one.
        let skip = usize::from(self.mark.get() == Some(0));
        let most = self.mark.get().filter(|k| *k > 0).unwrap_or(q.len());
        let n = len.min(most - skip);
        if n == 0 && len > 0 {
            if skip > 0 && !peek {
                q.pop_front();
                self.mark.set(None);
            }
            return match (self.error.get(), self.ended.get()) {
                (0, true) => Ok(0),
                (0, false) => Err(libc::EAGAIN),
                (e, _) => {
                    if self.once.get() {
                        self.error.set(0);
                        self.ended.set(true);
                    }
                    Err(e)
                }
            };
        }
        for (i, b) in q
            .iter()
            .skip(skip)
            .take(n)
            .enumerate()
            .filter(|_| !buf.is_null())
        {
            // SAFETY: the caller's buffer has `len` bytes.
            unsafe { *buf.add(i) = *b };
        }
        if !peek {
            q.drain(..n + skip);
            let mark = self.mark.get().filter(|k| *k > 0);
            self.mark.set(mark.map(|k| k - n));
            self.taken.set(self.taken.get() + n as u64);
            drop(q);
            self.point();
        }
        Ok(n)
    }
    fn tcp_peek(
        &self,
        mut iov: Iov<'_>,
        first: usize,
        gap: &mut [u8],
        rest: usize,
    ) -> Result<usize, i32> {
        let first = first.min(iov.left());
        let most = first + gap.len() + rest.min(iov.left() - first);
        let mut b = vec![0; most];
        let n = self.tcp_recv(b.as_mut_ptr(), most, true)?;
        for (i, b) in b[..n].iter().enumerate() {
            match i.checked_sub(first).and_then(|at| gap.get_mut(at)) {
                Some(g) => *g = *b,
                None => {
                    let (p, _) = iov.take(1).unwrap();
                    // SAFETY: a buffer of the caller's.
                    unsafe { *p = *b };
                }
            }
        }
        Ok(n)
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        self.ask();
        Ok(self.mark.get().unwrap_or_else(|| self.queue.borrow().len()))
    }
    fn readable(&self, _: *const u8, _: usize) -> bool {
        let left = self.mapped.get().checked_sub(1);
        self.mapped.set(left.unwrap_or(0));
        left.is_some()
    }
    fn writable(&self, p: *mut u8, n: usize) -> bool {
        self.readable(p, n)
    }
    fn tcp_at_mark(&self) -> bool {
        self.mark.get() == Some(0)
    }
    fn tcp_cut(&self) -> bool {
        self.open.replace(false)
    }
    fn tcp_sent(&self) -> Option<u64> {
        self.point();
        let sent = self.out.borrow().len() as u64;
        self.knows.get().then_some(sent)
    }
    fn tcp_taken(&self) -> Option<u64> {
        self.knows.get().then(|| self.taken.get())
    }
    fn tcp_end(&self) {
        self.fin
            .set(self.fin.get().or(Some(self.out.borrow().len())));
    }
    fn tcp_push(&self) {
        self.pushed.set(self.pushed.get() + 1);
    }
    fn ring(&self) {
        self.rung.set(self.rung.get() + 1);
        if self.at_ask.get().is_none() {
            self.now();
        }
        self.point();
    }
}

/// An end. `remote`: the other end is on another node.
pub struct Alone {
    pub tx: TxState,
    pub rx: RxState,
    pub tcp: Tcp,
    pub remote: bool,
    own: Area,
    peer: Area,
    /// The areas as a daemon beside this end sees them.
    own_read: Area,
    other: Area,
}

thread_local! {
    // Mapping is dear; every end of a thread uses the same memory, cleared, so that only the last one is usable.
    static CLIENTS: [&'static Client; 2] = [(); 2].map(|()| &*Box::leak(Box::new(Client::new())));
}

impl Alone {
    /// Attached, on TCP.
    pub fn new(remote: bool) -> Alone {
        Alone::beside(remote, RING, lane::VERSION)
    }

    /// Beside a daemon of some other version.
    pub fn beside(remote: bool, ring: Loc, version: u16) -> Alone {
        let [own, other] = CLIENTS.with(|p| *p);
        [own, other].iter().for_each(|c| c.clear(version));
        let e = Alone {
            tx: TxState::default(),
            rx: RxState::default(),
            tcp: Tcp::default(),
            remote,
            own: own.area(true),
            peer: other.area(false),
            own_read: own.area(false),
            other: other.area(true),
        };
        e.theirs().sleepers.0.store(1, SeqCst); // each publish rings
        assert_eq!(e.tx.attach(&e.memory(), Epoch::NONE, ring), [None, None]);
        e.tx.set_tag(TAG);
        e.rx.attach(&e.memory(), Epoch::NONE, TAG);
        e
    }

    /// On its ring, in epoch [`FIRST`].
    pub fn up(remote: bool) -> Alone {
        Alone::up_on(remote, RING)
    }

    pub fn up_on(remote: bool, ring: Loc) -> Alone {
        let e = Alone::beside(remote, ring, lane::VERSION);
        e.go_up();
        e
    }

    pub fn go_up(&self) {
        self.says(FIRST, rx::READY);
        assert_eq!(self.tx.try_up(&self.memory(), &self.tcp), Ok(!self.remote));
        if self.remote {
            assert_eq!(self.mode(), mode::ASK);
            self.says(FIRST, rx::READY | rx::ACCEPTED);
            self.tx.look(&self.memory(), &self.tcp).unwrap();
        }
        assert!(self.tx.is_up());
    }

    /// The sender of the other end has switched, `prefix` bytes after the ones received on TCP so far.
    pub fn receiving(remote: bool, prefix: u64) -> Alone {
        let e = Alone::new(remote);
        let t = e.their_tx();
        t.loc[0].store(RING.word(), Relaxed);
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        t.up_tcp_pos.store(TcpPos::new(prefix), Relaxed);
        e.sender_says(FIRST, tx::UP);
        e
    }

    pub fn memory(&self) -> Memory<'_> {
        let m = Memory::new(&self.own, &self.peer, LANE).unwrap();
        m.across(self.remote)
    }

    /// As the daemon beside this end sees its sending direction.
    pub fn taken(&self) -> Memory<'_> {
        let m = match self.remote {
            true => Memory::new(&self.own_read, &self.other, LANE),
            false => Memory::new(&self.own, &self.peer, LANE),
        };
        m.unwrap().across(self.remote).for_takeover()
    }

    /// That daemon takes the direction over.
    pub fn take(&self) -> TxState {
        let (m, t) = (self.taken(), TxState::default());
        assert!(claim(&m, self.state(), || false), "it is there to be taken");
        let adopted = t.adopt(&m, &self.tcp, TAG);
        assert!(matches!(adopted, Ok(Adopted::Ring)), "it is on its ring");
        t
    }

    pub fn ours(&self) -> &Control {
        self.own.control().unwrap()
    }

    pub fn theirs(&self) -> &Control {
        self.other.control().unwrap()
    }

    /// The daemon's words about this end, to be written.
    pub fn daemon(&self) -> &DaemonWords {
        match self.remote {
            true => &self.theirs().daemon[L],
            false => &self.ours().daemon[L],
        }
    }

    pub fn their_tx(&self) -> &TxWords {
        &self.theirs().tx[L]
    }

    pub fn their_rx(&self) -> &RxWords {
        &self.theirs().rx[L]
    }

    /// The other receiver stores its word.
    pub fn says(&self, epoch: Epoch, flags: RxFlags) {
        let word = RxWord::new(epoch, flags);
        self.their_rx().word.store(word, SeqCst);
    }

    /// The other sender stores its state.
    pub fn sender_says(&self, epoch: Epoch, phase: TxPhase) {
        let state = TxWord::new(epoch, phase);
        self.their_tx().state.store(state, SeqCst);
    }

    /// The same in the next publish of this end: it has switched.
    pub fn switches_then(&self) {
        let state = std::ptr::from_ref(&self.their_tx().state) as usize;
        *self.tcp.then.borrow_mut() = Some(Box::new(move || {
            // SAFETY: the client's memory is never unmapped.
            let state = unsafe { &*(state as *const Shared<TxWord>) };
            state.store(TxWord::new(FIRST, tx::UP), SeqCst);
        }));
    }

    /// And the other receiver stores its word.
    pub fn says_then(&self, epoch: Epoch, flags: RxFlags) {
        let word = std::ptr::from_ref(&self.their_rx().word) as usize;
        *self.tcp.then.borrow_mut() = Some(Box::new(move || {
            // SAFETY: the client's memory is never unmapped.
            let word = unsafe { &*(word as *const Shared<RxWord>) };
            word.store(RxWord::new(epoch, flags), SeqCst);
        }));
    }

    /// The daemon stores how far a takeover is.
    pub fn takeover(&self, epoch: Epoch, phase: TakeoverPhase) {
        let word = TakeoverWord::new(epoch, phase);
        self.daemon().takeover.store(word, SeqCst);
    }

    /// The other receiver has read so far.
    pub fn reads(&self, cursor: u64) {
        self.theirs().cursors[L].store(Cursor::new(cursor), SeqCst);
    }

    /// The other sender puts bytes on its ring (from cursor 0 on).
    pub fn puts(&self, from: u64, bytes: &[u8]) {
        self.puts_on(RING, from, bytes);
    }

    pub fn puts_on(&self, ring: Loc, from: u64, bytes: &[u8]) {
        let ring = self.other.ring(ring).unwrap();
        // SAFETY: `bytes` is that long, and no longer than the ring; nobody reads it meanwhile.
        unsafe { lane::half::mem::copy_in(ring, Cursor::new(from), bytes.as_ptr(), bytes.len()) };
        let head = from + bytes.len() as u64;
        self.theirs().heads[L].store(Cursor::new(head), SeqCst);
    }

    /// The same, while this end asks TCP the next time.
    pub fn puts_then(&self, from: u64, bytes: &[u8]) {
        self.puts(from, bytes);
        let head = std::ptr::from_ref(&self.theirs().heads[L]) as usize;
        // SAFETY: the client's memory is never unmapped.
        let head = unsafe { &*(head as *const Shared<Cursor>) };
        let end = head.load(SeqCst);
        head.store(Cursor::new(from), SeqCst);
        self.tcp.at_ask.set(Some(self.tcp.asked.get() + 1));
        *self.tcp.then.borrow_mut() = Some(Box::new(move || head.store(end, SeqCst)));
    }

    /// Bytes arrive on TCP.
    pub fn arrives(&self, bytes: &[u8]) {
        self.tcp.queue.borrow_mut().extend(bytes);
    }

    pub fn mode(&self) -> u32 {
        self.tx.mode.load(Relaxed)
    }

    /// What this end's sender says.
    pub fn state(&self) -> TxWord {
        self.ours().tx[L].state.load(Relaxed)
    }

    pub fn head(&self) -> u64 {
        self.ours().heads[L].load(Relaxed).get()
    }

    /// Number of publishes so far.
    pub fn publishes(&self) -> u32 {
        lane::notify::counter(&self.ours().seq[L / LANES_PER_COUNTER].0)
    }

    pub fn send(&self, n: usize) -> Sent {
        let head = self.head();
        let mut b: Vec<u8> = (head..head + n as u64).map(content).collect();
        let v = [iov_of(&mut b)];
        self.tx.send(&self.memory(), &self.tcp, &mut Iov::new(&v))
    }

    pub fn recv(&self, n: usize, how: How) -> (Received, Vec<u8>) {
        let mut b = vec![0; n];
        let v = [iov_of(&mut b)];
        let r = self
            .rx
            .recv(&self.memory(), &self.tcp, &mut Iov::new(&v), how);
        (r, b)
    }

    /// The process dies at point `at` of this. False: it comes through.
    pub fn dies(&self, at: u32, f: impl FnOnce()) -> bool {
        self.tcp.dies.set(Some(at));
        let r = catch_unwind(AssertUnwindSafe(f));
        self.tcp.dies.set(None);
        match r {
            Err(p) if p.is::<Died>() => true,
            Err(p) => resume_unwind(p),
            Ok(()) => false,
        }
    }

    /// Number of bytes on TCP.
    pub fn on_tcp(&self) -> usize {
        self.tcp.out.borrow().len()
    }

    /// The frame that this end has put on TCP first.
    pub fn frame(&self) -> Frame {
        let b = self.tcp.out.borrow();
        Frame::decode(b[..LEN].try_into().unwrap()).unwrap()
    }
}

/// Byte `at` of what an end puts on a ring.
pub fn content(at: u64) -> u8 {
    (at % 251) as u8
}

/// What a receive is told by default: look at TCP.
pub fn look() -> How {
    How {
        look: true,
        ..How::default()
    }
}

/// The other sender's frame.
pub fn down(cursor: u64, rest: u32) -> [u8; LEN] {
    frame(Kind::Down, cursor, rest)
}

pub fn frame(kind: Kind, cursor: u64, rest: u32) -> [u8; LEN] {
    Frame {
        kind,
        epoch: FIRST,
        rest,
        cursor: Cursor::new(cursor),
        tag: TAG,
    }
    .encode()
}

pub fn iov_of(b: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: b.as_mut_ptr().cast(),
        iov_len: b.len(),
    }
}

/// On one node, and across nodes.
pub const LOCAL_AND_REMOTE: [bool; 2] = [false, true];

/// What a receiver that asks for nothing says.
pub fn is_quiet(remote: bool) -> RxFlags {
    match remote {
        true => rx::READY | rx::ACCEPTED,
        false => rx::READY,
    }
}

/// The number of publishes that `f` makes.
pub fn publishes(e: &Alone, f: impl FnOnce()) -> u32 {
    let before = e.publishes();
    f();
    e.publishes() - before
}

/// The state of the receiver.
pub fn mode_of(e: &Alone) -> u32 {
    e.rx.mode.load(Relaxed)
}

/// What the receiver says.
pub fn word(e: &Alone) -> RxWord {
    e.ours().rx[L].word.load(Relaxed)
}

/// A part of what an end sends.
pub fn bytes(from: u64, to: u64) -> Vec<u8> {
    (from..to).map(content).collect()
}

/// A receive that looks at TCP.
pub fn recv(e: &Alone, n: usize) -> Received {
    e.recv(n, look()).0
}
