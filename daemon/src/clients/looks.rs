//! Looks that several callers share: all who ask while one is in progress share the next one.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// When somebody asked, and what was seen.
type Late<T> = (Instant, Arc<T>);

/// What the callers share.
pub struct Looks<T> {
    turn: tokio::sync::Mutex<()>,
    /// How many have begun.
    begun: Cell<u64>,
    /// Callers that wait for their turn.
    waiting: Cell<usize>,
    /// Number and result of the last look; kept only while somebody waits.
    last: RefCell<Option<(u64, Arc<T>)>>,
    /// What those saw who may not look again so soon, and when they asked.
    late: RefCell<HashMap<String, Late<T>>>,
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        Looks {
            turn: tokio::sync::Mutex::default(),
            begun: Cell::default(),
            waiting: Cell::default(),
            last: RefCell::default(),
            late: RefCell::default(),
        }
    }
}

impl<T> Looks<T> {
    /// The result of a look that begins after this call, made by this caller or by another one.
    pub async fn share<F: Future<Output = T>>(&self, look: impl FnOnce() -> F) -> Arc<T> {
        let wanted = self.begun.get() + 1;
        self.waiting.set(self.waiting.get() + 1);
        let _turn = self.turn.lock().await;
        self.waiting.set(self.waiting.get() - 1);
        let found = self.last.borrow().clone().filter(|l| l.0 >= wanted);
        let (number, rows) = match found {
            Some(l) => l,
            None => {
                self.begun.set(self.begun.get() + 1);
                (self.begun.get(), Arc::new(look().await))
            }
        };
        *self.last.borrow_mut() = (self.waiting.get() > 0).then(|| (number, rows.clone()));
        rows
    }

    /// The same for `who`; whoever asks again within this time gets the same once more.
    pub async fn share_late<F: Future<Output = T>>(
        &self,
        (who, time): (&str, Duration),
        look: impl FnOnce() -> F,
    ) -> Arc<T> {
        let now = Instant::now();
        self.late.borrow_mut().retain(|_, l| l.0.elapsed() < time);
        if let Some((_, rows)) = self.late.borrow().get(who) {
            return rows.clone();
        }
        let rows = self.share(look).await;
        let late = (now, rows.clone());
        self.late.borrow_mut().insert(who.to_owned(), late);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever asks while somebody looks gets what the next look shows, and all of them the same one.
    #[tokio::test(flavor = "current_thread")]
    async fn callers_share_the_next_look() {
        let (looks, taken) = (Looks::<Vec<()>>::default(), Cell::new(0));
        let ask = || {
            looks.share(|| async {
                taken.set(taken.get() + 1);
                tokio::task::yield_now().await;
                Vec::new()
            })
        };
        let (a, b, c, d) = tokio::join!(ask(), ask(), ask(), ask());
        assert_eq!(taken.get(), 2);
        assert!(Arc::ptr_eq(&b, &c) && Arc::ptr_eq(&c, &d) && !Arc::ptr_eq(&a, &b));
        let (_, again) = (ask().await, ask().await);
        assert_eq!(taken.get(), 4, "nobody waited");
        let time = Duration::from_secs(1000);
        let once = looks.share_late(("a", time), || async { Vec::new() }).await;
        let twice = looks.share_late(("a", time), || async { panic!("looked again") });
        assert!(Arc::ptr_eq(&once, &twice.await));
        let other = looks.share_late(("b", time), || async { Vec::new() }).await;
        assert!(!Arc::ptr_eq(&once, &other));
        assert!(!Arc::ptr_eq(&again, &d) && looks.last.borrow().is_none());
    }
}
