//! Rails and links: how links are made, fail and are retired (known to be destroyed at both ends).
//!
//! When a link fails, our end is destroyed first; then the peer is told so, repeatedly, until it has reported the
//! same of its end. Only then may anything that was in flight be written again over another link: no late write can
//! land any more. Link numbers are never used twice in a pair.

use super::api::{Control, Event, LinkView, Rail, Stats};
use super::link::{Link, Outcome, State, COMPLETIONS};
use super::request::What;
use super::{Host, LinkId, Pair, RailId};
use crate::verbs::{Device, Gid, Provider};
use crate::wire::{Body, LinkEnd};
use lane::abi::{Cursor, Epoch};
use litemap::LiteMap;

pub(super) struct RailState<P: Provider> {
    pub rail: Rail<P::Device>,
    pub pd: P::Pd,
    up: bool,
    next_offer: u64,
    /// Until when no lane moves here only because the rail suits it, and for how long after the next failure.
    distrusted: u64,
    distrust: u64,
}

/// After a link has failed with lanes on it, its rail is distrusted for this many times `retry_ns`, doubling with each
/// failure up to the second number: small messages may pass where large ones do not, and a lane that comes back each time
/// would stall each time. A link that has worked for the third number of them wipes that out.
const DISTRUST: (u64, u64, u64) = (10, 640, 300);

/// A link whose end here is destroyed.
pub(super) struct Dead {
    /// The peer has reported that its end is destroyed, too.
    pub peer: bool,
    /// The peer has acknowledged our report.
    told: bool,
    next_try: u64,
}

/// A link that works, for sending messages.
pub(super) fn an_active<P: Provider>(links: &mut LiteMap<LinkId, Link<P>>) -> Option<&mut Link<P>> {
    let active = |l: &&mut Link<P>| l.state == State::Active;
    links.iter_mut().map(|(_, l)| l).find(active)
}

impl<P: Provider> Pair<P> {
    /// Adds a port; links over it are made as soon as the peer has a port of the same fabric.
    pub fn add_rail(&mut self, rail: Rail<P::Device>) -> Result<RailId, crate::verbs::Error> {
        let pd = rail.device.alloc_pd()?;
        let id = self.next.rail;
        self.next.rail += 1;
        let state = RailState {
            rail,
            pd,
            up: true,
            next_offer: 0,
            distrusted: 0,
            distrust: DISTRUST.0 * self.config.retry_ns,
        };
        self.rails.insert(id, state);
        self.link_timer = 0;
        self.register_all(id);
        Ok(id)
    }

    /// The device reports its port as up or down. If it is down, its links are destroyed at once.
    pub fn set_rail(&mut self, id: RailId, up: bool) {
        if let Some(r) = self.rails.get_mut(&id) {
            r.up = up;
            r.next_offer = 0;
            r.distrusted = 0;
        }
        self.link_timer = 0;
        if !up {
            self.fail_rail(id, "the port is down");
        }
    }

    /// The device is gone, or its port has another address: drops everything that was made of it.
    pub fn remove_rail(&mut self, id: RailId) {
        self.fail_rail(id, "the device is gone");
        self.deregister_all(id);
        self.rails.remove(&id);
        self.lanes.each(|_, l| {
            l.ranks.remove(&id);
        });
    }

    /// The device reports that a queue pair has failed.
    pub fn qp_failed(&mut self, rail: RailId, qpn: u32) {
        let of = |(no, l): (&u32, &Link<P>)| (l.rail == rail && l.ours.qpn == qpn).then_some(*no);
        if let Some(no) = self.links.iter().find_map(of) {
            self.fail_link(no, "the device gave the queue pair up");
        }
    }

    fn fail_rail(&mut self, id: RailId, why: &'static str) {
        let of: Vec<_> = self.links.iter().filter(|(_, l)| l.rail == id).collect();
        let of: Vec<_> = of.into_iter().map(|(no, _)| *no).collect();
        for no in of {
            self.fail_link(no, why);
        }
    }

