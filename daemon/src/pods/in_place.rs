//! Whether what containers are given lies ready, found out by a thread of its own: the runtime makes no container while it
//! waits for an answer, and a file system that is asked may take its time.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::time::{Duration, Instant};
use underpass_pods::place;
use underpass_pods::policy::PodsConfig;

/// How long after a failure the directory is filled again.
const AGAIN: Duration = Duration::from_secs(5);

/// Is it there? Or why not.
pub(super) type Word = Result<(), String>;

/// Fills the directory for containers, and looks after it.
pub(super) struct Keeper {
    config: PodsConfig,
    place: Word,
    /// When that was tried; `None`: the directory is not this daemon's.
    filled: Option<Instant>,
}

impl Keeper {
    /// `made`: is there a directory, and is it this daemon's? Then it is filled.
    pub(super) fn new(config: PodsConfig, made: Word) -> Keeper {
        let mut keeper = Keeper {
            config,
            filled: made.is_ok().then(Instant::now),
            place: made,
        };
        if keeper.filled.is_some() {
            keeper.fill();
        }
        if let Err(e) = &keeper.place {
            tracing::error!("no container gets the shim: {e}");
        }
        keeper
    }

    fn fill(&mut self) {
        self.place = place::fill(&self.config).map_err(|e| e.to_string());
        self.filled = Some(Instant::now());
    }

    /// Is what containers are given there now? What was missing is put there again after a while.
    fn look(&mut self) -> Word {
        let due = self.filled.is_some_and(|t| t.elapsed() > AGAIN);
        if self.place.is_err() && due {
            self.fill();
        }
        let dir: &PathBuf = &self.config.dir;
        let here = || place::look(dir).map_err(|e| e.to_string());
        self.place.clone().and_then(|()| here())
    }
}

/// Whoever asks, one at a time.
pub(super) struct InPlace {
    ask: Sender<()>,
    words: Receiver<Word>,
    /// Is a question on its way, whose time was over?
    pending: bool,
}

impl InPlace {
    pub(super) fn keep(mut keeper: Keeper) -> io::Result<InPlace> {
        InPlace::by(move || keeper.look())
    }

    /// The thread ends with what is returned.
    fn by(mut look: impl FnMut() -> Word + Send + 'static) -> io::Result<InPlace> {
        let (ask, asked) = channel();
        let (tell, words) = channel();
        let thread = std::thread::Builder::new().name("underpass-place".into());
        thread.spawn(
            move || {
                while asked.recv().is_ok() && tell.send(look()).is_ok() {}
            },
        )?;
        Ok(InPlace {
            ask,
            words,
            pending: false,
        })
    }

    fn word(&mut self, end: Instant) -> Option<Word> {
        let left = end.saturating_duration_since(Instant::now());
        let word = self.words.recv_timeout(left).ok();
        self.pending = word.is_none();
        word
    }

    /// Is it there now? That is not known if there is no answer before `end`.
    pub(super) fn now(&mut self, end: Instant) -> Word {
        // (One that comes late is of another time: there is one question on its way at most.)
        let free = !self.pending || self.word(end).is_some();
        let asked = free && self.ask.send(()).is_ok();
        let word = asked.then(|| self.word(end)).flatten();
        word.unwrap_or_else(|| Err("its files could not be looked at in time".into()))
    }
}

#[cfg(test)]
impl InPlace {
    /// Answers after a while.
    pub(super) fn slow(after: Duration) -> InPlace {
        let look = move || {
            std::thread::sleep(after);
            Ok(())
        };
        InPlace::by(look).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::sync::Arc;

    #[test]
    fn an_answer_that_comes_late_is_nobodys() {
        let asked = Arc::new(AtomicU32::new(0));
        let (go, wait) = channel();
        let count = asked.clone();
        let mut p = InPlace::by(move || {
            let n = count.fetch_add(1, Relaxed);
            if n == 0 {
                let _ = wait.recv();
            }
            match n {
                0 => Ok(()),
                n => Err(format!("look {n}")),
            }
        })
        .unwrap();
        let soon = || Instant::now() + Duration::from_millis(50);
        for _ in 0..3 {
            let began = Instant::now();
            assert!(p.now(soon()).unwrap_err().contains("in time"));
            assert!(began.elapsed() < Duration::from_secs(2));
        }
        assert_eq!(asked.load(Relaxed), 1, "asked again while it is busy");
        go.send(()).unwrap();
        let word = p.now(Instant::now() + Duration::from_secs(10));
        assert_eq!(word, Err("look 1".into()), "the first look's answer is old");
    }
}
