//! `underpass check --serve`: the other end of `--measure`.
//!
//! This process listens, and starts a probe under the shim for each client that knocks. The probe accepts the connection
//! and reads its first 16 bytes, which say whether it is to be on TCP or on a lane. So there is one port; a probe that has
//! accepted for a lane is the only holder of that connection; and one for TCP does without the shim. Whose a connection
//! is, is known when it is accepted: so the probe is told which addresses have all places that one may have.

use super::probe::Probes;
use crate::cli::Serve;
use crate::out::{self, Failure, Outcome};
use crate::shimlib;
use rustix::event::{poll, PollFd, PollFlags};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::{mpsc, Arc, Mutex, PoisonError};
use std::time::Duration;
use underpass_probe::wire::{self, Answer, LENGTH};

/// Connections at a time, those among them whose greeting is still to come.
const CLIENTS_MAX: usize = 16;
/// Those of one address. (A measurement has two.)
const ADDRESS_MAX: usize = 8;
/// Time for a probe to start and accept.
const START: Duration = Duration::from_secs(10);
/// Time for one that is sent away to have sent its greeting: with bytes unread, it would see a reset.
const GOODBYE: Duration = Duration::from_millis(200);
/// Pause after an error of the system's (no descriptors, no processes).
const PAUSE: Duration = Duration::from_millis(100);

/// Which connections there are.
#[derive(Default)]
struct Clients {
    now: usize,
    /// The same by address, of those that were accepted.
    of: HashMap<IpAddr, usize>,
    /// Some client has been served.
    served: bool,
}

impl Clients {
    /// Another one of this address. `false`: it has all places that one may have.
    fn enter(&mut self, ip: IpAddr) -> bool {
        let n = self.of.entry(ip).or_default();
        let may = *n < ADDRESS_MAX;
        *n += usize::from(may);
        may
    }

    fn leave(&mut self, ip: IpAddr) {
        if let Some(n) = self.of.get_mut(&ip) {
            *n -= 1;
            if *n == 0 {
                self.of.remove(&ip);
            }
        }
    }

    /// What a probe is told: the addresses of which no more clients are wanted.
    fn full(&self) -> String {
        let full = self.of.iter().filter(|(_, n)| **n >= ADDRESS_MAX);
        let full: Vec<String> = full.map(|(ip, _)| ip.to_string()).collect();
        full.join(",")
    }
}

type Shared = Arc<Mutex<Clients>>;

fn lock(c: &Shared) -> std::sync::MutexGuard<'_, Clients> {
    c.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn run(at: Serve, once: bool, probes: &Probes) -> Outcome {
    if let (None, Err(f)) = (&probes.lib, shimlib::find()) {
        out::complain(format_args!("no lanes, TCP only: {}", f.message));
    }
    let listener = bind(at)?;
    let here = listener.local_addr().map_err(Failure::new)?;
    // (Probes share this: one whose client has gone does not wait for the next.)
    listener.set_nonblocking(true).map_err(Failure::new)?;
    out::print(&format!("listening on {here}\n"))?;
    let clients = Shared::default();
    loop {
        if poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).is_err() {
            continue; // a signal
        }
        if lock(&clients).now == CLIENTS_MAX {
            turn_away(&listener);
            continue;
        }
        let full = {
            let mut c = lock(&clients);
            c.now += 1;
            c.full()
        };
        let (accepted, told) = mpsc::channel();
        match probe(&listener, probes, &full) {
            Ok(child) => {
                let clients = clients.clone();
                std::thread::spawn(move || service(child, &accepted, &clients, once));
            }
            Err(f) => {
                lock(&clients).now -= 1;
                out::complain(f.message);
                std::thread::sleep(PAUSE);
                continue;
            }
        }
        // Until it has accepted, the client that knocked is still there.
        if told.recv_timeout(START).is_err() {
            drop(listener.accept());
        }
    }
}

fn probe(listener: &TcpListener, probes: &Probes, full: &str) -> Result<Child, Failure> {
    let stdin = listener.try_clone().map_err(Failure::new)?;
    let mut command = probes.command(&[&format!("serve={full}")], true)?;
    command
        .stdin(Stdio::from(OwnedFd::from(stdin)))
        .stdout(Stdio::piped());
    command
        .spawn()
        .map_err(|e| Failure::new(format_args!("cannot start the probe: {e}")))
}

/// Hears what a probe says until it ends. One that turns its client away has no place meanwhile: whoever knocks again and
/// again would have all of them.
fn service(mut child: Child, accepted: &mpsc::Sender<()>, clients: &Shared, once: bool) {
    let (mut served, mut of, mut away) = (false, None, false);
    let lines = child.stdout.take().map(|o| BufReader::new(o).lines());
    for line in lines.into_iter().flatten().map_while(Result::ok) {
        if let Some(ip) = line.strip_prefix("accepted ") {
            of = ip.parse().ok().filter(|ip| lock(clients).enter(*ip));
            away = of.is_none();
            if away {
                lock(clients).now -= 1;
            }
            let _ = accepted.send(());
        } else if away {
            let _ = child.kill(); // it was started before the last places of its address were taken
        } else if let Some(client) = line.strip_prefix("serving ") {
            served = true;
            let _ = out::print(&format!("{}\n", out::clean(client)));
        }
    }
    let _ = child.wait();
    let mut c = lock(clients);
    c.now -= usize::from(!away);
    if let Some(ip) = of {
        c.leave(ip);
    }
    c.served |= served;
    // (A client keeps both of its connections until it has measured.)
    if once && c.served && c.now == 0 {
        std::process::exit(0);
    }
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

fn turn_away(listener: &TcpListener) {
    let Ok((mut s, _)) = listener.accept() else {
        std::thread::sleep(PAUSE);
        return;
    };
    let _ = s.write_all(&wire::answer(Answer::Busy));
    let _ = s.shutdown(Shutdown::Write);
    let _ = s.set_read_timeout(Some(GOODBYE));
    let _ = s.read(&mut [0; LENGTH]);
}
