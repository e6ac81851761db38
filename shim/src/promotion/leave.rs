//! A connection leaves its lane because no lane can follow: for good (SCM_RIGHTS, descriptors out of reach), or while
//! another program has it, too (exec, spawn).

use super::retire;
use super::takeover::Asked;
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock};
use crate::tcp::port::{self, Sock};
use crate::tcp::{self, ends, probes, reset};
use core::sync::atomic::Ordering::*;
use lane::abi::{marks, tx as phase};
use lane::family::{state, Cause, Conn};
use lane::half::leave::{leave_ms, Attempt, Step};
use lane::half::{tx, Memory, Progress};
use lane::num;
use lane::proto::reason::Reason;

/// Milliseconds after which a connection that was lent is not waited for any more.
const LENT_MS: u64 = 2 * leave_ms(true);

/// Gives both directions of a connection back to the kernel for good, before an operation that a lane cannot
/// carry. If the peer does not put its bytes back in time, the connection is reset. (If the peer is gone, nothing is
/// reset for a caller that only sets an option.)
pub fn leave(i: u32, fd: i32, why: Reason) {
    if table::is_other(fd) {
        return; // the number is another file now: no frame may go there
    }
    let c = table::conn(i);
    table::disqualify(c, why);
    if why == Reason::Left {
        enter_inode(c, fd);
    }
    come_down(Leaver::new(i, fd), why);
}

/// The same for all connections that a call concerns: they leave together, and have one deadline. `each` names them
/// whenever it is called, and a descriptor of each.
pub fn leave_all(each: impl Fn(&mut dyn FnMut(u32, i32)), why: Reason) {
    each(&mut |i, fd| set_off(i, fd, why));
    await_all(|f| each(&mut |i, _| f(i)));
}

/// The first half of [`leave_all`], for one connection: it begins to leave.
pub fn set_off(i: u32, fd: i32, why: Reason) {
    if !table::is_other(fd) {
        table::disqualify(table::conn(i), why);
        start(Leaver::new(i, fd));
    }
}

/// The same, but not for good: before this process closes a connection that other processes of the family go on
/// using. (Neither direction goes up again before that close, because the connection has several holders until
/// then.)
pub fn yield_lane(i: u32, fd: i32) -> bool {
    let closes = Leaver {
        closes: true,
        ..Leaver::new(i, fd)
    };
    table::is_other(fd) || come_down(closes, Reason::Shared)
}

/// Another program is about to get the connection as well (exec, spawn): begins to give both directions back to the
/// kernel. When no other process holds the connection any more, it may get a lane again, and its bytes are counted
/// anew. The caller does this for all connections of the call, then calls [`all_left`].
pub fn lend(i: u32, fd: i32) {
    let c = table::conn(i);
    if table::is_other(fd) || c.state.load(Relaxed) == state::LISTEN {
        return;
    }
    table::lend(c);
    start(Leaver::new(i, fd));
}

/// Begins, for who waits by [`await_all`].
fn start(who: Leaver) {
    let (c, l) = who.parts();
    // (If a thread that waits for it has been killed, nobody has cleared the word.)
    let (now, before) = (sys::now_ms(), l.lent_ms.load(Relaxed));
    if l.leaving.load(Relaxed) == 0 || now > before + LENT_MS {
        l.lent_ms.store(now, Relaxed);
    }
    enter_inode(c, who.fd);
    begin(who);
    if step(who, Reason::Left, 0).is_none() {
        l.leaving.store(who.word(), Relaxed);
    }
}

/// Waits until the connections that were lent are on TCP. From now on they rest, as if they had all been lent just now.
pub fn all_left() {
    await_all(|f| table::each_fd(|_, i, _| f(i)));
    let now = sys::now_ms();
    table::each_fd(|_, i, c| {
        if now < table::local(i).lent_ms.load(Relaxed) + LENT_MS {
            table::rests(c);
        }
    });
}

