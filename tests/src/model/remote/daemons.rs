//! The two daemons as proxies of each other's application: what D1 reads of A's words and sends, and
//! what D2 stores of it where B looks; the same the other way round.

use super::state::daemons::*;
use super::state::network::{Life, RAILS};
use super::state::{Act as Any, Config, Phase, State, TxWords, Word, UNSEEN};
use super::Bug;

/// May `Fin` be written? D2 has stored all that A published in this epoch, and B could take the
/// frame out of TCP even if it wanted to leave now.
pub fn finished(n: &State, c: &Config) -> bool {
    let w = n.d1.rev.word;
    let past = w.epoch == n.a.w.epoch && w.past;
    stored(n, c) && (past || c.bug == Some(Bug::FinBehindPrefix))
}

fn stored(n: &State, c: &Config) -> bool {
    let d = &n.d1;
    if c.bug == Some(Bug::FinOnCompletion) {
        let drained = n.net.rails.iter().all(|r| r.flight.is_none());
        return drained && d.epoch == n.a.w.epoch && d.next == n.a.head;
    }
    d.rev.tx.0 == n.a.w.epoch && d.rev.head >= n.a.head
}

/// What A may see of B, after whatever D1 has heard.
pub fn show(n: &mut State, c: &Config) {
    let (r, rails) = (n.d1.rev, n.net.rail_up());
    let here = r.tx.0 == r.word.epoch && r.tx.1 != 0;
    let accepted = here && r.tx.1 < RESUMED;
    let refused = here && r.tx.1 == RESUMED;
    // A revocation of a switch that stands is passed on while the answer can be, which has no frame, and if nothing was
    // taken from the ring. Else the sender is asked to go down by a frame, which needs no path.
    let path = n.path() || c.bug == Some(Bug::RevokeWithoutPath);
    let untouched = r.revoked == UNSEEN || r.revoked == n.a.w.start;
    let by_frame = accepted && (!untouched || c.bug == Some(Bug::RevokeByFrame));
    let revoked = r.word.revoked && (!accepted || path) && !by_frame;
    let lost = accepted && !rails && c.bug != Some(Bug::NoWantDown);
    let m = &mut n.proxy;
    m.word = Word {
        epoch: r.word.epoch,
        ready: r.word.ready && rails,
        want: r.word.want || lost || r.word.revoked && !revoked,
        past: false, // D1's own business
        revoked: revoked || refused,
        accepted,
    };
    m.revoked = if r.word.revoked { r.revoked } else { UNSEEN };
    m.cursor = r.cursor;
}

/// Where the transfer starts in A's present epoch.
fn next(n: &State) -> u8 {
    if n.d1.epoch == n.a.w.epoch {
        n.d1.next
    } else {
        n.a.w.start
    }
}

/// What D1 would send over channel `ch` now.
fn snap(n: &State, ch: usize) -> Snap {
    let (w, r) = (n.a.w, &n.d1.rev);
    let from = next(n);
    let known = r.tx.0 == w.epoch;
    let data = ch < RAILS && w.phase == Phase::Up && known;
    let to = if data { n.a.head } else { from };
    let head = match () {
        _ if ch < RAILS => to,
        // What was under way on a rail may never arrive.
        _ if known => r.head,
        _ => w.start,
    };
    Snap {
        tx: w,
        head,
        from,
        to,
        data: n.a.ring,
    }
}

fn news(n: &State, c: &Config, ch: usize) -> bool {
    let s = snap(n, ch);
    let posted = match n.d1.posted {
        Some((_, tx, head)) if c.bug == Some(Bug::SnapshotIsEvent) => Some((ch, tx, head)),
        p => p,
    };
    n.a.w.epoch > 0 && posted != Some((ch, s.tx, s.head))
}

