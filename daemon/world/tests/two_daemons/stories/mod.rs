//! Directed courses of events in the same world: one process on each node, one connection, and nobody does anything by
//! itself. End 1 sends to end 0.

mod across;
mod dying;
mod ends;
mod inherited;
mod members;
mod rails;
mod takeover;

use super::family::Entry;
use super::group::Group;
use super::process::Process;
use super::sock::Sock;
use super::{app, tcp, How, World};
use lane::abi::{TakeoverPhase, TxWord};
use lane::half::rx::{BeforeDeaf, How as Receive, Revoked};
use lane::half::{tx, Iov, Memory, Progress, Received, Sent};
use lane::proto::reason::Reason;
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::sim::{Faults, Rng};

/// Bytes that each end could send.
const PLENTY: u64 = 1 << 20;
/// A millisecond.
const MS: u64 = 1_000_000;

pub struct Story {
    pub w: Rc<World>,
}

impl Story {
    /// Both ends have taken their lane, and neither is ready.
    fn new() -> Story {
        let s = Story::before();
        s.connect();
        s
    }

    /// The rails are up.
    fn before() -> Story {
        Story::of(7)
    }

    /// The same in another world.
    fn of(seed: u64) -> Story {
        let faults = Faults {
            delay_ns: 1_000,
            ..Faults::default()
        };
        let s = Story {
            w: World::new(seed, faults, How::default(), 1),
        };
        (0..20).for_each(|_| s.carry());
        s
    }

    /// A further connection, whose ends take a lane.
    fn connect(&self) {
        self.connect_and(|_| ());
    }

    /// The same; after every turn of the processes this happens.
    fn connect_and(&self, then: impl Fn(&Story)) {
        self.w.open([PLENTY, PLENTY]);
        let taken = |e: usize| {
            let all = self.w.conns.borrow();
            let entry = all.last().unwrap().ends[e].borrow();
            entry.lane.is_some()
        };
        for _ in 0..10_000 {
            if taken(0) && taken(1) {
                self.carry();
                return;
            }
            for e in 0..2 {
                self.register(e);
            }
            then(self);
            self.w.pass(MS / 10);
            self.serve(0);
            self.serve(1);
        }
        panic!("no lane{}", self.w.state());
    }

    fn process(&self, e: usize) -> Rc<RefCell<Process>> {
        self.w.nodes[e].process(0)
    }

    /// The process takes in what its daemon says, or that it has died.
    fn hear(&self, e: usize) {
        let process = self.process(e);
        let mut p = process.borrow_mut();
        if p.killed {
            return;
        }
        let mut rng = Rng(self.w.now.get());
        if !p.listen(self.w.now.get(), &mut rng) {
            p.daemon_lost();
        }
        p.see_groups();
    }

    fn register(&self, e: usize) {
        self.hear(e);
        let process = self.process(e);
        let mut p = process.borrow_mut();
        let mut rng = Rng(self.w.now.get());
        for i in 0..p.ends.len() {
            let Some(sock) = &p.ends[i].sock else {
                continue;
            };
            let copy = sock.try_clone().unwrap();
            let shared = p.ends[i].entry.clone();
            p.register(
                &mut shared.borrow_mut(),
                copy.as_fd(),
                self.w.now.get(),
                &mut rng,
            );
        }
    }

    /// The daemon's threads have a turn, and its helpers do what there is.
    fn serve(&self, n: usize) {
        let mut rng = Rng(self.w.now.get());
        self.w.nodes[n].run(&mut rng);
        while self.w.help_once(n, &mut rng) {}
        self.w.carry(n);
    }

    /// What travels between the nodes arrives.
    fn carry(&self) {
        for _ in 0..60 {
            self.w.pass(MS / 20);
            (0..2).for_each(|n| self.serve(n));
        }
    }

    /// The daemons have time, and look after their ends. What is to arrive has time to.
    fn keep(&self) {
        for _ in 0..60 {
            self.w.pass(MS);
            (0..2).for_each(|n| self.serve(n));
        }
    }

