//! Finding the daemon and asking it.
//!
//! Which daemon: the directory that was named (`--dir`, `UNDERPASS_DIR`); else the system's if it
//! answers; else this user's, which for root is the system's: programs that root starts change their
//! user, and then could not enter a private directory of root's. A directory in `/tmp` is believed only if it belongs to this user or
//! to root: whoever owns it could otherwise pose as the daemon.

use crate::out::Failure;
use nix::unistd::Uid;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpassd::admin::{Request, Response, ADMIN_SOCK, DIR_ENV, SYSTEM_DIR};

/// How long a daemon may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to say that it is there.
const PING_PATIENCE: Duration = Duration::from_secs(2);

/// The directories in which a daemon may be found.
#[derive(Clone, Debug, PartialEq)]
pub struct Places {
    /// Named by `--dir` or `UNDERPASS_DIR`: then no other is considered.
    pub named: Option<PathBuf>,
    pub system: PathBuf,
    pub user: PathBuf,
}

/// Is a daemon there?
#[derive(Debug)]
pub enum Presence {
    Answers,
    /// Something took the connection but did not answer in time: stopped or overloaded.
    Silent,
    Absent,
}

impl Places {
    /// As this process's arguments and environment have it.
    pub fn here(dir: Option<PathBuf>) -> Self {
        let env = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        Places {
            named: dir.or_else(|| env(DIR_ENV)),
            system: SYSTEM_DIR.into(),
            user: match Uid::effective() {
                root if root.is_root() && may_make(SYSTEM_DIR.as_ref()) => SYSTEM_DIR.into(),
                user => user_dir(env("XDG_RUNTIME_DIR"), user.as_raw()),
            },
        }
    }

    /// The directory of the daemon to use, whether or not one runs there.
    pub fn choose(&self) -> &Path {
        match &self.named {
            Some(d) => d,
            None if matches!(presence(&self.system), Presence::Answers) => &self.system,
            None => &self.user,
        }
    }

    /// May the chosen directory be believed? One that was named, and the system's, always.
    pub fn check_owner(&self, dir: &Path) -> Result<(), Failure> {
        if dir != self.user {
            return Ok(());
        }
        let meta = match std::fs::symlink_metadata(dir) {
            Ok(m) => m,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Failure::new(format_args!("{}: {e}", dir.display()))),
        };
        let me = Uid::effective().as_raw();
        if !meta.is_dir() || (meta.uid() != me && meta.uid() != 0) || meta.mode() & 0o022 != 0 {
            return Err(Failure::new(format_args!(
                "{} is not a directory that only uid {me} can write to (owner {}, mode {:o}): \
                 not using the daemon in it",
                dir.display(),
                meta.uid(),
                meta.mode() & 0o7777
            )));
        }
        Ok(())
    }
}

/// Is this directory there, or can it be made? (Containers may have a file system that is read-only.)
fn may_make(dir: &Path) -> bool {
    let at = dir.ancestors().find(|d| d.exists());
    at.is_some_and(|d| nix::unistd::access(d, nix::unistd::AccessFlags::W_OK).is_ok())
}

/// The directory of the daemon of user `uid`.
fn user_dir(xdg: Option<PathBuf>, uid: u32) -> PathBuf {
    match xdg {
        Some(d) if d.is_absolute() && d.is_dir() => d.join("underpass"),
        _ => PathBuf::from(format!("/tmp/underpass-{uid}")),
    }
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
    match exchange(dir, request, PING_PATIENCE) {
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

fn exchange(dir: &Path, request: &Request, patience: Duration) -> Result<Response, Trouble> {
    let stream = UnixStream::connect(dir.join(ADMIN_SOCK)).map_err(Trouble::Connect)?;
    let talk = || -> io::Result<Response> {
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        (&stream).write_all(line.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer)?;
        if answer.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it closed the connection without an answer",
            ));
        }
        Ok(serde_json::from_str(&answer)?)
    };
    talk().map_err(Trouble::Talk)
}

/// Asks the daemon that the arguments and the environment select.
pub fn ask(dir: Option<PathBuf>, request: &Request) -> Result<Response, Failure> {
    let places = Places::here(dir);
    let dir = places.choose();
    places.check_owner(dir)?;
    ask_in(dir, request)
}

