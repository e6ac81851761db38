//! The pods and containers that the runtime has told of, and whose container a process is in.

use crate::histogram::Histogram;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use underpass_admin::{proc, PodRow, Where};
use underpass_kube::Learnt;
use underpass_nri::messages::{Container, PodSandbox};
use underpass_pods::policy::Decision;

/// Digits of a container's id.
const ID_DIGITS: usize = 64;

/// Written by the thread that speaks with the runtime, read by the core's.
#[derive(Debug, Default)]
pub(crate) struct Known {
    tables: Mutex<Tables>,
    /// What the Kubernetes API says of them, for runtimes that tell nothing.
    learnt: OnceLock<Arc<Learnt>>,
    /// Has the runtime registered us, on a connection that lasts?
    registered: AtomicBool,
    injected: AtomicU64,
    refused: AtomicU64,
    /// How long the runtime has waited for an answer about a container.
    answers: Mutex<Histogram>,
}

#[derive(Debug, Default)]
struct Tables {
    /// By the sandbox's id.
    pods: HashMap<String, PodSandbox>,
    /// By the container's.
    containers: HashMap<String, Contained>,
}

#[derive(Debug)]
struct Contained {
    /// The sandbox's id.
    pod: String,
    name: String,
    wanted: bool,
    injected: bool,
    why_not: String,
    /// The runtime keeps a container that has ended for a while.
    stopped: bool,
}

impl Contained {
    fn new(c: &Container, decision: &Decision) -> Self {
        Contained {
            pod: c.pod.clone(),
            name: c.name.clone(),
            wanted: *decision != Decision::Unasked,
            injected: matches!(decision, Decision::Has | Decision::Inject(_)),
            why_not: match decision {
                Decision::Not(why) => why.to_string(),
                _ => String::new(),
            },
            stopped: false,
        }
    }
}

impl Tables {
    fn at(&self, id: &str, c: &Contained) -> Where {
        let pod = self.pods.get(&c.pod);
        Where {
            namespace: pod.map(|p| p.namespace.clone()).unwrap_or_default(),
            pod: pod.map(|p| p.name.clone()).unwrap_or_default(),
            container: c.name.clone(),
            sandbox: c.pod.clone(),
            id: id.to_owned(),
        }
    }
}

impl Known {
    /// Once: who knows of containers that the runtime has not told of.
    pub(crate) fn ask_also(&self, learnt: Arc<Learnt>) {
        let _ = self.learnt.set(learnt); // (the first stays)
    }

    /// All that there is. What was decided when a container was made is kept, with the reason.
    pub(crate) fn replace(
        &self,
        pods: Vec<PodSandbox>,
        containers: Vec<Container>,
        decide: impl Fn(&PodSandbox, &Container) -> Decision,
    ) {
        let nothing = PodSandbox::default();
        let mut new = Tables::default();
        let pods = pods.into_iter().map(|p| (p.id.clone(), p));
        new.pods.extend(pods);
        let mut t = self.tables.lock();
        for c in containers {
            let contained = t.containers.remove(&c.id).unwrap_or_else(|| {
                let pod = new.pods.get(&c.pod).unwrap_or(&nothing);
                Contained::new(&c, &decide(pod, &c))
            });
            new.containers.insert(c.id, contained);
        }
        // (Annotations may be long, and have been read.)
        new.pods.values_mut().for_each(|p| p.annotations.clear());
        *t = new;
    }

    pub(crate) fn add_pod(&self, mut pod: PodSandbox) {
        pod.annotations.clear();
        self.tables.lock().pods.insert(pod.id.clone(), pod);
    }

    pub(crate) fn remove_pod(&self, id: &str) {
        let mut t = self.tables.lock();
        t.pods.remove(id);
        t.containers.retain(|_, c| c.pod != id);
    }

    pub(crate) fn set_registered(&self, now: bool) {
        self.registered.store(now, Relaxed); // (orders nothing: it is only shown)
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.registered.load(Relaxed)
    }

    /// Containers since the start of the daemon: those that were given the shim when they were made, and those whose pod
    /// had asked and that were not.
    pub(crate) fn counts(&self) -> [u64; 2] {
        [&self.injected, &self.refused].map(|n| n.load(Relaxed))
    }

    /// The runtime has been told about a container, after this time.
    pub(crate) fn answered(&self, took: Duration) {
        self.answers.lock().add(took);
    }

    pub(crate) fn answers(&self) -> Histogram {
        self.answers.lock().clone()
    }

    /// A container is about to be made.
    pub(crate) fn made_container(&self, c: &Container, decision: &Decision) {
        match decision {
            // (The plugin that the runtime starts itself may have given it.)
            Decision::Inject(_) | Decision::Has => self.injected.fetch_add(1, Relaxed),
            Decision::Not(why) if why.is_missed() => self.refused.fetch_add(1, Relaxed),
            _ => 0,
        };
        self.add_container(c, decision);
    }

    fn add_container(&self, c: &Container, decision: &Decision) {
        let contained = Contained::new(c, decision);
        self.tables
            .lock()
            .containers
            .insert(c.id.clone(), contained);
    }

    pub(crate) fn stop_container(&self, id: &str) {
        if let Some(c) = self.tables.lock().containers.get_mut(id) {
            c.stopped = true;
        }
    }

    pub(crate) fn remove_container(&self, id: &str) {
        self.tables.lock().containers.remove(id);
    }

