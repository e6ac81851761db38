//! Lanes whose process has finished with them, or never takes them.

use super::*;
use lane::abi::takeover;

/// A receiver rests within a stream whose sender has shut down, and then reads the rest: it finds the end at once, and not
/// with the daemon's next look.
#[test]
fn the_end_comes_as_soon_as_all_is_read() {
    for prefix in [0, 10] {
        let s = Story::up(prefix);
        s.send(1, 1000);
        s.carry();
        if prefix == 0 {
            s.recv(0, 300);
        }
        let taken = s.takeover_of(1);
        s.shutdown(1);
        let helped = || s.w.nodes[1].machine.helped();
        let turn = || {
            s.w.pass(MS / 20);
            (0..2).for_each(|n| s.serve(n));
        };
        (0..40).for_each(|_| turn());
        let jobs = helped();
        let looked = (0..200).any(|_| {
            turn();
            helped() > jobs
        });
        assert!(looked, "the daemon looks again and again");
        assert_eq!(taken(), takeover::TAKEN);
        s.recv(0, 10);
        s.recv_all(0);
        assert_eq!(s.got(), 1000 + prefix);
        (0..20).for_each(|_| turn());
        assert_eq!(taken(), takeover::DONE, "within a millisecond");
        s.whole(0);
    }
}
