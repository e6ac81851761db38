//! Plugins that the runtime starts itself.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// What the runtime tells them: the descriptor of their socket, their index and their name.
const SOCKET: &str = "NRI_PLUGIN_SOCKET";
const INDEX: &str = "NRI_PLUGIN_IDX";
const NAME: &str = "NRI_PLUGIN_NAME";

/// Who this program is to its runtime.
#[derive(Debug)]
pub struct Launched {
    /// The conversation, non-blocking.
    pub stream: UnixStream,
    /// As in the name of its file, `INDEX-NAME`: all of it, or, by newer runtimes, what is after the index.
    pub name: String,
    /// Two digits.
    pub index: String,
}

/// Was this program started by a runtime, as its plugin?
pub fn is_launched() -> bool {
    std::env::var_os(SOCKET).is_some()
}

/// Takes what the runtime has given. To be called once, while nothing else has taken descriptors by number.
#[expect(unsafe_code, reason = "a descriptor by its number")]
pub fn launched() -> io::Result<Launched> {
    let variable = |name| std::env::var(name).map_err(io::Error::other);
    let fd: i32 = variable(SOCKET)?.parse().map_err(io::Error::other)?;
    if fd < 3 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the runtime has passed it to this program, nothing else here owns a descriptor by its number, and one that is
    // not open fails in the next call.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    stream.set_nonblocking(true)?;
    Ok(Launched {
        stream,
        name: variable(NAME)?,
        index: variable(INDEX)?,
    })
}
