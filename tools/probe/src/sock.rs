//! What the standard library has not, or has only with functions that musl lacks: names of hosts, the kernel's count
//! of a socket's bytes, a limit on this process's life.

use std::ffi::{CStr, CString};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Gives this process the name that others see: it was started by its dynamic linker, and would have that one's.
pub fn named() {
    // SAFETY: the name is a string that ends with NUL; the kernel copies at most 16 bytes of it.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"underpass-probe".as_ptr()) };
}

/// Ends this process (SIGALRM) unless it is called again within this time.
pub fn live_for(seconds: u32) {
    // SAFETY: sets a timer of the kernel; no memory is passed.
    unsafe { libc::alarm(seconds) };
}

/// Writes to standard output. Errors are ignored.
pub fn print(text: &str) {
    let mut left = text.as_bytes();
    while !left.is_empty() {
        // SAFETY: reads so many bytes of a slice that has them.
        let n = unsafe { libc::write(libc::STDOUT_FILENO, left.as_ptr().cast(), left.len()) };
        match usize::try_from(n) {
            Ok(n) if n > 0 => left = &left[n.min(left.len())..],
            _ if interrupted() => {}
            _ => return,
        }
    }
}

/// The next line of standard input, if there is one; of a longer one, what fits.
pub fn line() -> Option<String> {
    const LONGEST: usize = 256;
    let mut line = Vec::new();
    loop {
        let mut byte = 0u8;
        // SAFETY: writes at most one byte to one that is there.
        let n = unsafe { libc::read(libc::STDIN_FILENO, (&raw mut byte).cast(), 1) };
        match n {
            1 if byte == b'\n' => return String::from_utf8(line).ok(),
            1 if line.len() < LONGEST => line.push(byte),
            1 => {}
            -1 if interrupted() => {}
            _ => return None,
        }
    }
}

fn interrupted() -> bool {
    io::Error::last_os_error().kind() == ErrorKind::Interrupted
}

/// Standard input, to wait for.
pub fn input() -> BorrowedFd<'static> {
    // SAFETY: the descriptor stays open as long as the process lives: nothing here closes it, except a server, whose
    // connection it is, and which does not call this.
    unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) }
}

/// Starts this program again, with this connection as its standard input, `last` as its last argument, and without the
/// shim. Returns only if that fails.
pub fn again_without_shim(s: &TcpStream, last: &str) {
    let words = |file: &str| -> Vec<Vec<u8>> {
        let text = std::fs::read(file).unwrap_or_default();
        let text = text.strip_suffix(&[0]).unwrap_or(&text);
        text.split(|b| *b == 0).map(<[u8]>::to_vec).collect()
    };
    let mut args = words("/proc/self/cmdline");
    args.pop();
    args.push(last.into());
    let mut env = words("/proc/self/environ");
    env.retain(|v| !v.starts_with(b"UNDERPASS="));
    env.push(b"UNDERPASS=off".to_vec());
    env.iter_mut().for_each(leave_out_shim);
    let strings = |all: Vec<Vec<u8>>| -> Vec<CString> {
        all.into_iter()
            .filter_map(|w| CString::new(w).ok())
            .collect()
    };
    let (args, env) = (strings(args), strings(env));
    let pointers = |all: &[CString]| -> Vec<*const libc::c_char> {
        let all = all.iter().map(|w| w.as_ptr());
        all.chain([std::ptr::null()]).collect()
    };
    let (args_at, env_at) = (pointers(&args), pointers(&env));
    // SAFETY: both lists end with a null pointer, and their strings live in `args` and `env`. This process has one thread,
    // and uses nothing of what was at standard input.
    unsafe {
        if libc::dup2(s.as_raw_fd(), libc::STDIN_FILENO) >= 0 {
            libc::execve(
                c"/proc/self/exe".as_ptr(),
                args_at.as_ptr(),
                env_at.as_ptr(),
            );
        }
    }
}

/// Takes the shim out of a variable that is `LD_PRELOAD`. (Without it, not even its hooks are in the way.)
fn leave_out_shim(variable: &mut Vec<u8>) {
    const NAME: &[u8] = b"LD_PRELOAD=";
    if let Some(value) = variable.strip_prefix(NAME) {
        let kept = value.split(|b| b" :\t".contains(b));
        let kept: Vec<&[u8]> = kept.filter(|e| !e.ends_with(b"/libunderpass.so")).collect();
        *variable = [NAME, &kept.join(&b':')].concat();
    }
}