    /// The links that are not destroyed.
    pub fn links(&self) -> Vec<LinkView> {
        let view = |(no, l): (&u32, &Link<P>)| LinkView {
            link: *no,
            rail: l.rail,
            active: l.state == State::Active,
            qpn: l.ours.qpn,
            peer_qpn: l.peer.map_or(0, |p| p.qpn),
            gid: Gid(l.ours.gid),
            peer_gid: Gid(l.peer.map_or([0; 16], |p| p.gid)),
            lanes: l.lanes,
        };
        self.links.iter().map(view).collect()
    }

    /// Counters of this rail since it was added.
    pub fn stats(&self, rail: RailId) -> Stats {
        self.stats.get(&rail).copied().unwrap_or_default()
    }

    /// What a link over this rail counts for a lane.
    pub(super) fn rank(&self, lane: &super::lanes::Lane, rail: RailId) -> u8 {
        let trusted = self
            .rails
            .get(&rail)
            .is_none_or(|r| self.now >= r.distrusted);
        match trusted {
            true => lane.rank(rail),
            false => u8::MAX,
        }
    }

    pub(super) fn any_active(&self) -> bool {
        self.links.values().any(|l| l.state == State::Active)
    }

    /// Processes completions.
    pub(super) fn poll_links(&mut self, host: &mut dyn Host) -> bool {
        let mut worked = false;
        self.full = false;
        let mut all = std::mem::take(&mut self.numbers);
        all.clear();
        all.extend(self.links.keys());
        let mut got = std::mem::take(&mut self.completions);
        for &no in &all {
            got.clear();
            let Some(link) = self.links.get(&no) else {
                continue;
            };
            if link.poll(&mut got).is_err() {
                self.fail_link(no, "the completion queue failed");
                continue;
            }
            worked |= !got.is_empty();
            self.full |= got.len() == COMPLETIONS;
            for c in &got {
                let Some(link) = self.links.get_mut(&no) else {
                    break; // a completion before this one has failed the link
                };
                let rail = link.rail;
                match link.completed(c, self.now) {
                    Outcome::Nothing => {}
                    Outcome::Done(n) => self.done(no, rail, n),
                    Outcome::Message(m, data) => {
                        let done = link.confirmed();
                        self.done(no, rail, done);
                        self.stats.entry(rail).or_default().messages_received += 1;
                        self.on_message(no, m, &data, host);
                    }
                    Outcome::Dead(why) => self.fail_link(no, why),
                    Outcome::Broken(why) => self.fail_pair(why),
                }
            }
            if self.links.get(&no).is_some_and(Link::flooded) {
                self.fail_pair("more requests than can be answered");
            }
        }
        self.completions = got;
        self.numbers = all;
        for (_, link) in self.links.iter_mut() {
            // They keep their order.
            if link.has_room() {
                self.queue.extend(link.waiters.drain(..));
            }
        }
        worked
    }

    fn done(&mut self, no: LinkId, rail: RailId, n: usize) {
        for _ in 0..n {
            let Some(what) = self.links.get_mut(&no).and_then(Link::pop_done) else {
                return;
            };
            let stats = self.stats.entry(rail).or_default();
            match what {
                What::Write { lane, bytes, .. } => {
                    stats.writes += 1;
                    stats.bytes += u64::from(bytes);
                    self.lane_done(lane, None);
                }
                What::Cdc {
                    lane,
                    head,
                    epoch,
                    inlined,
                } => {
                    stats.messages_sent += 1;
                    stats.bytes += u64::from(inlined);
                    stats.inlined += u64::from(inlined);
                    self.lane_done(lane, Some((head, epoch)));
                }
                What::Lane { lane } => {
                    stats.messages_sent += 1;
                    self.lane_done(lane, None);
                }
                What::Llc => stats.messages_sent += 1,
            }
        }
    }

