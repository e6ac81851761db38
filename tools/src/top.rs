//! `underpass top`: connections, pods and rails with what they move now, until it is left.
//!
//! Another thread asks the daemon, which may take its time; this one has the terminal. However the program ends, the
//! terminal is as before: it is given back on the way out, by the hook of a panic, and after a signal, which then does
//! what it would have done.

mod draw;
mod lines;
mod sample;
mod state;
#[cfg(test)]
mod tests;

use crate::cli;
use crate::out::{self, Failure, Outcome};
use nix::sys::signal::{raise, SigSet, Signal};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::DefaultTerminal;
use sample::Seen;
use state::{Key, State};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::time::{Duration, Instant};

/// How long the way out may take after a signal.
const LEAVING: Duration = Duration::from_secs(1);
/// How long a key is waited for before signals and answers are looked at.
const STEP: Duration = Duration::from_millis(50);

pub fn run(dir: Option<PathBuf>, o: &cli::Top) -> Outcome {
    let began = Instant::now();
    let namespace = o.namespace.clone();
    let look = move || sample::look(dir.clone(), namespace.as_deref(), || began.elapsed());
    if o.once {
        let mut s = State::new(look()?, o.view);
        std::thread::sleep(o.delay); // one look has no rates
        s.take(Ok(look()?));
        out::print(&draw::text(&s))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(Failure::new(
            "this is not a terminal; `underpass top --once` prints one table",
        ));
    }
    let state = State::new(look()?, o.view);
    // Before there is another thread, which would otherwise be ended by them.
    let ends = ends();
    ends.thread_block().map_err(Failure::new)?;
    let (tell_signal, signals) = channel();
    std::thread::spawn(move || {
        if let Ok(s) = ends.wait() {
            let _ = tell_signal.send(s);
            // Whoever waits for a key of a terminal that is gone waits for ever, and busily (crossterm's `poll` does not return
            // at its end).
            std::thread::sleep(LEAVING);
            let _ = ends.thread_unblock();
            let _ = raise(s);
        }
    });
    let (ask, asked) = channel();
    let (tell, answers) = channel();
    std::thread::spawn(move || {
        for () in asked {
            let _ = tell.send(look().map_err(|f| f.message));
        }
    });
    let mut shown = Shown {
        state,
        every: o.delay,
        last: Instant::now(),
        ask,
        answers,
        signals,
        waiting: false,
    };
    match on_terminal(|t| shown.until_left(t))? {
        None => Ok(ExitCode::SUCCESS),
        Some(signal) => {
            ends.thread_unblock().map_err(Failure::new)?;
            raise(signal).map_err(Failure::new)?;
            Ok(ExitCode::FAILURE) // not reached: each of them ends a program
        }
    }
}

/// The signals that end a program which does not know them.
fn ends() -> SigSet {
    SigSet::from_iter([Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM])
}

/// Does something with the terminal, and gives it back.
fn on_terminal<T>(f: impl FnOnce(&mut DefaultTerminal) -> io::Result<T>) -> Result<T, Failure> {
    let fail = |e| Failure::new(format_args!("the terminal: {e}"));
    // The hook of `try_init` comes first and leaves the cursor as it is.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let _ = execute!(io::stdout(), Show);
        hook(info);
    }));
    let mut terminal = ratatui::try_init().map_err(fail)?;
    let done = f(&mut terminal);
    drop(terminal); // shows the cursor
    let restored = ratatui::try_restore();
    let value = done.map_err(fail)?;
    restored.map_err(fail)?;
    Ok(value)
}

struct Shown {
    state: State,
    every: Duration,
    /// When the daemon was asked last.
    last: Instant,
    ask: Sender<()>,
    answers: Receiver<Result<Seen, String>>,
    signals: Receiver<Signal>,
    /// For an answer.
    waiting: bool,
}

impl Shown {
    /// Returns the signal that ended it.
    fn until_left(&mut self, terminal: &mut DefaultTerminal) -> io::Result<Option<Signal>> {
        loop {
            let drawn = terminal.draw(|f| draw::draw(f, &mut self.state))?.area;
            loop {
                if let Ok(s) = self.signals.try_recv() {
                    return Ok(Some(s));
                }
                if self.looked() {
                    break;
                }
                // (Crossterm knows of no change before its first look for an event.)
                if terminal.size()? != drawn.as_size() {
                    break;
                }
                if !event::poll(STEP)? {
                    continue;
                }
                match event::read()? {
                    Event::Key(k) if leaves(&k) => return Ok(None),
                    Event::Key(k) => match key(&k) {
                        Some(k) if self.state.press(k) => return Ok(None),
                        Some(_) => break,
                        None => {}
                    },
                    _ => {} // (of another size, too: see above)
                }
            }
        }
    }

    /// Asks the daemon if it is time; has something come?
    fn looked(&mut self) -> bool {
        if !self.waiting && !self.state.paused && self.last.elapsed() >= self.every {
            self.last = Instant::now();
            self.waiting = self.ask.send(()).is_ok();
        }
        match self.answers.try_recv() {
            Ok(look) => {
                self.waiting = false;
                self.state.take(look);
                true
            }
            Err(_) => false,
        }
    }
}

/// The terminal makes no signal of it in raw mode.
fn leaves(k: &KeyEvent) -> bool {
    k.code == KeyCode::Char('c') && k.modifiers.contains(KeyModifiers::CONTROL)
}

fn key(k: &KeyEvent) -> Option<Key> {
    let other = KeyModifiers::CONTROL | KeyModifiers::ALT;
    if k.kind == KeyEventKind::Release || k.modifiers.intersects(other) {
        return None;
    }
    Some(match k.code {
        KeyCode::Char(c) => Key::Char(c),
        KeyCode::Tab => Key::Tab,
        KeyCode::BackTab => Key::BackTab,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Esc,
        KeyCode::Backspace => Key::Backspace,
        _ => return None,
    })
}
