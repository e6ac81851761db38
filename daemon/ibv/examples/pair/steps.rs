//! What the two ends try together.

use super::area::{differs, fill, Area};
use super::end::{Conn, Control, End, Wait, MESSAGE};
use crate::Result;
use std::sync::Arc;
use std::time::{Duration, Instant};
use underpass_ibv::Mr;
use underpass_rdma::verbs::*;

const MIB: usize = 1 << 20;
/// The message upon which the other end dies.
const DIE: u8 = 99;
const LONG: Duration = Duration::from_secs(30);
/// 67 ms, six repeats.
const RTS: RtsAttr = RtsAttr {
    psn: 0,
    timeout: 14,
    retry_count: 6,
    rnr_retry: 7,
};

fn pattern(i: usize) -> u8 {
    (i.wrapping_mul(0x9e37_79b9) >> 13) as u8
}

fn message(n: u8) -> [u8; MESSAGE] {
    std::array::from_fn(|i| n.wrapping_add(i as u8))
}

fn check(good: bool, what: &str) -> Result<()> {
    if good {
        println!("ok: {what}");
        Ok(())
    } else {
        Err(format!("NOT SO: {what}").into())
    }
}

fn tell(what: &str, all: &[Completion]) {
    for c in all {
        println!(
            "  {what}: wr {} {:?} vendor {} {:?} {} B qpn {}",
            c.wr_id, c.status, c.vendor, c.opcode, c.bytes, c.qpn
        );
    }
    if all.is_empty() {
        println!("  {what}: no completions");
    }
}

fn inline(wr_id: u64, m: &[u8], signaled: bool) -> Request<'_> {
    let op = Op::Inline(m);
    Request {
        wr_id,
        op,
        signaled,
    }
}

fn write(wr_id: u64, local: Sge, to: (u64, u32), signaled: bool) -> Request<'static> {
    let op = Op::Write {
        local,
        remote: to.0,
        rkey: to.1,
    };
    Request {
        wr_id,
        op,
        signaled,
    }
}

fn wait_of(n: u64) -> Wait {
    match n {
        0..200 => Wait::Spin,
        200..400 => Wait::Yield,
        _ => Wait::Sleep,
    }
}

/// A target for the other end's writes.
fn target(end: &End, len: usize) -> Result<(Area, Mr)> {
    let area = Area::new(len)?;
    let refused = end
        .pd
        .register(Arc::new(area.read_only()?), Access::RemoteWrite);
    println!(
        "  remote write over a read-only mapping: {:?}",
        refused.as_ref().err()
    );
    check(
        refused.is_err(),
        "a read-only mapping is refused for remote writes",
    )?;
    let mr = end
        .pd
        .register(area.writable.clone(), Access::RemoteWrite)?;
    Ok((area, mr))
}

pub fn serve(control: Control) -> Result<()> {
    let mut end = End::new(control, true)?;
    let (area, mr) = target(&end, 4 * MIB)?;

    let c = Conn::new(&mut end, Some(&mr), RTS, 8)?;
    let got = c.completions(1, LONG)?;
    tell("serve", &got);
    check(c.message(0) == message(1), "the message is what was sent")?;
    check(
        differs(&area.writable, pattern).is_none(),
        "all bytes are there when the message is",
    )?;

    let mut n = 0;
    while n < 600 {
        let got = c.one(wait_of(n))?;
        // The next message may come before the acknowledgement of what it answers.
        if got.opcode == Opcode::Recv {
            c.give(got.wr_id)?;
            c.qp.post_send(&[inline(n, &message(n as u8), n % 32 == 31)])?;
            n += 1;
        }
    }
    end.control.meet("pong")?;
    drop(c);
    if end.iwarp() {
        return Ok(());
    }

    // Refused writes.
    let c = Conn::new(&mut end, Some(&mr), RTS, 8)?;
    end.control.meet("refused")?;
    tell(
        "serve, after a refused write",
        &c.completions(9, Duration::from_secs(1))?,
    );
    println!("  serve: state {:?}", c.qp.state()?);
    while let Some(e) = end.device.poll_event()? {
        println!("  serve: event {e:?}");
    }
    check(
        differs(&area.writable, pattern).is_none(),
        "a refused write has changed nothing",
    )?;
    drop(c);

    // No receive buffers.
    let c = Conn::new(&mut end, None, RTS, 0)?;
    end.control.meet("rnr")?;
    drop(c);

    // We fail our end.
    let c = Conn::new(&mut end, Some(&mr), RTS, 8)?;
    c.qp.to_error()?;
    tell(
        "serve, own to_error",
        &c.completions(8, Duration::from_secs(1))?,
    );
    println!(
        "  serve: receive posted in error state: {:?}",
        c.give(1).map_err(|e| e.to_string())
    );
    end.control.meet("failed")?;
    drop(c);

    answer_nothing(&Conn::new(&mut end, Some(&mr), RTS, 8)?)
}

