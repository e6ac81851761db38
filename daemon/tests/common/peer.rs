//! Another node's daemon that is none: it speaks the real messages over TLS.

use super::PATIENCE;
use bytes::BytesMut;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use time::{Duration, OffsetDateTime};
use underpass_certificates::{ca, Authority};
use underpassd::config::TlsConfig;
use underpassd::nodes::peers::msg::{Frames, Msg, MIN_VERSION, VERSION};
use underpassd::tasks::channels::tls;

/// Node `a`, whose only peer, `b`, is a test's.
pub struct Nodes {
    dir: tempfile::TempDir,
    at: SocketAddr,
}

fn files(dir: &Path, node: &str) -> TlsConfig {
    TlsConfig {
        ca: dir.join("ca.pem"),
        cert: dir.join(format!("{node}.pem")),
        key: dir.join(format!("{node}.key")),
    }
}

impl Nodes {
    pub fn new() -> Nodes {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let (dir, now) = (tempfile::tempdir().unwrap(), OffsetDateTime::now_utc());
        let life = Duration::hours(1);
        let root = ca("test", life, now).unwrap();
        let authority = Authority::load(&root.cert, &root.key).unwrap();
        for node in ["a", "b"] {
            let pair = authority.node(vec![node.into()], node, life, now).unwrap();
            let of = files(dir.path(), node);
            for (path, text) in [
                (of.ca, &root.cert),
                (of.cert, &pair.cert),
                (of.key, &pair.key),
            ] {
                std::fs::write(path, text).unwrap();
            }
        }
        Nodes {
            dir,
            at: free.local_addr().unwrap(),
        }
    }

    /// What the daemon of `a` is to be configured with. (It finds nobody where it looks for `b`.)
    pub fn config(&self) -> String {
        let of = files(self.dir.path(), "a");
        format!(
            "[node]\nname = 'a'\ncontrol = '{}'\naddresses = ['10.99.0.1']\n\
             [[peer]]\nname = 'b'\ncontrol = '127.0.0.1:1'\naddresses = ['10.99.0.2']\n\
             [tls]\nca = '{}'\ncert = '{}'\nkey = '{}'\n",
            self.at,
            of.ca.display(),
            of.cert.display(),
            of.key.display()
        )
    }

    /// A connection from `b`, which has not said hello.
    pub fn dial(&self) -> Peer {
        let identity = tls::load(&files(self.dir.path(), "b"), "b").unwrap();
        let name = ServerName::try_from("a").unwrap();
        let tls = ClientConnection::new(identity.client, name).unwrap();
        let tcp = TcpStream::connect(self.at).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        Peer {
            stream: StreamOwned::new(tls, tcp),
            frames: Frames::default(),
        }
    }
}

pub struct Peer {
    stream: StreamOwned<ClientConnection, TcpStream>,
    frames: Frames,
}

impl Peer {
    pub fn say_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
        self.stream.flush().unwrap();
    }

    /// `incarnation`: which daemon of its node it is.
    pub fn hello(&mut self, incarnation: u64) {
        let hello = Msg::Hello {
            version: VERSION,
            min_version: MIN_VERSION,
            node: "b".into(),
            incarnation,
            release: "test".into(),
            lookups: 10,
        };
        let mut bytes = BytesMut::new();
        hello.encode(&mut bytes);
        self.say_bytes(&bytes);
    }

    /// The next message; `None`: the channel has ended.
    pub fn hear(&mut self) -> Option<Msg> {
        loop {
            if let Some(m) = self.frames.take().unwrap() {
                return Some(m);
            }
            let mut some = [0; 4096];
            match self.stream.read(&mut some) {
                Ok(n) if n > 0 => self.frames.room().extend_from_slice(&some[..n]),
                _ => return None,
            }
        }
    }

    /// Up to a message that is wanted; `false`: it never came.
    pub fn until(&mut self, is: impl Fn(&Msg) -> bool) -> bool {
        std::iter::from_fn(|| self.hear()).any(|m| is(&m))
    }
}
