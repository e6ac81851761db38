//! The thread that speaks HTTP.
//!
//! With hyper, which reads requests in bounded memory: what comes from the network is not parsed by code of our own, and
//! hyper is what tonic in the tests brings along anyway (300 KB of the program). tiny_http, which is in the tree as well,
//! has a thread for each connection and no limits of time.
//!
//! The thread lets nobody in for long, and nobody keep others out: each connection is for one request and ends after
//! [`TIME`], and where there are too many, the oldest makes way.

use super::gather::{Ask, Ready};
use super::scrape::Scrapes;
use super::show::Show;
use super::text::Form;
use crate::config::MetricsConfig;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Longest time of a connection, from its beginning to its end.
const TIME: Duration = Duration::from_secs(15);
/// A core that does not answer for so long is not healthy.
const ALIVE: Duration = Duration::from_secs(1);
/// Pause before the address is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Connections at a time, and those of one address. (All of this machine's own are one.)
const CONNECTIONS: usize = 64;
const CONNECTIONS_OF_ONE: usize = 16;
/// Most that is read of a request, in bytes.
const REQUEST: usize = 16 << 10;
/// Questions to the core that are under way at a time.
pub(crate) const ASKS: usize = 8;

/// The control socket in the runtime directory, as it was made.
pub(crate) struct ControlSocket {
    path: PathBuf,
    inode: u64,
}

impl ControlSocket {
    pub(crate) fn at(path: &Path) -> io::Result<ControlSocket> {
        Ok(ControlSocket {
            path: path.to_owned(),
            inode: std::fs::symlink_metadata(path)?.ino(),
        })
    }

    /// Does its path still lead to it?
    fn is_there(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode)
    }
}

struct Server {
    asks: mpsc::Sender<Ask>,
    control: ControlSocket,
    scrapes: Arc<Scrapes>,
}

/// Starts the thread; it ends with the process. Nothing else waits for an address that is not there yet: the daemon is started
/// before the network.
pub(crate) fn start(
    config: &MetricsConfig,
    control: ControlSocket,
    asks: mpsc::Sender<Ask>,
) -> io::Result<()> {
    let first = std::net::TcpListener::bind(&config.listen);
    let at = config.listen.clone();
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let server = Arc::new(Server {
        scrapes: Arc::new(Scrapes::new(asks.clone(), Show::new(config))),
        asks,
        control,
    });
    let thread = std::thread::Builder::new().name("metrics".into());
    thread.spawn(move || {
        rt.block_on(async {
            let listener = listen(&at, first).await;
            accept(listener, &server).await;
        });
    })?;
    Ok(())
}

async fn listen(at: &str, mut made: io::Result<std::net::TcpListener>) -> tokio::net::TcpListener {
    let mut said = String::new();
    loop {
        let listener = made.and_then(|l| {
            l.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(l)
        });
        match listener {
            Ok(l) => return l,
            Err(e) if e.to_string() == said => {}
            Err(e) => {
                tracing::warn!("cannot show metrics at {at}: {e}; trying again");
                said = e.to_string();
            }
        }
        tokio::time::sleep(AGAIN).await;
        made = std::net::TcpListener::bind(at);
    }
}

async fn accept(listener: tokio::net::TcpListener, server: &Arc<Server>) {
    let mut open: Vec<(IpAddr, JoinHandle<()>)> = Vec::new();
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(a) => a,
            Err(e) => {
                tracing::debug!("metrics: accept: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        open.retain(|c| !c.1.is_finished());
        let from = whose(from);
        make_room(&mut open, from);
        let server = server.clone();
        let task = tokio::spawn(async move {
            let serve = service_fn(move |r| {
                let server = server.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(server, r).await) }
            });
            let connection = http1::Builder::new()
                .keep_alive(false)
                .max_buf_size(REQUEST)
                .serve_connection(TokioIo::new(stream), serve);
            let _ = tokio::time::timeout(TIME, connection).await;
        });
        open.push((from, task));
    }
}

/// An address, by which connections are counted.
fn whose(from: SocketAddr) -> IpAddr {
    let ip = from.ip().to_canonical();
    match ip.is_loopback() {
        true => Ipv4Addr::LOCALHOST.into(),
        false => ip,
    }
}

/// The oldest connections make way for one more: of the same address, or of all. But those of this machine make way for none
/// that comes from elsewhere: probes of it must not fail because of others.
fn make_room(open: &mut Vec<(IpAddr, JoinHandle<()>)>, from: IpAddr) {
    let of_one = open.iter().filter(|c| c.0 == from).count();
    let oldest = match (of_one >= CONNECTIONS_OF_ONE, open.len() >= CONNECTIONS) {
        (true, _) => open.iter().position(|c| c.0 == from),
        (false, true) => open.iter().position(|c| !c.0.is_loopback()),
        (false, false) => None,
    };
    if let Some(at) = oldest {
        open.remove(at).1.abort();
    }
}

