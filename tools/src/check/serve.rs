//! `underpass check --serve`: the other end of `--measure`.
//!
//! This process accepts connections and reads the first 16 bytes of each, which say whether the connection is to be on
//! TCP or on a lane. A probe that is started with the connection as its standard input, as a program of inetd, does the
//! rest: without the shim or under it. So there is one port, and the end on TCP has no hook in its way.

use super::probe::Probes;
use crate::cli::Serve;
use crate::out::{self, Failure, Outcome};
use crate::shimlib;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use underpass_probe::wire::{self, Answer, Message, Path, LENGTH};

/// Connections at a time, those among them whose greeting is still to come.
const CLIENTS_MAX: usize = 16;
/// Time for a greeting.
const GREETING: Duration = Duration::from_secs(5);
/// Time for one that is sent away to have sent its greeting: with bytes unread, it would see a reset.
const GOODBYE: Duration = Duration::from_millis(200);
/// Pause after an accept that failed (no descriptors).
const PAUSE: Duration = Duration::from_millis(100);

/// Which connections there are.
#[derive(Default)]
struct Clients {
    now: usize,
    /// Some client has been served.
    served: bool,
}

type Shared = Arc<Mutex<Clients>>;

fn lock(c: &Shared) -> std::sync::MutexGuard<'_, Clients> {
    c.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn run(at: Serve, once: bool, probes: Probes) -> Outcome {
    without_shim()?;
    if let (None, Err(f)) = (&probes.lib, shimlib::find()) {
        out::complain(format_args!("no lanes, TCP only: {}", f.message));
    }
    let listener = bind(at)?;
    let here = listener.local_addr().map_err(Failure::new)?;
    out::print(&format!("listening on {here}\n"))?;
    let probes = Arc::new(probes);
    let clients = Shared::default();
    loop {
        let (stream, from) = match listener.accept() {
            Ok(s) => s,
            Err(_) => {
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        {
            let mut c = lock(&clients);
            if c.now == CLIENTS_MAX {
                drop(c);
                turn_away(stream);
                continue;
            }
            c.now += 1;
        }
        let (probes, shared) = (probes.clone(), clients.clone());
        let started = std::thread::Builder::new().spawn(move || {
            let served = serve(stream, from, &probes);
            let mut c = lock(&shared);
            c.now -= 1;
            c.served |= served;
            // (A client keeps both of its connections until it has measured.)
            if once && c.served && c.now == 0 {
                std::process::exit(0);
            }
        });
        if started.is_err() {
            lock(&clients).now -= 1;
        }
    }
}

/// Connections that the shim had accepted would be handed on by it: this program does without.
fn without_shim() -> Result<(), Failure> {
    let preload = std::env::var_os("LD_PRELOAD");
    let off = std::env::var_os("UNDERPASS").is_some_and(|v| v == "off");
    if off || shimlib::without(preload.as_deref()) == preload {
        return Ok(());
    }
    let me = std::env::current_exe().map_err(Failure::new)?;
    let mut command = Command::new(me);
    let e = command
        .args(std::env::args_os().skip(1))
        .env("UNDERPASS", "off")
        .exec();
    Err(Failure::new(format_args!(
        "cannot start again without the shim: {e}"
    )))
}

fn bind(at: Serve) -> Result<TcpListener, Failure> {
    let any = [
        IpAddr::V6(Ipv6Addr::UNSPECIFIED), // IPv4, too
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ];
    let one = at.ip.map(|ip| [ip]);
    let ips = one.as_ref().map_or(&any[..], |ip| &ip[..]);
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for ip in ips {
        match TcpListener::bind((*ip, at.port)) {
            Ok(l) => return Ok(l),
            Err(e) => last = e,
        }
    }
    Err(Failure::new(format_args!(
        "cannot listen on port {}: {last}",
        at.port
    )))
}

fn turn_away(mut s: TcpStream) {
    let _ = s.write_all(&wire::answer(Answer::Busy));
    let _ = s.shutdown(Shutdown::Write);
    greeting(&mut s, GOODBYE);
}

/// Sixteen bytes in time.
fn greeting(s: &mut TcpStream, time: Duration) -> Option<Message> {
    let end = Instant::now() + time;
    let mut m = [0; LENGTH];
    let mut have = 0;
    while have < LENGTH {
        let left = end.checked_duration_since(Instant::now())?;
        s.set_read_timeout(Some(left.max(Duration::from_millis(1))))
            .ok()?;
        match s.read(&mut m[have..]) {
            Ok(n) if n > 0 => have += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
    s.set_read_timeout(None).ok()?;
    Some(m)
}

/// Serves one connection until it ends. False: it was no client of ours.
fn serve(mut stream: TcpStream, from: SocketAddr, probes: &Probes) -> bool {
    let Some(path) = greeting(&mut stream, GREETING).and_then(|m| wire::path_of(&m)) else {
        return false;
    };
    let shim = path == Path::Lane;
    let child = probes.command(&["serve"], shim).and_then(|mut c| {
        c.stdin(Stdio::from(OwnedFd::from(stream)))
            .stdout(Stdio::null());
        c.spawn()
            .map_err(|e| Failure::new(format_args!("cannot start the probe: {e}")))
        // (Here this process closes its descriptor: an end with two holders gets no lane.)
    });
    match child {
        Ok(mut child) => {
            let ip = from.ip().to_canonical();
            let _ = out::print(&format!("{ip}:{} {}\n", from.port(), path.name()));
            let _ = child.wait();
            true
        }
        Err(f) => {
            out::complain(f.message);
            false
        }
    }
}
