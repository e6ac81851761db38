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

/// What a probe takes up.
enum Place {
    /// One of all; its client is still to come.
    Any,
    /// One of all, and of this address.
    Of(IpAddr),
    /// None: it turns its client away. (Whoever knocks again and again would have all of them.)
    None,
}

impl Clients {
    /// A probe begins. What it is told: the addresses of which no more clients are wanted.
    fn begin(&mut self) -> String {
        self.now += 1;
        let full = self.of.iter().filter(|(_, n)| **n >= ADDRESS_MAX);
        let full: Vec<String> = full.map(|(ip, _)| ip.to_string()).collect();
        full.join(",")
    }

    /// It has accepted a client of this address.
    fn accepted(&mut self, ip: IpAddr) -> Place {
        let n = self.of.entry(ip).or_default();
        if *n >= ADDRESS_MAX {
            self.now -= 1;
            return Place::None;
        }
        *n += 1;
        Place::Of(ip)
    }

    fn end(&mut self, place: &Place) {
        self.now -= usize::from(!matches!(place, Place::None));
        if let Place::Of(ip) = place {
            if let Some(n) = self.of.get_mut(ip) {
                *n -= 1;
            }
            self.of.retain(|_, n| *n > 0);
        }
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
        let full = lock(&clients).begin();
        let (accepted, told) = mpsc::channel();
        match probe(&listener, probes, &full) {
            Ok(child) => {
                let clients = clients.clone();
                std::thread::spawn(move || service(child, &accepted, &clients, once));
            }
            Err(f) => {
                lock(&clients).end(&Place::Any);
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

/// Reads what a probe says until it ends.
fn service(mut child: Child, accepted: &mpsc::Sender<()>, clients: &Shared, once: bool) {
    let (mut served, mut place) = (false, Place::Any);
    let lines = child.stdout.take().map(|o| BufReader::new(o).lines());
    for line in lines.into_iter().flatten().map_while(Result::ok) {
        if let Some(Ok(ip)) = line.strip_prefix("accepted ").map(str::parse) {
            place = lock(clients).accepted(ip);
            let _ = accepted.send(());
        } else if let Some(client) = line.strip_prefix("serving ") {
            if matches!(place, Place::None) {
                let _ = child.kill(); // it began before the last places of its address were taken
                continue;
            }
            served = true;
            let _ = out::print(&format!("{}\n", out::clean(client)));
        }
    }
    let _ = child.wait();
    let mut c = lock(clients);
    c.end(&place);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Also while many of its clients are on their way out.
    #[test]
    fn an_address_has_half_of_the_places() {
        let mut c = Clients::default();
        let (a, b): (IpAddr, IpAddr) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        let mut places = Vec::new();
        for n in 0..40 {
            let full = c.begin();
            assert_eq!(full, if n < ADDRESS_MAX { "" } else { "127.0.0.1" });
            places.push(c.accepted(a));
            assert_eq!(c.now, (n + 1).min(ADDRESS_MAX));
        }
        for _ in 0..CLIENTS_MAX - ADDRESS_MAX {
            c.begin();
            assert!(matches!(c.accepted(b), Place::Of(_)));
        }
        assert_eq!(c.now, CLIENTS_MAX);
        places.iter().for_each(|p| c.end(p));
        assert_eq!((c.now, c.of.len()), (ADDRESS_MAX, 1));
        c.begin();
        assert!(matches!(c.accepted(a), Place::Of(_)));
    }
}
