//! How a channel is told to end, by any code that finds a reason for it.

use super::msg::CloseReason;
use std::cell::RefCell;
use tokio::sync::Notify;

/// Tells a channel to end.
#[derive(Default)]
pub struct Cut {
    why: RefCell<Option<(CloseReason, String)>>,
    told: Notify,
}

impl Cut {
    pub fn now(&self, code: CloseReason, why: &str) {
        self.why
            .borrow_mut()
            .get_or_insert_with(|| (code, why.into()));
        self.told.notify_one();
    }

    pub async fn wait(&self) -> (CloseReason, String) {
        loop {
            if let Some(w) = self.why.borrow().clone() {
                return w;
            }
            self.told.notified().await;
        }
    }
}
