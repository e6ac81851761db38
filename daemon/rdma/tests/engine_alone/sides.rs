//! A lane's two directions, brought onto their rings, and the words of either end.

use crate::bench::*;
use crate::peer::BYTES;
use lane::abi::{loc_index, rx, tx, Cursor, Epoch, Loc, RxFlags, RxWord, TcpPos, TxPhase, TxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::{Event, Fault, LaneId, LinkId};
use underpass_rdma::verbs::Memory;
use underpass_rdma::wire::{Body, Cdc, Place};

/// The peer's memory, by the number that it tells.
pub const REGION: u32 = 9;

/// The epoch `n` of the lane.
pub fn e(n: u32) -> Epoch {
    Epoch::new(BASE.get() + n)
}

pub fn c(bytes: u64) -> Cursor {
    Cursor::new(bytes)
}

pub fn loc(page: u32, log2: u32) -> Loc {
    let chunk = 1;
    Loc { chunk, page, log2 }
}

pub fn place(offset: u64) -> Place {
    let region = REGION;
    Place { region, offset }
}

/// What somebody says, and why the lane fails then, if it does.
pub type Case = (fn(&mut Side), Option<&'static str>);

/// A lane in slot 0 that goes over a link.
pub struct Side {
    pub b: Bench,
    pub no: LinkId,
    pub id: LaneId,
    /// What the peer says of it in its next snapshot.
    pub says: Cdc,
}

impl Side {
    /// A link that is not confirmed, and no lane yet.
    pub fn waiting(mut b: Bench) -> Side {
        let no = b.connected().link;
        Side {
            b,
            no,
            id: 0,
            says: cdc(),
        }
    }

    pub fn new(mut b: Bench) -> Side {
        let no = b.link();
        let mut s = Side {
            b,
            no,
            id: 0,
            says: cdc(),
        };
        s.tell_key(s.no);
        s.id = s.b.lane(0);
        s.received();
        s
    }

    pub fn tell_key(&mut self, no: LinkId) {
        let rail = self.b.rail_of(no);
        let key = self.b.peer.key(rail);
        self.b.peer.say(no, REGION, Body::ConfirmRkey(Some(key)));
        self.b.settle();
    }

    /// The peer sends its snapshot, with bytes behind it.
    pub fn snapshot_with(&mut self, data: &[u8]) {
        let body = Body::Cdc(self.says);
        self.say_with(body, data);
    }

    pub fn snapshot(&mut self) {
        self.snapshot_with(&[]);
    }

    pub fn say_with(&mut self, body: Body, data: &[u8]) {
        self.b.peer.say_of(self.no, self.id, body, data);
        self.b.settle();
    }

    pub fn say(&mut self, body: Body) {
        self.say_with(body, &[]);
    }

    /// Why the lane has failed, if it has.
    pub fn fault(&mut self) -> Option<Fault> {
        let all = self.b.happened();
        all.iter().find_map(|e| match e {
            Event::LaneFailed { fault, .. } => Some(*fault),
            _ => None,
        })
    }

    /// What the pair has said about the lane.
    pub fn received(&mut self) -> Vec<Body> {
        let all = self.b.peer.bodies(self.no);
        let of_lane = all.into_iter().filter(|(token, _)| *token == TOKEN);
        of_lane.map(|(_, body)| body).collect()
    }

    /// Its last snapshot among these.
    pub fn last_snapshot(&mut self) -> Option<Cdc> {
        let last = |b: &Body| match b {
            Body::Cdc(c) => Some(*c),
            _ => None,
        };
        self.received().iter().rev().find_map(last)
    }

    /// What the application is shown of the peer's reader, and of its sender.
    pub fn shown(&self) -> RxWord {
        self.b.proxy().rx[0].word.load(Relaxed)
    }

    pub fn shown_sender(&self) -> TxWord {
        self.b.proxy().tx[0].state.load(Relaxed)
    }

    /// The application's reader says this.
    pub fn reader(&mut self, epoch: Epoch, flags: RxFlags) {
        let word = RxWord::new(epoch, flags);
        self.b.app().rx[0].word.store(word, Relaxed);
        self.b.publish();
    }

    /// The application's sender says this.
    pub fn sender(&mut self, epoch: Epoch, phase: TxPhase) {
        let word = TxWord::new(epoch, phase);
        self.b.app().tx[0].state.store(word, Relaxed);
        self.b.publish();
    }

    /// The application's sender is on another ring from here on.
    pub fn ring(&mut self, seq: u32, at: Loc, from: u64) {
        let w = &self.b.app().tx[0];
        w.loc[loc_index(seq)].store(at.word(), Relaxed);
        w.loc_from[loc_index(seq)].store(c(from), Relaxed);
        w.loc_seq.store(seq, Relaxed);
    }

    /// It has put bytes there, up to this head: each is the low byte of its cursor.
    pub fn put(&mut self, at: Loc, from: u64, to: u64) {
        for i in from..to {
            let offset = u64::from(at.page) * 4096 + at.offset(c(i));
            assert!(self.b.clients[0].chunk.write(offset as usize, &[i as u8]));
        }
        self.b.app().heads[0].store(c(to), Relaxed);
        self.b.publish();
    }

    /// The peer's reader is ready in this epoch.
    pub fn peer_ready(&mut self, epoch: Epoch) {
        (self.says.rx_epoch, self.says.rx_flags) = (epoch, rx::READY);
        self.snapshot();
    }

    /// The application asks to go up at `start`, on a ring from `from` on; nothing is answered.
    pub fn ask(&mut self, epoch: Epoch, at: Loc, start: u64) {
        self.ring(1, at, start);
        self.b.app().heads[0].store(c(start), Relaxed);
        self.b.app().tx[0].up_start.store(c(start), Relaxed);
        self.b.app().tx[0].up_tcp_pos.store(TcpPos::new(5), Relaxed);
        self.sender(epoch, tx::UP);
    }

    /// The sending direction is on a ring of 4 KiB at the beginning of the chunk, and of the peer's memory.
    pub fn up(&mut self) {
        self.peer_ready(e(1));
        self.ask(e(1), loc(0, 12), 0);
        self.answer_ring(1, 0);
        self.answer_switch(e(1), 1, true);
        self.received();
    }

    pub fn answer_ring(&mut self, moves: u32, offset: u64) {
        assert!(offset < BYTES as u64);
        let place = Some(place(offset));
        self.say(Body::RingReply { moves, place });
    }

    pub fn answer_switch(&mut self, epoch: Epoch, attempt: u32, ok: bool) {
        let body = Body::SwitchReply { epoch, attempt, ok };
        self.say(body);
        if ok {
            self.says.rx_epoch = epoch;
        }
    }

    /// The receiving direction is on a ring of 4 KiB, from cursor 0 on.
    pub fn incoming(&mut self) {
        self.reader(e(1), rx::READY);
        let (moves, log2, from) = (1, 12, c(0));
        self.say(Body::Ring { moves, log2, from });
        self.say(Body::Switch {
            epoch: e(1),
            attempt: 1,
            tcp_pos: TcpPos::new(0),
            start: c(0),
        });
        (self.says.tx_epoch, self.says.tx_phase) = (e(1), tx::UP);
        self.says.moves = 1;
        self.received();
    }

    /// The application's reader has consumed everything up to here.
    pub fn read_to(&mut self, at: u64) {
        self.b.app().cursors[0].store(c(at), Relaxed);
        self.b.publish();
    }

    /// Bytes in the peer's memory.
    pub fn arrived(&self, from: usize, n: usize) -> Vec<u8> {
        let mut all = vec![0; n];
        assert!(self.b.peer.memory.read(from, &mut all));
        all
    }
}