    /// One request of a lane is done; if it was a snapshot, so is everything up to its head.
    fn lane_done(&mut self, id: u32, head: Option<(Cursor, Epoch)>) {
        if let Some(lane) = self.lanes.get_mut(id) {
            lane.under_way = lane.under_way.saturating_sub(1);
            if let Some((head, epoch)) = head {
                lane.out.reached(head, epoch);
            }
            self.wake(id);
        }
    }

    /// Destroys our end and begins to report that to the peer.
    pub(super) fn fail_link(&mut self, no: LinkId, why: &'static str) {
        let Some(link) = self.links.remove(&no) else {
            return;
        };
        let rail = link.rail;
        let was = link.state;
        let (used, since) = (link.lanes > 0, link.since);
        // A handshake that nobody answers goes on for minutes in the kernel: do not start too many at a time.
        let pause = match link.shakes_hands() {
            true => 2 * self.config.setup_ns,
            false => self.config.retry_ns,
        };
        self.link_timer = 0;
        self.queue.extend(link.waiters.iter());
        let offered_to_nobody = was == State::Offered && !self.config.first;
        if link.destroy().is_err() {
            // Writes may still land here, so the peer must not be told that this end is destroyed.
            self.stuck();
            return;
        }
        if !offered_to_nobody {
            let dead = Dead {
                peer: false,
                told: false,
                next_try: self.now,
            };
            self.dead.insert(no, dead);
        }
        let (first, most, long) = DISTRUST;
        let unit = self.config.retry_ns;
        if let Some(r) = self.rails.get_mut(&rail) {
            r.next_offer = self.now + pause;
            if was == State::Active && used {
                if self.now >= since + long * unit {
                    r.distrust = first * unit;
                }
                r.distrusted = self.now + r.distrust;
                r.distrust = (2 * r.distrust).min(most * unit);
            }
        }
        self.stats.entry(rail).or_default().links_failed += 1;
        if was == State::Active {
            self.event(Event::LinkDown {
                link: no,
                rail,
                why,
            });
        }
        for (_, d) in self.dead.iter_mut() {
            d.next_try = self.now; // earlier reports may have been sent over this link
        }
        if self.rail && !self.any_active() {
            self.rail = false;
            self.event(Event::NoRail);
        }
        self.wake_lanes(|_| true);
    }

    /// A queue pair could not be destroyed. The memory that it can write to must stay as it is.
    fn stuck(&mut self) {
        self.stuck = true;
        for (_, c) in self.chunks.iter_mut() {
            c.leak();
        }
        if self.rail && !self.any_active() {
            self.rail = false;
            self.event(Event::NoRail);
        }
        self.fail_pair("a queue pair could not be destroyed");
    }

    /// Both ends of a link are destroyed: nothing that was in flight on it will land any more.
    fn link_retired(&mut self, no: LinkId) {
        self.lanes.each(|_, lane| {
            if lane.link == Some(no) {
                lane.moved();
            }
        });
        self.wake_lanes(|_| true);
    }

    /// The peer reports that its end is destroyed.
    pub(super) fn peer_dead(&mut self, no: LinkId, answer: bool) {
        self.fail_link(no, "the peer gave the link up"); // if it has not failed before
        if let Some(d) = self.dead.get_mut(&no) {
            let news = !d.peer;
            d.peer = true;
            d.told |= answer;
            if d.told {
                self.dead.remove(&no);
            }
            if news {
                self.link_retired(no);
            }
        }
    }

