//! Who asks at an admin socket, and what he may see and steer.

use crate::clients::tenant;
use crate::clients::view::Entry;
use crate::os::process::{is_dead, Process};
use crate::pods::known::Known;
use std::os::fd::AsFd;
use tokio::net::UnixStream;
use underpass_admin::proc;

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub uid: u32,
    pub netns: u64,
    /// May see every namespace and act on everybody's processes.
    pub all: bool,
    /// May act on everybody's processes in its namespace.
    pub root: bool,
    /// May act on anything at all.
    pub steers: bool,
    /// Whose places and turns it takes: those of its user in its tenant, or of its pod.
    pub tenant: String,
    /// The sandbox of its pod, if it asks at the socket for pods: it sees that pod's connections only, and steers nothing.
    pub pod: Option<String>,
}

impl Caller {
    /// Is it root, or the daemon's user, and is it in the daemon's namespaces of processes and users? A container with the
    /// node's network is in that of the network only, where its users' numbers are the same as others': it steers nothing.
    fn of_node(uid: u32, netns: u64, (root, native): (bool, bool)) -> Caller {
        let here = proc::own_netns() == Some(netns);
        Caller {
            uid,
            netns,
            root,
            all: root && native && here,
            steers: native || !here,
            tenant: String::new(),
            pod: None,
        }
    }

    pub(super) fn sees(&self, netns: u64) -> bool {
        self.all || netns == self.netns
    }

    pub(super) fn sees_row(&self, e: &Entry) -> bool {
        match &self.pod {
            Some(pod) => e.row.at.as_ref().is_some_and(|w| w.sandbox == *pod),
            None => self.sees(e.row.netns),
        }
    }

    /// May it know the process at the other end?
    pub(super) fn sees_peer(&self, e: &Entry, all: &[Entry]) -> bool {
        match &self.pod {
            Some(_) => e
                .other
                .and_then(|o| all.get(o))
                .is_some_and(|o| self.sees_row(o)),
            None => self.sees(e.peer_netns),
        }
    }

    pub(super) fn may_act(&self, uid: u32, netns: u64) -> bool {
        self.sees(netns) && self.steers && (self.root || uid == self.uid)
    }
}

/// A process of the node asks. `accepted`: the tick at which its connection was ([`Process::of_peer`]). `None`: it has ended
/// since it connected, and its number may be another process's by now; or nothing can be told of it.
pub(super) fn who(stream: &UnixStream, accepted: u64) -> Option<Caller> {
    let mut process = Process::of_peer(stream.as_fd(), accepted).ok()?;
    let (pid, netns) = (process.id.pid, process.netns);
    let native = ["pid", "user"].map(|kind| {
        let own = proc::own_namespace(kind);
        own.is_some() && proc::namespace(pid, kind) == own
    });
    // (The namespaces were read by pid: they are its own only if it lives.)
    let lives = !is_dead(process.take_pidfd()?.as_fd());
    let root = process.uid == 0 || process.uid == rustix::process::geteuid().as_raw();
    (lives && netns != 0).then(|| Caller {
        tenant: tenant::user_of(&process.cgroups, process.uid),
        ..Caller::of_node(process.uid, netns, (root, native == [true; 2]))
    })
}

/// A process in a pod asks; `None`: it is in none that the runtime has told of.
pub(super) fn who_in_pod(known: &Known, stream: &UnixStream, accepted: u64) -> Option<Caller> {
    let process = Process::of_peer(stream.as_fd(), accepted).ok()?;
    let at = known.of_process(process.id.pid, process.id.start)?;
    Some(Caller {
        uid: process.uid,
        netns: 0,
        root: false,
        all: false,
        steers: false,
        tenant: at.sandbox.clone(),
        pod: Some(at.sandbox),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Root on the node.
    pub(in crate::admin) fn root() -> Caller {
        Caller::of_node(0, proc::own_netns().unwrap_or(1), (true, true))
    }

    #[test]
    fn root_is_root_where_the_daemon_is() {
        let here = proc::own_netns().unwrap();
        let of = |netns, who| {
            let c = Caller::of_node(0, netns, who);
            (c.all, c.may_act(7, netns), c.may_act(0, netns))
        };
        assert_eq!(of(here, (true, true)), (true, true, true));
        assert_eq!(of(here, (false, true)), (false, false, true));
        // A container with the node's network, and one with its own.
        assert_eq!(of(here, (true, false)), (false, false, false));
        assert_eq!(of(here + 1, (true, false)), (false, true, true));
        assert_eq!(of(here + 1, (true, true)), (false, true, true));
    }

    /// A process that began after the connection was accepted cannot have made it: its number is a reused one. (Where the
    /// kernel gives a pidfd of who connected, that says so itself.)
    #[tokio::test(flavor = "current_thread")]
    async fn who_connected_must_live() {
        let (a, _b) = UnixStream::pair().unwrap();
        let now = proc::now_ticks();
        let c = who(&a, now).unwrap();
        assert_eq!(Some(c.netns), proc::own_netns());
        let by_number = crate::os::sockopt::peer_pidfd(a.as_fd()).is_err();
        assert_eq!(who(&a, 0).is_none(), by_number);
    }
}
