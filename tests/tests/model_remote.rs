//! Explores the models of lanes across nodes, and shows that each of their rules is needed.
//!
//! `MODEL_STEPS=1` prints the steps of every counter-example.

#[path = "../src/model/remote.rs"]
mod remote;

use remote::explore::{caught, circle, explore, holds, Due};
use remote::lane::Lane;
use remote::state::{Config, End};
use remote::wake::Wake;
use remote::Bug;
use std::fmt::Debug;
use std::hash::Hash;

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

fn all(of: &[(&str, Config)]) {
    for (what, c) in of {
        holds(what, explore(Lane(c.clone())));
    }
}

#[test]
fn ups_and_downs() {
    let stays = Config {
        end: End::Stays,
        away: true,
        ..two()
    };
    let shuts = Config {
        end: End::Shuts,
        away: true,
        ..two()
    };
    let up = Config { bytes: 4, ..two() };
    let downs = Config {
        downs: 1,
        ups: 2,
        ..two()
    };
    let full = Config {
        room: 2,
        downs: 1,
        ..two()
    };
    let want = Config { wants: 1, ..two() };
    let asleep = Config {
        wants: 1,
        ..stays.clone()
    };
    all(&[
        ("up", up),
        ("downs", downs),
        ("down without room", full),
        ("wish for a down", want),
        ("wish for a down of a sleeper", asleep),
        ("shutdown", Config { downs: 1, ..shuts }),
    ]);
}

/// B's socket goes to somebody without a shim.
#[test]
fn hand_overs() {
    let leaves = |c: Config| Config { leaves: 1, ..c };
    let stays = Config {
        end: End::Stays,
        away: true,
        ..two()
    };
    all(&[
        ("leave", leaves(Config { ups: 2, ..two() })),
        ("leave a sleeper", leaves(stays)),
        (
            "leave and down",
            leaves(Config {
                downs: 1,
                ups: 2,
                ..one()
            }),
        ),
        ("leave and wish", leaves(Config { wants: 1, ..one() })),
        (
            "leave, D2 dies",
            leaves(Config {
                d2_dies: true,
                ..two()
            }),
        ),
        (
            "leave, A dies",
            leaves(Config {
                a_dies: true,
                ..two()
            }),
        ),
        (
            "leave, A and D1 die",
            leaves(Config {
                a_dies: true,
                d1_dies: true,
                ..one()
            }),
        ),
        ("leave, a rail fails", leaves(Config { fails: 1, ..two() })),
        (
            "leave, A dies, a rail fails",
            leaves(Config {
                fails: 1,
                a_dies: true,
                ..one()
            }),
        ),
        (
            "leave, both rails fail",
            leaves(Config {
                fails: 2,
                end: End::Stays,
                ..one()
            }),
        ),
    ]);
}

#[test]
fn deaths() {
    let a = |c: Config| Config { a_dies: true, ..c };
    let d1 = |c: Config| Config { d1_dies: true, ..c };
    let d2 = |c: Config| Config { d2_dies: true, ..c };
    let down = |c: Config| Config { downs: 1, ..c };
    let shuts = Config {
        end: End::Shuts,
        away: true,
        ..one()
    };
    let sleeps = Config {
        end: End::Stays,
        ..shuts.clone()
    };
    all(&[
        ("A dies", a(down(one()))),
        ("D1 dies", d1(two())),
        ("D2 dies", d2(two())),
        ("A and D1 die", a(d1(two()))),
        ("A and D1 die on the way down", a(d1(down(one())))),
        ("both daemons die", d1(d2(two()))),
        ("all die", a(d1(d2(one())))),
        ("D1 dies after a shutdown", d1(shuts)),
        ("D1 dies, A sleeps", a(d1(sleeps))),
        ("D1 dies, a rail fails", d1(Config { fails: 1, ..one() })),
        ("D2 dies, both rails fail", d2(Config { fails: 2, ..one() })),
    ]);
}

