//! Two nodes in one process: two whole daemons (core, pairing, link groups, rails, engine), which differ from those
//! that ship in their verbs, clock, helpers and system calls only; processes with the real lane halves; connections of
//! the kernel's own TCP. All driven by a seed.
//!
//! What must hold: every byte arrives once and in order, then the end of the stream; nobody is reset; nobody
//! waits for ever; nothing is left at the end.

mod along;
#[path = "../../../rdma/tests/sim/app.rs"]
pub mod app;
mod calls;
mod chaos;
mod end;
mod ending;
pub mod family;
mod forks;
mod group;
mod hear;
mod leaving;
mod listing;
mod machine;
mod node;
pub mod process;
pub mod seen;
pub mod sock;
mod stories;
pub mod tcp;

use app::App;
use family::{Family, Shared};
use leaving::Left;
use node::{Node, Records, RAILS};
use process::Process;
use seen::{note, tell};
use std::cell::{Cell, RefCell};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use tcp::{Killed, Others};
use underpass_rdma::sim::{self, Faults, Rng};
use underpassd::nodes::peers::digest::Key;
use underpassd::pairing::proof::{Record, Role};

/// When it begins, in ns: 0 is never for some.
const START_NS: u64 = 1_000_000_000;
/// The first process's number: one that the kernel gives nobody.
const FIRST_PID: u32 = 0x3f_0000;

/// What may happen to the world.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    /// Wires and channels are cut.
    pub wires: bool,
    /// Processes sleep or compute for up to three seconds.
    pub naps: bool,
    /// Processes fork, execute other programs, and close what they share.
    pub forks: bool,
    /// Processes are killed.
    pub kills: bool,
    /// Daemons are killed, and started again.
    pub restarts: bool,
    /// TCP is full, or slow.
    pub full: bool,
    /// Connections leave their lanes.
    pub leaves: bool,
    /// One chance in so many of one of these in a tick; 0: never.
    pub chaos_in: u64,
    /// The same of everybody else's steps in the middle of a call.
    pub between_in: u64,
    /// The same of drops that change the kernel's counts.
    pub drops_in: u64,
}

/// A connection: its ends by node, and their sockets' cookies.
pub struct Connection {
    pub ends: [Shared; 2],
    cookies: [u64; 2],
}

/// Who makes calls at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Actor {
    Nobody,
    /// A process, by node and index.
    Process(usize, usize),
    /// A helper of this node's daemon.
    Helper(usize),
}

/// What a directed test wants to happen in the middle of a call: after so many points at which something could.
type Script = (usize, Box<dyn FnOnce(&World)>);

pub struct World {
    runtime: tokio::runtime::Runtime,
    pub verbs: sim::World,
    rng: RefCell<Rng>,
    pub now: Cell<u64>,
    pub nodes: [Node; 2],
    pub conns: RefCell<Vec<Connection>>,
    records: Arc<Records>,
    wires: Cell<[bool; RAILS]>,
    channel: Cell<bool>,
    pub how: How,
    actor: Cell<Actor>,
    /// Inside of a step that comes between the calls of another one.
    nested: Cell<bool>,
    pub script: RefCell<Option<Script>>,
    pids: Cell<u32>,
    captures: RefCell<Vec<along::Capture>>,
    /// Chance of their own: what happens in a world does not depend on who reads along.
    watcher: RefCell<Rng>,
    /// Looks at errors of which nobody has said the cause.
    errors: Cell<u64>,
}

impl World {
    pub fn new(seed: u64, faults: Faults, how: How, processes: usize) -> Rc<World> {
        let mut rng = Rng(seed ^ 0xda_e3_05);
        tcp::begin(rng.next_u64(), how.drops_in);
        seen::take();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        let verbs = sim::World::new(seed, 2, RAILS, faults);
        verbs.with_descriptors();
        let records = Arc::new(Records::default());
        let nodes = [0, 1].map(|n| Node::new(n, verbs.node(n), &records, &mut rng));
        let w = Rc::new(World {
            runtime,
            verbs,
            rng: RefCell::new(rng),
            now: Cell::new(START_NS),
            nodes,
            conns: RefCell::default(),
            records,
            wires: Cell::new([true; RAILS]),
            channel: Cell::new(false),
            how,
            actor: Cell::new(Actor::Nobody),
            nested: Cell::new(false),
            script: RefCell::default(),
            pids: Cell::new(FIRST_PID),
            captures: RefCell::default(),
            watcher: RefCell::new(Rng(seed ^ 0xca_97)),
            errors: Cell::new(0),
        });
        for n in 0..2 {
            for _ in 0..processes {
                let (name, pid) = w.name(n);
                let machine = w.nodes[n].machine.clone();
                let mut p = Process::new(name, pid, Family::new(), machine);
                w.nodes[n].connect(&w.runtime, &mut p);
                let mut all = w.nodes[n].processes.borrow_mut();
                all.push(Rc::new(RefCell::new(p)));
            }
        }
        w.set_channel(true);
        let weak: Weak<World> = Rc::downgrade(&w);
        tcp::set_others(weak);
        w
    }

