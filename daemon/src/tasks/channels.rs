//! The channels to the daemons of other nodes: dialing and accepting, reading and writing, noticing that a peer is
//! dead, replacing certificates.
//!
//! Both nodes of a pair dial. If that makes two channels, both nodes decide in the same way which one is kept
//! (`Peers::admit`). Every wait for a peer has a time-out, and what is queued for it has a limit.

mod context;
mod handshake;
pub mod tls;
mod unnamed;

use crate::clients::limits::Limit;
use crate::clients::places::Place;
use crate::config::{NodeConfig, TlsConfig};
use crate::core::Shared;
use crate::nodes::peers::cut::Cut;
use crate::nodes::peers::directory::{Name, PORT};
use crate::nodes::peers::msg::{CloseReason, Msg};
use crate::nodes::peers::{Peers, QUEUE};
use crate::os::panics::{contain, injected, Part};
use crate::os::random::random;
use bytes::BytesMut;
use context::Context;
use handshake::{Failure, Ready};
use lane::proto::reason::Reason;
use socket2::{Domain, Protocol, Socket, Type};
use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::mpsc;
use tracing::Instrument;
use unnamed::Unnamed;

/// Pause between attempts to connect: at first, the longest, and the shortest even if something asks for a retry.
const DIAL_BACKOFF_MIN: Duration = Duration::from_millis(250);
const DIAL_BACKOFF_MAX: Duration = Duration::from_secs(15);
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(100);
/// A channel that lasted longer than this resets the pause to `DIAL_BACKOFF_MIN`.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// A side with nothing to send sends a ping after `PING`; a peer that is silent for `SILENT` is dead.
const PING: Duration = Duration::from_secs(5);
const SILENT: Duration = Duration::from_secs(16);
/// Connections that are accepted before it is the others' turn, and the pause then.
const ACCEPTS: u64 = 16;
const BETWEEN: Duration = Duration::from_millis(5);
/// How often the certificate files and the deadlines are checked.
const TICK: Duration = Duration::from_secs(1);
/// Pause between two looks at a directory that changes.
const BETWEEN_CHANGES: Duration = Duration::from_millis(500);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Starts to listen for peers, as configured.
pub fn listen(node: &NodeConfig) -> std::io::Result<TcpListener> {
    if let Ok(a) = node.control.parse::<SocketAddr>() {
        return listen_at(a);
    }
    // Both kinds of addresses, if this kernel has both.
    match listen_at((Ipv6Addr::UNSPECIFIED, PORT).into()) {
        Ok(l) => Ok(l),
        Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => Err(e),
        Err(_) => listen_at((Ipv4Addr::UNSPECIFIED, PORT).into()),
    }
}

fn listen_at(at: SocketAddr) -> std::io::Result<TcpListener> {
    let s = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    if at.is_ipv6() {
        s.set_only_v6(false)?; // whatever net.ipv6.bindv6only says
    }
    s.set_reuse_address(true)?; // connections of the previous daemon must not block the port
    s.bind(&at.into())?;
    s.listen(BACKLOG)?;
    s.set_nonblocking(true)?;
    TcpListener::from_std(s.into())
}

/// Runs all channels, for ever.
pub async fn run(shared: Shared, files: TlsConfig, listener: TcpListener) {
    let (directory, incarnation) = {
        let mut core = shared.borrow_mut();
        let incarnation = core.incarnation;
        let Some(peers) = &mut core.peers else { return };
        peers.node.listens = listener
            .local_addr()
            .map(|a| a.to_string())
            .unwrap_or_default();
        (peers.directory.clone(), incarnation)
    };
    let ctx = Rc::new(Context {
        own: directory.own().clone(),
        directory,
        incarnation,
        files,
        identity: RefCell::default(),
        unnamed: Unnamed::new(),
        shared,
    });
    let stamps = tls::stamps(&ctx.files);
    ctx.load();
    // (Those that came since the core was made are among the changes.)
    let known = ctx.shared.borrow().peers.as_ref().map(Peers::names);
    for name in known.unwrap_or_default() {
        tokio::task::spawn_local(dialer(ctx.clone(), name));
    }
    tokio::task::spawn_local(follow(ctx.clone()));
    tokio::task::spawn_local(watch(ctx.clone(), stamps));
    accept(ctx, listener).await
}