#[test]
#[expect(clippy::too_many_lines)]
fn rails() {
    let fails = |fails, c: Config| Config { fails, ..c };
    let stays = Config {
        end: End::Stays,
        away: true,
        ..one()
    };
    all(&[
        ("a rail fails", fails(1, Config { bytes: 4, ..two() })),
        (
            "a rail fails, down",
            fails(
                1,
                Config {
                    downs: 1,
                    ups: 2,
                    ..one()
                },
            ),
        ),
        (
            "a rail fails, A dies",
            fails(
                1,
                Config {
                    a_dies: true,
                    ..two()
                },
            ),
        ),
        (
            "control is cut",
            Config {
                cut: true,
                downs: 1,
                ups: 2,
                ..two()
            },
        ),
        (
            "both rails fail, A dies",
            fails(
                2,
                Config {
                    a_dies: true,
                    end: End::Stays,
                    ..one()
                },
            ),
        ),
        ("both rails fail", fails(2, one())),
        ("both rails fail, A sleeps", fails(2, stays)),
        (
            "both rails fail, control is cut",
            fails(2, Config { cut: true, ..one() }),
        ),
        (
            "rails come back",
            fails(
                2,
                Config {
                    repairs: 1,
                    ups: 2,
                    end: End::Stays,
                    ..one()
                },
            ),
        ),
        (
            "moves",
            Config {
                moves: 2,
                bytes: 4,
                ..two()
            },
        ),
        (
            "moves and downs",
            Config {
                moves: 1,
                downs: 1,
                ups: 2,
                ..one()
            },
        ),
    ]);
}

#[test]
fn sleepers() {
    for (size, poll) in [(2, false), (4, true)] {
        let bug = None;
        holds("sleepers", explore(Wake { size, poll, bug }));
    }
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
    no(Lane(Config {
        leaves: 1,
        fails: 1,
        ..one()
    }));
    no(Lane(Config {
        leaves: 1,
        a_dies: true,
        ..one()
    }));
    no(Lane(Config {
        downs: 1,
        d1_dies: true,
        away: true,
        ..one()
    }));
}

fn try_(bug: Bug, c: Config, by: &[&str]) {
    let bugged = Config {
        bug: Some(bug),
        ..c
    };
    caught(bug, explore(Lane(bugged)), by);
}

/// Every rule is needed: without it, the checker finds the harm.
#[test]
fn mutations_of_the_switch() {
    let leaves = Config { leaves: 1, ..two() };
    let downs = Config { downs: 1, ..two() };
    try_(Bug::NoAsk, downs.clone(), &[PARSED]);
    let both = Config {
        leaves: 1,
        ..downs.clone()
    };
    try_(Bug::LookBeforeSwitch, both, &[PARSED]);
    try_(
        Bug::RefuseOnWish,
        Config { wants: 1, ..two() },
        &[HONEST, PARSED],
    );
    let moves = Config {
        moves: 1,
        downs: 1,
        ups: 2,
        ..one()
    };
    try_(
        Bug::SwitchTwice,
        moves,
        &[STREAM, PARSED, HONEST, RESET, STUCK],
    );
    try_(Bug::NoQuery, Config { fails: 2, ..one() }, &[RESET]);
    try_(Bug::HeadStays, Config { ups: 2, ..downs }, &[HONEST]);
    try_(Bug::LeaveAtOnce, leaves.clone(), &[PARSED]);
    try_(Bug::RevokeByFrame, leaves.clone(), &[RESET]);
    let cut = Config {
        leaves: 1,
        fails: 2,
        cut: true,
        end: End::Stays,
        ..one()
    };
    try_(Bug::RevokeWithoutPath, cut, &[RESET]);
    let fails = Config {
        leaves: 1,
        fails: 2,
        cut: true,
        end: End::Stays,
        ..one()
    };
    try_(Bug::FrameOnlyWhenSaid, fails, &[RESET]);
    try_(
        Bug::TakeBack,
        Config {
            ups: 2,
            ..leaves.clone()
        },
        &[HONEST, STREAM],
    );
    let d1 = Config {
        d1_dies: true,
        ..leaves.clone()
    };
    try_(Bug::ResumeOrphan, d1, &[RESET]);
    try_(Bug::FinBehindPrefix, leaves, &[RESET]);
}

