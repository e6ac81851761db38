//! Runtime directories: where a daemon has its sockets.
//!
//! Which daemon: the directory that was named (`--dir`, `UNDERPASS_DIR`); else the system's if it
//! answers; else this user's, which for root is the system's: programs that root starts change their
//! user, and then could not enter a private directory of root's. A directory in `/tmp` is believed only if it belongs
//! to this user or to root: whoever owns it could otherwise pose as the daemon.

use crate::client::{presence, Presence};
use nix::unistd::{access, AccessFlags, Uid};
use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use lane::os::dirs::{DIR_ENV, SYSTEM_DIR, XDG_ENV};

/// A directory that is not to be believed, or cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be looked at.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    #[error(
        "{dir} is not a directory that only uid {me} can write to (owner {owner}, mode {mode:o}): not using the daemon in it"
    )]
    /// Another user owns it, or others can write to it.
    Foreign {
        /// The directory.
        dir: PathBuf,
        /// User id that wants to use it.
        me: u32,
        /// User id of its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
}

/// Milliseconds between two tries to lock a directory.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Locks what `file` has open, for as long as it is open. The holder may be a daemon that is ending: it is waited for, but no
/// longer than `patience`, and not if it `stays`. Returns whether it is locked.
pub fn lock(file: impl AsFd, patience: Duration, stays: impl Fn() -> bool) -> io::Result<bool> {
    let end = Instant::now() + patience;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if stays() || Instant::now() > end => return Ok(false),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_PAUSE),
            Err(e) => return Err(e.into()),
        }
    }
}

/// The directories in which a daemon may be found.
#[derive(Clone, Debug, PartialEq)]
pub struct Places {
    /// Named by `--dir` or `UNDERPASS_DIR`: then no other is considered.
    pub named: Option<PathBuf>,
    /// The system daemon's: [`SYSTEM_DIR`].
    pub system: PathBuf,
    /// That of this user's own daemon.
    pub user: PathBuf,
}

impl Places {
    /// As this process's arguments and environment have it.
    pub fn here(dir: Option<PathBuf>) -> Self {
        let env = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        Places {
            named: dir.or_else(|| env(DIR_ENV).map(PathBuf::from)),
            system: SYSTEM_DIR.into(),
            user: match Uid::effective() {
                root if root.is_root() && may_make(SYSTEM_DIR.as_ref()) => SYSTEM_DIR.into(),
                user => user_dir(env(XDG_ENV).as_deref(), user.as_raw()),
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
    pub fn check_owner(&self, dir: &Path) -> Result<(), Error> {
        if dir != self.user {
            return Ok(());
        }
        let meta = match std::fs::symlink_metadata(dir) {
            Ok(m) => m,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Error::Io(dir.to_owned(), e)),
        };
        let me = Uid::effective().as_raw();
        if !meta.is_dir() || (meta.uid() != me && meta.uid() != 0) || meta.mode() & 0o022 != 0 {
            return Err(Error::Foreign {
                dir: dir.to_owned(),
                me,
                owner: meta.uid(),
                mode: meta.mode() & 0o7777,
            });
        }
        Ok(())
    }
}

/// Is this directory there, or can it be made? (Containers may have a file system that is read-only.)
fn may_make(dir: &Path) -> bool {
    let at = dir.ancestors().find(|d| d.exists());
    at.is_some_and(|d| access(d, AccessFlags::W_OK).is_ok())
}

/// The directory of the daemon of user `uid`.
pub fn user_dir(xdg: Option<&OsStr>, uid: u32) -> PathBuf {
    let is_dir = |d: &[u8]| Path::new(OsStr::from_bytes(d)).is_dir();
    let mut digits = [0; 10];
    let xdg = xdg.map(OsStr::as_bytes);
    let parts = lane::os::dirs::user_dir(xdg, is_dir, uid, &mut digits);
    OsString::from_vec(parts.concat()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{presence, tests::daemon, Presence};
    use crate::ADMIN_SOCK;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
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
        let of = |p: &Path| user_dir(Some(p.as_os_str()), 7);
        assert_eq!(of(t.path()), t.path().join("underpass"));
        assert_eq!(of(&t.path().join("none")), Path::new("/tmp/underpass-7"));
        assert_eq!(user_dir(None, 0), Path::new("/tmp/underpass-0"));
    }
}
