//! The probe as a program of its own, for images: the tool for containers has it inside.

use std::process::ExitCode;

fn main() -> ExitCode {
    underpass_probe::named();
    underpass_probe::run(std::env::args_os().skip(1))
}
