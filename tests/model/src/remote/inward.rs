//! D2's engine: the incoming direction of the lane, as in `underpass_rdma::engine::{inward, inn}`.

use super::state::messages::{is_set, small, Back, Forth, Which, VALIDATE, WANT_LANDED};
use super::state::{Config, Fault, Phase, State, TxWords, Word, RING, UNSEEN};
use super::Bug;
use lane::abi::rx::{self, Flag};
use lane::abi::RxFlags;
use underpass_rdma::wire::{Body, Cdc};

/// Is switch `a` later than `b`?
fn newer(a: Which, b: Which) -> bool {
    a > b
}

/// D2 takes a message that has arrived.
pub fn take(n: &mut State, c: &Config, m: Forth) {
    let news = m.seq > n.d2.seq || c.bug == Some(Bug::OldSnapshots);
    n.d2.seq = n.d2.seq.max(m.seq);
    match m.said.body() {
        Body::Switch {
            epoch,
            attempt,
            tcp_pos,
            start,
        } => {
            let tx = TxWords {
                epoch: small(epoch.get()),
                phase: Phase::Up,
                tcp_pos: small(tcp_pos.get()),
                start: small(start.get()),
            };
            on_switch(n, c, (tx.epoch, small(attempt)), tx);
        }
        Body::Cdc(_) if !news => {} // a newer one came over another rail
        Body::Cdc(s) => on_snapshot(n, c, &s, &m),
        other => super::not_here(&other),
    }
}

/// Is this the word of a reader that expects a switch in this epoch?
fn is_ready(word: Word, epoch: u8, c: &Config) -> bool {
    // A wish is no reason to refuse: a reader that has not revoked would take the refusal for a switch.
    let refuses = |f: Flag| match f {
        Flag::Revoked => true,
        Flag::WantDown => c.bug == Some(Bug::RefuseOnWish),
        Flag::Ready | Flag::Closed | Flag::Accepted | Flag::Past => false,
    };
    let asked = Flag::ALL.iter().any(|&f| refuses(f) && word.has(f.value()));
    word.epoch == epoch && word.has(rx::READY) && !asked
}

fn on_switch(n: &mut State, c: &Config, which: Which, tx: TxWords) {
    if let Some((known, ok)) = n.d2.answered {
        if known == which && c.bug != Some(Bug::SwitchTwice) {
            n.d2.answer_due = true; // the answer was lost
            return;
        }
        if known != which && !newer(which, known) {
            return; // a later one is here already
        }
        if known != which && ok && known.0 == which.0 {
            n.fault(Fault::Impossible);
        }
    }
    if !is_ready(n.b.word, tx.epoch, c) {
        answer(n, which, false); // B never learns of it
        return;
    }
    n.d2.look = Some((which, tx));
    if c.bug != Some(Bug::LookBeforeSwitch) {
        store(n, c, tx);
    }
}

/// B sees the switch from here on.
fn store(n: &mut State, c: &Config, tx: TxWords) {
    n.d2.tx = tx;
    if c.bug != Some(Bug::HeadStays) {
        n.d2.head = n.d2.head.max(tx.start);
    }
}

/// The switch is stored: does B still expect it? The answer comes after that.
pub fn look(n: &mut State, c: &Config) {
    let Some((which, tx)) = n.d2.look.take() else {
        return;
    };
    if c.bug == Some(Bug::LookBeforeSwitch) {
        store(n, c, tx);
    } else if !is_ready(n.b.word, tx.epoch, c) {
        n.d2.tx.phase = Phase::Resumed;
        answer(n, which, false);
        return;
    }
    n.d2.up = true;
    answer(n, which, true);
}

fn answer(n: &mut State, which: Which, stands: bool) {
    n.d2.answered = Some((which, stands));
    n.d2.answer_due = true;
}

/// D1 asks what became of a switch. If it never arrived, it will not be taken any more.
pub fn asked_about(n: &mut State, c: &Config, which: Which) -> bool {
    match n.d2.answered {
        Some((known, ok)) if known == which => ok,
        Some((known, _)) if !newer(which, known) => false,
        _ => {
            if c.bug != Some(Bug::QueryForgets) {
                n.d2.answered = Some((which, false));
            }
            false
        }
    }
}

