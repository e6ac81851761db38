//! D1's engine: the outgoing direction of the lane, as in `underpass_rdma::engine::{outward, out, post}`.

use super::state::daemons::{Out, Proxy, D1};
use super::state::messages::{small, Back, Forth, Said, Which};
use super::state::sender::{Sender, Taken};
use super::state::{Config, Fault, Phase, State, Word, RING};
use super::Bug;
use lane::abi::rx::{self, Flag};
use underpass_rdma::wire::Body;

/// Has a helper of D1 begun to put the present epoch on TCP, or is it done? Its result may not have come yet.
fn is_on_tcp(d: &D1, m: &Proxy, c: &Config) -> bool {
    let phase = match m.takeover.phase {
        Taken::None | Taken::Taken => false,
        Taken::Down | Taken::Fin | Taken::Plain | Taken::Done => true,
    };
    phase && m.takeover.epoch == d.epoch && c.bug != Some(Bug::AwaitResult)
}

/// Reads A's words, and shows A what it is to see: `look_out`. `rail`: there is a link.
fn look(d: &mut D1, m: &mut Proxy, a: &Sender, rail: bool, c: &Config) {
    let w = a.w;
    if is_on_tcp(d, m, c) {
        stop(d, c);
    }
    if d.out == Out::Up && w.epoch != d.epoch {
        // A has left our epoch and said so, but we did not look in time.
        (d.out, d.phase, d.snapshot) = (Out::Left, Phase::Down, true);
    }
    match d.out {
        Out::Idle | Out::Left => {
            let asks = w.phase == Phase::Up && w.epoch == d.told.epoch && w.epoch > d.epoch;
            if asks {
                begin_ask(d, w.epoch, rail);
            } else if d.out == Out::Left && w.epoch == d.epoch {
                leave_ring(d, w.phase);
            }
        }
        Out::Asking { which, doubt, .. } => {
            if !rail && !doubt {
                d.out = Out::Refused(which.0);
            }
        }
        Out::Refused(e) => {
            if w.epoch != e || w.phase != Phase::Up {
                d.out = Out::Idle;
            }
        }
        Out::Up => {
            if w.phase != Phase::Up {
                leave_ring(d, w.phase);
            }
        }
    }
    if !rail && d.out == Out::Up && c.bug != Some(Bug::NoWantDown) {
        d.want_down = true;
    }
    show(d, m, rail, c);
}

fn leave_ring(d: &mut D1, phase: Phase) {
    if d.engine_left || phase <= d.phase {
        return; // known already
    }
    (d.phase, d.out, d.snapshot) = (phase, Out::Left, true);
}

fn begin_ask(d: &mut D1, epoch: u8, rail: bool) {
    if d.told != Word::ready(epoch) || !rail {
        d.out = Out::Refused(epoch);
        return;
    }
    d.attempt += 1;
    d.out = Out::Asking {
        which: (epoch, d.attempt),
        said: false,
        doubt: false,
    };
}

/// Is A shown this flag of B's while it is on the ring?
fn passes(flag: Flag, rail: bool, c: &Config) -> bool {
    match flag {
        Flag::WantDown | Flag::Past | Flag::Closed => true,
        // Who comes down without a frame says so over a link.
        Flag::Revoked => rail || c.bug == Some(Bug::RevokeWithoutPath),
        // They are set anyway.
        Flag::Ready | Flag::Accepted => false,
    }
}

/// Stores the word that A has to see now.
fn show(d: &D1, m: &mut Proxy, rail: bool, c: &Config) {
    let down = match d.want_down {
        true => rx::WANT_DOWN,
        false => rx::NONE,
    };
    let on_ring = Word::ready(d.epoch).with(rx::ACCEPTED | down);
    let word = match d.out {
        Out::Asking { which, .. } => Word::ready(which.0),
        Out::Refused(e) => Word::ready(e).with(rx::REVOKED),
        Out::Up if d.told.epoch == d.epoch => {
            let of_b = |f: &&Flag| passes(**f, rail, c) && d.told.has(f.value());
            Flag::ALL
                .iter()
                .filter(of_b)
                .fold(on_ring, |w, f| w.with(f.value()))
        }
        Out::Up => on_ring,
        // A takeover comes down as A would have.
        Out::Left if d.told.epoch == d.epoch => on_ring.with(m.word.flags.only(rx::REVOKED)),
        // Without a link its readiness does not invite A to go up.
        Out::Idle | Out::Left if d.told == Word::ready(d.told.epoch) && !rail => {
            d.told.with(rx::WANT_DOWN)
        }
        Out::Idle | Out::Left => d.told,
    };
    if word.has(rx::REVOKED) && d.out != Out::Left {
        m.told = rail;
    }
    m.word = word;
}

