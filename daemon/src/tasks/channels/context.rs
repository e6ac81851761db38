//! What the tasks that make and serve channels share.

use super::tls;
use super::unnamed::Unnamed;
use crate::config::TlsConfig;
use crate::core::Shared;
use crate::nodes::peers::directory::{Directory, Name};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Remaining validity of a certificate below which the log warns, if it is not a large part of all that it had.
const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 86_400);

/// State that these tasks share.
pub(crate) struct Context {
    pub shared: Shared,
    pub directory: Rc<dyn Directory>,
    pub own: Name,
    /// Number of this run of the daemon.
    pub incarnation: u64,
    pub(super) files: TlsConfig,
    pub(super) identity: RefCell<Option<tls::Identity>>,
    pub(super) unnamed: Unnamed,
}

impl Context {
    pub(crate) fn identity(&self) -> Option<tls::Identity> {
        self.identity.borrow().clone()
    }

    /// Reads the certificate files; if that fails, the previous certificates stay in use.
    pub(super) fn load(&self) -> bool {
        let loaded = tls::load(&self.files, &self.own);
        let mut core = self.shared.borrow_mut();
        let Some(peers) = &mut core.peers else {
            return false;
        };
        match loaded {
            Ok(i) => {
                if tls::exposed(&self.files) {
                    tracing::warn!("{}: others can read this key", self.files.key.display());
                }
                let left = tls::left(i.own.not_after);
                let life_s = u64::try_from(i.own.life_s()).unwrap_or(0);
                if left < EXPIRY_WARNING.min(Duration::from_secs(life_s) / 4) {
                    let hours = left.as_secs() / 3600;
                    tracing::warn!("the certificate of node {} ends in {hours} h", self.own);
                }
                peers.node.expires = Some(i.own.not_after);
                peers.node.life_s = Some(i.own.life_s());
                peers.node.trouble.clear();
                *self.identity.borrow_mut() = Some(i);
                true
            }
            Err(e) => {
                let text = e.to_string();
                if peers.node.trouble != text {
                    tracing::error!("certificate not usable: {text}");
                }
                peers.node.trouble = text;
                false
            }
        }
    }

    /// What wakes the dialer of this node, if it is one.
    pub(super) fn redial(&self, node: &Name) -> Option<Rc<Notify>> {
        let core = self.shared.borrow();
        core.peers.as_ref()?.redial(node)
    }

    pub(super) fn up(&self, node: &Name) -> bool {
        let core = self.shared.borrow();
        core.peers.as_ref().is_some_and(|p| p.has_channel(node))
    }
}
