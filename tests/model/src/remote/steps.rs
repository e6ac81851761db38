//! What kinds of steps there are, and how often each was made: a model in which a step never happens proves nothing
//! about it.

use super::state::daemons::{Act as Daemon, Step as Takes};
use super::state::messages::{Back, Said, Tls};
use super::state::network::Act as Net;
use super::state::receiver::{Act as B, At as Reads, Mode as Receives};
use super::state::sender::{Act as A, At, Call, Mode as Sends, Who};
use super::state::{Act, Config, State};
use super::{half, takeover};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Who makes a step, and what it does.
pub type Step = (&'static str, &'static str);

/// How often each step was made, in any number of explorations.
#[derive(Clone, Debug, Default)]
pub struct Steps(Arc<Mutex<BTreeMap<Step, u64>>>);

impl Steps {
    pub fn made(&self, step: Step) {
        let mut all = self.0.lock().unwrap_or_else(|e| e.into_inner());
        *all.entry(step).or_default() += 1;
    }

    /// Prints them. Insists that each step of the model was made, and that the model knows each that was.
    pub fn complete(&self, known: &[(&'static str, &[&'static str])]) {
        let made = self.0.lock().unwrap_or_else(|e| e.into_inner());
        for ((who, what), n) in made.iter() {
            eprintln!("{n:>9}  {who} {what}");
        }
        let known = || {
            known
                .iter()
                .flat_map(|(who, all)| all.iter().map(|what| (*who, *what)))
        };
        let never: Vec<_> = known().filter(|k| !made.contains_key(k)).collect();
        let unknown: Vec<_> = made.keys().filter(|m| !known().any(|k| k == **m)).collect();
        assert!(
            never.is_empty(),
            "no exploration makes these steps: {never:?}"
        );
        assert!(unknown.is_empty(), "steps that are in no list: {unknown:?}");
    }
}

/// The steps of `lane`.
pub const LANE: &[(&str, &[&str])] = &[
    (
        "A",
        &[
            "sends natively",
            "goes up",
            "stays outside",
            "comes back",
            "begins a send",
            "begins a look",
            "begins a way down",
            "begins to reclaim",
            "begins an end",
            "looks at the takeover",
            "publishes",
            "looks after a publish",
            "looks at the word",
            "looks at the answer",
            "says DOWNING",
            "looks for a revocation",
            "begins a frame",
            "begins plain bytes",
            "puts a unit on TCP",
            "counts a unit",
            "says how it came down",
            "is on TCP",
            "is killed",
        ],
    ),
    (
        "D1 for A",
        &[
            "says DOWNING",
            "looks for a revocation",
            "looks at the word",
            "begins a frame",
            "begins plain bytes",
            "begins the last frame",
            "puts a unit on TCP",
            "counts a unit",
            "says how it came down",
            "is on TCP",
            "claims",
            "claims while A works",
            "keeps its claim",
            "withdraws its claim",
            "adopts",
            "goes on with what A began",
            "finds nothing to adopt",
            "is done",
            "waits no longer",
        ],
    ),
    (
        "D1",
        &[
            "binds the lane",
            "moves the lane",
            "looks at A",
            "posts a switch",
            "posts a snapshot",
            "asks over the control channel",
            "takes a yes",
            "takes a no",
            "takes LANDED",
            "takes a snapshot",
            "takes a yes over the control channel",
            "takes a no over the control channel",
            "gives up a switch",
            "is killed",
        ],
    ),
    (
        "D2",
        &[
            "takes a switch",
            "takes a snapshot",
            "accepts",
            "refuses at its second look",
            "speaks",
            "answers over the control channel",
            "is killed",
        ],
    ),
    (
        "network",
        &[
            "carries",
            "destroys",
            "fails",
            "repairs",
            "is cut",
            "delivers TCP",
        ],
    ),
    (
        "B",
        &[
            "is ready",
            "wishes",
            "begins to leave",
            "looks at an empty ring",
            "finds its link group gone",
            "looks for a switch after a count",
            "takes what it has counted",
            "looks at TCP",
            "revokes",
            "waits no longer",
        ],
    ),
    (
        "B reads in",
        &[
            "TCP",
            "READY",
            "PREFIX",
            "RING",
            "LAST",
            "FIN",
            "SKIP",
            "REST",
            "UNDECIDED",
        ],
    ),
    (
        "B leaves in",
        &[
            "TCP",
            "READY",
            "PREFIX",
            "RING",
            "LAST",
            "FIN",
            "SKIP",
            "REST",
            "REVOKING",
            "UNDECIDED",
        ],
    ),
];

/// The kind of a step of `lane`.
pub fn of(last: &State, c: &Config, act: Act, next: &State) -> Step {
    match act {
        Act::A(a) => ("A", of_a(last, a)),
        Act::Daemon(Daemon::Takeover(t)) => ("D1 for A", of_takeover(last, c, t, next)),
        Act::Daemon(d) => of_daemon(last, d, next),
        Act::Net(n) => ("network", of_network(n)),
        Act::B(b) => of_b(last, b),
        Act::Deliver => ("network", "delivers TCP"),
        Act::KillA => ("A", "is killed"),
        Act::KillD1 => ("D1", "is killed"),
        Act::KillD2 => ("D2", "is killed"),
        Act::Deadline => ("B", "waits no longer"),
        Act::Abandon => ("D1", "gives up a switch"),
    }
}