/// Waits until those of these connections that have begun to leave are on TCP: each for at most [`leave_ms`] since then,
/// whichever thread began it.
pub fn await_all(each: impl Fn(&mut dyn FnMut(u32))) {
    rounds(|round| {
        each(&mut |i| {
            let (c, l) = (table::conn(i), table::local(i));
            let word = l.leaving.load(Relaxed);
            let Some(who) = Leaver::of(i, word) else {
                return;
            };
            if table::is_vfork_child() && !table::is_same(who.fd, c) {
                return; // a thread of its parent takes it off, and waits for it
            }
            let since = l.lent_ms.load(Relaxed);
            if round.attempt(who, Reason::Left, since).is_some() {
                let _ = l.leaving.compare_exchange(word, 0, Relaxed, Relaxed);
            }
        });
    });
}

/// A round of attempts for all connections of a call.
struct Round {
    asked: Asked,
    /// Is the daemon to be asked in this round? (Not decided before somebody has to wait.)
    due: Option<bool>,
    /// One that has to wait.
    waits: Option<Leaver>,
}

impl Round {
    /// One attempt of a call that began then. `None`: there has to be another one; otherwise as [`step`].
    fn attempt(&mut self, who: Leaver, why: Reason, began: u64) -> Option<bool> {
        let waited = sys::now_ms().saturating_sub(began);
        let left = step(who, why, waited);
        if left.is_some() {
            return left;
        }
        if *self.due.get_or_insert_with(|| self.asked.is_due()) {
            self.asked.ask(who.i);
        }
        if waited > who.patience_ms() && self.asked.has_waited_enough() {
            who.reset(Reason::Stalled);
            return Some(false);
        }
        self.waits = Some(who);
        None
    }
}

/// Makes attempts, one for each connection and round, until none of them has to wait.
fn rounds(mut each: impl FnMut(&mut Round)) {
    let mut round = Round {
        asked: Asked::new(),
        due: None,
        waits: None,
    };
    loop {
        round.due = None;
        each(&mut round);
        let Some(who) = round.waits.take() else {
            return;
        };
        await_peer(who.i, who.fd, round.asked.wait_ms());
    }
}

/// A connection that a call takes off its lane.
#[derive(Clone, Copy)]
struct Leaver {
    i: u32,
    gen: u32,
    /// A descriptor of it, when the call began.
    fd: i32,
    /// The call closes it, and has the descriptor for itself.
    closes: bool,
}

impl Leaver {
    fn new(i: u32, fd: i32) -> Leaver {
        let gen = table::conn(i).gen.load(Relaxed);
        let closes = false;
        Leaver { i, gen, fd, closes }
    }

    /// For [`Local::leaving`].
    fn word(self) -> u64 {
        u64::from(self.gen) << 32 | u64::from(num::bits(self.fd + 1))
    }

    fn of(i: u32, word: u64) -> Option<Leaver> {
        (word != 0).then(|| Leaver {
            i,
            gen: (word >> 32) as u32,
            fd: num::signed(num::low32(word)) - 1,
            closes: false,
        })
    }

    fn parts(self) -> (&'static Conn, &'static Local) {
        (table::conn(self.i), table::local(self.i))
    }

    /// Under one of the connection's locks: its descriptor. A number that was remembered without them may have been closed
    /// since, and may be another socket's. `None`: the connection is closed. (A vfork child has descriptors of its own.)
    fn sock(self) -> Option<i32> {
        let (c, l) = self.parts();
        if self.closes {
            return Some(self.fd);
        }
        if c.gen.load(Relaxed) != self.gen {
            return None;
        }
        let same = |fd: &i32| table::is_same(*fd, c);
        if table::is_vfork_child() {
            return Some(self.fd).filter(same);
        }
        if tcp::call::is_closing(l) {
            return None;
        }
        // (The number that stands for the connection may have been closed unseen.)
        let known = [l.fd.load(Relaxed), self.fd];
        known.into_iter().find(same)
    }

