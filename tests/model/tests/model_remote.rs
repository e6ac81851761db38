//! Explores the models of lanes across nodes, and shows that each of their rules is needed.
//!
//! `MODEL_STEPS=1` prints the steps of every counter-example; `MODEL_ONLY=leave` explores only lanes in configurations
//! whose names contain that.

#[path = "../src/remote.rs"]
mod remote;

use remote::explore::{caught, circle, explore, holds, Due};
use remote::lane::Lane;
use remote::state::{Config, End};
use remote::steps::{self, Steps};
use remote::wake::{self, Wake};
use remote::Bug;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const STREAM: &str = "every byte once and in order";
const PARSED: &str = "frames are frames and bytes are bytes";
const EOF: &str = "end of file after the last byte";
const RESET: &str = "no reset without need";
const HONEST: &str = "the honest believe each other";
const STUCK: &str = "nobody waits for ever";

fn two() -> Config {
    Config::default()
}

fn one() -> Config {
    Config {
        bytes: 1,
        ..Config::default()
    }
}

/// A stays, and may be outside of every hook for as long as it likes.
fn sleeps(c: Config) -> Config {
    Config {
        end: End::Stays,
        away: true,
        ..c
    }
}

fn stays(c: Config) -> Config {
    Config {
        end: End::Stays,
        ..c
    }
}

fn shuts(c: Config) -> Config {
    Config {
        end: End::Shuts,
        ..c
    }
}

fn down(c: Config) -> Config {
    Config { downs: 1, ..c }
}

fn leaves(c: Config) -> Config {
    Config { leaves: 1, ..c }
}

fn wishes(c: Config) -> Config {
    Config { wants: 1, ..c }
}

fn a_dies(c: Config) -> Config {
    Config { a_dies: true, ..c }
}

fn d1_dies(c: Config) -> Config {
    Config { d1_dies: true, ..c }
}

fn d2_dies(c: Config) -> Config {
    Config { d2_dies: true, ..c }
}

fn fails(rails: u8, c: Config) -> Config {
    Config { fails: rails, ..c }
}

fn cut(c: Config) -> Config {
    Config { cut: true, ..c }
}

fn moves(moves: u8, c: Config) -> Config {
    Config { moves, ..c }
}

fn ups(ups: u8, c: Config) -> Config {
    Config { ups, ..c }
}

fn bytes(bytes: u8, c: Config) -> Config {
    Config { bytes, ..c }
}

fn room(room: u8, c: Config) -> Config {
    Config { room, ..c }
}

fn inline(c: Config) -> Config {
    Config { inline: true, ..c }
}

fn slow(c: Config) -> Config {
    Config { slow: true, ..c }
}

fn repaired(c: Config) -> Config {
    Config { repairs: 1, ..c }
}

