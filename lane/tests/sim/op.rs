//! What can happen in the world.

use super::World;

/// What an end can do.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// The application sends; natively where the lane says so. `up`: switches up when it may.
    Send {
        len: usize,
        up: bool,
    },
    Recv {
        len: usize,
        peek: bool,
        discard: bool,
        look: bool,
    },
    Ready,
    TryUp,
    Down,
    WantDown,
    UnwantDown,
    Revoke,
    Look,
    Probe,
    /// FIONREAD; the answer is in `Host::unread`.
    Unread,
    /// Another thread's send, or SO_ERROR, takes the error that was kept for the receiver.
    TakeError,
    Move {
        log2: u32,
    },
    ShutWr,
    Close,
    Kill,
    Attach {
        log2: u32,
    },
    /// The network carries bytes that this end has sent.
    Deliver {
        n: usize,
    },
    /// The kernel's buffers for what this end sends.
    Buffers {
        snd: usize,
        rcv: usize,
        piece: usize,
        more: usize,
    },
    /// This end's application asks for sizes of buffers (0: it does not).
    Sizes {
        sndbuf: u32,
        room: u32,
    },
    /// The node's daemon brings what this end sends to TCP in its stead, if its receiver has revoked (`own`: also if
    /// this end is on its way down and asks for it); or goes on with that.
    /// `early`: it has looked whether the end is at work just before the end's present call.
    TakeOver {
        own: bool,
        early: bool,
    },
    /// This end's process loses its control connection to the daemon, and gets no other one.
    Cut,
    /// A thread takes the lock of this end's sending direction, and has not looked yet.
    Wake,
    /// It goes on: looks, or goes down.
    Woken {
        down: bool,
    },
    /// This end leaves its lane, both ways, or goes on with that.
    Leave,
    /// It leaves its lane, and its process then executes another program, which has the connection.
    Exec,
    /// If the other end has given its lane back: so does this one.
    Retire,
    /// This end has revoked, its sender is gone, and it goes on with what the ring has.
    Withdraw,
    /// So many milliseconds pass.
    Pass {
        ms: u64,
    },
    /// The daemon dies, and no other one comes.
    DaemonDies,
    /// This end has noticed that.
    Reclaim,
    /// The old connection is over on both ends; a new one uses the same lane.
    Reuse {
        gap: u32,
    },
}

/// An action, and what happens in the middle of it, each after so many more system calls or
/// publishes (0: at the same point as the one before).
#[derive(Clone, Debug)]
pub struct Op {
    pub end: usize,
    pub act: Act,
    pub inner: Vec<(usize, usize, Act)>,
}

/// Runs one operation that nothing interrupts.
pub fn op(w: &mut World, end: usize, act: Act) {
    w.run(&Op {
        end,
        act,
        inner: vec![],
    });
}

pub fn send(len: usize) -> Act {
    Act::Send { len, up: false }
}

pub fn recv(len: usize) -> Act {
    Act::Recv {
        len,
        peek: false,
        discard: false,
        look: true,
    }
}

/// The network carries everything.
pub const ALL: Act = Act::Deliver { n: 1 << 20 };

/// The daemon brings the end's direction to TCP, or goes on with that.
pub const TAKE_OVER: Act = Act::TakeOver {
    own: false,
    early: false,
};

/// The kernel's buffers for what an end sends.
pub fn buffers(snd: usize, rcv: usize) -> Act {
    Act::Buffers {
        snd,
        rcv,
        piece: 1 << 20,
        more: 0,
    }
}

/// Both ends attached; end 0 ready to receive.
pub fn ready() -> World {
    ready_in(12)
}

/// The same, in rings of some other size.
pub fn ready_in(log2: u32) -> World {
    let mut w = World::new();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2 });
    }
    op(&mut w, 0, Act::Ready);
    w
}

/// The direction from end 1 to end 0 is on its ring, and the receiver has said that it reads there.
pub fn past() -> World {
    let mut w = up();
    op(&mut w, 0, recv(1));
    w
}

/// The direction from end 1 to end 0 is on its ring.
pub fn up() -> World {
    up_in(12)
}

/// The same, in rings of some other size.
pub fn up_in(log2: u32) -> World {
    let mut w = ready_in(log2);
    op(&mut w, 1, Act::TryUp);
    assert!(w.host[1].tx.is_up());
    w
}
