//! The `underpass` command.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    underpass_tool::main()
}
