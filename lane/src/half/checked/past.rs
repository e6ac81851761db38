//! The receiver comes from its prefix to the ring while the sender goes down: see [`RxState::past`](super::RxState).

use super::{brings, few, End, World};
use crate::abi::{tx, Epoch, TxWord};
use crate::half::Port;
use crate::prim::Ordering::*;

/// Each byte comes once, from the ring or as plain bytes of TCP, and afterwards both ends are on TCP.
#[test]
fn past_and_down() {
    few(|| {
        let w = World::up();
        assert_eq!(w.send(0, 2), 2);
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            s.tx.down(&s.sender(), &End(&s, 0)).unwrap();
        });
        let mut got = Vec::new();
        w.recv(&mut got);
        t.join().unwrap();
        w.settle(got, 2);
        assert!(!w.rx.engaged() && !w.tx.is_up());
    });
}

/// The receiver revokes as soon as it is past: the sender has written a frame, or plain bytes, or answers.
#[test]
fn past_and_revocation_and_down() {
    few(|| {
        let w = World::up();
        assert_eq!(w.send(0, 1), 1);
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            s.tx.down(&s.sender(), &End(&s, 0)).unwrap();
        });
        let mut got = Vec::new();
        w.recv(&mut got);
        let _ = w.rx.revoke(&w.receiver(), &End(&w, 1)).unwrap();
        t.join().unwrap();
        w.settle(got, 1);
    });
}

/// The daemon brings a direction down whose end was on its way, and had recorded nothing.
#[test]
fn past_and_takeover() {
    few(|| {
        let w = World::up();
        assert_eq!(w.send(0, 1), 1);
        let downing = TxWord::new(Epoch::new(1), tx::DOWNING);
        w.sender().own_tx().state.store(downing, Release);
        let d = w.clone();
        let t = loom::thread::spawn(move || assert!(brings(&d, d.sender(), || false)));
        let mut got = Vec::new();
        w.recv(&mut got);
        t.join().unwrap();
        w.settle(got, 1);
        assert!(End(&w, 1).tcp_unread() == Ok(0));
    });
}

/// A ready receiver reads while the sender switches up and down: no byte of the frame reaches the application.
#[test]
fn ready_and_frame() {
    few(|| {
        let w = World::new();
        let s = w.clone();
        let t = loom::thread::spawn(move || {
            assert_eq!(s.send(0, 1), 1);
            s.tx.try_up(&s.sender(), &End(&s, 0)).unwrap();
            s.tx.down(&s.sender(), &End(&s, 0)).unwrap();
        });
        let mut got = Vec::new();
        w.recv(&mut got);
        w.recv(&mut got);
        t.join().unwrap();
        w.settle(got, 1);
    });
}