    /// The next process's name and number.
    fn name(&self, n: usize) -> (String, u32) {
        let pid = self.pids.get();
        self.pids.set(pid + 1);
        let p = self.nodes[n].processes.borrow().len();
        (format!("n{n}p{p}"), pid)
    }

    /// A source of chance for one step.
    fn dice(&self) -> Rng {
        Rng(self.rng.borrow_mut().next_u64())
    }

    fn below(&self, n: u64) -> u64 {
        self.rng.borrow_mut().below(n)
    }

    fn one_in(&self, n: u64) -> bool {
        self.rng.borrow_mut().one_in(n)
    }

    /// A new connection between two processes, whose ends send so many bytes.
    pub fn open(&self, totals: [u64; 2]) {
        let l = TcpListener::bind((tcp::address(), 0)).unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let b = l.accept().unwrap().0;
        let (snd, rcv) = (self.below(1 << 32) as u32, self.below(1 << 32) as u32);
        let cookies = [&a, &b].map(|s| tcp::cookie(s.as_fd()));
        for (s, snd, rcv, role) in [(&a, snd, rcv, Role::Active), (&b, rcv, snd, Role::Passive)] {
            let record = Record {
                snd,
                rcv,
                role,
                at_ns: self.now.get(),
            };
            self.records.enter(s.as_fd(), record);
            if self.how.wires && self.one_in(3) {
                // Buffers that are soon full. (Who leaves while TCP has no room must wait for it.)
                socket2::SockRef::from(s)
                    .set_send_buffer_size(4096)
                    .unwrap();
            }
        }
        tcp::enter([a.as_fd(), b.as_fd()]);
        let client = self.below(2) as usize;
        let (Some(p), Some(q)) = (self.host(0), self.host(1)) else {
            return;
        };
        let salts = [self.below(u64::MAX), self.below(u64::MAX)];
        let mut socks = [Some(a), Some(b)];
        let ends = [(0, p), (1, q)].map(|(n, process)| {
            let mut app = App::new(
                0,
                Vec::new(),
                (salts[n], salts[1 - n]),
                (totals[n], totals[1 - n]),
            );
            app.may_shut = false;
            app.may_end = true;
            let is_client = n == client;
            let sock = socks[usize::from(!is_client)].take().unwrap();
            let entry = process.borrow_mut().add(sock, is_client, app);
            entry
        });
        tell!(
            "{} connection {}",
            self.now.get(),
            self.conns.borrow().len()
        );
        note("a connection");
        let cookies = [cookies[client], cookies[1 - client]];
        self.conns.borrow_mut().push(Connection { ends, cookies });
    }

    /// A process of this node that can have a new connection.
    fn host(&self, n: usize) -> Option<Rc<RefCell<Process>>> {
        let all = self.nodes[n].processes.borrow().clone();
        let well = |p: &&Rc<RefCell<Process>>| {
            let p = p.borrow();
            !p.killed && !p.foreign && !p.executing && !p.unborn
        };
        let all: Vec<_> = all.iter().filter(well).cloned().collect();
        let n = self.below(all.len() as u64) as usize;
        all.get(n).cloned()
    }

    pub fn set_channel(&self, up: bool) {
        if self.channel.replace(up) == up {
            return;
        }
        tell!("{} channel: {up}", self.now.get());
        let incarnations = [0, 1].map(|n: usize| self.nodes[n].incarnation());
        let key = self.below(u64::MAX).to_ne_bytes().repeat(4);
        let key = Key::new(&key.try_into().unwrap());
        for (n, node) in self.nodes.iter().enumerate() {
            match up {
                true => node.channel_up(incarnations[1 - n], key.clone()),
                false => node.channel_down(),
            }
        }
        note(match up {
            true => "the channel comes up",
            false => "the channel is cut",
        });
    }

    pub fn set_wire(&self, rail: usize, up: bool) {
        let mut wires = self.wires.get();
        if wires[rail] != up {
            tell!("{} wire {rail}: {up}", self.now.get());
            wires[rail] = up;
            self.wires.set(wires);
            self.verbs.set_wire(rail, up);
            note(match up {
                true => "a wire is mended",
                false => "a wire is cut",
            });
        }
    }

    /// Time passes.
    pub fn pass(&self, ns: u64) {
        let now = self.now.get() + ns;
        self.now.set(now);
        self.verbs.run_until(now);
        for n in &self.nodes {
            n.machine.now.store(now, Relaxed);
        }
    }