    /// The same, until they wait no more for bytes to arrive.
    fn serve_3s(&self) {
        for _ in 0..60 {
            self.w.pass(50 * MS);
            (0..2).for_each(|n| self.serve(n));
        }
    }

    /// Both wires.
    fn cut(&self) {
        (0..2).for_each(|r| self.w.set_wire(r, false));
    }

    fn mend(&self) {
        (0..2).for_each(|r| self.w.set_wire(r, true));
        for _ in 0..200 {
            self.w.pass(5 * MS);
            (0..2).for_each(|n| self.serve(n));
        }
    }

    /// Both daemons have noticed that the wires are cut.
    fn cut_and_noticed(&self) {
        self.cut();
        for n in 0..2 {
            let up = || {
                let d = self.w.nodes[n].daemon.borrow();
                let plane = d.core.rails.as_ref().unwrap();
                let up = format!("{:?}", plane.lock()).contains("up true");
                up
            };
            for _ in 0..4_000 {
                if !up() {
                    break;
                }
                self.w.pass(MS);
                self.serve(n);
            }
            assert!(!up(), "{}", self.w.state());
        }
    }

    /// A daemon's rails and lanes, as it shows them.
    fn rails_of(&self, n: usize) -> String {
        let d = self.w.nodes[n].daemon.borrow();
        let said = format!("{:?}", d.core.rails.as_ref().unwrap().lock());
        said
    }

    /// Something is done to an end, in a call of its process's.
    fn with<T>(
        &self,
        e: usize,
        act: impl FnOnce(&mut Entry, &Group, &Memory<'_>, &Sock<'_>) -> T,
    ) -> T {
        self.hear(e);
        self.as_it_is(e, act)
    }

    /// The same without a look at what the daemon says.
    fn as_it_is<T>(
        &self,
        e: usize,
        act: impl FnOnce(&mut Entry, &Group, &Memory<'_>, &Sock<'_>) -> T,
    ) -> T {
        let entry = self.w.conns.borrow().last().unwrap().ends[e].clone();
        let entry = &mut *entry.borrow_mut();
        let process = self.process(e);
        let p = process.borrow();
        let end = p.ends.last().unwrap();
        let fd = end.sock.as_ref().expect("open").as_fd();
        let c = p.call(entry, fd).expect("a lane");
        act(entry, c.group, &c.m, &c.port)
    }