/// Waits until something can be read, for at most this long. False: time is up.
pub fn readable(fd: BorrowedFd, wait_ms: i32) -> bool {
    let mut p = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    loop {
        // SAFETY: `p` is one entry, and lives during the call.
        let n = unsafe { libc::poll(&raw mut p, 1, wait_ms) };
        if n >= 0 || !interrupted() {
            return n != 0;
        }
    }
}

/// Bytes that the kernel's TCP has carried on this connection, both ways: those sent and acknowledged, and those
/// received. `None`: it does not say.
pub fn kernel_bytes(s: &TcpStream) -> Option<u64> {
    /// `tcpi_bytes_acked` and `tcpi_bytes_received` of `struct tcp_info`, in words of 8 bytes.
    const ACKED: usize = 15;
    const RECEIVED: usize = 16;
    let mut info = [0u64; RECEIVED + 1];
    let mut len = libc::socklen_t::try_from(size_of_val(&info)).ok()?;
    // SAFETY: the kernel writes at most `len` bytes to `info`, all of whose values are valid.
    let done = unsafe {
        libc::getsockopt(
            s.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    let whole = usize::try_from(len).ok()? == size_of_val(&info);
    (done == 0 && whole).then(|| info[ACKED].wrapping_add(info[RECEIVED]))
}

/// Connects to the first address of the name that answers.
pub fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for ip in addresses(host)? {
        match TcpStream::connect_timeout(&SocketAddr::new(ip, port), CONNECT_PATIENCE) {
            Ok(s) => return Ok(s),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// (Of an address with a scope, the scope is lost: no lane has one.)
fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    if let Ok(ip) = host.parse() {
        return Ok(vec![ip]);
    }
    let name = CString::new(host)?;
    // SAFETY: all fields of this struct may be zero; null pointers mean that nothing is asked for.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_socktype = libc::SOCK_STREAM;
    let mut list = std::ptr::null_mut();
    // SAFETY: the name ends with NUL, and all pointers are valid during the call.
    let code = unsafe {
        libc::getaddrinfo(
            name.as_ptr(),
            std::ptr::null(),
            &raw const hints,
            &raw mut list,
        )
    };
    if code != 0 {
        // SAFETY: for every number it returns a string that is never freed.
        let why = unsafe { CStr::from_ptr(libc::gai_strerror(code)) };
        return Err(io::Error::other(why.to_string_lossy().into_owned()));
    }
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is an entry of the list, which is freed below only.
        let entry = unsafe { &*at };
        match entry.ai_family {
            libc::AF_INET => {
                // SAFETY: an entry of this family has an address of this type.
                let a = unsafe { *entry.ai_addr.cast::<libc::sockaddr_in>() };
                found.push(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).into());
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let a = unsafe { *entry.ai_addr.cast::<libc::sockaddr_in6>() };
                found.push(Ipv6Addr::from(a.sin6_addr.s6_addr).into());
            }
            _ => {}
        }
        at = entry.ai_next;
    }
    // SAFETY: it came from `getaddrinfo`, and nothing refers to it any more.
    unsafe { libc::freeaddrinfo(list) };
    Ok(found)
}

/// The addresses of both ends as the daemon writes them.
pub fn ends(s: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
    Ok((canonical(s.local_addr()?), canonical(s.peer_addr()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    #[test]
    fn the_shim_is_left_out_and_nothing_else() {
        for (old, new) in [
            ("LD_PRELOAD=/a.so:/x/libunderpass.so", "LD_PRELOAD=/a.so"),
            ("LD_PRELOAD=/x/libunderpass.so /b.so", "LD_PRELOAD=/b.so"),
            ("PATH=/x/libunderpass.so", "PATH=/x/libunderpass.so"),
        ] {
            let mut v = old.as_bytes().to_vec();
            leave_out_shim(&mut v);
            assert_eq!(v, new.as_bytes());
        }
    }

    #[test]
    fn names_addresses_and_counts() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = l.local_addr().unwrap().port();
        assert!(connect("no name has spaces", port).is_err());
        let mut a = connect("localhost", port).unwrap();
        let (mut b, _) = l.accept().unwrap();
        assert_eq!(ends(&a).unwrap().1.port(), port);
        assert!(!readable(a.as_fd(), 0));
        let before = kernel_bytes(&a).unwrap();
        b.write_all(&[1; 1000]).unwrap();
        a.read_exact(&mut [0; 1000]).unwrap();
        assert_eq!(kernel_bytes(&a).unwrap(), before + 1000);
    }
}