/// We answer nothing any more, in one of two ways.
fn answer_nothing(c: &Conn) -> Result<()> {
    loop {
        let Some(got) = c.completions(1, LONG)?.pop() else {
            println!("serve: nothing came in {LONG:?}");
            return Ok(());
        };
        if got.status != Status::Success {
            tell("serve, at the end", &[got]);
            return Ok(());
        }
        if c.message(got.wr_id) == message(DIE) {
            println!("serve: aborting, as the other end wants");
            std::process::abort()
        }
        c.give(got.wr_id)?;
    }
}

/// How the last step ends.
#[derive(Clone, Copy)]
pub enum Last {
    /// The other end is told to die.
    Die,
    /// Somebody cuts the wire while we send.
    Cut,
    /// Somebody takes the port down and up again while we do not.
    Idle,
}

pub fn run(control: Control, last: Last) -> Result<()> {
    let mut end = End::new(control, false)?;
    println!("device: {:?}", end.info);
    println!("gid: {:?}", end.gid);
    inline_sizes(&end)?;
    registration(&end)?;
    transfer(&mut end)?;
    // With iWARP a success says nothing of the peer, and errors come as the end of the connection.
    if !end.iwarp() {
        refused(&mut end)?;
        no_buffers(&mut end)?;
        peer_failed(&mut end)?;
        silence(&mut end, last)?;
    }
    let End {
        ibv, device, pd, ..
    } = end;
    drop((device, pd));
    let live = ibv.live();
    check(live == Live::default(), "nothing is left")?;
    println!("all steps done");
    Ok(())
}

fn inline_sizes(end: &End) -> Result<()> {
    let cq = end.device.create_cq(16)?;
    for inline_bytes in [0, 44, 64, 256, 484, 512, 1024, 4096] {
        let caps = QpCaps {
            send_requests: 16,
            recv_buffers: 16,
            inline_bytes,
        };
        match end.pd.create_qp(&cq, &cq, caps) {
            Ok(qp) => println!("  inline {inline_bytes}: {:?}", qp.caps()),
            Err(e) => println!("  inline {inline_bytes}: {e}"),
        }
    }
    Ok(())
}

fn registration(end: &End) -> Result<()> {
    for (what, touched, access) in [
        ("untouched, read-only mapping", false, Access::LocalRead),
        ("touched, read-only mapping", true, Access::LocalRead),
        ("untouched, writable mapping", false, Access::RemoteWrite),
        ("touched, writable mapping", true, Access::RemoteWrite),
    ] {
        let area = Area::new(16 * MIB)?;
        if touched {
            fill(&area.writable, |_| 1)?;
        }
        let before = area.used()?;
        let read_only = matches!(access, Access::LocalRead);
        let memory = if read_only {
            Arc::new(area.read_only()?)
        } else {
            area.writable.clone()
        };
        let t = Instant::now();
        let mr = end.pd.register(memory, access)?;
        let registered = t.elapsed();
        let after = area.used()?;
        let t = Instant::now();
        drop(mr);
        println!(
            "  16 MiB {what}: {registered:?}, back {:?}; file {before} → {after} KiB",
            t.elapsed()
        );
    }
    Ok(())
}

