//! A pair of `lab-stream` programs, one in each of two machines: what the ends are to do, how far
//! they have come, and whether every byte has arrived.

use super::guest::{Guest, Running};
use super::node::Family;
use super::stream::{End, Last, Outcome, Progress, Report, Role, Sending, Spec, Style, Way};
use super::{quoted, End as Exit, Lab, PATIENCE};
use crate::harness::until;
use anyhow::{ensure, Context, Result};
use nix::sys::signal::Signal;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long a program may run: longer than a test waits for anything in it.
const LIFE: Duration = Duration::from_secs(900);

/// Environment variables of a program.
pub type Env = Vec<(String, String)>;

/// The index of an end.
pub const SERVER: usize = 0;
pub const CLIENT: usize = 1;

/// What the two ends are to do. Ends are numbered: the server, the client.
#[derive(Clone)]
pub struct Plan {
    pub family: Family,
    /// The nodes of the ends.
    pub nodes: [usize; 2],
    pub style: Style,
    pub connections: u32,
    /// The address of the server, if not that on eth0.
    pub host: Option<IpAddr>,
    /// The network namespace of both ends, if not the machines'.
    pub within: Option<&'static str>,
    pub ends: [Part; 2],
}

/// One end's part in it.
#[derive(Clone)]
pub struct Part {
    pub env: Env,
    pub sends: Option<Sending>,
    pub receives: bool,
    /// Receives no more than so many bytes before this file is there.
    pub receive_gate: Option<(u64, PathBuf)>,
    pub last: Last,
}

impl Plan {
    /// Both ends send and receive until they are stopped, with this rate (bytes per second,
    /// connection and direction).
    pub fn endless(connections: u32, rate: u64, env: [Env; 2]) -> Self {
        Self::bytes(connections, u64::MAX, env).rate(rate)
    }

    /// Both ends send so many bytes per connection as fast as they can.
    pub fn bytes(connections: u32, bytes: u64, env: [Env; 2]) -> Self {
        let part = |env| Part {
            env,
            sends: Some(Sending {
                bytes,
                rate: 0,
                gate: None,
            }),
            receives: true,
            receive_gate: None,
            last: Last::Shutdown,
        };
        Plan {
            family: Family::V4,
            nodes: [0, 1],
            style: Style::Threads,
            connections,
            host: None,
            within: None,
            ends: env.map(part),
        }
    }

    /// Only the client sends, and this is what it does then.
    pub fn one_way(connections: u32, bytes: u64, last: Last, env: [Env; 2]) -> Self {
        let mut p = Self::bytes(connections, bytes, env);
        p.ends[SERVER].sends = None;
        p.ends[CLIENT].receives = false;
        p.ends[CLIENT].last = last;
        p
    }

    pub fn rate(mut self, rate: u64) -> Self {
        for s in self.ends.iter_mut().filter_map(|e| e.sends.as_mut()) {
            s.rate = rate;
        }
        self
    }

    pub fn family(mut self, family: Family) -> Self {
        self.family = family;
        self
    }

    pub fn epoll(mut self) -> Self {
        self.style = Style::Epoll;
        self
    }

    /// The server leaves the last bytes of each connection unread until this file is there.
    pub fn receive_gate(mut self, last: u64, file: &str) -> Self {
        if let Some(s) = &self.ends[CLIENT].sends {
            self.ends[SERVER].receive_gate = Some((s.bytes.saturating_sub(last), file.into()));
        }
        self
    }

    /// The client's last bytes of each connection wait for this file in its machine.
    pub fn gate(mut self, last: u64, file: &str) -> Self {
        if let Some(s) = &mut self.ends[CLIENT].sends {
            s.gate = Some((last, file.into()));
        }
        self
    }
}

/// A running pair. Dropping it kills both.
pub struct Streams {
    pub port: u16,
    pub plan: Plan,
    ends: [Running; 2],
    guests: [Guest; 2],
    stop: String,
    progress: [String; 2],
}

