//! The control socket: accepting shims, their hello, and one task per connection.

mod dial;

use crate::clients::control::Control;
use crate::clients::ids::ConnRef;
use crate::clients::limits::{Cgroup, Limit};
use crate::clients::tenant;
use crate::core::{Hello, Shared};
use crate::lanes::groups::Violation;
use crate::os::fds::{self, Foreign};
use crate::os::memfd;
use crate::os::panics::{contain, injected, Part};
use crate::os::process::{self, Process};
use crate::os::sockopt;
use crate::os::wire::Incoming;
use crate::tasks::readings;
use crate::tasks::{lookups, seal, takeover};
use lane::family::TABLE_BYTES;
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use lane::proto::reason::Reason;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tracing::Instrument;
use underpass_admin::proc;

/// How long a connection may take to say hello.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// Connections that are accepted before it is the others' turn. (Processes that only connect and close fill the queue
/// faster than it is emptied, and `readable` does not wait while there is something in it.)
const ACCEPTS: usize = 16;
/// Most messages that are read from an ended connection: more than its queue can hold.
const MESSAGES_PER_TURN: usize = 1024;
/// How long it takes until somebody is looked at again for whose descriptors there was no room.
const NO_ROOM: Duration = Duration::from_millis(250);
/// Messages that are handled for one shim before it is the others' turn.
const BATCH: usize = 32;

/// Makes the listening socket. A socket file that is left over is replaced: the caller holds the
/// directory's lock.
pub fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e),
    }
    rustix::net::bind(&sock, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&sock, 1024)?;
    Ok(sock)
}

