//! Dispatch of messages. A message about a lane that does not exist is ignored (the lane may just have been removed);
//! a message that breaks the rules of a lane fails the lane; one that breaks the rules of the links fails the pair.

use super::api::{Control, Event, Fault};
use super::lanes::Lane;
use super::link::State;
use super::{Host, LaneId, LinkId, Pair};
use crate::verbs::Provider;
use crate::wire::{Body, Message};
use lane::abi::Epoch;

impl<P: Provider> Pair<P> {
    pub(super) fn on_message(&mut self, no: LinkId, m: Message, data: &[u8], host: &mut dyn Host) {
        let Some(link) = self.links.get_mut(&no) else {
            return;
        };
        let early = matches!(m.body, Body::ConfirmLink { .. } | Body::TestLink { .. });
        if link.state != State::Active && !early {
            // The offering end is active once the reply has come; on one link nothing else can overtake the reply.
            return self.fail_pair("a message on a link that is not confirmed");
        }
        match m.body {
            Body::ConfirmLink { reply } => {
                if m.token != no {
                    return self.fail_pair("a link was confirmed on another one");
                }
                self.on_confirm(no, reply);
            }
            Body::TestLink { reply: false } => link.answer = true,
            Body::TestLink { reply: true } => {
                link.answered();
                if let Some(at) = link.tested.take() {
                    let stats = self.stats.entry(link.rail).or_default();
                    stats.round_trips.add(self.now.saturating_sub(at));
                }
            }
            Body::AddLink { reply, end } => {
                self.link_timer = 0;
                match (reply, end) {
                    (false, Some(end)) => self.on_offer(end),
                    (true, Some(end)) => self.on_answer(end),
                    (true, None) => self.on_refuse(m.token),
                    (false, None) => self.fail_pair("an offer of no link"),
                }
            }
            Body::DeleteLink { reply } => {
                self.link_timer = 0;
                if m.token == no {
                    return self.fail_pair("a destroyed link spoke");
                }
                self.peer_dead(m.token, reply);
                if !reply {
                    if let Some(link) = self.links.get_mut(&no) {
                        link.say(m.token, Body::DeleteLink { reply: true });
                    }
                }
            }
            Body::ConfirmRkey(key) => {
                if link.keys.len() >= super::chunks::REGIONS_MAX
                    && !link.keys.contains_key(&m.token)
                {
                    return self.fail_pair("more regions than there can be");
                }
                link.keys.insert(m.token, key);
                self.wake_lanes(|_| true);
            }
            Body::DeleteRkey { reply: false } => self.region_leaves(m.token),
            Body::DeleteRkey { reply: true } => self.region_left(m.token),
            Body::Cdc(_)
            | Body::Switch { .. }
            | Body::SwitchReply { .. }
            | Body::Ring { .. }
            | Body::RingReply { .. }
            | Body::Landed { .. } => self.on_lane_message(m, data, host),
        }
    }

    fn on_lane_message(&mut self, m: Message, data: &[u8], host: &mut dyn Host) {
        let Some(mut lane) = self.lanes.take(m.token) else {
            return;
        };
        let news = lane.news(m.seq);
        if lane.works() && lane.peer.is_some() {
            let r = match m.body {
                Body::Cdc(_) if !news => Ok(()), // a newer one came over another link
                Body::Cdc(c) => self.on_cdc(&mut lane, &c, data),
                Body::Switch {
                    epoch,
                    attempt,
                    tcp_pos,
                    start,
                } => self.on_switch(&mut lane, (epoch, attempt), tcp_pos, start),
                Body::SwitchReply { epoch, attempt, ok } => {
                    self.on_switch_answer(&mut lane, (epoch, attempt), ok)
                }
                Body::Ring { moves, log2, from } => {
                    self.on_ring(m.token, &mut lane, (moves, log2, from), host)
                }
                Body::RingReply { moves, place } => self.on_place(&mut lane, moves, place),
                Body::Landed { epoch, head } => self.on_landed(&mut lane, epoch, head),
                _ => Ok(()),
            };
            if let Err(fault) = r {
                self.fail_lane(m.token, &mut lane, fault);
            }
        }
        self.lanes.put_back(m.token, lane);
        self.wake(m.token);
    }

    pub(super) fn fail_lane(&mut self, id: LaneId, lane: &mut Lane, fault: Fault) {
        if lane.fault.is_none() {
            lane.fault = Some(fault);
            lane.abort = true;
            self.event(Event::LaneFailed { lane: id, fault });
        }
    }

    pub(super) fn on_control(&mut self, message: Control) {
        match message {
            Control::QpOffer(end) => self.on_offer(end),
            Control::QpAnswer(end) => self.on_answer(end),
            Control::QpRefuse { link } => self.on_refuse(link),
            Control::QpDead { link } => {
                self.peer_dead(link, false);
                if !self.stuck {
                    self.event(Event::Control(Control::QpDeadAck { link }));
                }
            }
            Control::QpDeadAck { link } => {
                if self.links.contains_key(&link) {
                    return; // we have not reported it as dead
                }
                self.peer_dead(link, true);
            }
            Control::SwitchQuery {
                token,
                from,
                epoch,
                attempt,
            } => {
                let stands = self
                    .lanes
                    .get_mut(token)
                    .is_some_and(|l| l.inn.asked_about((Epoch::new(epoch), attempt)));
                self.event(Event::Control(Control::SwitchAnswer {
                    token: from,
                    epoch,
                    attempt,
                    stands,
                }));
            }
            Control::SwitchAnswer {
                token,
                epoch,
                attempt,
                stands,
            } => {
                let Some(mut lane) = self.lanes.take(token) else {
                    return;
                };
                let which = (Epoch::new(epoch), attempt);
                if lane.works() {
                    if lane.out.asks(which) {
                        self.event(Event::Settled {
                            lane: token,
                            stands,
                        });
                    }
                    let r = self.on_switch_answer(&mut lane, which, stands);
                    if let Err(fault) = r {
                        self.fail_lane(token, &mut lane, fault);
                    }
                }
                self.lanes.put_back(token, lane);
                self.wake(token);
            }
            Control::Close { token, from } => self.on_close(token, from),
            Control::CloseAck { token } => self.on_close_ack(token),
        }
    }
}
