//! When a connection may be reset: each reset has to be one that nobody could have avoided.

use super::state::receiver::Mode;
use super::state::{Came, Config, Fault, Phase, State};

/// Is there a good reason for a reset now?
fn is_fair(n: &State, c: &Config) -> bool {
    let causes = c.downs + c.wants + c.fails > 0 || n.d1.dead || n.d2.dead;
    match () {
        _ if !n.b.leaving => false,
        // Only what follows on TCP tells whether a switch stands.
        _ if n.b.mode == Mode::Undecided => true,
        // A frame cannot be taken out from behind bytes that nobody has read; and without a rail, nobody tells B
        // whether there will be one.
        _ if n.b.behind_prefix() && (!n.rails() || n.came == Came::Framed && causes) => true,
        // A revocation was answered without a frame, and nobody is left to say so.
        _ if !n.rails() && n.came == Came::Plain { told: true } => true,
        // Those who could answer are gone (and did not answer what nobody could pass on).
        _ if n.gone() && n.d1.dead => n.came != Came::Plain { told: false },
        // Or it sleeps, and does not know that it is alone.
        _ if n.a.away && n.d1.dead => true,
        // TCP may have no room for everything.
        _ => c.room < c.bytes * 2 + 2,
    }
}

/// It has taken too long, or cannot be had.
pub fn reset_or_fault(n: &mut State, c: &Config) {
    if is_fair(n, c) {
        n.reset = true;
    } else {
        n.fault(Fault::Reset);
    }
}

/// B sees an end that no `Fin` has announced. Only if both who could have written one are gone; or if A was not told what
/// became of its switch and has sent nothing since: B cannot tell that from bytes that were on the ring.
pub fn bare_fin(n: &mut State) {
    let untold = n.d2.head == n.d2.tx.start && n.a.w.phase == Phase::Resumed;
    if n.d1.dead && (n.gone() || untold) {
        n.reset = true;
    } else {
        n.fault(Fault::Reset);
    }
}
