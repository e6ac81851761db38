//! Who reads along on what arrives is told each byte once, before the application sees it.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, Cursor, Epoch, TcpPos};
use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use underpass_rdma::engine::Tap;
use underpass_rdma::verbs::Memory;
use underpass_rdma::wire::Body;

#[derive(Clone, Debug, PartialEq)]
enum Told {
    Up(u64, u64),
    Join(Epoch, u64, u64),
    Arrived(u64, Vec<u8>, u64),
}

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<Told>>>);

struct Reads(Page, Cell<Option<usize>>);

impl Reads {
    fn say(&self, t: Told) {
        self.0 .0.lock().unwrap().push(t);
    }
}

impl Tap for Reads {
    fn up(&mut self, tcp_pos: TcpPos, start: Cursor) {
        self.say(Told::Up(tcp_pos.get(), start.get()));
    }

    fn join(&mut self, epoch: Epoch, tcp_pos: TcpPos, start: Cursor) {
        self.say(Told::Join(epoch, tcp_pos.get(), start.get()));
    }

    fn room(&self) -> Option<usize> {
        self.1.get()
    }

    fn arrived(&mut self, at: Cursor, bytes: Vec<u8>, more: u64) {
        self.say(Told::Arrived(at.get(), bytes, more));
    }
}

impl Page {
    fn take(&self) -> Vec<Told> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn tap(s: &mut Side, room: Option<usize>) -> Page {
    let page = Page::default();
    let reads = Reads(page.clone(), Cell::new(room));
    assert!(s.b.pair.tap(s.id, Box::new(reads)));
    page
}

fn head(s: &Side) -> u64 {
    s.b.proxy().heads[0].load(Relaxed).get()
}

/// Switches and bytes, those behind a message and those that a device has written, also across the end of the ring.
#[test]
fn each_byte_once() {
    let mut s = Side::new(Bench::new(config(true), 1));
    let page = tap(&mut s, Some(10_000));
    s.incoming();
    assert_eq!(page.take(), [Told::Up(0, 0)]);
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    s.snapshot();
    assert_eq!(page.take(), [Told::Arrived(0, b"abc".to_vec(), 0)]);
    let own = s.b.clients[0].own.clone();
    let ring: Vec<u8> = (0..4096u32).map(|n| n as u8).collect();
    assert!(own.write(3, &ring[3..]));
    s.says.head = c(4090);
    s.snapshot();
    assert_eq!(page.take(), [Told::Arrived(3, ring[3..4090].to_vec(), 0)]);
    s.read_to(4090);
    assert!(own.write(0, b"wxyz"));
    s.says.head = c(4100);
    s.snapshot();
    let wanted = [&ring[4090..], b"wxyz"].concat();
    assert_eq!(page.take(), [Told::Arrived(4090, wanted, 0)]);
    assert_eq!((head(&s), s.fault()), (4100, None));
}

/// A switch that is refused is none; bytes on two rings come one after the other.
#[test]
fn switches_and_rings() {
    let mut s = Side::new(Bench::new(config(true), 1));
    let page = tap(&mut s, Some(10_000));
    s.reader(e(1), rx::READY | rx::REVOKED);
    let (moves, log2, from) = (1, 12, c(0));
    s.say(Body::Ring { moves, log2, from });
    let (attempt, tcp_pos, start) = (1, TcpPos::new(7), c(0));
    s.say(Body::Switch {
        epoch: e(1),
        attempt,
        tcp_pos,
        start,
    });
    assert_eq!(page.take(), []);
    s.reader(e(2), rx::READY);
    s.say(Body::Switch {
        epoch: e(2),
        attempt,
        tcp_pos,
        start,
    });
    assert_eq!(page.take(), [Told::Up(7, 0)]);
    (s.says.tx_epoch, s.says.tx_phase, s.says.moves) = (e(2), lane::abi::tx::UP, 1);
    s.says.head = c(2);
    s.snapshot_with(b"ab");
    let (moves, log2, from) = (2, 13, c(4));
    s.say(Body::Ring { moves, log2, from });
    page.take();
    s.says.head = c(4);
    s.snapshot_with(b"cd");
    s.says.moves = 2;
    s.says.head = c(6);
    s.snapshot_with(b"ef");
    let told = [(2, b"cd"), (4, b"ef")].map(|(at, b)| Told::Arrived(at, b.to_vec(), 0));
    assert_eq!(page.take(), told);
    assert_eq!(s.fault(), None);
}

/// What there is no room for is told as missing; who is gone is told nothing more; the application gets all of it.
#[test]
fn without_room() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.incoming();
    let page = tap(&mut s, Some(2));
    assert_eq!(page.take(), [Told::Join(e(1), 0, 0)]);
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    assert_eq!(page.take(), [Told::Arrived(0, b"ab".to_vec(), 1)]);
    let page = tap(&mut s, Some(0));
    page.take();
    s.says.head = c(5);
    s.snapshot_with(b"de");
    assert_eq!(page.take(), [Told::Arrived(3, Vec::new(), 2)]);
    let page = tap(&mut s, None);
    assert_eq!(Arc::strong_count(&page.0), 2);
    page.take();
    s.says.head = c(7);
    s.snapshot_with(b"fg");
    assert_eq!(page.take(), []);
    assert_eq!(Arc::strong_count(&page.0), 1, "it is dropped");
    assert_eq!((head(&s), s.fault()), (7, None));
    assert!(!s
        .b
        .pair
        .tap(s.id + 77, Box::new(Reads(page, Cell::new(None)))));
}
