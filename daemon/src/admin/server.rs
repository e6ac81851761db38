//! The admin socket: one request and one answer per connection, as `admin` defines them.
//!
//! The caller is identified by its socket, not by what it says: a caller sees its own network namespace; root (and
//! the daemon's own user) in the daemon's namespace sees all; and only they may act on processes of other users. At the
//! socket for pods, a caller sees its pod's connections and nothing else, whoever it is.

use crate::admin::caller::{who, who_in_pod, Caller};
use crate::admin::capture;
use crate::admin::census;
use crate::admin::check;
use crate::admin::gate::{Callers, Gate};
use crate::admin::rail_view;
use crate::admin::rules::apply;
use crate::admin::stream::{self, Versions};
use crate::clients::control::DATAGRAMS;
use crate::clients::limits::Limit;
use crate::clients::view::Entry;
use crate::core::commands::CommandTarget;
use crate::core::Shared;
use crate::os::address::normal;
use crate::os::panics::{contain, injected, Part};
use crate::os::process::Process;
use crate::pods::unused;
use crate::rules::{self, Rules};
use crate::tasks::readings;
use lane::proto::msg::{op, ALL};
use lane::proto::reason::Reason;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::{UnixListener, UnixStream};
use underpass_admin::proc;
use underpass_admin::{Request, Response, Stats, Target};

/// How long a caller may take for its request, and to read the answer.
const TIME: Duration = Duration::from_secs(10);
/// How long a caller waits for the scan of `/proc` that the daemon makes at its start.
const SCAN: Duration = Duration::from_secs(3);
/// Longest request, in bytes.
const LONGEST: u64 = 64 << 10;
/// How often there is a new look for a pod.
const LATE: Duration = Duration::from_secs(1);
/// An answer is written in parts of this size, each of which the caller must read within [`TIME`].
const CHUNK: usize = 256 << 10;
/// Connections that are accepted before others get their turn.
const ACCEPTS: u64 = 8;

/// Makes the listening socket; a file that is left over is replaced.
pub(crate) fn listen(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    UnixListener::bind(path)
}

/// What the connections at one socket share.
struct Server {
    gate: Gate,
    callers: Rc<Callers>,
    versions: Versions,
}

/// Accepts for ever.
pub(crate) async fn serve(shared: Shared, listener: UnixListener, gate: Gate) {
    let server = Rc::new(Server {
        gate,
        callers: Callers::new(gate),
        versions: Versions::default(),
    });
    for n in 1u64.. {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (shared, server) = (shared.clone(), server.clone());
                tokio::task::spawn_local(async move {
                    let met = meet(shared.clone(), &server, stream);
                    match contain(Part::Tool, met).await {
                        Some(Ok(())) => {}
                        Some(Err(e)) => tracing::debug!("admin connection: {e}"),
                        None => shared.borrow_mut().recover(),
                    }
                });
            }
            Err(e) => {
                tracing::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        // Whoever connects all the time must not keep the core from its work: who he is takes reading in `/proc`.
        if n % ACCEPTS == 0 {
            tokio::task::yield_now().await;
        }
    }
}

/// Gives the connection its place, and answers until it must make way.
async fn meet(shared: Shared, server: &Server, mut stream: UnixStream) -> std::io::Result<()> {
    let accepted = proc::now_ticks();
    let caller = match server.gate {
        Gate::Node => who(&stream, accepted),
        Gate::Pods => {
            let known = shared.borrow().pods.clone();
            who_in_pod(&known, &stream, accepted)
        }
    };
    let counted = caller.as_ref().map(|c| c.tenant.as_str());
    let root = caller.as_ref().is_some_and(|c| c.all);
    // (Those who are not known are one tenant.)
    let place = (!root).then(|| server.callers.take(counted.unwrap_or_default()));
    if !matches!(place, None | Some(Some((_, false)))) {
        shared.borrow().cgroups.refused.count(Limit::Tools);
    }
    let place = match place {
        Some(taken) => Some(taken.ok_or(std::io::ErrorKind::ResourceBusy)?.0),
        None => None,
    };
    let begun = {
        let talk = talk(&shared, server, &mut stream, (caller, accepted));
        match &place {
            None => talk.await?,
            Some(place) => tokio::select! {
                begun = talk => begun?,
                () = place.has_to_leave() => return Err(std::io::ErrorKind::ResourceBusy.into()),
            },
        }
    };
    // Captures have a limit of their own.
    drop(place);
    match begun {
        Some(begun) => begun.serve(shared, stream).await,
        None => Ok(()),
    }
}