/// Tells all peers that the daemon stops, so that they can show the reason. Waits 500 ms at most: a peer that has
/// not read it by then does not listen.
pub async fn stop(shared: &Shared) {
    if let Some(p) = &shared.borrow().peers {
        p.cut_all(CloseReason::Stopping, "the daemon was told to stop");
    }
    let left = || shared.borrow().peers.as_ref().map_or(0, |p| p.channels());
    let end = Instant::now() + Duration::from_millis(500);
    while left() > 0 && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Handles deadlines of the pairing, and loads certificate files that have changed (or at SIGHUP).
async fn watch(ctx: Rc<Context>, mut stamps: tls::Stamps) {
    let mut hup = signal(SignalKind::hangup()).ok();
    let mut timer = tokio::time::interval(TICK);
    loop {
        let told = async {
            match &mut hup {
                Some(h) => h.recv().await,
                None => std::future::pending().await,
            }
        };
        let told = tokio::select! {
            _ = timer.tick() => false,
            _ = told => true,
        };
        ctx.shared.borrow_mut().tick_across();
        let seen = tls::stamps(&ctx.files);
        if !told && seen == stamps {
            continue;
        }
        // Stored before the files are read, so that a change during the read is seen at the next tick.
        stamps = seen;
        if ctx.load() {
            tracing::info!("certificates read anew");
            if let Some(p) = &ctx.shared.borrow().peers {
                p.cut_all(CloseReason::Rotated, "certificates were replaced");
            }
        }
    }
}

/// Carries out what changes in the directory.
async fn follow(ctx: Rc<Context>) {
    let Some(mut changes) = ctx.directory.changes() else {
        return;
    };
    changes.mark_changed();
    while changes.changed().await.is_ok() {
        let come = ctx.shared.borrow_mut().nodes_changed();
        for name in come {
            tokio::task::spawn_local(dialer(ctx.clone(), name));
        }
        tokio::time::sleep(BETWEEN_CHANGES).await;
    }
}

/// A random time between half of `d` and all of it, so that nodes do not connect at the same moment.
fn jitter(d: Duration) -> Duration {
    let half = u64::try_from(d.as_millis()).unwrap_or(u64::MAX) / 2;
    Duration::from_millis(half + random() % (half + 1))
}

/// Keeps a channel to one peer, as long as it is one.
async fn dialer(ctx: Rc<Context>, name: Name) {
    let Some(redial) = ctx.redial(&name) else {
        return;
    };
    let mut pause = DIAL_BACKOFF_MIN;
    loop {
        // (A node that has gone and come again has a dialer of its own.)
        let ours = || ctx.redial(&name).is_some_and(|r| Rc::ptr_eq(&r, &redial));
        while ours() && ctx.up(&name) {
            redial.notified().await;
        }
        let Some(peer) = ctx.directory.find(&name).filter(|_| ours()) else {
            return;
        };
        let begin = Instant::now();
        let dialed = tokio::time::timeout(2 * handshake::TIME, handshake::dial(&ctx, &peer));
        let dialed = contain(Part::Node, dialed)
            .await
            .unwrap_or_else(|| Ok(Err(handshake::failed(&peer.name))));
        let failure = match dialed {
            Ok(Ok(ready)) => {
                serve(&ctx, ready).await;
                if begin.elapsed() > HEALTHY_AFTER {
                    pause = DIAL_BACKOFF_MIN;
                }
                None
            }
            Ok(Err(f)) => Some((f.duplicate, f.text, f.reason)),
            Err(_) => Some((
                false,
                "no answer to the handshake".into(),
                Reason::PeerDaemon,
            )),
        };
        if let Some((false, text, reason)) = failure {
            let mut core = ctx.shared.borrow_mut();
            core.channel_failed(&peer.name, &text, reason);
        }
        tokio::time::sleep(DIAL_PAUSE_MIN).await;
        tokio::select! {
            () = tokio::time::sleep(jitter(pause)) => {}
            () = redial.notified() => {}
        }
        pause = (pause * 2).min(DIAL_BACKOFF_MAX);
    }
}

async fn accept(ctx: Rc<Context>, listener: TcpListener) {
    for n in 1u64.. {
        match listener.accept().await {
            Ok((tcp, from)) => {
                let ip = from.ip().to_canonical();
                let entered = ctx.unnamed.enter(ip, &*ctx.directory);
                if !matches!(entered, Some((_, false))) {
                    let refused = ctx.shared.borrow().cgroups.refused.clone();
                    refused.count(Limit::Nodes);
                }
                if let Some((place, _)) = entered {
                    tokio::task::spawn_local(greet(ctx.clone(), tcp, from, place));
                }
                if n % ACCEPTS == 0 {
                    tokio::time::sleep(BETWEEN).await;
                }
            }
            Err(e) => {
                tracing::warn!("accept: {e}"); // out of descriptors or memory: it will pass
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn greet(ctx: Rc<Context>, tcp: TcpStream, from: SocketAddr, place: Place) {
    let accepted = tokio::select! {
        accepted = contain(Part::Node, tokio::time::timeout(handshake::TIME, handshake::accept(&ctx, tcp, from))) => accepted,
        () = place.has_to_leave() => return,
    };
    drop(place);
    let ip = from.ip().to_canonical();
    match accepted {
        None => {} // (it has changed nothing)
        Some(Ok(Ok(ready))) => serve(&ctx, ready).await,
        Some(Ok(Err(Failure {
            node: Some(node),
            text,
            reason,
            ..
        }))) => ctx.shared.borrow_mut().channel_failed(&node, &text, reason),
        Some(Ok(Err(f))) => stranger(&ctx, ip, &f.text),
        Some(Err(_)) => stranger(&ctx, ip, "it did not say who it is in time"),
    }
}

fn stranger(ctx: &Context, ip: IpAddr, why: &str) {
    if let Some(p) = &mut ctx.shared.borrow_mut().peers {
        p.refused(ip, why);
    }
}

/// Why a channel ends that has met one.
const DEFECT: &str = "a defect in the other daemon";

/// Why a channel ends, and whether the peer is told.
struct End {
    text: String,
    close: Option<CloseReason>,
    reason: Reason,
}

impl End {
    fn silent(text: impl Into<String>) -> End {
        End {
            text: text.into(),
            close: None,
            reason: Reason::PeerDaemon,
        }
    }

    fn told(code: CloseReason, text: impl Into<String>) -> End {
        End {
            close: Some(code),
            ..End::silent(text)
        }
    }
}

/// Serves a channel to its end. What is logged meanwhile has the node's name.
async fn serve(ctx: &Rc<Context>, ready: Ready) {
    let span = tracing::info_span!("channel", node = %ready.accepted.node);
    serve_within(ctx, ready).instrument(span).await;
}

async fn serve_within(ctx: &Rc<Context>, ready: Ready) {
    let Ready {
        mut stream,
        mut frames,
        accepted,
        key,
        room,
    } = ready;
    let (queue, mut waiting) = mpsc::channel(QUEUE);
    let cut = Rc::new(Cut::default());
    let up = {
        let mut core = ctx.shared.borrow_mut();
        core.channel_up(&accepted, key, room, queue.clone(), cut.clone())
    };
    let Some(id) = up else {
        let text = "another channel is used";
        return handshake::part(&mut stream, CloseReason::Duplicate, text).await;
    };
    if !accepted.we_dialed {
        // The hello must precede everything that is queued.
        if let Err(e) = handshake::say(&mut stream, &handshake::hello(ctx)).await {
            let text = tls::explain(&e);
            return down(ctx, &accepted.node, id, &End::silent(text));
        }
    }
    let (mut r, mut w) = tokio::io::split(stream);
    let busy = Cell::new(false);
    // The channel ends when a certificate expires; a node that has renewed its certificate connects again.
    let own = ctx.identity().map_or(accepted.expires, |i| i.own.not_after);
    let valid = tls::left(accepted.expires.min(own));
    let end = tokio::select! {
        e = contain(Part::Node, read(ctx, &accepted.node, id, &mut r, &mut frames, &queue)) => e.unwrap_or_else(|| {
            ctx.shared.borrow_mut().recover();
            End::told(CloseReason::Other, DEFECT)
        }),
        e = write(&mut w, &mut waiting, &busy) => e,
        (code, text) = cut.wait() => End::told(code, text),
        () = tokio::time::sleep(valid) => End::told(CloseReason::Identity, "a certificate has expired"),
    };
    if let (Some(code), false) = (end.close, busy.get()) {
        handshake::part(&mut w, code, &end.text).await;
    }
    down(ctx, &accepted.node, id, &end);
}

fn down(ctx: &Context, node: &Name, id: u64, end: &End) {
    let mut core = ctx.shared.borrow_mut();
    core.channel_down(node, id, &end.text, end.reason);
}

async fn read<R: AsyncReadExt + Unpin>(
    ctx: &Context,
    node: &Name,
    id: u64,
    r: &mut R,
    frames: &mut crate::nodes::peers::msg::Frames,
    queue: &mpsc::Sender<Msg>,
) -> End {
    loop {
        loop {
            let msg = match frames.take() {
                Ok(Some(m)) => m,
                Ok(None) => break,
                Err(e) => return End::told(CloseReason::Malformed, format!("the peer sent {e}")),
            };
            match msg {
                Msg::Ping { n } => {
                    if queue.try_send(Msg::Pong { n }).is_err() {
                        return End::told(CloseReason::Other, "too much is unread");
                    }
                }
                Msg::Close { code, text } => {
                    return End {
                        reason: match code {
                            CloseReason::Version => Reason::VersionMismatch,
                            _ => Reason::PeerDaemon,
                        },
                        ..End::silent(format!("the peer says: {}", handshake::clean(&text)))
                    }
                }
                msg => {
                    let done = ctx.shared.borrow_mut().peer_message(node, id, msg);
                    if let Err(e) = done {
                        return End::told(CloseReason::Malformed, format!("the peer sent {e}"));
                    }
                }
            }
        }
        // A peer that never pauses must not keep the others waiting.
        tokio::task::yield_now().await;
        match tokio::time::timeout(SILENT, r.read_buf(frames.room())).await {
            Ok(Ok(0)) => return End::silent("the peer closed the channel"),
            Ok(Ok(_)) => injected(frames.room(), || ctx.shared.borrow_mut().half_done()),
            Ok(Err(e)) => return End::silent(tls::explain(&e)),
            Err(_) => return End::told(CloseReason::Other, "nothing was heard for too long"),
        }
    }
}

async fn write<W: AsyncWriteExt + Unpin>(
    w: &mut W,
    waiting: &mut mpsc::Receiver<Msg>,
    busy: &Cell<bool>,
) -> End {
    /// Messages put into one write.
    const BATCH: usize = 64;
    let mut count = 0;
    let mut msgs = Vec::with_capacity(BATCH);
    let mut bytes = BytesMut::new();
    loop {
        msgs.clear();
        match tokio::time::timeout(PING, waiting.recv_many(&mut msgs, BATCH)).await {
            Ok(0) => return End::silent("the core is gone"),
            Ok(_) => {}
            Err(_) => {
                count += 1;
                msgs.push(Msg::Ping { n: count });
            }
        }
        bytes.clear();
        msgs.iter().for_each(|m| m.encode(&mut bytes));
        busy.set(true);
        let put = async {
            w.write_all(&bytes).await?;
            w.flush().await
        };
        match tokio::time::timeout(SILENT, put).await {
            Ok(Ok(())) => busy.set(false),
            Ok(Err(e)) => return End::silent(tls::explain(&e)),
            Err(_) => return End::silent("the peer does not read"),
        }
    }
}
