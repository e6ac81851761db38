//! A revocation while the daemon that would pass the answer on is gone.

use super::*;

/// A receiver leaves and has read nothing of the ring, but the daemon that would tell it of a way down without a frame
/// dies: the sender writes one, which needs nobody.
#[test]
fn a_revocation_that_nobody_can_answer() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 0, Act::Revoke);
    assert!(w.host[0].revoking.get());
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::DaemonDies);
    op(&mut w, 1, Act::Look);
    assert_eq!(on_tcp(&w), LEN + 100);
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].revoking.get() && !w.host[0].rx.engaged());
    whole(&w, 100, false);
}