    fn ready(&self, e: usize) -> bool {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.declare_ready(m, port)
        })
    }

    fn try_up(&self, e: usize) {
        let done = self.with(e, |e, _, m, port| {
            let _held = e.app.lock_tx();
            e.app.tx.try_up(m, port)
        });
        done.expect("a byte was counted wrongly");
    }

    fn down(&self, e: usize) -> Result<Progress, Reason> {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_tx();
            e.app.tx.down(m, port)
        })
    }

    fn look(&self, e: usize) -> Result<Progress, Reason> {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_tx();
            e.app.tx.look(m, port)
        })
    }

    fn want_down(&self, e: usize) {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.want_down(m, port);
        });
    }

    fn revoke(&self, e: usize) -> Result<Revoked, Reason> {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.revoke(m, port)
        })
    }

    /// A step of a shutdown of the last direction.
    fn before_deaf(&self, e: usize) -> BeforeDeaf {
        self.with(e, |e, _, m, port| {
            let _held = e.app.lock_rx();
            e.app.rx.before_deaf(m, port).expect("honest words")
        })
    }

    /// One send of the application. How many bytes went out.
    fn send(&self, e: usize, len: u64) -> u64 {
        self.with(e, |e, _, m, port| {
            let a = &mut e.app;
            let all = a.sent..a.sent + len;
            let mut b: Vec<u8> = all.map(|at| app::byte(a.salt, at)).collect();
            let v = app::iov(&mut b);
            let held = a.lock_tx();
            let done = a.tx.send(m, port, &mut Iov::new(&v));
            drop(held);
            let n = match done {
                Sent::Bytes(n) => n as u64,
                Sent::Tcp => a.send_native(port, &mut b),
                Sent::Full | Sent::Blocked => 0,
                other => panic!("{other:?}"),
            };
            a.sent += n;
            n
        })
    }

    /// One receive. How many bytes came.
    fn recv(&self, e: usize, len: usize) -> usize {
        self.with(e, |e, _, m, port| {
            let mut b = vec![0; len];
            let a = &mut e.app;
            let v = app::iov(&mut b);
            let how = Receive {
                look: true,
                ..Receive::default()
            };
            let held = a.lock_rx();
            let done = a.rx.recv(m, port, &mut Iov::new(&v), how);
            drop(held);
            let n = match done {
                Received::Bytes(n) => n,
                Received::Tcp => a.receive_native(port, &mut b),
                Received::Empty => 0,
                Received::Eof => {
                    a.end();
                    0
                }
                Received::Error(error) => {
                    a.error = Some(error);
                    0
                }
                Received::Reset(r) => panic!("{r:?}"),
            };
            a.take(&b[..n]);
            n
        })
    }

    /// All that there is to receive, until nothing comes any more.
    fn recv_all(&self, e: usize) {
        while self.recv(e, 5000) > 0 {}
    }

    /// TCP takes so much more of what end 1 sends, and then nothing.
    fn room(&self, n: u64) {
        let cookie = self.w.conns.borrow().last().unwrap().cookies[1];
        tcp::set_room(cookie, Some(n));
    }

    /// (It has read all that its peer sends, so that nobody need be reset.)
    fn kill(&self, e: usize) {
        self.set_totals(0);
        self.w.kill(e, 0);
        self.tell_death(e);
        self.hears_of_it(1 - e);
    }

    /// The sockets are the kernel's, which delivers an end when it comes to it (where processors are busy, a moment later).
    /// Where something else holds the socket there is none.
    fn hears_of_it(&self, e: usize) {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        let process = self.process(e);
        let p = process.borrow();
        let Some(sock) = p.ends.last().and_then(|e| e.sock.as_ref()) else {
            return;
        };
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        let _ = poll(&mut [PollFd::new(sock, PollFlags::RDHUP)], Some(&moment));
    }

    /// The daemon gets to know that a process has ended.
    fn tell_death(&self, n: usize) {
        self.w.pass(5 * MS);
        let mut rng = Rng(self.w.now.get());
        self.w.nodes[n].run(&mut rng);
    }

    fn shutdown(&self, e: usize) {
        self.hear(e);
        let process = self.process(e);
        let i = process.borrow().ends.len() - 1;
        process.borrow_mut().shutdown(i);
        self.hear_process(e);
    }

    /// The daemon reads what its process has said.
    fn hear_process(&self, n: usize) {
        for turn in 0..20 {
            self.w.nodes[n].run(&mut Rng(self.w.now.get() + turn));
        }
    }

    /// What end 1 has put on TCP, without the end of the stream. (Of a process that has ended, a descriptor that was kept
    /// tells.)
    fn on_tcp(&self, own: &OwnedFd) -> u64 {
        let client = self.w.conns.borrow().last().unwrap().ends[1]
            .borrow()
            .client;
        let k = tcp::look(own.as_fd(), false).unwrap();
        k.sent - u64::from(client) - u64::from(!k.may_send())
    }

    /// A descriptor of end 1 that stays, which the kernel counts as one more holder.
    fn descriptor(&self, e: usize) -> OwnedFd {
        let process = self.process(e);
        let p = process.borrow();
        let sock = p.ends.last().unwrap().sock.as_ref();
        OwnedFd::from(sock.unwrap().try_clone().unwrap())
    }

    fn mode(&self) -> u32 {
        self.w.conns.borrow().last().unwrap().ends[1]
            .borrow()
            .app
            .tx
            .mode
            .load(Relaxed)
    }

    /// Phase of the daemon's word about end 1.
    fn word(&self) -> TakeoverPhase {
        self.as_it_is(1, |_, _, m, _| m.daemon().takeover.load(Relaxed).phase())
    }

    fn state(&self) -> TxWord {
        self.as_it_is(1, |_, _, m, _| m.own_tx().state.load(Relaxed))
    }

    fn got(&self) -> u64 {
        self.w.conns.borrow().last().unwrap().ends[0]
            .borrow()
            .app
            .received
    }

    fn engaged(&self) -> bool {
        self.w.conns.borrow().last().unwrap().ends[0]
            .borrow()
            .app
            .rx
            .engaged()
    }

    /// End 1 asks to go up; `prefix` bytes are on TCP, unread.
    fn asking(prefix: u64) -> Story {
        let s = Story::new();
        assert!(s.ready(0));
        s.carry();
        if prefix > 0 {
            assert_eq!(s.send(1, prefix), prefix);
        }
        s.try_up(1);
        assert_eq!(s.mode(), tx::mode::ASK);
        s
    }

    /// The same, granted and noticed.
    fn up(prefix: u64) -> Story {
        let s = Story::asking(prefix);
        s.carry();
        s.look(1).unwrap();
        assert_eq!(s.mode(), tx::mode::RING);
        s
    }

    /// Nobody sends any more than was sent so far, and so many bytes; then everything comes to its end, and all of it has
    /// to be right.
    fn whole(self, more: u64) {
        tcp::mend();
        self.set_totals(more);
        self.w.end();
        for c in self.w.conns.borrow().iter() {
            let errors = [0, 1].map(|e: usize| c.ends[e].borrow().app.error);
            assert_eq!(errors, [None; 2]);
        }
    }

    /// The same, but end 0 has to find an error instead of a clean end.
    fn broken(self) {
        tcp::mend();
        self.set_totals(0);
        let end = self.w.conns.borrow().last().unwrap().ends[0].clone();
        end.borrow_mut().excused = true;
        let expected = end.borrow().app.expected;
        self.w.end();
        let e = end.borrow();
        assert!(e.app.error.is_some(), "{} of {expected}", e.app.received);
        assert!(!e.app.ended, "a clean end first");
    }

    fn set_totals(&self, more: u64) {
        for c in self.w.conns.borrow().iter() {
            for e in 0..2 {
                let own = &mut *c.ends[e].borrow_mut();
                own.app.total = own.app.sent + if e == 1 { more } else { 0 };
                c.ends[1 - e].borrow_mut().app.expected = own.app.total;
            }
        }
    }
}

