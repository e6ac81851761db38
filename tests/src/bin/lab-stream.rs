//! Sends and receives noise over many TCP connections and compares every byte; see `lab::stream`.
//! Prints `result` and a report as JSON. Exit status: 0 nothing went wrong, 1 something did (the
//! report says what), 2 it could not begin.

use std::io::Write;
use std::process::ExitCode;
use underpass_tests::lab::stream;

fn main() -> ExitCode {
    let spec = std::env::args().nth(1).unwrap_or_default();
    let done = serde_json::from_str(&spec)
        .map_err(anyhow::Error::from)
        .and_then(|s| stream::run(&s))
        .and_then(|report| {
            println!("result {}", serde_json::to_string(&report)?);
            std::io::stdout().flush()?;
            Ok(report.clean())
        });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("lab-stream: {e:#}");
            ExitCode::from(2)
        }
    }
}