fn rev(n: &State) -> Rev {
    Rev {
        word: n.d2.before.unwrap_or(n.b.word),
        revoked: n.b.revoked,
        cursor: n.b.cursor,
        tx: (n.d2.tx.epoch, n.d2.tx.phase as u8),
        head: n.d2.head,
    }
}

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    let mut push = |a| out.push(Any::Daemon(a));
    let up = |i: usize| n.net.rails[i].life == Life::Up;
    if !n.d1.dead {
        match n.d1.rail {
            Some(i) if up(i) && n.net.rails[i].flight.is_none() && news(n, c, i) => {
                push(Act::Send(i));
            }
            Some(_) => {}
            None => {
                let clear = matches!(n.net.rails[n.d1.left].life, Life::Gone | Life::Up)
                    || c.bug == Some(Bug::NoWaitForDelete);
                if let Some(i) = (0..RAILS).find(|&i| up(i)).filter(|_| clear) {
                    push(Act::Bind(i));
                }
            }
        }
        let query = c.bug != Some(Bug::NoQuery) || n.a.w.phase != Phase::Up;
        let tls = &n.net.tls;
        if tls.up && !n.net.rail_up() && tls.forth.is_none() && query && news(n, c, RAILS) {
            push(Act::Send(RAILS));
        }
    }
    if n.d2.dead {
        return;
    }
    if n.d2.look.is_some() {
        push(Act::Look);
        return;
    }
    for i in 0..RAILS {
        if n.net.rails[i].arrived.is_some() {
            push(Act::Take(i));
        }
    }
    if n.net.tls.forth.is_some() {
        push(Act::Take(RAILS));
    }
    if n.path() {
        let mut all = n.d1.rev;
        join(&mut all, rev(n));
        if all != n.d1.rev {
            push(Act::Tell);
        }
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let Some(i) = n.d1.rail.filter(|_| n.moves > 0 && !n.d1.dead) else {
        return;
    };
    let drained = n.net.rails[i].flight.is_none() || c.bug == Some(Bug::MoveUndrained);
    for to in 0..RAILS {
        if to != i && drained && n.net.rails[to].life == Life::Up {
            out.push(Any::Daemon(Act::Move(to)));
        }
    }
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Bind(i) => {
            let start = n.a.w.start;
            let d = &mut n.d1;
            d.rail = Some(i);
            d.left = i;
            if c.bug != Some(Bug::SnapshotIsEvent) {
                d.posted = None;
            }
            if d.epoch == n.a.w.epoch && c.bug != Some(Bug::NoRewrite) {
                d.next = start.max(n.proxy.cursor);
                if d.rev.tx.0 == d.epoch {
                    d.next = d.next.max(d.rev.head);
                }
            }
        }
        Act::Move(i) => {
            n.moves -= 1;
            n.d1.rail = Some(i);
            n.d1.posted = None;
        }
        Act::Send(ch) => send(n, c, ch),
        Act::Take(ch) => {
            let s = match ch {
                RAILS => n.net.tls.forth.take(),
                i => n.net.rails[i].arrived.take(),
            };
            if let Some(s) = s {
                take(n, c, s);
            }
        }
        Act::Look => {
            let Some(tx) = n.d2.look.take() else { return };
            if c.bug == Some(Bug::LookBeforeSwitch) {
                switch(n, c, tx);
                if n.d2.refuse {
                    n.d2.tx.phase = Phase::Resumed;
                }
                n.d2.refuse = false;
            } else if refuse(n, c, tx.epoch) {
                n.d2.tx.phase = Phase::Resumed;
            }
        }
        Act::Tell => {
            let r = rev(n);
            n.d2.before = None;
            join(&mut n.d1.rev, r);
        }
    }
}

fn send(n: &mut State, c: &Config, ch: usize) {
    let mut s = snap(n, ch);
    n.d1.epoch = s.tx.epoch;
    n.d1.next = s.to;
    n.d1.posted = Some((ch, s.tx, s.head));
    let Some(r) = n.net.rails.get_mut(ch) else {
        n.net.tls.forth = Some(s);
        return;
    };
    if c.bug == Some(Bug::CdcElsewhere) && s.from < s.to {
        let bare = Snap { to: s.from, ..s };
        s.head = s.from;
        r.flight = Some(s);
        let other = &mut n.net.rails[1 - ch];
        if other.life == Life::Up && other.flight.is_none() {
            other.flight = Some(bare);
        }
        return;
    }
    r.flight = Some(s);
}

/// Words of B arrive over several channels; none may take back what another has told.
fn join(to: &mut Rev, r: Rev) {
    if r.word.epoch > to.word.epoch {
        (to.word, to.revoked) = (r.word, r.revoked);
    } else if r.word.epoch == to.word.epoch {
        to.word.want |= r.word.want;
        to.word.past |= r.word.past;
        if r.word.revoked {
            (to.word.revoked, to.revoked) = (true, r.revoked);
        }
    }
    to.cursor = to.cursor.max(r.cursor);
    to.tx = to.tx.max(r.tx);
    to.head = to.head.max(r.head);
}

fn refuse(n: &State, c: &Config, epoch: u8) -> bool {
    let w = n.b.word;
    let asked = w.revoked || c.bug == Some(Bug::RefuseOnWish) && w.want;
    w.epoch != epoch || asked
}

fn switch(n: &mut State, c: &Config, tx: TxWords) {
    n.d2.tx = tx;
    if c.bug != Some(Bug::HeadStays) {
        n.d2.head = n.d2.head.max(tx.start);
    }
}

/// D2 stores what A says, where B sees it.
fn take(n: &mut State, c: &Config, s: Snap) {
    let known = n.d2.tx;
    let again = c.bug == Some(Bug::SwitchTwice) && s.tx.phase == Phase::Up && s.from == s.to;
    if s.tx.phase == Phase::Up && (s.tx.epoch > known.epoch || again && s.tx != known) {
        if c.bug == Some(Bug::LookBeforeSwitch) {
            n.d2.refuse = refuse(n, c, s.tx.epoch);
            n.d2.before = Some(n.b.word);
        } else {
            switch(n, c, s.tx);
        }
        n.d2.look = Some(s.tx);
    } else if c.bug == Some(Bug::OldSnapshots) || s.tx.epoch > known.epoch {
        n.d2.tx = s.tx;
        n.d2.head = s.head;
    } else if s.tx.epoch == known.epoch {
        n.d2.tx.phase = known.phase.max(s.tx.phase);
        n.d2.head = n.d2.head.max(s.head);
    }
}
