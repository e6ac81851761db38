//! Asking the daemon, and looking whether one is there.

use crate::{Request, Response, ADMIN_SOCK};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a daemon may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to say that it is there.
const PING_PATIENCE: Duration = Duration::from_secs(2);

/// Why there is no answer. Texts of the daemon's may hold control characters.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket is there, and this user may not connect to it.
    #[error("{0}: {1}")]
    Denied(PathBuf, io::Error),
    #[error(
        "no underpassd is running ({0}: {1}); start one, or start a program with `underpass run`"
    )]
    /// Nobody can be connected to at the socket.
    Absent(PathBuf, io::Error),
    /// Connected, but no answer came in 10 s.
    #[error("underpassd at {0} does not answer within {s} s; is it stopped?", s = PATIENCE.as_secs())]
    Silent(PathBuf),
    /// The connection broke, or what came is no answer.
    #[error("no sensible answer from underpassd at {0}: {1}")]
    Talk(PathBuf, io::Error),
    /// The daemon's answer is an error: its text.
    #[error("underpassd says: {0}")]
    Refused(String),
    /// The name of an answer that does not fit the question.
    #[error("underpassd answered with `{0}`, which was not the question; are tool and daemon of one version?")]
    Unexpected(String),
}

/// Is a daemon there?
#[derive(Debug)]
pub enum Presence {
    /// A daemon, which has answered.
    Answers,
    /// Something took the connection but did not answer in time: stopped or overloaded.
    Silent,
    /// Nobody, or somebody who does not speak like a daemon.
    Absent,
}

/// Looks whether a daemon answers in `dir`.
pub fn presence(dir: &Path) -> Presence {
    knock(dir, &Request::Ping)
}

/// The same; and a daemon that leaves when idle stays for as long as this process lives, whatever
/// program it becomes. (An older daemon does not know the request: an answer of its own kind.)
pub fn hold(dir: &Path) -> Presence {
    knock(dir, &Request::Keep)
}

fn knock(dir: &Path, request: &Request) -> Presence {
    match begin(dir, request, PING_PATIENCE) {
        Ok(_) => Presence::Answers,
        Err(Trouble::Connect(_)) => Presence::Absent,
        Err(Trouble::Talk(e)) if e.kind() == io::ErrorKind::WouldBlock => Presence::Silent,
        Err(Trouble::Talk(_)) => Presence::Absent,
    }
}

enum Trouble {
    Connect(io::Error),
    Talk(io::Error),
}

/// The answer, and the connection after it.
fn begin(
    dir: &Path,
    request: &Request,
    patience: Duration,
) -> Result<(Response, BufReader<UnixStream>), Trouble> {
    let stream = UnixStream::connect(dir.join(ADMIN_SOCK)).map_err(Trouble::Connect)?;
    let talk = || -> io::Result<(Response, BufReader<UnixStream>)> {
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        (&stream).write_all(line.as_bytes())?;
        let mut answer = String::new();
        let mut reader = BufReader::new(stream);
        reader.read_line(&mut answer)?;
        if answer.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it closed the connection without an answer",
            ));
        }
        Ok((serde_json::from_str(&answer)?, reader))
    };
    talk().map_err(Trouble::Talk)
}

/// Asks the daemon in `dir`.
pub fn ask(dir: &Path, request: &Request) -> Result<Response, Error> {
    follow(dir, request).map(|(answer, _)| answer)
}

/// The same for a request to which more follows than the answer: the connection behind it.
pub fn follow(dir: &Path, request: &Request) -> Result<(Response, BufReader<UnixStream>), Error> {
    let sock = dir.join(ADMIN_SOCK);
    match begin(dir, request, PATIENCE) {
        Ok((Response::Error { message }, _)) => Err(Error::Refused(message)),
        Ok(r) => Ok(r),
        Err(Trouble::Connect(e)) if e.kind() == io::ErrorKind::PermissionDenied => {
            Err(Error::Denied(sock, e))
        }
        Err(Trouble::Connect(e)) => Err(Error::Absent(sock, e)),
        Err(Trouble::Talk(e)) if e.kind() == io::ErrorKind::WouldBlock => Err(Error::Silent(sock)),
        Err(Trouble::Talk(e)) => Err(Error::Talk(sock, e)),
    }
}

/// The error for an answer that does not fit the question.
pub fn unexpected(r: &Response) -> Error {
    let s = serde_json::to_string(r).unwrap_or_default();
    let kind: String = s
        .chars()
        .filter(|c| c.is_ascii_alphabetic() || *c == ':')
        .take_while(|c| *c != ':')
        .collect();
    Error::Unexpected(kind)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A daemon that answers every request with one text.
    pub(crate) fn daemon(dir: &Path, answer: &'static str) {
        let l = UnixListener::bind(dir.join(ADMIN_SOCK)).unwrap();
        std::thread::spawn(move || {
            for mut s in l.incoming().flatten() {
                let mut q = String::new();
                let _ = BufReader::new(&s).read_line(&mut q);
                let _ = s.write_all(answer.as_bytes());
            }
        });
    }

    #[test]
    fn bad_answers_are_reported() {
        for (answer, part) in [
            ("", "closed the connection"),
            ("nonsense\n", "no sensible answer"),
            (
                "{\"error\":{\"message\":\"no \\u001b such\"}}\n",
                "says: no \u{1b} such",
            ),
        ] {
            let t = tempfile::tempdir().unwrap();
            daemon(t.path(), answer);
            let e = ask(t.path(), &Request::Ss).unwrap_err();
            assert!(e.to_string().contains(part), "{}", e);
        }
        let e = ask(Path::new("/nonexistent"), &Request::Ss).unwrap_err();
        assert!(e.to_string().contains("no underpassd is running"), "{}", e);
    }
}