/// A configuration and what is tried there.
type Named = (&'static str, Config);

fn lane(c: Config) -> Lane {
    Lane(c, Steps::default())
}

fn ups_and_downs() -> Vec<Named> {
    vec![
        ("up", bytes(4, two())),
        ("downs", down(ups(2, two()))),
        ("down without room", room(2, down(two()))),
        ("wish for a down", wishes(two())),
        ("wish for a down of a sleeper", wishes(sleeps(two()))),
        (
            "shutdown",
            down(Config {
                away: true,
                ..shuts(two())
            }),
        ),
    ]
}

/// B's socket goes to somebody without a shim.
fn hand_overs() -> Vec<Named> {
    vec![
        ("leave", leaves(ups(2, two()))),
        ("leave a sleeper", leaves(sleeps(two()))),
        ("leave and down", leaves(down(ups(2, one())))),
        ("leave and wish", leaves(wishes(one()))),
        ("leave a sleeper, D1 dies", leaves(d1_dies(sleeps(one())))),
        ("leave after a shutdown", leaves(shuts(two()))),
        ("leave, D2 dies", leaves(d2_dies(two()))),
        ("leave, a rail fails", leaves(fails(1, two()))),
        ("leave, both rails fail", leaves(fails(2, stays(one())))),
    ]
}

fn hand_overs_and_deaths() -> Vec<Named> {
    vec![
        ("leave, A dies", leaves(a_dies(two()))),
        ("leave, A dies on the way down", leaves(down(a_dies(one())))),
        ("leave, A and D1 die", leaves(d1_dies(a_dies(one())))),
        (
            "leave, A dies, a rail fails",
            leaves(a_dies(fails(1, one()))),
        ),
    ]
}

fn deaths() -> Vec<Named> {
    let sleeps_or_shuts = Config {
        away: true,
        ..shuts(one())
    };
    vec![
        ("A dies", a_dies(down(one()))),
        ("D1 dies", d1_dies(two())),
        ("D2 dies", d2_dies(two())),
        ("A and D1 die", a_dies(d1_dies(two()))),
        ("A and D1 die on the way down", a_dies(d1_dies(down(one())))),
        ("both daemons die", d1_dies(d2_dies(two()))),
        ("all die", a_dies(d1_dies(d2_dies(one())))),
        ("D1 dies after a shutdown", d1_dies(sleeps_or_shuts)),
        ("D1 dies, A sleeps", a_dies(d1_dies(sleeps(one())))),
        ("D1 dies, a rail fails", d1_dies(fails(1, one()))),
        ("D2 dies, both rails fail", d2_dies(fails(2, one()))),
    ]
}

fn rails() -> Vec<Named> {
    vec![
        ("a rail fails", fails(1, bytes(4, two()))),
        ("a rail fails, down", fails(1, down(ups(2, one())))),
        ("a rail fails, A dies", fails(1, a_dies(two()))),
        ("control is cut", cut(down(ups(2, two())))),
        ("both rails fail, A dies", fails(2, a_dies(stays(one())))),
        ("both rails fail", fails(2, one())),
        ("both rails fail, A sleeps", fails(2, sleeps(one()))),
        ("both rails fail, control is cut", fails(2, cut(one()))),
        ("rails come back", fails(2, repaired(ups(2, stays(one()))))),
        ("moves", moves(2, bytes(4, two()))),
        ("moves and downs", moves(1, down(ups(2, one())))),
    ]
}

/// Bytes that travel behind their message, and D2's messages that take their time.
fn messages() -> Vec<Named> {
    vec![
        ("inline bytes", inline(bytes(4, two()))),
        ("inline bytes, a rail fails", inline(fails(1, two()))),
        ("inline bytes, moves", inline(moves(2, bytes(3, two())))),
        ("slow answers", slow(down(ups(2, one())))),
        ("slow answers, leave", slow(leaves(two()))),
        ("slow answers, leave and down", slow(leaves(down(one())))),
        ("slow answers, a rail fails", slow(fails(1, two()))),
        (
            "slow answers, leave, a rail fails",
            slow(leaves(fails(1, stays(one())))),
        ),
        ("slow answers, both rails fail", slow(fails(2, one()))),
        (
            "slow answers, rails come back",
            slow(fails(2, repaired(stays(one())))),
        ),
        ("slow answers, A dies", slow(a_dies(down(one())))),
    ]
}

/// All rules at work: nothing goes wrong, and every step of the model is made in some exploration.
#[test]
fn lanes() {
    let only = std::env::var("MODEL_ONLY").unwrap_or_default();
    let groups = [
        hand_overs_and_deaths(),
        deaths(),
        rails(),
        messages(),
        hand_overs(),
        ups_and_downs(),
    ];
    let mut all = groups.concat();
    all.retain(|(what, _)| what.contains(&only));
    let (steps, next) = (Steps::default(), AtomicUsize::new(0));
    let work = || {
        // Relaxed: nothing else is shared through it.
        while let Some((what, c)) = all.get(next.fetch_add(1, Relaxed)) {
            holds(what, explore(Lane(c.clone(), steps.clone())));
        }
    };
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            s.spawn(work);
        }
    });
    if only.is_empty() {
        steps.complete(steps::LANE);
    }
}

#[test]
fn sleepers() {
    let made = Steps::default();
    for (size, poll) in [(2, false), (4, true)] {
        let (bug, steps) = (None, made.clone());
        let wake = Wake {
            size,
            poll,
            bug,
            steps,
        };
        holds("sleepers", explore(wake));
    }
    made.complete(wake::STEPS);
}

/// No end or daemon is busy for ever without getting anywhere.
#[test]
fn nobody_spins() {
    fn no<M>(m: M)
    where
        M: Due,
        M::State: Clone + Debug + Eq + Hash,
        M::Action: Clone + Debug + PartialEq,
    {
        let (states, circle) = circle(&m);
        eprintln!("no circles: {states} states");
        assert_eq!(circle, None);
    }
    no(lane(leaves(fails(1, one()))));
    no(lane(leaves(a_dies(one()))));
    no(lane(down(d1_dies(Config {
        away: true,
        ..one()
    }))));
    no(lane(slow(leaves(fails(1, stays(one()))))));
}

fn try_(bug: Bug, c: Config, by: &[&str]) {
    let bugged = Config {
        bug: Some(bug),
        ..c
    };
    caught(bug, explore(lane(bugged)), by);
}

// Every rule is needed: without it, the checker finds the harm.

#[test]
fn mutations_of_the_switch() {
    try_(Bug::NoAsk, down(two()), &[PARSED]);
    let both = slow(leaves(down(two())));
    try_(Bug::LookBeforeSwitch, both, &[PARSED]);
    try_(Bug::RefuseOnWish, wishes(two()), &[HONEST, PARSED, STUCK]);
    let again = leaves(fails(1, one()));
    try_(Bug::SwitchTwice, again, &[HONEST, RESET]);
    try_(Bug::NoQuery, fails(2, one()), &[STUCK]);
    let lost = leaves(fails(2, stays(one())));
    try_(Bug::QueryForgets, lost, &[PARSED, HONEST]);
    let again = slow(fails(2, repaired(stays(one()))));
    try_(Bug::AnyAttempt, again, &[RESET, PARSED, STREAM, HONEST]);
    try_(Bug::HeadStays, down(ups(2, two())), &[HONEST]);
}