fn transfer(end: &mut End) -> Result<()> {
    let area = Area::new(4 * MIB)?;
    fill(&area.writable, pattern)?;
    check(
        area.another_writer().is_err(),
        "a sealed area cannot be mapped writable",
    )?;
    let mr = end
        .pd
        .register(Arc::new(area.read_only()?), Access::LocalRead)?;
    check(mr.rkey() == 0, "no remote key for what is only read")?;

    let c = Conn::new(end, None, RTS, 8)?;
    let t = Instant::now();
    let half = 2 * MIB as u32;
    let sge = |at| mr.sge(at, half).ok_or("sge");
    let second = (c.remote.0 + u64::from(half), c.remote.1);
    let m = message(1);
    c.qp.post_send(&[
        write(1, sge(0)?, c.remote, false),
        write(2, sge(u64::from(half))?, second, false),
        inline(3, &m, true),
    ])?;
    println!("  posted 4 MiB in {:?}", t.elapsed());
    let got = c.completions(1, LONG)?;
    println!("  4 MiB written and acknowledged in {:?}", t.elapsed());
    tell("try", &got);
    check(
        got.len() == 1 && got[0].wr_id == 3 && got[0].status == Status::Success,
        "one signaled completion for all three",
    )?;

    bulk(&c, &mr)?;
    let mut posting = Duration::ZERO;
    let mut times = [const { Vec::new() }; 3];
    for n in 0..600u64 {
        let t = Instant::now();
        let signaled = n % 32 == 31;
        c.qp.post_send(&[inline(n, &message(n as u8), signaled)])?;
        posting += t.elapsed();
        for _ in 0..1 + u32::from(signaled) {
            let got = c.one(wait_of(n))?;
            if got.opcode == Opcode::Recv {
                check_same(c.message(got.wr_id) == message(n as u8))?;
                c.give(got.wr_id)?;
            }
        }
        times[wait_of(n) as usize].push(t.elapsed());
    }
    for (times, n) in times.iter_mut().zip([0, 200, 400]) {
        times.sort();
        let median = times[times.len() / 2];
        println!("  round trip of 44 B, both {:?}: {median:?}", wait_of(n));
    }
    println!("  posting 44 B inline: {:?}", posting / 600);
    end.control.meet("pong")?;
    let t = Instant::now();
    c.qp.destroy()?;
    println!("  queue pair destroyed in {:?}", t.elapsed());
    Ok(())
}

/// Writes the area again in pieces of several sizes, some under way at a time, with several ways to
/// wait for completions.
fn bulk(c: &Conn, mr: &Mr) -> Result<()> {
    for (piece, window) in [
        (4096, 64),
        (16384, 16),
        (65536, 4),
        (65536, 64),
        (1 << 20, 4),
    ] {
        let mut speeds = Vec::new();
        for wait in [Wait::Spin, Wait::Yield, Wait::Sleep] {
            let t = Instant::now();
            let (mut posted, mut done) = (0, 0);
            let pieces = 4 * MIB / piece;
            while done < pieces {
                if posted < pieces && posted - done < window {
                    let at = (posted * piece) as u64;
                    let to = (c.remote.0 + at, c.remote.1);
                    let sge = mr.sge(at, piece as u32).ok_or("sge")?;
                    c.qp.post_send(&[write(posted as u64, sge, to, true)])?;
                    posted += 1;
                } else {
                    let got = c.one(wait)?;
                    if got.status != Status::Success {
                        tell("bulk", &[got]);
                        return Err("a write has failed".into());
                    }
                    done += 1;
                }
            }
            speeds.push(format!("{wait:?} {:.1}", 4.0 / t.elapsed().as_secs_f64()));
        }
        let speeds = speeds.join(", ");
        println!("  writes of {piece} B, {window} under way, MiB/s: {speeds}");
    }
    Ok(())
}

fn check_same(good: bool) -> Result<()> {
    good.then_some(())
        .ok_or("a message is not what was sent".into())
}

