//! nginx, unmodified, with one worker, and wrk; and a request by hand.

use super::{free_port, until, Place, Program, Running, PATIENCE};
use anyhow::{bail, ensure, Context, Result};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tempfile::TempDir;

pub struct Nginx {
    pub running: Running,
    pub host: String,
    pub port: u16,
    /// SHA-256 of `/big`, in hex.
    pub big_hash: String,
    pub big_bytes: u64,
    _dir: TempDir,
}

const BIG: usize = 48 << 20;

impl Nginx {
    pub fn start(place: &Place) -> Result<Self> {
        Self::at(place, "127.0.0.1", free_port()?)
    }

    pub fn at(place: &Place, host: &str, port: u16) -> Result<Self> {
        Self::with(place, host, port, "")
    }

    /// Keeps the files that it serves open, as busy servers are configured: a request then costs
    /// hardly anything but its way over the connection.
    pub fn with_open_files(place: &Place) -> Result<Self> {
        let extra = "open_file_cache max=100 inactive=1h; open_file_cache_valid 1h;";
        Self::with(place, "127.0.0.1", free_port()?, extra)
    }

    fn with(place: &Place, host: &str, port: u16, extra: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let d = dir.path();
        let www = d.join("www");
        fs::create_dir(&www)?;
        fs::write(www.join("small"), "x".repeat(612))?;
        let big = noise(BIG);
        let big_hash = hex(&Sha256::digest(&big));
        fs::write(www.join("big"), &big)?;
        let user = if nix::unistd::geteuid().is_root() {
            "user root;"
        } else {
            ""
        };
        let p = d.display();
        let conf = format!(
            "daemon off; worker_processes 1; pid {p}/pid; error_log {p}/error.log; {user}
             events {{ worker_connections 1024; }}
             http {{
               access_log off; sendfile on; keepalive_requests 1000000000; default_type text/plain; {extra}
               client_body_temp_path {p}/t1; proxy_temp_path {p}/t2; fastcgi_temp_path {p}/t3;
               uwsgi_temp_path {p}/t4; scgi_temp_path {p}/t5;
               server {{ listen {host}:{port}; root {p}/www; }}
             }}"
        );
        fs::write(d.join("nginx.conf"), conf)?;
        let mut running = Program::new("nginx", place)
            .arg("-p")
            .arg(d)
            .arg("-c")
            .arg(d.join("nginx.conf"))
            .arg("-e")
            .arg(d.join("error.log"))
            .spawn()?;
        let children = format!("/proc/{0}/task/{0}/children", running.pid());
        // The master listens before it starts its worker.
        let ready = until("nginx has a worker", PATIENCE, || {
            running.has_ended() || fs::read_to_string(&children).is_ok_and(|c| !c.trim().is_empty())
        });
        if ready.is_err() || running.has_ended() {
            let log = fs::read_to_string(d.join("error.log")).unwrap_or_default();
            bail!(
                "nginx: {ready:?} {}{}{log}",
                running.stdout(),
                running.stderr()
            );
        }
        Ok(Nginx {
            running,
            host: host.into(),
            port,
            big_hash,
            big_bytes: BIG as u64,
            _dir: dir,
        })
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}:{}/{path}", self.host, self.port)
    }

    /// Requests per second as wrk counts them; an error in any response is an error here.
    pub fn wrk(&self, place: &Place, connections: u32, seconds: u32) -> Result<f64> {
        let text = Program::new("wrk", place)
            .words(&format!("-t 1 -c {connections} -d {seconds}s"))
            .arg(self.url("small"))
            .check(Duration::from_secs(u64::from(seconds) + 60))?;
        if text.contains("Socket errors") || text.contains("Non-2xx") {
            bail!("wrk saw errors:\n{text}");
        }
        text.lines()
            .find_map(|l| l.trim().strip_prefix("Requests/sec:")?.trim().parse().ok())
            .with_context(|| format!("wrk printed {text}"))
    }
}

/// Bytes without a pattern, the same each time.
pub fn noise(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut v = Vec::with_capacity(len + 8);
    while v.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        v.extend_from_slice(&x.to_le_bytes());
    }
    v.truncate(len);
    v
}

pub fn hex(b: &[u8]) -> String {
    b.iter().map(|b| format!("{b:02x}")).collect()
}

/// The body of one answer over HTTP, at this port of the loopback address.
pub fn http(port: u16, method: &str, path: &str, body: &str) -> Result<String> {
    let mut s = TcpStream::connect(("127.0.0.1", port))?;
    s.set_read_timeout(Some(Duration::from_secs(60)))?;
    write!(
        s,
        "{method} {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut all = String::new();
    s.read_to_string(&mut all)?;
    let (head, body) = all.split_once("\r\n\r\n").context("no answer")?;
    ensure!(
        head.contains(" 200 ") || head.contains(" 400 "),
        "{path}: {all}"
    );
    Ok(body.to_owned())
}