#[test]
fn mutations_of_the_rails() {
    let fails = Config { fails: 1, ..two() };
    let moves = Config {
        moves: 1,
        bytes: 3,
        ..two()
    };
    try_(Bug::OldSnapshots, moves.clone(), &[HONEST, STREAM]);
    try_(Bug::SnapshotIsEvent, fails.clone(), &[RESET, STUCK]);
    try_(
        Bug::NoWaitForDelete,
        Config {
            bytes: 4,
            ..fails.clone()
        },
        &[STREAM],
    );
    try_(Bug::NoRewrite, fails, &[STREAM]);
    try_(Bug::MoveUndrained, moves, &[STREAM]);
    try_(Bug::CdcElsewhere, two(), &[STREAM]);
    try_(Bug::NoWantDown, Config { fails: 2, ..one() }, &[STUCK]);
}

#[test]
fn mutations_of_the_end() {
    let die = Config {
        a_dies: true,
        d1_dies: true,
        ..one()
    };
    let down = Config {
        downs: 1,
        ..die.clone()
    };
    try_(Bug::DownWithoutLength, down.clone(), &[EOF]);
    try_(Bug::LeaveBeforeRest, Config { leaves: 1, ..down }, &[EOF]);
    try_(Bug::BareFinIsEnd, die.clone(), &[EOF]);
    try_(Bug::EndWhileRevoking, Config { leaves: 1, ..die }, &[EOF]);
    try_(Bug::FinWithoutRing, two(), &[EOF]);
    try_(
        Bug::FinOnCompletion,
        Config {
            d2_dies: true,
            ..two()
        },
        &[HONEST],
    );
    try_(Bug::NoFin, two(), &[RESET]);
}

#[test]
fn mutations_of_takeover() {
    let sleeps = Config {
        away: true,
        end: End::Stays,
        fails: 2,
        ..one()
    };
    let dies = Config {
        a_dies: true,
        downs: 1,
        ..one()
    };
    let shuts = Config {
        d1_dies: true,
        end: End::Shuts,
        ..two()
    };
    try_(
        Bug::NoTakeover,
        Config {
            a_dies: true,
            ..two()
        },
        &[STUCK, RESET],
    );
    try_(Bug::NoTakeover, sleeps.clone(), &[STUCK, RESET]);
    try_(Bug::NoLock, sleeps, &[PARSED, STREAM]);
    try_(Bug::NoSteal, shuts, &[STUCK]);
    try_(Bug::ForgetDowning, dies.clone(), &[STUCK]);
    try_(Bug::TrustRecord, dies, &[PARSED, STREAM]);
    let leaves = Config {
        a_dies: true,
        leaves: 1,
        ..two()
    };
    try_(Bug::ModeBeforeWord, leaves, &[RESET]);
    try_(
        Bug::IgnoreDaemon,
        Config {
            d1_dies: true,
            ..two()
        },
        &[STUCK],
    );
}

#[test]
fn mutations_of_the_sleepers() {
    for (bug, size) in [
        (Bug::SilentWish, 2),
        (Bug::LocalThreshold, 4),
        (Bug::SleepWithoutLook, 2),
        (Bug::ArmWithoutPoll, 2),
        (Bug::NoLookForWish, 2),
        (Bug::LostCursor, 4),
    ] {
        let wake = Wake {
            size,
            poll: true,
            bug: Some(bug),
        };
        caught(bug, explore(wake), &[STUCK]);
    }
}