impl Story {
    /// At the `n`th point at which something may happen within a call, this does. Whether it has come to that.
    fn script(&self, n: usize, act: impl FnOnce(&World) + 'static) -> Rc<std::cell::Cell<bool>> {
        let reached = Rc::new(std::cell::Cell::new(false));
        let told = reached.clone();
        let act = move |w: &World| {
            told.set(true);
            act(w);
        };
        *self.w.script.borrow_mut() = Some((n, Box::new(act)));
        reached
    }
}

impl Story {
    /// The phase of the daemon's word about end `e`, also when its process is no more.
    fn takeover_of(&self, e: usize) -> impl Fn() -> TakeoverPhase {
        let (l, slot) = self.group_of(e);
        move || l.memory(slot).daemon().takeover.load(Relaxed).phase()
    }

    /// The link group and slot of an end, mapped once more.
    fn group_of(&self, e: usize) -> (Group, u32) {
        self.as_it_is(e, |e, l, _, _| (l.fork(), e.lane.unwrap().1))
    }

    /// The process of end `e` forks; the child does not run yet.
    fn fork(&self, e: usize) -> Rc<RefCell<Process>> {
        let child = self.process(e).borrow().fork("child".into(), 77_000);
        let child = Rc::new(RefCell::new(child));
        let mut all = self.w.nodes[e].processes.borrow_mut();
        all.push(child.clone());
        child
    }
}
