//! Two processes, usually on two machines, that try on real verbs what the engine relies on, and
//! print how the devices behave. Exits with an error when something is not as it must be.
//!
//! ```text
//! verbs_pair serve PORT                  one end
//! verbs_pair try ADDRESS PORT [cut|idle]  the other. In the last step it makes the first abort; with
//!                                         `cut` or `idle` it prints CUT and expects that somebody
//!                                         cuts the wire, for good or for less than 5 s
//! verbs_pair watch SECONDS               prints events and changes of the devices of this machine
//! ```
//!
//! The two exchange addresses of queue pairs over TCP, line by line. Where no RoCE or InfiniBand port has
//! the address of that connection, an iWARP device is tried; then only connecting and transfers.

mod pair {
    pub mod area;
    pub mod end;
    pub mod steps;
    pub mod watch;
}

use pair::{end::Control, steps, watch};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", port] => {
            let (stream, _) = TcpListener::bind(format!("[::]:{port}"))?.accept()?;
            steps::serve(Control::new(stream)?)
        }
        ["try", address, port, ref rest @ ..] => {
            let stream = connect(&format!("{address}:{port}"))?;
            let last = match rest {
                ["cut"] => steps::Last::Cut,
                ["idle"] => steps::Last::Idle,
                _ => steps::Last::Die,
            };
            steps::run(Control::new(stream)?, last)
        }
        ["watch", seconds] => watch::run(Duration::from_secs(seconds.parse()?)),
        _ => {
            Err("usage: verbs_pair serve PORT | try ADDRESS PORT [cut|idle] | watch SECONDS".into())
        }
    }
}

/// The other machine may still be booting.
fn connect(to: &str) -> Result<TcpStream> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match TcpStream::connect(to) {
            Ok(s) => return Ok(s),
            Err(e) if Instant::now() > end => return Err(e.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}