    /// For how long the call waits.
    fn patience_ms(self) -> u64 {
        let (c, l) = self.parts();
        leave_ms(attached::of(c, l).is_some_and(|(group, _)| group.is_remote()))
    }

    /// Ends it with a reset, if it is still open.
    fn reset(self, r: Reason) {
        let (c, _) = self.parts();
        let _g = lock::lock(&c.tx.lock);
        if let Some(fd) = self.sock() {
            reset(c, fd, r);
        }
    }
}

/// It may come back to this process: see `received::is_twice`.
fn enter_inode(c: &Conn, fd: i32) {
    if c.inode.load(Relaxed) == 0 {
        let inode = sys::inode(fd).map_or(0, |(inode, _)| inode);
        c.inode.store(inode, Relaxed);
    }
}

/// Takes one connection down. False: not all of it, as [`step`] says.
fn come_down(who: Leaver, why: Reason) -> bool {
    let began = sys::now_ms();
    begin(who);
    let mut whole = false;
    rounds(|round| {
        if let Some(is) = round.attempt(who, why, began) {
            whole = is;
        }
    });
    whole
}

fn begin(who: Leaver) {
    let (c, l) = who.parts();
    if let Some((group, m)) = attached::of(c, l) {
        let Some(_g) = lock::lock(&c.tx.lock) else {
            return;
        };
        if let Some(fd) = who.sock().filter(|_| attached::is_still(c, group, &m)) {
            go_down(c, l, &m, &Sock::leaving(fd, group));
        }
    }
}

/// One attempt of a call that has waited for so many milliseconds. `None`: something has yet to happen at the peer, or to TCP's buffer.
/// Otherwise: is it on TCP, whole? (If not, it was reset; or the peer is gone, nothing was reset, and a call that only sets an
/// option goes on.)
fn step(who: Leaver, why: Reason, waited: u64) -> Option<bool> {
    let (c, l) = who.parts();
    let Some((group, m)) = attached::of(c, l) else {
        return Some(true);
    };
    let (tx_done, over) = {
        let Some(_g) = lock::lock(&c.tx.lock) else {
            return Some(false);
        };
        if !attached::is_still(c, group, &m) {
            return None; // looked up anew
        }
        let Some(fd) = who.sock() else {
            return Some(true); // another thread has closed it
        };
        let port = Sock::leaving(fd, group);
        let done = !matches!(c.tx.come_down(&m, &port), Ok(Progress::Blocked));
        // (Asked first: what an end that is gone has said is final, and is seen below.)
        (done, is_over(c, l, group, fd))
    };
    let step = {
        let Some(_g) = lock::lock(&c.rx.lock) else {
            return Some(false);
        };
        if !attached::is_still(c, group, &m) {
            return None;
        }
        let Some(fd) = who.sock() else {
            return Some(true);
        };
        let option = why == Reason::Option;
        let attempt = Attempt {
            tx_done,
            over,
            option,
            waited,
        };
        attempt.step(&c.rx, &m, &Sock::leaving(fd, group))
    };
    match step {
        Step::Again => None,
        Step::Left => Some(gone(who.i)),
        Step::GoesOn => Some(false),
        Step::Stuck(r) => {
            who.reset(r);
            Some(false)
        }
    }
}

/// The connection is on TCP both ways.
fn gone(i: u32) -> bool {
    retire::left(i);
    crate::sets::left(i);
    true
}

