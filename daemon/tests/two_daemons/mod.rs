//! Two nodes in one process: two whole daemons (core, pairing, link groups, rails, engine), which differ from those
//! that ship in their verbs, clock and helpers only; processes with the real lane halves; connections of the kernel's
//! own TCP. All driven by a seed.
//!
//! What must hold: every byte arrives once and in order, then the end of the stream; nobody is reset; nobody
//! waits for ever; nothing is left at the end.

#[path = "../../rdma/tests/sim/app.rs"]
mod app;
mod ending;
mod leaving;
mod node;
mod process;
mod sock;

use app::App;
use leaving::Left;
use node::{cookie, Node, Records, RAILS};
use process::{End, Life};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::sim::{self, Faults, Rng};
use underpassd::nodes::peers::digest::Key;
use underpassd::pairing::proof::{Record, Role};

/// When it begins, in ns: 0 is never for some.
const START_NS: u64 = 1_000_000_000;
/// Ticks within which all must be over once nothing disturbs it any more.
const PATIENCE: u64 = 400_000;

/// What happened, to be sure that it did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub connections: u64,
    pub lanes: u64,
    pub ups: u64,
    pub ring_bytes: u64,
    pub wires: u64,
    pub channels: u64,
    pub naps: u64,
    pub kills: u64,
    pub restarts: u64,
    pub doubts: u64,
    pub declined: u64,
    pub leaves: u64,
    /// Of these, how many had to reset their connection; and because nobody helped them in time.
    pub stalled: u64,
    pub late: u64,
}

impl Counts {
    pub fn add(&mut self, o: &Counts) {
        self.connections += o.connections;
        self.lanes += o.lanes;
        self.ups += o.ups;
        self.ring_bytes += o.ring_bytes;
        self.wires += o.wires;
        self.channels += o.channels;
        self.naps += o.naps;
        self.kills += o.kills;
        self.restarts += o.restarts;
        self.doubts += o.doubts;
        self.declined += o.declined;
        self.leaves += o.leaves;
        self.stalled += o.stalled;
        self.late += o.late;
    }
}

/// What may happen to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Processes sleep or compute for up to three seconds.
    Naps,
    /// Wires are cut, and channels, too.
    NoDeaths,
    /// Daemons and processes are killed, too.
    Deaths,
}

/// Where a connection's two ends are: process and index, by node.
type Ends = [(usize, usize); 2];

pub struct World {
    runtime: tokio::runtime::Runtime,
    verbs: sim::World,
    rng: Rng,
    now: u64,
    nodes: Vec<Node>,
    conns: Vec<Ends>,
    records: Arc<Records>,
    wires: [bool; RAILS],
    channel: bool,
    how: How,
    pub counts: Counts,
    /// Looks at errors of which nobody has said the cause.
    errors: u64,
}

impl World {
    pub fn new(seed: u64, faults: Faults, how: How) -> World {
        let mut rng = Rng(seed ^ 0xda_e3_05);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        let verbs = sim::World::new(seed, 2, RAILS, faults);
        verbs.with_descriptors();
        let records = Arc::new(Records::default());
        let processes = 1 + rng.below(2) as usize;
        let nodes = (0..2)
            .map(|n| Node::new(n, verbs.node(n), &records, processes, &mut rng))
            .collect();
        let mut w = World {
            runtime,
            verbs,
            rng,
            now: START_NS,
            nodes,
            conns: Vec::new(),
            records,
            wires: [true; RAILS],
            channel: false,
            how,
            counts: Counts::default(),
            errors: 0,
        };
        for n in 0..2 {
            for p in 0..processes {
                w.nodes[n].connect(&w.runtime, p);
            }
        }
        for _ in 0..1 + w.rng.below(4) {
            w.open();
        }
        w.set_channel(true);
        w
    }