fn of_a(last: &State, act: A) -> &'static str {
    match act {
        A::Native => "sends natively",
        A::Up => "goes up",
        A::Away => "stays outside",
        A::Back => "comes back",
        A::Call(Call::Send) => "begins a send",
        A::Call(Call::Look) => "begins a look",
        A::Call(Call::Down) => "begins a way down",
        A::Call(Call::Reclaim) => "begins to reclaim",
        A::Call(Call::End) => "begins an end",
        A::Step => half::of(last, Who::A)
            .and_then(|h| h.at)
            .map_or("", of_half),
    }
}

fn of_half(at: At) -> &'static str {
    match at {
        At::Taken(_) => "looks at the takeover",
        At::Publish => "publishes",
        At::Published => "looks after a publish",
        At::Word => "looks at the word",
        At::Answer(_) => "looks at the answer",
        At::Downing => "says DOWNING",
        At::DowningLook => "looks for a revocation",
        At::Cursor => "begins a frame",
        At::Resume => "begins plain bytes",
        At::Fin => "begins the last frame",
        At::Send => "puts a unit on TCP",
        At::Count => "counts a unit",
        At::Say(_) => "says how it came down",
        At::Settle => "is on TCP",
    }
}

fn of_takeover(last: &State, c: &Config, step: Takes, next: &State) -> &'static str {
    let half = last.d1.half.as_ref();
    match step {
        Takes::Claim if last.gone() || last.a.half.at.is_none() => "claims",
        Takes::Claim => "claims while A works",
        Takes::LookAtLock if next.d1.adopts => "keeps its claim",
        Takes::LookAtLock => "withdraws its claim",
        Takes::Adopt => match &next.d1.half {
            None => "finds nothing to adopt",
            Some(h) if h.mode == Sends::Drain => "goes on with what A began",
            Some(_) => "adopts",
        },
        Takes::Work => match half.and_then(|h| h.at.or_else(|| takeover::work(last, c, h))) {
            Some(At::Fin) if !half::may_finish(last, c) => "looks at the word",
            Some(at) => of_half(at),
            None => unreachable!("it was due"),
        },
        Takes::Done => "is done",
        Takes::Late => "waits no longer",
    }
}

fn of_daemon(last: &State, act: Daemon, next: &State) -> Step {
    let rails = last.net.rails.iter().zip(&next.net.rails);
    let posted = rails.filter(|(last, _)| last.flight.is_none());
    let posted = posted.filter_map(|(_, next)| next.flight).next();
    match act {
        Daemon::Bind(_) => ("D1", "binds the lane"),
        Daemon::Move(_) => ("D1", "moves the lane"),
        Daemon::Turn => match posted.map(|m| m.said) {
            Some(Said::Switch { .. }) => ("D1", "posts a switch"),
            Some(Said::Snapshot { .. }) => ("D1", "posts a snapshot"),
            None => ("D1", "looks at A"),
        },
        Daemon::Query => ("D1", "asks over the control channel"),
        Daemon::Take(i) => match last.net.rails[i].arrived.map(|m| m.said) {
            Some(Said::Switch { .. }) => ("D2", "takes a switch"),
            _ => ("D2", "takes a snapshot"),
        },
        Daemon::Look if next.d2.up => ("D2", "accepts"),
        Daemon::Look => ("D2", "refuses at its second look"),
        Daemon::Tell => ("D2", "speaks"),
        Daemon::Receive(i) => match last.net.rails[i].back {
            Some(Back::Answer(_, true)) => ("D1", "takes a yes"),
            Some(Back::Answer(_, false)) => ("D1", "takes a no"),
            Some(Back::Landed { .. }) => ("D1", "takes LANDED"),
            _ => ("D1", "takes a snapshot"),
        },
        Daemon::Control => match last.net.under_way {
            Some(Tls::Answer(_, true)) => ("D1", "takes a yes over the control channel"),
            Some(Tls::Answer(_, false)) => ("D1", "takes a no over the control channel"),
            _ => ("D2", "answers over the control channel"),
        },
        Daemon::Takeover(_) => unreachable!("above"),
    }
}

fn of_network(act: Net) -> &'static str {
    match act {
        Net::Land(_) => "carries",
        Net::Destroy(_) => "destroys",
        Net::Fail(_) => "fails",
        Net::Repair(_) => "repairs",
        Net::Cut => "is cut",
    }
}

fn of_b(last: &State, act: B) -> Step {
    let mode = match last.b.mode {
        Receives::Tcp => "TCP",
        Receives::Ready => "READY",
        Receives::Prefix => "PREFIX",
        Receives::Ring => "RING",
        Receives::Last => "LAST",
        Receives::Skip => "SKIP",
        Receives::Revoking => "REVOKING",
        Receives::Fin => "FIN",
        Receives::Rest => "REST",
        Receives::Undecided => "UNDECIDED",
    };
    match (act, last.b.at) {
        (B::Ready, _) => ("B", "is ready"),
        (B::Want, _) => ("B", "wishes"),
        (B::Leave, _) => ("B", "begins to leave"),
        (B::Look, _) => ("B", "looks at an empty ring"),
        (B::Orphan, _) => ("B", "finds its link group gone"),
        (B::Step, Reads::Idle) => ("B reads in", mode),
        (B::Step, Reads::ReadyAgain(_)) => ("B", "looks for a switch after a count"),
        (B::Step, Reads::ReadyTake(_)) => ("B", "takes what it has counted"),
        (B::Step, Reads::RingTcp) => ("B", "looks at TCP"),
        (B::Step, Reads::Mark(_)) => ("B", "revokes"),
        (B::Step, Reads::Leave | Reads::Pending(..)) => ("B leaves in", mode),
    }
}
