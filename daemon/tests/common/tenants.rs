//! Processes of other tenants: another user, in a cgroup of its own.

use super::cgroup::TestCgroup;
use super::daemon::Daemon;
use super::{table_fd, Shim, SEALS};
use lane::family::TABLE_BYTES;
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{geteuid, setrlimit, Resource, Rlimit};
use std::collections::HashSet;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

/// Nobody.
pub const NOBODY: u32 = 65_534;

/// Where a control socket is, for processes that may make system calls only.
#[derive(Clone, Copy)]
pub struct At(libc::sockaddr_un);

impl At {
    pub fn of(dir: &Path) -> At {
        let path = dir.join("control.sock");
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: all-zero is a valid address.
        let mut a: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        a.sun_family = libc::AF_UNIX as u16;
        for (to, from) in a.sun_path.iter_mut().zip(path.as_bytes()) {
            *to = *from as _;
        }
        At(a)
    }

    /// Connects, and makes only system calls; -1: that did not work.
    pub fn connect(&self) -> i32 {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        let len = std::mem::size_of_val(&self.0) as u32;
        // SAFETY: the address lives, with its length.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, kind, 0);
            if fd >= 0 && libc::connect(fd, (&raw const self.0).cast(), len) != 0 {
                libc::close(fd);
                return -1;
            }
            fd
        }
    }
}

/// A process of another tenant; it ends with this.
pub struct Stranger {
    pid: i32,
    cgroup: TestCgroup,
}

impl Stranger {
    /// It does `work` again and again, which may only make system calls: it is a fork of a process with threads. `None`: we
    /// may not make one here.
    pub fn start(mut work: impl FnMut()) -> Option<Stranger> {
        let cgroup = geteuid().is_root().then(TestCgroup::new).flatten()?;
        let procs = cgroup.procs().ok()?;
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let entered = rustix::io::write(&procs, b"0");
            // SAFETY: plain system calls; with our end, it gets a signal.
            let left = unsafe {
                libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::syscall(libc::SYS_setgroups, 0, 0) == 0
                    && libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY) == 0
                    && libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0
            };
            if entered.is_err() || !left {
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(1) };
            }
            loop {
                work();
            }
        }
        Some(Stranger { pid, cgroup })
    }

    /// Limits the memory of its tenant.
    pub fn limit(&self, bytes: Option<u64>) {
        self.cgroup.limit(bytes);
    }

    /// Bytes that are charged to its tenant.
    pub fn used(&self) -> u64 {
        self.cgroup.used().unwrap()
    }

    pub fn lives(&self) -> bool {
        // SAFETY: a process of ours.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::WNOHANG) == 0 }
    }
}

/// Connections that a stranger makes, and hands over: whose they are, the daemon has seen.
pub struct Dialer {
    from: OwnedFd,
    pub stranger: Stranger,
}

impl Dialer {
    pub fn start(dir: &Path) -> Option<Dialer> {
        let at = At::of(dir);
        let (from, to) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let raw = to.as_raw_fd();
        let stranger = Stranger::start(move || {
            // Whenever it is asked.
            let mut byte = 0_u8;
            // SAFETY: system calls on descriptors that are ours, with memory that lives.
            unsafe {
                if libc::read(raw, (&raw mut byte).cast(), 1) != 1 {
                    libc::_exit(0);
                }
            }
            let fd = at.connect();
            send_fd(raw, fd);
            // SAFETY: just made; the receiver has it.
            unsafe { libc::close(fd) };
        })?;
        Some(Dialer { from, stranger })
    }

    /// A connection to the daemon.
    pub fn dial(&self) -> OwnedFd {
        assert_eq!(rustix::io::write(&self.from, b"x"), Ok(1));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buf = [0];
        let iov = &mut [std::io::IoSliceMut::new(&mut buf)];
        recvmsg(&self.from, iov, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let got = control.drain().find_map(|m| match m {
            RecvAncillaryMessage::ScmRights(mut r) => r.next(),
            _ => None,
        });
        got.expect("a connection")
    }

    /// A shim of the stranger's.
    pub fn shim(&self) -> Shim {
        let mut s = Shim::unconnected(table_fd(TABLE_BYTES, SEALS));
        s.sock = self.dial();
        s.greet();
        s
    }
}

/// Sends one descriptor, by system calls only.
fn send_fd(to: i32, fd: i32) {
    let mut byte = 0_u8;
    let mut iov = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    #[repr(align(8))]
    struct Space([u8; 64]);
    let mut space = Space([0; 64]);
    // SAFETY: all-zero is a valid header; it names buffers that live, with their lengths, and the space is enough for one.
    unsafe {
        let mut h: libc::msghdr = std::mem::zeroed();
        h.msg_iov = &mut iov;
        h.msg_iovlen = 1;
        h.msg_control = space.0.as_mut_ptr().cast();
        h.msg_controllen = libc::CMSG_SPACE(4) as _;
        let c = libc::CMSG_FIRSTHDR(&h);
        (*c).cmsg_level = libc::SOL_SOCKET;
        (*c).cmsg_type = libc::SCM_RIGHTS;
        (*c).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(c).cast::<i32>().write_unaligned(fd);
        libc::sendmsg(to, &h, libc::MSG_NOSIGNAL);
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // SAFETY: a child of ours, which nobody else waits for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

impl Daemon {
    /// Root's, at a place where everybody may connect. `files`: so many descriptors it may have, if not as many as we.
    pub fn public(within: &Path, args: &[&str], files: Option<u64>) -> Daemon {
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(within, open).unwrap();
        let dir = within.join("run");
        let mut c = Daemon::command(&dir, args);
        if let Some(n) = files {
            let less = Rlimit {
                current: Some(n),
                maximum: Some(n),
            };
            // SAFETY: one system call.
            unsafe { c.pre_exec(move || Ok(setrlimit(Resource::Nofile, less)?)) };
        }
        Daemon::of(&dir, c.spawn().unwrap())
    }

    /// Does something while it can have no further descriptor.
    pub fn while_full(&self, work: impl FnOnce()) {
        let look = || -> HashSet<u64> {
            let all = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
            all.map(|e| e.unwrap().file_name().to_str().unwrap().parse().unwrap())
                .collect()
        };
        // What it has for a moment only (a tool's connection) is gone by then.
        let (mut used, mut same) = (look(), 0);
        while same < 10 {
            std::thread::sleep(Duration::from_millis(30));
            let now = look();
            same = if now == used { same + 1 } else { 0 };
            used = now;
        }
        let first = (0..).find(|n| !used.contains(n)).unwrap();
        let before = self.limit_files(None);
        self.limit_files(Some(libc::rlimit {
            rlim_cur: first,
            ..before
        }));
        work();
        self.limit_files(Some(before));
    }

    /// Sets the limit of its descriptors; what it was.
    fn limit_files(&self, to: Option<libc::rlimit>) -> libc::rlimit {
        let mut was = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        let to = to.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let pid = self.pid() as i32;
        // SAFETY: both structures live.
        let done = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, to, &mut was) };
        assert_eq!(done, 0);
        was
    }
}
