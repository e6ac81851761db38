//! How far a panic goes. Where this daemon reads what others have written, it costs whoever it was about: one connection, one
//! request, one helper's job, the lanes with one node. Such a part says so ([`contained`], [`contain`]). Anywhere else nobody
//! knows what was half done, and the process ends at once, as if every panic aborted it: lanes within the node go on without
//! it, and it is started again.
//!
//! The hook, which runs where the panic is, decides; until it is [`install`]ed (in tests), a panic unwinds as usual.

use std::cell::Cell;
use std::future::Future;
use std::panic::{catch_unwind, AssertUnwindSafe, PanicHookInfo};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

/// What ends with a panic. The places that catch it, and what they do then, are these:
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A program's control connection (`tasks::server`): it is cut, and so are its ends that wait.
    Program,
    /// A request of a tool (`admin::server`): it gets no answer.
    Tool,
    /// A channel to another node's daemon (`tasks::channels`), or the handshake for one: it ends.
    Node,
    /// What a helper looks up or does (`os::pool`, and the runtime's helpers): there is no result.
    Helper,
    /// The engine of the rails to a node (`dataplane::rail`): its incarnation ends, and its lanes go down to TCP.
    Rails,
}

impl Part {
    /// By the names that monitoring shows.
    pub(crate) const ALL: [(Part, &str); 5] = [
        (Part::Program, "program"),
        (Part::Tool, "tool"),
        (Part::Node, "node"),
        (Part::Helper, "helper"),
        (Part::Rails, "rails"),
    ];
}

/// How many there were. Statistics only, which order nothing: all of them are `Relaxed`.
static CAUGHT: [AtomicU64; Part::ALL.len()] = [const { AtomicU64::new(0) }; Part::ALL.len()];

thread_local! {
    /// What this thread works at.
    static AT: Cell<Option<Part>> = const { Cell::new(None) };
}

/// In the order of [`Part::ALL`].
pub(crate) fn caught() -> [u64; Part::ALL.len()] {
    std::array::from_fn(|i| CAUGHT[i].load(Relaxed))
}

/// From now on a panic outside of these parts ends the process.
pub(crate) fn install() {
    std::panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        let Some(part) = AT.get() else {
            tracing::error!("{info}");
            eprintln!("underpassd: {info}"); // (whatever the log lets through)
            std::process::abort()
        };
        let n = CAUGHT[part as usize].fetch_add(1, Relaxed) + 1;
        // Who can cause it can do so again and again.
        if n <= 16 || n.is_power_of_two() {
            tracing::error!(part = ?part, times = n, "a defect, which ends no more than this part: {info}");
        }
    }));
}

/// All that this thread does is such a part.
pub(crate) fn enter(part: Part) {
    AT.set(Some(part));
}

/// Sets what the thread works at back, however this ends.
struct Within(Option<Part>);

impl Drop for Within {
    fn drop(&mut self) {
        AT.set(self.0);
    }
}

/// Does this; `None`: it has panicked. What it has borrowed is free again, and what it has half done the caller mends.
pub(crate) fn contained<T>(part: Part, work: impl FnOnce() -> T) -> Option<T> {
    let _within = Within(AT.replace(Some(part)));
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// The same for what goes on in a task.
pub(crate) fn contain<F: Future>(part: Part, work: F) -> impl Future<Output = Option<F::Output>> {
    Contain {
        part,
        work: Some(Box::pin(work)),
    }
}

struct Contain<F> {
    part: Part,
    work: Option<Pin<Box<F>>>,
}

impl<F: Future> Future for Contain<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = &mut *self;
        let Some(work) = &mut me.work else {
            return Poll::Ready(None);
        };
        match contained(me.part, || work.as_mut().poll(cx)) {
            Some(Poll::Pending) => Poll::Pending,
            Some(Poll::Ready(done)) => Poll::Ready(Some(done)),
            None => {
                let left = me.work.take();
                // (What it holds may be what has panicked.)
                contained(me.part, || drop(left));
                Poll::Ready(None)
            }
        }
    }
}

/// Panics if a test says so: `said` is what such a test sends in place of a message, and it has to be asked for by the
/// environment. Not in what is shipped.
#[cfg(debug_assertions)]
pub(crate) fn injected(said: &[u8], half_done: impl FnOnce()) {
    if said.starts_with(b"test-panic") && std::env::var_os("UNDERPASSD_TEST_PANICS").is_some() {
        half_done();
        panic!("a test wants it");
    }
}

#[cfg(not(debug_assertions))]
pub(crate) fn injected(_: &[u8], _: impl FnOnce()) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_alone() {
        for (n, (part, name)) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, n, "{name}");
        }
        assert_eq!(contained(Part::Tool, || AT.get()), Some(Some(Part::Tool)));
        let inner = || contained(Part::Rails, || panic!("inner")).map(|()| 0);
        assert_eq!(
            contained(Part::Tool, || (inner(), AT.get())),
            Some((None, Some(Part::Tool)))
        );
        assert_eq!(AT.get(), None);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_task_ends_where_it_panics() {
        let shared = std::rc::Rc::new(std::cell::RefCell::new(0));
        let work = async {
            let mut held = shared.borrow_mut();
            *held = 1;
            if *held == 1 {
                panic!("half done");
            }
        };
        assert_eq!(contain(Part::Program, work).await, None);
        assert_eq!(*shared.borrow(), 1, "it is free again");
        let fine = contain(Part::Program, async {
            tokio::task::yield_now().await;
            5
        });
        assert_eq!(fine.await, Some(5));
        assert_eq!(AT.get(), None);
    }
}