    /// A new connection between two processes.
    fn open(&mut self) {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let b = l.accept().unwrap().0;
        let (snd, rcv) = (self.rng.next_u64() as u32, self.rng.next_u64() as u32);
        for (s, snd, rcv, role) in [(&a, snd, rcv, Role::Active), (&b, rcv, snd, Role::Passive)] {
            let record = Record {
                snd,
                rcv,
                role,
                at_ns: self.now,
            };
            self.records
                .0
                .lock()
                .unwrap()
                .insert(cookie(s.as_fd()), record);
            if self.how != How::Naps && self.rng.one_in(3) {
                // Buffers that are soon full. (Who leaves while TCP has no room must wait for it.)
                socket2::SockRef::from(s)
                    .set_send_buffer_size(4096)
                    .unwrap();
            }
        }
        let client = self.rng.below(2) as usize;
        let alive = |n: &Node| n.processes.iter().any(|p| !p.killed);
        if !self.nodes.iter().all(alive) {
            return;
        }
        let totals = [self.rng.below(60_000), self.rng.below(60_000)];
        let salts = [self.rng.next_u64(), self.rng.next_u64()];
        let mut socks = [Some(a), Some(b)];
        let mut ends = [(0, 0); 2];
        for n in 0..2 {
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
            let all = self.nodes[n].processes.len() as u64;
            let mut p = self.rng.below(all) as usize;
            while self.nodes[n].processes[p].killed {
                p = self.rng.below(all) as usize;
            }
            let process = &mut self.nodes[n].processes[p];
            process.add(End::new(sock, is_client, app));
            ends[n] = (p, process.ends.len() - 1);
        }
        process::tell!("{} connection {ends:?}", self.now);
        self.conns.push(ends);
        self.counts.connections += 1;
    }

    fn set_channel(&mut self, up: bool) {
        if std::mem::replace(&mut self.channel, up) == up {
            return;
        }
        process::tell!("{} channel: {up}", self.now);
        let incarnations = [0, 1].map(|n: usize| self.nodes[n].daemon.core.incarnation);
        let key = self.rng.next_u64().to_ne_bytes().repeat(4);
        let key = Key::new(&key.try_into().unwrap());
        for n in 0..2 {
            match up {
                true => self.nodes[n].channel_up(incarnations[1 - n], key.clone()),
                false => self.nodes[n].channel_down(),
            }
        }
        self.counts.channels += 1;
    }

    fn set_wire(&mut self, rail: usize, up: bool) {
        if self.wires[rail] != up {
            process::tell!("{} wire {rail}: {up}", self.now);
            self.wires[rail] = up;
            self.verbs.set_wire(rail, up);
            self.counts.wires += 1;
        }
    }

    /// A little of everything. Whether a byte moved.
    fn tick(&mut self, calm: bool) -> bool {
        self.now += 1 + self.rng.below(20_000);
        self.verbs.run_until(self.now);
        let mut moved = false;
        for n in 0..2 {
            self.nodes[n].machine.now.store(self.now, Relaxed);
            self.nodes[n].run(&mut self.rng);
            let all = self.nodes[n].said();
            self.nodes[1 - n].deliver(all, &mut self.rng);
            for p in self.nodes[n].processes.iter_mut().filter(|p| !p.killed) {
                if p.busy_until > self.now {
                    continue;
                }
                match p.go_on_leaving(self.now) {
                    Left::Waits => {}
                    Left::Done => moved |= p.step(self.now, &mut self.rng, calm),
                    Left::Stalled => self.counts.stalled += 1,
                    Left::Late => self.counts.late += 1,
                }
            }
        }
        if !moved {
            self.now += self.rng.below(200_000);
        }
        moved
    }