/// One request and its answer; but a capture is only begun.
async fn talk(
    shared: &Shared,
    server: &Server,
    stream: &mut UnixStream,
    (caller, accepted): (Option<Caller>, u64),
) -> std::io::Result<Option<capture::Begun>> {
    let line = tokio::time::timeout(TIME, line_of(stream)).await??;
    injected(line.as_bytes(), || shared.borrow_mut().half_done());
    let request = serde_json::from_str::<Request>(&line);
    // What costs nothing is not waited for.
    let tenant = caller.as_ref().filter(|c| !c.all).map(|c| &c.tenant);
    let _turn = match (tenant, &request) {
        (Some(tenant), Ok(r)) if !matches!(r, Request::Ping | Request::Keep) => {
            server.callers.turn(tenant).await
        }
        _ => None,
    };
    let response = match (caller, request) {
        (None, _) => Response::Error {
            message: "cannot tell who is asking".into(),
        },
        (_, Err(e)) => Response::Error {
            message: format!("bad request: {e}"),
        },
        (Some(Caller { pod: Some(_), .. }), Ok(r)) if !matches!(r, Request::Ss | Request::Ping) => {
            Response::Error {
                message: "from here only connections are shown".into(),
            }
        }
        (Some(_), Ok(Request::Keep)) => match keep(shared, &*stream, accepted) {
            Ok(()) => pong(shared),
            Err(message) => Response::Error { message },
        },
        (Some(caller), Ok(Request::Capture { target })) => {
            let all = entries(shared).await;
            match capture::begin(shared, caller, &target, &all).await {
                Ok(begun) => return Ok(Some(begun)),
                Err(message) => Response::Error { message },
            }
        }
        (Some(caller), Ok(Request::Ss)) => {
            let all = match &caller.pod {
                Some(pod) => entries_of_late(shared, pod, LATE).await,
                None => entries(shared).await,
            };
            let written = stream::write(stream, (all, caller), &server.versions, TIME);
            return written.await.map(|()| None);
        }
        (Some(caller), Ok(request)) => answer(shared, caller, request).await,
    };
    // Serializing may take long, so it is done on a helper thread.
    let text = tokio::task::spawn_blocking(move || serde_json::to_vec(&response)).await??;
    for part in text.chunks(CHUNK).chain([&b"\n"[..]]) {
        tokio::time::timeout(TIME, stream.write_all(part)).await??;
    }
    Ok(None)
}

/// The request: what comes before the first end of line.
async fn line_of(stream: &mut UnixStream) -> std::io::Result<String> {
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST))
        .read_line(&mut line)
        .await?;
    Ok(line)
}

fn pong(shared: &Shared) -> Response {
    let c = shared.borrow();
    Response::Pong {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        uptime_s: c.now().saturating_sub(c.started).as_secs(),
        proof: c.proof.active(),
    }
}

/// The process at the other end wants the daemon to stay as long as it lives.
fn keep(shared: &Shared, sock: impl AsFd, accepted: u64) -> Result<(), String> {
    if !shared.borrow().leaves {
        return Ok(());
    }
    let mut process =
        Process::of_peer(sock.as_fd(), accepted).map_err(|e| format!("cannot stay for it: {e}"))?;
    let pidfd = process.take_pidfd().ok_or("no pidfd")?;
    let pidfd = crate::os::fds::watch(pidfd, Interest::READABLE).map_err(|e| e.to_string())?;
    let member = shared.borrow_mut().keep(&process);
    let member = member.ok_or_else(|| Reason::Limit.info().text.to_owned())?;
    let shared = shared.clone();
    tokio::task::spawn_local(async move {
        drop(pidfd.readable().await);
        drop(member);
        shared.borrow_mut().unkeep();
    });
    Ok(())
}

