//! The program that the host talks to inside a lab machine.

use std::path::Path;
use std::process::ExitCode;
use underpass_tests::lab::agent;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "serve"] => agent::serve(),
        [_, "ask", socket, line] => agent::ask(Path::new(socket), line),
        _ => Err(anyhow::anyhow!(
            "lab-agent serve | lab-agent ask SOCKET LINE"
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("lab-agent: {e:#}");
            ExitCode::FAILURE
        }
    }
}
