//! A wire for more than two machines: passes each frame to the NIC it is for, or to all others.

use anyhow::{Context, Result};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

/// Qemu's largest frame, with room to spare.
const FRAME: usize = 80 << 10;
/// How long a machine that does not take its frames may hold up the others.
const PATIENCE: Duration = Duration::from_millis(100);

/// Our socket for a machine, where the machine's own is, and its hardware address.
pub(super) type Port = (PathBuf, PathBuf, [u8; 6]);

pub(super) struct Hub {
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    pub fn start(ports: Vec<Port>) -> Result<Self> {
        let mut sockets = Vec::new();
        for (ours, _, _) in &ports {
            let s = UnixDatagram::bind(ours).with_context(|| ours.display().to_string())?;
            s.set_write_timeout(Some(PATIENCE))?;
            sockets.push(s);
        }
        let (stop, stopped) = UnixStream::pair()?;
        let thread = std::thread::Builder::new()
            .name("hub".into())
            .spawn(move || forward(&ports, &sockets, &stopped))?;
        Ok(Hub {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

fn forward(ports: &[Port], sockets: &[UnixDatagram], stopped: &UnixStream) {
    let mut frame = vec![0; FRAME];
    loop {
        let mut fds: Vec<PollFd> = sockets
            .iter()
            .map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN))
            .collect();
        fds.push(PollFd::new(stopped.as_fd(), PollFlags::POLLIN));
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|f| f.any().unwrap_or(false)).collect();
        if ready[sockets.len()] {
            return;
        }
        for (from, s) in sockets.iter().enumerate().filter(|&(i, _)| ready[i]) {
            let Ok(n) = s.recv(&mut frame) else { continue };
            let frame = &frame[..n];
            let known = ports.iter().position(|p| frame.starts_with(&p.2));
            for (to, (_, path, _)) in ports.iter().enumerate() {
                if to != from && known.is_none_or(|k| k == to) {
                    // A NIC that is cut off, off, or overrun loses the frame.
                    let _ = s.send_to(frame, path);
                }
            }
        }
    }
}
