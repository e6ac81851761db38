//! The last notable events, for `underpass log`.

use super::Core;
use crate::clients::ids::ClientId;
use std::collections::VecDeque;
use std::time::Duration;
use underpass_rdma::verbs::Provider;

const EVENTS_MAX: usize = 4096;

struct Event {
    /// Milliseconds since the epoch.
    at: u128,
    uid: u32,
    netns: u64,
    text: String,
}

#[derive(Default)]
pub struct Events {
    ring: VecDeque<Event>,
}

/// Who may see an event: whoever it is about.
#[derive(Clone, Copy, Debug)]
pub struct About {
    pub uid: u32,
    pub netns: u64,
}

impl Events {
    /// `at`: since 1970.
    pub fn push(&mut self, at: Duration, about: About, text: String) {
        tracing::debug!("{text}");
        if self.ring.len() == EVENTS_MAX {
            self.ring.pop_front();
        }
        self.ring.push_back(Event {
            at: at.as_millis(),
            uid: about.uid,
            netns: about.netns,
            text,
        });
    }

    /// Lines, newest last, of events that `visible` lets through.
    pub fn lines(&self, visible: impl Fn(About) -> bool) -> Vec<String> {
        let show = |e: &&Event| {
            visible(About {
                uid: e.uid,
                netns: e.netns,
            })
        };
        let line = |e: &Event| format!("{}.{:03} {}", e.at / 1000, e.at % 1000, e.text);
        self.ring.iter().filter(show).map(line).collect()
    }
}

impl<V: Provider> Core<V> {
    /// A span that adds the client's process to what is logged while it is served.
    pub fn span(&self, id: ClientId) -> tracing::Span {
        match self.clients.get(&id) {
            Some(p) => tracing::info_span!("shim", pid = p.proc_id.pid, program = p.comm),
            None => tracing::Span::none(),
        }
    }

    /// Notes an event about a client.
    pub(crate) fn event(&mut self, id: ClientId, what: &str) {
        let Some(p) = self.clients.get(&id) else {
            return;
        };
        let text = format!("{}[{}] {what}", p.comm, p.proc_id.pid);
        let about = About {
            uid: p.uid,
            netns: p.netns,
        };
        self.events.push(self.system.wall(), about, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_and_filtered() {
        let mut e = Events::default();
        for i in 0..EVENTS_MAX as u32 + 10 {
            let about = About {
                uid: i % 2,
                netns: 1,
            };
            e.push(Duration::ZERO, about, format!("event {i}"));
        }
        let all = e.lines(|_| true);
        assert_eq!(all.len(), EVENTS_MAX);
        assert!(all
            .last()
            .unwrap()
            .ends_with(&format!("event {}", EVENTS_MAX + 9)));
        assert_eq!(e.lines(|a| a.uid == 0).len(), EVENTS_MAX / 2);
    }
}