fn on_snapshot(n: &mut State, c: &Config, s: &Cdc, m: &Forth) {
    look_in(n);
    // All that a snapshot has, so that a field more does not compile.
    let Cdc {
        head,
        tx_epoch,
        tx_phase,
        flags: _, // read by name
        cursor: _,
        rx_epoch: _,
        rx_flags: _, // of the other direction
        moves: _,
        acked_moves: _, // there is one ring
    } = *s;
    let (epoch, head) = (small(tx_epoch.get()), small(head.get()));
    let known = n.d2.answered.map_or(0, |(which, _)| which.0);
    if !n.d2.up || epoch != n.d2.tx.epoch {
        if epoch > known {
            n.fault(Fault::Impossible); // a sender in an epoch that was not agreed
        }
        return;
    }
    let Some(phase) = Phase::of(tx_phase).filter(|p| *p != Phase::None) else {
        return n.fault(Fault::Impossible);
    };
    if c.bug == Some(Bug::OldSnapshots) {
        (n.d2.tx.phase, n.d2.head) = (phase, head);
        return;
    }
    let goes_back = head < n.d2.head && !is_set(s, VALIDATE);
    if phase < n.d2.tx.phase || goes_back {
        return n.fault(Fault::Impossible);
    }
    if is_set(s, WANT_LANDED) {
        n.d2.wants_landed = Some(head);
    }
    if head > n.d2.head {
        if c.inline {
            put(n, m, head);
        }
        n.d2.head = head;
    }
    let shown = n.d2.head;
    if n.d2.wants_landed.is_some_and(|at| shown >= at) {
        n.d2.wants_landed = None;
        (n.d2.landed, n.d2.landed_due) = (Some((epoch, shown)), true);
    }
    n.d2.tx.phase = phase;
}

/// Bytes that have come with a message are in the ring from here on.
pub fn put(n: &mut State, m: &Forth, head: u8) {
    for at in m.from..head {
        let slot = (at % RING) as usize;
        n.sink[slot] = m.data[slot];
    }
}

/// Reads B's words.
pub fn look_in(n: &mut State) {
    n.d2.up &= n.b.word.epoch == n.d2.tx.epoch; // or it is ready anew
}

/// What D1 is told of B's word. `up`: A is on the ring in the epoch that it is about.
fn told(n: &State, c: &Config, up: bool) -> Word {
    let w = n.b.word;
    let says = |f: &&Flag| match f {
        Flag::Ready | Flag::WantDown | Flag::Revoked | Flag::Closed | Flag::Past => {
            w.has(f.value())
        }
        Flag::Accepted => false, // only a daemon says that
    };
    let all = |flags: RxFlags, f: &Flag| flags | f.value();
    let flags = Flag::ALL.iter().filter(says).fold(rx::NONE, all);
    // If part of the ring is read, A must say in a frame from where on TCP goes on.
    let untouched = n.b.revoked == UNSEEN || n.b.revoked == n.d2.tx.start;
    let by_frame = !untouched || c.bug == Some(Bug::RevokeByFrame);
    let flags = match up && w.has(rx::REVOKED) && by_frame {
        true => flags.without(rx::REVOKED) | rx::WANT_DOWN,
        false => flags,
    };
    Word::new(w.epoch, flags)
}

/// What D2 has to say next, after a look at B.
pub fn next(n: &State, c: &Config) -> Option<Back> {
    if let Some(m) = n.d2.due() {
        return Some(m);
    }
    let up = n.d2.up && n.b.word.epoch == n.d2.tx.epoch;
    let word = told(n, c, up);
    let cursor = match up {
        // Until B has seen the switch, its cursor is that of an earlier epoch.
        true => n.b.cursor.max(n.d2.tx.start),
        false => n.d2.told.map_or(0, |(_, cursor)| cursor),
    };
    let changed = n.d2.told != Some((word, cursor)) && word.epoch > 0;
    changed.then_some(Back::Snapshot { word, cursor })
}

/// D2 has said this.
pub fn said(n: &mut State, m: Back) {
    match m {
        Back::Answer(..) => n.d2.answer_due = false,
        Back::Landed { .. } => n.d2.landed_due = false,
        Back::Snapshot { word, cursor } => n.d2.told = Some((word, cursor)),
    }
}

/// D2's rail is gone: what it said over it is said again over another.
pub fn moved(n: &mut State, c: &Config) {
    let answers = c.bug != Some(Bug::AnswerIsEvent);
    let d = &mut n.d2;
    d.answer_due |= d.answered.is_some() && answers;
    d.landed_due |= d.landed.is_some() && answers;
    d.told = None;
}
