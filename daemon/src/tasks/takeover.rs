//! Carries takeovers within the node out, each a task of its own: helpers make the steps, and no helper waits for TCP.

use crate::core::takeover::Ordered;
use crate::core::Shared;
use crate::lanes::takeover::Step;
use std::time::Duration;

pub(crate) async fn take_over(shared: Shared, ordered: Ordered) {
    let Ordered {
        mut takeover,
        payer,
        seat,
        direction,
    } = ordered;
    let end = loop {
        let step = move || match takeover.step() {
            Step::Again(rest) => Ok((takeover, rest)),
            // (What it has may block when it is dropped: here, not on the thread that serves everybody.)
            Step::Over(end) => Err(end),
        };
        match super::helped(&payer, step).await {
            Some(Ok((t, rest))) => {
                takeover = t;
                tokio::time::sleep(Duration::from_millis(rest)).await;
            }
            Some(Err(end)) => break end,
            None => break Default::default(),
        }
    };
    drop(seat);
    let mut core = shared.borrow_mut();
    core.counters.taken_over += u64::from(end.brought);
    core.taken_over(direction, end.claimed);
}