impl Streams {
    pub fn start(lab: &Lab, plan: Plan) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let stop = format!("/run/stream{number}.stop");
        // Both may be in one machine.
        let progress = ["server", "client"].map(|end| format!("/run/stream{number}.{end}"));
        let [server, client] = plan.nodes.map(|n| lab.node(n));
        let program = server.agent().with_file_name("lab-stream");
        let program = quoted(&program.to_string_lossy());
        let spawn = |end: usize, role: Role| {
            let part = &plan.ends[end];
            let spec = Spec {
                role,
                style: plan.style,
                connections: plan.connections,
                seed: u64::from(number) + 1,
                send: part.sends.clone(),
                receive: part.receives,
                receive_gate: part.receive_gate.clone(),
                last: part.last,
                disturb: None,
                descriptors: None,
                stop: stop.clone().into(),
                progress: progress[end].clone().into(),
            };
            let spec = quoted(&serde_json::to_string(&spec)?);
            let job = lab.node(plan.nodes[end]);
            let enter = plan.within.map(|w| format!("ip netns exec {w} "));
            let job = job.sh(format!(
                "exec {}{program} {spec}",
                enter.unwrap_or_default()
            ))?;
            job.envs(part.env.iter().cloned()).limit(LIFE).spawn()
        };
        let host = plan.host.unwrap_or(server.address(0, plan.family));
        let serving = spawn(SERVER, Role::Serve((host, 0).into()))?;
        let port: u16 = serving.line("port ")?.parse()?;
        let connecting = spawn(CLIENT, Role::Connect((host, port).into()))?;
        Ok(Streams {
            port,
            ends: [serving, connecting],
            guests: [server.guest()?, client.guest()?],
            stop,
            progress,
            plan,
        })
    }

    /// Bytes sent and received at an end, by connection. It may have ended.
    pub fn progress(&self, end: usize) -> Result<Vec<[u64; 2]>> {
        Ok(Progress::parse(
            &self.guests[end].read(&self.progress[end])?,
        ))
    }

    /// Waits until each end that receives has received so much more on every connection.
    pub fn await_more(&self, bytes: u64) -> Result<()> {
        self.await_beyond(&self.mark(), bytes)
    }

    /// How much has been received, by end and connection.
    pub fn mark(&self) -> [Vec<u64>; 2] {
        [SERVER, CLIENT].map(|end| {
            // It may have just been started.
            let p = self.progress(end).unwrap_or_default();
            p.iter().map(|p| p[1]).collect()
        })
    }

    /// Waits until each end that receives has received so much more than at that time.
    pub fn await_beyond(&self, mark: &[Vec<u64>; 2], bytes: u64) -> Result<()> {
        let what = format!("{bytes} more bytes on each connection");
        let ends = [SERVER, CLIENT].into_iter();
        for end in ends.filter(|&e| self.plan.ends[e].receives) {
            let enough = |(number, p): (usize, &[u64; 2])| {
                p[1] >= bytes + mark[end].get(number).copied().unwrap_or(0)
            };
            self.ends[end]
                .until(&what, PATIENCE, || {
                    let now = self.progress(end).unwrap_or_default();
                    !now.is_empty() && now.iter().enumerate().all(enough)
                })
                .with_context(|| format!("from {:?} to {:?}", mark[end], self.progress(end)))?;
        }
        Ok(())
    }

    /// Waits until an end's calls have taken so many bytes on every connection.
    pub fn await_sent(&self, end: usize, bytes: u64) -> Result<()> {
        let what = format!("{bytes} bytes sent on each connection");
        until(&what, PATIENCE, || {
            let now = self.progress(end).unwrap_or_default();
            !now.is_empty() && now.iter().all(|p| p[0] >= bytes)
        })
        .with_context(|| format!("{:?}", self.progress(end)))
    }

    /// Waits until an end has received so many bytes on every connection.
    pub fn await_received(&self, end: usize, bytes: u64) -> Result<()> {
        let what = format!("{bytes} bytes received on each connection");
        until(&what, PATIENCE, || {
            let now = self.progress(end).unwrap_or_default();
            !now.is_empty() && now.iter().all(|p| p[1] >= bytes)
        })
        .with_context(|| format!("{:?}", self.progress(end)))
    }

    pub fn running(&self, end: usize) -> &Running {
        &self.ends[end]
    }

    /// `SIGKILL`.
    pub fn kill(&self, end: usize) -> Result<()> {
        self.ends[end].signal(Signal::SIGKILL)
    }

    /// Tells an end's senders to end. An end that has closed its connections ends itself.
    pub fn stop(&self, end: usize) -> Result<()> {
        self.guests[end].touch(&self.stop)
    }

    /// Stops both ends and waits for them: nothing may have gone wrong, and every byte that one end
    /// has sent the other must have received, the end of file right after it.
    pub fn finish(self) -> Result<u64> {
        self.stop(SERVER)?;
        self.stop(CLIENT)?;
        self.complete()
    }

    /// The same of ends that stop by themselves. Bytes moved.
    pub fn complete(self) -> Result<u64> {
        let [server, client] = self.ends;
        let (client, server) = (client.wait()?, server.wait()?);
        let whole = || -> Result<u64> {
            let ends = [report(&server.stdout)?, report(&client.stdout)?];
            ensure!(server.end == Exit::Code(0) && client.end == Exit::Code(0));
            let mut moved = 0;
            for (from, to) in [(0, 1), (1, 0)] {
                for (number, (a, b)) in ends[from].ends.iter().zip(&ends[to].ends).enumerate() {
                    whole(&a.sent, &b.received).with_context(|| format!("connection {number}"))?;
                    moved += b.received.bytes;
                }
            }
            Ok(moved)
        };
        whole().with_context(|| format!("the server: {server:?}\nthe client: {client:?}"))
    }

    /// The report of an end, whatever it says, once it has ended by itself.
    pub fn report(&mut self, end: usize) -> Result<Report> {
        let r = &self.ends[end];
        until("its end", PATIENCE, || r.has_ended())
            .with_context(|| format!("{:?} {}", self.progress(end), r.stderr()))?;
        report(&r.stdout()).with_context(|| r.stderr())
    }
}

