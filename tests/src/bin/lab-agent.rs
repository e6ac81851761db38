//! The program that the host talks to inside a lab machine.

use std::process::ExitCode;
use underpass_tests::lab::agent;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "serve"] => agent::serve(),
        _ => Err(anyhow::anyhow!("lab-agent serve")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("lab-agent: {e:#}");
            ExitCode::FAILURE
        }
    }
}