    /// Timers of links: offers, confirmations, silence, and reports of destroyed ends.
    pub(super) fn link_timers(&mut self) {
        if self.failed {
            return;
        }
        let now = self.now;
        let mut gone = Vec::new();
        let mut offers = Vec::new();
        for (no, l) in &mut self.links {
            l.tick();
            match l.state {
                State::Active => match l.asked {
                    Some(at) if now >= at + self.config.quiet_ns => {
                        gone.push((*no, "the peer is silent"));
                    }
                    None if now >= l.last_received + self.config.quiet_ns => {
                        l.asked = Some(now);
                        l.tested.get_or_insert(now);
                        l.say(*no, Body::TestLink { reply: false });
                    }
                    _ => {}
                },
                _ if now >= l.deadline => gone.push((*no, "it was not confirmed in time")),
                State::Offered if now >= l.next_try => {
                    l.next_try = now + self.config.retry_ns;
                    offers.push(l.ours);
                }
                State::Confirming if now >= l.next_try => {
                    l.next_try = now + self.config.retry_ns;
                    l.wake_peer = self.config.first;
                }
                _ => {}
            }
        }
        for (no, why) in gone {
            self.fail_link(no, why);
        }
        for end in offers {
            let body = Body::AddLink {
                reply: false,
                end: Some(end),
            };
            self.tell(end.link, body, Control::QpOffer(end));
        }
        let due = |d: &Dead| !d.told && now >= d.next_try;
        let due: Vec<_> = self.dead.iter().filter(|(_, d)| due(d)).collect();
        let due: Vec<_> = due.into_iter().map(|(no, _)| *no).collect();
        for no in due {
            if let Some(d) = self.dead.get_mut(&no) {
                d.next_try = now + self.config.retry_ns;
            }
            let body = Body::DeleteLink { reply: false };
            self.tell(no, body, Control::QpDead { link: no });
        }
        if self.config.first {
            self.offer();
        }
    }

    /// Sends a message about a link over another link; otherwise over the control channel.
    fn tell(&mut self, no: LinkId, body: Body, otherwise: Control) {
        match an_active(&mut self.links) {
            // Over both, if possible: the message needs no second answer, and one of the two ways may hang.
            Some(link) => {
                link.say(no, body);
                if self.control {
                    self.event(Event::Control(otherwise));
                }
            }
            None if self.control => self.event(Event::Control(otherwise)),
            None => {}
        }
    }

    fn offer(&mut self) {
        let now = self.now;
        let mut wanted = Vec::new();
        for (id, r) in &self.rails {
            let have = self.links.values().filter(|l| l.rail == *id).count();
            let able = self.control || self.rail;
            if able && r.up && have < self.config.links_per_rail && now >= r.next_offer {
                wanted.push(*id);
            }
        }
        for id in wanted {
            if self.links.len() + self.dead.len() >= 2 * self.config.max_links {
                return; // the peer does not confirm destroyed links
            }
            let no = self.next.link;
            self.next.link += 1;
            match self.new_link(no, id) {
                Some(mut link) => {
                    link.deadline = now + self.config.setup_ns;
                    self.links.insert(no, link);
                    self.link_timer = 0;
                }
                None => {
                    if let Some(r) = self.rails.get_mut(&id) {
                        r.next_offer = now + self.config.retry_ns;
                    }
                }
            }
        }
    }

    fn new_link(&mut self, no: LinkId, rail: RailId) -> Option<Link<P>> {
        let psn = (self.random)();
        let r = self.rails.get(&rail)?;
        Link::new(no, rail, &r.rail, &r.pd, &self.config, psn).ok()
    }

    /// The peer offers a link.
    pub(super) fn on_offer(&mut self, end: LinkEnd) {
        let no = end.link;
        if self.failed {
            return;
        }
        if self.config.first || !end.possible() {
            return self.fail_pair("an impossible offer of a link");
        }
        if let Some(l) = self.links.get(&no) {
            let ours = l.ours;
            return self.answer_offer(ours); // the first answer may be lost
        }
        if self.dead.contains_key(&no) {
            return;
        }
        // Numbers only grow; a lower one is a repeated offer of a link that has died since.
        let refuse = no < self.next.link || self.links.len() >= self.config.max_links;
        let fit = |(id, r): (&u32, &RailState<P>)| {
            let have = self.links.values().filter(|l| l.rail == *id).count();
            (r.up && r.rail.fabric == end.fabric).then_some((have, *id))
        };
        let rail = self.rails.iter().filter_map(fit).min().map(|(_, id)| id);
        let link = match rail {
            Some(rail) if !refuse => self.new_link(no, rail).map(|l| (l, rail)),
            _ => None,
        };
        let Some((mut link, rail)) = link else {
            let body = Body::AddLink {
                reply: true,
                end: None,
            };
            return self.tell(no, body, Control::QpRefuse { link: no });
        };
        self.next.link = no.saturating_add(1);
        link.deadline = self.now + self.config.setup_ns;
        let ours = link.ours;
        let connected = match self.rails.get(&rail) {
            Some(r) => link.connect(end, &r.rail, &self.config).is_ok(),
            None => false,
        };
        self.links.insert(no, link);
        if connected {
            self.answer_offer(ours);
        } else {
            self.fail_link(no, "it could not be connected");
        }
    }

