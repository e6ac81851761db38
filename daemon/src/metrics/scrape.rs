//! What is shown at `/metrics`: made by one at a time, for all who ask meanwhile, and away from the thread that answers
//! probes, because files of `/proc` and `/sys` may take their time. Whoever cannot wait gets what was made last, and is told
//! how old that is.

use super::gather::Ask;
use super::show::{self, Show};
use super::text::{Form, Metric, Value};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, OwnedMutexGuard};

/// How long the same is shown.
const FRESH: Duration = Duration::from_millis(500);
/// Longest wait for what is being made: less than Prometheus waits by default (10 s).
const PATIENCE: Duration = Duration::from_secs(9);

/// What was made last.
#[derive(Clone)]
struct Last {
    /// When that began: nothing in it is older. (But the rows of connections, which are kept for a while.)
    began: Instant,
    done: Instant,
    all: Arc<Vec<Metric>>,
}

pub(super) struct Scrapes {
    asks: mpsc::Sender<Ask>,
    /// Who has it makes what is shown, however long that takes.
    show: Arc<tokio::sync::Mutex<Show>>,
    last: Mutex<Option<Last>>,
    patience: Duration,
}

impl Scrapes {
    pub(super) fn new(asks: mpsc::Sender<Ask>, show: Show) -> Scrapes {
        Scrapes {
            asks,
            show: Arc::new(tokio::sync::Mutex::new(show)),
            last: Mutex::default(),
            patience: PATIENCE,
        }
    }

    fn last(&self) -> Option<Last> {
        let last = self.last.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_fresh(&self) -> bool {
        self.last().is_some_and(|l| l.done.elapsed() < FRESH)
    }

    pub(super) async fn text(self: &Arc<Self>, form: Form) -> Result<String, &'static str> {
        let made = async {
            if self.is_fresh() {
                return;
            }
            let show = self.show.clone().lock_owned().await;
            if !self.is_fresh() {
                // A task of its own: it goes on when nobody waits any more.
                let _ = tokio::spawn(self.clone().make(show)).await;
            }
        };
        let _ = tokio::time::timeout(self.patience, made).await;
        let last = self.last().ok_or("the core does not answer")?;
        let write = move || {
            let age = Metric::new(
                "underpass_snapshot_age_seconds",
                "How old this is: more than some seconds if nothing newer could be made in time",
            );
            let age = age.with(&[], Value::Gauge(last.began.elapsed().as_secs_f64()));
            let mut all = (*last.all).clone();
            all.push(age);
            show::write(all, form).map_err(|_| "the metrics cannot be written")
        };
        let text = tokio::task::spawn_blocking(write).await;
        text.unwrap_or(Err("the scrape has failed"))
    }

    async fn make(self: Arc<Self>, mut show: OwnedMutexGuard<Show>) {
        let began = Instant::now();
        let (to, snapshot) = oneshot::channel();
        if self.asks.send(Ask::Snapshot(to)).await.is_err() {
            return;
        }
        let Ok(snapshot) = snapshot.await else { return };
        let work = move || {
            let all = Arc::new(show.all(&snapshot));
            let last = Last {
                began,
                done: Instant::now(),
                all,
            };
            let mut kept = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = Some(last);
        };
        let _ = tokio::task::spawn_blocking(work).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::Snapshot;
    use super::*;
    use crate::config::MetricsConfig;
    use underpass_rdma::devices::Tree;

    fn scrapes(show: Show) -> (Arc<Scrapes>, mpsc::Receiver<Ask>) {
        let (asks, asked) = mpsc::channel(8);
        let mut s = Scrapes::new(asks, show);
        s.patience = Duration::from_millis(200);
        (Arc::new(s), asked)
    }

    fn age(text: &str) -> f64 {
        let line = |l: &str| {
            l.strip_prefix("underpass_snapshot_age_seconds ")?
                .parse()
                .ok()
        };
        text.lines().find_map(line).expect(text)
    }

    async fn next(asked: &mut mpsc::Receiver<Ask>) -> oneshot::Sender<Snapshot> {
        match asked.recv().await {
            Some(Ask::Snapshot(to)) => to,
            _ => panic!("another question"),
        }
    }

    /// While the core takes its time, it is asked nothing more, and what was made last is shown.
    #[tokio::test(flavor = "current_thread")]
    async fn one_at_a_time_and_the_last_meanwhile() {
        let (s, mut asked) = scrapes(Show::new(&MetricsConfig::default()));
        let text = || s.text(Form::Prometheus);
        assert!(text().await.is_err(), "there is none yet");
        let first = next(&mut asked).await;
        assert!(text().await.is_err());
        assert!(asked.try_recv().is_err(), "asked once");
        let all = async { tokio::join!(text(), text(), async { first.send(Snapshot::default()) }) };
        let (a, b, _) = all.await;
        assert!(age(&a.unwrap()) < 5.0 && age(&b.unwrap()) < 5.0);
        assert!(asked.try_recv().is_err(), "it is fresh");
        tokio::time::sleep(FRESH).await;
        let began = Instant::now();
        for _ in 0..2 {
            let a = age(&text().await.unwrap());
            assert!(a >= 0.5, "{a}");
        }
        assert!(began.elapsed() < Duration::from_secs(5));
        let second = next(&mut asked).await;
        assert!(asked.try_recv().is_err(), "asked once");
        let (a, _) = tokio::join!(text(), async { second.send(Snapshot::default()) });
        assert!(age(&a.unwrap()) >= 0.0);
        assert!(s.is_fresh());
    }

    /// A device whose files take a second to read.
    #[tokio::test(flavor = "current_thread")]
    async fn slow_files_hold_up_nobody_else() {
        let sys = tempfile::tempdir().unwrap();
        let port = sys.path().join("class/infiniband/slow/ports/1");
        std::fs::create_dir_all(&port).unwrap();
        let state = port.join("state");
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mkfifoat(rustix::fs::CWD, &state, mode).unwrap();
        let mut show = Show::new(&MetricsConfig::default());
        show.ports.tree = Tree::at(sys.path());
        let (s, mut asked) = scrapes(show);
        let writer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            std::fs::write(state, "4: ACTIVE\n").unwrap();
        });
        let scrape = tokio::spawn(async move { s.text(Form::Prometheus).await });
        next(&mut asked).await.send(Snapshot::default()).ok();
        let began = Instant::now();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(began.elapsed() < Duration::from_millis(800));
        drop(scrape.await);
        writer.join().unwrap();
    }
}
