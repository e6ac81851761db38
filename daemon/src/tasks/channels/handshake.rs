//! From a TCP connection to a channel: TLS, the check which node the certificate belongs to, and the two hellos.
//!
//! The side that dials says hello first. A side that finds something wrong says so in a `Close`, so that both ends
//! can show the reason; if TLS itself fails, its alert says so.

use super::context::Context;
use super::tls;
use crate::nodes::peers::digest::{Key, LABEL};
use crate::nodes::peers::directory::{Name, Peer};
use crate::nodes::peers::msg::{CloseReason, Frames, Msg, MIN_VERSION, VERSION};
use crate::nodes::peers::{pairing, Accepted};
use crate::os::panics::injected;
use bytes::BytesMut;
use lane::num;
use lane::proto::reason::Reason;
use rustls::pki_types::{CertificateDer, ServerName};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use underpass_admin::certificate;

/// Time limit for an accepted handshake, and for connecting; the dialer has twice as long in all.
pub(crate) const TIME: Duration = Duration::from_secs(10);
/// How long data on a channel may stay unacknowledged before TCP gives up (TCP_USER_TIMEOUT).
const UNACKED: Duration = Duration::from_secs(20);

/// A channel that is ready, except that the acceptor has not sent its hello yet.
pub(crate) struct Ready {
    pub stream: TlsStream<TcpStream>,
    pub frames: Frames,
    pub accepted: Accepted,
    pub key: Key,
    /// How many lookups the peer keeps for us, from its hello.
    pub room: usize,
}

/// Why there is no channel.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The peer node, if that is certain.
    pub node: Option<Name>,
    pub text: String,
    pub reason: Reason,
    /// Not an error: another channel of the two nodes is used.
    pub duplicate: bool,
}

impl Failure {
    fn new(node: Option<&Name>, text: impl Into<String>) -> Failure {
        Failure {
            node: node.cloned(),
            text: text.into(),
            reason: Reason::PeerDaemon,
            duplicate: false,
        }
    }
}

/// A handshake has met a defect.
pub(crate) fn failed(node: &Name) -> Failure {
    Failure::new(Some(node), "a defect in this daemon")
}

/// What a hello says.
struct Greeting {
    node: String,
    version: u32,
    incarnation: u64,
    release: String,
    lookups: usize,
}

enum Received {
    Hello(Greeting),
    Close(CloseReason, String),
    /// Another message, or a malformed one.
    Wrong(String),
    /// The versions have none in common: the peer's name, and the text.
    Version(String, String),
}

pub(crate) fn hello(ctx: &Context) -> Msg {
    Msg::Hello {
        version: VERSION,
        min_version: MIN_VERSION,
        node: ctx.own.to_string(),
        incarnation: ctx.incarnation,
        release: env!("CARGO_PKG_VERSION").into(),
        lookups: num::small(pairing::LOOKUPS_MAX),
    }
}

/// Reads the peer's first message.
async fn listen<S: AsyncReadExt + Unpin>(
    s: &mut S,
    f: &mut Frames,
) -> Result<Received, std::io::Error> {
    loop {
        match f.take() {
            Ok(Some(Msg::Hello {
                version,
                min_version,
                node,
                incarnation,
                release,
                lookups,
            })) => {
                let common = version.min(VERSION);
                if common < min_version.max(MIN_VERSION) {
                    let text = format!(
                        "no common version: it speaks {min_version} to {version}, we {MIN_VERSION} to {VERSION}"
                    );
                    return Ok(Received::Version(node, text));
                }
                return Ok(Received::Hello(Greeting {
                    node,
                    version: common,
                    incarnation,
                    release: release
                        .chars()
                        .filter(|c| !c.is_control())
                        .take(64)
                        .collect(),
                    lookups: lookups as usize,
                }));
            }
            Ok(Some(Msg::Close { code, text })) => return Ok(Received::Close(code, text)),
            Ok(Some(_)) => return Ok(Received::Wrong("its first message is no hello".into())),
            Err(e) => return Ok(Received::Wrong(format!("it sent {e}"))),
            Ok(None) => {}
        }
        if s.read_buf(f.room()).await? == 0 {
            return Err(std::io::Error::other(
                "it closed the connection without a hello",
            ));
        }
        injected(f.room(), || ());
    }
}

