//! Explores the protocol models, and shows that each of their precautions is needed.
//!
//! `MODEL_STEPS=1` prints the steps of every counter-example.

#[path = "../src/mod.rs"]
mod model;

use model::explore::{caught, circle, explore, holds};
use model::holders::Holders;
use model::lane::Lane;
use model::space::Space;
use model::state::{Config, End};
use model::Bug;

const STREAM: &str = "every byte once and in order";
const PARSED: &str = "frames are frames and bytes are bytes";
const EOF: &str = "end of file after the last byte";
const HONEST: &str = "honest ends do not reset each other";
const HANDED: &str = "hand-overs succeed";
const STUCK: &str = "nobody waits for ever";

fn small() -> Config {
    Config::default()
}

#[test]
fn ups_and_downs() {
    holds(
        "up",
        explore(Lane(Config {
            bytes: 4,
            ..small()
        })),
    );
    holds(
        "up and down",
        explore(Lane(Config {
            bytes: 4,
            downs: 2,
            ..small()
        })),
    );
    holds(
        "open",
        explore(Lane(Config {
            bytes: 4,
            downs: 1,
            end: End::Stays,
            spurious: true,
            ..small()
        })),
    );
}

#[test]
fn revocations() {
    holds(
        "revocation",
        explore(Lane(Config {
            revocations: 2,
            spurious: true,
            ..small()
        })),
    );
    holds(
        "revocation and down",
        explore(Lane(Config {
            revocations: 1,
            downs: 1,
            ..small()
        })),
    );
    let open = Config {
        revocations: 1,
        downs: 1,
        bytes: 2,
        end: End::Stays,
        spurious: true,
        ..small()
    };
    holds("revocation of an open connection", explore(Lane(open)));
}

#[test]
fn wishes_to_go_down() {
    holds(
        "want down",
        explore(Lane(Config {
            wants: 1,
            spurious: true,
            ..small()
        })),
    );
    holds(
        "want down and revocation",
        explore(Lane(Config {
            wants: 1,
            revocations: 1,
            ups: 1,
            spurious: true,
            ..small()
        })),
    );
}

#[test]
fn deaths() {
    let all = Config {
        downs: 1,
        revocations: 1,
        ups: 1,
        spurious: true,
        ..small()
    };
    holds(
        "sender dies",
        explore(Lane(Config {
            sender_dies: true,
            ..all.clone()
        })),
    );
    holds(
        "receiver dies",
        explore(Lane(Config {
            receiver_dies: true,
            ..all.clone()
        })),
    );
    let open = Config {
        end: End::Stays,
        sender_dies: true,
        bytes: 2,
        ..all
    };
    holds("sender of an open connection dies", explore(Lane(open)));
}

#[test]
fn the_daemon_dies() {
    holds(
        "daemon dies",
        explore(Lane(Config {
            daemon: true,
            downs: 1,
            ups: 1,
            ..small()
        })),
    );
}

#[test]
fn space_and_moves() {
    holds(
        "space",
        explore(Space {
            bytes: 9,
            moves: 0,
            poll: true,
            bug: None,
        }),
    );
    holds(
        "moves",
        explore(Space {
            bytes: 7,
            moves: 3,
            poll: false,
            bug: None,
        }),
    );
}

#[test]
fn holders() {
    holds(
        "holders",
        explore(Holders {
            calls: 4,
            bypasses: 1,
            deaths: true,
            bug: None,
        }),
    );
}

/// What is unread on the ring when the sender ends goes to TCP, as far as that takes it.
#[test]
fn ends() {
    let narrow = Config {
        room: 1,
        revocations: 1,
        ups: 1,
        ..small()
    };
    let shuts = Config {
        end: End::Shuts,
        ..narrow.clone()
    };
    let wide = Config {
        room: 3,
        ..shuts.clone()
    };
    holds("close without room", explore(Lane(narrow)));
    holds("shutdown without room", explore(Lane(shuts)));
    holds("shutdown", explore(Lane(wide)));
}

/// With room for everything in TCP, a hand-over may fail only because a frame lies behind bytes
/// that nobody has read.
#[test]
fn hand_overs() {
    let ample = Config {
        room: 8,
        revocations: 1,
        ups: 1,
        ..small()
    };
    holds(
        "hand-over",
        explore(Lane(Config {
            end: End::Stays,
            spurious: true,
            ..ample.clone()
        })),
    );
    holds(
        "hand-over and close",
        explore(Lane(Config {
            downs: 1,
            ..ample.clone()
        })),
    );
    holds(
        "hand-over and down",
        explore(Lane(Config {
            end: End::Stays,
            downs: 1,
            ..ample.clone()
        })),
    );
    holds(
        "hand-over, down, death",
        explore(Lane(Config {
            downs: 1,
            sender_dies: true,
            bytes: 2,
            ..ample
        })),
    );
}

fn without(bug: Bug) -> Config {
    Config {
        bug: Some(bug),
        ..small()
    }
}

