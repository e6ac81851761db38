//! What this daemon does for ends that cannot: see `link::lane::tx::custody`.
//!
//! An end that has shut down, closed or died leaves its ring to us: when everything has arrived we
//! say so on TCP (`Fin`), or put the ring back on TCP (`Down`), and only then shut the socket down.
//! An end that is asleep outside every hook when its rails are gone does not see that it is asked
//! to go down; after a moment we do it for it.

use super::lane::{Ending, Stage};
use super::{Key, Locked, Rails};
use crate::sockopt::TcpInfo;
use link::lane::tx::{mode, Adopted};
use link::lane::{Memory, Port, Progress, TxState};
use link::layout::{bits_of, custody, epoch_of, pack, tx};
use link::reason::Reason;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{fence, Ordering::*};

/// An end gets so long to go down by itself.
pub(super) const LATE_NS: u64 = 20_000_000;
/// While there is something to do, between two looks.
const TICK_NS: u64 = 5_000_000;
/// For what is in the ring to arrive over the rails, before it is put on TCP after all.
const FLUSH_NS: u64 = 2_000_000_000;
/// A peer that takes nothing from TCP for so long does not get the rest, as with any orphan
/// (tcp(7), tcp_orphan_retries).
const ORPHAN_NS: u64 = 100_000_000_000;

/// A direction in our hands.
pub(super) struct Custody {
    tx: TxState,
    /// Kernel position when it last moved, and when that was.
    moved: (u64, u64),
}

/// The socket, for the lane's code. Nothing here blocks.
struct Sock<'a>(BorrowedFd<'a>);

impl Port for Sock<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // SAFETY: the lane's code gives memory that is mapped for `len` bytes: a frame of its own, or
        // ring bytes, which the process may change meanwhile; the kernel only reads them.
        let bytes = unsafe { std::slice::from_raw_parts(data, len) };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(self.0, bytes, flags).map_err(|e| e.raw_os_error())
    }

    fn tcp_recv(&self, _: *mut u8, _: usize, _: bool) -> Result<usize, i32> {
        Err(libc::EAGAIN) // a sending direction receives nothing
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(0) // as above
    }

    fn tcp_sent(&self) -> Option<u64> {
        TcpInfo::read(self.0).ok().map(|i| i.sent())
    }

    fn ring(&self) {}
}

/// Resets a connection: connect(AF_UNSPEC) on an established socket sends RST (`tcp_disconnect`).
pub(super) fn disconnect(sock: BorrowedFd<'_>) {
    let unspec = [0u8; 16];
    // SAFETY: 16 readable bytes, a sockaddr of family 0; the call changes only the socket.
    let _ = unsafe { libc::connect(sock.as_raw_fd(), unspec.as_ptr().cast(), 16) };
}

/// Bytes that the application has not read and never will: TCP answers them with a reset.
fn unread(sock: BorrowedFd<'_>) -> bool {
    let mut b = [0u8; 1];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    rustix::net::recv(sock, &mut b[..], flags).is_ok_and(|(n, _)| n > 0)
}

/// What is left to do after a look.
enum Step {
    /// The sending direction is on TCP.
    Down,
    /// Later.
    Wait,
    Failed(Reason),
}

impl Rails {
    /// Looks after all lanes if it is time; when to look next, if anything is under way.
    pub(super) fn tend(&mut self, now: u64, locked: Locked<'_>) -> Option<u64> {
        if now < self.tend_at {
            return Some(self.tend_at);
        }
        self.sweep_making(now);
        let all: Vec<Key> = self.lanes.keys().copied().collect();
        let mut more = false;
        for k in all {
            more |= self.tend_one(k, now, locked);
        }
        let making = self.lanes.values().any(|l| l.stage == Stage::Making);
        let dt = match (more, making) {
            (true, _) => TICK_NS,
            (false, true) => 1_000_000_000,
            (false, false) if now < self.busy_until => LATE_NS,
            _ => u64::MAX - now,
        };
        self.tend_at = now + dt;
        (dt < u64::MAX - now).then_some(self.tend_at)
    }