    /// Something happens.
    fn chaos(&mut self) {
        let n = self.rng.below(2) as usize;
        let rail = self.rng.below(RAILS as u64) as usize;
        let p = self.rng.below(self.nodes[n].processes.len() as u64) as usize;
        let what = match self.how {
            How::Naps => 8,
            How::NoDeaths => self.rng.below(10),
            How::Deaths => self.rng.below(12),
        };
        match what {
            0 | 1 => self.set_wire(rail, false),
            2..=4 => self.set_wire(rail, true),
            5 => self.set_channel(false),
            6 | 7 => self.set_channel(true),
            // (Who leaves its lane does nothing else.)
            8 | 9 if self.nodes[n].processes[p].leaving.is_some() => {}
            8 | 9 => {
                process::tell!("{} n{n}p{p} naps", self.now);
                let ns = [1_000_000, 100_000_000, 3_000_000_000][self.rng.below(3) as usize];
                self.nodes[n].processes[p].busy_until = self.now + self.rng.below(ns);
                self.counts.naps += 1;
            }
            10 => self.restart(n),
            _ => self.kill(n, p),
        }
    }

    /// The daemon of a node is killed, and another one started.
    fn restart(&mut self, n: usize) {
        process::tell!("{} node {n} restarts", self.now);
        // What a process leaves to its daemon when it closes would end in its middle.
        let core = &self.nodes[n].daemon.core;
        let orphans = core.rails.as_ref().is_some_and(|r| r.lock().has_orphans());
        let dying = !self.nodes[n].daemon.dead.is_empty();
        if orphans || dying || self.nodes[n].processes.iter().any(|p| p.says_done()) {
            return;
        }
        self.set_channel(false);
        self.nodes[n].restart(&mut self.rng);
        for p in 0..self.nodes[n].processes.len() {
            if !self.nodes[n].processes[p].killed {
                self.nodes[n].processes[p].daemon_lost();
                self.nodes[n].connect(&self.runtime, p);
            }
        }
        self.set_channel(true);
        self.counts.restarts += 1;
    }

    /// A process is killed. Where TCP would have kept what it had sent, nothing of it may be lost: where it had
    /// read everything, and nothing comes after it. (Not if its daemon died before it: then its peer is reset.)
    fn kill(&mut self, n: usize, p: usize) {
        if self.nodes[n].processes[p].killed {
            return;
        }
        for ends in self.conns.iter().filter(|e| e[n].0 == p) {
            let process = &self.nodes[n].processes[p];
            let own = &process.ends[ends[n].1];
            let (sent, all) = (own.app.sent, own.app.received == own.app.expected);
            let lied = own.app.lied || process.has_nobody(ends[n].1);
            if own.life == Life::Closed {
                continue;
            }
            let (q, i) = ends[1 - n];
            let peer = &mut self.nodes[1 - n].processes[q].ends[i];
            match all && !lied {
                true => (peer.app.expected, peer.bereft) = (sent, true),
                false => peer.app.lied = true,
            }
        }
        self.nodes[n].kill(p, &mut self.rng);
        self.counts.kills += 1;
    }

    /// Connections of which a switch was left in doubt are reset, and may have lost bytes; others never.
    fn reset(&mut self) {
        for ends in &self.conns {
            let end = |n: usize| &self.nodes[n].processes[ends[n].0].ends[ends[n].1];
            let error = [0, 1].map(|n| end(n).app.error.filter(|_| end(n).sock.is_some()));
            let lied = end(0).app.lied || end(1).app.lied;
            if lied {
                for (n, (p, i)) in ends.iter().enumerate() {
                    self.nodes[n].processes[*p].ends[*i].app.lied = true;
                }
                continue;
            }
            if !end(0).doubt && !end(1).doubt {
                // (Who is in doubt may not have heard of it yet.)
                self.errors += u64::from(error != [None; 2]);
                assert!(self.errors < 1_000, "{ends:?}: {error:?}{}", self.state());
                continue;
            }
            self.errors = 0;
            self.counts.doubts += 1;
            for (n, (p, i)) in ends.iter().enumerate() {
                let process = &mut self.nodes[n].processes[*p];
                process.ends[*i].doubt = false;
                process.abort(*i);
            }
        }
    }