/// A write with a wrong key among good work.
fn refused(end: &mut End) -> Result<()> {
    let memory = Arc::new(Mapping::anonymous(4096)?);
    let mr = end.pd.register(memory, Access::LocalRead)?;
    let sge = mr.sge(0, 64).ok_or("sge")?;
    let c = Conn::new(end, None, RTS, 8)?;
    let wrong = (c.remote.0, c.remote.1 ^ 0x55);
    let m = message(2);
    let t = Instant::now();
    c.qp.post_send(&[
        inline(1, &m, true),
        write(2, sge, wrong, false),
        inline(3, &m, false),
        inline(4, &m, true),
    ])?;
    let got = c.completions(12, Duration::from_secs(2))?;
    println!("  a write with a wrong key, after {:?}:", t.elapsed());
    tell("try", &got);
    check(
        got.iter()
            .any(|g| g.wr_id == 2 && g.status == Status::RemoteAccess),
        "the unsignaled write with a wrong key is told",
    )?;
    let state = c.qp.state()?;
    check(state == QpState::Error, "the queue pair is in error")?;
    println!(
        "  posted in error state: {:?}",
        c.qp.post_send(&[inline(9, &m, true)])
    );
    tell("try", &c.completions(1, Duration::from_secs(1))?);
    while let Some(e) = end.device.poll_event()? {
        println!("  try: event {e:?}");
    }
    end.control.meet("refused")
}

fn no_buffers(end: &mut End) -> Result<()> {
    let c = Conn::new(
        end,
        None,
        RtsAttr {
            rnr_retry: 2,
            ..RTS
        },
        8,
    )?;
    let t = Instant::now();
    let m = message(3);
    c.qp.post_send(&[inline(1, &m, true)])?;
    let got = c.completions(1, LONG)?;
    println!("  no receive buffer, two repeats, after {:?}:", t.elapsed());
    tell("try", &got);
    let told = got.first().map(|g| g.status);
    check(
        told == Some(Status::RnrRetryExceeded),
        "a missing buffer is told",
    )?;
    end.control.meet("rnr")
}

fn peer_failed(end: &mut End) -> Result<()> {
    let c = Conn::new(end, None, RTS, 8)?;
    end.control.meet("failed")?;
    let what = "the other end's queue pair was set to error, then destroyed";
    until_error(&c, what, &[Status::RetryExceeded])
}

fn silence(end: &mut End, last: Last) -> Result<()> {
    let c = Conn::new(end, None, RTS, 8)?;
    match last {
        Last::Die => {
            c.qp.post_send(&[inline(1, &message(DIE), true)])?;
            tell("try", &c.completions(1, LONG)?);
            until_error(&c, "the other process died", &[Status::RetryExceeded])?;
        }
        Last::Cut => {
            println!("CUT");
            // A port of ours that is down fails the queue pair at once, and then all are flushed.
            let wanted = [Status::RetryExceeded, Status::Flushed];
            until_error(&c, "the wire was cut", &wanted)?;
        }
        Last::Idle => {
            println!("CUT");
            std::thread::sleep(Duration::from_secs(5));
            c.qp.post_send(&[inline(1, &message(4), true)])?;
            let got = c.completions(1, LONG)?;
            tell("try, after the port was down", &got);
            let alive = got.iter().any(|g| g.status == Status::Success);
            check(
                alive,
                "an idle queue pair survives that its port is down for a while",
            )?;
        }
    }
    while let Some(e) = end.device.poll_event()? {
        println!("  try: event {e:?}");
    }
    Ok(())
}

/// Sends until something fails.
fn until_error(c: &Conn, what: &str, wanted: &[Status]) -> Result<()> {
    let mut sent = 0;
    loop {
        sent += 1;
        let t = Instant::now();
        let m = message(4);
        let posted = c.qp.post_send(&[inline(sent, &m, true)]);
        let got = c.completions(1, LONG)?;
        if posted.is_ok() && got.iter().any(|g| g.status == Status::Success) && sent < 1000 {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        println!(
            "  {what}: message {sent}, posted {posted:?}, after {:?}:",
            t.elapsed()
        );
        tell("try", &got);
        tell("try, then", &c.completions(12, Duration::from_secs(1))?);
        let told = got.iter().any(|g| wanted.contains(&g.status));
        return check(told, "a peer that is silent is told");
    }
}