/// Waits so many milliseconds for what [`step`] misses.
pub(super) fn await_peer(i: u32, fd: i32, ms: u32) {
    let (c, l) = (table::conn(i), table::local(i));
    if let Some((group, _)) = attached::of(c, l) {
        port::ring(group);
    }
    // (Nothing but room on TCP ends the wait early: the end of a connection is there all the time.)
    let drains = c.tx.mode.load(Relaxed) == tx::mode::DRAIN
        && attached::of(c, l).is_some_and(|(_, m)| !c.tx.awaits(&m));
    let _ = sys::poll_ms(if drains { fd } else { -1 }, libc::POLLOUT, ms);
    // The peer's end may be a lane of this same process: do that end's part, too.
    table::each(|k, other| {
        if k != i {
            if let Some((lk, mm)) = attached::of(other, table::local(k)) {
                if let Some(_g) = lock::try_lock(&other.tx.lock) {
                    let fd = table::local(k).fd.load(Relaxed);
                    // (Another thread may have closed it meanwhile, and its number is another socket's.)
                    if other.tx.has_work(&mm)
                        && attached::is_still(other, lk, &mm)
                        && table::is_at(other, fd)
                    {
                        let _ = other.tx.look(&mm, &Sock::new(fd, lk));
                    }
                }
            }
        }
    });
}

/// Takes the sending half down, whose lock is held, as far as TCP accepts the bytes now.
fn go_down(c: &Conn, l: &Local, m: &Memory, port: &Sock) {
    probes::restore(c, l);
    // If the peer process died with bytes of ours unread, TCP shows a FIN where kernel TCP would have sent a reset.
    let unread = c.tx.is_up() && c.tx.unread(m).is_ok_and(|n| n > 0);
    let ended = sys::poll1(port.fd, libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP);
    let died = c.rx.shut.load(Relaxed) == 0
        && ended == libc::POLLRDHUP
        && ends::has_died(c, m, port.fd, ends::is_dead(l));
    let told = died || ended & libc::POLLHUP != 0; // (by a reset of its own)
    let was = c.tx.is_up();
    // `come_down` first looks whether the peer has closed: its kernel would answer a frame with a reset, but the next owner
    // of the socket must find a clean end of file.
    let _ = c.tx.come_down(m, port);
    // The peer's FIN may have arrived meanwhile, or be about to arrive: that counts as a reset, too.
    if unread && !told && c.rx.shut.load(Relaxed) == 0 && died_meanwhile(c, m, port) {
        if sys::tcp_state(port.fd) == Some(sys::CLOSE) {
            // (A reset for bytes that its kernel should not have seen.)
            let _ = sys::getsockopt_u32(port.fd, libc::SOL_SOCKET, libc::SO_ERROR);
            ends::count_death();
            ends::tell_death(c, m, port.fd);
        } else {
            ends::reset_by_death(c, m, port.fd);
        }
    }
    if was {
        probes::went_down(c, Cause::Left);
    }
}

/// Milliseconds within which the FIN of a dying process arrives.
const DYING_MS: u32 = 2;

/// Bytes that the peer had not read from the ring are on TCP now: has it died without reading them?
fn died_meanwhile(c: &Conn, m: &Memory, port: &Sock) -> bool {
    let there = || sys::tcp_position(port.fd).is_some_and(|k| k.acked == k.sent);
    let ms = if there() { 0 } else { DYING_MS };
    let ended = sys::poll_ms(port.fd, libc::POLLRDHUP, ms)
        .is_ok_and(|e| e & (libc::POLLRDHUP | libc::POLLHUP) != 0);
    // (A quick peer has read them meanwhile. A peer that ends by itself has stored ENDED or RESET. And without a frame, what is
    // unread is so for its kernel, too.)
    ended
        && c.tx.phase() == phase::DOWN
        && c.tx.unread(m).is_ok_and(|n| n > 0)
        && c.rx.said(m) & (marks::ENDED | marks::RESET | marks::KEPT) == marks::KEPT
}

/// On one node: is the other end gone, or has the connection been reset?
fn is_over(c: &Conn, l: &Local, group: &LinkGroup, fd: i32) -> bool {
    let reset = || c.has_error() || port::is_over(fd, sys::poll1(fd, 0));
    !group.is_remote() && (ends::is_dead(l) || group.is_dead() || reset())
}
