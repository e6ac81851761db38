//! The measure of the lab's tests: does `lab-stream` see every way in which a stream can be wrong?

use anyhow::{ensure, Context, Result};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use underpass_tests::harness::{free_port, listening, until, PATIENCE};
use underpass_tests::lab::stream::pattern::{mix, unmix, Pattern};
use underpass_tests::lab::stream::{
    self, End, Last, Outcome, Report, Role, Sending, Spec, Style, Way,
};
use underpass_tests::lab::streams::{all_or_reset, whole};

const BYTES: u64 = 300_000;

/// A connection begins with its number.
const NUMBER: u64 = 4;

/// What a wire does to the bytes from the client to the server, counted from the first.
#[derive(Clone, Copy, Debug)]
enum Harm {
    None,
    /// One byte is gone.
    Lose(u64),
    /// One byte comes twice.
    Repeat(u64),
    /// One byte is another.
    Change(u64),
    /// These sixteen bytes come after the next sixteen.
    Swap(u64),
    /// A clean end.
    End(u64),
}

/// Passes on one connection.
fn wire(listener: &TcpListener, to: SocketAddr, harm: Harm) -> Result<()> {
    let (client, _) = listener.accept()?;
    let server = TcpStream::connect(to)?;
    let (mut from, mut back) = (server.try_clone()?, client.try_clone()?);
    let returns = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut back);
        let _ = back.shutdown(Shutdown::Write);
    });
    let mut all = Vec::new();
    (&client).read_to_end(&mut all)?;
    match harm {
        Harm::None => {}
        Harm::Lose(at) => drop(all.remove(at as usize)),
        Harm::Repeat(at) => all.insert(at as usize, all[at as usize]),
        Harm::Change(at) => all[at as usize] ^= 1,
        Harm::Swap(at) => all[at as usize..at as usize + 32].rotate_left(16),
        Harm::End(at) => all.truncate(at as usize),
    }
    // A server that has seen enough hangs up.
    let _ = (&server).write_all(&all);
    let _ = server.shutdown(Shutdown::Write);
    let _ = returns.join();
    Ok(())
}

fn spec(dir: &Path, role: Role, style: Style) -> Spec {
    let name = match role {
        Role::Serve(_) => "server",
        Role::Connect(_) => "client",
    };
    Spec {
        role,
        style,
        connections: 1,
        seed: 5,
        send: Some(Sending {
            bytes: BYTES,
            rate: 0,
            gate: None,
        }),
        receive: true,
        receive_gate: None,
        last: Last::Shutdown,
        disturb: None,
        descriptors: None,
        stop: dir.join("never"),
        progress: dir.join(name),
    }
}

/// What the server and the client say of one connection over such a wire.
fn ends(style: Style, harm: Harm) -> Result<[End; 2]> {
    let dir = tempfile::tempdir()?;
    let to = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    let server = spec(dir.path(), Role::Serve(to), style);
    let server = std::thread::spawn(move || stream::run(&server));
    until("it listens", PATIENCE, || listening(to.port()))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = spec(dir.path(), Role::Connect(listener.local_addr()?), style);
    let client = std::thread::spawn(move || stream::run(&client));
    wire(&listener, to, harm)?;
    let one = |r: std::thread::Result<Result<Report>>| -> Result<End> {
        let report = r.map_err(|_| anyhow::anyhow!("panic"))??;
        report.ends.into_iter().next().context("no end")
    };
    Ok([one(server.join())?, one(client.join())?])
}

#[test]
fn harm_is_seen() -> Result<()> {
    for style in [Style::Threads, Style::Epoll] {
        let [server, client] = ends(style, Harm::None)?;
        whole(&client.sent, &server.received)?;
        whole(&server.sent, &client.received)?;
        ensure!(server.received.bytes == BYTES && client.received.bytes == BYTES);
        let at = 123_457;
        for (harm, first, says) in [
            (Harm::Lose(at), at, "belongs at 123454 of this stream"),
            (Harm::Repeat(at), at + 1, "belongs at 123453 of this stream"),
            (Harm::Change(at), at, "changed"),
            (Harm::Swap(at), at, "belongs at 123469 of this stream"),
        ] {
            let [server, client] = ends(style, harm)?;
            ensure!(whole(&client.sent, &server.received).is_err(), "{harm:?}");
            let Outcome::Wrong(from, text) = server.received.outcome else {
                anyhow::bail!("{harm:?}: {server:?}");
            };
            // Chance may make the first wrong byte right.
            let from = from + NUMBER;
            ensure!((first..first + 3).contains(&from), "{harm:?}: {from}");
            if from == first {
                ensure!(
                    text.contains(says) || text.contains("no stream"),
                    "{harm:?}: {text}"
                );
            }
        }
        // A short stream with a clean end: only what the sender says tells.
        let [server, client] = ends(style, Harm::End(at))?;
        ensure!(server.received.outcome == Outcome::Done);
        ensure!(whole(&client.sent, &server.received).is_err());
        ensure!(all_or_reset(&server, client.sent.bytes).is_err());
    }
    Ok(())
}

#[test]
fn all_or_a_reset() {
    let way = |bytes, outcome| Way { bytes, outcome };
    let reset = |call: &str| Outcome::Error(call.into(), "ECONNRESET".into());
    let end = |received, sent| End {
        received,
        sent: way(0, sent),
    };
    let judge = |e: &End| all_or_reset(e, 100).ok();
    let unused = || Outcome::Unused;
    assert_eq!(judge(&end(way(100, Outcome::Done), unused())), Some(true));
    assert_eq!(judge(&end(way(120, Outcome::Done), unused())), Some(true));
    assert_eq!(judge(&end(way(99, Outcome::Done), unused())), None);
    assert_eq!(judge(&end(way(99, reset("recv")), unused())), Some(false));
    // TCP tells one of the two.
    assert_eq!(
        judge(&end(way(99, Outcome::Done), reset("send"))),
        Some(false)
    );
    let other = Outcome::Error("recv".into(), "ETIMEDOUT".into());
    assert_eq!(judge(&end(way(99, other), unused())), None);
    let wrong = Outcome::Wrong(7, String::new());
    assert_eq!(judge(&end(way(100, wrong), reset("send"))), None);
}

#[test]
fn the_pattern_names_places() {
    for i in 0..1000u64 {
        let x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        assert_eq!(unmix(mix(x)), x);
    }
    let (p, other) = (Pattern::new(7, 3), Pattern::new(7, 4));
    let mut whole = vec![0; 1000];
    p.fill(0, &mut whole);
    for size in [1, 3, 7, 8, 9, 64, 333] {
        let mut at = 0;
        for piece in whole.chunks(size) {
            assert_eq!(p.wrong(at, piece, &mut Vec::new()), None);
            at += piece.len() as u64;
        }
    }
    // Another connection's bytes.
    let mut got = vec![0; 4096];
    p.fill(0, &mut got[..17]);
    other.fill(90, &mut got[17..]);
    let (from, text) = p.wrong(0, &got, &mut Vec::new()).unwrap();
    let says = "here stands what belongs at 90 of stream 4";
    assert_eq!((from, &*text), (17, says));
    // Zeros.
    got.fill(0);
    let (_, text) = p.wrong(0, &got, &mut Vec::new()).unwrap();
    assert!(text.contains("no stream"), "{text}");
}
