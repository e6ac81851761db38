//! Two daemons between the ends: each shows its end a proxy of what the remote one stores, late. What
//! an end and its daemon do to each other is at once; what travels between the daemons does so in
//! order, message by message, until the wire is cut.
//!
//! Small and slow on purpose: this is the least that a daemon has to do, so that the lane's own code
//! can be tried against it.

use super::memory::Client;
use super::LANE;
use lane::abi::{
    loc_index, rx, tx, Control, Cursor, Epoch, Landed, Loc, LocWord, RxWord, RxWords, Shared,
    SpaceWord, TcpPos, TxPhase, TxWord, TxWords, LANES_PER_COUNTER,
};
use lane::half::Area;
use std::collections::VecDeque;
use std::sync::atomic::{fence, Ordering::*};

const L: usize = LANE as usize;

enum Msg {
    /// The sender's ring has moved.
    Ring {
        seq: u32,
        loc: LocWord,
        log2: u32,
        from: Cursor,
    },
    Switch {
        epoch: Epoch,
        tcp_pos: TcpPos,
        start: Cursor,
    },
    Answer {
        epoch: Epoch,
        yes: bool,
    },
    Data {
        from: Cursor,
        bytes: Vec<u8>,
    },
    Words(Words),
    Landed(Cursor),
}

#[derive(Clone, Copy, PartialEq, Default, Debug)]
struct Words {
    head: Cursor,
    cursor: Cursor,
    state: TxWord,
    word: RxWord,
    revoked: Cursor,
    want_space: SpaceWord,
}

/// Stores a head if it is higher than the present one. (Everything is on one thread here.)
fn raise(word: &Shared<Cursor>, to: Cursor) {
    word.store(word.load(Relaxed).max(to), Release);
}

/// What travels from one end's daemon to the other's.
#[derive(Default)]
struct Dir {
    queue: VecDeque<Msg>,
    sent: Words,
    ring: Option<(u32, LocWord)>,
    ring_there: Option<(u32, LocWord)>,
    up_epoch: Epoch,
    sent_head: Cursor,
    /// The last word of the remote receiver, and the answer to our end's last switch.
    raw: RxWord,
    revoked: Cursor,
    answer: Option<(Epoch, bool)>,
    /// Rings of the proxy that the remote daemon writes.
    locs: [Option<Loc>; 2],
    /// The daemon has taken the direction down in its end's stead: epoch and last phase.
    left: Option<(Epoch, TxPhase)>,
}

pub struct Remote {
    /// An end's own area as its daemon sees it, and the proxy as its daemon writes it.
    app: [Area; 2],
    proxy: [Area; 2],
    clients: &'static [Client; 2],
    dirs: [Dir; 2],
    pub cut: bool,
    /// Daemons that are no more: the wire is cut for good.
    dead: [bool; 2],
}

impl Remote {
    pub fn new(ends: &'static [Client; 2], proxies: &'static [Client; 2]) -> Remote {
        Remote {
            app: [ends[0].area(false), ends[1].area(false)],
            proxy: [proxies[0].area(true), proxies[1].area(true)],
            clients: proxies,
            dirs: Default::default(),
            cut: false,
            dead: [false; 2],
        }
    }

    fn app(&self, e: usize) -> &Control {
        self.app[e].control().unwrap()
    }

    fn proxy(&self, e: usize) -> (&Control, &TxWords, &RxWords) {
        let c = self.proxy[e].control().unwrap();
        (c, &c.tx[L], &c.rx[L])
    }

    pub fn publish(&self, e: usize) {
        self.proxy(e).0.seq[L / LANES_PER_COUNTER]
            .0
            .fetch_add(1, SeqCst);
    }

