//! The program that runs inside the machines of `make bench-lab`: see `underpass_benches::load`.

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::net::SocketAddrV4;
use std::process::ExitCode;
use std::time::Duration;
use underpass_benches::load::calls::{Calls, Layer};
use underpass_benches::load::{client, server, smc};

#[derive(Parser)]
enum Command {
    /// Serves so many connections.
    Serve {
        layer: Layer,
        port: u16,
        connections: usize,
    },
    /// Measures when told by SIGUSR1, and ends at another one.
    Measure {
        layer: Layer,
        case: client::Case,
        seconds: f64,
        /// Where to connect to, once for each connection.
        to: Vec<SocketAddrV4>,
    },
    #[command(subcommand)]
    Smc(Smc),
}

/// The kernel's SMC.
#[derive(Subcommand)]
enum Smc {
    /// Prepares version 2 for interfaces and RDMA devices.
    Prepare {
        #[arg(long = "netdev")]
        netdevs: Vec<String>,
        #[arg(long = "device")]
        devices: Vec<String>,
    },
    /// What became of the connections, as JSON.
    Show,
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("lab-load: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(c: Command) -> Result<()> {
    match c {
        Command::Serve {
            layer,
            port,
            connections,
        } => server::serve(Calls::of(layer)?, port, connections),
        Command::Measure {
            layer,
            case,
            seconds,
            to,
        } => {
            let time = Duration::try_from_secs_f64(seconds)?;
            client::run(layer, case, &to, time)
        }
        Command::Smc(Smc::Prepare { netdevs, devices }) => smc::set_up(&netdevs, &devices),
        Command::Smc(Smc::Show) => {
            println!("{}", serde_json::to_string(&smc::show()?)?);
            Ok(())
        }
    }
}
