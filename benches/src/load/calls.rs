//! The socket calls of a layer. rsockets have those of the kernel under the same names with an `r`
//! in front; its library is opened at run time, so that the program starts without it.

use anyhow::{bail, ensure, Context, Result};
use clap::ValueEnum;
use libc::{c_int, c_ulong, c_void, pollfd, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::CString;
use std::io;
use std::mem::{size_of, transmute_copy};
use std::net::SocketAddrV4;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Layer {
    Tcp,
    /// The kernel's SMC.
    Smc,
    /// librdmacm's, called directly.
    Rsocket,
}

/// The kernel's number for SMC sockets; the libc crate has none.
pub const AF_SMC: c_int = 43;
const LIBRARY: &str = "librdmacm.so.1";

type Addressed = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;

#[derive(Clone, Copy)]
pub struct Calls {
    family: c_int,
    socket: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int,
    bind: Addressed,
    connect: Addressed,
    listen: unsafe extern "C" fn(c_int, c_int) -> c_int,
    accept: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    send: unsafe extern "C" fn(c_int, *const c_void, size_t, c_int) -> ssize_t,
    recv: unsafe extern "C" fn(c_int, *mut c_void, size_t, c_int) -> ssize_t,
    setsockopt: unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    poll: unsafe extern "C" fn(*mut pollfd, c_ulong, c_int) -> c_int,
    close: unsafe extern "C" fn(c_int) -> c_int,
}

impl Calls {
    pub fn of(layer: Layer) -> Result<Self> {
        match layer {
            Layer::Tcp => Ok(Self::kernel(libc::AF_INET)),
            Layer::Smc => Ok(Self::kernel(AF_SMC)),
            Layer::Rsocket => Self::rsocket(),
        }
    }

    fn kernel(family: c_int) -> Self {
        Calls {
            family,
            socket: libc::socket,
            bind: libc::bind,
            connect: libc::connect,
            listen: libc::listen,
            accept: libc::accept,
            send: libc::send,
            recv: libc::recv,
            setsockopt: libc::setsockopt,
            poll: libc::poll,
            close: libc::close,
        }
    }

    fn rsocket() -> Result<Self> {
        let file = CString::new(LIBRARY)?;
        // SAFETY: a C string; the library's initializers only set up its own tables. It is never
        // closed, so that pointers into it stay good.
        let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        ensure!(!library.is_null(), "no {LIBRARY}");
        let find = |name: &str| -> Result<*mut c_void> {
            let c = CString::new(name)?;
            // SAFETY: the handle is good, see above, and the name is a C string.
            let p = unsafe { libc::dlsym(library, c.as_ptr()) };
            ensure!(!p.is_null(), "{LIBRARY} has no {name}");
            Ok(p)
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: a function pointer has the size of the address that was found, and
                // <rdma/rsocket.h> declares the function with the field's type.
                unsafe { transmute_copy(&find($name)?) }
            };
        }
        Ok(Calls {
            family: libc::AF_INET,
            socket: function!("rsocket"),
            bind: function!("rbind"),
            connect: function!("rconnect"),
            listen: function!("rlisten"),
            accept: function!("raccept"),
            send: function!("rsend"),
            recv: function!("rrecv"),
            setsockopt: function!("rsetsockopt"),
            poll: function!("rpoll"),
            close: function!("rclose"),
        })
    }

    fn open(self) -> Result<Socket> {
        // SAFETY: no pointers.
        let fd = unsafe { (self.socket)(self.family, libc::SOCK_STREAM, 0) };
        ensure!(fd >= 0, "socket: {}", io::Error::last_os_error());
        Ok(Socket { calls: self, fd })
    }

    /// A socket that listens on all addresses.
    pub fn listen(self, port: u16, backlog: c_int) -> Result<Socket> {
        let s = self.open()?;
        let any = SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, port);
        s.addressed(self.bind, any).context("bind")?;
        // SAFETY: no pointers.
        s.done(unsafe { (self.listen)(s.fd, backlog) })
            .context("listen")?;
        Ok(s)
    }

    pub fn connect(self, to: SocketAddrV4) -> Result<Socket> {
        let s = self.open()?;
        s.addressed(self.connect, to)
            .with_context(|| format!("connect to {to}"))?;
        s.no_delay()?;
        Ok(s)
    }

    /// Waits until one of these sockets, all of this layer, can be read; says which can.
    pub fn readable(self, polled: &mut [pollfd]) -> Result<()> {
        // SAFETY: the slice is as long as said, and lives as long as the call.
        let n = unsafe { (self.poll)(polled.as_mut_ptr(), polled.len() as c_ulong, -1) };
        ensure!(n > 0, "poll: {}", io::Error::last_os_error());
        Ok(())
    }
}