    /// One lane; whether something is under way.
    fn tend_one(&mut self, at: Key, now: u64, locked: Locked<'_>) -> bool {
        let Some(l) = self.lanes.get_mut(&at) else {
            return false;
        };
        if l.stage != Stage::Offered {
            return false;
        }
        let Some(bank) = self.banks.get(&at.0) else {
            return false;
        };
        let Some(m) = bank.shore.custodian(at.1) else {
            return false;
        };
        let node = self.nodes.get_mut(&l.node).filter(|n| n.life == bank.life);
        let rail = node.as_ref().is_some_and(|n| n.up);
        let state = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        let phase = bits_of(state);
        if l.ending.is_none() && l.custody.is_none() {
            let late = phase == tx::DOWNING || phase == tx::UP && !rail && accepted(&m, state);
            if !late || through(&m, state) || l.sock.is_none() {
                l.late_since = None;
                return false;
            }
            let since = *l.late_since.get_or_insert(now);
            if now < since + LATE_NS {
                return true;
            }
        }
        let Some(sock) = l.sock.as_ref().map(AsFd::as_fd) else {
            // It never came, so nothing was ever put on the ring.
            match l.ending {
                Some(Ending::Over) => self.leave(at),
                _ => l.ending = None,
            }
            return false;
        };
        let port = Sock(sock);
        let over = l.ending == Some(Ending::Over);
        let step = match &mut l.custody {
            None => match take(&m, &port, l.tag, state, || !over && locked(&l.who)) {
                Taken::No => return true,
                Taken::Down => Step::Down,
                Taken::Failed(r) => Step::Failed(r),
                Taken::Yes(tx) => {
                    l.custody = Some(Box::new(Custody {
                        tx,
                        moved: (0, now),
                    }));
                    Step::Wait
                }
            },
            Some(_) => Step::Wait,
        };
        let step = match (step, &mut l.custody) {
            (Step::Wait, Some(c)) => {
                let fin = l.fin && rail && now < l.ending_since + FLUSH_NS;
                let mut take_down = || {
                    if let (Some(n), Some(id)) = (self.nodes.get_mut(&l.node), l.engine) {
                        n.pair.take_down(id);
                    }
                };
                let r = if fin && c.tx.is_up() {
                    match c.tx.finish(&m, &port) {
                        Ok(Progress::Blocked) if c.tx.is_up() => Ok(Progress::Blocked),
                        r => {
                            take_down();
                            r
                        }
                    }
                } else {
                    take_down();
                    c.tx.down(&m, &port)
                };
                let at_kernel = c.tx.kpos.load(Relaxed);
                if c.moved.0 != at_kernel {
                    c.moved = (at_kernel, now);
                }
                match r {
                    Err(r) => Step::Failed(r),
                    Ok(_) if c.tx.mode.load(Relaxed) == mode::TCP => Step::Down,
                    Ok(_) if over && now >= c.moved.1 + ORPHAN_NS => Step::Failed(Reason::Stalled),
                    Ok(_) => Step::Wait,
                }
            }
            (s, _) => s,
        };
        match step {
            Step::Wait => {
                // The engine has to be told once that nothing will follow.
                if let (Some(_), Some(n), Some(id)) =
                    (l.ending, self.nodes.get_mut(&l.node), l.engine)
                {
                    n.pair.finish(id);
                }
                true
            }
            Step::Failed(r) => {
                self.fail(at, r);
                false
            }
            Step::Down => {
                if l.custody.take().is_some() && bank.shore.publish(at.1) {
                    link::doorbell::ring(bank.bell.as_fd());
                }
                l.late_since = None;
                l.ending = None;
                if std::mem::take(&mut l.fin) && !(over && unread(sock)) {
                    let _ = rustix::net::shutdown(sock, rustix::net::Shutdown::Write);
                }
                if over {
                    self.leave(at);
                }
                false
            }
        }
    }
}

/// Has the far node taken the switch to this state's epoch?
fn accepted(m: &Memory<'_>, state: u64) -> bool {
    let word = m.peer_rx().word.load(Relaxed); // our own word
    epoch_of(word) == epoch_of(state) && bits_of(word) & link::layout::rx::ACCEPTED != 0
}

/// Was this epoch in custody before, and has its end not looked since?
fn through(m: &Memory<'_>, state: u64) -> bool {
    m.peer_rx().custody.load(Relaxed) == pack(epoch_of(state), custody::DONE)
}

enum Taken {
    No,
    Yes(TxState),
    /// There is nothing to take: the direction is on TCP.
    Down,
    Failed(Reason),
}

/// Takes a direction over, unless its end is at it.
fn take(m: &Memory<'_>, port: &Sock<'_>, tag: u64, state: u64, locked: impl Fn() -> bool) -> Taken {
    if through(m, state) {
        return Taken::Down;
    }
    let word = &m.peer_rx().custody;
    let epoch = epoch_of(state);
    // SYNC custody: we store our word, then look at the lock; the end takes the lock, then looks at
    // our word.
    word.store(pack(epoch, custody::TAKEN), SeqCst);
    fence(SeqCst);
    let back = || word.store(pack(epoch, 0), SeqCst);
    if locked() {
        back();
        return Taken::No;
    }
    // It may have gone on until a moment ago.
    if m.own_tx().state.load(Acquire) != state {
        back();
        return Taken::No;
    }
    let tx = TxState::default();
    match tx.adopt(m, port, tag) {
        Ok(Adopted::Ring) => Taken::Yes(tx),
        Ok(Adopted::Asking) => {
            back();
            Taken::No
        }
        Ok(Adopted::Tcp) => {
            back();
            Taken::Down
        }
        Err(r) => Taken::Failed(r),
    }
}
