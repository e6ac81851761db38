//! The control path: hello, registration, pairing, links, lanes, as a shim sees them.

mod common;
use common::*;
use link::msg::{ToDaemon, ToShim};
use link::reason::Reason;

#[test]
fn two_ends_get_one_lane() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    assert_eq!(
        (x.link, x.lane, x.tag, x.epoch),
        (y.link, y.lane, y.tag, y.epoch)
    );
    assert_ne!(x.side, y.side);
    assert_ne!(x.tag, 0);
    let s = d.until("the lane", |s| s.lanes == 1);
    assert_eq!((s.parties, s.links, s.registered, s.paired), (2, 1, 2, 1));
    let _ = (
        ToDaemon::Forget { conn: 0, gen: 0 },
        ToShim::Credit { n: 0 },
        Reason::None,
    );
}
