#[path = "../src/model/remote.rs"]
mod remote;
use remote::lane::{Config, End, Lane};
use remote::{circle, explore, Bug, Explored};

fn holds(what: &str, c: Config) {
    let t = std::time::Instant::now();
    let e = explore(Lane(c));
    eprintln!("{what}: {} states {:?}", e.states, t.elapsed());
    if let Some((name, steps)) = e.failure {
        eprintln!("FAIL {what}: \"{name}\" does not hold:\n{steps}");
    }
}

fn caught(c: Config) {
    let bug = c.bug.unwrap();
    let t = std::time::Instant::now();
    let e = explore(Lane(c));
    match e.failure {
        None => eprintln!("MISSED {bug:?} in {} states {:?}", e.states, t.elapsed()),
        Some((name, steps)) => {
            eprintln!("{bug:?}: \"{name}\" after {} steps, {} states", steps.lines().count(), e.states);
            if std::env::var_os("MODEL_STEPS").is_some() { eprintln!("{steps}"); }
        }
    }
}
#[test]
fn a() {
    let d = || Config::default();
    holds("leave a d1", Config{leaves:1, a_dies:true, d1_dies:true, ..d()});
    holds("leave d2", Config{leaves:1, d2_dies:true, ..d()});
    holds("leave fail1", Config{leaves:1, fails:1, ..d()});
    holds("leave down", Config{leaves:1, downs:1, ..d()});
    holds("leave away stays", Config{leaves:1, away: true, end: End::Stays, ..d()});
    holds("fail2 bytes1 leave", Config{fails:2, bytes:1, leaves:1,..d()});
    holds("fail2 bytes1 leave cut", Config{fails:2, bytes:1, leaves:1,cut: true, ..d()});
}
#[test]
fn b() {
    let d = |bug| Config{bug: Some(bug), ..Config::default()};
    use Bug::*;
    caught(Config{downs:1,..d(NoAsk)});
    caught(Config{leaves:1,downs:1,..d(LookBeforeSwitch)});
    caught(Config{wants:1,..d(RefuseOnWish)});
    caught(Config{moves:1, downs:1, ups:2,..d(SwitchTwice)});
    caught(Config{fails:2,bytes:1,..d(NoQuery)});
    caught(Config{downs:1,ups:2,..d(HeadStays)});
    caught(Config{moves:1,bytes:3,..d(OldSnapshots)});
    caught(Config{fails:1,..d(SnapshotIsEvent)});
    caught(Config{fails:1,bytes:4,..d(NoWaitForDelete)});
    caught(Config{fails:1,..d(NoRewrite)});
    caught(Config{moves:1,bytes:3,..d(MoveUndrained)});
    caught(d(CdcElsewhere));
    caught(Config{leaves:1,..d(LeaveAtOnce)});
    caught(Config{leaves:1,..d(RevokeByFrame)});
    caught(Config{bytes:1,leaves:1,fails:2,cut:true,..d(RevokeWithoutPath)});
    caught(Config{bytes:1,leaves:1,fails:2,..d(FrameOnlyWhenSaid)});
    caught(Config{leaves:1,ups:2,..d(TakeBack)});
    caught(Config{a_dies:true,d1_dies:true,downs:1,..d(DownWithoutLength)});
    caught(Config{a_dies:true,d1_dies:true,downs:1,leaves:1,..d(LeaveBeforeRest)});
    caught(Config{a_dies:true,d1_dies:true,..d(BareFinIsEnd)});
    caught(d(FinWithoutRing));
    caught(Config{d2_dies:true,..d(FinOnCompletion)});
    caught(d(NoFin));
    caught(Config{a_dies:true,d1_dies:true,leaves:1,..d(EndWhileRevoking)});
    caught(Config{away:true,end:End::Stays,fails:2,..d(NoCustody)});
    caught(Config{away:true,end:End::Stays,fails:2,..d(NoLock)});
    caught(Config{d1_dies:true,end:End::Shuts,..d(NoSteal)});
    caught(Config{a_dies:true,downs:1,..d(TrustRecord)});
    caught(Config{a_dies:true,leaves:1,..d(ModeBeforeWord)});
    caught(Config{fails:2,..d(NoWantDown)});
    caught(Config{d1_dies:true,..d(IgnoreDaemon)});
    caught(Config{a_dies:true,downs:1,..d(ForgetDowning)});
    caught(Config{leaves:1,d1_dies:true,..d(ResumeOrphan)});
    caught(Config{leaves:1,..d(FinBehindPrefix)});
}