async fn answer(shared: &Shared, caller: Caller, request: Request) -> Response {
    match request {
        Request::Ping | Request::Keep => pong(shared),
        Request::Stats => {
            let sums = shared.borrow().sums.clone();
            let all = sums.share(|| stats(shared)).await;
            let mut stats = Box::new((*all).clone());
            if !caller.all {
                stats.rails.iter_mut().for_each(rail_view::hide_nodes);
            }
            Response::Stats { stats }
        }
        Request::Down { target } => tell(shared, caller, &target, op::DOWN).await,
        Request::Up { target } => {
            let told = tell(shared, caller, &target, op::UP).await;
            // (What a rule denies stays down.)
            let rules = shared.borrow().rules.clone();
            follow_rules(shared, &rules).await;
            told
        }
        Request::Rules | Request::Rule { .. } | Request::Unrule { .. } if !caller.all => {
            Response::Error {
                message: "rules are root's, on the node".into(),
            }
        }
        Request::Rules => {
            let [added, configured] = shared.borrow().rules.shown();
            Response::Rules { added, configured }
        }
        Request::Rule { rule } => change_rules(shared, |all| all.add(rule)).await,
        Request::Unrule { number } => change_rules(shared, |all| all.delete(number)).await,
        // (Their answers go on for as long as the caller reads: `talk`.)
        Request::Capture { .. } | Request::Ss => Response::Error {
            message: "not from here".into(),
        },
        Request::Check { local, peer } => match (parse(&local), parse(&peer)) {
            (Some(a), Some(b)) => {
                let all = entries(shared).await;
                check::check(shared, caller, (a, b), all).await
            }
            _ => Response::Error {
                message: "an address is not `ip:port`".into(),
            },
        },
        // Processes in containers must not learn the names and addresses of nodes.
        Request::Peers if !caller.all => Response::Error {
            message: "the nodes are shown to root on the node only".into(),
        },
        Request::Peers => {
            let states = shared.borrow().peers.as_ref().map(|p| p.states());
            let (node, peers, refused) = states.unwrap_or_default();
            Response::Peers {
                node,
                peers,
                refused,
            }
        }
        Request::Pods if !caller.all => Response::Error {
            message: "containers are shown to root on the node only".into(),
        },
        Request::Pods => pods(shared).await,
        Request::Clients => {
            let core = shared.borrow();
            let all = core.clients.values().filter(|p| p.control.is_some());
            let mine = all.filter(|p| caller.sees(p.netns));
            let pids = mine.map(|p| p.proc_id.pid).collect();
            Response::Clients { pids }
        }
        Request::Log => {
            let lines = shared
                .borrow()
                .events
                .lines(|a| caller.may_act(a.uid, a.netns));
            Response::Log { lines }
        }
    }
}

/// All rows of `ss`, including those of programs that are older than this daemon.
async fn entries(shared: &Shared) -> Arc<Vec<Entry>> {
    let looks = shared.borrow().looks.clone();
    looks.share(|| look(shared)).await
}

/// The same for somebody who may ask as often as he likes: there is a new look only after this time.
pub(crate) async fn entries_of_late(shared: &Shared, who: &str, time: Duration) -> Arc<Vec<Entry>> {
    let looks = shared.borrow().looks.clone();
    looks.share_late((who, time), || look(shared)).await
}

async fn look(shared: &Shared) -> Vec<Entry> {
    let done = shared.borrow().scan_done.clone();
    let done = done.notified();
    if !shared.borrow().scanned {
        let _ = tokio::time::timeout(SCAN, done).await;
    }
    let began = proc::now_ticks();
    let census = census::take(shared).await;
    let families = shared.borrow().snapshot();
    let across = shared.borrow().waiting_across();
    let waiting = shared.borrow().waiting_here();
    let given = shared.borrow().groups.ends();
    let alone = shared.borrow().peers.is_none();
    let pods = shared.borrow().pods.clone();
    let work = move || census::rows::rows(families, census, (&waiting, &given), alone);
    let unnamed = tokio::task::spawn_blocking(work).await;
    let mut unnamed = unnamed.unwrap_or_default();
    if let Some(peers) = &shared.borrow().peers {
        // (An address of another node may be used here, too.)
        unnamed.lost.retain(|l| {
            let there = across.get(&l.who).is_some_and(|s| s.elsewhere);
            !there && !peers.is_another_nodes(l.peer.ip())
        });
    }
    let work = move || {
        let mut all = unnamed.named();
        crate::core::across::explain(&mut all, &across);
        for e in &mut all {
            e.row.at = pods.of_process(e.row.pid, began);
        }
        all
    };
    let mut all = tokio::task::spawn_blocking(work).await.unwrap_or_default();
    shared.borrow().fill_rails(&mut all);
    all
}

/// The containers, with the connections of each.
async fn pods(shared: &Shared) -> Response {
    let all = entries(shared).await;
    let known = shared.borrow().pods.clone();
    let look = move || {
        let mut rows = known.rows();
        unused::mark(&mut rows, &known);
        rows
    };
    let mut rows = tokio::task::spawn_blocking(look).await.unwrap_or_default();
    let core = shared.borrow();
    let at: HashMap<String, usize> = rows
        .iter()
        .enumerate()
        .map(|(n, r)| (r.at.id.clone(), n))
        .collect();
    for e in all.iter().filter(|e| e.row.state == "ACTIVE") {
        let n = e.row.at.as_ref().and_then(|w| at.get(&w.id));
        let Some(r) = n.and_then(|n| rows.get_mut(*n)) else {
            continue;
        };
        match e.row.mode.as_str() {
            "SMCD" => r.smcd += 1,
            "SMCR" => r.smcr += 1,
            _ => r.tcp += 1,
        }
    }
    let runtime = core.config.pods.nri.display().to_string();
    Response::Pods { rows, runtime }
}