/// Asks the daemon in `dir`.
pub fn ask_in(dir: &Path, request: &Request) -> Result<Response, Failure> {
    let sock = dir.join(ADMIN_SOCK);
    match exchange(dir, request, PATIENCE) {
        Ok(Response::Error { message }) => {
            Err(Failure::new(format_args!("underpassd says: {}", crate::out::clean(&message))))
        }
        Ok(r) => Ok(r),
        Err(Trouble::Connect(e)) if e.kind() == io::ErrorKind::PermissionDenied => {
            Err(Failure::new(format_args!("{}: {e}", sock.display())))
        }
        Err(Trouble::Connect(e)) => Err(Failure::new(format_args!(
            "no underpassd is running ({}: {e}); start one, or start a program with `underpass run`",
            sock.display()
        ))),
        Err(Trouble::Talk(e)) if e.kind() == io::ErrorKind::WouldBlock => Err(Failure::new(format_args!(
            "underpassd at {} does not answer within {} s; is it stopped?",
            sock.display(),
            PATIENCE.as_secs()
        ))),
        Err(Trouble::Talk(e)) => {
            Err(Failure::new(format_args!("no sensible answer from underpassd at {}: {e}", sock.display())))
        }
    }
}

/// The failure for an answer that does not fit the question.
pub fn unexpected(r: &Response) -> Failure {
    let s = serde_json::to_string(r).unwrap_or_default();
    let kind: String = s
        .chars()
        .filter(|c| c.is_ascii_alphabetic() || *c == ':')
        .take_while(|c| *c != ':')
        .collect();
    Failure::new(format_args!("underpassd answered with `{kind}`, which was not the question; are tool and daemon of one version?"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    /// A daemon that answers every request with one text.
    fn daemon(dir: &Path, answer: &'static str) {
        let l = UnixListener::bind(dir.join(ADMIN_SOCK)).unwrap();
        std::thread::spawn(move || {
            for mut s in l.incoming().flatten() {
                let mut q = String::new();
                let _ = BufReader::new(&s).read_line(&mut q);
                let _ = s.write_all(answer.as_bytes());
            }
        });
    }

    const PONG: &str = "{\"pong\":{\"version\":\"0\",\"pid\":1,\"uptime_s\":0,\"proof\":false}}\n";

    fn places(root: &Path, named: Option<PathBuf>) -> Places {
        let p = Places {
            named,
            system: root.join("system"),
            user: root.join("user"),
        };
        for d in [&p.system, &p.user] {
            std::fs::create_dir(d).unwrap();
            std::fs::set_permissions(d, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        p
    }

    #[test]
    fn the_named_directory_wins_then_an_answering_system_then_the_user() {
        let t = tempfile::tempdir().unwrap();
        let p = places(t.path(), Some(t.path().join("named")));
        daemon(&p.system, PONG);
        assert_eq!(p.choose(), t.path().join("named"));
        let q = Places {
            named: None,
            ..p.clone()
        };
        assert_eq!(q.choose(), p.system);
    }

    #[test]
    fn a_system_daemon_that_is_gone_is_not_used() {
        let t = tempfile::tempdir().unwrap();
        let p = places(t.path(), None);
        drop(UnixListener::bind(p.system.join(ADMIN_SOCK)).unwrap()); // a stale socket file
        daemon(&p.user, PONG);
        assert_eq!(p.choose(), p.user);
        assert!(matches!(presence(&p.system), Presence::Absent));
        assert!(matches!(presence(&p.user), Presence::Answers));
    }

    #[test]
    fn the_users_directory_must_be_the_users() {
        let t = tempfile::tempdir().unwrap();
        let p = places(t.path(), None);
        assert!(p.check_owner(&p.user).is_ok());
        std::fs::set_permissions(&p.user, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(p.check_owner(&p.user).is_err());
        std::fs::remove_dir(&p.user).unwrap();
        assert!(p.check_owner(&p.user).is_ok(), "nothing there yet");
        std::os::unix::fs::symlink(&p.system, &p.user).unwrap();
        assert!(
            p.check_owner(&p.user).is_err(),
            "a link could lead anywhere"
        );
    }

    #[test]
    fn the_users_directory_follows_xdg_if_it_exists() {
        let t = tempfile::tempdir().unwrap();
        assert_eq!(
            user_dir(Some(t.path().into()), 7),
            t.path().join("underpass")
        );
        assert_eq!(
            user_dir(Some(t.path().join("none")), 7),
            Path::new("/tmp/underpass-7")
        );
        assert_eq!(
            user_dir(Some("relative".into()), 7),
            Path::new("/tmp/underpass-7")
        );
        assert_eq!(user_dir(None, 0), Path::new("/tmp/underpass-0"));
    }

    #[test]
    fn bad_answers_are_reported() {
        for (answer, part) in [
            ("", "closed the connection"),
            ("nonsense\n", "no sensible answer"),
            (
                "{\"error\":{\"message\":\"no \\u001b such\"}}\n",
                "says: no \\u{1b} such",
            ),
        ] {
            let t = tempfile::tempdir().unwrap();
            daemon(t.path(), answer);
            let e = ask_in(t.path(), &Request::Ss).unwrap_err();
            assert!(e.message.contains(part), "{}", e.message);
        }
        let e = ask_in(Path::new("/nonexistent"), &Request::Ss).unwrap_err();
        assert!(
            e.message.contains("no underpassd is running"),
            "{}",
            e.message
        );
    }
}