/// A socket of a layer. Its number means something to that layer only.
pub struct Socket {
    calls: Calls,
    fd: c_int,
}

impl Socket {
    pub fn accept(&self) -> Result<Socket> {
        let null = std::ptr::null_mut();
        // SAFETY: without an address neither pointer is used.
        let fd = unsafe { (self.calls.accept)(self.fd, null, std::ptr::null_mut()) };
        self.done(fd).context("accept")?;
        let s = Socket {
            calls: self.calls,
            fd,
        };
        s.no_delay()?;
        Ok(s)
    }

    pub fn calls(&self) -> Calls {
        self.calls
    }

    /// For [`Calls::readable`].
    pub fn polled(&self) -> pollfd {
        pollfd {
            fd: self.fd,
            events: libc::POLLIN,
            revents: 0,
        }
    }

    pub fn send_all(&self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            // SAFETY: the slice is as long as said.
            let n = unsafe { (self.calls.send)(self.fd, bytes.as_ptr().cast(), bytes.len(), 0) };
            match usize::try_from(n) {
                Ok(0) => bail!("send took nothing"),
                Ok(n) => bytes = bytes.get(n..).context("send took more than it was given")?,
                Err(_) => bail!("send: {}", io::Error::last_os_error()),
            }
        }
        Ok(())
    }

    /// 0 is the end of the stream; `None`: there is nothing yet, which happens only without `wait`.
    pub fn recv(&self, into: &mut [u8], wait: bool) -> Result<Option<usize>> {
        let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
        // SAFETY: the slice is as long as said, and ours alone during the call.
        let n = unsafe { (self.calls.recv)(self.fd, into.as_mut_ptr().cast(), into.len(), flags) };
        match usize::try_from(n) {
            Ok(n) => Ok(Some(n)),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock && !wait => Ok(None),
                e => bail!("recv: {e}"),
            },
        }
    }

    /// Waits until all of it is there.
    pub fn recv_all(&self, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            let n = self.recv(into, true)?.unwrap_or(0);
            ensure!(n > 0, "the peer hung up");
            into = into.get_mut(n..).context("recv gave more than asked for")?;
        }
        Ok(())
    }

    fn addressed(&self, call: Addressed, a: SocketAddrV4) -> Result<()> {
        let raw = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: a.port().to_be(),
            sin_addr: libc::in_addr {
                s_addr: u32::from_ne_bytes(a.ip().octets()),
            },
            sin_zero: [0; 8],
        };
        let length = size_of::<libc::sockaddr_in>() as socklen_t;
        // SAFETY: a whole address of the length that is said, which lives as long as the call.
        self.done(unsafe { call(self.fd, (&raw const raw).cast(), length) })
    }

    fn no_delay(&self) -> Result<()> {
        let on: c_int = 1;
        let length = size_of::<c_int>() as socklen_t;
        // SAFETY: an integer of the length that is said, which lives as long as the call.
        let r = unsafe {
            let value = (&raw const on).cast();
            (self.calls.setsockopt)(self.fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, value, length)
        };
        self.done(r).context("TCP_NODELAY")
    }

    fn done(&self, r: c_int) -> Result<()> {
        ensure!(r >= 0, "{}", io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it after this.
        unsafe { (self.calls.close)(self.fd) };
    }
}