/// D1 looks at A's words.
pub fn look_out(n: &mut State, c: &Config) {
    look(&mut n.d1, &mut n.proxy, &n.a, n.net.rail_up(), c);
}

/// Is there anything to do in a turn?
pub fn has_turn(n: &State, c: &Config) -> bool {
    let (mut d, mut m) = (n.d1.clone(), n.proxy.clone());
    look(&mut d, &mut m, &n.a, n.net.rail_up(), c);
    d != n.d1 || m != n.proxy || free_rail(&d, n).is_some() && due(&d, n)
}

/// The rail over which the lane could post something now.
fn free_rail(d: &D1, n: &State) -> Option<usize> {
    let free = |i: &usize| n.net.is_up(*i) && n.net.rails[*i].flight.is_none();
    d.rail.filter(free)
}

fn due(d: &D1, n: &State) -> bool {
    match d.out {
        Out::Asking { said: false, .. } => true,
        _ => d.epoch > 0 && (d.snapshot || d.sends() && n.a.head > d.posted),
    }
}

/// D1 looks at A's words, and posts what is due.
pub fn turn(n: &mut State, c: &Config) {
    look_out(n, c);
    if let Some(i) = free_rail(&n.d1, n).filter(|_| due(&n.d1, n)) {
        post(n, c, i);
    }
}

fn post(n: &mut State, c: &Config, rail: usize) {
    let d = &mut n.d1;
    d.seq += 1;
    let from = d.posted;
    let said = match &mut d.out {
        Out::Asking { which, said, doubt } if !*said => {
            (*said, *doubt) = (true, true);
            Said::Switch {
                which: *which,
                tcp_pos: n.a.w.tcp_pos,
                start: n.a.w.start,
            }
        }
        _ => {
            if d.sends() {
                d.posted = n.a.head;
                d.high = d.high.max(d.posted);
            }
            let repeats = d.validate || d.posted < d.high;
            let validate = repeats && c.bug != Some(Bug::NoValidate);
            (d.snapshot, d.validate) = (false, false);
            Said::Snapshot {
                epoch: d.epoch,
                phase: d.phase,
                head: d.posted,
                validate,
                want_landed: d.finish && d.sends(),
            }
        }
    };
    let mut data = [0; RING as usize];
    for at in from..said.head().unwrap_or(from) {
        data[(at % RING) as usize] = n.a.ring[(at % RING) as usize];
    }
    let seq = d.seq;
    let m = Forth {
        seq,
        said,
        from,
        data,
    };
    let head = said.head().unwrap_or(from);
    let other = &mut n.net.rails[1 - rail];
    if c.bug == Some(Bug::CdcElsewhere) && head > from && other.flight.is_none() {
        // What announces the bytes goes over the other rail.
        other.flight = Some(Forth { from: head, ..m });
    }
    n.net.rails[rail].flight = Some(m);
}

/// Nothing of the lane is in flight on its former rail: everything is said again over this one.
pub fn bind(n: &mut State, c: &Config, rail: usize, validate: bool) {
    let d = &mut n.d1;
    (d.rail, d.left) = (Some(rail), rail);
    if c.bug != Some(Bug::NoRewrite) {
        // Bytes that B has consumed had arrived, with or without a completion.
        d.acked = d.acked.max(d.cursor);
        d.posted = d.acked;
    }
    if c.bug == Some(Bug::SnapshotIsEvent) {
        return;
    }
    (d.validate, d.snapshot) = (d.validate || validate, d.epoch > 0);
    if let Out::Asking { said, .. } = &mut d.out {
        *said = false;
    }
}

/// A rail has carried this message to D2's device.
pub fn completed(n: &mut State, c: &Config, m: &Forth) {
    let Said::Snapshot { epoch, head, .. } = m.said else {
        return;
    };
    // (Bytes behind the message are in the device, and not yet in the ring.)
    let there = !c.inline || c.bug == Some(Bug::InlineIsThere);
    let d = &mut n.d1;
    if there && epoch == d.epoch && head <= d.posted {
        d.acked = d.acked.max(head);
    }
}

/// A switch may have reached D2, and no link is left over which to ask again.
pub fn query(n: &State, c: &Config) -> Option<Which> {
    match n.d1.out {
        Out::Asking {
            which, doubt: true, ..
        } => (!n.net.rail_up() && c.bug != Some(Bug::NoQuery)).then_some(which),
        _ => None,
    }
}