/// The same with one revocation.
fn revoked(bug: Bug) -> Config {
    Config {
        revocations: 1,
        ..without(bug)
    }
}

/// The same of a connection that stays open.
fn open(bug: Bug) -> Config {
    Config {
        end: End::Stays,
        spurious: true,
        ..without(bug)
    }
}

#[track_caller]
fn try_(c: Config, by: &[&str]) {
    caught(c.bug.unwrap(), explore(Lane(c)), by);
}

// Every precaution is needed: without it, the checker finds the harm.

#[test]
fn mutations_of_the_switch_up() {
    for bug in [Bug::UnboundedRead, Bug::NoLookAfterCount] {
        let c = without(bug);
        try_(Config { downs: 1, ..c }, &[PARSED]);
    }
    try_(without(Bug::SleepWithoutLook), &[STUCK]);
    try_(open(Bug::LookBeforePublish), &[STUCK]);
    try_(without(Bug::HeadBeforeData), &[STREAM]);
    // (Who closes by itself puts what is unread on TCP, too.)
    for bug in [Bug::EofWithoutLook, Bug::ReadyEofWithoutLook] {
        let c = Config {
            sender_dies: true,
            ..without(bug)
        };
        try_(c, &[EOF]);
    }
    let any = [STREAM, EOF, STUCK, HONEST];
    try_(revoked(Bug::NoRetreat), &any);
    try_(revoked(Bug::ReadyTooEarly), &any);
}

#[test]
fn mutations_of_the_switch_down() {
    let dies = Config {
        sender_dies: true,
        ups: 1,
        ..revoked(Bug::NoLookAfterPublish)
    };
    try_(dies, &[EOF]);
    let by = [STREAM, PARSED, HONEST];
    try_(revoked(Bug::ConsumeWhileRevoking), &by);
    let down = Config {
        downs: 1,
        ..without(Bug::NoSkip)
    };
    try_(down, &[STREAM]);
    let dies = Config {
        sender_dies: true,
        bytes: 5,
        ups: 1,
        ..revoked(Bug::NoTakeBack)
    };
    try_(dies, &[EOF]);
    let down = Config {
        downs: 1,
        ..revoked(Bug::TrustAnnouncement)
    };
    try_(down, &[PARSED]);
}

#[test]
fn mutations_of_the_end() {
    let c = Config {
        room: 8,
        ups: 1,
        ..revoked(Bug::NoRepeat)
    };
    try_(c, &[HANDED]);
    let c = Config {
        room: 1,
        ups: 1,
        ..revoked(Bug::NoFlush)
    };
    try_(c, &[PARSED]);
}

#[test]
fn mutations_of_a_full_ring() {
    for c in [open(Bug::WishWithoutLook), without(Bug::NoLookForWish)] {
        try_(Config { bytes: 4, ..c }, &[STUCK]);
    }
}

#[test]
fn mutations_of_space_and_moves() {
    let try_ = |bug, moves, poll, by: &[&str]| {
        caught(
            bug,
            explore(Space {
                bytes: 9,
                moves,
                poll,
                bug: Some(bug),
            }),
            by,
        );
    };
    try_(Bug::WishWithoutLook, 0, false, &[STUCK]);
    try_(Bug::SleepWithoutLook, 0, false, &[STUCK]);
    try_(Bug::NoLookForWish, 0, false, &[STUCK]);
    try_(Bug::WishTakenBack, 0, true, &[STUCK]);
    try_(Bug::NoForward, 0, true, &[STUCK]);
    try_(Bug::MoveBeforePlace, 2, false, &[STREAM]);
    try_(Bug::MoveTooEarly, 3, false, &[STREAM]);
}

#[test]
fn mutations_of_the_gate() {
    let by = [
        "the switch is where the kernel is",
        "nobody is inside after the switch",
    ];
    let try_ = |bug, bypasses| {
        caught(
            bug,
            explore(Holders {
                calls: 3,
                bypasses,
                deaths: false,
                bug: Some(bug),
            }),
            &by,
        );
    };
    try_(Bug::NoGate, 0);
    try_(Bug::CountAfterLook, 0);
    try_(Bug::TrustCount, 1);
}

/// No end spins for ever without getting anywhere.
#[test]
fn nobody_spins() {
    let c = Config {
        downs: 1,
        revocations: 1,
        ups: 1,
        bytes: 2,
        ..small()
    };
    let deaths = Config {
        sender_dies: true,
        ..c.clone()
    };
    let open = Config {
        end: End::Stays,
        wants: 1,
        revocations: 0,
        ..c.clone()
    };
    for c in [c, open, deaths.clone()] {
        let (states, circle) = circle(&Lane(c.clone()));
        eprintln!("no circles: {states} states");
        assert_eq!(circle, None, "{c:?}");
    }
    let half = Config {
        bug: Some(Bug::HalfStays),
        ..deaths
    };
    assert!(circle(&Lane(half)).1.is_some(), "HalfStays went unnoticed");
}
