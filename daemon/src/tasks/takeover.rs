//! Carries takeovers within the node out, each a task of its own: helpers make the steps, and no helper waits for TCP.

use crate::core::takeover::Ordered;
use crate::core::Shared;
use crate::lanes::takeover::Step;

pub(crate) async fn take_over(shared: Shared, ordered: Ordered) {
    let Ordered {
        mut takeover,
        payer,
        at,
        uses,
        side,
        who,
    } = ordered;
    let brought = loop {
        let job = payer.job();
        let made = tokio::task::spawn_blocking(move || {
            let step = takeover.step();
            (takeover, step)
        });
        let made = made.await;
        drop(job);
        match made {
            Ok((t, Step::Again(rest))) => {
                takeover = t;
                tokio::time::sleep(rest).await;
            }
            Ok((_, Step::Over(brought))) => break brought,
            Err(_) => break false,
        }
    };
    let mut core = shared.borrow_mut();
    core.counters.taken_over += u64::from(brought);
    core.taken_over(at, uses, side, who);
}
