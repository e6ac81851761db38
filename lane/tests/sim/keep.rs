//! The daemon beside an end looks after its sending direction, as `daemon/src/dataplane/rail/takeover.rs` does:
//! takes it from an end that is late, has shut down or is gone, and says on TCP where it goes on or
//! ends. And what an end does when it hears that its daemon is dead.

use super::memory::Client;
use super::{Wire, World, LANE, RX, TAG, TX};
use lane::abi::{takeover, tx, TakeoverWord};
use lane::half::tx::{mode, Taken};
use lane::half::{Area, Memory, TxState};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// What remains to be done to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// Shut down for sending, when everything is there.
    Shut,
    /// The same, and closed; or the process is gone.
    Over,
}

pub struct Keeper {
    /// The end's area, which is only read here, and the daemon's.
    app: Area,
    proxy: Area,
    pub tx: RefCell<Option<Rc<TxState>>>,
    pub ending: Cell<Option<Ending>>,
    /// Inside a step.
    busy: Cell<bool>,
    dead: Cell<bool>,
}

impl Keeper {
    pub fn new(end: &Client, proxy: &Client) -> Keeper {
        Keeper {
            app: end.area(false),
            proxy: proxy.area(true),
            tx: RefCell::default(),
            ending: Cell::new(None),
            busy: Cell::new(false),
            dead: Cell::new(false),
        }
    }

    pub fn reuse(&mut self) {
        self.tx.take();
        self.ending.take();
        self.busy.set(false);
        self.dead.set(false);
    }

    pub fn memory(&self) -> Memory<'_> {
        let m = Memory::new(&self.app, &self.proxy, LANE).unwrap();
        m.for_takeover()
    }
}

impl World {
    fn keeper(&self, e: usize) -> Option<&Keeper> {
        self.keepers.as_ref().map(|k| &k[e])
    }

    /// Is the daemon of end `e` dead?
    pub fn given_back(&self, e: usize) -> bool {
        self.keeper(e).is_some_and(|k| k.dead.get())
    }

    pub(super) fn any_forsaken(&self) -> bool {
        self.given_back(0) || self.given_back(1)
    }

    /// The process at end `e` is gone or has closed: does its daemon see to the rest?
    pub(super) fn leave_to_keeper(&self, e: usize, how: Ending) -> bool {
        let Some(k) = self.keeper(e) else {
            return false;
        };
        let served = self.host[e].attached.get() && !k.dead.get();
        if served {
            k.ending.set(k.ending.get().max(Some(how)));
        }
        served
    }

    /// Anything that changes when a daemon gets on.
    pub(super) fn kept(&self, e: usize) -> (u64, TakeoverWord, Option<Ending>) {
        let word = |k: &Keeper| k.memory().peer_rx().takeover.load(Relaxed);
        (
            self.net.borrow().pipe[e].accepted,
            self.keeper(e).map_or(TakeoverWord::default(), word),
            self.keeper(e).and_then(|k| k.ending.get()),
        )
    }

    fn cut_off(&self) -> bool {
        self.remote.as_ref().is_some_and(|f| f.borrow().cut)
    }

    /// One step of the daemon of end `e`. `patient`: what was left behind has time to arrive.
    pub fn keep(&self, e: usize, patient: bool) {
        let Some(k) = self.keeper(e) else { return };
        if k.dead.get() || !self.host[e].attached.get() || k.busy.replace(true) {
            return; // a daemon has one thread
        }
        self.keep_on(e, k, patient);
        k.busy.set(false);
    }

