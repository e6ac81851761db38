//! Who asks at an admin socket, and what he may see and steer.

use crate::clients::view::Entry;
use crate::os::process::Process;
use crate::os::sockopt;
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
    /// The sandbox of its pod, if it asks at the socket for pods: it sees that pod's connections only, and steers nothing.
    pub pod: Option<String>,
}

impl Caller {
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
        self.sees(netns) && (self.all || self.root || uid == self.uid)
    }
}

pub(super) fn who(stream: &UnixStream) -> Option<Caller> {
    let cred = sockopt::peer_cred(stream.as_fd()).ok()?;
    let netns = proc::netns(u32::try_from(cred.pid).ok()?)?;
    let root = cred.uid == 0 || cred.uid == rustix::process::geteuid().as_raw();
    Some(Caller {
        uid: cred.uid,
        netns,
        root,
        all: root && proc::own_netns() == Some(netns),
        pod: None,
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
        pod: Some(at.sandbox),
    })
}