    /// Shuts down and closes what is through; whether all is.
    fn finish(&mut self) -> bool {
        self.reset();
        let mut all = true;
        for n in 0..2 {
            for p in &mut self.nodes[n].processes {
                if p.busy_until > self.now || p.leaving.is_some() {
                    all = false;
                    continue;
                }
                for i in 0..p.ends.len() {
                    let e = &p.ends[i];
                    if e.app.lied && (e.app.ended || e.app.error.is_some() || e.app.broken) {
                        p.abort(i);
                        continue;
                    }
                    if e.app.sent == e.app.total && e.life == Life::Open && self.rng.one_in(8) {
                        p.shutdown(i);
                    } else if e.is_through() && self.rng.one_in(8) {
                        p.close(i);
                    }
                    let e = &p.ends[i];
                    if e.app.ended && !e.app.lied {
                        assert_eq!(
                            e.app.received, e.app.expected,
                            "node {n}, end {i}: it ended"
                        );
                    }
                    all &= e.life == Life::Closed;
                }
            }
        }
        all
    }

    /// An end leaves its lane.
    fn leave(&mut self) {
        let n = self.rng.below(2) as usize;
        let p = self.rng.below(self.nodes[n].processes.len() as u64) as usize;
        let process = &mut self.nodes[n].processes[p];
        let i = self.rng.below(process.ends.len().max(1) as u64) as usize;
        let awake = process.busy_until <= self.now && !process.killed;
        if awake && i < process.ends.len() && process.may_leave(i) {
            process.leave(i, self.now);
            self.counts.leaves += 1;
        }
    }

    pub fn run(&mut self, ticks: u64, chaos_in: u64, leave_in: u64) {
        for _ in 0..ticks {
            self.tick(false);
            if self.rng.one_in(chaos_in) {
                self.chaos();
            }
            if self.rng.one_in(leave_in) {
                self.leave();
            }
            if self.rng.one_in(200) && self.conns.len() < 8 {
                self.open();
            }
            if self.rng.one_in(3) {
                self.finish();
            }
        }
    }

    /// Nothing disturbs it any more: all come to their ends, and nothing is left.
    pub fn end(mut self) -> Counts {
        (0..RAILS).for_each(|r| self.set_wire(r, true));
        self.set_channel(true);
        self.verbs.set_faults(Faults {
            delay_ns: 2_000,
            ..Faults::default()
        });
        let mut ticks = 0;
        while !self.finish() || !self.is_clean() {
            self.tick(true);
            ticks += 1;
            assert!(ticks < PATIENCE, "not over: {}", self.state());
        }
        assert_eq!(self.verbs.violations(), Vec::<String>::new());
        for n in &self.nodes {
            for p in &n.processes {
                self.counts.declined += p.declined.values().sum::<u64>();
                for e in &p.ends {
                    self.counts.lanes += e.lanes;
                    self.counts.ups += e.ups;
                    self.counts.ring_bytes += e.app.tx.ring_bytes.load(Relaxed);
                }
            }
        }
        self.counts
    }

    /// Is nothing of any connection left in the daemons?
    fn is_clean(&self) -> bool {
        self.nodes.iter().all(|n| {
            let plane = n.daemon.core.rails.as_ref().expect("peers");
            n.jobs() == 0 && n.daemon.core.groups.lanes() == 0 && plane.lock().is_empty()
        })
    }

    fn state(&self) -> String {
        let mut s = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let core = &node.daemon.core;
            let plane = core.rails.as_ref().expect("peers");
            s += &format!(
                "\nnode {n}: {} lanes, {} jobs, rails {:?}",
                core.groups.lanes(),
                node.jobs(),
                plane.lock()
            );
            for (p, process) in node.processes.iter().enumerate() {
                s += &format!("\n  process {p}, declined {:x?}", process.declined);
                for e in &process.ends {
                    let a = &e.app;
                    s += &format!(
                        "\n    {:?}: lane {:?}, sent {}/{}, received {}/{}, ended {}, tx {} rx {}",
                        e.life,
                        e.lane,
                        a.sent,
                        a.total,
                        a.received,
                        a.expected,
                        a.ended,
                        a.tx.mode.load(Relaxed),
                        a.rx.mode.load(Relaxed),
                    );
                }
            }
        }
        s
    }
}