/// Sends one message.
pub(crate) async fn say<S: AsyncWriteExt + Unpin>(s: &mut S, msg: &Msg) -> std::io::Result<()> {
    let mut bytes = BytesMut::new();
    msg.encode(&mut bytes);
    s.write_all(&bytes).await
}

/// Sends `Close` and shuts the stream down, if that takes at most a second.
pub(crate) async fn part<S: AsyncWriteExt + Unpin>(s: &mut S, code: CloseReason, text: &str) {
    let close = async {
        say(s, &Msg::close(code, text)).await?;
        s.shutdown().await
    };
    // Best effort: the channel ends either way.
    let _ = tokio::time::timeout(Duration::from_secs(1), close).await;
}

fn tune(tcp: &TcpStream) {
    // Errors are ignored: without these options a dead peer is only noticed later.
    let _ = tcp.set_nodelay(true);
    let _ = socket2::SockRef::from(tcp).set_tcp_user_timeout(Some(UNACKED));
}

fn facts(chain: Option<&[CertificateDer<'_>]>) -> Option<certificate::Facts> {
    chain
        .and_then(|c| c.first())
        .and_then(|c| certificate::facts(c))
}

pub(crate) async fn dial(ctx: &Context, peer: &Peer) -> Result<Ready, Failure> {
    let node = &peer.name;
    let fail = |text: String| Failure::new(Some(node), text);
    let Some(identity) = ctx.identity() else {
        return Err(fail(
            "our own certificate cannot be used (see above)".into(),
        ));
    };
    let (host, port) = &peer.control;
    let connect = TcpStream::connect((host.as_str(), *port));
    let tcp = match tokio::time::timeout(TIME, connect).await {
        Ok(r) => r.map_err(|e| fail(format!("cannot connect: {e}")))?,
        Err(_) => return Err(fail("cannot connect: no answer".into())),
    };
    tune(&tcp);
    let address = tcp.peer_addr().map(|a| a.to_string()).unwrap_or_default();
    let name = ServerName::try_from(node.to_string()).map_err(|e| fail(e.to_string()))?;
    let connector = TlsConnector::from(identity.client.clone());
    let mut stream = connector
        .connect(name, tcp)
        .await
        .map_err(|e| fail(tls::explain(&e)))?;
    let conn = stream.get_ref().1;
    let mut secret = [0; 32];
    conn.export_keying_material(&mut secret, LABEL, None)
        .map_err(|e| fail(format!("TLS: {e}")))?;
    let key = Key::new(&secret);
    let theirs = facts(conn.peer_certificates()).ok_or_else(|| fail("no certificate".into()))?;
    let io = |e: std::io::Error| fail(tls::explain(&e));
    say(&mut stream, &hello(ctx)).await.map_err(io)?;
    let mut frames = Frames::default();
    let greeting = match listen(&mut stream, &mut frames).await.map_err(io)? {
        Received::Hello(g) => g,
        Received::Close(code, text) => {
            return Err(Failure {
                duplicate: code == CloseReason::Duplicate,
                reason: match code {
                    CloseReason::Version => Reason::VersionMismatch,
                    _ => Reason::PeerDaemon,
                },
                ..fail(format!("the peer says: {}", clean(&text)))
            })
        }
        Received::Version(_, text) => {
            part(&mut stream, CloseReason::Version, &text).await;
            return Err(Failure {
                reason: Reason::VersionMismatch,
                ..fail(text)
            });
        }
        Received::Wrong(text) => {
            part(&mut stream, CloseReason::Malformed, &text).await;
            return Err(fail(text));
        }
    };
    if certificate::is_older(&theirs, peer.certified_since) {
        part(&mut stream, CloseReason::Identity, OLDER).await;
        return Err(fail(OLDER.into()));
    }
    if greeting.node != **node {
        let text = format!("it calls itself `{}`", clean(&greeting.node));
        part(&mut stream, CloseReason::Identity, &text).await;
        return Err(fail(text));
    }
    let accepted = accepted(greeting, node, address, &theirs, true);
    Ok(Ready {
        room: accepted.0,
        accepted: accepted.1,
        stream: stream.into(),
        frames,
        key,
    })
}

pub(crate) async fn accept(
    ctx: &Context,
    tcp: TcpStream,
    from: SocketAddr,
) -> Result<Ready, Failure> {
    let fail = |text: String| Failure::new(None, text);
    let Some(identity) = ctx.identity() else {
        return Err(fail("our own certificate cannot be used".into()));
    };
    tune(&tcp);
    let acceptor = TlsAcceptor::from(identity.server.clone());
    let mut stream = acceptor
        .accept(tcp)
        .await
        .map_err(|e| fail(tls::explain(&e)))?;
    let conn = stream.get_ref().1;
    let mut secret = [0; 32];
    conn.export_keying_material(&mut secret, LABEL, None)
        .map_err(|e| fail(format!("TLS: {e}")))?;
    let key = Key::new(&secret);
    let theirs = facts(conn.peer_certificates()).ok_or_else(|| fail("no certificate".into()))?;
    let peers = crate::nodes::peers::directory::peers_among(&*ctx.directory, &theirs.names);
    if peers.is_empty() {
        let text = format!(
            "its certificate names [{}], which is no peer of node `{}`",
            clean(&theirs.names.join(", ")),
            ctx.own
        );
        part(&mut stream, CloseReason::Identity, &text).await;
        return Err(fail(text));
    }
    let mut frames = Frames::default();
    let io = |e: std::io::Error| fail(tls::explain(&e));
    let greeting = match listen(&mut stream, &mut frames).await.map_err(io)? {
        Received::Hello(g) => g,
        Received::Close(_, text) => return Err(fail(format!("the peer says: {}", clean(&text)))),
        Received::Version(node, text) => {
            part(&mut stream, CloseReason::Version, &text).await;
            return Err(Failure {
                reason: Reason::VersionMismatch,
                ..Failure::new(peers.get(&*node), text)
            });
        }
        Received::Wrong(text) => {
            part(&mut stream, CloseReason::Malformed, &text).await;
            return Err(fail(text));
        }
    };
    let Some(node) = peers.get(&*greeting.node) else {
        let text = format!(
            "it calls itself `{}`, its certificate names [{}]",
            clean(&greeting.node),
            clean(&theirs.names.join(", "))
        );
        part(&mut stream, CloseReason::Identity, &text).await;
        return Err(fail(text));
    };
    if ctx
        .directory
        .find(node)
        .is_none_or(|p| certificate::is_older(&theirs, p.certified_since))
    {
        part(&mut stream, CloseReason::Identity, OLDER).await;
        return Err(Failure::new(Some(node), OLDER));
    }
    let accepted = accepted(greeting, node, from.to_string(), &theirs, false);
    Ok(Ready {
        room: accepted.0,
        accepted: accepted.1,
        stream: stream.into(),
        frames,
        key,
    })
}

/// Why a certificate is refused that was made before its node.
const OLDER: &str =
    "its certificate is older than its node: it was made for a former one of this name";

fn accepted(
    g: Greeting,
    node: &Name,
    address: String,
    t: &certificate::Facts,
    we_dialed: bool,
) -> (usize, Accepted) {
    let accepted = Accepted {
        node: node.clone(),
        address,
        incarnation: g.incarnation,
        release: g.release,
        version: g.version,
        expires: t.not_after,
        life_s: t.life_s(),
        we_dialed,
    };
    (g.lookups, accepted)
}

/// A peer's text without control characters and of limited length, fit for a log.
pub(crate) fn clean(s: &str) -> String {
    s.chars().filter(|c| !c.is_control()).take(300).collect()
}