/// D1 reads what D2 has sent.
pub fn receive(n: &mut State, c: &Config, m: Back) {
    match m.body() {
        Body::SwitchReply { epoch, attempt, ok } => {
            on_answer(n, c, (small(epoch.get()), small(attempt)), ok);
        }
        Body::Landed { epoch, head } => on_landed(n, c, small(epoch.get()), small(head.get())),
        // Of a snapshot, what concerns A's direction.
        Body::Cdc(s) => {
            let word = Word::new(small(s.rx_epoch.get()), s.rx_flags);
            on_reader(n, c, word, small(s.cursor.get()));
        }
        other => super::not_here(&other),
    }
}

/// D2 has answered a switch.
pub fn on_answer(n: &mut State, c: &Config, which: Which, ok: bool) {
    let rail = n.net.rail_up();
    let d = &mut n.d1;
    let Out::Asking {
        which: ours, doubt, ..
    } = d.out
    else {
        return; // answered twice
    };
    let other = match c.bug {
        Some(Bug::AnyAttempt) => ours.0 != which.0,
        _ => ours != which,
    };
    if other {
        return;
    }
    if !doubt {
        n.fault(Fault::Impossible);
        return;
    }
    if ok {
        let start = n.a.w.start;
        (d.out, d.epoch, d.phase) = (Out::Up, which.0, Phase::Up);
        d.want_down = !rail && c.bug != Some(Bug::NoWantDown);
        (d.acked, d.posted, d.cursor, d.high) = (start, start, start, start);
        d.engine_left = false;
        d.snapshot |= d.finish;
        n.proxy.cursor = start;
    } else {
        d.out = Out::Refused(which.0);
    }
    show(&n.d1, &mut n.proxy, rail, c);
}

/// What B says.
fn on_reader(n: &mut State, c: &Config, word: Word, cursor: u8) {
    let rail = n.net.rail_up();
    if word.epoch < n.d1.told.epoch {
        n.fault(Fault::Impossible);
    }
    if n.d1.out == Out::Up && word.epoch != n.d1.epoch {
        // B becomes ready again only after our frame, so A must have said that it left.
        look_out(n, c);
        if n.d1.out == Out::Up {
            n.fault(Fault::Impossible);
        }
    }
    let d = &mut n.d1;
    d.told = word;
    if d.out == Out::Up {
        if cursor < d.cursor || cursor > d.high {
            n.fault.get_or_insert(Fault::Impossible);
            return;
        }
        d.cursor = cursor;
        if c.inline {
            d.acked = d.acked.max(cursor);
        }
        if cursor > d.posted {
            d.acked = d.acked.max(cursor);
            d.posted = cursor;
        }
        n.proxy.cursor = cursor;
    }
    show(&n.d1, &mut n.proxy, rail, c);
}

/// B can see everything up to `head`.
fn on_landed(n: &mut State, c: &Config, epoch: u8, head: u8) {
    let d = &mut n.d1;
    if epoch != d.epoch {
        return;
    }
    if head > d.high {
        n.fault.get_or_insert(Fault::Impossible);
        return;
    }
    if c.inline {
        d.acked = d.acked.max(head);
    }
    n.proxy.landed = n.proxy.landed.max(head);
}

/// A will send no more: `Pair::finish`.
pub fn finish(n: &mut State) {
    if !n.d1.finish {
        n.d1.finish = true;
        n.d1.snapshot |= n.d1.out == Out::Up;
    }
}

/// D1 takes the direction down itself: the engine sends no more bytes of it. Was it up? (`Out::take_down`.)
fn stop(d: &mut D1, c: &Config) -> bool {
    // A may have said that it goes down and got no further: then we say the rest.
    let begun = d.out == Out::Left && d.phase == Phase::Downing;
    d.engine_left |= begun && c.bug != Some(Bug::DownUntold);
    if d.out != Out::Up {
        return false;
    }
    (d.out, d.phase) = (Out::Left, Phase::Downing);
    (d.engine_left, d.snapshot) = (true, true);
    true
}

/// `Pair::take_down`. `epoch`: that of the direction that D1 has; A may be in the next one by now.
pub fn take_down(n: &mut State, c: &Config, epoch: u8) {
    if n.d1.epoch == epoch && stop(&mut n.d1, c) {
        show(&n.d1, &mut n.proxy, n.net.rail_up(), c);
    }
}

/// What was on the ring is on TCP: `Pair::is_down`.
pub fn is_down(n: &mut State, epoch: u8, phase: Phase) {
    let d = &mut n.d1;
    if d.epoch == epoch && d.engine_left && d.phase <= Phase::Downing {
        (d.phase, d.snapshot) = (phase, true);
    }
}
