//! How it ends, and what must be true then.

use super::family::Life;
use super::node::RAILS;
use super::seen::{self, note, Counts};
use super::{tcp, World};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use underpass_rdma::sim::Faults;

/// Ticks within which all must be over once nothing disturbs it any more.
const PATIENCE: u64 = 400_000;
/// Ticks in which nothing moves, after which time passes quickly: what is left waits for some.
const IDLE: u64 = 200;

impl World {
    pub fn run(&self, ticks: u64) {
        for _ in 0..ticks {
            self.tick(false);
            if self.one_in(self.how.chaos_in) {
                self.chaos();
            }
            if self.one_in(200) && self.conns.borrow().len() < 8 {
                self.open_any();
            }
            if self.one_in(3) {
                self.finish(false);
            }
        }
    }

    pub fn open_any(&self) {
        self.open([self.below(60_000), self.below(60_000)]);
    }

    /// Nothing disturbs it any more: all come to their ends, and nothing is left.
    pub fn end(&self) -> Counts {
        (0..RAILS).for_each(|r| self.set_wire(r, true));
        self.set_channel(true);
        self.verbs.set_faults(Faults {
            delay_ns: 2_000,
            ..Faults::default()
        });
        tcp::mend();
        let (mut ticks, mut idle) = (0, 0);
        while !self.finish(true) || !self.is_clean() {
            idle = if self.tick(true) { 0 } else { idle + 1 };
            if idle > IDLE {
                self.pass(self.below(20_000_000));
                if tcp::take_refused() {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            ticks += 1;
            assert!(ticks < PATIENCE, "not over: {}", self.state());
        }
        assert_eq!(self.verbs.violations(), Vec::<String>::new());
        for c in self.conns.borrow().iter() {
            for e in &c.ends {
                let bytes = e.borrow().app.tx.ring_bytes.load(Relaxed);
                seen::add("bytes on rings", bytes);
                seen::add("rings that moved", e.borrow().app.moves);
                self.counted(&e.borrow());
            }
        }
        seen::take()
    }

    /// What an end has counted is what its application has sent and received: a capture's places rest on that. (Who is
    /// killed within a call has not counted it.)
    fn counted(&self, e: &super::family::Entry) {
        if self.how.kills || e.excused || e.foreign {
            return;
        }
        let (tx, rx) = (&e.app.tx, &e.app.rx);
        let sums = [
            (&tx.tcp_pos, &tx.again, &tx.ring_bytes, e.app.sent),
            (&rx.tcp_pos, &rx.again, &rx.ring_bytes, e.app.received),
        ];
        for (tcp, again, ring, app) in sums {
            let n = tcp.load(Relaxed).get() + ring.load(Relaxed) - again.load(Relaxed);
            assert_eq!(n, app, "bytes counted{}", self.state());
        }
    }

    /// Connections of which a direction could not be taken back in time are reset, and may have lost bytes; others never.
    fn reset(&self) {
        for c in self.conns.borrow().iter() {
            let excused = c.ends.iter().any(|e| e.borrow().excused);
            let reset = c.ends.iter().any(|e| e.borrow().reset);
            if reset {
                note("a connection reset");
                self.errors.set(0);
                self.abort(c);
            }
            if excused || reset {
                for e in &c.ends {
                    let e = &mut *e.borrow_mut();
                    (e.excused, e.reset) = (true, false);
                }
                continue;
            }
            let open = |e: &&super::family::Shared| e.borrow().life != Life::Closed;
            let mut ends = c.ends.iter().filter(open);
            if ends.any(|e| e.borrow().app.error.is_some()) {
                // (An end whose peer is reset may see that first.)
                self.errors.set(self.errors.get() + 1);
                assert!(self.errors.get() < 1_000, "an error{}", self.state());
            }
        }
    }

    /// Both ends are reset, by any of those who hold them.
    fn abort(&self, c: &super::Connection) {
        for n in &self.nodes {
            for p in n.processes.borrow().iter() {
                let mut p = p.borrow_mut();
                for i in 0..p.ends.len() {
                    let entry = p.ends[i].entry.clone();
                    if c.ends.iter().any(|e| std::rc::Rc::ptr_eq(e, &entry)) {
                        p.abort(i);
                    }
                }
            }
        }
    }

    /// Shuts down and closes what is through; whether all is. `calm`: nothing new begins any more.
    pub fn finish(&self, quiet: bool) -> bool {
        self.see_given_up();
        self.reset();
        let mut all = true;
        for n in &self.nodes {
            let processes = n.processes.borrow().clone();
            for p in &processes {
                let p = &mut *p.borrow_mut();
                if p.is_over(quiet && n.leaks.get()) {
                    note("a program ends that holds nothing");
                    p.kill();
                    n.ended(p.pid, &mut self.dice());
                }
                if p.busy_until > self.now.get() || p.is_leaving() || p.unborn {
                    all &= p.killed;
                    continue;
                }
                for i in 0..p.ends.len() {
                    all &= self.finish_one(p, i);
                }
            }
        }
        all
    }

    /// The same for one end that a process holds.
    fn finish_one(&self, p: &mut super::process::Process, i: usize) -> bool {
        if p.ends[i].sock.is_none() {
            return true;
        }
        let entry = p.ends[i].entry.clone();
        let (over, sent, through) = {
            let e = entry.borrow();
            if e.app.ended {
                let whole = e.app.received == e.app.expected;
                assert!(whole, "{}[{i}] ended{}", p.name, self.state());
            }
            let over = e.excused && (e.app.error.is_some() || e.app.broken);
            let sent = e.app.sent == e.app.total && e.life == Life::Open;
            (over, sent, e.life >= Life::Shut && e.app.ended)
        };
        if over {
            p.abort(i);
        } else if sent && self.one_in(8) {
            p.shutdown(i);
        } else if through && self.one_in(8) {
            p.close(i, self.now.get());
        }
        p.ends[i].sock.is_none()
    }

    /// Is nothing of any connection left in the daemons?
    fn is_clean(&self) -> bool {
        self.nodes.iter().all(|n| {
            let core = &n.daemon.borrow().core;
            let plane = core.rails.as_ref().expect("peers");
            let inherited = core.inherited.all.is_empty();
            let lanes = core.groups.lanes() == 0 && plane.lock().is_empty();
            n.machine.jobs() == 0 && inherited && lanes
        })
    }

    pub fn state(&self) -> String {
        let mut s = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let core = &node.daemon.borrow().core;
            let plane = core.rails.as_ref().expect("peers");
            s += &format!(
                "\nnode {n}: {} lanes, {} jobs, {} inherited, rails {:?}",
                core.groups.lanes(),
                node.machine.jobs(),
                core.inherited.all.len(),
                plane.lock()
            );
            for p in node.processes.borrow().iter() {
                let Ok(p) = p.try_borrow() else { continue };
                s += &format!(
                    "\n  {}: killed {}, foreign {}, unborn {}, leaving {:?}, declined {:x?}",
                    p.name, p.killed, p.foreign, p.unborn, p.leaving, p.declined
                );
                for end in p.ends.iter().filter(|e| e.sock.is_some()) {
                    let Ok(e) = end.entry.try_borrow() else {
                        continue;
                    };
                    let a = &e.app;
                    s += &format!(
                        "\n    {}: {:?}: lane {:x?} of {:x}, sent {}/{}, received {}/{}, ended {}, error {:?}, excused {}, tx {} rx {}",
                        e.index,
                        e.life,
                        e.lane,
                        e.owner,
                        a.sent,
                        a.total,
                        a.received,
                        a.expected,
                        a.ended,
                        a.error,
                        e.excused,
                        a.tx.mode.load(Relaxed),
                        a.rx.mode.load(Relaxed),
                    );
                }
            }
        }
        s
    }
}
