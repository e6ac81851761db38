//! Standard output and failures.
//!
//! The tool is made for pipes: a reader that has gone away (`underpass ss | head`) is no error, every other failed
//! write is one. Text from other processes (program names, log lines) is printed without control characters, so that
//! nobody can control the reader's terminal.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// A failure: a message for people, and an exit status for scripts.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    pub message: String,
}

impl Failure {
    /// An ordinary failure: status 1.
    pub fn new(message: impl fmt::Display) -> Self {
        Failure {
            code: 1,
            message: message.to_string(),
        }
    }

    /// A program could not be executed; the exit status is the one that shells use.
    pub fn cannot_run(command: &[OsString], e: &io::Error) -> Self {
        let code = match e.kind() {
            io::ErrorKind::NotFound => NOT_FOUND,
            _ => NOT_EXECUTABLE,
        };
        let program = command.first().map(|p| p.to_string_lossy());
        Failure {
            code,
            message: format!("cannot run `{}`: {e}", program.unwrap_or_default()),
        }
    }

    pub fn with_code(self, code: u8) -> Self {
        Failure { code, ..self }
    }
}

/// Result of every subcommand.
pub type Outcome = Result<ExitCode, Failure>;

/// Writes `text` to standard output.
pub fn print(text: &str) -> Result<(), Failure> {
    write(text).map(|_| ())
}

/// The same; is its reader still there?
pub fn write(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::new(format_args!(
            "cannot write to standard output: {e}"
        ))),
    }
}

/// Prints a value as indented JSON.
pub fn print_json<T: serde::Serialize>(value: &T) -> Result<(), Failure> {
    let mut s = serde_json::to_string_pretty(value).map_err(Failure::new)?;
    s.push('\n');
    print(&s)
}

/// Writes a line to standard error. That standard error may be closed is ignored.
pub fn complain(message: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "underpass: {message}");
}

/// `s` with control characters made visible.
pub fn clean(s: &str) -> String {
    s.chars()
        .flat_map(|c| {
            if c.is_control() {
                Shown::Escaped(c.escape_default())
            } else {
                Shown::Plain(Some(c))
            }
        })
        .collect()
}

enum Shown {
    Escaped(std::char::EscapeDefault),
    Plain(Option<char>),
}

impl Iterator for Shown {
    type Item = char;
    fn next(&mut self) -> Option<char> {
        match self {
            Shown::Escaped(e) => e.next(),
            Shown::Plain(c) => c.take(),
        }
    }
}

/// A number of bytes for people to read: three digits and a unit.
#[expect(
    clippy::cast_precision_loss,
    reason = "three digits are shown of the many that a float has"
)]
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut v = n as f64 / 1024.0;
    let mut unit = 0;
    while v >= 999.5 && unit + 1 < UNITS.len() {
        v /= 1024.0;
        unit += 1;
    }
    let digits = if v < 9.995 {
        2
    } else if v < 99.95 {
        1
    } else {
        0
    };
    format!("{v:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_not_sent() {
        assert_eq!(clean("a\x1b[2Jb\nü"), "a\\u{1b}[2Jb\\nü");
    }

    #[test]
    fn sizes_have_three_digits() {
        for (n, s) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10 * 1024, "10.0 KiB"),
            (1_048_575, "1.00 MiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(n), s);
        }
    }
}