async fn stats(shared: &Shared) -> Stats {
    let (mut stats, chunks) = {
        let c = shared.borrow();
        let stats = Stats {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: c.now().saturating_sub(c.started).as_secs(),
            proof: c.proof.active(),
            clients: c.clients.values().filter(|p| p.control.is_some()).count() as u64,
            links: c.groups.len() as u64,
            lanes: c.groups.lanes(),
            registered: c.counters.registered,
            paired: c.counters.paired,
            paired_across: c.counters.paired_across,
            taken_over: c.counters.taken_over,
            declined: c.counters.declined,
            datagrams: DATAGRAMS.load(Relaxed),
            rails: c.rail_stats(),
            ..Stats::default()
        };
        (stats, c.groups.memory())
    };
    let touched = move || chunks.iter().map(|c| crate::os::memfd::touched(c)).sum();
    stats.memory_bytes = tokio::task::spawn_blocking(touched).await.unwrap_or(0);
    let sum = readings::read_all(shared).await;
    stats.promoted = sum.promoted;
    stats.ups = sum.ups;
    stats.downs = sum.downs;
    stats.lane_tx_bytes = sum.lane_tx;
    stats.lane_rx_bytes = sum.lane_rx;
    stats.rings = sum.rings;
    stats.sleeps = sum.sleeps;
    stats.resets = sum.resets;
    stats.deaths = sum.deaths;
    stats
}

async fn change_rules(
    shared: &Shared,
    change: impl FnOnce(&mut Rules) -> Result<(), rules::Error>,
) -> Response {
    let before = shared.borrow().rules.clone();
    let changed = change(&mut shared.borrow_mut().rules);
    match changed {
        Ok(()) => follow_rules(shared, &before).await,
        Err(e) => Response::Error {
            message: e.to_string(),
        },
    }
}

/// Connections go down or up as the rules say now. `before`: what they said when the connections were told last.
pub(crate) async fn follow_rules(shared: &Shared, before: &Rules) -> Response {
    let nothing = before.is_empty() && shared.borrow().rules.is_empty();
    if nothing {
        return Response::Told { ends: 0, later: 0 };
    }
    let all = entries(shared).await;
    apply(shared, &all, before)
}

/// `down` and `up`.
async fn tell(shared: &Shared, caller: Caller, target: &Target, op: u32) -> Response {
    let all = entries(shared).await;
    let mut core = shared.borrow_mut();
    let mut targets = core.command_targets();
    let owners: HashMap<_, _> = targets.iter().map(|s| ((s.client, s.pid), *s)).collect();
    let owner = |e: &Entry| {
        let s = owners.get(&(e.client, e.row.pid))?;
        caller.may_act(s.uid, e.row.netns).then_some(*s)
    };
    let open = |e: &&Entry| e.is_steerable();
    let (mut ends, mut later) = (0, 0);
    let mut count = |now: bool| *(if now { &mut ends } else { &mut later }) += 1;
    let named: Vec<&Entry> = match target {
        // The command goes to the processes, so that it also applies to their later connections.
        Target::All | Target::Pid(_) => {
            let is = |s: &CommandTarget| !matches!(target, Target::Pid(p) if *p != s.pid);
            targets.retain(|s| is(s) && caller.may_act(s.uid, s.netns));
            let told: HashMap<_, _> = targets
                .iter()
                .map(|s| (*s, core.command_to(*s, ALL, 0, op)))
                .collect();
            let of = |e: &Entry| told.get(&owner(e)?).copied();
            all.iter().filter(open).filter_map(of).for_each(count);
            return Response::Told { ends, later };
        }
        Target::Inode(i) => all.iter().filter(|e| e.row.inode == *i).collect(),
        Target::Pair { local, peer } => {
            let (Some(a), Some(b)) = (parse(local), parse(peer)) else {
                return Response::Error {
                    message: "an address is not `ip:port`".into(),
                };
            };
            let (a, b) = (a.to_string(), b.to_string());
            let is = |e: &&Entry| {
                (e.row.local == a && e.row.peer == b) || (e.row.local == b && e.row.peer == a)
            };
            all.iter().filter(is).collect()
        }
    };
    let mine = |e: &&Entry| owner(e).is_some();
    let mut named: Vec<&Entry> = named.into_iter().filter(open).filter(mine).collect();
    let others = named.iter().filter_map(|e| all.get(e.other?));
    let others: Vec<&Entry> = others.filter(mine).collect();
    named.extend(others);
    named.sort_by_key(|e| (e.client, e.row.pid, e.conn));
    named.dedup_by_key(|e| (e.client, e.row.pid, e.conn));
    for (e, to) in named.iter().filter_map(|e| Some((e, owner(e)?))) {
        count(core.command_to(to, e.conn, e.gen, op));
    }
    Response::Told { ends, later }
}

fn parse(s: &str) -> Option<SocketAddr> {
    s.parse().ok().map(normal)
}