    fn answer_offer(&mut self, ours: LinkEnd) {
        let body = Body::AddLink {
            reply: true,
            end: Some(ours),
        };
        self.tell(ours.link, body, Control::QpAnswer(ours));
    }

    /// The peer answers an offer of ours.
    pub(super) fn on_answer(&mut self, end: LinkEnd) {
        let no = end.link;
        if self.failed {
            return;
        }
        if !self.config.first || !end.possible() || no >= self.next.link {
            return self.fail_pair("an impossible answer to an offer");
        }
        let Some(link) = self.links.get_mut(&no) else {
            // We have given this link up; the peer is told so again, even if it had already confirmed that.
            self.dead.entry(no).or_insert(Dead {
                peer: false,
                told: false,
                next_try: self.now,
            });
            return;
        };
        if link.state != State::Offered {
            return; // repeated
        }
        let Some(rail) = self.rails.get(&link.rail) else {
            return;
        };
        match link.connect(end, &rail.rail, &self.config) {
            Ok(()) => {
                link.next_try = self.now + self.config.retry_ns;
                link.say(no, Body::ConfirmLink { reply: false });
            }
            Err(_) => self.fail_link(no, "it could not be connected"),
        }
    }

    pub(super) fn on_refuse(&mut self, no: LinkId) {
        if self
            .links
            .get(&no)
            .is_some_and(|l| l.state == State::Offered)
        {
            let rail = self.links[&no].rail;
            self.fail_link(no, "refused");
            if let Some(r) = self.rails.get_mut(&rail) {
                r.next_offer = self.now + 10 * self.config.retry_ns;
            }
        }
    }

    /// A message on the link itself shows that it works.
    pub(super) fn on_confirm(&mut self, no: LinkId, reply: bool) {
        let Some(link) = self.links.get_mut(&no) else {
            return;
        };
        match (link.state, reply, self.config.first) {
            (State::Confirming, false, false) => link.say(no, Body::ConfirmLink { reply: true }),
            (State::Confirming, true, true) => {}
            _ => return self.fail_pair("a link was confirmed out of turn"),
        }
        link.state = State::Active;
        link.since = self.now;
        let rail = link.rail;
        self.tell_keys(no);
        self.event(Event::LinkUp { link: no, rail });
        if !self.rail {
            self.rail = true;
            self.event(Event::RailBack);
        }
        self.wake_lanes(|_| true);
    }

    pub(super) fn flush_links(&mut self) {
        let mut gone = Vec::new();
        for (no, link) in &mut self.links {
            if link.flush().is_err() {
                gone.push(*no);
            }
        }
        for no in gone {
            self.fail_link(no, "a request could not be posted");
        }
    }

    /// The control channel is new: repeats messages that may have been lost.
    pub(super) fn say_again(&mut self) {
        for (_, l) in self.links.iter_mut() {
            l.next_try = 0;
        }
        for (_, d) in self.dead.iter_mut() {
            d.next_try = 0;
        }
        self.link_timer = 0;
        self.lane_timer = 0;
        self.lanes.each(|_, l| l.say_again());
    }
}
