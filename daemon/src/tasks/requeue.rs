//! Puts unread bytes of lanes back to TCP: a task for each request, whose work a helper does.

use crate::core::requeue::Ordered;
use crate::core::Shared;

pub(crate) async fn requeue(shared: Shared, ordered: Ordered) {
    let Ordered {
        requeue,
        who,
        payer,
        seat,
    } = ordered;
    payer.unsaturated().await;
    let job = payer.job();
    let bytes = requeue.bytes;
    let done = tokio::task::spawn_blocking(move || requeue.run()).await;
    drop((job, seat));
    let done = matches!(done, Ok(true)).then_some(bytes);
    shared.borrow_mut().requeued(who, done);
}