    /// What end `e` has stored becomes messages.
    pub fn scan(&mut self, e: usize) {
        if self.cut {
            if self.dead != [false; 2] && !self.dead[e] {
                self.refuse(e);
            }
            return;
        }
        let (mut out, mut d) = (Vec::new(), std::mem::take(&mut self.dirs[e]));
        let c = self.app(e);
        let w = &c.tx[L];
        let state = w.state.load(Acquire);
        let head = c.heads[L].load(Acquire);
        let seq = w.loc_seq.load(Acquire);
        // The sender may have moved twice since we looked; of the two rings that it shows, both may be
        // new to us.
        for seq in [seq.wrapping_sub(1), seq] {
            let at = loc_index(seq);
            let loc = w.loc[at].load(Relaxed);
            let known = d
                .ring
                .is_some_and(|(s, _)| s.wrapping_sub(seq) < u32::MAX / 2);
            if let Some(l) = loc.loc().filter(|_| !known) {
                d.ring = Some((seq, loc));
                out.push(Msg::Ring {
                    seq,
                    loc,
                    log2: l.log2,
                    from: w.loc_from[at].load(Relaxed),
                });
            }
        }
        if state.phase() == tx::UP && state.epoch() != d.up_epoch {
            d.up_epoch = state.epoch();
            d.sent_head = w.up_start.load(Relaxed);
            out.push(Msg::Switch {
                epoch: d.up_epoch,
                tcp_pos: w.up_tcp_pos.load(Relaxed),
                start: w.up_start.load(Relaxed),
            });
        }
        while d.sent_head < head {
            let mut at = loc_index(seq);
            let mut end = head;
            if d.sent_head < w.loc_from[at].load(Relaxed) {
                end = w.loc_from[at].load(Relaxed).min(head);
                at ^= 1;
            }
            let ring = w.loc[at]
                .load(Relaxed)
                .loc()
                .and_then(|l| self.app[e].ring(l));
            let n = (end - d.sent_head).min(1500) as usize;
            let mut bytes = vec![0; n];
            // SAFETY: `bytes` has that length, and a piece is smaller than any ring.
            unsafe { lane::half::mem::copy_out(ring.unwrap(), d.sent_head, bytes.as_mut_ptr(), n) };
            let from = d.sent_head;
            out.push(Msg::Data { from, bytes });
            d.sent_head += n as u64;
        }
        let state = match d.left {
            Some((epoch, phase)) if state.epoch() == epoch && state.phase() < phase => {
                TxWord::new(epoch, phase)
            }
            _ => state,
        };
        let words = Words {
            head: d.sent_head,
            cursor: c.cursors[L].load(Acquire),
            state,
            word: c.rx[L].word.load(Acquire),
            revoked: c.rx[L].revoked.load(Relaxed),
            want_space: w.want_space.load(Relaxed),
        };
        if words != d.sent {
            d.sent = words;
            out.push(Msg::Words(words));
        }
        d.queue.extend(out);
        self.dirs[e] = d;
    }

    /// The wire will never be back: no switch is passed on any more.
    fn refuse(&mut self, e: usize) {
        let state = self.app(e).tx[L].state.load(Acquire);
        if state.phase() == tx::UP && state.epoch() != self.dirs[e].up_epoch {
            self.dirs[e].up_epoch = state.epoch();
            self.dirs[e].answer = Some((state.epoch(), false));
            self.show(e);
            self.publish(e);
        }
    }

    /// One message from end `e`'s daemon arrives at the other. `false`: there was none.
    pub fn carry(&mut self, e: usize) -> bool {
        if self.cut {
            return false;
        }
        let d = 1 - e;
        let Some(msg) = self.dirs[e].queue.pop_front() else {
            return false;
        };
        match msg {
            Msg::Ring {
                seq,
                loc: theirs,
                log2,
                from,
            } => {
                self.dirs[e].ring_there = Some((seq, theirs));
                let loc = self.clients[d].alloc(log2);
                let at = loc_index(seq);
                if let Some(old) = self.dirs[e].locs[at].replace(loc) {
                    self.clients[d].release(old);
                }
                let w = self.proxy(d).1;
                w.loc[at].store(loc.word(), Relaxed);
                w.loc_from[at].store(from, Relaxed);
                w.loc_seq.store(seq, Release);
            }
            Msg::Switch {
                epoch,
                tcp_pos,
                start,
            } => {
                let yes = self.switch(d, epoch, tcp_pos, start);
                self.dirs[d].queue.push_back(Msg::Answer { epoch, yes });
            }
            Msg::Answer { epoch, yes } => {
                self.dirs[d].answer = Some((epoch, yes));
                self.show(d);
            }
            Msg::Data { from, bytes } => {
                let w = self.proxy(d).1;
                let new = loc_index(w.loc_seq.load(Relaxed));
                let at = match from < w.loc_from[new].load(Relaxed) {
                    true => new ^ 1,
                    false => new,
                };
                let ring = w.loc[at]
                    .load(Relaxed)
                    .loc()
                    .and_then(|l| self.proxy[d].ring(l));
                // SAFETY: of that length, smaller than the ring, which the proxy's writer owns.
                unsafe {
                    lane::half::mem::copy_in(ring.unwrap(), from, bytes.as_ptr(), bytes.len())
                };
                let to = from + bytes.len() as u64;
                raise(&self.proxy(d).0.heads[L], to);
                self.dirs[d].queue.push_back(Msg::Landed(to));
            }
            Msg::Landed(to) => {
                let w = &self.proxy(d).2.landed;
                w.store(Landed::at_cursor(to), Release);
            }
            Msg::Words(w) => {
                let (c, t, _) = self.proxy(d);
                c.cursors[L].store(w.cursor, Release);
                t.want_space.store(w.want_space, SeqCst);
                let known = t.state.load(Relaxed);
                if w.state.phase() > tx::UP && w.state.epoch() == known.epoch() {
                    t.state.store(w.state, Release);
                }
                self.dirs[d].raw = w.word;
                self.dirs[d].revoked = w.revoked;
                self.show(d);
            }
        }
        self.publish(d);
        true
    }