/// The report in a program's output.
pub fn report(stdout: &str) -> Result<Report> {
    let line = stdout.lines().find_map(|l| l.strip_prefix("result "));
    Ok(serde_json::from_str(line.context("no result")?)?)
}

/// Is this all, and did it end well?
pub fn whole(sent: &Way, received: &Way) -> Result<()> {
    let good = |o: &Outcome| matches!(o, Outcome::Done | Outcome::Unused);
    ensure!(
        good(&sent.outcome) && good(&received.outcome) && sent.bytes == received.bytes,
        "sent {sent:?}, received {received:?}"
    );
    Ok(())
}

/// What may become of an end whose peer's calls have taken `taken` bytes before its process went away:
/// all of them arrive and then comes the end of file (yes), or the program is told that the
/// connection was reset (no). What must never be is an end of file before them that nobody calls
/// an error. As in TCP it may be the sender to whom the reset is told, and then the receiver sees an
/// end of file.
pub fn all_or_reset(end: &End, taken: u64) -> Result<bool> {
    let reset = |o: &Outcome| matches!(o, Outcome::Error(_, e) if e == "ECONNRESET");
    match &end.received.outcome {
        Outcome::Done if end.received.bytes >= taken => Ok(true),
        Outcome::Done if reset(&end.sent.outcome) => Ok(false),
        o if reset(o) => Ok(false),
        _ => anyhow::bail!("{taken} bytes were taken, and their receiver saw {end:?}"),
    }
}