    /// A little of everything. Whether a byte moved.
    fn tick(&self, quiet: bool) -> bool {
        self.pass(1 + self.below(20_000));
        let mut moved = false;
        for n in 0..2 {
            self.nodes[n].run(&mut self.dice());
            self.help(n);
            self.carry(n);
            let processes = self.nodes[n].processes.borrow().len();
            for p in 0..processes {
                moved |= self.run_process(n, p, quiet);
            }
        }
        self.read_along();
        self.see_given_up();
        if !moved {
            self.pass(self.below(200_000));
        }
        moved
    }

    /// What a daemon has said to the other one arrives there, to be read later.
    pub fn carry(&self, n: usize) {
        let all = self.nodes[n].said();
        self.nodes[1 - n].deliver(all, &mut self.dice());
    }

    /// Jobs of a daemon's helpers, in any order, and as many as chance wants.
    fn help(&self, n: usize) {
        let mut rng = self.dice();
        while !rng.one_in(3) && self.help_once(n, &mut rng) {}
    }

    /// One of them, if there is any.
    pub fn help_once(&self, n: usize, rng: &mut Rng) -> bool {
        let Some(job) = self.nodes[n].machine.job(rng) else {
            return false;
        };
        let before = self.actor.replace(Actor::Helper(n));
        let done = catch_unwind(AssertUnwindSafe(job));
        self.actor.set(before);
        match done {
            Ok(()) => {}
            Err(e) if e.is::<Killed>() => {
                note("a daemon killed within a helper's call");
                self.restart(n);
            }
            Err(e) => resume_unwind(e),
        }
        true
    }

    /// One step of a process. Whether a byte moved.
    fn run_process(&self, n: usize, p: usize, quiet: bool) -> bool {
        let shared = self.nodes[n].process(p);
        let Ok(mut process) = shared.try_borrow_mut() else {
            return false; // it is in the middle of a call
        };
        let now = self.now.get();
        if process.killed || process.busy_until > now {
            return false;
        }
        let mut rng = self.dice();
        let alone = process.control.is_none() && !process.foreign && !process.unborn;
        if alone && rng.one_in(20) {
            self.nodes[n].connect(&self.runtime, &mut process);
        }
        let before = self.actor.replace(Actor::Process(n, p));
        let done = catch_unwind(AssertUnwindSafe(|| match process.go_on_leaving(now) {
            Left::Waits => false,
            Left::Done if !process.leaving.is_empty() => true,
            Left::Done => process.step(now, &mut rng, quiet),
            Left::Framed => {
                note("a leave that meets a frame behind bytes of TCP");
                true
            }
            Left::Stalled => {
                note("a leave that stalls");
                true
            }
            Left::Late => {
                note("a leave that takes too long");
                true
            }
        }));
        self.actor.set(before);
        match done {
            Ok(moved) => {
                if process.parts() {
                    self.nodes[n].disconnect(process.pid);
                    if process.owes() {
                        note("a lane of which nobody tells that it is done");
                        self.nodes[n].leaks.set(true);
                    }
                }
                moved
            }
            Err(e) if e.is::<Killed>() => {
                note("killed within a call");
                process.was_within();
                drop(process);
                self.kill(n, p);
                true
            }
            Err(e) => resume_unwind(e),
        }
    }
}

impl Others for World {
    fn act(&self, may_die: bool) {
        if self.nested.get() {
            return;
        }
        self.nested.set(true);
        self.come_between();
        self.nested.set(false);
        let how = &self.how;
        let dies = match self.actor.get() {
            Actor::Nobody => false,
            Actor::Process(..) => how.kills,
            Actor::Helper(_) => how.restarts,
        };
        if dies && may_die && self.one_in(300) {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl World {
    /// Others do something in the middle of a call.
    fn come_between(&self) {
        let due = self.script.borrow_mut().take_if(|(n, _)| *n == 0);
        match due {
            Some((_, act)) => return act(self),
            None => self.script.borrow_mut().iter_mut().for_each(|s| s.0 -= 1),
        }
        if !self.one_in(self.how.between_in) {
            return;
        }
        note("somebody comes between");
        let mut rng = self.dice();
        for _ in 0..1 + rng.below(4) {
            self.pass(rng.below(3_000));
            let n = rng.below(2) as usize;
            let processes = self.nodes[n].processes.borrow().len() as u64;
            match rng.below(6) {
                0 | 1 => self.nodes[n].run(&mut rng),
                2 => self.help(n),
                3 => self.carry(n),
                _ => {
                    let p = rng.below(processes) as usize;
                    self.run_process(n, p, false);
                }
            }
        }
    }
}