async fn answer(server: Arc<Server>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let text = "text/plain; charset=utf-8";
    if request.method() != Method::GET {
        let mut r = reply(StatusCode::METHOD_NOT_ALLOWED, text, "GET only\n".into());
        r.headers_mut()
            .insert(ALLOW, hyper::header::HeaderValue::from_static("GET"));
        return r;
    }
    match request.uri().path() {
        "/metrics" => {
            let accept = request.headers().get_all(ACCEPT).into_iter();
            let wants = |v: &hyper::header::HeaderValue| {
                v.to_str()
                    .is_ok_and(|v| v.contains("application/openmetrics-text"))
            };
            let form = match accept.into_iter().any(wants) {
                true => Form::OpenMetrics,
                false => Form::Prometheus,
            };
            match server.scrapes.text(form).await {
                Ok(all) => reply(StatusCode::OK, form.content_type(), all),
                Err(why) => reply(StatusCode::SERVICE_UNAVAILABLE, text, format!("{why}\n")),
            }
        }
        "/healthz" => probe(server.alive().await),
        "/readyz" => probe(server.ready().await),
        _ => reply(
            StatusCode::NOT_FOUND,
            text,
            "/metrics, /healthz, /readyz\n".into(),
        ),
    }
}

fn reply(status: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut r = Response::new(Full::from(text));
    *r.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static(kind);
    r.headers_mut().insert(CONTENT_TYPE, kind);
    r
}

fn probe(found: Result<(), String>) -> Response<Full<Bytes>> {
    let text = "text/plain; charset=utf-8";
    match found {
        Ok(()) => reply(StatusCode::OK, text, "ok\n".into()),
        Err(why) => reply(StatusCode::SERVICE_UNAVAILABLE, text, format!("{why}\n")),
    }
}

impl Server {
    async fn ask<T>(
        &self,
        limit: Duration,
        question: impl FnOnce(oneshot::Sender<T>) -> Ask,
    ) -> Option<T> {
        let (to, answer) = oneshot::channel();
        let asked = async {
            self.asks.send(question(to)).await.ok()?;
            answer.await.ok()
        };
        tokio::time::timeout(limit, asked).await.ok().flatten()
    }

    async fn alive(&self) -> Result<(), String> {
        let a = self.ask(ALIVE, Ask::Alive).await;
        a.ok_or_else(|| "the core does not answer".to_owned())
    }

    async fn ready(&self) -> Result<(), String> {
        let ready: Option<Ready> = self.ask(ALIVE, Ask::Ready).await;
        let ready = ready.ok_or("the core does not answer")?;
        let all = [
            (
                self.control.is_there(),
                "new programs do not find the control socket",
            ),
            (ready.proof, "the BPF proof is not loaded"),
            (
                ready.runtime,
                "the container runtime has not registered the daemon",
            ),
            (
                ready.kubelet,
                "the kubelet has not registered the CSI driver",
            ),
        ];
        let missing: Vec<&str> = all.iter().filter(|a| !a.0).map(|a| a.1).collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(missing.join("\n")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect(open: &mut Vec<(IpAddr, JoinHandle<()>)>, from: &str) {
        let from = whose(SocketAddr::new(from.parse().unwrap(), 1));
        make_room(open, from);
        open.push((from, tokio::spawn(std::future::pending())));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_oldest_makes_way() {
        let mut open = Vec::new();
        let mut connect = |n: u8| {
            connect(&mut open, &format!("10.0.0.{n}"));
            let of = |m: u8| {
                let ip = IpAddr::from([10, 0, 0, m]);
                open.iter().filter(|c| c.0 == ip).count()
            };
            (open.len(), of(1), of(2))
        };
        for _ in 0..CONNECTIONS_OF_ONE {
            connect(1);
        }
        assert_eq!(connect(1), (CONNECTIONS_OF_ONE, CONNECTIONS_OF_ONE, 0));
        for n in 3..3 + (CONNECTIONS - CONNECTIONS_OF_ONE) as u8 {
            connect(n);
        }
        assert_eq!(connect(2), (CONNECTIONS, CONNECTIONS_OF_ONE - 1, 1));
    }

    /// Whatever its addresses are, this machine has its connections, and no more than others.
    #[tokio::test(flavor = "current_thread")]
    async fn this_machine_makes_no_way() {
        let mut open = Vec::new();
        let own = |open: &Vec<(IpAddr, _)>| open.iter().filter(|c| c.0.is_loopback()).count();
        for n in 0..2 * CONNECTIONS {
            connect(
                &mut open,
                ["::1", "127.0.0.1", "127.0.0.2", "::ffff:127.0.0.3"][n % 4],
            );
        }
        assert_eq!(
            (open.len(), own(&open)),
            (CONNECTIONS_OF_ONE, CONNECTIONS_OF_ONE)
        );
        for n in 0..2 * CONNECTIONS {
            connect(&mut open, &format!("10.0.0.{n}"));
        }
        assert_eq!((open.len(), own(&open)), (CONNECTIONS, CONNECTIONS_OF_ONE));
    }
}