    /// A switch of the remote sender arrives at end `d`'s daemon: stored, then looked whether it is in
    /// time.
    fn switch(&self, d: usize, epoch: Epoch, tcp_pos: TcpPos, start: Cursor) -> bool {
        let (c, t, _) = self.proxy(d);
        // What the ring held before went over TCP: the receiver begins here.
        raise(&c.heads[L], start);
        t.up_tcp_pos.store(tcp_pos, Relaxed);
        t.up_start.store(start, Relaxed);
        t.state.store(TxWord::new(epoch, tx::UP), Release);
        fence(SeqCst);
        // As the sender itself does on one node: only a revocation stands in the way, or a word about
        // another epoch. A receiver that has not revoked would take `RESUMED` for a switch.
        let word = self.app(d).rx[L].word.load(SeqCst);
        let yes = word.epoch() == epoch && !word.has(rx::REVOKED);
        if !yes {
            t.state.store(TxWord::new(epoch, tx::RESUMED), Release);
        }
        self.publish(d);
        yes
    }

    /// What end `e` sees of the remote receiver's word.
    fn show(&self, e: usize) {
        let d = &self.dirs[e];
        let mut word = d.raw;
        let mut revoked = d.revoked;
        match d.answer {
            Some((epoch, true)) if epoch == word.epoch() => word = word.with(rx::ACCEPTED),
            Some((epoch, false)) if epoch == word.epoch() => {
                word = word.with(rx::REVOKED);
                revoked = Cursor::UNSEEN;
            }
            _ => {}
        }
        if self.cut {
            word = word.with(rx::WANT_DOWN);
        }
        if self.dead[e] {
            return;
        }
        let r = self.proxy(e).2;
        r.revoked.store(revoked, Relaxed);
        r.word.store(word, Release);
    }

    /// The wire is gone, and all that was on it. A switch under way is looked up in the remote node's
    /// memory, as the daemons do over their other channel; both ends are asked to go down.
    pub fn cut(&mut self) {
        if std::mem::replace(&mut self.cut, true) {
            return;
        }
        for e in 0..2 {
            let d = &mut self.dirs[e];
            d.queue.clear();
            let epoch = d.up_epoch;
            if epoch != Epoch::NONE && d.answer.map(|a| a.0) != Some(epoch) {
                let stored = self.proxy(1 - e).1.state.load(Relaxed);
                let yes = stored == TxWord::new(epoch, tx::UP);
                self.dirs[e].answer = Some((epoch, yes));
            }
        }
        for e in (0..2).filter(|e| !self.dead[*e]) {
            self.show(e);
            self.publish(e);
        }
    }

    /// The daemon of end `e` has put a direction on TCP in its end's stead.
    pub fn left(&mut self, e: usize, epoch: Epoch, phase: TxPhase) {
        self.dirs[e].left = Some((epoch, phase));
    }

    /// The daemon of end `e` dies. `true`: the other end has switched, and nobody can say any more
    /// whether that was taken.
    pub fn die(&mut self, e: usize) -> bool {
        self.dead[e] = true;
        let d = &self.dirs[1 - e];
        let asked = d.up_epoch != Epoch::NONE && d.answer.map(|a| a.0) != Some(d.up_epoch);
        let stored = self.proxy(e).1.state.load(Relaxed);
        let in_doubt = asked && !self.cut && stored == TxWord::new(d.up_epoch, tx::UP);
        self.cut();
        in_doubt
    }

    /// The wire is back: everything is told again.
    pub fn mend(&mut self) {
        if self.dead != [false; 2] || !std::mem::replace(&mut self.cut, false) {
            return;
        }
        for e in 0..2 {
            self.dirs[e].sent = Words::default();
            self.dirs[e].ring = self.dirs[e].ring_there;
            let there = self.proxy(1 - e).0.heads[L].load(Relaxed);
            self.dirs[e].sent_head = there.max(self.app(e).tx[L].up_start.load(Relaxed));
            self.show(e);
            self.publish(e);
        }
    }

    /// The lane's slot is used anew by both ends.
    pub fn reuse(&mut self) {
        for e in 0..2 {
            let head = self.app(e).heads[L].load(Relaxed);
            for l in self.dirs[e].locs.iter_mut().filter_map(Option::take) {
                self.clients[1 - e].release(l);
            }
            self.dirs[e] = Dir {
                sent_head: head,
                up_epoch: self.app(e).tx[L].state.load(Relaxed).epoch(),
                ..Dir::default()
            };
            self.proxy(1 - e).0.heads[L].store(head, Release);
        }
        self.cut = false;
        self.dead = [false; 2];
    }
}
