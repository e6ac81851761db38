//! A terminal that a test holds the other end of.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

pub struct Pty {
    ours: File,
    theirs: File,
    said: Arc<Mutex<Vec<u8>>>,
}

impl Pty {
    pub fn new() -> Self {
        // SAFETY: it only opens.
        let fd = unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: it was just opened, and nobody else has it.
        let ours = unsafe { File::from_raw_fd(fd) };
        let mut name = [0u8; 64];
        // SAFETY: the descriptor is open, and the buffer as long as is said.
        let failed = unsafe {
            libc::grantpt(fd) != 0
                || libc::unlockpt(fd) != 0
                || libc::ptsname_r(fd, name.as_mut_ptr().cast(), name.len()) != 0
        };
        assert!(!failed);
        let name = std::ffi::CStr::from_bytes_until_nul(&name).unwrap();
        let theirs = OpenOptions::new()
            .read(true)
            .write(true)
            .open(name.to_str().unwrap())
            .unwrap();
        let pty = Pty {
            ours,
            theirs,
            said: Arc::default(),
        };
        pty.resize(120, 24);
        let (mut from, said) = (pty.ours.try_clone().unwrap(), Arc::clone(&pty.said));
        std::thread::spawn(move || {
            let mut b = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut b) {
                said.lock().unwrap().extend(&b[..n]);
            }
        });
        pty
    }

    /// Starts a program that has it as its terminal. (A shell is in between: when the leader of a session ends, the
    /// kernel resets its terminal.)
    pub fn start(&self, c: &Command) -> Running {
        let end = || self.theirs.try_clone().unwrap();
        let mut sh = Command::new("sh");
        sh.args([
            "-c",
            "trap : INT; \"$0\" \"$@\"; echo status $?.; sleep 600",
        ]);
        sh.arg(c.get_program()).args(c.get_args());
        for (name, value) in c.get_envs() {
            match value {
                Some(v) => sh.env(name, v),
                None => sh.env_remove(name),
            };
        }
        sh.stdin(end()).stdout(end()).stderr(end());
        sh.env("TERM", "xterm");
        // SAFETY: both calls may be made after a fork.
        unsafe {
            sh.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        Running {
            shell: sh.spawn().unwrap(),
        }
    }

    /// Waits for the program's end; its exit status, as a shell has it.
    pub fn status(&self) -> u32 {
        self.wait_for(0, "status ");
        self.wait_for(0, ".\r\n");
        let said = self.said();
        let (_, rest) = said.rsplit_once("status ").unwrap();
        rest.split('.').next().unwrap().parse().unwrap()
    }

    pub fn press(&self, keys: &str) {
        (&self.ours).write_all(keys.as_bytes()).unwrap();
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the descriptor is open, the structure that which the request reads.
        let r = unsafe { libc::ioctl(self.ours.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(r, 0);
    }

    pub fn said(&self) -> String {
        String::from_utf8_lossy(&self.said.lock().unwrap()).into_owned()
    }

    /// Waits for a text that comes after the first `from` bytes; returns how much was said until then.
    pub fn wait_for(&self, from: usize, text: &str) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            let said = self.said();
            if said.get(from..).is_some_and(|s| s.contains(text)) {
                return said.len();
            }
            assert!(Instant::now() < until, "no `{text}` in {said:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Is it as a shell left it: lines, echo, signals?
    pub fn is_cooked(&self) -> bool {
        // SAFETY: zeros are a value of it.
        let mut t: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, the structure there to be written.
        let r = unsafe { libc::tcgetattr(self.theirs.as_raw_fd(), &mut t) };
        assert_eq!(r, 0);
        let all = libc::ICANON | libc::ECHO | libc::ISIG;
        t.c_lflag & all == all
    }
}

pub struct Running {
    shell: Child,
}

impl Running {
    /// Sends a signal to the program.
    pub fn kill(&self, signal: i32) {
        let sh = self.shell.id();
        let children = std::fs::read_to_string(format!("/proc/{sh}/task/{sh}/children")).unwrap();
        let pid = children.trim().parse().unwrap();
        // SAFETY: it only sends a signal.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