#[test]
fn mutations_of_the_hand_over() {
    try_(Bug::LeaveAtOnce, leaves(two()), &[PARSED]);
    try_(Bug::RevokeByFrame, leaves(two()), &[RESET]);
    let lost = leaves(fails(2, cut(stays(one()))));
    try_(Bug::RevokeWithoutPath, lost.clone(), &[RESET]);
    try_(Bug::FrameOnlyWhenSaid, lost, &[RESET]);
    try_(Bug::TakeBack, leaves(ups(2, two())), &[HONEST, STREAM]);
    try_(Bug::ResumeOrphan, leaves(d1_dies(two())), &[RESET, EOF]);
    try_(Bug::FinBehindPrefix, leaves(two()), &[RESET]);
    try_(Bug::WaitForWord, leaves(d2_dies(two())), &[RESET]);
    let dies = leaves(down(a_dies(one())));
    try_(Bug::DownUntold, dies, &[RESET]);
}

#[test]
fn mutations_of_the_rails() {
    let moved = moves(1, bytes(3, two()));
    try_(Bug::OldSnapshots, moved.clone(), &[HONEST, STREAM]);
    try_(Bug::SnapshotIsEvent, fails(1, two()), &[RESET, STUCK]);
    let answers = slow(fails(1, one()));
    try_(Bug::AnswerIsEvent, answers, &[RESET, STUCK]);
    try_(Bug::NoWaitForDelete, fails(1, bytes(4, two())), &[STREAM]);
    try_(Bug::NoRewrite, fails(1, two()), &[STREAM]);
    let one_inline = inline(fails(1, bytes(3, two())));
    try_(Bug::InlineIsThere, one_inline.clone(), &[STREAM]);
    try_(Bug::NoValidate, one_inline, &[HONEST]);
    try_(Bug::MoveUndrained, moved, &[STREAM]);
    try_(Bug::CdcElsewhere, two(), &[STREAM]);
    for c in [stays(one()), sleeps(one())] {
        try_(Bug::NoWantDown, fails(2, c), &[STUCK]);
    }
}

#[test]
fn mutations_of_the_end() {
    let die = a_dies(d1_dies(one()));
    let broken_off = down(die.clone());
    try_(Bug::DownWithoutLength, broken_off.clone(), &[EOF]);
    try_(Bug::LeaveBeforeRest, leaves(broken_off), &[EOF]);
    try_(Bug::BareFinIsEnd, die.clone(), &[EOF]);
    try_(Bug::EndWhileRevoking, leaves(die), &[EOF]);
    try_(Bug::FinWithoutRing, two(), &[EOF]);
    try_(Bug::FinOnCompletion, d2_dies(two()), &[HONEST]);
    try_(Bug::NoFin, two(), &[RESET]);
    try_(Bug::NoFlush, down(a_dies(one())), &[STUCK]);
}

#[test]
fn mutations_of_takeover() {
    let lost = fails(2, sleeps(one()));
    try_(Bug::NoTakeover, a_dies(two()), &[STUCK, RESET]);
    try_(Bug::NoTakeover, lost.clone(), &[STUCK, RESET]);
    try_(Bug::NoLock, lost.clone(), &[PARSED, STREAM]);
    try_(Bug::NoLookAtTakeover, lost.clone(), &[PARSED, STREAM]);
    try_(Bug::NoDone, lost.clone(), &[HONEST]);
    try_(Bug::AwaitResult, leaves(shuts(one())), &[RESET]);
    let anew = ups(2, fails(2, repaired(shuts(one()))));
    try_(Bug::AwaitResult, anew, &[HONEST]);
    try_(Bug::NoReclaim, d1_dies(shuts(two())), &[STUCK]);
    try_(Bug::ForgetDowning, room(2, lost), &[STUCK]);
    let dies = a_dies(down(one()));
    try_(Bug::TrustRecord, dies.clone(), &[PARSED, STREAM]);
    try_(Bug::NoRecord, dies, &[HONEST]);
    try_(Bug::ModeBeforeWord, leaves(a_dies(two())), &[HONEST]);
    try_(Bug::IgnoreDaemon, d1_dies(two()), &[STUCK]);
}

#[test]
fn mutations_of_the_sleepers() {
    for (bug, size) in [
        (Bug::SilentWish, 2),
        (Bug::SilentReader, 4),
        (Bug::SleepWithoutLook, 2),
        (Bug::ArmWithoutPoll, 2),
        (Bug::NoLookForSleeper, 2),
        (Bug::LostCursor, 4),
    ] {
        let wake = Wake {
            size,
            poll: true,
            bug: Some(bug),
            steps: Steps::default(),
        };
        caught(bug, explore(wake), &[STUCK]);
    }
}