    fn keep_on(&self, e: usize, k: &Keeper, patient: bool) {
        let (m, port) = (k.memory(), Wire { w: self, e });
        let ending = k.ending.get();
        let held = k.tx.borrow().clone();
        let t = match held {
            Some(t) => t,
            None => {
                let state = m.own_tx().state.load(Acquire);
                let word = m.peer_rx().word.load(Relaxed);
                let granted = word.epoch() == state.epoch() && word.has(lane::abi::rx::ACCEPTED);
                let late = match state.phase() {
                    tx::DOWNING => true,
                    tx::UP => self.cut_off() && granted,
                    _ => false,
                };
                let before = m.peer_rx().takeover.load(Relaxed);
                let through = before == TakeoverWord::new(state.epoch(), takeover::DONE);
                if ending.is_none() && (!late || through) {
                    return;
                }
                let over = ending == Some(Ending::Over);
                let locked = || !over && self.host[e].busy[TX].get();
                match TxState::take(&m, &port, TAG ^ e as u64, locked) {
                    Ok(Taken::Later) => return self.note("not taken"),
                    Ok(Taken::Tcp) => return self.on_tcp(e, k),
                    Ok(Taken::Yes(t)) => {
                        self.note("taken");
                        if t.mode.load(Relaxed) == mode::DRAIN {
                            self.note("taken in the middle");
                        }
                        let t = Rc::new(t);
                        *k.tx.borrow_mut() = Some(t.clone());
                        t
                    }
                    Err(r) => return self.poisoned(e, r),
                }
            }
        };
        let fin = ending.is_some() && !self.cut_off() && patient && t.is_up();
        let r = match fin {
            true => t.finish(&m, &port),
            false => t.down(&m, &port),
        };
        match r {
            Err(r) => self.poisoned(e, r),
            Ok(_) if t.mode.load(Relaxed) == mode::TCP => {
                self.note(match t.phase() {
                    tx::RESUMED => "kept without a frame",
                    _ if fin => "kept to the end",
                    _ => "kept",
                });
                if let Some(f) = &self.remote {
                    let epoch = m.own_tx().state.load(Relaxed).epoch();
                    f.borrow_mut().left(e, epoch, t.phase());
                }
                k.tx.take();
                self.on_tcp(e, k);
            }
            Ok(_) => {}
        }
    }

    /// The direction is on TCP: the rest is the kernel's.
    fn on_tcp(&self, e: usize, k: &Keeper) {
        if let Some(f) = &self.remote {
            f.borrow().publish(e);
        }
        match k.ending.take() {
            None => {}
            Some(Ending::Shut) => self.net.borrow_mut().fin(e),
            Some(Ending::Over) => self.net.borrow_mut().close(e),
        }
    }

    pub(super) fn daemon_dies(&self, e: usize) {
        let Some(k) = self.keeper(e).filter(|k| !k.dead.get()) else {
            return;
        };
        self.note("daemon died");
        k.dead.set(true);
        let held = k.tx.take().is_some();
        if held {
            self.note("daemon died with a direction");
        }
        let in_doubt = self.remote.as_ref().is_some_and(|f| f.borrow_mut().die(e));
        let h = &self.host[e];
        match k.ending.take() {
            // Its copy of the socket was the last.
            Some(Ending::Over) => {
                h.dead.set(true);
                self.net.borrow_mut().close(e);
            }
            Some(Ending::Shut) => h.fin_due.set(true),
            None => {}
        }
        if in_doubt {
            // The other daemon cannot find out any more whether its end's switch was taken.
            self.note("in doubt");
            self.net.borrow_mut().rst();
        }
    }

    /// End `e` notices, if so, that its daemon is dead. `true`: it has.
    pub(super) fn hears(&self, e: usize) -> bool {
        let h = &self.host[e];
        let locks = [TX, RX];
        let busy = locks.iter().any(|&l| h.busy[l].get());
        if !self.given_back(e) || busy || h.lost.replace(true) {
            return false;
        }
        if !h.attached.get() {
            return true;
        }
        locks.iter().for_each(|&l| h.busy[l].set(true));
        let (m, port) = (self.memory(e), Wire { w: self, e });
        let before = h.tx.tcp_pos.load(Relaxed).get();
        let up = h.tx.mode.load(Relaxed) != mode::TCP;
        let word = m.peer_rx().takeover.load(Relaxed);
        if up && self.net.borrow().pipe[e].accepted != before && word.phase() != takeover::DONE {
            self.note("reclaimed in the middle");
        }
        if let Err(r) = h.tx.reclaim(&m, &port) {
            self.poisoned(e, r);
        }
        if let Err(r) = h.rx.orphan(&m) {
            self.poisoned(e, r);
        }
        locks.iter().for_each(|&l| h.busy[l].set(false));
        true
    }
}