/// Accepts for ever.
pub async fn serve(shared: Shared, sock: OwnedFd) -> std::io::Result<()> {
    let sock = fds::watch(sock, Interest::READABLE)?;
    for n in 1_usize.. {
        if n.is_multiple_of(ACCEPTS) {
            tokio::task::yield_now().await;
        }
        let mut ready = sock.readable().await?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let conn = match rustix::net::accept_with(sock.get_ref(), flags) {
            Ok(c) => c,
            Err(Errno::AGAIN) => {
                ready.clear_ready();
                continue;
            }
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(e) => {
                tracing::warn!("accept: {e}"); // out of descriptors or memory: it will pass
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        drop(ready);
        meet(&shared, Foreign::new(conn), proc::now_ticks());
    }
    Ok(())
}

/// Serves a connection that was made just now, at tick `accepted`.
pub fn meet(shared: &Shared, mut conn: Foreign, accepted: u64) {
    let tenant = tenant::of_peer(conn.as_fd());
    conn.charge(&shared.borrow().cgroups.get(&tenant).descriptors);
    let (newcomer, full) = shared.borrow().newcomers.enter(&tenant);
    if full {
        shared.borrow().cgroups.refused.count(Limit::Hellos);
    }
    let shared = shared.clone();
    tokio::task::spawn_local(async move {
        let control = match Control::new(conn) {
            Ok(c) => Rc::new(c),
            Err(e) => return tracing::warn!("control connection: {e}"),
        };
        let greeted = tokio::time::timeout(HELLO_TIME, greet(&shared, &control, accepted));
        let accepted = tokio::select! {
            accepted = contain(Part::Program, greeted) => accepted,
            () = newcomer.has_to_leave() => return,
        };
        drop(newcomer);
        match accepted {
            None => {
                recover(&shared);
                shared.borrow_mut().not_greeted(&control);
            }
            Some(Ok(Some((id, cgroup)))) => {
                let span = shared.borrow().span(id);
                let served = async {
                    if serve_client(&shared, id, &cgroup, &control).await.is_ok() {
                        read_rest(&shared, id, &control);
                    }
                };
                if contain(Part::Program, served.instrument(span))
                    .await
                    .is_none()
                {
                    recover(&shared);
                }
                shared.borrow_mut().disconnect(id, Some(&control));
            }
            Some(_) => {}
        }
    });
}

/// Something was left half done. (If this panics as well, the process ends.)
fn recover(shared: &Shared) {
    shared.borrow_mut().recover();
}

/// Does what a message has asked for beside its connection.
fn beside(shared: &Shared, work: impl std::future::Future<Output = ()> + 'static) {
    let shared = shared.clone();
    tokio::task::spawn_local(async move {
        if contain(Part::Program, work).await.is_none() {
            recover(&shared);
        }
    });
}

/// Waits for the first message of a new connection.
async fn first_message(control: &Control, buf: &mut [u8]) -> Option<(usize, Vec<Foreign>, bool)> {
    loop {
        let mut ready = control.sock.readable().await.ok()?;
        if !control.has_room() {
            tokio::time::sleep(NO_ROOM).await;
            continue;
        }
        match control.recv(buf) {
            Ok(Incoming::Message { len, fds, lost }) => return Some((len, fds, lost)),
            Ok(Incoming::End) => return None,
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// What a shim says first, and hands over.
struct Greeting {
    /// That both speak.
    version: u16,
    /// The process's own number of itself.
    pid: u32,
    table: (memfd::Ident, Foreign),
    /// A descriptor by which its children find the daemon.
    dialing: Option<Foreign>,
}

impl Greeting {
    fn read(bytes: &[u8], mut fds: Vec<Foreign>) -> Result<Greeting, (Reason, &'static str)> {
        let Ok(ToDaemon::Hello {
            version,
            min_version,
            pid,
            table_bytes,
            ..
        }) = ToDaemon::decode(bytes)
        else {
            return Err((Reason::Sync, "its first message was no hello"));
        };
        let version = version.min(lane::VERSION);
        if version < min_version.max(lane::MIN_VERSION) {
            return Err((Reason::VersionMismatch, "no common version"));
        }
        let dialing = (fds.len() == 2).then(|| fds.pop()).flatten();
        let (Some(table), true) = (fds.pop(), fds.is_empty()) else {
            let why = "neither one nor two descriptors with the hello";
            return Err((Reason::Sync, why));
        };
        let ident =
            memfd::check_fixed(&table, TABLE_BYTES).filter(|_| table_bytes == TABLE_BYTES as u64);
        let Some(ident) = ident else {
            let why = "its family table has the wrong size or can be resized";
            return Err((Reason::Sync, why));
        };
        Ok(Greeting {
            version,
            pid,
            table: (ident, table),
            dialing,
        })
    }
}

/// Reads the hello, and admits or refuses the shim.
async fn greet(
    shared: &Shared,
    control: &Rc<Control>,
    accepted: u64,
) -> Option<(crate::clients::ids::ClientId, Arc<Cgroup>)> {
    let mut buf = [0u8; MAX];
    let (len, fds, lost) = first_message(control, &mut buf).await?;
    let refuse = |reason: Reason, why: &str| {
        if shared.borrow_mut().count_refused(reason) {
            tracing::info!("refused a shim: {why}");
        }
        control.send(
            ToShim::Refused {
                reason: reason.code(),
            },
            vec![],
        );
        None
    };
    if lost {
        shared.borrow().cgroups.refused.count(Limit::Descriptors);
        return refuse(Reason::Limit, "there was no room for its descriptors");
    }
    let greeting = match Greeting::read(&buf[..len], fds) {
        Ok(g) => g,
        Err((reason, why)) => return refuse(reason, why),
    };
    let dialing = greeting.dialing;
    let mut process = match Process::of_peer(control.sock.get_ref().as_fd(), accepted) {
        Ok(p) => p,
        Err(e) => {
            if matches!(e, process::Error::Gone) {
                // That is nobody's fault, and nobody hears an answer.
                if let Some(fd) = dialing {
                    let who = sockopt::peer_cred(control.sock.get_ref().as_fd());
                    left_behind(shared, fd, who.map_or(u32::MAX, |c| c.uid));
                }
                return None;
            }
            return refuse(Reason::Internal, &e.to_string());
        }
    };
    let pidfd = process.take_pidfd()?;
    // (Before it gets an answer: then it may do what counts.)
    let ident = greeting.table.0;
    let (table, found) = readings::begin(shared, greeting.table, process.id).await?;
    let hello = Hello {
        version: greeting.version,
        own_pid: greeting.pid,
        ident,
        table,
        found,
    };
    let admitted = shared.borrow_mut().admit(&process, hello, control);
    let (id, new) = match admitted {
        Ok(a) => a,
        Err(reason) => return refuse(reason, reason.info().text),
    };
    if new {
        watch(shared, id, pidfd);
    }
    let cgroup = shared.borrow().clients.get(&id)?.cgroup().clone();
    // (A seat is asked for only if it is needed.)
    if let Some((fd, seat)) = dialing.and_then(|fd| Some((fd, cgroup.seat()?))) {
        dial::serve(shared, fd, seat);
    }
    Some((id, cgroup))
}

/// A process that ended before its hello was read (as servers do that go to the background) may have left its
/// children a dialing descriptor. It is not known any more which cgroup the process was in.
fn left_behind(shared: &Shared, dialing: Foreign, uid: u32) {
    let seat = shared.borrow().cgroups.get(&tenant::ended(uid)).seat();
    if let Some(seat) = seat {
        dial::serve(shared, dialing, seat);
    }
}

/// Waits for the end of a client's process, as long as there is the client.
fn watch(shared: &Shared, id: crate::clients::ids::ClientId, pidfd: OwnedFd) {
    let (watched, forgotten) = tokio::sync::oneshot::channel();
    if let Some(p) = shared.borrow_mut().clients.get_mut(&id) {
        p.watched = Some(watched);
    }
    let shared = shared.clone();
    tokio::task::spawn_local(async move {
        match fds::watch(pidfd, Interest::READABLE) {
            Ok(fd) => tokio::select! {
                r = fd.readable() => drop(r),
                _ = forgotten => return,
            },
            Err(e) => tracing::error!("cannot watch a process: {e}"),
        }
        shared.borrow_mut().dead(id);
    });
}

/// Serves a connection until it ends, or until its shim breaks the protocol.
async fn serve_client(
    shared: &Shared,
    id: crate::clients::ids::ClientId,
    cgroup: &Arc<Cgroup>,
    control: &Rc<Control>,
) -> Result<(), Violation> {
    let mut buf = [0u8; MAX];
    let mut room = true;
    loop {
        if control.is_cut() {
            return Ok(());
        }
        // Connections of a cgroup that keeps too many helpers busy are not read until some of them are done. Nor are those of
        // one that has so many descriptors here that there might be no room for more.
        let resumed = cgroup.resume.notified();
        let had = std::mem::replace(&mut room, control.has_room());
        if had && !room {
            cgroup.refused(Limit::Descriptors);
        }
        let paused = cgroup.saturated() || !room;
        let patience = async {
            match control.deadline() {
                Some(t) => tokio::time::sleep_until(t.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = control.wake.notified() => {}
            () = resumed, if paused => {}
            () = tokio::time::sleep(NO_ROOM), if !room => {}
            () = patience => {
                tracing::info!("cut off a shim that does not read");
                return Ok(());
            }
            r = control.sock.writable(), if control.backlog() => match r {
                Ok(mut ready) => if !control.flush() { ready.clear_ready() },
                Err(_) => return Ok(()),
            },
            r = control.sock.readable(), if !paused => {
                let Ok(mut ready) = r else { return Ok(()) };
                for _ in 0..BATCH {
                    match control.recv(&mut buf) {
                        Ok(Incoming::Message { len, fds, lost }) => match lost {
                            false => handle(shared, id, &buf[..len], fds)?,
                            true => without_descriptors(shared, id, &buf[..len])?,
                        }
                        Ok(Incoming::End) => return Ok(()),
                        Err(Errno::AGAIN) => { ready.clear_ready(); break }
                        Err(Errno::INTR | Errno::CONNRESET) => {}
                        Err(Errno::TOOMANYREFS) => {
                            return Err(broken(shared, Violation("more descriptors than any message has")));
                        }
                        Err(_) => return Ok(()),
                    }
                    if cgroup.saturated() || control.is_cut() || !control.has_room() {
                        break;
                    }
                }
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Reads what a shim sent before its connection ended or was replaced: it will not send that again.
fn read_rest(shared: &Shared, id: crate::clients::ids::ClientId, control: &Rc<Control>) {
    let mut buf = [0u8; MAX];
    for _ in 0..MESSAGES_PER_TURN {
        if !control.has_room() {
            return;
        }
        match control.recv(&mut buf) {
            Ok(Incoming::Message { len, fds, lost }) => {
                if lost {
                    continue;
                }
                // The shim registers again over its next connection, which has credits of its own.
                let said = ToDaemon::decode(&buf[..len]);
                if let Ok(ToDaemon::Register { .. } | ToDaemon::RegisterReceived { .. }) = said {
                    continue;
                }
                if handle(shared, id, &buf[..len], fds).is_err() {
                    return;
                }
            }
            // CONNRESET: the shim has left messages of ours unread; its own messages can still be read.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Ok(Incoming::End) | Err(_) => return,
        }
    }
}

/// There was no room for what came with a message. A registration is made again later; for any other message, the connection is
/// cut, and the shim says over the next one what it has.
fn without_descriptors(
    shared: &Shared,
    client: crate::clients::ids::ClientId,
    bytes: &[u8],
) -> Result<(), Violation> {
    match ToDaemon::decode(bytes) {
        Ok(ToDaemon::Register { conn, gen, .. } | ToDaemon::RegisterReceived { conn, gen, .. }) => {
            let who = ConnRef { client, conn, gen };
            let done = shared.borrow_mut().register_without(who);
            done.map_err(|v| broken(shared, v))
        }
        _ => {
            shared.borrow().cgroups.refused.count(Limit::Descriptors);
            tracing::warn!("cut off a shim: there was no room for the descriptors of its message");
            Err(Violation("no room for its descriptors"))
        }
    }
}

/// A shim has broken the rules: it is cut off for this.
fn broken(shared: &Shared, v: Violation) -> Violation {
    if shared.borrow_mut().count_refused(Reason::Hostile) {
        tracing::warn!("cut off a shim: {}", v.0);
    }
    v
}

fn handle(
    shared: &Shared,
    id: crate::clients::ids::ClientId,
    bytes: &[u8],
    fds: Vec<Foreign>,
) -> Result<(), Violation> {
    injected(bytes, || shared.borrow_mut().half_done());
    match ToDaemon::decode(bytes) {
        Ok(m) => {
            if let ToDaemon::Mapped { group, side, chunk } = m {
                let at = (group, side, chunk);
                let unsealed = shared.borrow_mut().unsealed(id, at);
                if let Some(found) = unsealed {
                    beside(shared, seal::seal(shared.clone(), id, at, found));
                    return Ok(());
                }
            }
            let read = shared.borrow_mut().message(id, m, fds);
            let read = read.map_err(|v| broken(shared, v))?;
            if let Some(r) = read {
                beside(shared, lookups::read_registration(shared.clone(), r));
            }
            let ordered = std::mem::take(&mut shared.borrow_mut().takeovers);
            for t in ordered {
                tokio::task::spawn_local(takeover::take_over(shared.clone(), t));
            }
            Ok(())
        }
        // A newer shim may say more than we understand.
        Err(lane::proto::msg::Error::UnknownKind(_)) => {
            fds::close_all(fds);
            Ok(())
        }
        Err(lane::proto::msg::Error::Short) => {
            Err(broken(shared, Violation("a truncated message")))
        }
    }
}
