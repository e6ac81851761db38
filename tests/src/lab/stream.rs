//! What `lab-stream` does: many TCP connections between two programs that know nothing of
//! Underpass, noise in both directions at once, every byte compared with the one that belongs at
//! its place, and a strict reading of how each direction ended.
//!
//! A digest tells that a stream is wrong; the noise here also tells how: each eight bytes name
//! their stream and their place in it (`pattern`). How far each direction has come stands in a file
//! that outlives the program (`progress`), however that ends.

mod disturb;
mod events;
mod flow;
pub mod pattern;
mod progress;
mod threads;

pub use disturb::Disturbed;
pub use progress::Progress;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often files are looked for.
const LOOK: Duration = Duration::from_millis(20);

/// One end's part, on its command line as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub role: Role,
    pub style: Style,
    pub connections: u32,
    /// The same at both ends.
    pub seed: u64,
    /// What this end sends on each connection; `None`: it never sends.
    pub send: Option<Sending>,
    /// Does it receive?
    pub receive: bool,
    /// It receives no more than so many bytes before this file is there.
    pub receive_gate: Option<(u64, PathBuf)>,
    pub last: Last,
    /// Children and handlers beside the streams, by this seed.
    #[serde(default)]
    pub disturb: Option<u64>,
    /// Soft limit of descriptors (RLIMIT_NOFILE).
    #[serde(default)]
    pub descriptors: Option<u64>,
    /// Senders end early, and a program that has closed its connections ends, when this file is there.
    pub stop: PathBuf,
    /// Where to leave how far each direction has come.
    pub progress: PathBuf,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prints `port N`, and accepts just the connections of `Spec`. Port 0: any.
    Serve(SocketAddr),
    Connect(SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// A thread per connection and direction, blocking calls.
    Threads,
    /// One thread, one epoll set, calls that do not wait.
    Epoll,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sending {
    /// Per connection; the stop file ends it earlier.
    pub bytes: u64,
    /// Bytes per second and connection; 0: as fast as it goes.
    pub rate: u64,
    /// The last so many bytes wait for this file.
    pub gate: Option<(u64, PathBuf)>,
}

/// What a sender does after its last byte.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Last {
    /// `shutdown(WR)`; the connection is closed when both directions have ended.
    Shutdown,
    /// `close()` at once, read or not; the program lives on until it is stopped.
    Close,
    /// `_exit()` when the last of all senders has sent; nothing is closed.
    Exit,
    /// No call at all for an hour.
    Sleep,
}

/// What became of one direction at one end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Nobody looked.
    #[default]
    Unused,
    /// All was sent, or the stream ended in an end of file.
    Done,
    /// A call failed: its name and the error's.
    Error(String, String),
    /// What came is not what was sent: where, and what it seems to be.
    Wrong(u64, String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Way {
    /// That calls took or gave.
    pub bytes: u64,
    pub outcome: Outcome,
}

/// One end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub sent: Way,
    pub received: Way,
}

/// A program's result: its ends by number of connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub ends: Vec<End>,
    #[serde(default)]
    pub disturbed: Disturbed,
}

impl Report {
    /// Did nothing go wrong? What is missing only the other end can tell.
    pub fn clean(&self) -> bool {
        let good = |o: &Outcome| matches!(o, Outcome::Unused | Outcome::Done);
        let mut ends = self.ends.iter();
        ends.all(|e| good(&e.sent.outcome) && good(&e.received.outcome))
    }
}

/// Plays a part to its end.
pub fn run(spec: &Spec) -> Result<Report> {
    ensure!(
        spec.style == Style::Threads
            || spec.last == Last::Shutdown && spec.receive && spec.receive_gate.is_none(),
        "the event loop only sends, receives and shuts down"
    );
    if let Some(n) = spec.descriptors {
        use nix::sys::resource::{getrlimit, setrlimit, Resource::RLIMIT_NOFILE};
        setrlimit(RLIMIT_NOFILE, n, getrlimit(RLIMIT_NOFILE)?.1)?;
    }
    let progress = Progress::create(&spec.progress, spec.connections)?;
    let sockets = match spec.role {
        Role::Serve(at) => accept(at, spec.connections)?,
        Role::Connect(to) => connect(to, spec.connections)?,
    };
    let beside = spec.disturb.map(disturb::Beside::start);
    let ends = match spec.style {
        Style::Threads => threads::run(spec, sockets, progress)?,
        Style::Epoll => events::run(spec, sockets, progress)?,
    };
    let disturbed = match beside {
        Some(b) => b.finish().context("beside the streams")?,
        None => Disturbed::default(),
    };
    if spec.last == Last::Close {
        await_file(&spec.stop);
    }
    Ok(Report { ends, disturbed })
}

/// Accepts all connections; each begins with its number.
fn accept(at: SocketAddr, count: u32) -> Result<Vec<TcpStream>> {
    let listener = TcpListener::bind(at)?;
    println!("port {}", listener.local_addr()?.port());
    std::io::stdout().flush()?;
    let mut sockets: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    for _ in 0..count {
        let (mut s, _) = listener.accept()?;
        let mut number = [0; 4];
        s.read_exact(&mut number).context("number of connection")?;
        let number = u32::from_le_bytes(number);
        let place = sockets.get_mut(number as usize).context("its number")?;
        ensure!(place.replace(s).is_none(), "connection {number} twice");
    }
    sockets.into_iter().map(|s| s.context("missing")).collect()
}

fn connect(to: SocketAddr, count: u32) -> Result<Vec<TcpStream>> {
    let one = |number: u32| {
        let mut s = TcpStream::connect(to)?;
        s.write_all(&number.to_le_bytes())?;
        Ok(s)
    };
    (0..count).map(one).collect()
}

fn await_file(path: &Path) {
    while !path.exists() {
        std::thread::sleep(LOOK);
    }
}

/// A failed call.
fn failed(call: &str, e: &std::io::Error) -> Outcome {
    let name = match e.raw_os_error() {
        Some(n) => format!("{:?}", nix::errno::Errno::from_raw(n)),
        None => e.to_string(),
    };
    Outcome::Error(call.into(), name)
}

impl Spec {
    /// The pattern's number of a direction.
    fn stream(&self, connection: u32, sending: bool) -> u32 {
        let from_server = sending == matches!(self.role, Role::Serve(_));
        connection * 2 + u32::from(from_server)
    }
}
