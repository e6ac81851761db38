//! A thread per connection and direction, with blocking calls. After a sender's last byte nothing
//! here makes a call that Underpass could see, unless `Last` says so.

use super::flow::{Sink, Source};
use super::{failed, End, Last, Outcome, Progress, Sending, Spec, Way};
use anyhow::{anyhow, Result};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::Arc;
use std::thread::{sleep, spawn, JoinHandle};
use std::time::Duration;

/// Longer than any test.
const HOUR: Duration = Duration::from_secs(3600);

pub fn run(spec: &Spec, sockets: Vec<TcpStream>, progress: Progress) -> Result<Vec<End>> {
    let senders = Arc::new(AtomicUsize::new(sockets.len()));
    let mut running = Vec::new();
    for (number, socket) in (0..).zip(sockets) {
        let socket = Arc::new(socket);
        let receiver = spec.receive.then(|| {
            let (spec, socket) = (spec.clone(), Arc::clone(&socket));
            spawn(move || receive(&spec, &socket, number, progress))
        });
        let sender = spec.send.clone().map(|what| {
            let (spec, senders) = (spec.clone(), Arc::clone(&senders));
            let socket = Arc::clone(&socket);
            spawn(move || send(&spec, &what, socket, number, progress, &senders))
        });
        running.push((sender, receiver));
        // Both threads have it; the last one closes it.
    }
    let join = |t: Option<JoinHandle<Way>>| match t {
        Some(t) => t.join().map_err(|_| anyhow!("a thread has panicked")),
        None => Ok(Way::default()),
    };
    let ends = running.into_iter().map(|(sender, receiver)| {
        Ok(End {
            sent: join(sender)?,
            received: join(receiver)?,
        })
    });
    ends.collect()
}

fn send(
    spec: &Spec,
    what: &Sending,
    socket: Arc<TcpStream>,
    number: u32,
    progress: Progress,
    senders: &AtomicUsize,
) -> Way {
    let mut source = Source::new(spec, what, number, progress);
    let mut piece = Vec::new();
    let mut outcome = Outcome::Done;
    'sending: while !source.ended() && !spec.stop.exists() {
        sleep(source.piece(&mut piece));
        let mut rest = &piece[..];
        while !rest.is_empty() {
            match (&*socket).write(rest) {
                Ok(n) => {
                    source.took(n);
                    rest = &rest[n..];
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    outcome = failed("send", &e);
                    break 'sending;
                }
            }
        }
        if source.ended() {
            break; // without a look for the stop file
        }
    }
    match spec.last {
        Last::Shutdown if outcome == Outcome::Done => {
            if let Err(e) = socket.shutdown(Shutdown::Write) {
                outcome = failed("shutdown", &e);
            }
        }
        Last::Shutdown | Last::Close => drop(socket),
        Last::Exit => {
            // SeqCst: not on any fast path. The last of them has seen all others send.
            if senders.fetch_sub(1, SeqCst) == 1 {
                // SAFETY: ends the process, whose other threads wait or are about to.
                unsafe { libc::_exit(0) };
            }
            sleep(HOUR);
        }
        Last::Sleep => sleep(HOUR),
    }
    source.way(outcome)
}

fn receive(spec: &Spec, socket: &TcpStream, number: u32, progress: Progress) -> Way {
    let mut sink = Sink::new(spec, number, progress);
    loop {
        let mut socket = socket;
        match sink.receive(|to| socket.read(to)) {
            Ok(None) => {}
            Ok(Some(outcome)) => return sink.way(outcome),
            Err(e) => return sink.way(failed("recv", &e)),
        }
    }
}
