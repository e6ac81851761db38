//! Ends that came to their process from another one.

use super::{Core, RETRY_SOON_MS, RETRY_UNPROVEN_MS};
use crate::clients::ids::ConnRef;
use crate::lanes::holders::{Asked, Came, Verdict};
use crate::pairing::socket::End;
use lane::proto::msg::register;
use lane::proto::reason::Reason;
use underpass_rdma::verbs::Provider;

/// Retry time if another process holds the connection.
const RETRY_HELD_MS: u32 = 2000;
/// Number of connections whose other holder is remembered.
const REMEMBERED_MAX: usize = 4096;

impl<V: Provider> Core<V> {
    /// A registered end came from another process: asks for its holders.
    pub(crate) fn look_for_holders(&mut self, who: ConnRef, mut end: End, came: Came, flags: u32) {
        let Some(p) = self.clients.get(&who.client) else {
            return;
        };
        if p.family.view(who.conn).is_none_or(|v| v.gen != who.gen) {
            return self.registered(who, Ok(end)); // which declines it
        }
        let is = |bit| flags & bit != 0;
        end.guess = (!is(register::CERTAIN)).then_some(is(register::CLIENT));
        let (pid, known_pids) = (p.proc_id.pid, p.own_pid == p.proc_id.pid);
        let asked = Asked {
            who,
            end,
            came,
            eager: is(register::EAGER),
            miscounted: is(register::MISCOUNTED),
            pid,
            known_pids,
        };
        self.holders.asked.insert((who.client, who.conn), asked);
        self.holders.news.notify_one();
    }

    /// The holders of an end were looked up.
    pub fn looked_at_holders(&mut self, asked: Asked, verdict: Verdict) {
        let (who, eager) = (asked.who, asked.eager);
        self.judged(asked, verdict);
        if eager {
            self.start_search(who);
        }
    }

    fn judged(&mut self, asked: Asked, verdict: Verdict) {
        let inode = asked.end.inode;
        self.holders.others.remove(&inode);
        let (reason, retry_ms) = match verdict {
            Verdict::Alone if asked.miscounted => (Reason::Bypassed, RETRY_UNPROVEN_MS),
            // A record allows pairing with other nodes, so it must confirm the shim's guess here. An end without a
            // record can only be paired on this node, where its other end confirms the guess.
            Verdict::Alone if asked.end.record.is_none() || asked.end.confirmed(None) => {
                return self.registered(asked.who, Ok(asked.end));
            }
            Verdict::Alone => (Reason::Unproven, RETRY_UNPROVEN_MS),
            Verdict::Held(by) => {
                if self.holders.others.len() >= REMEMBERED_MAX {
                    self.holders.others.clear();
                }
                self.holders.others.insert(inode, by);
                // The extra descriptor may be the process's own: a call may have made it after the shim had
                // counted.
                let itself = by == asked.pid;
                let retry_ms = if itself { RETRY_SOON_MS } else { RETRY_HELD_MS };
                (Reason::HeldElsewhere, retry_ms)
            }
            Verdict::Unseen => (Reason::Unseen, RETRY_UNPROVEN_MS),
        };
        let p = self.clients.get_mut(&asked.who.client);
        if p.is_some_and(|p| p.under_way.remove(&(asked.who.conn, asked.who.gen))) {
            self.decline(asked.who, reason, Reason::None, retry_ms);
        }
    }
}