    /// Whose container it is, by what `/proc/PID/cgroup` says.
    pub(crate) fn of_cgroup(&self, text: &str) -> Option<Where> {
        let t = self.tables.lock();
        // (Containers may have containers of their own: the runtime's is the first that it knows.)
        let told = ids(text).find_map(|id| Some(t.at(id, t.containers.get(id)?)));
        let learnt = || ids(text).find_map(|id| self.learnt.get()?.container(id));
        told.or_else(learnt)
    }

    /// Whose container a process is in that was there at tick `then` (a later one may have got its number).
    pub(crate) fn of_process(&self, pid: u32, then: u64) -> Option<Where> {
        if self.tables.lock().containers.is_empty() && self.learnt.get().is_none() {
            return None;
        }
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let at = self.of_cgroup(&text)?;
        (proc::start_time(pid)? <= then).then_some(at)
    }

    pub(crate) fn is_injected(&self, id: &str) -> bool {
        let t = self.tables.lock();
        t.containers.get(id).is_some_and(|c| c.injected)
    }

    /// All containers that run, in order of namespace, pod and name; connections are not counted here.
    pub(crate) fn rows(&self) -> Vec<PodRow> {
        let t = self.tables.lock();
        let row = |(id, c): (&String, &Contained)| PodRow {
            at: t.at(id, c),
            wanted: c.wanted,
            injected: c.injected,
            why_not: c.why_not.clone(),
            ..PodRow::default()
        };
        let run = t.containers.iter().filter(|(_, c)| !c.stopped);
        let mut rows: Vec<PodRow> = run.map(row).collect();
        rows.sort_by(|a, b| a.at.cmp(&b.at));
        rows
    }
}

/// What looks like ids of containers, outermost first: `…/ID`, `…/cri-containerd-ID.scope`, `…/crio-ID.scope`,
/// `…:cri-containerd:ID`.
fn ids(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|l| l.split('/')).filter_map(|part| {
        let name = part.strip_suffix(".scope").unwrap_or(part);
        let id = name.rsplit(['-', ':']).next().unwrap_or(name);
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (id.len() == ID_DIGITS && id.bytes().all(hex)).then_some(id)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use underpass_pods::policy::WhyNot;

    fn container(id: &str, pod: &str, name: &str) -> Container {
        Container {
            id: id.into(),
            pod: pod.into(),
            name: name.into(),
            ..Container::default()
        }
    }

    #[test]
    fn processes_of_containers() {
        let (a, b) = ("a".repeat(64), "b0".repeat(32));
        let known = Known::default();
        known.add_pod(PodSandbox {
            id: "s".into(),
            name: "web-0".into(),
            namespace: "shop".into(),
            ..PodSandbox::default()
        });
        known.add_container(&container(&a, "s", "web"), &Decision::Has);
        let of = |text: String| {
            known
                .of_cgroup(&text)
                .map(|w| (w.namespace, w.pod, w.container))
        };
        let web = Some(("shop".to_owned(), "web-0".to_owned(), "web".to_owned()));
        for text in [
            format!("0::/kubepods/besteffort/podx/{a}\n"),
            format!("0::/kubepods.slice/x.slice/cri-containerd-{a}.scope\n"),
            format!("0::/kubepods.slice/crio-{a}.scope/inner\n"),
            format!("0::/system.slice/k.slice:cri-containerd:{a}\n"),
            format!("4:memory:/x\n0::/../../podx/{a}/docker/{b}\n"),
        ] {
            assert_eq!(of(text.clone()), web, "{text}");
        }
        assert_eq!(of(format!("0::/podx/{b}\n")), None);
        assert_eq!(of(format!("0::/podx/{}\n", a.to_uppercase())), None);
        assert_eq!(of(format!("0::/podx/{a}0\n")), None);
        known.remove_pod("s");
        assert_eq!(of(format!("0::/podx/{a}\n")), None);
    }

    #[test]
    fn rows_say_why_not() {
        let known = Known::default();
        known.add_container(&container("2", "s", "b"), &Decision::Not(WhyNot::Taken));
        known.add_container(&container("1", "s", "a"), &Decision::Unasked);
        let told = |r: &PodRow| (r.at.container.clone(), r.wanted, r.injected);
        let rows = known.rows();
        let all: Vec<_> = rows.iter().map(told).collect();
        assert_eq!(all, [("a".into(), false, false), ("b".into(), true, false)]);
        assert!(rows[0].why_not.is_empty() && rows[1].why_not.contains("mounted"));
        known.stop_container("1");
        assert_eq!(known.rows().len(), 1, "it has ended");
        known.made_container(&container("4", "s", "d"), &Decision::Not(WhyNot::Taken));
        known.made_container(&container("4", "s", "d"), &Decision::Not(WhyNot::NotNamed));
        known.remove_container("4");
        assert_eq!(known.counts(), [0, 1]);
        known.remove_container("1");
        known.remove_container("2");
        assert!(known.rows().is_empty());
        known.add_container(&container("1", "s", "a"), &Decision::Unasked);
        // A list of all: what is new on it is looked at, what is known keeps its reason, the rest is gone.
        known.add_container(&container("2", "s", "b"), &Decision::Not(WhyNot::Taken));
        let all = vec![container("2", "s", "b"), container("3", "s", "c")];
        known.replace(Vec::new(), all, |_, _| Decision::Has);
        let rows = known.rows();
        let all: Vec<_> = rows.iter().map(told).collect();
        assert_eq!(all, [("b".into(), true, false), ("c".into(), true, true)]);
        assert!(rows[0].why_not.contains("mounted"));
    }
}
