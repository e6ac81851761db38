//! `underpass ss --watch`: the table anew, until the reader has gone.

use crate::out::{self, Failure, Outcome};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;
use time::OffsetDateTime;

/// Home, and clear everything: the table and the scrollback before it stay apart.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// How a look is set apart from the one before it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Apart {
    /// Lines that are whole by themselves: programs read them.
    Lines,
    /// A table on a cleared screen.
    Screen,
    /// A table below an empty line and the time.
    Tables,
}

impl Apart {
    fn before(self, first: bool) -> String {
        let now = OffsetDateTime::now_utc();
        let (h, m, s) = now.to_hms();
        let time = format!("{} {h:02}:{m:02}:{s:02} UTC\n", now.date());
        match self {
            Apart::Lines => String::new(),
            Apart::Screen => format!("{CLEAR}{time}"),
            Apart::Tables if first => time,
            Apart::Tables => format!("\n{time}"),
        }
    }
}

/// Prints what `look` returns, every `every`. Without a first answer it fails, as without `--watch`; a daemon that is
/// away later may be one that is being replaced.
pub fn run(
    every: Duration,
    lines: bool,
    mut look: impl FnMut() -> Result<String, Failure>,
) -> Outcome {
    let apart = match (lines, io::stdout().is_terminal()) {
        (true, _) => Apart::Lines,
        (false, true) => Apart::Screen,
        (false, false) => Apart::Tables,
    };
    let mut text = look()?;
    let mut first = true;
    loop {
        if !out::write(&format!("{}{text}", apart.before(first)))? {
            return Ok(ExitCode::SUCCESS);
        }
        first = false;
        text = loop {
            if gone_within(every) {
                return Ok(ExitCode::SUCCESS);
            }
            match look() {
                Ok(t) => break t,
                Err(f) => out::complain(f.message),
            }
        };
    }
}

/// Waits; does the reader of standard output go away meanwhile? (It would otherwise be noticed at the next table only,
/// which may be hours away.)
fn gone_within(every: Duration) -> bool {
    let out = io::stdout();
    let timeout = Timespec::try_from(every).ok();
    let mut fds = [PollFd::new(&out, PollFlags::empty())];
    match poll(&mut fds, timeout.as_ref()) {
        Ok(n) => n != 0,
        Err(_) => false, // a signal, after a stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_set_apart_and_lines_are_not() {
        let time = Apart::Tables.before(true);
        assert!(time.ends_with(" UTC\n"), "{time}");
        assert!(Apart::Tables.before(false).starts_with("\n2"));
        assert!(Apart::Screen.before(true).starts_with("\x1b[H\x1b[2J2"));
        assert_eq!(Apart::Lines.before(false), "");
    }
}
