//! What an end does that leaves its lane, or is about to shut its second direction, and what it waits for.

use super::end::*;
use lane::half::leave::{Attempt, Step};
use lane::half::rx::BeforeDeaf;
use lane::half::Received;
use lane::proto::reason::Reason;

/// A receiver on its ring, where some bytes are unread.
fn on_ring(remote: bool, unread: u64) -> Alone {
    let e = Alone::receiving(remote, 0);
    assert_eq!(recv(&e, 1), Received::Empty);
    e.puts(0, &bytes(0, unread));
    e
}

/// The other end is gone: what waits for it gives up after a while; what is done is done, however long it has taken.
#[test]
fn an_end_whose_peer_is_gone() {
    for (unread, over, waited, step) in [
        (0, true, 1000, Step::Left),
        (0, false, 1000, Step::Left),
        (10, false, 1000, Step::Again),
        (10, true, 0, Step::Again),
        (10, true, 59, Step::Again),
        (10, true, 60, Step::Stuck(Reason::Stalled)),
    ] {
        let e = on_ring(false, unread);
        let attempt = Attempt {
            tx_done: true,
            over,
            option: false,
            waited,
        };
        let is = attempt.step(&e.rx, &e.memory(), &e.tcp);
        assert_eq!(is, step, "{unread} {over} {waited}");
    }
}

/// Before the last direction is shut down, nothing may be unread on the ring; across nodes the direction goes to TCP anyhow.
#[test]
fn before_the_second_shutdown() {
    for (remote, unread, is) in [
        (false, 0, BeforeDeaf::Stays),
        (false, 10, BeforeDeaf::Sender),
        (true, 10, BeforeDeaf::Sender),
    ] {
        let e = on_ring(remote, unread);
        let before = e.rx.before_deaf(&e.memory(), &e.tcp);
        assert_eq!(before, Ok(is), "{remote} {unread}");
    }
    let e = Alone::new(false);
    let before = e.rx.before_deaf(&e.memory(), &e.tcp);
    assert_eq!(before, Ok(BeforeDeaf::OnTcp));
}
